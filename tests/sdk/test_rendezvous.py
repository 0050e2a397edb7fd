"""The launcher waits for the rendezvous' name: pods start before their names are published."""

from __future__ import annotations

import pytest

from stepfast.errors import GangError
from stepfast.rendezvous import host_of, wait_for_host


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        pytest.param("a1-n00000.gpt:29400", "a1-n00000.gpt", id="name-and-port"),
        pytest.param("a1-n00000.gpt", "a1-n00000.gpt", id="name"),
        pytest.param("127.0.0.1:0", "127.0.0.1", id="address-and-port"),
        pytest.param("[::1]:29400", "::1", id="ipv6-and-port"),
        pytest.param("::1", "::1", id="ipv6"),
        pytest.param("", "", id="none"),
    ],
)
def test_host_of_an_endpoint(endpoint: str, host: str) -> None:
    assert host_of(endpoint) == host


class Names:
    """A DNS in which a name appears after so many seconds, and a clock that only sleeping moves."""

    def __init__(self, appears_after: float) -> None:
        self.now, self.appears_after, self.asked = 0.0, appears_after, 0

    def resolve(self, host: str) -> None:
        self.asked += 1
        if self.now < self.appears_after:
            raise OSError(-2, f"{host}: Name or service not known")

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_waits_until_the_name_is_published() -> None:
    names = Names(3.0)
    wait_for_host("n0.gpt:29400", resolve=names.resolve, sleep=names.sleep, clock=lambda: names.now)
    assert 3.0 <= names.now < 4.0


def test_name_that_is_never_published_is_an_error_that_names_it() -> None:
    names = Names(1e9)
    with pytest.raises(GangError, match=r"'n0\.gpt' could not be looked up for 60 s"):
        wait_for_host(
            "n0.gpt:29400", timeout_seconds=60.0, resolve=names.resolve, sleep=names.sleep, clock=lambda: names.now
        )
    assert names.asked > 10


def test_nothing_to_wait_for_without_an_endpoint() -> None:
    names = Names(1e9)
    wait_for_host("", resolve=names.resolve, sleep=names.sleep, clock=lambda: names.now)
    assert names.asked == 0
