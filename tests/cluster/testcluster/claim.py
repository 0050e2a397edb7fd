"""One cluster's place on this machine: its number, its folder, its addresses, and what runs under its name.

Everything that a cluster makes is named for its number and written down here before it is used, so that whoever comes
next can end what a killed session left: processes by id and start time, namespaces, links and control groups by name.
Knows no Kubernetes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypedDict

from testcluster.binaries import locked
from testcluster.unavailable import Unavailable

# One folder for all sessions of a user, wherever TMPDIR points: numbers are given out per machine.
ROOT = Path(f"/var/tmp/stepfast-clusters-{os.getuid()}")
NUMBERS = range(1, 16)
MEMORY = Path("/dev/shm")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
END_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """What a number means on the network. A node has one of nine places."""

    number: int

    @property
    def loopback(self) -> str:
        """For what no pod may reach: etcd."""
        return f"127.200.{self.number}.1"

    @property
    def bridge(self) -> str:
        """The host, as nodes and pods see it."""
        return f"10.200.{self.number}.1"

    @property
    def network(self) -> str:
        return f"10.200.{self.number}.0/24"

    @property
    def all_pods(self) -> str:
        return f"10.201.{16 * self.number}.0/20"

    def node(self, index: int) -> str:
        return f"10.200.{self.number}.{10 + index}"

    def card(self, index: int) -> str:
        """Of a node's network card, or (0) of the bridge: others who know it need not find out that it has changed, as
        a bridge's otherwise does with what is plugged in.
        """
        return f"02:00:00:00:{self.number:02x}:{index:02x}"

    def pods_of(self, index: int) -> str:
        return f"10.201.{16 * self.number + index}.0/24"


class _State(TypedDict):
    """What the folder remembers. A process is known by its id and its start time in clock ticks since boot."""

    owner: list[int] | None
    processes: dict[str, list[int]]


class Claim:
    """A number that is ours until `release`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.addresses = Addresses(number=number)
        self.folder = ROOT / str(number)
        self.memory_folder = MEMORY / f"test-cluster-{os.getuid()}-{number}"  # once `make_memory_folder` made it
        self.bridge_name = f"sfbr{number}"
        self._state = self.folder / "state.json"
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def take(cls, *, owned: bool = True) -> Self:
        """The first free number, after clearing away what dead sessions left.

        Args:
            owned: by this process, whose end makes it free again; else it stays until somebody releases it.
        """
        ROOT.mkdir(parents=True, exist_ok=True)
        with locked(ROOT / "lock"):
            for number in NUMBERS:
                claim = cls(number)
                claim._release_if_abandoned()
                if not claim.folder.exists() and claim._is_address_free():
                    claim.folder.mkdir()
                    claim._write({"owner": _identity(os.getpid()) if owned else None, "processes": {}})
                    return claim
        raise Unavailable(f"clusters 1 to {NUMBERS[-1]} are all in use: end one (python tests/cluster/cluster.py down)")

    @classmethod
    def open(cls, number: int) -> Self:
        """One that runs already."""
        claim = cls(number)
        if not claim._state.exists():
            raise Unavailable(f"there is no cluster {number}: {[claim.number for claim in cls.existing()]} exist")
        return claim

    @classmethod
    def existing(cls) -> list[Self]:
        return [cls(number) for number in NUMBERS if (ROOT / str(number)).exists()]

    def spawn(self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> None:
        """Starts a process of its own session, with its output in `log(name)`, and remembers it."""
        self.log(name).parent.mkdir(exist_ok=True)
        with self.log(name).open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self._children[name] = process
        with locked(self.folder / "state.lock"):  # nodes are started by a thread each
            state = self._read()
            state["processes"][name] = _identity(process.pid)
            self._write(state)

    def make_memory_folder(self) -> Path:
        """For what is to wait for no disk."""
        self.memory_folder.mkdir(exist_ok=True)
        return self.memory_folder

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def is_alive(self, name: str) -> bool:
        pidfd = self._pidfd(name)
        if pidfd is not None:
            os.close(pidfd)
        return pidfd is not None

    def pid(self, name: str) -> int:
        """The id of a process that runs.

        Raises:
            ProcessLookupError: it does not.
        """
        if not self.is_alive(name):
            raise ProcessLookupError(name)
        return int(self._read()["processes"][name][0])

    def kill(self, name: str, *, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends a process that `spawn` started, and waits for its end; another that has its id by now is let be."""
        pidfd = self._pidfd(name)
        if pidfd is not None:
            try:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
                if not select.select([pidfd], [], [], END_SECONDS)[0]:
                    raise TimeoutError(f"{name} still runs {END_SECONDS:.0f} s after {number.name}")
            finally:
                os.close(pidfd)
        child = self._children.pop(name, None)
        if child is not None:
            child.wait()

    def leave(self) -> None:
        """Lets what runs go on after this process, which knows no more of it than any other."""
        for child in self._children.values():
            child.returncode = 0  # else its destruction warns that it still runs
        self._children.clear()

    def release(self) -> None:
        """Ends everything under this number, and leaves nothing behind."""
        if not self.folder.exists():
            return
        for name in reversed(self._read()["processes"]):
            self.kill(name)
        if os.getuid() == 0:
            self._remove_from_kernel()
        if self.memory_folder.exists():
            shutil.rmtree(self.memory_folder)
        shutil.rmtree(self.folder)

    def remaining(self) -> list[str]:
        """What there is of this number on the machine; nothing after `release`."""
        found = [f"process {name}" for name in self._read()["processes"] if self.is_alive(name)]
        found += [f"namespace {name}" for name in self._namespaces()]
        found += [f"link {name}" for name in self._links()]
        found += [f"control group {path}" for path in self._control_groups()]
        found += [f"mount {path}" for path in self._mounts()]
        return [*found, *(f"folder {path}" for path in (self.memory_folder, self.folder) if path.exists())]

    def node_prefix(self) -> str:
        """What the names of namespaces and links of this cluster begin with."""
        return f"sf{self.number}-"

    def control_group(self, node: str) -> str:
        return f"stepfast-{self.number}-{node}"

    # ---- what a dead session left

    def _release_if_abandoned(self) -> None:
        if not self.folder.exists():
            if os.getuid() == 0:
                self._remove_from_kernel()
            return
        owner = self._read()["owner"]
        if owner is not None and not _is_running(owner):
            self.release()

    def _remove_from_kernel(self) -> None:
        for name in self._namespaces():
            _run("ip", "netns", "delete", name)
        for name in self._links():
            _run("ip", "link", "delete", name)
        for point in self._mounts():
            _run("umount", "--lazy", point)
        deadline = time.monotonic() + END_SECONDS
        while groups := self._control_groups():
            for path in groups:
                with suppress(OSError):  # its last process is still on its way out
                    path.rmdir()
            if time.monotonic() > deadline:
                raise TimeoutError(f"control groups with processes in them: {groups}")

    def _namespaces(self) -> list[str]:
        folder = Path("/run/netns")
        return [path.name for path in sorted(folder.glob(f"{self.node_prefix()}*"))] if folder.exists() else []

    def _links(self) -> list[str]:
        folder = Path("/sys/class/net")
        return [path.name for path in sorted(folder.iterdir())
                if path.name == self.bridge_name or path.name.startswith(self.node_prefix())]  # fmt: skip

    def _control_groups(self) -> list[Path]:
        """Innermost first, in every hierarchy."""
        tops = [*CONTROL_GROUPS.glob(self.control_group("*")), *CONTROL_GROUPS.glob(f"*/{self.control_group('*')}")]
        return [Path(path) for top in tops for path, _, _ in os.walk(top, topdown=False)]

    def _mounts(self) -> list[str]:
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return sorted((point for point in points if point.startswith(f"{self.folder}/")), reverse=True)

    def _is_address_free(self) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.addresses.loopback, 2379))
            except OSError:
                return False  # another user's cluster
        return True

    # ---- the record

    def _pidfd(self, name: str) -> int | None:
        """Of the living process of that name. It cannot mean another: the descriptor is checked after it is opened."""
        identity = self._read()["processes"].get(name)
        if identity is None:
            return None
        try:
            pidfd = os.pidfd_open(identity[0])
        except ProcessLookupError:
            return None
        if _is_running(identity):
            return pidfd
        os.close(pidfd)
        return None

    def _read(self) -> _State:
        try:
            state: _State = json.loads(self._state.read_text())
        except FileNotFoundError:  # taken, and killed before it could write: nobody's
            return {"owner": [0, 0], "processes": {}}
        return state

    def _write(self, state: _State) -> None:
        staging = self._state.with_suffix(".new")
        staging.write_text(json.dumps(state))
        staging.replace(self._state)


def _identity(pid: int) -> list[int]:
    return [pid, _stat(pid)[1]]


def _is_running(identity: Sequence[int]) -> bool:
    try:
        state, start = _stat(identity[0])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return start == identity[1] and state not in "ZX"


def _stat(pid: int) -> tuple[str, int]:
    # proc_pid_stat(5): the name, in parentheses, may hold anything; state and starttime are fields 3 and 22.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _run(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True, timeout=60)
