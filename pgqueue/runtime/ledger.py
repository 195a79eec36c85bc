"""What this worker holds: every attempt from its claim to the database's word that it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pgqueue.runtime.children import Child
from pgqueue.sql.attempts import ClaimedRow

if TYPE_CHECKING:
    from pgqueue.runtime.breakers import Ticket

# How much work to claim beyond the free slots: what the slots get through in this time. Enough to
# keep them busy over a round trip, too little for another worker to miss.
AHEAD_SECONDS = 0.05
MAX_AHEAD = 1000


class Held:
    """One claimed attempt. `serial` names it inside this worker."""

    __slots__ = (
        "attempt",
        "child",
        "claimed_at",
        "deadline_at",
        "is_finishing",
        "is_lost",
        "is_questioned",
        "is_transactional",
        "kill_at",
        "kill_reason",
        "pool",
        "queue",
        "row",
        "serial",
        "ticket",
    )

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
        # When the parent ends the child over it.
        self.kill_at = math.inf
        self.kill_reason = ""
        self.is_lost = False
        # It ends itself, in the transaction of its effect: we may hear of that from the database first.
        self.is_transactional = False
        self.is_questioned = False
        self.is_finishing = False
        # What it goes under if its task depends on a circuit breaker.
        self.ticket: Ticket | None = None

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

    def observe(self, seconds: float) -> None:
        """Learn from an attempt that ended; upwards at once, downwards slowly.

        A long job among short ones must stop the claiming ahead now: what was claimed waits behind it.
        """
        if self.seconds is None or seconds > self.seconds * 8:
            self.seconds = seconds
        else:
            self.seconds += (seconds - self.seconds) * 0.05


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
    counts: Counts = field(default_factory=Counts)
    _last_serial: int = 0
    _by_job: dict[int, Held] = field(default_factory=dict)

    def take(
        self, row: ClaimedRow, queue: str, pool: Pool, child: Child, now: float
    ) -> tuple[Held, Held | None]:
        """Hold a freshly claimed row; also gives the older attempt of the same job, if we still held one.

        That older one is lost: somebody took it back while this worker was frozen or cut off.
        """
        self._last_serial += 1
        held = Held(self._last_serial, row, queue, pool, child, now)
        self.held[held.serial] = held
        older = self._by_job.get(row.job_id)
        self._by_job[row.job_id] = held
        pool.in_flight += 1
        self.counts.claimed += 1
        return held, older

    def snapshot(self) -> list[Held]:
        """Give the attempts held now; one atomic step, so any thread may ask."""
        return list(self.held.values())

    def free(self, held: Held) -> None:
        """Give an attempt's slot back: its handler ended. The attempt stays until the database knows."""
        if not held.is_finishing:
            held.is_finishing = True
            held.pool.in_flight -= 1

    def forget(self, held: Held) -> None:
        self.free(held)
        self.held.pop(held.serial, None)
        if self._by_job.get(held.row.job_id) is held:
            del self._by_job[held.row.job_id]

    @property
    def unwritten(self) -> int:
        """How many attempts have ended whose outcome the database does not know yet."""
        return len(self.held) - sum(pool.in_flight for pool in self.pools)

    @property
    def queues(self) -> list[str]:
        return [queue for pool in self.pools for queue in pool.queues]
