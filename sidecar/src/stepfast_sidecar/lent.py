"""What a job's ranks on this node have borrowed of the memory tier beside their slots: one run at a time, by names."""

from __future__ import annotations

from collections.abc import Mapping

from stepfast.lentfile import lent_file_bytes
from stepfast.step import JobKey
from stepfast_sidecar.memory import LentFile, MemoryTier

MAX_NAMES = 16  # of one run: inodes are everybody's


class JobLent:
    """The files. What was decided under a name holds for the run: also that nothing is lent, or not any more."""

    def __init__(self, job: JobKey, memory: MemoryTier) -> None:
        self._job, self._memory = job, memory
        self._run: str | None = None
        self._files: dict[str, LentFile | None] = {}

    @property
    def size_bytes(self) -> int:
        """What they take of the memory tier, written or not."""
        return sum(file.size_bytes for file in self._files.values() if file is not None)

    def known(self, run: str) -> Mapping[str, LentFile | None]:
        """What was decided for that run, by name."""
        return self._files if run == self._run else {}

    def lend(self, run: str, name: str, data_bytes: int) -> LentFile | None:
        """Makes what is lent under a new name; 0: nothing is, from now on. Raises OSError, and nothing is lent then.

        The room for it must be there.
        """
        self.begin(run)
        self._files[name] = None
        size_bytes = lent_file_bytes(data_bytes)
        if data_bytes and self._memory.budget.take(size_bytes):
            try:
                self._files[name] = self._memory.lend(self._job, name, data_bytes)
            except OSError:
                self._memory.budget.give_back(size_bytes)
                raise
        return self._files[name]

    def take_back(self) -> int:
        """Frees what is lent; returns the bytes. Under none of its names is anything lent again in this run."""
        freed = self.size_bytes
        for name, file in self._files.items():
            if file is not None:
                self._memory.take_back(file)
                self._files[name] = None
        return freed

    def end(self, run: str) -> None:
        """The run is over here: all that it borrowed is freed and forgotten."""
        if run == self._run:
            self._end()

    def begin(self, run: str) -> None:
        """A run begins: what others of the job borrowed is freed and forgotten."""
        if run != self._run:
            self._end()
            self._run = run

    def _end(self) -> None:
        self.take_back()
        self._run, self._files = None, {}

    def has_grown(self) -> bool:
        """Whether a rank made something larger than it was lent."""
        return any(file is not None and file.has_grown() for file in self._files.values())
