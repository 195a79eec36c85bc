"""Looking after everybody's jobs: a few of all workers do it, and any of them suffices."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pgqueue import __version__
from pgqueue.database import Error, errors, redact
from pgqueue.runtime.bell import Bell
from pgqueue.runtime.ledger import Ledger
from pgqueue.runtime.link import DatabaseBusy, DatabaseLost, Link, Outage
from pgqueue.runtime.log import Log
from pgqueue.sql import attempts, audit, limits, once, presence

_PROMOTE_SECONDS = 1.0
# Jobs that come due one by one are promoted together.
_PROMOTE_PAUSE_SECONDS = 0.005
# Past due for so long and not promoted: somebody has locked it just now. Look again after as long.
_LOCKED_SECONDS = 0.05
# A timer may go off a little early, and to ask before a job is due is to ask once more.
_TIMER_SECONDS = 0.0005
_REAP_SECONDS = 1.0
_PRESENCE_SECONDS = 10.0
_REGISTER_SECONDS = 30.0
# Who has no place among those who look after everybody finds out so soon that it has got one.
_NOT_OURS_SECONDS = 1.0
_SWEEP_SECONDS = 60.0
_PARTITION_SECONDS = 3600.0
_PARTITION_DAYS = 7
_PRUNE_SECONDS = 600.0
_PRUNE_PAUSE_SECONDS = 0.2
# What was done to the queue is told for so long.
_AUDIT_SECONDS = 90 * 86_400.0

# A pass that a held snapshot makes slow may take a tenth of the time, no more. But one pass that had to
# wait, for a lock on the table say, must not put everybody off for long.
_SHARE = 9.0
# One for jobs whose lease ran out passes every job that ran since: a twentieth, once that is felt.
_REAP_SHARE, _FELT_SECONDS = 19.0, 0.02
# By then most of those taken back are due again, and whoever should see to that may be gone.
_TAKEN_BACK_SECONDS = 2.0
_LONGEST_PROMOTE_PAUSE_SECONDS = 2.0


class Maintenance:
    """Promotes what is due, reaps what nobody holds, and keeps the history in shape."""

    def __init__(
        self,
        *,
        link: Link,
        history: Link | None,
        ledger: Ledger,
        outage: Outage,
        worker_id: str,
        slots: int,
        lease_seconds: float,
        kill_grace_seconds: float,
        retention_seconds: float,
        key_retention_seconds: float,
        definitions: Callable[[], Sequence[Mapping[str, Any]]],
        rate_limits: Sequence[Mapping[str, Any]],
        bell: Bell,
        log: Log,
    ) -> None:
        self._link = link
        self._bell = bell
        # A session opened for an hourly chore, and closed after it: dropping partitions waits for readers.
        # None: there are no sessions to be had.
        self._history = history
        self._ledger = ledger
        self._outage = outage
        self._worker_id = worker_id
        self._slots = slots
        self._lease_seconds = lease_seconds
        # Whoever runs a job past its deadline gets the time to kill it, and to say so, first.
        self._deadline_grace_seconds = kill_grace_seconds + 2.0
        # Since when we have looked without a gap, and when last, by the database's clock; and through what.
        self._watching_since = math.inf
        self._looked_at = -math.inf
        self._watched_on: object = None
        self._reap_at = 0.0
        self._retention_seconds = retention_seconds
        self._key_retention_seconds = key_retention_seconds
        self._definitions = definitions
        self._rate_limits = rate_limits
        self._log = log
        self._sweep_after = ""
        self._next_due_at = 0.0
        self._own_due_at = math.inf
        self._promote_now = asyncio.Event()
        self._put_off: set[str] = set()

    def expect_due(self, delay_seconds: float) -> None:
        """Know that a job of ours comes due so soon, rather than find it at the next look."""
        due_at = time.monotonic() + delay_seconds
        self._own_due_at = min(self._own_due_at, due_at)
        if due_at < self._next_due_at:
            self._promote_now.set()

    async def run(self) -> None:
        """Do every chore at its interval until cancelled."""
        async with asyncio.TaskGroup() as chores:
            chores.create_task(self._promote())
            chores.create_task(self._reap())
            for chore, seconds in (
                (self._see, _PRESENCE_SECONDS),
                (self._register_tasks, _REGISTER_SECONDS),
            ):
                chores.create_task(self._every(seconds, chore))
            for chore, seconds in (
                (self._sweep, _SWEEP_SECONDS),
                (self._keep_history, _PARTITION_SECONDS),
                (self._prune_keys, _PRUNE_SECONDS),
            ):
                chores.create_task(self._every(seconds, chore, for_everybody=True))

    async def register(self) -> None:
        """Write down who we are and what we know; done before the first claim."""
        await self._register_tasks()
        await self._link.run(limits.declare(self._rate_limits))
        await self._see()

    async def leave(self) -> None:
        try:
            await self._link.run(presence.forget_worker(self._worker_id))
        except (DatabaseLost, Error):
            return

    async def _every(
        self, seconds: float, chore: Callable[[], Awaitable[None]], *, for_everybody: bool = False
    ) -> None:
        while True:
            if for_everybody:
                await self._bell.place.wait()
            cost = await self._attempt(chore)
            await asyncio.sleep(max(seconds * random.uniform(0.9, 1.1), min(_SHARE * cost, 6 * seconds)))

    async def _attempt(self, chore: Callable[[], Awaitable[None]]) -> float:
        """Do a chore, whatever it meets; gives the seconds it took, 0 if it only had to wait."""
        began_at, name = time.monotonic(), chore.__name__.strip("_")
        try:
            await chore()
        except DatabaseBusy as busy:
            if name not in self._put_off:
                self._put_off.add(name)
                self._log.warning("maintenance put off", chore=name, reason=str(busy))
            return 0.0
        except DatabaseLost:
            return 0.0
        except Error as error:
            self._log.error("maintenance failed", chore=name, error=redact(str(error)).partition("\n")[0])
        else:
            self._put_off.discard(name)
        return time.monotonic() - began_at

    async def _promote(self) -> None:
        while True:
            self._promote_now.clear()
            if self._bell.is_maintainer or time.monotonic() >= self._own_due_at:
                cost = await self._attempt(self._promote_due)
                share = min(_SHARE * cost, _LONGEST_PROMOTE_PAUSE_SECONDS) if cost > 0.05 else 0.0
                pause = max(_PROMOTE_PAUSE_SECONDS, self._next_due_at - time.monotonic(), share)
            else:
                pause = min(_NOT_OURS_SECONDS, self._own_due_at - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._promote_now.wait()

    async def _promote_due(self) -> None:
        now = time.monotonic()
        if self._own_due_at <= now:
            self._own_due_at = math.inf
        self._next_due_at = now + _PROMOTE_SECONDS * random.uniform(0.9, 1.1)
        promoted, due_in_seconds = await self._link.run(attempts.promote())
        if due_in_seconds is not None:
            if due_in_seconds < -_LOCKED_SECONDS and not promoted:
                due_in_seconds = _LOCKED_SECONDS
            due_at = time.monotonic() + due_in_seconds + _TIMER_SECONDS
            self._next_due_at = min(self._next_due_at, due_at)

    async def _reap(self) -> None:
        """Take back what nobody renews, once we have looked for the time of a lease without a gap.

        After an outage, or when we, the machine or the server stood still, the others get that time to
        renew first.
        """
        interval = min(_REAP_SECONDS, self._lease_seconds / 4)
        # Just often enough to know that there was no gap.
        standby_interval = self._lease_seconds / 3
        while True:
            await self._bell.reaps.wait()
            await self._attempt(self._take_back)
            is_maintainer = self._bell.is_maintainer
            await asyncio.sleep(interval * random.uniform(0.9, 1.1) if is_maintainer else standby_interval)

    async def _take_back(self) -> None:
        if self._outage.is_on or self._link.connection is not self._watched_on:
            self._looked_at = -math.inf
        # A lease just renewed outlasts a pause as long as this one.
        longest_gap = self._lease_seconds / 2
        has_watched = self._looked_at - self._watching_since >= self._lease_seconds
        began_at = time.monotonic()
        takes = has_watched and began_at >= self._reap_at
        # The limit goes with the statement: it may itself be what had to wait.
        now, taken = await self._link.run(
            attempts.reap(self._looked_at + longest_gap if takes else 0.0, self._deadline_grace_seconds)
        )
        cost = time.monotonic() - began_at
        if takes and cost > _FELT_SECONDS:
            self._reap_at = time.monotonic() + min(_REAP_SHARE * cost, self._lease_seconds)
        if not 0 <= now - self._looked_at <= longest_gap:
            self._watching_since = now
        self._looked_at, self._watched_on = now, self._link.connection
        if taken and not self._bell.is_maintainer:
            self.expect_due(_TAKEN_BACK_SECONDS)
        self._ledger.metrics.reaped(taken)
        for row in taken:
            self._log.warning(
                "job taken back",
                job_id=row.job_id,
                task=row.task,
                queue=row.queue,
                state=row.state,
                reason=row.reason,
            )

    async def _see(self) -> None:
        self._bell.workers, now = await self._link.run(
            presence.see_worker(
                self._worker_id,
                socket.gethostname(),
                os.getpid(),
                __version__,
                self._ledger.queues,
                self._slots,
            )
        )
        self._ledger.metrics.heard_clock(now)

    async def _register_tasks(self) -> None:
        await self._link.run(presence.register_tasks(self._definitions()))

    async def _sweep(self) -> None:
        woken, after = await self._link.run(attempts.sweep(self._sweep_after))
        self._sweep_after = after or ""
        if woken:
            self._ledger.metrics.rescued["overlooked"] += woken
            self._log.warning("woke blocked jobs that nobody else had", jobs=woken)
        await self._link.run(limits.mend())

    async def _prune_keys(self) -> None:
        """Forget old idempotency keys, a batch at a time so that nobody waits, and what was done long ago."""
        for old in (once.prune(self._key_retention_seconds), audit.prune(_AUDIT_SECONDS)):
            pruned = 1
            while pruned:
                pruned = await self._link.run(old)
                await asyncio.sleep(_PRUNE_PAUSE_SECONDS)

    async def _keep_history(self) -> None:
        # Make before you drop: a look for a missing day is remembered by the session.
        await self._link.run(attempts.make_partitions(_PARTITION_DAYS))
        expired = await self._link.run(presence.expired_partitions(self._retention_seconds))
        if not expired:
            return
        if self._history is None:
            for partition in expired:
                await self._drop_at_once(partition.name)
            return
        try:
            if not await self._history.run(presence.take_partition_duty()):
                return
            for partition in await self._history.run(presence.expired_partitions(self._retention_seconds)):
                try:
                    for statement in presence.drop_partition(partition):
                        await self._history.run(statement)
                except errors.InsufficientPrivilege:
                    # Our role does not own the tables.
                    await self._drop_at_once(partition.name)
                    continue
                self._log.info("history dropped", partition=partition.name)
        finally:
            await self._history.close()

    async def _drop_at_once(self, partition: str) -> None:
        if await self._link.run(presence.drop_expired_partition(partition, self._retention_seconds)):
            self._log.info("history dropped", partition=partition)
