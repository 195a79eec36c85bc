"""Whether a worker lives, and whether it is ready: what a supervisor's probes are told, and why.

A worker lives while its own threads turn and it gets rid of jobs past their deadline. The database is no
part of that: to restart every worker because the database is away would help nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from pgqueue.runtime.ledger import Held

# A loop that has not come round for so long stands still.
STILL_SECONDS = 30.0
_TURN_SECONDS = 1.0


class Health:
    """The pulse of a loop, and the reasons against a process. Any thread may ask."""

    def __init__(self) -> None:
        self._turned_at = time.monotonic()
        # Asked for reasons: why it does not live, why it cannot work just now.
        self.ailments: list[Callable[[], Iterable[str]]] = []
        self.hindrances: list[Callable[[], Iterable[str]]] = []
        self._has_been_ready = False

    async def turn(self) -> None:
        """Show that the loop comes round, until cancelled."""
        while True:
            self._turned_at = time.monotonic()
            await asyncio.sleep(_TURN_SECONDS)

    def against_life(self) -> list[str]:
        """Give the reasons to restart the process."""
        reasons = [reason for ask in self.ailments for reason in ask()]
        still_seconds = time.monotonic() - self._turned_at
        if still_seconds > STILL_SECONDS:
            reasons.insert(0, f"the loop has not turned for {still_seconds:.0f} s")
        return reasons

    def against_work(self) -> list[str]:
        """Give the reasons why it does not work just now."""
        reasons = [*self.against_life(), *(reason for ask in self.hindrances for reason in ask())]
        self._has_been_ready = self._has_been_ready or not reasons
        return reasons

    def against_start(self) -> list[str]:
        """Give the reasons why it has not been ready yet; none once it has."""
        reasons = self.against_work()
        return [] if self._has_been_ready else reasons


def stuck(held: Iterable[Held], grace_seconds: float) -> list[str]:
    """Name the jobs whose deadline is long past, so long that the parent should have ended them.

    Not those that a neighbour keeps waiting: it has a deadline of its own.
    """
    now = time.monotonic()
    return [
        f"job {one.row.job_id} runs past its deadline and does not end"
        for one in held
        if not (one.is_finishing or one.is_kept_waiting)
        and now > one.deadline_at + grace_seconds + STILL_SECONDS
    ]
