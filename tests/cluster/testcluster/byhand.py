"""What `cluster.py` does with a cluster that outlives the command."""

from __future__ import annotations

import argparse

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.cluster import Cluster, check_machine
from testcluster.images import pause


def run(options: argparse.Namespace) -> None:
    match options.command:
        case "up":
            _up(options)
        case "list":
            for claim in Claim.existing():
                print(claim.number, claim.folder)
        case "env":
            _print_environment(Cluster.open(options.number))
        case "load":
            Cluster.open(options.number).load(*options.archives)
        case "kill":
            Cluster.open(options.number).nodes[options.node].kill()
        case "start":
            Cluster.open(options.number).nodes[options.node].start()
        case "down":
            claims = [Claim.open(number) for number in options.numbers] or Claim.existing()
            for claim in claims:
                claim.release()


def _up(options: argparse.Namespace) -> None:
    check_machine()
    cluster = Cluster(Claim.take(owned=False), Binaries.find())
    try:
        cluster.up(options.nodes, images=[pause(), *options.image])
    except BaseException:
        cluster.down()
        raise
    _print_environment(cluster)


def _print_environment(cluster: Cluster) -> None:
    print(f"export STEPFAST_CLUSTER={cluster.claim.number}")
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"export PATH={cluster.binaries.folders[0]}:$PATH")
