"""From a Checkpointer through the agent into Azure, and back in a new process: each bit, from both tiers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from stepfast.errors import StorageForbidden, StorageUnavailable
from stepfast.layout import CHUNK_BYTES
from stepfast.storage import open_store
from stepfast.torch import Checkpointer, every

if TYPE_CHECKING:
    from conftest import Azurite
    from faults import Proxy

# Saves a state of several chunks, or restores it; says a digest of every bit of it, and the step.
WORK = """
import hashlib, json, sys, torch
from stepfast.torch import Checkpointer, every
command, size = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
state = {"large": torch.zeros(size // 2, dtype=torch.bfloat16), "note": "", "nested": [1, {"pi": 3.5}]}
checkpointer = Checkpointer(interval=every(steps=1000), model=model, optimizer=optimizer, state=state)

def digest():
    found = hashlib.sha256()
    for tensor in (*model.state_dict().values(), state["large"], torch.get_rng_state()):
        found.update(tensor.view(torch.uint8).numpy().tobytes())
    for values in optimizer.state_dict()["state"].values():
        for name in sorted(values):
            found.update(values[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    found.update(json.dumps([state["note"], state["nested"]]).encode())
    return found.hexdigest()

if command == "save":
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        state["large"].view(torch.int16).random_(-30000, 30000)
        state["note"] = f"at step {step}"
        checkpointer.save(step).wait(timeout_seconds=60)
    print(json.dumps([3, digest()]))
    checkpointer.close(timeout_seconds=60)
else:
    model(torch.randn(1, 64)).sum().backward()
    optimizer.step()
    print(json.dumps([checkpointer.restore(), digest()]))
"""


@pytest.fixture
def uri(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """A container of Azurite's, for which this process and those it starts have the credentials."""
    options = {"connection_string": azurite.connection_string()}
    monkeypatch.setenv("STEPFAST_STORAGE_OPTIONS", json.dumps(options))
    return f"abfs://{azurite.new_container()}/jobs"


def work(node: Any, command: str, size_bytes: int) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", WORK, command, str(size_bytes)],
        env=node.rank_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout)
    return answer


def test_state_of_many_chunks_comes_back_bit_for_bit_from_memory_and_from_azure(
    uri: str, azurite: Azurite, proxy: Proxy, start_node: Callable[..., Any], bench: Any
) -> None:
    size_bytes = 3 * CHUNK_BYTES + 4242
    options = {"connection_string": azurite.connection_string(proxy.port)}
    node = start_node(
        uri,
        memory_limit=16 * CHUNK_BYTES,
        environment={"STEPFAST_STORAGE_OPTIONS": json.dumps(options)},
        options=(),
    )
    saved = work(node, "save", size_bytes)
    blocks = [line for line in proxy.requests if "comp=block&" in line and "global_step3/" in line]
    assert len(blocks) == 4
    assert work(node, "restore", size_bytes) == saved
    assert node.job().ranks[0].restored_tier == "Memory"

    node.terminate()
    node.forget_memory()
    node.start()
    assert work(node, "restore", size_bytes) == saved
    assert node.job().ranks[0].restored_tier == "Persistent"
    with closing(open_store(uri)) as store:
        assert bench.verify(store) == [1, 2, 3]
        check_rows(bench.history(store), node.run, size_bytes)


def check_rows(rows: list[dict[str, str]], run: str, size_bytes: int) -> None:
    assert [row["global_step"] for row in rows] == ["1", "2", "3"]
    times = [datetime.fromisoformat(row["saved_time"]) for row in rows]
    assert times == sorted(times)
    for row in rows:
        assert (row["run"], row["outcome"], row["world_size"]) == (run, "Committed", "1")
        assert size_bytes <= int(row["size_bytes"]) < size_bytes + (1 << 20)
        assert 0 < float(row["stall_seconds"]) < float(row["duration_seconds"])
        throughput = int(row["size_bytes"]) / 1e6 / float(row["duration_seconds"])
        assert float(row["throughput_mb_per_second"]) == pytest.approx(throughput, abs=1e-3)


@pytest.fixture
def reader() -> Iterator[Callable[..., Checkpointer]]:
    """Makes Checkpointers that have saved nothing."""
    made: list[Checkpointer] = []

    def make(node: Any) -> Checkpointer:
        environment = node.environment_of()
        made.append(Checkpointer(interval=every(steps=1000), environment=environment, state={"x": 1}))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer._end()


def test_restore_says_that_the_service_fails_and_works_when_it_heals(
    uri: str, azurite: Azurite, proxy: Proxy, start_node: Callable[..., Any], reader: Callable[..., Any]
) -> None:
    options = {"connection_string": azurite.connection_string(proxy.port)}
    node = start_node(uri, environment={"STEPFAST_STORAGE_OPTIONS": json.dumps(options)})
    proxy.break_down("503")
    checkpointer = reader(node)
    with pytest.raises(StorageUnavailable, match="503"):
        checkpointer.restore()
    proxy.heal()
    assert checkpointer.restore() == 0


@pytest.mark.parametrize(
    ("storage_uri", "options", "says"),
    [
        ("abfs://some/jobs", "[", "STEPFAST_STORAGE_OPTIONS: is not JSON"),
        ("abfs://some/jobs", '{"connection_string": "nonsense"}', "abfs://some/jobs"),
        ("nonsense://some/jobs", "{}", "storageUri"),
    ],
    ids=["options", "credentials", "scheme"],
)
def test_storage_that_cannot_be_opened_says_why_and_training_goes_on(
    start_node: Callable[..., Any], train: Callable[..., Any], storage_uri: str, options: str, says: str
) -> None:
    node = start_node(storage_uri, environment={"STEPFAST_STORAGE_OPTIONS": options})
    training = train(node)
    training.save_until(lambda: node.error, "the status says why")
    assert says in node.error
    assert storage_uri in node.error
    newest = training.save()
    with pytest.raises(StorageUnavailable, match=f"step {newest.step}"):
        newest.wait(timeout_seconds=0.1)


def test_wrong_key_is_forbidden(azurite: Azurite, start_node: Callable[..., Any], reader: Callable[..., Any]) -> None:
    wrong = azurite.connection_string().replace("AccountKey=Eby8", "AccountKey=AAAA")
    uri = f"abfs://{azurite.new_container()}/jobs"
    environment = {"STEPFAST_STORAGE_OPTIONS": json.dumps({"connection_string": wrong})}
    node = start_node(uri, environment=environment)
    with pytest.raises(StorageForbidden, match="403"):
        reader(node).restore()
