"""What nodes' networks lose and lead astray, rule by rule in the namespaces of the nodes. Each is undone in the end; a
node that boots begins without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from testcluster.kubenode import Node
from testcluster.waiting import CommandFailed

# A connection that is known already does not meet new rules for addresses: it is forgotten, and met anew.
_NONE_KNOWN = "0 flow entries have been deleted"


@contextmanager
def cut(node: Node, peer: str, *, port: int | None = None) -> Iterator[None]:
    """Nothing passes between the node's pods and those addresses (one, or a network), or one TCP port there: packets
    vanish, as when a cable is pulled.
    """
    there: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    if port is not None:
        there, back = (("--protocol", "tcp", side, str(port)) for side in ("--dport", "--sport"))
    rules = [
        ("FORWARD", "--destination", peer, *there, "--jump", "DROP"),
        ("FORWARD", "--source", peer, *back, "--jump", "DROP"),
    ]
    with _rules(node, "filter", *rules):
        yield


@contextmanager
def redirected(node: Node, address: str, port: int, to_port: int) -> Iterator[None]:
    """What the node's pods send to that port of the address arrives at another of its ports; connections that are open
    are reset, at the begin and in the end.
    """
    rule = (
        "PREROUTING", "--protocol", "tcp", "--destination", address, "--dport", str(port),
        "--jump", "DNAT", "--to-destination", f"{address}:{to_port}",
    )  # fmt: skip
    try:
        with _rules(node, "nat", rule):
            _forget_connections(node, address, port)
            yield
    finally:
        if node.is_running:
            _forget_connections(node, address, port)


@contextmanager
def _rules(node: Node, table: str, *rules: tuple[str, ...]) -> Iterator[None]:
    for rule in rules:
        node.run("iptables", "--wait", "--table", table, "--insert", *rule)
    try:
        yield
    finally:
        if node.is_running:
            for rule in rules:
                node.run("iptables", "--wait", "--table", table, "--delete", *rule)


def _forget_connections(node: Node, address: str, port: int) -> None:
    try:
        node.run("conntrack", "--delete", "--proto", "tcp", "--orig-dst", address, "--dport", str(port))
    except CommandFailed as error:
        if _NONE_KNOWN not in str(error):
            raise
