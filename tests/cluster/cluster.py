"""A cluster by hand: `python tests/cluster/cluster.py up`, and what it prints. Needs root.

build                 build the programs (done by `up`, too)
build-images          build the images of this checkout: operator, sidecar, trainer
up [--nodes N] [--image ARCHIVE …]
list                  the clusters of this machine
env NUMBER            `eval` this: KUBECONFIG, and kubectl and helm on the PATH
load NUMBER ARCHIVE … images onto every node
images NUMBER         the images of this checkout onto every node; `eval` what it prints: their names
namespace NUMBER NAME makes a namespace for jobs
kill NUMBER NODE      loses a node; `start NUMBER NODE` boots it again
down [NUMBER …]       without a number: all
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from testcluster.binaries import Binaries
from testcluster.unavailable import Unavailable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build")
    commands.add_parser("build-images")
    commands.add_parser("list")
    up = commands.add_parser("up")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--image", type=Path, action="append", default=[])
    for name in ("env", "load", "images", "namespace", "kill", "start"):
        commands.add_parser(name).add_argument("number", type=int)
    commands.choices["load"].add_argument("archives", type=Path, nargs="+")
    for name in ("kill", "start"):
        commands.choices[name].add_argument("node")
    commands.choices["namespace"].add_argument("name")
    commands.add_parser("down").add_argument("numbers", type=int, nargs="*")
    options = parser.parse_args()
    try:
        if options.command == "build":
            print(*Binaries.find().folders)
        else:
            # The build must work with any Python; all else needs the project's.
            from testcluster import byhand

            byhand.run(options)
    except Unavailable as reason:
        print(f"tests/cluster: A CLUSTER CANNOT RUN HERE: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
