"""torchrun that tells why it failed: `python -m stepfast.launcher [torchrun's options] -- script.py args`.

Options and environment (`PET_*`) are torchrun's own, and so is everything that they do. In addition the first
failure of a rank is written as JSON into the file named by STEPFAST_TERMINATION_LOG (in a pod:
/dev/termination-log) at the moment it happens, and the exit status is that rank's own (128 + signal for one
that a signal killed).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from stepfast.client import Connection, connect
from stepfast.elastic import count_launches, renew_stores
from stepfast.environment import Environment, read_environment
from stepfast.errors import AgentUnavailable, GangError, SpecError
from stepfast.messages import VERSION, Launching
from stepfast.rendezvous import wait_for_host

if TYPE_CHECKING:
    from argparse import Namespace

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

TERMINATION_LOG = "STEPFAST_TERMINATION_LOG"
_NEBULA_MODULES = Path(__file__).with_name("nebula") / "modules"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHUTDOWN_SECONDS = "10"
_MESSAGE_CHARACTERS = 2000
_LAST_WORDS_SECONDS = 0.5
_ANNOUNCE_SECONDS = 1.0  # for an agent that stands still


def load() -> None:
    """Imports all that a launch needs: seconds, which a launcher that waits can have behind it."""
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous
    import torch.distributed.elastic.rendezvous.registry
    import torch.distributed.launcher.api
    import torch.distributed.run  # noqa: F401  # torch's modules, all for what they leave behind


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the gang's share of this node to its end; returns the exit status."""
    with suppress(SpecError):  # which the ranks report
        announce(read_environment())
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = torchrun.parse_args(list(sys.argv[1:] if argv is None else argv))  # type: ignore[no-untyped-call] # torch's
    report = _Report(args.log_dir)
    _handle_stop_signals(args, report, SignalException)
    if args.nproc_per_node not in ("1", 1):
        # torchrun's own default, without its six lines of warning.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    _offer_modules()
    renew_stores()
    count_launches(lambda _: _watch_launch(report))
    try:
        wait_for_host(str(args.rdzv_endpoint or ""))
        torchrun.run(args)  # type: ignore[no-untyped-call] # torch's
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return report.finish(rank, failure)
    except SignalException as error:
        return 128 + int(error.sigval)
    except GangError as error:
        sys.stderr.write(f"{error}\n")
        report.write({"exitCode": 1, "message": str(error), "time": time.time()})
        return 1
    report.write({"exitCode": 0, "time": time.time()})
    return 0


def _offer_modules() -> None:
    """Scripts that were written for Nebula find it by its names, unless they bring modules of these names along."""
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([known] if known else []), str(_NEBULA_MODULES)])


def announce(environment: Environment) -> None:
    """Tells the node's agent which step its ranks will ask for: it fetches that while they import torch.

    Nothing depends on it: an agent that is not there yet, or knows no such message, is asked by the ranks.
    """
    if environment.socket is None or not environment.is_run_unique:
        return
    with suppress(AgentUnavailable):
        connection = Connection(connect(environment.socket, _ANNOUNCE_SECONDS))
        with closing(connection):
            connection.send(
                Launching(
                    version=VERSION,
                    job=str(environment.job),
                    run=environment.run,
                    storage_uri=environment.storage_uri,
                    first_rank=environment.node * environment.local_world_size,
                    ranks=environment.local_world_size,
                    resume_step=environment.resume_step,
                )
            )


class _Report:
    """The termination log: the first failure wins, and what torchrun knows about it is added when it is
    known.
    """

    def __init__(self, log_dir: str | None) -> None:
        self._path = os.environ.get(TERMINATION_LOG)
        self._log_dir = log_dir
        self._lock = threading.Lock()
        self._first: dict[str, object] | None = None
        self._launch = 0
        self.is_stopping = False

    def fail(
        self, rank: int, local_rank: int, exit_code: int, message: str | None = None, *, launch: int | None = None
    ) -> None:
        """Takes down a rank's end; `exit_code` is negative for a signal. Later ones change nothing, nor does one of a
        launch that another has followed.
        """
        with self._lock:
            # Ranks that fall while the gang is being stopped have not failed.
            if self._first is not None or self.is_stopping or launch not in (None, self._launch):
                return
            self._first = {
                "rank": rank,
                "localRank": local_rank,
                "exitCode": 128 - exit_code if exit_code < 0 else exit_code,
                "signal": _signal_name(exit_code),
                "message": (message or self._last_words(local_rank, exit_code))[:_MESSAGE_CHARACTERS],
                "time": time.time(),
            }
            self._store(self._first)

    def begin(self) -> None:
        """All ranks are started: what ended the ranks before them ends nothing any more."""
        with self._lock:
            self._first = None
            self._launch += 1

    @property
    def launch(self) -> int:
        """Counts the times that all ranks were started."""
        return self._launch

    def finish(self, rank: int, failure: ProcessFailure) -> int:
        """Completes the report with torchrun's own; returns the exit status of the rank that failed first."""
        self.fail(rank, failure.local_rank, failure.exitcode, _message_of(failure))
        first = self._first or {}
        if first.get("rank") == rank and (message := _message_of(failure)):
            self.write({**first, "message": message[:_MESSAGE_CHARACTERS]})
        sys.stderr.write(f"rank {first.get('rank', rank)} failed: {first.get('message')}\n")
        code = first.get("exitCode", failure.exitcode)
        return code if isinstance(code, int) and code > 0 else 1

    def write(self, document: dict[str, object]) -> None:
        with self._lock:
            self._store(document)

    def _store(self, document: dict[str, object]) -> None:
        if self._path is None:
            return
        # In place and in one write: a pod's termination log is a mount, which nothing can be renamed onto.
        with suppress(OSError), open(self._path, "wb", buffering=0) as file:
            file.write(json.dumps(document).encode())

    def _last_words(self, local_rank: int, exit_code: int) -> str:
        """The last line on the rank's standard error, which for Python names the exception."""
        ended = f"killed by {_signal_name(exit_code)}" if exit_code < 0 else f"exit code {exit_code}"
        if self._log_dir is None:
            return ended
        with suppress(OSError):
            logs = sorted(
                Path(self._log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log"),
                key=lambda log: log.stat().st_mtime,
            )
            lines = [line for log in logs[-1:] for line in _tail(log).splitlines() if line.strip()]
            if lines and exit_code > 0:
                return f"{lines[-1].strip()} ({ended})"
        return ended


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read().decode(errors="replace")


def _message_of(failure: ProcessFailure) -> str | None:
    """What the rank itself reported through torch's `@record`, if it did."""
    if failure.error_file == "<N/A>":
        return None
    message: object = failure.message
    if isinstance(message, dict):
        message = message.get("message")
    return str(message) if message else None


def _signal_name(exit_code: int) -> str | None:
    if exit_code >= 0:
        return None
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return str(-exit_code)


def _handle_stop_signals(args: Namespace, report: _Report, stop: type[Exception]) -> None:
    """Takes SIGTERM and SIGINT over from torchrun, to know that ranks which fall from here on were stopped.

    What is raised, and what torchrun does with it (end the ranks, then itself), is its own.
    """

    def on_signal(number: int, _frame: FrameType | None) -> NoReturn:
        report.is_stopping = True
        raise stop(f"process {os.getpid()} got signal {number}", signal.Signals(number))

    for stop_signal in _STOP_SIGNALS:
        signal.signal(stop_signal, on_signal)
    ours = {stop_signal.name for stop_signal in _STOP_SIGNALS}
    theirs = [name for name in str(args.signals_to_handle).split(",") if name.strip() not in ours]
    args.signals_to_handle = ",".join(theirs) or "SIGQUIT"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A child of this process that is a rank, from its environment."""

    rank: int
    local_rank: int
    local_world_size: int


def _watch_launch(report: _Report) -> None:
    """Watches the ranks that are about to be started."""
    report.begin()
    watch = threading.Thread(
        target=_watch_children, args=(report, report.launch), name="stepfast-children", daemon=True
    )  # fmt: skip
    watch.start()


def _watch_children(report: _Report, launch: int) -> None:
    """Reports the first rank of a launch that ends in failure, at once.

    torchrun polls, and ends the other ranks before it says anything. `waitid` with WNOWAIT looks at an ended
    child without taking it from torchrun.
    """
    ranks: dict[int, _Rank] = {}
    while report.launch == launch:
        _learn_ranks(ranks)
        is_complete = any(len(ranks) >= rank.local_world_size for rank in ranks.values())
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | (0 if is_complete else os.WNOHANG))
        except ChildProcessError:
            ended = None
        if ended is not None and ended.si_status != 0 and (rank := ranks.get(ended.si_pid)) is not None:
            is_exit = ended.si_code == os.CLD_EXITED
            if not is_exit and ended.si_status == signal.SIGTERM:
                # Most likely torchrun's own, sent because of a rank that it was faster to find; it says which.
                return
            if is_exit:
                # What it printed last says why. torchrun passes that on a moment later, and whoever reads the report
                # ends torchrun at once.
                time.sleep(_LAST_WORDS_SECONDS)
            report.fail(rank.rank, rank.local_rank, ended.si_status if is_exit else -ended.si_status, launch=launch)
            return
        # A child that ended well stays visible until torchrun polls, and at first the ranks are yet to come.
        time.sleep(0.05)


def _learn_ranks(ranks: dict[int, _Rank]) -> None:
    """Adds the children that have become ranks, by pid: an ended child has no environment left to read."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if pid not in ranks and (rank := _rank_of(pid)) is not None:
                    ranks[pid] = rank


def _rank_of(pid: int) -> _Rank | None:
    """What kind of rank the child is; None until it has become one (between fork and exec it has our
    environment).
    """
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    env = {name: value for name, _, value in (pair.partition(b"=") for pair in pairs)}
    try:
        return _Rank(
            rank=int(env[b"RANK"]),
            local_rank=int(env[b"LOCAL_RANK"]),
            local_world_size=int(env[b"LOCAL_WORLD_SIZE"]),
        )
    except (KeyError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
