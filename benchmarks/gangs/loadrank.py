"""One rank of one of several jobs that share an agent: it trains, saves now and then, and tells each save. A child of
`benchmarks.gangs.load`.

A step is a sleep: training is on a device elsewhere, and the processors are the agent's and the other jobs'.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

import torch
from benchmarks.processes.cellprocess import Teller
from benchmarks.workload import MIB

from stepfast.errors import StepfastError
from stepfast.torch import Checkpointer, Saved, every

_STEP_SECONDS = 0.05
_COMMIT_SECONDS = 60.0  # how long, at the end, the last saves' commits are waited for


def main() -> None:
    """Trains for so long after all ranks have met."""
    arguments = _arguments()
    os.environ.update(
        STEPFAST_JOB=f"bench/{arguments.job}", STEPFAST_RUN=arguments.run_id, STEPFAST_SOCKET=arguments.socket,
        STEPFAST_STORAGE_URI=arguments.storage_uri, STEPFAST_SETTINGS='{"maxToKeep": 2, "onBusy": "Skip"}',
    )  # fmt: skip
    torch.set_num_threads(1)
    teller = Teller()
    state = {"weights": torch.full((arguments.size_mib * MIB // 4,), 0.5)}
    steps = round(arguments.interval_seconds / _STEP_SECONDS)
    checkpointer = Checkpointer(interval=every(steps=steps), state=state)
    checkpointer.restore()
    teller.tell("begins", job=arguments.job)
    begin, step = time.time(), 0
    followers: list[threading.Thread] = []
    while step * _STEP_SECONDS < arguments.seconds:  # a number that all ranks agree on
        step += 1
        time.sleep(max(0.0, begin + step * _STEP_SECONDS - time.time()))
        state["weights"][0] = step
        begun, before = time.time(), time.perf_counter()
        saved = checkpointer.step(step)
        if saved is not None:
            stall = time.perf_counter() - before
            teller.tell(
                "save", job=arguments.job, step=step, time=begun, is_saved=saved.saved, stall_seconds=stall,
                staging_seconds=saved.stall_seconds,
            )  # fmt: skip
            if arguments.follow and int(os.environ["RANK"]) == 0 and saved.saved:
                follower = threading.Thread(target=_follow, args=(saved, begun, arguments.job, teller), daemon=True)
                follower.start()
                followers.append(follower)
    deadline = time.monotonic() + _COMMIT_SECONDS
    for follower in followers:
        follower.join(max(0.0, deadline - time.monotonic()))
    teller.tell("ends", job=arguments.job)
    os._exit(0)


def _follow(saved: Saved, begun: float, job: str, teller: Teller) -> None:
    try:
        saved.wait()
    except StepfastError:
        return  # it was not committed: whoever counts the saves misses it
    teller.tell("committed", job=job, step=saved.step, seconds=time.time() - begun)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--storage-uri", required=True)
    parser.add_argument("--size-mib", type=int, required=True)
    parser.add_argument("--interval-seconds", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--follow", action="store_true", help="wait for each step in a thread: it is never given up")
    return parser.parse_args()


if __name__ == "__main__":
    main()
