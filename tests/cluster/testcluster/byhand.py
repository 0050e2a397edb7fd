"""What `cluster.py` does with a cluster that outlives the command."""

from __future__ import annotations

import argparse

from testcluster.binaries import Binaries
from testcluster.claim import Claim
from testcluster.cluster import Cluster, check_machine
from testcluster.images import pause, project_images
from testcluster.jobnamespace import create_job_namespace


def run(options: argparse.Namespace) -> None:
    match options.command:
        case "up":
            _up(options)
        case "build-images":
            pause()
            print(*project_images().archives, sep="\n")
        case "list":
            for claim in Claim.existing():
                print(claim.number, claim.folder)
        case "down":
            for claim in [Claim.open(number) for number in options.numbers] or Claim.existing():
                claim.release()
        case _:
            _change(Cluster.open(options.number), options)


def _change(cluster: Cluster, options: argparse.Namespace) -> None:
    """One command to a cluster that runs."""
    match options.command:
        case "env":
            _print_environment(cluster)
        case "load":
            cluster.load(*options.archives)
        case "images":
            built = project_images()
            cluster.load(*built.archives)
            for name in ("operator", "sidecar", "trainer"):
                print(f"export STEPFAST_{name.upper()}_IMAGE={getattr(built, name)}")
        case "namespace":
            create_job_namespace(cluster, options.name)
        case "kill":
            cluster.nodes[options.node].kill()
        case "start":
            cluster.nodes[options.node].start()


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
