"""Interpreters that have imported a framework already: a script that is to be run is run by a fork of one.

It is a process of its own, with its own folder, environment and output, that is killed and ends as any other; only what
the import costs, seconds of a processor each time, is paid once. `stepfast` itself is imported by each script anew.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """`command`: as behind `python`: a file and its arguments, or `-c` and lines."""

    command: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    output: Path
    errors: Path


class Interpreter:
    """Has imported `modules`, with these `environment` variables set. It is started when it is first needed."""

    def __init__(self, *modules: str, **environment: str) -> None:
        self._modules = modules
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.processor_seconds = 0.0  # of its scripts, until they are known as those of a child that has ended

    def end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.wait()
            self._process, self.processor_seconds = None, 0.0

    def run(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *command])`, whose text is captured."""
        return self._run(command, cwd, [dict(os.environ if env is None else env)], timeout)[0]

    def run_gang(
        self,
        ranks: int,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """As torchrun starts them on one node, with its variables and its store. Once one has failed the others are
        killed. `env`: by default that of a job `local/train` without an agent, with its storage in `cwd`.
        `returncode`: of the first that failed, else 0; `stdout` and `stderr`: of all, one rank after the other.
        """
        from torch.distributed import TCPStore

        if env is None:
            env = {key: value for key, value in os.environ.items() if not key.startswith("STEPFAST_")}
            env |= {"STEPFAST_JOB": "local/train"}

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        environments = [
            {**env, **{name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}}
            for rank in range(ranks)
        ]
        ended = self._run(command, cwd, environments, timeout)
        failures = [one.returncode for one in ended if one.returncode not in (0, -signal.SIGKILL)]
        return subprocess.CompletedProcess(
            command, next(iter(failures), max(abs(one.returncode) for one in ended)),
            "".join(one.stdout for one in ended), "".join(one.stderr for one in ended),
        )  # fmt: skip

    def output_of_gang(
        self,
        ranks: int,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> str:
        """Of one without an agent, all of whose ranks end well: as `run_gang`, what they have said."""
        done = self.run_gang(ranks, command, cwd=cwd, env=env, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def _run(
        self, command: Sequence[str], folder: Path, environments: Sequence[dict[str, str]], timeout: float
    ) -> list[subprocess.CompletedProcess[str]]:
        if self._connection is None:
            self._connection = self._start()
        with tempfile.TemporaryDirectory() as texts:
            scripts = [
                Script(
                    command=tuple(command), folder=folder, environment=environment,
                    output=Path(texts, f"{rank}.output"), errors=Path(texts, f"{rank}.errors"),
                )
                for rank, environment in enumerate(environments)
            ]  # fmt: skip
            codes, is_late = self._ended(scripts, timeout)
            ended = [
                subprocess.CompletedProcess(
                    command, code, script.output.read_text(), _of_its_own(script.errors.read_text())
                )
                for script, code in zip(scripts, codes, strict=True)
            ]
        if is_late:
            raise subprocess.TimeoutExpired(
                command, timeout, "".join(one.stdout for one in ended), "".join(one.stderr for one in ended)
            )
        return ended

    def _ended(self, scripts: Sequence[Script], timeout: float) -> tuple[list[int], bool]:
        """Their exit codes, and whether they had to be killed for being late."""
        assert self._connection is not None
        self._connection.send(scripts)
        pids: list[int] = self._connection.recv()
        try:
            is_late = not self._connection.poll(timeout)
        except BaseException:  # whoever is interrupted here hears no answer any more
            _kill(pids)
            self.end()
            raise
        if is_late:
            _kill(pids)
        codes, seconds = self._connection.recv()
        self.processor_seconds += seconds
        return codes, is_late

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno()), *self._modules], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            )  # fmt: skip
        return Connection(ours.detach())


_OF_OPTIMIZERS = "torch._dynamo"  # the first of a process imports it
TORCH = Interpreter("torch", _OF_OPTIMIZERS)
DEEPSPEED = Interpreter("deepspeed", _OF_OPTIMIZERS, DS_ACCELERATOR="cpu")
LIGHTNING = Interpreter("lightning.pytorch", _OF_OPTIMIZERS)
TRANSFORMERS = Interpreter("transformers.trainer", _OF_OPTIMIZERS)
STEPFAST = "-c", "from stepfast.cli import main; raise SystemExit(main())"  # as `-m stepfast.cli`
INTERPRETERS = TORCH, DEEPSPEED, LIGHTNING, TRANSFORMERS


def _of_its_own(errors: str) -> str:
    """Without what nanobind says, behind all else and at length, where a process that has imported triton fails."""
    return errors.partition("nanobind: leaked ")[0]


def _next_script(connection: Connection) -> Script:
    """Returns in forks alone, each with what it is to run."""
    while True:
        try:
            scripts: list[Script] = connection.recv()
        except EOFError:
            os._exit(0)
        pids: list[int] = []
        for script in scripts:
            pid = os.fork()
            if not pid:
                connection.close()
                return script
            with suppress(PermissionError, ProcessLookupError):  # it has done so itself, or has ended
                os.setpgid(pid, pid)
            pids.append(pid)
        with suppress(BrokenPipeError):  # nobody waits for it any more
            connection.send(pids)
            connection.send(_ends(pids))


def _ends(pids: Sequence[int]) -> tuple[list[int], float]:
    """The exit codes of processes that are all to end well, once one has not the others are killed; the seconds of
    processors that they used.
    """
    codes: dict[int, int] = {}
    seconds = 0.0
    while len(codes) < len(pids):
        pid, status, usage = os.wait4(-1, 0)
        seconds += usage.ru_utime + usage.ru_stime
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            _kill(set(pids) - codes.keys())
    return [codes[pid] for pid in pids], seconds


def _kill(groups: Iterable[int]) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _become(script: Script) -> None:
    """This process is from now on as one that was started for that script."""
    os.setpgid(0, 0)
    os.chdir(script.folder)
    os.environ.clear()
    os.environ.update(script.environment)
    for number, path in ((1, script.output), (2, script.errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    first, *others = script.command
    name, source = ("<string>", others.pop(0)) if first == "-c" else (first, Path(first).read_text())
    sys.argv = [first, *others]
    sys.path[0] = "" if first == "-c" else str(Path(first).resolve().parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = name
    exec(compile(source, name, "exec"), main.__dict__)


if __name__ == "__main__":
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    gc.freeze()  # what is imported is no garbage of a fork: to look through it, and to copy its pages, takes seconds
    _threads = os.listdir("/proc/self/task")
    assert len(_threads) == 1, f"forks of a process of {len(_threads)} threads would not be whole"
    _become(_next_script(Connection(int(sys.argv[1]))))
