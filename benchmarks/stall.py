"""Stall per save against a plain copy of the same tensors into warm shared memory, in one run: `make bench`.

The state has GPT-2 XL's shape (48 layers, Adam's two moments, 2,320 tensors) at the size asked for. Saves and plain
copies take turns, so that both meet the same machine. Persist and restore times are printed beside them.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from stepfast.errors import AgentUnavailable
from stepfast.nodeclient import NodeClient
from stepfast.torch import Checkpointer, every

GIB = 2**30


def gpt_state(size_bytes: int, layers: int = 48, *, odd: bool = False) -> dict[str, torch.Tensor]:
    """Parameters and Adam moments of a GPT-2-shaped model of about that many bytes, float32.

    With `odd` no tensor's size is a whole number of cache lines.
    """
    width = 16
    while _parameters(width + 8, layers) * 12 <= size_bytes:
        width += 8
    width -= odd
    shapes = {
        "wte": (int(50257 * width / 1600), width),
        "wpe": (1024, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    for layer in range(layers):
        for name, shape in (
            ("ln_1.weight", (width,)), ("ln_1.bias", (width,)), ("attn.c_attn.weight", (width, 3 * width)),
            ("attn.c_attn.bias", (3 * width,)), ("attn.c_proj.weight", (width, width)), ("attn.c_proj.bias", (width,)),
            ("ln_2.weight", (width,)), ("ln_2.bias", (width,)), ("mlp.c_fc.weight", (width, 4 * width)),
            ("mlp.c_fc.bias", (4 * width,)), ("mlp.c_proj.weight", (4 * width, width)), ("mlp.c_proj.bias", (width,)),
        ):  # fmt: skip
            shapes[f"h.{layer}.{name}"] = shape
    state = {}
    for name, shape in shapes.items():
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            state[f"{kind}.{name}"] = torch.full(shape, 0.5)
        state[f"step.{name}"] = torch.zeros(())
    return state


def _parameters(width: int, layers: int) -> int:
    return layers * (12 * width * width + 13 * width) + int(50257 * width / 1600) * width + 1026 * width


class PlainCopy:
    """The limit: one pass of copies into mapped, populated shared memory, through views made once."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._sources = tensors
        sizes = [-(-t.numel() * t.element_size() // 64) * 64 for t in tensors]
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, sum(sizes))
        self._map = mmap.mmap(descriptor, sum(sizes))
        os.close(descriptor)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        whole.fill_(1)
        offset, self._views = 0, []
        for tensor, size in zip(tensors, sizes, strict=True):
            length = tensor.numel() * tensor.element_size()
            self._views.append(whole[offset : offset + length].view(tensor.dtype).view(tensor.shape))
            offset += size

    def copy(self) -> None:
        torch._foreach_copy_(self._views, self._sources)


@contextmanager
def agent(folder: Path, memory_bytes: int) -> Iterator[str]:
    """A real agent; its memory folder is removed at the end."""
    memory = Path(tempfile.mkdtemp(prefix="stepfast-bench-", dir="/dev/shm"))
    socket = str(folder / "agent.sock")
    process = subprocess.Popen(
        [sys.executable, "-m", "stepfast_sidecar", "--socket", socket, "--memory-dir", str(memory),
         "--memory-limit", str(memory_bytes), "--node", "bench"],
    )  # fmt: skip
    try:
        client = NodeClient(socket)
        while True:
            try:
                client.status()
                break
            except AgentUnavailable:
                if process.poll() is not None:
                    raise
                time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(memory)


def main() -> None:
    """Runs and prints; exit status 1 when the ratio is above the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=11)
    parser.add_argument("--bound", type=float, default=1.3, help="of the median ratio")
    parser.add_argument("--odd", action="store_true", help="tensors that are no whole number of cache lines")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    state = gpt_state(int(arguments.gib * GIB), odd=arguments.odd)
    size = sum(t.numel() * t.element_size() for t in state.values())
    folder = Path(tempfile.mkdtemp(prefix="stepfast-bench-", dir="."))
    try:
        with agent(folder, 4 * size) as socket:
            os.environ.update(STEPFAST_SOCKET=socket, STEPFAST_JOB="bench/stall", STEPFAST_RUN="bench-1")
            plain, stalls, persists = _measure(state, (folder / "storage").absolute().as_uri(), arguments.saves)
            restore = _restore(state, (folder / "storage").absolute().as_uri())
    finally:
        shutil.rmtree(folder)
    limit, first = statistics.median(plain), stalls[0]
    ratio = statistics.median(stalls[1:]) / limit
    table = Table(title=f"{size / GIB:.2f} GiB, {len(state)} tensors, {len(stalls)} saves")
    for column in ("", "median s", "ratio to the plain copy"):
        table.add_column(column)
    table.add_row("plain copy into warm shared memory", f"{limit:.4f}", "1.00")
    table.add_row("stall, steady", f"{statistics.median(stalls[1:]):.4f}", f"{ratio:.2f}")
    table.add_row("stall, first save", f"{first:.4f}", f"{first / limit:.2f}")
    table.add_row("save to commit, local disk", f"{statistics.median(persists):.3f}", "")
    table.add_row("restore from memory, verified, a new process's first", f"{restore:.3f}", "")
    Console().print(table)
    print(f"stall ratio {ratio:.3f} (bound {arguments.bound})")
    sys.exit(ratio > arguments.bound)


def _measure(state: dict[str, torch.Tensor], storage: str, saves: int) -> tuple[list[float], list[float], list[float]]:
    plain, stalls, persists = [], [], []
    checkpointer = Checkpointer(state=state, interval=every(steps=10**9), storage_uri=storage)
    checkpointer.restore()
    checkpointer.step(1)  # announces the size: slots are made and mapped while "training" goes on
    limit = PlainCopy(list(state.values()))
    limit.copy()
    client = NodeClient(os.environ["STEPFAST_SOCKET"])
    while client.status().memory_used_bytes < 2.9 * sum(t.numel() * t.element_size() for t in state.values()):
        time.sleep(0.1)
    time.sleep(2)
    for step in range(2, saves + 2):
        for tensor in state.values():
            tensor.add_(1)
        begin = time.perf_counter()
        limit.copy()
        plain.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        saved = checkpointer.save(step)
        stalls.append(time.perf_counter() - begin)
        saved.wait()
        persists.append(time.perf_counter() - begin)
    checkpointer.close()
    return plain, stalls, persists


def _restore(state: dict[str, torch.Tensor], storage: str) -> float:
    os.environ["STEPFAST_RUN"] = "bench-2"
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    checkpointer = Checkpointer(state=state, interval=every(steps=10**9), storage_uri=storage)
    begin = time.perf_counter()
    checkpointer.restore()
    seconds = time.perf_counter() - begin
    if not all(torch.equal(state[name], tensor) for name, tensor in expected.items()):
        raise AssertionError("what was restored is not what was saved")
    checkpointer.close()
    return seconds


if __name__ == "__main__":
    main()
