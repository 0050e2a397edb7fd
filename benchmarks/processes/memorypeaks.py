"""How much memory a cell takes at most: its trainer's, its helpers', and shared memory; sampled from outside."""

from __future__ import annotations

import threading
import time

from benchmarks.processes.cellprocess import Workplace
from benchmarks.processes.procfs import anonymous_bytes, families, shared_memory_bytes

_PERIOD_SECONDS = 0.05
_LISTING_PERIODS = 10


class MemoryPeaks:
    """Samples from the moment that the trainer has built its state; peaks are read after `stop`.

    Shared memory is the whole machine's, so its growth is what counts.
    """

    def __init__(self, workplace: Workplace, trainer: int) -> None:
        self._workplace, self._trainer = workplace, trainer
        self.trainer_before_bytes = self.trainer_peak_bytes = anonymous_bytes(trainer)
        self.helpers_peak_bytes = 0
        self.shared_before_bytes = self.shared_peak_bytes = shared_memory_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-peaks", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        """Ends sampling; the peaks in bytes."""
        self._stopped.set()
        self._thread.join()
        return {
            "trainer_before_bytes": self.trainer_before_bytes,
            "trainer_peak_bytes": self.trainer_peak_bytes,
            "helpers_peak_bytes": self.helpers_peak_bytes,
            "shared_growth_bytes": self.shared_peak_bytes - self.shared_before_bytes,
        }

    def _sample(self) -> None:
        helpers: list[int] = []
        rounds = 0
        while not self._stopped.is_set():
            if rounds % _LISTING_PERIODS == 0:
                helpers = [pid for pid in families(self._workplace.sessions) if pid != self._trainer]
            rounds += 1
            self.trainer_peak_bytes = max(self.trainer_peak_bytes, anonymous_bytes(self._trainer))
            self.helpers_peak_bytes = max(self.helpers_peak_bytes, sum(map(anonymous_bytes, helpers)))
            self.shared_peak_bytes = max(self.shared_peak_bytes, shared_memory_bytes())
            time.sleep(_PERIOD_SECONDS)
