"""Interpreters that have imported a framework already: a script that is to be run is run by a fork of one.

It is a process of its own, with its own folder, environment and output, that is killed and ends as any other; only what
the import costs, seconds of a processor each time, is paid once. `stepfast` itself is imported by each script anew.

Where somebody else starts the script, torchrun for one, what is started in the place of python is an interpreter's
`program`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from forkserver import Request, serve

_LONGEST_SECONDS = 600.0  # a script takes: one that hangs ends there


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """`command`: as behind `python`: a file and its arguments, `-c` and lines, or `-m` and a module."""

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
        self._folder: Path | None = None
        self._server: Connection | None = None
        self._seconds = 0.0

    def end(self) -> None:
        for connection in (self._server, self._connection):
            if connection is not None:
                connection.close()
        self._server = self._connection = None
        if self._process is not None:
            self._process.wait()
            self._process, self._seconds = None, 0.0
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    @property
    def processor_seconds(self) -> float:
        """Of its scripts, until they are known as those of a child that has ended."""
        if self._server is None:
            return self._seconds
        self._server.send("processor seconds")
        seconds: float = self._server.recv()
        return self._seconds + seconds

    @property
    def program(self) -> str:
        """A program in python's place: forks run scripts, `-m stepfast.launcher` and what waits to become one; all else
        is python's own.
        """
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="stepfast-"))  # the path of a socket must be short
            self._server = self._serve(self._folder / "socket")
            client = Path(__file__).with_name("forkedpython.py")
            fork = [sys.executable, "-I", "-S", str(client), str(self._folder / "socket")]
            program = self._folder / "python"
            program.write_text(_PROGRAM.format(fork=shlex.join(fork), python=shlex.quote(sys.executable)))
            program.chmod(0o755)
        return str(self._folder / "python")

    def run(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *command])`, whose text is captured."""
        return self._run(command, cwd, [dict(os.environ if env is None else env)], _LONGEST_SECONDS)[0]

    def run_gang(
        self,
        ranks: int,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout: float = _LONGEST_SECONDS,
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
        self, ranks: int, command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None
    ) -> str:
        """Of one without an agent, all of whose ranks end well: as `run_gang`, what they have said."""
        done = self.run_gang(ranks, command, cwd=cwd, env=env)
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
                subprocess.CompletedProcess(command, code, script.output.read_text(), script.errors.read_text())
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
        self._seconds += seconds
        return codes, is_late

    def _serve(self, path: Path) -> Connection:
        """Begins to run what programs ask for by that socket; on the connection it tells what that has cost."""
        if self._connection is None:
            self._connection = self._start()
        assert self._process is not None
        ours, theirs = Pipe()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            self._connection.send(None)
            for opened in (listener, theirs):
                send_handle(self._connection, opened.fileno(), self._process.pid)
        return ours

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno()), *self._modules], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            )  # fmt: skip
        return Connection(ours.detach())


_OF_OPTIMIZERS = "torch._dynamo"  # the first of a process imports it
_OF_ZERO = "torch._inductor.compile_fx"  # with ZeRO DeepSpeed has an optimizer that is compiled
# Behind frameworks comes what else they import as they are used: Lightning for storages, DeepSpeed for its operators.
TORCH = Interpreter("torch", _OF_OPTIMIZERS, _OF_ZERO)
DEEPSPEED = Interpreter("deepspeed", _OF_OPTIMIZERS, _OF_ZERO, "setuptools", DS_ACCELERATOR="cpu")
LIGHTNING = Interpreter("lightning.pytorch", _OF_OPTIMIZERS, _OF_ZERO, "torch.distributed.checkpoint", "adlfs")
TRANSFORMERS = Interpreter("transformers.trainer", _OF_OPTIMIZERS)
STEPFAST = "-c", "from stepfast.cli import main; raise SystemExit(main())"  # as `-m stepfast.cli`
INTERPRETERS = TORCH, DEEPSPEED, LIGHTNING, TRANSFORMERS


_PROGRAM = """#!/bin/sh
case "$1 $2" in
  "-m stepfast.launcher" | "-m stepfast.standby" | "-u "* | [!-]*) exec {fork} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""


def _next_script(connection: Connection) -> Script | Request:
    """Returns in forks alone, each with what it is to run."""
    while True:
        try:
            told: list[Script] | None = connection.recv()
        except EOFError:
            with suppress(ChildProcessError):
                os.wait()  # for the server, whose own connection ends now, too
            os._exit(0)
        if told is None:
            listener, control = socket.socket(fileno=recv_handle(connection)), Connection(recv_handle(connection))
            if not os.fork():
                connection.close()
                return serve(listener, control)
            listener.close()
            control.close()
            continue
        pids: list[int] = []
        for script in told:
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
        if pid not in pids:
            continue  # the server of programs
        seconds += usage.ru_utime + usage.ru_stime
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            _kill(set(pids) - codes.keys())
    return [codes[pid] for pid in pids], seconds


def _kill(groups: Iterable[int]) -> None:
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _become(script: Script | Request) -> None:
    """This process is from now on as one that was started for that script."""
    os.setpgid(0, 0)
    os.chdir(script.folder)
    os.environ.clear()
    os.environ.update(script.environment)
    for number, stream in _streams(script).items():
        os.dup2(stream, number)
        os.close(stream)
    for folder in reversed(script.environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    _ending.is_script = True
    try:
        _run(*script.command)
    except SystemExit as end:
        _ending.status = end.code
        raise


def _run(first: str, *others: str) -> None:
    if first == "-m":
        sys.argv, sys.path[0] = list(others), ""
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
        return
    name, source = ("<string>", others[0]) if first == "-c" else (first, Path(first).read_text())
    sys.argv = [first, *(others[1:] if first == "-c" else others)]
    sys.path[0] = "" if first == "-c" else str(Path(first).resolve().parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = name
    exec(compile(source, name, "exec"), main.__dict__)


class _Ending:
    """Ends a script's process once all is done that is to be done at its end, in place of the interpreter: that would
    take every module to pieces, a second of a processor, as each page it touches is copied.
    """

    def __init__(self) -> None:
        self.is_script = False
        self.status: object = None  # that it has asked for

    def end(self) -> None:
        failure = getattr(sys, "last_value", None)
        if not self.is_script or isinstance(failure, KeyboardInterrupt):  # which ends a process by its signal
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        if failure is None and isinstance(self.status, int):
            os._exit(self.status & 0xFF)
        os._exit(failure is not None or self.status is not None)


def _streams(script: Script | Request) -> dict[int, int]:
    """The descriptors that are to become its input, its output and its errors, by theirs."""
    if isinstance(script, Request):
        return dict(enumerate(script.streams))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return {1: os.open(script.output, flags), 2: os.open(script.errors, flags)}


_ending = _Ending()

if __name__ == "__main__":
    atexit.register(_ending.end)  # before all others: what is registered last is called first
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    gc.freeze()  # what is imported is no garbage of a fork: to look through it, and to copy its pages, takes seconds
    _threads = os.listdir("/proc/self/task")
    assert len(_threads) == 1, f"forks of a process of {len(_threads)} threads would not be whole"
    _become(_next_script(Connection(int(sys.argv[1]))))
