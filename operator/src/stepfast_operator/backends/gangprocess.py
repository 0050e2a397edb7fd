"""A node's share of a gang as a child process: its command, environment, output by lines, and what its end means."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepfast import standby
from stepfast.errors import SpecError
from stepfast_operator.backends import tether
from stepfast_operator.document import JSON
from stepfast_operator.observed import Failure
from stepfast_operator.record import Cause
from stepfast_operator.spec import Trainer

RUN = "STEPFAST_RUN"
_READ_BYTES = 65536
# What a surrounding torchrun, or a run of ours, would otherwise hand down.
_NOT_INHERITED = ("STEPFAST_", "PET_", "TORCHELASTIC_", "NEBULA_")
_NOT_INHERITED_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
)


_LAUNCHER = ("-m", "stepfast.launcher")


def standby_command() -> list[str]:
    """A launcher that waits to be told what to launch."""
    return [sys.executable, "-m", "stepfast.standby"]


def launcher_arguments(command: Sequence[str]) -> list[str] | None:
    """What our launcher is given in such a command; None when it runs something else."""
    return list(command[3:]) if tuple(command[1:3]) == _LAUNCHER else None


def command_of(trainer: Trainer) -> list[str]:
    """What a node runs: the trainer's command, with torchrun replaced by our launcher, which reads the same
    options.
    """
    command = [*trainer.command, *trainer.args]
    launcher = [sys.executable, *_LAUNCHER]
    if command[0].rpartition("/")[2] == "torchrun":
        return [*launcher, *command[1:]]
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
        if command[1:3] in (["-m", "torch.distributed.run"], ["-m", "stepfast.launcher"]):
            return [*launcher, *command[3:]]
    return command


def variables_of(trainer: Trainer) -> dict[str, str]:
    """The trainer's own variables by name; the last of a name wins. Raises SpecError for a value that only a cluster
    can look up.
    """
    last = {variable.name: (index, variable) for index, variable in enumerate(trainer.env)}
    for index, variable in last.values():
        if variable.value_from is not None:
            raise SpecError(
                f"spec.trainer.env[{index}].valueFrom",
                f"only a cluster can look that up: on one machine give the value with --env {variable.name}=…",
            )
    return {name: variable.value for name, (_, variable) in last.items()}


def environment(inherited: Mapping[str, str], *layers: Mapping[str, str]) -> dict[str, str]:
    """The environment of a gang's process; later layers win."""
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(_NOT_INHERITED) and name not in _NOT_INHERITED_NAMES
    }
    for layer in layers:
        kept.update(layer)
    return kept


def torchrun_environment(*, nodes: int, processes: int, run: str, port: int, logs: Path) -> dict[str, str]:
    """torchrun's own variables: rendezvous on this machine, by c10d, under an id that no other attempt
    has.
    """
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(processes),
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_ID": run,
        "PET_LOCAL_ADDR": "127.0.0.1",
        "PET_MAX_RESTARTS": "0",
        "PET_MONITOR_INTERVAL": "0.1",
        "PET_LOG_DIR": str(logs),
        "PET_TEE": "3",
        "PET_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }


def free_port(nodes: int) -> int:
    """A port for the rendezvous: 0 lets a single node's torchrun choose; several must be told one that is
    free now.
    """
    if nodes == 1:
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def local_processes(limit: int | None) -> int:
    """How many ranks a node gets: as many as asked for, else one per GPU, else one."""
    return limit if limit is not None else max(1, local_gpus())


def local_gpus() -> int:
    """How many GPUs ranks see here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])


def failure_of(said: Mapping[str, JSON], node: str) -> Failure | None:
    """A launcher's termination log; None when it tells of success or does not make sense."""
    code, rank, when = said.get("exitCode"), said.get("rank"), said.get("time")
    if not isinstance(code, int) or code == 0 or not isinstance(when, int | float):
        return None
    return Failure(
        cause=Cause.RANK_FAILED,
        time=float(when),
        node=node,
        rank=rank if isinstance(rank, int) else None,
        exit_code=code,
        message=str(said.get("message") or ""),
    )


def failure_of_exit(code: int, node: str, now: float) -> Failure:
    """A launcher that ended without a word, by its exit code (negative for a signal)."""
    status = 128 - code if code < 0 else code
    said = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return Failure(cause=Cause.WORKER_FAILED, time=now, node=node, exit_code=status, message=f"its launcher {said}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How to start one node's process."""

    node: int
    command: Sequence[str]
    env: Mapping[str, str]
    folder: str


class GangProcess:
    """One node's launcher, a child of this process; must be made by the main thread, whose end would end
    it.
    """

    def __init__(self, start: Start, on_line: Callable[[str], None], *, takes_order: bool = False) -> None:
        """`takes_order`: the command is `standby_command()`."""
        self.node = start.node
        self._on_line = on_line
        self._rest = b""
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *start.command],
            stdin=subprocess.PIPE if takes_order else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(start.env),
            cwd=start.folder,
            start_new_session=True,  # Ctrl-C is for `stepfast run` alone, which saves first
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.pidfd = os.pidfd_open(self.process.pid)

    def give_order(self, arguments: list[str], start: Start) -> bool:
        """Makes a launcher that waits one with these arguments; False when it is gone."""
        stdin = self.process.stdin
        if stdin is None:
            return False
        try:
            with stdin:
                stdin.write(standby.order(arguments, dict(start.env), start.folder))
        except OSError:
            return False
        return True

    def read_output(self) -> bool:
        """Hands on the whole lines that are there; False at the end of the output."""
        try:
            data = os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))
        return bool(data)

    def drain(self) -> None:
        """Hands on what is left; not what may still come, as something that escaped could hold the pipe for
        ever.
        """
        while select.select([self.output], [], [], 0)[0] and self.read_output():
            pass

    def exit_code(self) -> int | None:
        """None while it lives; negative for a signal."""
        return self.process.poll()

    def close(self) -> None:
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.stdout.close()
            os.close(self.pidfd)
