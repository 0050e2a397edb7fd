"""Training over an Azure storage that fails: it goes on, the status says why, nothing is lost, it heals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from eventual import wait_until
from stepfast.errors import StorageUnavailable
from stepfast.storage import Store, open_store

if TYPE_CHECKING:
    from conftest import Azurite
    from faults import Proxy


class Cloud:
    """A container behind the proxy, and the same container without."""

    def __init__(self, azurite: Azurite, proxy: Proxy) -> None:
        self.proxy = proxy
        self.container = azurite.new_container()
        self.uri = f"abfs://{self.container}/jobs"
        options = {"connection_string": azurite.connection_string(proxy.port)}
        self.environment = {"STEPFAST_STORAGE_OPTIONS": json.dumps(options)}
        self.options = {"connection_string": azurite.connection_string()}
        self.store: Store = open_store(self.uri, options=self.options)
        self.create = azurite.create_container


@pytest.fixture
def cloud(azurite: Azurite, proxy: Proxy) -> Iterator[Cloud]:
    made = Cloud(azurite, proxy)
    yield made
    made.store.close()


@pytest.fixture
def node(cloud: Cloud, start_node: Callable[..., Any]) -> Any:
    return start_node(cloud.uri, environment=cloud.environment)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("500 503", "50[03]"),
        ("429:1", "429"),
        ("reset", "read|upload|create"),
        ("silent", "no answer in time"),
        ("lost", "read|upload|create"),
        ("403", "403"),
    ],
)
def test_training_goes_on_while_the_service_fails_and_persisting_goes_on_when_it_heals(
    cloud: Cloud, node: Any, train: Callable[..., Any], fault: str, says: str
) -> None:
    training = train(node)
    proxy = cloud.proxy
    training.live_through(lambda: proxy.break_down(fault), proxy.heal, says, cloud.store)
    training.check_history(cloud.store)


def test_container_that_is_missing_is_named_and_used_once_it_is_there(
    cloud: Cloud, start_node: Callable[..., Any], train: Callable[..., Any], bench: Any
) -> None:
    uri = f"{cloud.uri.rsplit('/', 1)[0]}-late/jobs"
    node = start_node(uri, environment=cloud.environment)
    training = train(node)
    says = f"{uri}.*the container does not exist; create it"
    training.save_until(lambda: re.search(says, node.error or ""), "the status says why")
    assert max(training.stalls) < bench.STALL_SECONDS
    newest = training.save()

    cloud.create(f"{cloud.container}-late")
    newest.wait(timeout_seconds=90)
    with closing(open_store(uri, options=cloud.options)) as store:
        assert newest.step in bench.verify(store)
        training.check_history(store)
    assert node.error is None


def test_slow_service_delays_commits_and_nothing_else(
    cloud: Cloud, start_node: Callable[..., Any], train: Callable[..., Any], bench: Any
) -> None:
    node = start_node(cloud.uri, environment=cloud.environment, options=())  # as patient as agents are
    training = train(node)
    training.save().wait(timeout_seconds=90)
    cloud.proxy.break_down("slow")
    training.stalls.clear()
    for _ in range(30):
        newest = training.save()
        assert node.error is None
    assert max(training.stalls) < bench.STALL_SECONDS
    newest.wait(timeout_seconds=90)
    assert newest.step in bench.verify(cloud.store, at_least=[1])
    cloud.proxy.heal()
    training.check_history(cloud.store)


def test_steps_whose_manifest_was_refused_are_all_committed_once_it_heals(
    cloud: Cloud, node: Any, train: Callable[..., Any], bench: Any
) -> None:
    training = train(node)
    training.save().wait(timeout_seconds=90)
    cloud.proxy.break_down("403", matching="manifest.json")
    parted = []
    for _ in range(3):
        saved = training.save()
        wait_until(lambda: bench.parts(cloud.store, saved.step), "the part is there")  # noqa: B023  # called here
        wait_until(lambda: node.error, "the status says why")
        parted.append(saved)
        assert re.search(r"step \d+ is persisted but not committed: .*403", node.error)
        assert cloud.uri in node.error
    assert bench.committed(cloud.store) == [1]
    with pytest.raises(StorageUnavailable, match="403"):
        parted[0].wait(timeout_seconds=0.1)

    cloud.proxy.heal()
    for saved in parted:
        saved.wait(timeout_seconds=90)
    assert bench.verify(cloud.store) == [1, 2, 3, 4]
    wait_until(lambda: node.error is None, "the status forgets the failure")
    assert node.job().latest_persisted_step == 4
    training.check_history(cloud.store)


def test_nothing_of_a_save_is_lost_when_the_agent_ends_right_after_it(
    cloud: Cloud, node: Any, train: Callable[..., Any], bench: Any
) -> None:
    training = train(node)
    for _ in range(3):
        training.save()
    training.end()
    node.terminate()
    assert 3 in bench.verify(cloud.store)
    assert 3 in bench.row_steps(cloud.store, "Committed")
