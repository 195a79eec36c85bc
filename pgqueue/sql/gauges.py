"""What monitoring asks of the whole queue, as statements that read a bounded number of rows each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pgqueue.sql import Statement, first_value, load

_TEXT = load("gauges")

# A worker that was not seen for so long counts as gone.
SILENT_SECONDS = 60.0


class ReadyQueue(NamedTuple):
    """Ready jobs of a queue; `is_cut`: more were met than are read, in whatever queue."""

    queue: str
    jobs: int
    is_cut: bool
    oldest_seconds: float


class WaitingJobs(NamedTuple):
    """Scheduled or blocked jobs of a queue; `is_cut`: more of that state were met than are read."""

    state: str
    queue: str
    jobs: int
    is_cut: bool


class DeadLetters(NamedTuple):
    """Dead letters of a queue; `is_cut`: more were met than are read, in whatever queue."""

    queue: str
    jobs: int
    is_cut: bool


class Deaths(NamedTuple):
    """How many jobs of a queue died in a slice of time, and which slice it is now; no queue: none did."""

    now: int
    slice: int | None
    queue: str | None
    jobs: int


class RunningQueue(NamedTuple):
    """Running jobs of a queue, and the worst of them; `is_cut`: more were met than are read."""

    queue: str
    jobs: int
    is_cut: bool
    oldest_seconds: float
    timeout_ratio: float | None
    lease_ratio: float


class NamedQueue(NamedTuple):
    queue: str
    is_paused: bool
    workers: int


class Estimate(NamedTuple):
    """How many jobs of a state there are by the planner's statistics, in a queue or (None) in all.

    Queue '' stands for each queue that they do not name.
    """

    state: str
    queue: str | None
    jobs: float


class Overview(NamedTuple):
    workers: int
    late_schedules: int
    late_seconds: float
    unplanned_schedules: int
    enqueued: int
    notification_ratio: float
    oldest_snapshot_seconds: float


class TableSize(NamedTuple):
    table: str
    rows: int
    dead_rows: int
    bytes: int


def ready(budget: int) -> Statement[list[ReadyQueue]]:
    return Statement(
        _TEXT["ready"], {"budget": budget}, lambda found: [ReadyQueue._make(row) for row in found]
    )


def ready_heads(max_heads: int) -> Statement[dict[str, float]]:
    """Give for how long the oldest ready job of each queue could have run."""
    return Statement(
        _TEXT["ready_heads"], {"max_heads": max_heads}, lambda found: {row[0]: row[1] for row in found}
    )


def ready_counts(queues: Sequence[str], cap: int) -> Statement[dict[str, int]]:
    """Count the ready jobs of some queues; more than the cap means at least so many."""
    return Statement(
        _TEXT["ready_counts"],
        {"queues": list(queues), "cap": cap},
        lambda found: {row[0]: row[1] for row in found},
    )


def waiting(budget: int) -> Statement[list[WaitingJobs]]:
    return Statement(
        _TEXT["waiting"], {"budget": budget}, lambda found: [WaitingJobs._make(row) for row in found]
    )


def dead(budget: int) -> Statement[list[DeadLetters]]:
    return Statement(
        _TEXT["dead"], {"budget": budget}, lambda found: [DeadLetters._make(row) for row in found]
    )


def deaths(slice_seconds: int, seconds: float, budget: int) -> Statement[list[Deaths]]:
    return Statement(
        _TEXT["deaths"],
        {"slice_seconds": slice_seconds, "seconds": seconds, "budget": budget},
        lambda found: [Deaths._make(row) for row in found],
    )


def running(budget: int) -> Statement[list[RunningQueue]]:
    return Statement(
        _TEXT["running"], {"budget": budget}, lambda found: [RunningQueue._make(row) for row in found]
    )


def queues(met: Sequence[str], limit: int) -> Statement[list[NamedQueue]]:
    """Give what is known of the queues met already, and of so many others."""
    return Statement(
        _TEXT["queues"],
        {"met": list(met), "limit": limit, "silent_seconds": SILENT_SECONDS},
        lambda found: [NamedQueue._make(row) for row in found],
    )


def estimates() -> Statement[list[Estimate]]:
    return Statement(_TEXT["estimates"], {}, lambda found: [Estimate._make(row) for row in found])


def overview(late_seconds: float) -> Statement[Overview]:
    return Statement(
        _TEXT["overview"],
        {"silent_seconds": SILENT_SECONDS, "late_seconds": late_seconds},
        lambda found: Overview._make(found[0]),
    )


def tables() -> Statement[list[TableSize]]:
    return Statement(_TEXT["tables"], {}, lambda found: [TableSize._make(row) for row in found])


def breakers(limit: int) -> Statement[list[tuple[str, str]]]:
    """Give the name and the state of each circuit breaker."""
    return Statement(_TEXT["breakers"], {"limit": limit}, lambda found: [(row[0], row[1]) for row in found])


def rate_limits(limit: int) -> Statement[list[tuple[str, float]]]:
    """Give for each rate limit how long the next in line has waited."""
    return Statement(
        _TEXT["rate_limits"], {"limit": limit}, lambda found: [(row[0], row[1]) for row in found]
    )


def take_metrics() -> Statement[bool]:
    return Statement(_TEXT["take_metrics"], {}, first_value)
