"""Throughput of writes to a real Azurite, side by side: `python -m benchmarks.stores.blob [--quick]`.

The same bytes go there by this project's store (as the agent's persister calls it), by the whole way from a save to
its commit, and by what others would use. The ways take turns in this process; each round has an Azurite of its own,
which keeps everything in memory and gives little of it back.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.install import FOLDER, install, missing_reason
from benchmarks.processes.agentprocess import memory_limit, running_agent
from benchmarks.processes.procfs import families, processor_seconds
from benchmarks.results import RESULTS, add_record
from benchmarks.stores.azurite import ACCOUNT, AZURITE_VERSION, KEY, Azurite, running_azurite
from benchmarks.workload import MIB

from stepfast.commit import FileUpload
from stepfast.environment import read_environment
from stepfast.storage import open_store
from stepfast.storage.open import OPTIONS_VARIABLE
from stepfast.torch import Checkpointer, every
from stepfast_sidecar.persist import UPLOAD_THREADS, chunk_of

SIZES = (64 * MIB, 256 * MIB, 1024 * MIB)
QUICK_SIZES = (32 * MIB,)
_OBSTORE_CHUNK_BYTES = 8 * MIB
_SLOTS = 2

Way = Callable[[str], None]
"""Writes the bytes under that name; returns when they are there for good."""


def measure_uploads(sizes: Sequence[int] = SIZES, rounds: int = 5, results: Path = RESULTS) -> None:
    """Adds a `blob` record for each size: for each way, a sample per round."""
    for size in sizes:
        samples: dict[str, list[dict[str, float]]] = {}
        for turn in range(rounds):
            with tempfile.TemporaryDirectory(prefix="bench-azurite-") as folder:
                with running_azurite(Path(folder)) as azurite, _data(size) as data:
                    _measure_round(azurite, data, Path(folder), turn, samples)
        record = add_record(
            "blob", results=results, size_bytes=size, azurite=f"{AZURITE_VERSION}, in memory", rounds=rounds,
            missing={name: reason for name in ("obstore",) if (reason := missing_reason(name))}, samples=samples,
        )  # fmt: skip
        print(json.dumps(record))


def _measure_round(
    azurite: Azurite, data: memoryview, folder: Path, turn: int, samples: dict[str, list[dict[str, float]]]
) -> None:
    container = azurite.new_container()
    with _ways(azurite, container, data, folder) as ways:
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody is always the first
            sample = _timed(ways[name], f"{name}-{turn}", azurite)
            samples.setdefault(name, []).append(sample)
            print(f"{len(data) / MIB:.0f} MiB {name}: {len(data) / 1e6 / sample['seconds']:.0f} MB/s", flush=True)


def _timed(way: Way, name: str, azurite: Azurite) -> dict[str, float]:
    """Seconds, and the processor time that the server and that we (children included) took of them."""
    server, ours = [azurite.process_id], families([os.getpid()]) - {azurite.process_id}
    before = processor_seconds(server), processor_seconds(ours)
    begin = time.perf_counter()
    way(name)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "server_processor_seconds": round(processor_seconds(server) - before[0], 2),
        "client_processor_seconds": round(processor_seconds(ours) - before[1], 2),
    }


@contextmanager
def _ways(azurite: Azurite, container: str, data: memoryview, folder: Path) -> Iterator[Mapping[str, Way]]:
    """All ways, warm: each has written a little."""
    with _stepfast_store(azurite, container, data) as store, _stepfast_agent(azurite, container, data, folder) as agent:
        ways = {"stepfast_store": store, "stepfast_agent": agent, **_adlfs(azurite, container, data)}
        if not missing_reason("obstore"):
            ways.update(_obstore(azurite, container, data))
        yield ways


@contextmanager
def _data(size_bytes: int) -> Iterator[memoryview]:
    """Shared memory, as a slot is, full of bytes."""
    shared = mmap.mmap(-1, size_bytes)
    torch.frombuffer(shared, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    yield memoryview(shared)


@contextmanager
def _stepfast_store(azurite: Azurite, container: str, data: memoryview) -> Iterator[Way]:
    """`FileUpload` with the persister's threads: chunks, checksums, the list of blocks."""
    options = {"connection_string": azurite.connection_string()}
    store = open_store(f"abfs://{container}/store", options=options)
    with closing(store), ThreadPoolExecutor(UPLOAD_THREADS) as executor:

        def write(name: str, what: memoryview = data) -> None:
            size = len(what)
            upload = FileUpload(
                store, "job", f"step/{name}", name=name, rank=0, size_bytes=size, chunk_bytes=chunk_of(size)
            )
            upload.put(0, what, executor)
            upload.finish()

        write("warm", data[:MIB])
        yield write


@contextmanager
def _stepfast_agent(azurite: Azurite, container: str, data: memoryview, folder: Path) -> Iterator[Way]:
    """A save of a tensor of those bytes, until its step is committed. The first save, which starts the persister, is
    not measured."""
    os.environ[OPTIONS_VARIABLE] = json.dumps({"connection_string": azurite.connection_string()})
    state = {"bytes": torch.frombuffer(data, dtype=torch.uint8)}
    step = 0
    with running_agent(folder, memory_limit(len(data), slots=_SLOTS)) as agent:
        environment = read_environment(
            {
                "STEPFAST_JOB": "bench/blob",
                "STEPFAST_RUN": f"{uuid.uuid4().hex[:12]}-1",
                "STEPFAST_SOCKET": agent.socket,
                "STEPFAST_STORAGE_URI": f"abfs://{container}/agent",
                "STEPFAST_SETTINGS": '{"maxToKeep": 2}',
            }
        )
        checkpointer = Checkpointer(interval=every(steps=10**9), environment=environment, state=state)

        def write(_: str) -> None:
            nonlocal step
            step += 1
            checkpointer.save(step).wait()

        checkpointer.restore()
        checkpointer.step(0)  # tells the agent the size
        agent.wait_for_slots(_SLOTS * len(data))
        write("warm")
        try:
            yield write
        finally:
            checkpointer.close()


def _adlfs(azurite: Azurite, container: str, data: memoryview) -> Mapping[str, Way]:
    """`pipe_file` takes bytes; making them of shared memory is not counted."""
    import adlfs

    filesystem: Any = adlfs.AzureBlobFileSystem(
        connection_string=azurite.connection_string(), skip_instance_cache=True, use_listings_cache=False
    )
    whole = bytes(data)
    filesystem.pipe_file(f"{container}/warm", whole[:MIB])
    return {
        "adlfs": lambda name: filesystem.pipe_file(f"{container}/{name}", whole),
        "adlfs_8": lambda name: filesystem.pipe_file(f"{container}/{name}", whole, max_concurrency=8),
    }


def _obstore(azurite: Azurite, container: str, data: memoryview) -> Mapping[str, Way]:
    """The object stores of Rust's arrow."""
    if str(FOLDER.absolute()) not in sys.path:
        sys.path.append(str(FOLDER.absolute()))
    import obstore  # type: ignore[import-not-found, unused-ignore] # installed by benchmarks.peers.install
    from obstore.store import AzureStore  # type: ignore[import-not-found, unused-ignore] # the same

    store = AzureStore(
        container, account_name=ACCOUNT, account_key=KEY, endpoint=azurite.endpoint(),
        client_options={"allow_http": True},
    )  # fmt: skip

    def write(name: str, **options: int) -> None:
        obstore.put(store, name, data, use_multipart=True, **options)

    obstore.put(store, "warm", bytes(data[:MIB]))
    return {
        "obstore": write,
        "obstore_4": lambda name: write(name, chunk_size=_OBSTORE_CHUNK_BYTES, max_concurrency=4),
    }


def main() -> None:
    """Measures the sizes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, action="append", metavar="MIB", help="repeatable (default: 64, 256, 1024)")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="32 MiB, one round")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    install()
    asked = [size * MIB for size in arguments.size or ()]
    sizes = asked or (QUICK_SIZES if arguments.quick else SIZES)
    measure_uploads(sizes, arguments.rounds or (1 if arguments.quick else 5), arguments.results)


if __name__ == "__main__":
    main()
