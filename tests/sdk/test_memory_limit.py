"""The memory limit holds while a state five times as large is saved: streamed in windows, slower, never refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventual import files_in

LIMIT_BYTES = 200_000_000
RANKS = 4

# 256 MiB on each rank, so that four hold 1 GiB; the sums differ from rank to rank and from place to place.
SCRIPT = """
import sys, torch, torch.distributed as dist
from stepfast.torch import Checkpointer
dist.init_process_group("gloo")
rank = dist.get_rank()
count = (256 << 20) // 4 // 4
state = {f"t{i}": torch.arange(count, dtype=torch.int32) + rank * 1000 + i for i in range(4)}
ckpt = Checkpointer(state=state)
if sys.argv[1] == "save":
    ckpt.save(1).wait(timeout_seconds=100)
    print(f"rank {rank} saved", flush=True)
else:
    for tensor in state.values():
        tensor.zero_()
    assert ckpt.restore() == 1
    right = all(torch.equal(state[f"t{i}"], torch.arange(count, dtype=torch.int32) + rank * 1000 + i) for i in range(4))
    print(f"rank {rank} restored {right}", flush=True)
ckpt.close()
dist.barrier()
dist.destroy_process_group()
"""


def folder_bytes(folder: Path) -> int:
    """What the files take, blocks that are really there: slots are sparse until they are touched."""
    total = 0
    for file in files_in(folder, "**/*"):
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def anonymous_bytes(agent: Any) -> int:
    """RssAnon of the agent's processes. RssShmem would count the mapped slots, which are in the folder, twice."""
    total = 0
    for process in agent.processes():
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    return total


def test_four_ranks_with_a_gibibyte_stay_under_two_hundred_megabytes(
    await_memory: Callable[[int], None], start_agent: Callable[..., Any], launcher: Any, until: Callable[..., Any]
) -> None:
    await_memory(4 << 30)
    agent = start_agent(limit_bytes=LIMIT_BYTES)
    idle = anonymous_bytes(agent)
    script = launcher.write(SCRIPT)
    samples: list[tuple[int, int]] = []
    process = launcher.start(script, "save", ranks=RANKS, agent=agent, STEPFAST_MEMORY_BUFFER_SIZE=str(LIMIT_BYTES))
    with process:
        try:

            def is_over() -> bool:
                samples.append((folder_bytes(agent.memory), anonymous_bytes(agent)))
                return process.poll() is not None

            until(is_over, "the end of the save", 300.0)
            output, _ = process.communicate()
        finally:
            launcher.end(process)
    assert process.returncode == 0, output
    assert output.count("saved") == RANKS
    held, private = max(held for held, _ in samples), max(private for _, private in samples)
    together = max(sum(sample) for sample in samples)
    print(f"{len(samples)} samples: folder {held:,}, RssAnon {private:,} ({idle:,} when idle), together {together:,}")
    # Counted: blocks of all files in the memory folder (the slots, and what of them processes map) and the anonymous
    # memory of the agent and its persister, interpreters included.
    assert held > LIMIT_BYTES // 4, "nothing was staged in memory"
    assert together < LIMIT_BYTES

    restored = launcher.run(script, "restore", ranks=RANKS, agent=agent, attempt=2)
    assert restored.code == 0, restored.output
    assert restored.output.count("restored True") == RANKS
