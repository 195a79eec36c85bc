"""The parent's view of the circuit breakers: which attempts may start, and what to report of them.

Children know nothing of it. While a breaker is closed this costs a look into a dictionary for each
job, and about one report a second for each breaker, or one in 50 ms while it is half-way to opening.
After a report we look where the breaker stands, so whoever runs its jobs learns within a second that
others have opened it; whoever has not heard of it for a second asks before the next job starts.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pgqueue.database import Error, redact
from pgqueue.model.breaker import has_worked
from pgqueue.model.outcome import Ending
from pgqueue.runtime.ledger import Ledger
from pgqueue.runtime.link import DatabaseBusy, DatabaseLost, Link
from pgqueue.runtime.log import Log
from pgqueue.sql import breakers
from pgqueue.sql.attempts import ClaimedRow
from pgqueue.sql.breakers import BreakerView, Permission, Results

REPORT_SECONDS = 0.8
HASTY_REPORT_SECONDS = 0.05
# What was heard of a breaker is good for so long.
FRESH_SECONDS = 1.0
# Between batches of jobs that are parked or brought back.
_MORE_SECONDS = 0.01
# So that not all workers ask for a probe at the same instant.
_JITTER_SECONDS = 0.05
_TROUBLE_SECONDS = 5.0

_UNHEARD = BreakerView(
    "",
    "closed",
    0,
    None,
    None,
    has_parked=False,
    calls=0,
    failures=0,
    min_calls=1,
    failure_ratio=1.0,
    max_failures=None,
    probe_seconds=1.0,
)


class Ticket:
    """What one attempt goes under: a breaker, its generation at the start, and the probe if it is one."""

    __slots__ = ("_breaker", "generation", "probe")

    def __init__(self, breaker: Breaker, generation: int, probe: str | None = None) -> None:
        self._breaker = breaker
        self.generation = generation
        self.probe = probe

    def note(self, ending: Ending) -> None:
        """Take note of how the attempt ended."""
        self._breaker.note(self, has_worked(ending))


class Breaker:
    """One breaker as this worker knows it. Reads no clock: `now` is monotonic time."""

    def __init__(self, name: str, tasks: Sequence[str], wake: asyncio.Event) -> None:
        self.name = name
        self.tasks = tasks
        self._wake = wake
        self.view = _UNHEARD
        self.heard_at = -math.inf
        # From when on a probe may be asked for; one that we were given and have not used; the one under way.
        self.due_at = math.inf
        self.grant: str | None = None
        self.granted_at = 0.0
        self.probing: Ticket | None = None
        # What ended since the last report, and how probes ended.
        self.successes = 0
        self.failures = 0
        self.ended_probes: list[Results] = []
        self.reported_at = -math.inf
        # Queues in which its jobs wait at the head, and when parked ones were last brought back.
        self.crowded: set[str] = set()
        self.unparked_at = -math.inf
        self._ticket = Ticket(self, 0)

    @property
    def is_closed(self) -> bool:
        return self.view.state == "closed"

    # Attempts begin and end.

    def admit(self, queue: str) -> Ticket | None:
        """Give what an attempt of this queue goes under, or None: it must not start."""
        if self.is_closed:
            return self._ticket
        if self.grant is not None:
            self.probing = Ticket(self, self.view.generation, self.grant)
            self.grant = None
            return self.probing
        self.crowded.add(queue)
        self._wake.set()
        return None

    def note(self, ticket: Ticket, has_worked: bool | None) -> None:
        """Take note of what an attempt's end tells: it worked, it failed, nothing."""
        successes, failures = int(has_worked is True), int(has_worked is False)
        if ticket.probe is not None:
            if ticket is self.probing:
                self.probing = None
                self.ended_probes.append(
                    Results(self.name, ticket.generation, successes, failures, ticket.probe)
                )
                self._wake.set()
        elif has_worked is not None and ticket.generation == self.view.generation:
            self.successes += successes
            self.failures += failures
            if failures or self.successes == 1:
                self._wake.set()

    # When to do what.

    def must_ask(self, now: float) -> bool:
        """Whether to ask the database before a job starts."""
        if self.is_closed:
            return now >= self.heard_at + FRESH_SECONDS
        return now >= self.due_at and not self.has_probe

    @property
    def has_probe(self) -> bool:
        return self.grant is not None or self.probing is not None

    def report_at(self) -> float:
        """Give when to report: soon when it may open, and at once how a probe ended."""
        if self.ended_probes:
            return -math.inf
        if self.grant is not None:
            return self.granted_at + FRESH_SECONDS
        if not self.successes + self.failures:
            return math.inf
        return self.reported_at + (HASTY_REPORT_SECONDS if self._is_near() else REPORT_SECONDS)

    def _is_near(self) -> bool:
        """Whether it is half-way to opening as far as we know; others may have the other half."""
        failures = self.view.failures + self.failures
        if self.view.max_failures is not None:
            return self.failures > 0 and 2 * failures >= self.view.max_failures
        calls = self.view.calls + self.successes + self.failures
        return self.failures > 0 and 2 * failures >= self.view.failure_ratio * max(calls, self.view.min_calls)

    def look_at(self) -> float:
        """Give when to look how it stands, without anything to report."""
        if self.is_closed:
            return math.inf
        return self.heard_at + min(FRESH_SECONDS, self.view.probe_seconds / 3)

    def unpark_at(self) -> float:
        """Give when to bring parked jobs back: all of them once it is closed, one for a probe that is due."""
        if not self.view.has_parked:
            return math.inf
        if self.is_closed:
            return self.unparked_at + _MORE_SECONDS
        return math.inf if self.has_probe else max(self.due_at, self.unparked_at + FRESH_SECONDS)

    def act_at(self) -> float:
        if self.crowded:
            return -math.inf
        return min(self.report_at(), self.look_at(), self.unpark_at())

    # What is told and heard.

    def take_results(self, now: float) -> list[Results]:
        """Give what there is to report, and count from zero."""
        if self.grant is not None and now >= self.granted_at + FRESH_SECONDS:
            # Nobody came for it; another worker may have somebody.
            self.ended_probes.append(Results(self.name, self.view.generation, 0, 0, self.grant))
            self.grant = None
        results, self.ended_probes = self.ended_probes, []
        if self.successes + self.failures:
            results.append(Results(self.name, self.view.generation, self.successes, self.failures, None))
        self.successes = self.failures = 0
        self.reported_at = now
        return results

    def put_back(self, results: Iterable[Results], *, was_undone: bool) -> None:
        """Take back what was not reported, or perhaps was: then only how a probe ended is said again.

        That is believed once, however often it is said.
        """
        for one in results:
            if one.probe is not None:
                self.ended_probes.append(one)
            elif was_undone and one.generation == self.view.generation:
                self.successes += one.successes
                self.failures += one.failures

    def learn(self, view: BreakerView, now: float) -> None:
        """Take over how it stands."""
        if view.generation < self.view.generation:  # an answer that another one has overtaken
            return
        if view.generation > self.view.generation:
            self.successes = self.failures = 0
            self._ticket = Ticket(self, view.generation)
        if self.grant != view.probe:
            self.grant = None
        if self.probing is not None and self.probing.probe != view.probe:
            self.probing = None
        if view.state == "closed":
            self.crowded.clear()
        self.view = view
        self.heard_at = now
        self.due_at = math.inf
        if view.seconds is not None:
            self.due_at = now + max(0.0, view.seconds) + random.uniform(0, _JITTER_SECONDS)

    def hear(self, permission: Permission, now: float) -> None:
        """Take over the answer to whether a job may start: as the probe, or not."""
        self.learn(
            self.view._replace(
                state="half_open" if permission.is_allowed else self.view.state,
                generation=permission.generation,
                seconds=permission.seconds,
                probe=permission.probe,
            ),
            now,
        )
        if permission.probe is not None and permission.generation == self.view.generation:
            self.grant, self.granted_at = permission.probe, now


class Breakers:
    """The breakers that this application's tasks name."""

    def __init__(
        self,
        *,
        link: Link,
        ledger: Ledger,
        tasks: Iterable[Mapping[str, Any]],
        declared: Sequence[Mapping[str, Any]],
        log: Log,
    ) -> None:
        self._link = link
        self._ledger = ledger
        self._log = log
        self._wake = asyncio.Event()
        by_name: dict[str, list[str]] = {}
        for task in tasks:
            if task["breaker"] is not None:
                by_name.setdefault(task["breaker"], []).append(task["name"])
        self._breakers = {name: Breaker(name, by_name[name], self._wake) for name in sorted(by_name)}
        self._by_task = {task: one for one in self._breakers.values() for task in one.tasks}
        self._definitions = [*declared, *({"name": name} for name in self._breakers)]

    def of(self, task: str) -> Breaker | None:
        """Give the breaker that a task depends on."""
        return self._by_task.get(task)

    async def ask(self, rows: Sequence[ClaimedRow]) -> None:
        """Ask the database about those breakers of freshly claimed jobs of which we know too little.

        If it cannot be asked, what is closed counts as closed, and what is open as open.
        """
        if not self._by_task:
            return
        now = time.monotonic()
        asked = {one.name: one for row in rows if (one := self._by_task.get(row.task)) and one.must_ask(now)}
        try:
            if stale := [name for name, one in asked.items() if one.is_closed]:
                await self._look(stale)
            for one in asked.values():
                if not one.is_closed and one.must_ask(time.monotonic()):
                    permission = await self._link.run(breakers.ask(one.name))
                    if permission.is_allowed and permission.probe is None:  # it is closed by now
                        await self._look([one.name])
                    else:
                        one.hear(permission, time.monotonic())
        except (DatabaseLost, Error) as error:
            self._log.debug("breaker not asked", error=redact(str(error)).partition("\n")[0])

    async def start(self) -> None:
        """Make our breakers known, and learn how they stand; done before the first claim.

        Raises:
            DatabaseLost: not now.
        """
        if self._definitions:
            await self._link.run(breakers.declare(self._definitions))
            await self._look(list(self._breakers))

    async def run(self) -> None:
        """Report, learn, park and bring back until cancelled."""
        while True:
            self._wake.clear()
            act_at = min((one.act_at() for one in self._breakers.values()), default=math.inf)
            try:
                async with asyncio.timeout(None if act_at == math.inf else act_at - time.monotonic()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            pause = HASTY_REPORT_SECONDS / 2
            try:
                if await self._turn():
                    pause = _MORE_SECONDS
            except DatabaseLost:
                pass  # the link has made a pause
            except Error as error:
                self._log.error("breakers cannot be kept", error=redact(str(error)).partition("\n")[0])
                pause = _TROUBLE_SECONDS
            # However much happens, this often and not more.
            await asyncio.sleep(pause)

    async def leave(self) -> None:
        """Report what is left, and give back a probe that nobody used."""
        try:
            await self._report(self._breakers.values(), math.inf)
        except (DatabaseLost, Error):
            return

    async def _turn(self) -> bool:
        """Do whatever is due; says whether there are more jobs to move."""
        now = time.monotonic()
        everyone = self._breakers.values()
        reporting = [one for one in everyone if one.report_at() <= now]
        looking = [one for one in everyone if one in reporting or one.look_at() <= now]
        await self._report(reporting, now)
        for one in looking:
            await self._keep_probe(one)
        if looking:
            await self._look([one.name for one in looking])
        return any([await self._move_jobs(one) for one in everyone])

    async def _report(self, reporting: Iterable[Breaker], now: float) -> None:
        taken = {one: one.take_results(now) for one in reporting}
        results = [result for ours in taken.values() for result in ours]
        if not results:
            return
        try:
            await self._link.run(breakers.report(results))
        except (DatabaseLost, Error) as error:
            was_undone = isinstance(error, DatabaseBusy) or not isinstance(error, DatabaseLost)
            for one, ours in taken.items():
                one.put_back(ours, was_undone=was_undone)
            raise

    async def _keep_probe(self, one: Breaker) -> None:
        """Prolong a probe while its attempt is ours: only then will there be a word of its end."""
        ticket = one.probing
        if ticket is None or ticket.probe is None:
            return
        is_ours = any(held.ticket is ticket and not held.is_lost for held in self._ledger.snapshot())
        if is_ours:
            await self._link.run(breakers.keep_probe(one.name, ticket.probe))
        elif ticket is one.probing:
            one.probing = None

    async def _look(self, names: Sequence[str]) -> None:
        views = await self._link.run(breakers.look(names))
        if missing := set(names) - {view.name for view in views}:
            # Somebody deleted their rows: that is one way to start anew.
            for name in missing:
                self._breakers[name].view = self._breakers[name].view._replace(generation=0)
            await self._link.run(breakers.declare(self._definitions))
            views = await self._link.run(breakers.look(names))
        for view in views:
            one = self._breakers[view.name]
            was_closed = one.is_closed
            one.learn(view, time.monotonic())
            if was_closed and not one.is_closed:
                seconds = None if view.seconds is None else round(view.seconds, 3)
                self._log.warning("breaker open", breaker=one.name, retry_seconds=seconds)
            elif one.is_closed and not was_closed:
                self._log.info("breaker closed", breaker=one.name)

    async def _move_jobs(self, one: Breaker) -> bool:
        """Bring parked jobs back if it is time, or park those in the way; says whether there are more."""
        unparked = 0
        if one.unpark_at() <= time.monotonic():
            one.unparked_at = time.monotonic()
            if not one.is_closed:
                await self._link.run(breakers.call(one.name, self._ledger.queues))
            elif not (unparked := await self._link.run(breakers.unpark(one.name))):
                # None left, as we shall see, or all of them locked just now.
                one.unparked_at += FRESH_SECONDS
                await self._look([one.name])
        crowded, one.crowded = one.crowded, set()
        for queue in crowded:
            parked = await self._link.run(breakers.park_ready(one.name, queue, one.tasks))
            if parked > breakers.PARK_JOBS // 10:
                one.crowded.add(queue)
        return bool(one.crowded) or unparked > 0
