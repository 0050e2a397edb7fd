"""The Azure store behind a proxy that fails as networks and services do."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import adlfs
import pytest

from stepfast.errors import ObjectNotFound, SpecError, StorageForbidden, StorageFull, StorageUnavailable, UploadLost
from stepfast.layout import CHUNK_BYTES
from stepfast.storage import open as opening
from stepfast.storage import open_store
from stepfast.storage.azure import AzureStore
from stepfast.storage.retry import Retry

if TYPE_CHECKING:
    from faults import Proxy  # the fixture's module, see tests/conftest.py


class Azurite(Protocol):
    """What is used of the fixture in conftest.py."""

    port: int

    def connection_string(self, port: int | None = None) -> str: ...
    def new_container(self) -> str: ...


@pytest.fixture
def open_behind_proxy(azurite: Azurite, proxy: Proxy) -> Iterator[Callable[[float], AzureStore]]:
    """Opens stores behind the proxy, given the seconds that they wait for an answer."""
    opened: list[AzureStore] = []

    def open_it(timeout_seconds: float) -> AzureStore:
        filesystem = adlfs.AzureBlobFileSystem(
            connection_string=azurite.connection_string(proxy.port), skip_instance_cache=True
        )
        retry = Retry(first_delay_seconds=0.01)
        container = azurite.new_container()
        opened.append(
            AzureStore(filesystem, container, "root", uri="abfs://test", timeout_seconds=timeout_seconds, retry=retry)
        )
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def store(open_behind_proxy: Callable[[float], AzureStore]) -> AzureStore:
    """Patient enough for every list of faults below, with timeouts that a test can wait for."""
    return open_behind_proxy(2.0)


@pytest.fixture
def patient_store(open_behind_proxy: Callable[[float], AzureStore]) -> AzureStore:
    """For many bytes and no fault, of a service that may be busy."""
    return open_behind_proxy(20.0)


FAILING = ["500", "503", "429", "408", "reset", "cut", "lost", "silent"]
PASSING = [*FAILING, "slow"]


@pytest.mark.parametrize("fault", FAILING)
def test_create_is_exact_whatever_the_network_does(store: AzureStore, proxy: Proxy, fault: str) -> None:
    store.replace("warm", b"")  # so that the connection is one that is used again
    proxy.fail(fault, fault, matching="PUT")
    assert store.create("step/manifest.json", b"mine") is True
    assert proxy.faults == []
    proxy.fail(fault, matching="PUT")
    assert store.create("step/manifest.json", b"mine") is False
    assert store.read("step/manifest.json") == b"mine"


def test_answer_that_is_slow_is_waited_for(open_behind_proxy: Callable[[float], AzureStore], proxy: Proxy) -> None:
    store = open_behind_proxy(20.0)
    proxy.fail("slow", "slow", matching="PUT")
    assert store.create("step/manifest.json", b"mine") is True
    assert proxy.faults == ["slow"]
    assert store.create("step/manifest.json", b"mine") is False
    assert proxy.faults == []


@pytest.mark.parametrize("fault", PASSING)
def test_every_operation_survives_what_passes(store: AzureStore, proxy: Proxy, fault: str) -> None:
    proxy.fail(fault, fault)
    store.replace("f/x", b"0123456789")
    proxy.fail(fault)
    assert store.read("f/x") == b"0123456789"
    buffer = bytearray(4)
    proxy.fail(fault)
    store.read_range("f/x", 3, memoryview(buffer))
    assert bytes(buffer) == b"3456"
    proxy.fail(fault)
    assert [(info.name, info.size_bytes) for info in store.list("f")] == [("x", 10)]
    proxy.fail(fault)
    store.delete("f/x")
    store.replace("f/deep/y", b"1")
    proxy.fail(fault, fault)
    store.delete_folder("f")
    assert list(store.list("")) == []


@pytest.mark.parametrize("fault", [*PASSING, "deaf"])
def test_upload_survives_what_passes(store: AzureStore, proxy: Proxy, fault: str) -> None:
    store.replace("warm", b"")
    data = memoryview(bytearray(range(256)) * (3 * CHUNK_BYTES // 256) + bytearray(b"tail"))
    upload = store.upload("step/data", len(data))
    # A stalled body is given up after the time that its bytes may take: too long for these tests but once.
    proxy.fail(*[fault] * (1 if fault == "deaf" else 3), matching="comp=block&")
    offsets = range(0, len(data), upload.chunk_bytes)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda at: upload.put(at, data[at : at + upload.chunk_bytes]), offsets))
    assert proxy.faults == []
    if fault != "deaf":
        proxy.fail(fault, matching="comp=blocklist")
    upload.finish()
    assert proxy.faults == []
    assert store.read("step/data") == bytes(data)


@pytest.mark.parametrize(
    ("status", "expected"),
    [("401", StorageForbidden), ("403", StorageForbidden), ("400", StorageForbidden), ("507", StorageFull)],
)
def test_refusals_are_raised_at_once(store: AzureStore, proxy: Proxy, status: str, expected: type[Exception]) -> None:
    store.replace("f/x", b"1")
    operations: list[Callable[[], object]] = [
        lambda: store.read("f/x"),
        lambda: store.read_range("f/x", 0, memoryview(bytearray(1))),
        lambda: store.create("f/y", b""),
        lambda: store.replace("f/x", b""),
        lambda: store.list("f"),
        lambda: store.delete("f/x"),
        lambda: store.delete_folder("f"),
        lambda: store.upload("f/z", 1).put(0, memoryview(b"1")),
        lambda: store.upload("f/z", 0).finish(),
    ]
    for operation in operations:
        proxy.fail(status)
        before = len(proxy.requests)
        with pytest.raises(expected):
            operation()
        assert len(proxy.requests) == before + 1


def test_a_store_that_stays_down_is_unavailable_at_the_deadline(azurite: Azurite, proxy: Proxy) -> None:
    options = {"connection_string": azurite.connection_string(proxy.port)}
    opened = open_store("abfs://nowhere/x", options=options, deadline_seconds=2.0)
    proxy.fail(*["silent", "503", "reset"] * 50)
    start = time.monotonic()
    with pytest.raises(StorageUnavailable, match="read f/x"):
        opened.read("f/x")
    assert time.monotonic() - start < 5
    opened.close()


def test_a_port_that_nobody_listens_on_is_unavailable(azurite: Azurite) -> None:
    options = {"connection_string": azurite.connection_string(1)}
    opened = open_store("abfs://nowhere/x", options=options, deadline_seconds=0.5)
    with pytest.raises(StorageUnavailable):
        opened.list("")
    opened.close()


def test_wrong_key_and_missing_container_are_forbidden(azurite: Azurite) -> None:
    connection = azurite.connection_string()
    wrong = connection.replace("AccountKey=Eby8", "AccountKey=AAAA")
    for uri, options in [("abfs://some", {"connection_string": wrong}), ("abfs://no-such", {})]:
        opened = open_store(uri, options={"connection_string": connection, **options})
        with pytest.raises(StorageForbidden):
            opened.list("")
        with pytest.raises(StorageForbidden):
            opened.create("x", b"")
        with pytest.raises(StorageForbidden):
            opened.read("x")
        opened.close()


def test_two_uploads_of_one_object_never_mix(patient_store: AzureStore) -> None:
    one, other = patient_store.upload("x", CHUNK_BYTES + 1), patient_store.upload("x", CHUNK_BYTES + 1)
    one.put(0, memoryview(b"1" * CHUNK_BYTES))
    other.put(0, memoryview(b"2" * CHUNK_BYTES))
    one.put(CHUNK_BYTES, memoryview(b"1"))
    other.put(CHUNK_BYTES, memoryview(b"2"))
    one.finish()
    with pytest.raises(UploadLost, match="another writer"):
        other.finish()
    assert patient_store.read("x") == b"1" * (CHUNK_BYTES + 1)


def test_ranges_larger_than_a_request_are_read(patient_store: AzureStore) -> None:
    data = memoryview(bytearray(range(256)) * (40 * 1024 * 1024 // 256))
    upload = patient_store.upload("x", len(data))
    for offset in range(0, len(data), upload.chunk_bytes):
        upload.put(offset, data[offset : offset + upload.chunk_bytes])
    upload.finish()
    buffer = bytearray(len(data) - 1)
    patient_store.read_range("x", 1, memoryview(buffer))
    assert buffer == data[1:]
    with pytest.raises(ObjectNotFound):
        patient_store.read_range("x", 2, memoryview(buffer))


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("abfs://c/a/b", ("c", "a/b", {})),
        ("az://c", ("c", "", {})),
        ("abfss://c@acc.dfs.core.windows.net/a", ("c", "a", {"account_name": "acc"})),
        ("abfs://acc.dfs.core.windows.net/c/a", ("c", "a", {"account_name": "acc"})),
        (
            "abfss://c@acc.dfs.core.usgovcloudapi.net/a",
            ("c", "a", {"account_name": "acc", "account_host": "acc.blob.core.usgovcloudapi.net"}),
        ),
    ],
    ids=["container", "bare container", "account", "account first", "sovereign cloud"],
)
def test_account_and_container_come_from_the_uri(uri: str, expected: tuple[str, str, dict[str, str]]) -> None:
    assert opening._azure_location(uri) == expected


def test_contradictory_credentials_are_refused(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string())
    with pytest.raises(StorageForbidden, match="unset it"):
        open_store("abfs://c", options={"account_name": "a", "account_key": "k"})
    with pytest.raises(StorageForbidden, match="in the account 'acc'"):
        open_store("abfss://c@acc.dfs.core.windows.net/a")


def test_options_come_from_the_environment_too(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFAST_STORAGE_OPTIONS", json.dumps({"connection_string": azurite.connection_string()}))
    opened = open_store(f"az://{azurite.new_container()}/x")
    assert opened.create("y", b"1")
    opened.close()
    monkeypatch.setenv("STEPFAST_STORAGE_OPTIONS", "[")
    with pytest.raises(SpecError, match="not JSON"):
        open_store("az://c")


def test_unknown_storage_and_missing_packages_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="storageUri"):
        open_store("nonsense://x")
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(StorageForbidden, match=r"pip install 'stepfast\[azure\]'"):
        open_store("abfs://c")
