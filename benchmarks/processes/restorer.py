"""A new process that restores one step with one peer into tensors that are there, and beside it measures the limits of
this machine. A child of `benchmarks.cells`.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from benchmarks.machine import PlainCopy, cold_read, drop_caches, read_files, repeated
from benchmarks.peers.base import Peer, Site, Tier
from benchmarks.peers.roster import make_peer
from benchmarks.processes.cellprocess import Teller
from benchmarks.workload import State, fill, stamp, state_of, tensors_of, wrong_elements, wrong_tensors

_LIMIT_TIMES = 3
_UNTOUCHED = -7.0
_ERROR_CHARACTERS = 500


def main() -> None:
    """Tells `limits`, then `restored` or `refused`."""
    arguments = _arguments()
    torch.set_num_threads(1)
    teller = Teller()
    state = state_of(arguments.layout)
    peer = make_peer(arguments.peer, Site.from_text(arguments.site))
    is_disk = arguments.tier != "memory"
    tier: Tier = "disk" if is_disk else "memory"
    if arguments.limit:
        teller.tell("limits", **_limits(peer, arguments.step, state, arguments.tier))
    fill(state, _UNTOUCHED)
    owners = {name: tensor.data_ptr() for name, tensor in tensors_of(state)}
    begin = time.perf_counter()
    peer.prepare_restore(tier)
    prepared = time.perf_counter() - begin
    if arguments.tier == "disk-cold":
        drop_caches()
    begin = time.perf_counter()
    try:
        peer.restore(tier, arguments.step, state)
        seconds = time.perf_counter() - begin
        peer.check_restored(tier)
    except BaseException as error:  # noqa: BLE001 - whatever a peer raises is measured; DCP raises no Exception
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        teller.tell("refused", error=f"{type(error).__name__}: {words[-1] if words else ''}"[:_ERROR_CHARACTERS])
        os._exit(0)
    if any(tensor.data_ptr() != owners[name] for name, tensor in tensors_of(state)):
        raise AssertionError("a tensor is no longer the caller's own")
    teller.tell("restored", seconds=seconds, prepare_seconds=prepared, **_judge(state, arguments))
    os._exit(0)


def _limits(peer: Peer, step: int, state: State, tier: str) -> dict[str, Any]:
    if tier == "memory":
        limit = PlainCopy([tensor for _, tensor in tensors_of(state)])
        limit.copy()
        seconds = repeated(limit.read_back, _LIMIT_TIMES)
        limit.close()
        return {"limit": "one thread's preadv of warm shared memory", "limit_seconds": seconds}
    files = peer.files(step)
    size = sum(path.stat().st_size for path in files)
    if tier == "disk-cold":
        return {
            "limit": "one thread's cold read of the same files",
            "limit_seconds": [cold_read(files)],
            "file_bytes": size,
        }
    read_files(files)  # so that they are warm: who writes past the page cache leaves nothing there
    seconds = repeated(lambda: read_files(files), _LIMIT_TIMES)
    return {"limit": "one thread's warm read of the same files", "limit_seconds": seconds, "file_bytes": size}


def _judge(state: State, arguments: Any) -> dict[str, Any]:
    """Which step the tensors are of, and what of it is wrong; `step` is None when they are of several or none."""
    steps = range(arguments.step, 0, -1)
    step = next((step for step in steps if wrong_tensors(state, step) == 0), None)
    verdict: dict[str, Any] = {"step": step, "wrong_tensors": wrong_tensors(state, arguments.step)}
    if arguments.count_elements:
        expected = state_of(arguments.layout)
        stamp(expected, arguments.step)
        # A scalar `step` of the optimizer is stamped as the rest is.
        verdict["wrong_elements"] = wrong_elements(state, expected)
    return verdict


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--site", required=True, help="a Site as text")
    parser.add_argument("--layout", required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--tier", choices=("memory", "disk-warm", "disk-cold"), required=True)
    parser.add_argument("--limit", action=argparse.BooleanOptionalAction, default=True, help="measure it beside it")
    parser.add_argument("--count-elements", action="store_true", help="compare every element")
    return parser.parse_args()


if __name__ == "__main__":
    main()
