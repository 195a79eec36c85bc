"""What a worker counts about itself: plain numbers, written where things happen, read when somebody scrapes.

Only the parent has them: its children report over the pipe they have, so a child that is killed takes no
number with it and leaves no series behind. Counting knows nothing of Prometheus; `exposition.py` does.

Everything but the heartbeat's failures is written on the loop. Any thread may read: what it sees of an
instant in between is a number that was true just before or just after.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from pgqueue.model.outcome import Ending
from pgqueue.sql.attempts import ClaimedRow, ReapedRow

if TYPE_CHECKING:
    from pgqueue.runtime.ledger import Held

# The same for running and waiting: jobs take from milliseconds to an hour, and so does their turn.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
ATTEMPTS = (1, 2, 3, 5, 10, 25)
CLAIM_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

# Who brought a job back that nobody was looking after any more.
RESCUES = ("lease_expired", "overdue", "child_died", "answer_lost", "overlooked")

# How many of a claim's jobs are asked how long they waited, or a few more.
_LOOKED_AT = 25

# So many pairs of queue and task get series of their own; the rest is one task of the name "other".
MAX_TASKS = 1000
UNKNOWN, OTHER = "unknown", "other"


class Histogram:
    """Counts of observations by their size."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Give how many were at most as large as each bound, as Prometheus wants it told."""
        return list(zip(_names(tuple(self.bounds)), accumulate(list(self.counts)), strict=True))


@lru_cache(maxsize=8)
def _names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*(f"{bound:g}" for bound in bounds), "+Inf")


class TaskMetrics:
    """What became of the attempts of one task in one queue."""

    __slots__ = ("attempts", "dead", "outcomes", "queue", "seconds", "task")

    def __init__(self, queue: str, task: str) -> None:
        self.queue = queue
        self.task = task
        # From the start, at zero: the first failure must be an increase.
        self.outcomes = {"succeeded": 0, "retried": 0, "dead": 0}
        self.dead: dict[str, int] = {}
        self.seconds = Histogram(SECONDS)
        self.attempts = Histogram(ATTEMPTS)


class Metrics:
    """The numbers of one worker since its start."""

    def __init__(self) -> None:
        # Whether anybody can read them; what is counted job by job is left out otherwise.
        self.is_read = False
        self._known: frozenset[str] = frozenset()
        self._tasks: dict[tuple[str, str], TaskMetrics] = {}
        self.waits: dict[str, Histogram] = {}
        self.claims_lost: dict[str, int] = {}
        self.rescued = dict.fromkeys(RESCUES, 0)
        self.claim_seconds = Histogram(CLAIM_SECONDS)
        self.heartbeat_failures = 0
        self.children_died = 0
        self.children_retired = 0
        # What to add to a monotonic time to get the database's; not a number while it is not known.
        self._to_database = math.nan

    def know(self, tasks: Iterable[str], queues: Iterable[str]) -> None:
        """Learn the names that may be labels: no job can make up others."""
        self._known = frozenset(tasks)
        for queue in queues:
            self.waits.setdefault(queue, Histogram(SECONDS))
            self.claims_lost.setdefault(queue, 0)

    def heard_clock(self, database_seconds: float) -> None:
        """Take note of the database's time just now."""
        self._to_database = database_seconds - time.monotonic()

    # What happens.

    def claimed(self, queue: str, rows: Sequence[ClaimedRow], seconds: float) -> None:
        """Take note of a claim, and of how long its jobs could have run before it."""
        if not self.is_read:
            return
        self.claim_seconds.observe(seconds)
        if not rows or math.isnan(self._to_database):
            return
        waits = self.waits.setdefault(queue, Histogram(SECONDS))
        now = time.monotonic() + self._to_database
        # They are in order: of many, some stand for their neighbours.
        step = 1 + len(rows) // _LOOKED_AT
        # A role may have another way of writing times; then there is nothing to tell.
        with suppress(ValueError):
            for place in range(0, len(rows), step):
                run_at = datetime.fromisoformat(rows[place].run_at).timestamp()
                waits.observe(max(0.0, now - run_at), min(step, len(rows) - place))

    def succeeded(self, attempts: Iterable[Held]) -> None:
        """Take note of attempts that succeeded, and whose success the database has written down."""
        if not self.is_read:
            return
        for held in attempts:
            one = self._of(held.queue, held.row.task)
            one.outcomes["succeeded"] += 1
            one.seconds.observe(held.seconds)
            one.attempts.observe(held.row.attempt)

    def ended(self, held: Held, state: str) -> None:
        """Take note of an attempt that ended otherwise, and of the state that the database gave the job."""
        if not self.is_read:
            return
        ending = held.outcome.ending
        if held.breaker or (ending is Ending.RELEASED and state != "cancelled"):
            return  # it is as if it had not started
        one = self._of(held.queue, held.row.task)
        outcome = _outcome(held, state)
        one.outcomes[outcome] = one.outcomes.get(outcome, 0) + 1
        if outcome not in ("released", "cancelled"):
            one.seconds.observe(held.seconds)
        if outcome == "dead":
            one.attempts.observe(held.row.attempt)
            reason = _reason(held)
            one.dead[reason] = one.dead.get(reason, 0) + 1

    def lost(self, held: Held) -> None:
        """Take note of an attempt that was not ours any more when we wanted to end it."""
        self.claims_lost[held.queue] = self.claims_lost.get(held.queue, 0) + 1
        one = self._of(held.queue, held.row.task)
        one.outcomes["lost"] = one.outcomes.get("lost", 0) + 1

    def reaped(self, rows: Iterable[ReapedRow]) -> None:
        """Take note of jobs that we took back from whoever held them."""
        for row in rows:
            cause = "overdue" if row.reason == "timed out" else "lease_expired"
            self.rescued[cause] += 1
            if row.state == "dead":
                one = self._of(row.queue if row.queue in self.waits else OTHER, row.task)
                one.outcomes["dead"] += 1
                reason = "timed_out" if cause == "overdue" else "crashed"
                one.dead[reason] = one.dead.get(reason, 0) + 1

    def child_died(self, jobs: int) -> None:
        """Take note of a child that died, and of how many attempts it had."""
        self.children_died += 1
        self.rescued["child_died"] += jobs

    # What is told.

    def tasks(self) -> Iterator[TaskMetrics]:
        return iter(list(self._tasks.values()))

    def _of(self, queue: str, task: str) -> TaskMetrics:
        one = self._tasks.get((queue, task))
        if one is None:
            name = task if task in self._known else UNKNOWN
            if (queue, name) not in self._tasks and len(self._tasks) >= MAX_TASKS:
                queue, name = OTHER, OTHER
            one = self._tasks.get((queue, name))
            if one is None:
                one = self._tasks[queue, name] = TaskMetrics(queue, name)
        return one


def _outcome(held: Held, state: str) -> str:
    """Name an end other than success: retried, dead, cancelled, snoozed, released or crashed."""
    if state in ("dead", "cancelled"):
        return state
    if held.is_crash:
        return "crashed"
    match held.outcome.ending:
        case Ending.SNOOZED:
            return "snoozed"
        case Ending.UNKNOWN_TASK:
            return "released"
    return "retried"


def _reason(held: Held) -> str:
    """Name why a job is dead, in one of six words."""
    if held.is_crash:
        return "crashed"
    match held.outcome.ending:
        case Ending.UNKNOWN_TASK:
            return "unknown_task"
        case Ending.DEAD:
            return "unrecoverable"
    return "timed_out" if (held.outcome.text or "").startswith("timed out after") else "failed"
