"""When a child has served long enough: so many jobs, or so much memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pgqueue.model.settings import WorkerSettings
from pgqueue.runtime.children import Child
from pgqueue.runtime.log import Log
from pgqueue.runtime.memory import resident_megabytes

_LOOK_SECONDS = 1.0


class Retirement:
    """Which children are due to be replaced, and why."""

    def __init__(self, settings: WorkerSettings, log: Log) -> None:
        self._max_jobs = settings.max_jobs_per_child or math.inf
        self._max_megabytes = settings.max_memory_mb
        self._log = log
        self._next_look_at = 0.0
        self._has_warned = False

    def is_worked_off(self, child: Child) -> bool:
        return child.jobs_run >= self._max_jobs

    def due(self, children: Sequence[Child], now: float) -> list[tuple[Child, str]]:
        """Give those of these children that are to be replaced, each with the reason."""
        found = [(child, f"ran {child.jobs_run} jobs") for child in children if self.is_worked_off(child)]
        if self._max_megabytes is not None and now >= self._next_look_at:
            self._next_look_at = now + _LOOK_SECONDS
            others = {child.pid: child for child in children if child.pid and not self.is_worked_off(child)}
            found += [
                (others[pid], f"holds {size:.0f} MB")
                for pid, size in resident_megabytes(list(others)).items()
                if size > self._max_megabytes and self._has_worked(others[pid], size)
            ]
        return found

    def _has_worked(self, child: Child, size: float) -> bool:
        # One that is too large before its first job gets its job: its successor would be no smaller.
        if child.jobs_run or child.held:
            return True
        if not self._has_warned:
            self._has_warned = True
            self._log.warning(
                "a child holds more than --max-memory-mb before its first job", megabytes=round(size)
            )
        return False
