"""The parent's children: who runs what, what becomes of a dead one's attempts, and who replaces it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Mapping
from itertools import chain, repeat
from logging import DEBUG
from typing import Any

from pgqueue.database import redact
from pgqueue.errors import ConfigurationError
from pgqueue.model.outcome import PLAIN_SUCCESS, RELEASED, Ending, Outcome
from pgqueue.runtime.application import ApplicationError
from pgqueue.runtime.breakers import Breakers, Ticket
from pgqueue.runtime.children import Child, ChildProcess, LocalChild, Nowhere, to_wire
from pgqueue.runtime.execution import STALE_SECONDS, Ended
from pgqueue.runtime.finisher import Finisher
from pgqueue.runtime.infirmary import Infirmary
from pgqueue.runtime.launch import Launch
from pgqueue.runtime.ledger import MAX_CLAIM, Held, Ledger, Pool
from pgqueue.runtime.log import Log
from pgqueue.runtime.notify import VARIABLES
from pgqueue.runtime.orphans import bury_orphans
from pgqueue.runtime.retirement import Retirement
from pgqueue.runtime.wire import dumps
from pgqueue.sql.attempts import ClaimedRow

_TICK_SECONDS = 0.05
_NO_TICKETS: Mapping[int, Ticket] = {}
# After so many crashes a job runs apart: one more, and it is dead. Before that it runs again at once.
_ISOLATED_CRASHES = 2
_LOAD_SECONDS = 60.0
# So many outcomes may wait to be written; while more do, the database takes claims but not their ends.
_MAX_UNWRITTEN = 5000
# A child that lived so long did not die of its start.
_HEALTHY_SECONDS = 30.0
_FIRST_RESPAWN_SECONDS = 0.1
_LONGEST_RESPAWN_SECONDS = 30.0
_LONGEST_RESPAWN_AT_WORK_SECONDS = 1.0
# A child looks for a revocation before it begins what was sent so long ago, and no sooner.
_REVOKE_SECONDS = STALE_SECONDS + 0.5
_UNBEGUN_LOOKS = 8
# How often to look for children that do not answer, and for how long one may.
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 2.0


class Nursery:
    """All children of one worker. `wake` is set on every change that may give room."""

    def __init__(self, launch: Launch, ledger: Ledger, wake: asyncio.Event, log: Log) -> None:
        self._launch = launch
        self._settings = launch.settings
        self._ledger = ledger
        self._wake = wake
        self._log = log
        self._count = max(1, launch.settings.processes)
        self._children: list[Child] = []
        self._respawn_at: dict[int, float] = {}
        # Of each child's number, at work and while starting.
        self._deaths_in_a_row: dict[tuple[int, bool], int] = {}
        self._startup: asyncio.Future[Child] | None = None
        self._dsn = launch.dsn
        self._finisher: Finisher | None = None
        self._breakers: Breakers | None = None
        # The tasks whose handlers end their jobs themselves.
        self._transactional: frozenset[str] = frozenset()
        self._nowhere = Nowhere(self)
        self._infirmary = Infirmary(lambda: self._spawn(self._count), self._finish)
        self._retirement = Retirement(launch.settings, log)
        # Whose loops stand still, and what each child with work had not answered at the last look.
        self._deaf: set[Child] = set()
        self._silent: dict[Child, set[int]] = {}
        self._look_at = 0.0
        self.is_draining = False

    # Starting.

    async def start(self, ending: asyncio.Event) -> Mapping[str, Any] | None:
        """Start the first child and give what it says of the application; None if told to end meanwhile.

        Raises:
            ConfigurationError: the application cannot be loaded, or not within a minute.
        """
        self._startup = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(self.watch())
        told_to_end: asyncio.Future[Any] = asyncio.ensure_future(ending.wait())
        try:
            first = await self._spawn(0)
            if isinstance(first, LocalChild):
                first.announce()
            async with asyncio.timeout(_LOAD_SECONDS):
                await asyncio.wait([self._startup, told_to_end], return_when=asyncio.FIRST_COMPLETED)
            hello = None if told_to_end.done() else self._startup.result().hello
        except TimeoutError:
            raise ConfigurationError(
                f"importing {self._launch.app} took longer than {_LOAD_SECONDS:g} s"
            ) from None
        finally:
            watching.cancel()
            told_to_end.cancel()
            if not self._startup.done():
                self._startup.cancel()
            self._startup = None
        self._transactional = frozenset(hello["transactional"] if hello else ())
        return hello

    async def fill(self, dsn: str, finisher: Finisher, breakers: Breakers) -> None:
        """Start the other children, and tell all of them the database that was found.

        From now on they may be given work; how it ended goes to the finisher.
        """
        self._dsn = dsn
        self._finisher = finisher
        self._breakers = breakers
        for child in self._children:
            child.tell_dsn(dsn)
        for number in range(1, self._count):
            await self._spawn(number)

    async def _spawn(self, number: int) -> Child:
        launch = self._launch
        if self._settings.processes == 0:
            os.environ["PGQUEUE_SCHEMA"] = launch.schema
            try:
                child: Child = LocalChild(number, self._shares(number), self, app=launch.app)
            except ApplicationError as error:
                sys.stderr.write(redact(error.details))
                raise
        else:
            environment = {**launch.environment, "PGQUEUE_SCHEMA": launch.schema}
            for name in VARIABLES:
                environment.pop(name, None)
            # In the environment, not on the command line: that one everybody on the machine can read.
            if self._dsn:
                environment["PGQUEUE_DSN"] = self._dsn
            process = ChildProcess(
                number,
                self._shares(number),
                self,
                app=launch.app,
                environment=environment,
                log_format=launch.log_format,
                log_level=launch.log_level,
                worker_id=launch.worker_id,
            )
            await process.connect()
            child = process
        self._children.append(child)
        return child

    def _shares(self, number: int) -> list[int]:
        """Deal out each pool's slots to the children; who gets one more changes from pool to pool."""
        if number == self._count:  # the infirmary
            return [1 for _ in self._settings.pools()]
        return [
            slots // self._count + ((number - pool) % self._count < slots % self._count)
            for pool, (slots, _) in enumerate(self._settings.pools())
        ]

    def count_up(self) -> int:
        """Count the children that take work; any thread may ask."""
        return sum(child.is_ready for child in list(self._children))

    # What children say.

    def child_ready(self, child: Child) -> None:
        if self._startup is not None and not self._startup.done():
            self._startup.set_result(child)
        self._wake.set()

    def child_failed(self, child: Child, message: str, details: str) -> None:
        if self._startup is not None and not self._startup.done():
            sys.stderr.write(redact(details))
            self._startup.set_exception(ConfigurationError(message))
        else:
            self._log.error("child cannot load the application", child=child.number, error=message)

    def attempts_ended(
        self, pool: int, serials: list[int], seconds: list[float], others: list[Ended]
    ) -> None:
        all_held, ended = self._ledger.held, []
        for serial, took, outcome in chain(zip(serials, seconds, repeat(PLAIN_SUCCESS)), others):
            held = all_held.get(serial)
            if held is None or held.is_finishing:
                continue
            if held.is_lost:
                self._ledger.forget(held)
                continue
            ended.append(held.ended(outcome, took))
        observed = self._ledger.pools[pool]
        observed.observe(*seconds)
        for held in ended if others else ():
            if held.outcome.ending is Ending.RELEASED:
                # It waited in vain behind longer ones: claim less ahead.
                observed.seconds = None
            elif held.outcome is not PLAIN_SUCCESS and held.outcome.ending is not Ending.UNKNOWN_TASK:
                observed.observe(held.seconds)
        self._finish(ended)
        # To wake the feeder in vain costs as much as many small jobs do.
        if self.is_draining or any(self.room(pool) for pool in self._ledger.pools):
            self._wake.set()

    def progress_made(self, progress: list[tuple[int, dict[str, Any]]]) -> None:
        for serial, said in progress:
            held = self._ledger.held.get(serial)
            if held is not None and self._finisher is not None:
                self._finisher.note_progress(held, dumps(said).decode())

    def _finish(self, ended: list[Held]) -> None:
        if ended and self._finisher is not None:
            self._finisher.add(ended)

    def lose(self, held: Held, reason: str) -> None:
        """Take note that an attempt is not ours any more, and tell its handler."""
        if self._finisher is not None:
            self._finisher.lost(held, reason)
        if not held.is_finishing:
            held.child.lose([held.serial])
        self._wake.set()

    # Giving them work.

    def room(self, pool: Pool) -> int:
        """Say how many jobs to claim for a pool: its free slots that children have too, and some ahead."""
        ready = self._ready(pool)
        if not ready or not self._ledger.can_renew:
            return 0
        if self._ledger.unwritten > _MAX_UNWRITTEN:
            self._ledger.is_backed_up = True
            return 0
        free = sum(max(0, child.free(pool.number)) for child in ready)
        ahead = pool.ahead()
        room = min(pool.slots - pool.in_flight, free) + ahead
        # Short jobs: rather one large claim, when half of them are done or there is room for a full one, than
        # many small ones.
        return room if room > min(ahead // 2, MAX_CLAIM - 1) else 0

    def _ready(self, pool: Pool) -> list[Child]:
        return [
            child
            for child in self._children
            if child.is_ready
            and child.slots[pool.number]
            and child.number < self._count
            and not child.is_retired
            and child not in self._deaf
            and not self._retirement.is_worked_off(child)
        ]

    def dispatch(self, rows: list[ClaimedRow], queue: str, pool: Pool) -> None:
        """Send the attempts of one claim to the children with most room."""
        now = time.monotonic()
        ready = self._ready(pool)
        if not ready or self.is_draining:
            # The last one died while the claim was under way, or we are about to end.
            taken = self._take(rows, queue, pool, self._nowhere, now)
            self._finish([held.ended(RELEASED) for held in taken])
            return
        rows, tickets = self._admit(rows, queue, pool, now)
        if self._settings.processes and any(row.crashes >= _ISOLATED_CRASHES for row in rows):
            # Apart from all others, because processes keep dying where they run.
            suspects = [row for row in rows if row.crashes >= _ISOLATED_CRASHES]
            rows = [row for row in rows if row.crashes < _ISOLATED_CRASHES]
            for held in self._take(suspects, queue, pool, self._nowhere, now, tickets):
                self._infirmary.admit(held)
        free = [child.free(pool.number) for child in ready]
        for child, dealt in zip(ready, deal(rows, free), strict=True):
            if dealt:
                taken = self._take(dealt, queue, pool, child, now, tickets)
                sent = list(map(to_wire, dealt))
                child.run(pool.number, taken[0].serial, sent, queue, dealt[0].token)
        if self._log.is_enabled(DEBUG):
            for row in rows:
                self._log.debug(
                    "job started", job_id=row.job_id, task=row.task, queue=queue, attempt=row.attempt
                )

    def _admit(
        self, rows: list[ClaimedRow], queue: str, pool: Pool, now: float
    ) -> tuple[list[ClaimedRow], Mapping[int, Ticket]]:
        """Give back what its circuit breaker does not let start; gives the others, and tickets by job."""
        if self._breakers is None or not any(map(self._breakers.of, {row.task for row in rows})):
            return rows, _NO_TICKETS
        admitted, tickets, refused = list[ClaimedRow](), dict[int, Ticket](), list[Held]()
        for row in rows:
            breaker = self._breakers.of(row.task)
            ticket = None if breaker is None else breaker.admit(queue)
            if breaker is not None and ticket is None:
                (held,) = self._take([row], queue, pool, self._nowhere, now)
                held.breaker = breaker.name
                refused.append(held.ended(RELEASED))
                continue
            admitted.append(row)
            if ticket is not None:
                tickets[row.job_id] = ticket
        self._finish(refused)
        return admitted, tickets

    def _take(
        self,
        rows: list[ClaimedRow],
        queue: str,
        pool: Pool,
        child: Child,
        now: float,
        tickets: Mapping[int, Ticket] = _NO_TICKETS,
    ) -> list[Held]:
        taken, overtaken = self._ledger.take(rows, queue, pool, child, now)
        if tickets:
            for held in taken:
                held.ticket = tickets.get(held.row.job_id)
        if self._transactional:
            for held in taken:
                held.is_transactional = held.row.task in self._transactional
        for older in overtaken:
            # Of one whose end gave the job back we may hear later than of the next claim.
            if not older.is_lost and not (self._finisher and self._finisher.is_writing(older)):
                self.lose(older, "another claim of the job was made meanwhile")
        return taken

    # Their end.

    async def watch(self) -> None:
        """Notice dead children and attempts past their deadline, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            for child in list(self._children):
                if (reason := child.exit_reason()) is not None:
                    self._bury(child, reason)
                elif not child.hello and now - child.started_at > _LOAD_SECONDS and child.kill():
                    self._log.error(
                        "killing a child that does not come up", child=child.number, pid=child.pid
                    )
            self._kill_overdue(now)
            self._notice_deaf(now)
            if self._settings.processes:  # else handlers start processes of their own here
                bury_orphans({child.pid for child in self._children})
            if not self.is_draining:
                self._retire(now)
                await self._infirmary.tend(now)
            for number in [number for number, at in self._respawn_at.items() if now >= at]:
                del self._respawn_at[number]
                if not self.is_draining:
                    await self._respawn(number, now)

    def _retire(self, now: float) -> None:
        """Replace children that have served long enough, and close those of them that have nothing left."""
        for child in [child for child in self._children if child.is_retired and not child.held]:
            self._children.remove(child)
            child.close()
        serving = [child for child in self._children if child.is_ready and not child.is_retired]
        for child, reason in self._retirement.due(serving, now):
            child.is_retired = True
            child.stop()
            if child is self._infirmary.child:
                self._infirmary.child = None
            else:
                self._respawn_at[child.number] = now
            self._log.info(
                "child retired", child=child.number, pid=child.pid, reason=reason, jobs=len(child.held)
            )

    async def _respawn(self, number: int, now: float) -> None:
        try:
            await self._spawn(number)
        except OSError as error:
            # No memory, no process, no descriptor left, just now.
            self._log.error("a child cannot be started, trying again", child=number, error=str(error))
            self._respawn_at[number] = now + random.uniform(0.5, 1) * _LONGEST_RESPAWN_SECONDS / 6

    def _bury(self, child: Child, reason: str) -> None:
        """Give back what a dead child held: whoever ran then is a suspect, the others are not."""
        self._children.remove(child)
        running, unheard = child.running(), child.ended()
        held = [self._ledger.held[serial] for serial in child.held if serial in self._ledger.held]
        was_killed_by_us = any(one.kill_reason for one in held)
        now = time.monotonic()
        ended = []
        for one in held:
            if one.is_finishing:
                continue
            if one.is_lost:
                self._ledger.forget(one)
            elif one.kill_reason and one.serial in running:
                ended.append(one.ended(_outcome_of_kill(one), now - one.claimed_at))
            elif one.serial in running and not was_killed_by_us:
                died = Outcome(Ending.FAILED, f"its process {reason}")
                one.has_crashed = True
                ended.append(one.ended(died, now - one.claimed_at))
            elif one.serial in running:
                # Not its fault, so no attempt used up; that it ran, and will run again, stays on record.
                undone = Outcome(Ending.RELEASED, f"began, but its process {reason}")
                ended.append(one.ended(undone, now - one.claimed_at))
            elif one.serial in unheard:
                # Not its fault either, but its effect has happened: that must not go on for ever.
                unknown = Outcome(Ending.FAILED, f"ended, but before it was reported its process {reason}")
                one.has_crashed = True
                ended.append(one.ended(unknown, now - one.claimed_at))
            else:
                ended.append(one.ended(RELEASED))
        self._finish(ended)
        child.close()
        if self._startup is not None:
            if not self._startup.done():
                self._startup.set_exception(
                    ConfigurationError(f"the process that loads {self._launch.app} {reason}")
                )
        elif not self.is_draining:
            if child.number < self._count and not child.is_retired:
                self._plan_respawn(child, now, was_killed_by_us=was_killed_by_us)
            if child is self._infirmary.child:
                self._infirmary.child = None
            elif child.number == self._count and not child.is_retired:  # let go, because nobody needed it
                return
            self._ledger.metrics.child_died(jobs=len(ended))
            self._log.error("child died", child=child.number, pid=child.pid, reason=reason, jobs=len(ended))
        self._wake.set()

    def _plan_respawn(self, child: Child, now: float, *, was_killed_by_us: bool) -> None:
        """Replace it at once, or after a pause if its like keep dying, or a broken start forks for ever.

        One that we killed says nothing about the next. One that died over its work is the fault of its
        jobs, which have a limit of their own, and the worker's other jobs should not wait long for it; nor
        does it say that the next one cannot start.
        """
        is_new = was_killed_by_us or now - child.started_at > _HEALTHY_SECONDS
        is_at_work = bool(child.hello)
        if is_at_work:
            self._deaths_in_a_row.pop((child.number, False), None)
        deaths = 0 if is_new else self._deaths_in_a_row.get((child.number, is_at_work), 0)
        self._deaths_in_a_row[child.number, is_at_work] = 0 if was_killed_by_us else deaths + 1
        longest = _LONGEST_RESPAWN_AT_WORK_SECONDS if is_at_work else _LONGEST_RESPAWN_SECONDS
        pause = min(longest, _FIRST_RESPAWN_SECONDS * 2 ** min(deaths, 10))
        self._respawn_at[child.number] = now + (pause * random.uniform(0.5, 1) if deaths else 0.0)

    def _kill_overdue(self, now: float) -> None:
        """End children over handlers that do not stop, and only over those.

        A handler that blocks its child's loop keeps its neighbours from beginning, and from telling that
        they have ended. The one that blocks has a deadline of its own.
        """
        grace = self._settings.kill_grace_seconds
        seen: dict[Child, tuple[set[int], set[int]]] = {}
        for held in self._ledger.snapshot():
            if held.is_finishing or held.kill_reason or held.child is self._nowhere:
                continue
            if now >= held.deadline_at + grace:
                reason = "timeout"
            elif now >= held.kill_at:
                reason = "cancel"
            else:
                continue
            child = held.child
            if child not in seen:
                # In this order: what ends in between is seen.
                seen[child] = child.running(), child.ended()
            running, ended = seen[child]
            held.is_kept_waiting = held.serial not in running
            if held.is_kept_waiting:
                if held.serial not in ended:
                    self._give_up(held, now)
            elif held.unbegun_looks and reason == "cancel":
                # It began after it should have ended: it has not had its time to hear.
                held.unbegun_looks, held.kill_at = 0, now + grace
            else:
                self._kill(held, reason)

    def _give_up(self, held: Held, now: float) -> None:
        """Give an attempt back that its child has not begun, once it is sure that it never will."""
        if held.is_lost or now - max(held.claimed_at, held.sent_at) < _REVOKE_SECONDS:
            return
        if not held.unbegun_looks:
            held.child.lose([held.serial])
        held.unbegun_looks += 1
        # It may have begun and ended, and the news be in the socket: that is read between two looks.
        if held.unbegun_looks >= _UNBEGUN_LOOKS:
            self._finish([held.ended(RELEASED)])
            self._wake.set()

    def _notice_deaf(self, now: float) -> None:
        """Notice children whose loop stands still: they tell and hear nothing, and get no new work."""
        if now < self._look_at or not self._settings.processes:
            return
        self._look_at = now + _LOOK_SECONDS
        silent = {child: self._unanswered(child, now) for child in self._children if child.held}
        deaf = {child for child, serials in silent.items() if serials & self._silent.get(child, set())}
        for child in deaf - self._deaf:
            rows = [self._ledger.held[one].row for one in child.running() if one in self._ledger.held]
            self._log.warning(
                "a child's loop does not answer",
                child=child.number,
                pid=child.pid,
                waiting=len(silent[child]),
                running=",".join(sorted({row.task for row in rows})),
                hint="an async handler blocks it: let it await, or declare it without async",
            )
        for child in self._deaf - deaf:
            if child in self._children:
                self._log.info("a child's loop answers again", child=child.number, pid=child.pid)
            self._wake.set()
        self._silent, self._deaf = silent, deaf

    def _unanswered(self, child: Child, now: float) -> set[int]:
        """Give what was sent there a while ago and does not run, though nothing has been heard of it."""
        held = self._ledger.held
        return {
            serial
            for serial in child.held - child.running()
            if (one := held.get(serial)) is None or now - max(one.claimed_at, one.sent_at) > _SILENT_SECONDS
        }

    def _kill(self, held: Held, reason: str) -> None:
        held.kill_reason = reason
        log = self._log.bind(job_id=held.row.job_id, task=held.row.task, attempt=held.row.attempt)
        if held.child.kill():
            log.warning("killing a child whose handler does not stop", child=held.child.number, reason=reason)
        else:
            log.error("a handler does not stop, and without child processes it cannot be killed")

    def stop(self) -> None:
        """Have every child start nothing more and give back what it has not started."""
        self.is_draining = True
        self._infirmary.release()
        for child in self._children:
            child.stop()

    def end(self) -> None:
        """Kill every child and wait until it is gone; handlers inside the parent go on."""
        for child in [child for child in self._children if child.kill()]:
            child.close()
            self._children.remove(child)

    def close(self) -> None:
        for child in self._children:
            child.close()


def deal(rows: list[ClaimedRow], free: list[int]) -> list[list[ClaimedRow]]:
    """Deal rows out to children with so many free slots, each row to the one with most room then."""
    if len(free) == 1:
        return [rows]
    dealt: list[list[ClaimedRow]] = [[] for _ in free]
    start = 0
    while start < len(rows):
        most = max(free)
        widest = [number for number, room in enumerate(free) if room == most]
        others = [room for room in free if room < most]
        # They take turns until the next one has as much room as they.
        rounds = most - max(others) if others else len(rows)
        end = start + rounds * len(widest)
        for nth, number in enumerate(widest):
            dealt[number] += rows[start + nth : end : len(widest)]
            free[number] -= rounds
        start = end
    return dealt


def _outcome_of_kill(held: Held) -> Outcome:
    if held.kill_reason == "cancel":
        return Outcome(
            Ending.CANCELLED,
            "cancelled on request; it did not stop, so its process was killed",
            is_unsure=True,
        )
    return Outcome(
        Ending.FAILED,
        f"timed out after {held.row.timeout_seconds:g} s; "
        "its handler did not stop, so its process was killed",
        is_unsure=True,
    )
