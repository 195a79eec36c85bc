"""Where the next claim of a queue starts: behind the last job taken, now and then at the head.

While somebody holds a snapshot open, every claimed job leaves a dead entry at the head of the
ready index, and no scan may skip it. A claim that starts behind the last key passes none of them.
What became ready behind that place (a retry, a better priority, a late commit) is met by a rescan
from the head, which may take a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Place = tuple[int | None, str | None, int | None]

_HEAD: Place = (None, None, None)
_RESCAN_SECONDS = 0.05
_CHEAP_SECONDS = 0.005


class Claimed(Protocol):
    """What a cursor needs to know of a claimed job."""

    @property
    def job_id(self) -> int: ...
    @property
    def key(self) -> str | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def run_at(self) -> str: ...
    @property
    def is_scanned(self) -> bool: ...


class Cursor:
    """The place of one queue in one worker. Time comes in as monotonic seconds."""

    def __init__(self) -> None:
        self._after: Place = _HEAD
        self._due_at = 0.0
        self._cost_seconds = 0.0
        self._wants_rescan = False
        self._is_rescan = True
        self._began_at = 0.0

    def start(self, now: float) -> Place:
        """Say where to start a claim that begins now."""
        self._is_rescan = now >= self._due_at or (self._wants_rescan and self._cost_seconds < _CHEAP_SECONDS)
        self._began_at = now
        return _HEAD if self._is_rescan else self._after

    @property
    def was_rescan(self) -> bool:
        """Whether the claim just made looked at the head: only then does empty mean empty."""
        return self._is_rescan

    def seconds_to_rescan(self, now: float) -> float:
        """Give the time until a claim may look at the head again; 0 if it may now."""
        is_wanted_soon = self._wants_rescan and self._cost_seconds < _CHEAP_SECONDS
        return 0.0 if is_wanted_soon else max(0.0, self._due_at - now)

    def finish(self, now: float, claimed: Sequence[Claimed], asked: int) -> None:
        """Take note of what that claim brought."""
        if self._is_rescan:
            self._cost_seconds = now - self._began_at
            self._due_at = now + max(_RESCAN_SECONDS, 9 * self._cost_seconds)
        last = next((row for row in reversed(claimed) if row.is_scanned), None)
        is_full = len(claimed) >= asked
        if last is not None and (not self._is_rescan or is_full or self._after == _HEAD):
            self._after = (last.priority, last.run_at, last.job_id)
        # The end of a keyed job may make an older one of its key ready, behind this place.
        self._wants_rescan = not is_full or any(row.key is not None for row in claimed)
