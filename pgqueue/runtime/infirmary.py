"""Where suspects of a crash run: one at a time, in a child of their own.

When a child dies, every attempt that ran in it is a suspect, and only one of them did it. Beside
others again and again, the culprit would take innocents down until their crashes are used up, too.
So the last try before a job is dead for its crashes is made here.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from pgqueue.model.outcome import RELEASED, Ending, Outcome
from pgqueue.runtime.children import Child, to_wire
from pgqueue.runtime.ledger import Held

# A suspect that cannot start for so long goes back: another worker's infirmary may be free. A child
# that comes up gets more time.
_PATIENCE_SECONDS = 1.0
_LOAD_SECONDS = 10.0
_AWAY_SECONDS = 1.0
_RESPAWN_SECONDS = 0.5
# The child is kept so long for the next suspect.
_IDLE_SECONDS = 30.0


class Infirmary:
    """The suspects this worker holds, and the child they run in, which comes and goes with them."""

    def __init__(self, spawn: Callable[[], Awaitable[Child]], finish: Callable[[list[Held]], None]) -> None:
        self._spawn = spawn
        self._finish = finish
        self._waiting: deque[Held] = deque()
        self._idle_since = 0.0
        self._spawn_at = 0.0
        self.child: Child | None = None

    def admit(self, held: Held) -> None:
        """Take a suspect."""
        self._waiting.append(held)

    async def tend(self, now: float) -> None:
        """Start the next suspect if none runs, and give back those that wait in vain."""
        if self.child is None and self._waiting and now >= self._spawn_at:
            self._spawn_at = now + _RESPAWN_SECONDS
            # No memory or no process left just now is no reason to end the worker.
            with contextlib.suppress(OSError):
                self.child = await self._spawn()
        child = self.child
        is_up = child is not None and child.is_ready
        patience = _PATIENCE_SECONDS if is_up else _LOAD_SECONDS
        self.release([held for held in self._waiting if now - held.claimed_at > patience])
        if child is None:
            return
        while self._waiting and child.is_ready and not child.held:
            held = self._waiting.popleft()
            if held.is_lost:
                self._finish([held.ended(RELEASED)])
                continue
            held.child, held.sent_at = child, now
            row = held.row
            child.run(held.pool.number, held.serial, [to_wire(row)], held.queue, row.token)
        if child.held or self._waiting:
            self._idle_since = now
        elif now - self._idle_since > _IDLE_SECONDS:
            self.child = None
            child.stop()
            child.kill()

    def release(self, suspects: list[Held] | None = None) -> None:
        """Give waiting suspects back, all of them if none are named; no attempt is used up."""
        chosen = list(self._waiting) if suspects is None else suspects
        self._waiting = deque(held for held in self._waiting if held not in chosen)
        away = Outcome(Ending.RELEASED, None, _AWAY_SECONDS)
        self._finish([held.ended(away) for held in chosen if not held.is_finishing])
