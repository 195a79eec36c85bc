"""The numbers of the whole queue, read now and then by one process, however many are scraped and how often.

Of all workers one reads them: whoever holds the place. `pgqueue exporter` does it without asking. What
cannot be read is not told: no number is better than an old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pgqueue.database import Error, redact
from pgqueue.runtime.link import DatabaseLost, Link, Outage
from pgqueue.runtime.log import Log
from pgqueue.sql import gauges as questions
from pgqueue.sql.gauges import (
    DeadLetters,
    Deaths,
    Estimate,
    Overview,
    RunningQueue,
    TableSize,
    WaitingJobs,
)

REFRESH_SECONDS = 15.0
# Who looks after everybody tries first to be the one that reads; the others may be the only ones that show.
_SELDOM_SECONDS = 60.0
# A schedule that did not fire for so long is late: workers look every second.
LATE_SECONDS = 30.0

STATES = ("ready", "scheduled", "blocked", "running", "dead")
OTHER = "other"
# So many queues, breakers and rate limits get series of their own; other queues are counted together.
MAX_NAMES = 500

# How many rows one look may read: of ready jobs, which an index tells; of others; (queue, priority) pairs.
_READY_BUDGET = 5000
_BUDGET = 500
_MAX_HEADS = 1000
# Of running jobs none may be missed: the worst one rings. There are as many as all workers have slots.
_RUNNING_BUDGET = 10_000
_DEAD_BUDGET = 2000
# Of jobs that died since the look before.
_DEATHS_BUDGET = 10_000
# With more ready jobs than that, so many queues at a time are counted, up to so many jobs in each.
_COUNT_QUEUES = 30
_COUNT_JOBS = 25

# For so long a death is told, in slices of so many seconds; what was committed so late is still met.
DEATHS_SECONDS = 600
_SLICE_SECONDS = 10
_LATE_COMMIT_SECONDS = 30.0

# The plans that are right at any size; and nothing here may wait, or change anything.
_SESSION: Mapping[str, str] = {
    "statement_timeout": "3s",
    "lock_timeout": "1s",
    "default_transaction_read_only": "on",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}
# A frozen reader must not keep the place: the server ends a session that is silent for so many refreshes.
_PATIENCE = 4


@dataclass(slots=True)
class QueueGauges:
    """How one queue stands."""

    jobs: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    recent_deaths: int = 0
    oldest_ready_seconds: float = 0.0
    oldest_running_seconds: float = 0.0
    timeout_ratio: float = 0.0
    lease_ratio: float = 0.0
    is_paused: bool = False
    workers: int = 0

    def add(self, other: QueueGauges) -> None:
        """Count another queue in."""
        for state in STATES:
            self.jobs[state] += other.jobs[state]
        self.recent_deaths += other.recent_deaths
        self.oldest_ready_seconds = max(self.oldest_ready_seconds, other.oldest_ready_seconds)
        self.oldest_running_seconds = max(self.oldest_running_seconds, other.oldest_running_seconds)
        self.timeout_ratio = max(self.timeout_ratio, other.timeout_ratio)
        self.lease_ratio = max(self.lease_ratio, other.lease_ratio)
        self.workers += other.workers


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that was read at one time."""

    queues: Mapping[str, QueueGauges]
    # The states of which there are too many to count: their numbers come from the planner's statistics.
    estimated: frozenset[str]
    overview: Overview
    tables: list[TableSize]
    breakers: list[tuple[str, str]]
    rate_limits: list[tuple[str, float]]
    seconds: float
    read_at: float


class _Deaths:
    """How many jobs of each queue died lately, whatever has become of them since.

    Each look reads what died since the one before, so that a queue in which thousands die hides no other, and
    a little more. A slice of time that is met again counts once, with the greatest number met.
    """

    def __init__(self) -> None:
        self._slices: dict[int, dict[str, int]] = {}
        self._read_at = -math.inf

    @property
    def seconds(self) -> float:
        """How far back the next look has to reach."""
        return min(time.monotonic() - self._read_at + _LATE_COMMIT_SECONDS, DEATHS_SECONDS)

    def add(self, found: Iterable[Deaths], *, read_at: float) -> Mapping[str, int]:
        """Take in what a look found that began at this monotonic time; give what is not forgotten yet."""
        self._read_at = read_at
        now = 0
        for one in found:
            now = one.now
            if one.slice is not None and one.queue is not None:
                queues = self._slices.setdefault(one.slice, {})
                queues[one.queue] = max(queues.get(one.queue, 0), one.jobs)
        oldest = now - DEATHS_SECONDS // _SLICE_SECONDS
        # None of the future: the database's clock may have been set back.
        self._slices = {number: queues for number, queues in self._slices.items() if oldest < number <= now}
        deaths: Counter[str] = Counter()
        for queues in self._slices.values():
            deaths.update(queues)
        return deaths


class Gauges:
    """Reads the numbers of the whole queue every few seconds; `latest` is what any thread may tell."""

    def __init__(
        self,
        dsn: str,
        schema: str,
        outage: Outage,
        log: Log,
        *,
        refresh_seconds: float = REFRESH_SECONDS,
        place: asyncio.Event | None = None,
    ) -> None:
        """With `place`, read only if no other process does, and try seldom while that is not set."""
        silence = {"idle_session_timeout": f"{refresh_seconds * _PATIENCE + 10:.0f}s"} if place else {}
        self._link = Link(dsn, schema, "metrics", outage, {**_SESSION, **silence})
        self._log = log
        self._refresh_seconds = refresh_seconds
        self._place = place
        # The connection whose session holds the place.
        self._reads_on: object = None
        self._snapshot: Snapshot | None = None
        self._refused = ""
        # Of queues with many jobs: what was counted lately, the oldest count first.
        self._counts: dict[str, int] = {}
        self._has_many = False
        self._deaths = _Deaths()

    @property
    def is_reading(self) -> bool:
        """Whether this process is the one that reads."""
        return self._place is None or (self._reads_on is not None and self._reads_on is self._link.connection)

    @property
    def latest(self) -> Snapshot | None:
        """Give what was read last, unless that is old, or the last try failed."""
        snapshot = self._snapshot
        if snapshot is None or time.monotonic() - snapshot.read_at > self._refresh_seconds * _PATIENCE:
            return None
        return snapshot

    async def run(self) -> None:
        """Read until cancelled."""
        try:
            while True:
                if self._place is not None and not self.is_reading:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_SELDOM_SECONDS * random.uniform(0.9, 1.1)):
                            await self._place.wait()
                await self._turn()
                await asyncio.sleep(self._refresh_seconds * random.uniform(0.9, 1.1))
        finally:
            await self._link.close()

    async def _turn(self) -> None:
        try:
            if not self.is_reading:
                self._snapshot = None
                if not await self._link.run(questions.take_metrics()):
                    await self._link.close()  # a session for nothing
                    return
                self._reads_on = self._link.connection
            self._snapshot = await self._read()
        except DatabaseLost:
            self._snapshot = None
        except Error as error:
            self._snapshot = None
            reason = redact(str(error)).partition("\n")[0]
            if reason != self._refused:
                self._refused = reason
                self._log.error("metrics of the database cannot be read", error=reason)
        else:
            self._refused = ""

    async def _read(self) -> Snapshot:
        began_at = time.monotonic()
        link = self._link
        queues: dict[str, QueueGauges] = {}
        cut = await self._read_ready(queues)
        waiting = await link.run(questions.waiting(_BUDGET))
        running = await link.run(questions.running(_RUNNING_BUDGET))
        dead = await link.run(questions.dead(_DEAD_BUDGET))
        cut |= {one.state for one in waiting if one.is_cut}
        cut |= {"running"} if any(one.is_cut for one in running) else set()
        cut |= {"dead"} if any(one.is_cut for one in dead) else set()
        _fill(queues, waiting, running, dead)
        for name, deaths in (await self._read_deaths()).items():
            queues.setdefault(name, QueueGauges()).recent_deaths = deaths
        for one in await link.run(questions.queues(list(queues), MAX_NAMES)):
            queue = queues.setdefault(one.queue, QueueGauges())
            queue.is_paused, queue.workers = one.is_paused, one.workers
        if cut:
            _estimate(queues, cut, await link.run(questions.estimates()))
        overview = await link.run(questions.overview(LATE_SECONDS))
        tables = await link.run(questions.tables())
        breakers = await link.run(questions.breakers(MAX_NAMES))
        rate_limits = await link.run(questions.rate_limits(MAX_NAMES))
        now = time.monotonic()
        return Snapshot(
            _bounded(queues), frozenset(cut), overview, tables, breakers, rate_limits, now - began_at, now
        )

    async def _read_deaths(self) -> Mapping[str, int]:
        began_at = time.monotonic()
        statement = questions.deaths(_SLICE_SECONDS, self._deaths.seconds, _DEATHS_BUDGET)
        found = await self._link.run(statement)
        return self._deaths.add(found, read_at=began_at)

    async def _read_ready(self, queues: dict[str, QueueGauges]) -> set[str]:
        """Count the ready jobs, exactly if there are few; gives the states of which there are many."""
        if not self._has_many:
            found = await self._link.run(questions.ready(_READY_BUDGET))
            if not any(one.is_cut for one in found):
                for one in found:
                    queue = queues.setdefault(one.queue, QueueGauges())
                    queue.jobs["ready"], queue.oldest_ready_seconds = one.jobs, one.oldest_seconds
                return set()
        heads = await self._link.run(questions.ready_heads(_MAX_HEADS))
        # Those never counted come first, then those whose count is oldest.
        kept = {name: jobs for name, jobs in self._counts.items() if name in heads}
        turn = [*(name for name in heads if name not in kept), *kept]
        if kept:  # else it is the first time: then all of them
            turn = turn[:_COUNT_QUEUES]
        counted = await self._link.run(questions.ready_counts(turn, _COUNT_JOBS))
        self._counts = {name: jobs for name, jobs in kept.items() if name not in counted} | counted
        for name, seconds in heads.items():
            queue = queues.setdefault(name, QueueGauges())
            queue.jobs["ready"], queue.oldest_ready_seconds = self._counts.get(name, 1), seconds
        # Once every queue has been counted and none is deep, one pass may do again.
        is_shallow = len(self._counts) == len(heads) and max(self._counts.values(), default=0) <= _COUNT_JOBS
        self._has_many = not is_shallow
        return {"ready"}


def _fill(
    queues: dict[str, QueueGauges],
    waiting: list[WaitingJobs],
    running: list[RunningQueue],
    dead: list[DeadLetters],
) -> None:
    for kind in waiting:
        queues.setdefault(kind.queue, QueueGauges()).jobs[kind.state] = kind.jobs
    for busy in running:
        queue = queues.setdefault(busy.queue, QueueGauges())
        queue.jobs["running"] = busy.jobs
        queue.oldest_running_seconds = busy.oldest_seconds
        queue.timeout_ratio = busy.timeout_ratio or 0.0
        queue.lease_ratio = busy.lease_ratio
    for letters in dead:
        queues.setdefault(letters.queue, QueueGauges()).jobs["dead"] = letters.jobs


def _estimate(queues: dict[str, QueueGauges], cut: set[str], told: list[Estimate]) -> None:
    """Where counting stopped early, take the planner's word for what lies beyond, or what was counted.

    A ready count that did not reach its cap is exact and stays. Dead letters are told of every queue that
    the planner knows, whatever was met. Of the other states, the queues have the shares that they had in
    what was met.
    """
    by_name = {(one.state, one.queue): one.jobs for one in told}
    for state in cut:
        if state == "dead":
            for one in told:
                if one.state == state and one.queue:
                    queues.setdefault(one.queue, QueueGauges())
        met = sum(queue.jobs[state] for queue in queues.values())
        for name, queue in queues.items():
            counted = queue.jobs[state]
            if state == "dead":
                guess = by_name.get((state, name), by_name.get((state, ""), 0.0) if counted else 0.0)
            elif state != "ready":
                guess = by_name.get((state, None), 0.0) * counted / met
            elif counted > _COUNT_JOBS:
                guess = by_name.get((state, name), by_name.get((state, ""), 0.0))
            else:
                continue
            queue.jobs[state] = max(counted, float(round(guess)))


def _bounded(queues: dict[str, QueueGauges]) -> dict[str, QueueGauges]:
    """Keep the queues that matter most, and count the others together."""
    if len(queues) <= MAX_NAMES:
        return queues

    def weight(name: str) -> tuple[Any, ...]:
        queue = queues[name]
        is_unserved = queue.jobs["ready"] > 0 and not queue.workers and not queue.is_paused
        has_trouble = queue.recent_deaths > 0 or queue.lease_ratio > 1
        return (
            is_unserved,
            has_trouble,
            queue.oldest_ready_seconds,
            sum(queue.jobs.values()),
            queue.workers,
            name,
        )

    ranked = sorted(queues, key=weight, reverse=True)
    kept = {name: queues[name] for name in ranked[:MAX_NAMES]}
    rest = kept.setdefault(OTHER, QueueGauges())
    others = [queues[name] for name in ranked[MAX_NAMES:]]
    for queue in others:
        rest.add(queue)
    if OTHER not in queues:
        # It counts as paused if nothing waits in it that is not meant to.
        rest.is_paused = {queue.is_paused for queue in others if queue.jobs["ready"]} == {True}
    return kept
