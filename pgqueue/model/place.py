"""Where the next claim of a queue starts: behind the last job taken, now and then at the head.

While somebody holds a snapshot open, every claimed job leaves a dead entry in the ready index, and no
scan may skip it. A claim that starts behind the last key passes none of them.

What became ready behind that place is met by a look at the head. As long as that costs little there is
one every 50 ms, and after each claim that was not full. When it has become dear it takes a thirtieth of
the time (a tenth, where jobs have keys, whose turn may come at any place); then the queue is walked
through priority by priority, each from behind its own last job, and a tenth of the time goes into doing
that from two seconds before: there are retries, and what was committed late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

_RESCAN_SECONDS = 0.05
_CHEAP_SECONDS = 0.005
_DEAR_SHARE, _KEYED_SHARE = 29, 9
_MARGIN_SECONDS = 2.0
# Look before the last place more and more seldom while nothing is found there.
_LONGEST_VAIN_SECONDS = 1.0
# More priorities than that are not told apart.
_MOST_PLACES = 16


class Start(NamedTuple):
    """Where a claim starts: behind a place, or `margin_seconds` before; and the last priority to look at."""

    priority: int | None = None
    run_at: str | None = None
    job_id: int | None = None
    margin_seconds: float = 0.0
    up_to_priority: int | None = None


HEAD = Start()


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
        # Of each priority, the last job taken; whose was the last of all; and how far the walk has come.
        self._places: dict[int, tuple[str, int]] = {}
        self._last = 0
        self._turn = 0
        self._is_early = False
        self._early_due_at = 0.0
        self._early_seconds = 0.0
        self._early_vain = 0
        self._due_at = 0.0
        self._cost_seconds = 0.0
        self._wants_rescan = False
        self._has_keys = False
        self._is_rescan = True
        self._began_at = 0.0

    def start(self, now: float) -> Start:
        """Say where to start a claim that begins now."""
        self._is_rescan = not self._places or now >= self._due_at or (self._wants_rescan and self._is_cheap)
        self._began_at = now
        if self._is_rescan:
            return HEAD
        if self._is_cheap:
            return Start(self._last, *self._places[self._last])
        order = sorted(self._places)
        if self._turn == 0:
            self._is_early = now >= self._early_due_at
        priority = order[self._turn]
        is_last = self._turn == len(order) - 1
        margin_seconds = _MARGIN_SECONDS if self._is_early else 0.0
        return Start(priority, *self._places[priority], margin_seconds, None if is_last else priority)

    @property
    def was_rescan(self) -> bool:
        """Whether the claim just made looked at the head: only then does empty mean empty."""
        return self._is_rescan

    def seconds_to_look(self, now: float) -> float:
        """Give the time until a claim may find what is not behind the last place; 0 if it may now."""
        if self._is_cheap:
            return 0.0 if self._wants_rescan else max(0.0, self._due_at - now)
        return 0.0 if self._turn else max(0.0, min(self._due_at, self._early_due_at) - now)

    def finish(self, now: float, claimed: Sequence[Claimed], asked: int) -> None:
        """Take note of what that claim brought."""
        seconds = now - self._began_at
        is_full = len(claimed) >= asked
        self._has_keys = any(row.key is not None for row in claimed) or (self._has_keys and not claimed)
        # The end of a keyed job may make an older one of its key ready, behind this place.
        self._wants_rescan = not is_full or self._has_keys
        if self._is_rescan:
            self._cost_seconds = seconds
            share = _KEYED_SHARE if self._is_cheap or self._has_keys else _DEAR_SHARE
            self._due_at = now + max(_RESCAN_SECONDS, share * seconds)
            self._turn = 0
        elif not self._is_cheap:
            self._walk_on(now, seconds, has_found=bool(claimed), is_full=is_full)
        for row in claimed:
            if row.is_scanned and (not self._is_rescan or is_full or row.priority not in self._places):
                self._places[row.priority] = (row.run_at, row.job_id)
                self._last = row.priority
        if len(self._places) > _MOST_PLACES:
            # From the last of them on they are one.
            self._places = dict(sorted(self._places.items())[: _MOST_PLACES - 1])
            self._last = min(self._last, max(self._places))
            self._turn = 0

    @property
    def _is_cheap(self) -> bool:
        return self._cost_seconds < _CHEAP_SECONDS

    def _walk_on(self, now: float, seconds: float, *, has_found: bool, is_full: bool) -> None:
        if self._is_early:
            self._early_seconds = seconds + (self._early_seconds if self._turn else 0.0)
            self._early_vain = 0 if has_found else self._early_vain + 1
            pause = max(_RESCAN_SECONDS, 9 * self._early_seconds) * 2.0 ** min(self._early_vain, 10)
            self._early_due_at = now + min(pause, max(_LONGEST_VAIN_SECONDS, 9 * self._early_seconds))
        # Full: the better ones first again.
        self._turn = 0 if is_full or self._turn + 1 >= len(self._places) else self._turn + 1
