"""Claiming: as much as the slots can use, and sleep when there is nothing.

One task does it all, so that the protocol with the bell is read from top to bottom: claim; when
empty, poll a few times, then rest; asleep, claim once more, then wait; rung or polled, rise and
start again.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable

from pgqueue.database import Error, redact
from pgqueue.model.place import Cursor
from pgqueue.runtime.bell import GLOW, Bell, Watch
from pgqueue.runtime.breakers import Breakers
from pgqueue.runtime.ledger import MAX_CLAIM, Ledger, Pool
from pgqueue.runtime.link import DatabaseBusy, DatabaseLost, Link
from pgqueue.runtime.log import Log
from pgqueue.sql import attempts, limits
from pgqueue.sql.attempts import ClaimedRow

# While no rate limit and no pause is known, look whether there is one only so often.
_LOOK_FOR_LIMITS_SECONDS = 5.0
# A shorter sleep is not worth a question; nor must all workers ask at the same instant.
_SHORT_SLEEP_SECONDS = 0.01
_JITTER_SECONDS = 0.003

# Of a queue whose claims wait for locks in vain: each time for another one.
_PUT_OFF = "put off"

Dispatch = Callable[[list[ClaimedRow], str, Pool], None]


class Feeder:
    """Keeps the slots of one worker busy."""

    def __init__(
        self,
        *,
        link: Link,
        bell: Bell,
        ledger: Ledger,
        worker_id: str,
        lease_seconds: float,
        poll_seconds: float,
        dispatch: Dispatch,
        breakers: Breakers,
        room: Callable[[Pool], int],
        wake: asyncio.Event,
        log: Log,
    ) -> None:
        self._link = link
        self._bell = bell
        self._ledger = ledger
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._poll_seconds = poll_seconds
        self._dispatch = dispatch
        self._breakers = breakers
        self._room = room
        self._wake = wake
        self._log = log
        self._cursors = {queue: Cursor() for queue in ledger.queues}
        self._order = [(pool, queue) for pool in ledger.pools for queue in pool.queues]
        self._has_orphans = False
        self._is_stopping = False
        # Queues whose claims fail: why, as far as it was said, and when to try again.
        self._refused: dict[str, str] = {}
        self._avoided: dict[str, float] = {}
        self._ask_for_limits_at = -math.inf
        self._vain_starts = 0
        # Set while the last look at every queue found nothing to claim.
        self.is_idle = asyncio.Event()

    async def run(self) -> None:
        """Feed until told to stop; survives whatever the database does."""
        while not self._is_stopping:
            try:
                await self._round()
            except DatabaseBusy as busy:
                self._log.debug("put off", reason=str(busy))
            except DatabaseLost:
                self.is_idle.clear()
            except Error as error:
                self.is_idle.clear()
                self._say_refused("", error)
                await asyncio.sleep(random.uniform(0.5, 1.0))

    def _say_refused(self, queue: str, error: Exception) -> None:
        # Once, not once a try: until something is mended there is nothing new to say.
        reason = redact(str(error)).partition("\n")[0]
        if self._refused.get(queue) in (reason, _PUT_OFF):
            return
        if isinstance(error, DatabaseBusy):
            self._refused[queue] = _PUT_OFF
            self._log.warning("claim put off", queue=queue, reason=reason)
        else:
            self._refused[queue] = reason
            self._log.error("claim refused, trying again", queue=queue, error=reason)

    def stop(self) -> None:
        """Claim nothing more. A claim under way is heard to its end: its jobs are ours."""
        self._is_stopping = True
        self._wake.set()

    async def close(self) -> None:
        """Leave the bell to others, once `run` has ended."""
        for watch in self._bell.watches.values():
            try:
                await self._bell.rise(watch, leaves_duty=True, rings=True)
            except (DatabaseLost, Error):
                break
        await self._bell.close()
        await self._link.close()

    async def _round(self) -> None:
        await self._bell.attend()
        await self._link.connect()
        if self._has_orphans:
            await self._release_orphans()
        await self._bell.look_after_session()
        self._wake.clear()
        seconds, empty = await self._claim_all()
        if seconds > 0:
            seconds = min(seconds, await self._settle_down(empty))
            await self._wait(await self._seconds_to_next_start(seconds))

    async def _claim_all(self) -> tuple[float, list[Watch]]:
        """Claim from every queue that has room.

        Gives the seconds to wait at most (0: more is there), and the queues that ran empty.
        """
        seconds, empty, found = self._bell.poll_seconds * random.uniform(0.9, 1.1), list[Watch](), False
        for pool, queue in list(self._order):
            watch = self._bell.watches[queue]
            room = self._room(pool)
            if room < 1:
                await self._bell.rise(watch, leaves_duty=True, rings=True)
                continue
            if (avoid_seconds := self._avoided.get(queue, 0.0) - time.monotonic()) > 0:
                found, seconds = True, min(seconds, avoid_seconds)
                continue
            asked = min(room, MAX_CLAIM)
            began_at = time.monotonic()
            try:
                rows, was_rescan = await self._claim(queue, asked)
            except (DatabaseBusy, Error) as error:
                self._say_refused(queue, error)
                avoid_seconds = random.uniform(0.5, 1.0)
                if isinstance(error, DatabaseBusy):
                    if len(self._order) == 1:
                        raise
                    # Its trouble is not the others': the longer they waited for it, the later the next try.
                    avoid_seconds = max(avoid_seconds, 2 * (time.monotonic() - began_at))
                self._avoided[queue] = time.monotonic() + avoid_seconds
                found, seconds = True, min(seconds, avoid_seconds)
                continue
            if rows:
                found = True
                self._vain_starts = 0
                watch.note_found()
                try:
                    await self._breakers.ask(rows)
                finally:  # told to end meanwhile, too: they are ours
                    self._dispatch(rows, queue, pool)
                # Only now: a job that rang does not wait for it, and a ring in vain is not worth it.
                await self._bell.rise(watch)
                # Whoever was served goes last, so that no queue of a pool starves.
                self._order.remove((pool, queue))
                self._order.append((pool, queue))
                if len(rows) >= asked:
                    seconds = 0.0
                    continue
            look_seconds = 0.0
            if not was_rescan:
                # Nothing (more) behind the cursor: only the head says that a queue is empty.
                found = True
                look_seconds = self._cursors[queue].seconds_to_look(time.monotonic())
                seconds = min(seconds, look_seconds)
            if was_rescan or look_seconds > 0:
                # Until a dear look is due, whoever inserts rings as if the queue were empty.
                empty.append(watch)
        if found:
            self.is_idle.clear()
        else:
            self.is_idle.set()
        if seconds == 0 and not self._any_room() and not self._bell.is_on_duty:
            # More is there, but no room for it. Who just became full goes on to hand the watch to another.
            seconds = self._poll_seconds
        return seconds, empty

    async def _claim(self, queue: str, asked: int) -> tuple[list[ClaimedRow], bool]:
        cursor = self._cursors[queue]
        start = cursor.start(time.monotonic())
        statement = attempts.claim(queue, self._worker_id, asked, self._lease_seconds, start)
        began_at = time.monotonic()
        try:
            rows = await self._link.run(statement)
        except DatabaseBusy:
            raise
        except DatabaseLost:
            # It may have been carried out: then jobs are ours and nobody runs them.
            self._has_orphans = True
            raise
        except asyncio.CancelledError:
            self._has_orphans = True
            raise
        self._ledger.metrics.claimed(queue, rows, time.monotonic() - began_at)
        self._refused.pop(queue, None)
        self._avoided.pop(queue, None)
        cursor.finish(time.monotonic(), rows, asked)
        return rows, cursor.was_rescan

    async def _release_orphans(self) -> None:
        held = [held.row.job_id for held in self._ledger.snapshot()]
        released = await self._link.run(attempts.release_orphans(self._worker_id, held))
        self._has_orphans = False
        if released:
            self._ledger.metrics.rescued["answer_lost"] += len(released)
            self._log.info("gave back jobs claimed in an answer that never came", jobs=len(released))

    async def _settle_down(self, empty: list[Watch]) -> float:
        """Follow the bell's protocol for the queues that ran empty; give the seconds to wait."""
        seconds = self._bell.poll_seconds
        for watch in empty:
            if watch.is_asleep:
                continue
            if not watch.on_duty or watch.step >= len(GLOW):
                answer = await self._bell.rest(watch)
                if answer == "off":
                    watch.step = len(GLOW)
                    continue
                if answer == "asleep":
                    # Once more: what was inserted before we held the bell did not ring.
                    return 0.0
            seconds = min(seconds, watch.pause_seconds())
            watch.step += 1
        return seconds

    async def _seconds_to_next_start(self, seconds: float) -> float:
        """Shorten a sleep to when a rate limit, or the end of a pause, lets a waiting job start.

        Who has the watch of a queue asks; one is enough.
        """
        watched = [watch.queue for watch in self._bell.watches.values() if watch.on_duty]
        now = time.monotonic()
        is_known = now < self._ask_for_limits_at and seconds < _LOOK_FOR_LIMITS_SECONDS
        if not watched or is_known or seconds <= _SHORT_SLEEP_SECONDS:
            return seconds
        start = await self._link.run(limits.next_start(watched))
        self._ask_for_limits_at = -math.inf if start.is_possible else now + _LOOK_FOR_LIMITS_SECONDS
        if start.seconds is None:
            return seconds
        if start.seconds > 0:
            return min(seconds, start.seconds + random.uniform(0.001, _JITTER_SECONDS))
        # Due, and yet we have just claimed in vain: not ours to start now, whatever the reason.
        self._vain_starts += 1
        return min(seconds, _SHORT_SLEEP_SECONDS * 2.0 ** min(self._vain_starts, 10))

    async def _wait(self, seconds: float) -> None:
        """Wait for the bell, a free slot, or the time to poll."""
        if seconds <= 0 or self._is_stopping:
            return
        self._bell.watch_socket()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            self._bell.unwatch_socket()
        rung = {watch.queue for watch in await self._bell.take_rings()}
        self._order.sort(key=lambda place: place[1] not in rung)

    def _any_room(self) -> bool:
        return any(self._room(pool) > 0 for pool in self._ledger.pools)
