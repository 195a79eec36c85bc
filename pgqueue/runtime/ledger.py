"""What this worker holds: every attempt from its claim to the database's word that it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgqueue.model.outcome import PLAIN_SUCCESS, Ending, Outcome
from pgqueue.runtime.children import Child
from pgqueue.runtime.metrics import Metrics
from pgqueue.sql.attempts import ClaimedRow

if TYPE_CHECKING:
    from pgqueue.runtime.breakers import Ticket

# How much work to claim beyond the free slots: what the slots get through in this time. Enough to
# keep them busy over a round trip, too little for another worker to miss.
AHEAD_SECONDS = 0.05
MAX_AHEAD = 2000
# One claim takes at most so many jobs: past a few hundred a larger batch gains nothing. A few claims' worth
# may be ahead, so that while one is under way the slots have something to do, whatever else holds it up.
MAX_CLAIM = 500


class Held:
    """One claimed attempt, from its claim to the database's word of its end. `serial` names it here."""

    # What most attempts never change stays on the class: there are tens of thousands of them a second.
    # When the parent ends the child over it.
    kill_at = math.inf
    kill_reason = ""
    # When its child got it, if not at once.
    sent_at = 0.0
    # In so many looks in a row, past its time, it had not begun.
    unbegun_looks = 0
    # Past its time, but it does not run: another handler blocks the loop that would tell of it.
    is_kept_waiting = False
    is_lost = False
    # It ends itself, in the transaction of its effect: we may hear of that from the database first.
    is_transactional = False
    is_questioned = False
    # What it goes under if its task depends on a circuit breaker.
    ticket: Ticket | None = None

    # Its handler has ended: how, and after how long.
    is_finishing = False
    outcome: Outcome = PLAIN_SUCCESS
    seconds = 0.0
    # The process died under it: the outcome's text says how.
    has_crashed = False
    # The answer to what wrote its end down broke: it may be written already.
    may_have_landed = False
    # When to try again, for one that was put off; monotonic.
    again_at = 0.0
    # It has not started, because this breaker is not closed.
    breaker = ""

    def __init__(
        self, serial: int, row: ClaimedRow, queue: str, pool: Pool, child: Child, now: float
    ) -> None:
        self.serial = serial
        self.row = row
        self.queue = queue
        self.pool = pool
        self.child = child
        self.claimed_at = now
        self.deadline_at = now + row.timeout_seconds if row.timeout_seconds else math.inf

    def ended(self, outcome: Outcome, seconds: float = 0.0) -> Held:
        """Note how it ended, for the finisher."""
        self.outcome = outcome
        self.seconds = seconds
        return self

    @property
    def is_crash(self) -> bool:
        """Whether it counts as a crash: its process died, or its session under its transaction."""
        return self.has_crashed or self.outcome.ending is Ending.CRASHED

    @property
    def key(self) -> str:
        """The key of its effect, the same for every attempt of the job."""
        return self.row.idempotency_key or f"job:{self.row.job_id}"


@dataclass(slots=True)
class Pool:
    """Slots and the queues that share them."""

    slots: int
    queues: list[str]
    number: int = 0
    in_flight: int = 0
    # How long a handler ran lately, weighted; None before the first.
    seconds: float | None = None

    def ahead(self) -> int:
        if self.seconds is None or self.seconds >= AHEAD_SECONDS:
            return 0
        return min(MAX_AHEAD, int(self.slots * AHEAD_SECONDS / max(self.seconds, 1e-5)))

    def observe(self, *seconds: float) -> None:
        """Learn from attempts that ended; upwards at once, downwards slowly.

        A long job among short ones must stop the claiming ahead now: what was claimed waits behind it.
        """
        average = self.seconds
        for took in seconds:
            if average is None or took > average * 8:
                average = took
            else:
                average += (took - average) * 0.05
        self.seconds = average


@dataclass(slots=True)
class Counts:
    """What became of attempts, since this worker started."""

    claimed: int = 0
    succeeded: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    snoozed: int = 0
    released: int = 0
    crashed: int = 0
    lost: int = 0


@dataclass(slots=True)
class Ledger:
    """All attempts held, by serial. Changed on the loop only; the lease keeper reads snapshots."""

    pools: list[Pool]
    held: dict[int, Held] = field(default_factory=dict)
    # Whether leases can be renewed just now: to claim while they cannot would be to lose.
    can_renew: bool = False
    # Set by who does not claim because too many outcomes wait to be written; cleared when that has changed.
    is_backed_up: bool = False
    counts: Counts = field(default_factory=Counts)
    metrics: Metrics = field(default_factory=Metrics)
    _last_serial: int = 0
    _by_job: dict[int, Held] = field(default_factory=dict)

    def take(
        self, rows: Sequence[ClaimedRow], queue: str, pool: Pool, child: Child, now: float
    ) -> tuple[list[Held], list[Held]]:
        """Hold rows of one claim; also gives older attempts of the same jobs, if we still held any.

        Those are lost: somebody took them back while this worker was frozen or cut off.
        """
        first = self._last_serial + 1
        self._last_serial += len(rows)
        serials = range(first, first + len(rows))
        job_ids = [row.job_id for row in rows]
        taken = [
            Held(serial, row, queue, pool, child, now) for serial, row in zip(serials, rows, strict=True)
        ]
        older = [self._by_job[job_id] for job_id in job_ids if job_id in self._by_job]
        self.held.update(zip(serials, taken, strict=True))
        self._by_job.update(zip(job_ids, taken, strict=True))
        pool.in_flight += len(taken)
        self.counts.claimed += len(taken)
        return taken, older

    def snapshot(self) -> list[Held]:
        """Give the attempts held now; one atomic step, so any thread may ask."""
        return list(self.held.values())

    def free(self, *ended: Held) -> None:
        """Give the slots of attempts back: their handlers ended. They stay until the database knows."""
        for held in ended:
            if not held.is_finishing:
                held.is_finishing = True
                held.pool.in_flight -= 1

    def forget(self, *ended: Held) -> None:
        self.free(*ended)
        for held in ended:
            self.held.pop(held.serial, None)
            job_id = held.row.job_id
            if self._by_job.get(job_id) is held:
                del self._by_job[job_id]

    @property
    def unwritten(self) -> int:
        """How many attempts have ended whose outcome the database does not know yet."""
        return len(self.held) - sum(pool.in_flight for pool in self.pools)

    @property
    def queues(self) -> list[str]:
        return [queue for pool in self.pools for queue in pool.queues]
