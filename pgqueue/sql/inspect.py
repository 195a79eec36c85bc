"""Questions a person asks about the queue, and their answers as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pgqueue.model.encoding import several
from pgqueue.sql import Row, Statement, column, load

_SQL = load("inspect")

COUNT_CAP = 10_000
# Longer than a few missed signs of life; a worker that is silent this long is not counted on.
SILENT_SECONDS = 60.0


class JsonText(str):
    """JSON as the database wrote it: an argument of 400 digits stays what it is."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job in a list. `since_at` is when it came into its state, or when it becomes due.

    Nobody knows when for one that `waits_for` its `rate_limit` or its `breaker`; then `since_at` is when
    it is looked at again at the latest.
    """

    id: int
    state: str
    queue: str
    task: str
    priority: int
    attempt: int
    max_attempts: int | None
    created_at: datetime
    since_at: datetime
    waits_for: str | None
    seen_at: datetime
    reason: str | None
    args: JsonText


@dataclass(frozen=True, slots=True)
class JobDetails:
    """Everything kept about one job; `seen_at` is the database's clock when it was read."""

    id: int
    state: str
    queue: str
    task: str
    priority: int
    attempt: int
    max_attempts: int | None
    crashes: int
    timeout_seconds: float | None
    created_at: datetime
    run_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    seen_at: datetime
    heartbeat_at: datetime | None
    lease_expires_at: datetime | None
    deadline_at: datetime | None
    cancel_requested_at: datetime | None
    worker_id: UUID | None
    worker_host: str | None
    worker_pid: int | None
    queue_is_paused: bool
    queue_paused_until: datetime | None
    queue_max_running: int | None
    queue_reason: str | None
    concurrency_key: str | None
    concurrency_limit: int | None
    concurrency_holders: list[int]
    unique_key: str | None
    idempotency_key: str | None
    rate_key: str | None
    rate_parked_at: datetime | None
    parked_by_breaker: str | None
    reason: str | None
    args: JsonText
    headers: JsonText | None
    errors: JsonText | None
    progress: JsonText | None
    result: JsonText | None


@dataclass(frozen=True, slots=True)
class DeadJob:
    """A dead letter in a list."""

    id: int
    queue: str
    task: str
    attempt: int
    max_attempts: int
    crashes: int
    created_at: datetime
    died_at: datetime
    seen_at: datetime
    reason: str
    args: JsonText


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadFilter:
    """Which dead letters are meant: all that match everything that is given.

    `reason` is a part of the reason, in any case of letters.
    """

    job_ids: Sequence[int] | None = None
    queue: str | None = None
    task: str | None = None
    reason: str | None = None
    older_than_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.job_ids is not None:
            object.__setattr__(self, "job_ids", tuple(several("job_ids", self.job_ids, "ids")))

    def params(self) -> dict[str, object]:
        return {
            "job_ids": None if self.job_ids is None else list(self.job_ids),
            "queue": self.queue,
            "task": self.task,
            "reason": self.reason,
            "older_than_seconds": self.older_than_seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFilter:
    """Which live jobs are meant: all in these states that match everything that is given."""

    states: Sequence[str]
    queue: str | None = None
    task: str | None = None
    older_than_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", tuple(several("states", self.states, "states")))

    def params(self) -> dict[str, object]:
        return {
            "states": list(self.states),
            "queue": self.queue,
            "task": self.task,
            "older_than_seconds": self.older_than_seconds,
        }


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """A queue at a glance. The numbers of the states in `lower_bounds` are at least what they say.

    `reason` is what an operator said when it was paused or limited.
    """

    queue: str
    ready: int
    scheduled: int
    blocked: int
    running: int
    dead: int
    oldest_ready_seconds: float | None
    is_paused: bool
    paused_until: datetime | None
    max_running: int | None
    reason: str | None
    workers: int
    lower_bounds: list[str]
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """A worker that showed signs of life. It is silent when the last one was too long ago."""

    id: UUID
    host: str
    pid: int
    version: str
    queues: list[str]
    slots: int
    running: int
    started_at: datetime
    seen_at: datetime
    now: datetime
    is_silent: bool


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job at work, and where."""

    id: int
    queue: str
    task: str
    attempt: int
    max_attempts: int
    started_at: datetime
    deadline_at: datetime | None
    lease_expires_at: datetime
    cancel_requested_at: datetime | None
    worker_host: str | None
    worker_pid: int | None
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Flow:
    """How many jobs came and went since the server counts."""

    came: int
    went: int
    at: datetime


def list_jobs(
    states: Sequence[str],
    *,
    queue: str | None = None,
    task: str | None = None,
    below_id: int | None = None,
    limit: int = 50,
    max_chars: int | None = None,
) -> Statement[list[JobSummary]]:
    """Give the newest jobs in these states; `max_chars` cuts their arguments."""
    params = {
        "states": list(states),
        "queue": queue,
        "task": task,
        "below_id": below_id,
        "limit": limit,
        "max_chars": max_chars if max_chars is not None else 2_147_483_647,
    }
    return Statement(_SQL["list_jobs"], params, _job_summaries)


def show_job(job_id: int) -> Statement[JobDetails | None]:
    return Statement(_SQL["show_job"], {"job_id": job_id}, _job_details)


def job_states(job_ids: Sequence[int]) -> Statement[dict[int, str]]:
    """Give the state of each of these jobs that exists.

    `rate_limited` for one in the line of its limit, `parked_by_breaker` for one that waits for that.
    """
    return Statement(_SQL["job_states"], {"job_ids": list(job_ids)}, lambda rows: dict(map(_pair, rows)))


def list_dead(which: DeadFilter, limit: int = 50) -> Statement[list[DeadJob]]:
    return Statement(_SQL["list_dead"], {**which.params(), "limit": limit}, _dead_jobs)


def count_dead(which: DeadFilter) -> Statement[tuple[int, datetime]]:
    return Statement(_SQL["count_dead"], which.params(), lambda rows: (rows[0][0], rows[0][1]))


def next_dead(which: DeadFilter, above_id: int, until: datetime, limit: int) -> Statement[list[int]]:
    params = {**which.params(), "above_id": above_id, "until": until, "limit": limit}
    return Statement(_SQL["next_dead"], params, column)


def count_live(which: LiveFilter) -> Statement[tuple[dict[str, int], datetime]]:
    return Statement(
        _SQL["count_live"],
        which.params(),
        lambda rows: ({row[0]: row[1] for row in rows if row[0] is not None}, rows[0][2]),
    )


def next_live(which: LiveFilter, above_id: int, until: datetime, limit: int) -> Statement[list[int]]:
    params = {**which.params(), "above_id": above_id, "until": until, "limit": limit}
    return Statement(_SQL["next_live"], params, column)


def list_queues(cap: int = COUNT_CAP) -> Statement[list[QueueSummary]]:
    """Count the jobs of each queue, up to `cap` for each state."""
    params = {"cap": cap, "silent_seconds": SILENT_SECONDS}
    return Statement(_SQL["list_queues"], params, lambda rows: [_queue_summary(row, cap) for row in rows])


def list_workers(limit: int = 1000) -> Statement[list[WorkerSummary]]:
    params = {"limit": limit, "silent_seconds": SILENT_SECONDS}
    return Statement(_SQL["list_workers"], params, lambda rows: [WorkerSummary(*row) for row in rows])


def list_running(limit: int) -> Statement[list[RunningJob]]:
    return Statement(_SQL["list_running"], {"limit": limit}, lambda rows: [RunningJob(*row) for row in rows])


def flow() -> Statement[Flow]:
    return Statement(_SQL["flow"], {}, lambda rows: Flow(*rows[0]))


def task_names() -> Statement[list[str]]:
    return Statement(_SQL["task_names"], {}, column)


def known_queues() -> Statement[list[str]]:
    return Statement(_SQL["known_queues"], {}, column)


def queue_names() -> Statement[list[str]]:
    return Statement(_SQL["queue_names"], {}, column)


def _pair(row: Row) -> tuple[int, str]:
    return row[0], row[1]


def _job_summaries(rows: Sequence[Row]) -> list[JobSummary]:
    return [JobSummary(*_with_documents(row, 1)) for row in rows]


def _job_details(rows: Sequence[Row]) -> JobDetails | None:
    return JobDetails(*_with_documents(rows[0], 5)) if rows else None


def _dead_jobs(rows: Sequence[Row]) -> list[DeadJob]:
    return [DeadJob(*_with_documents(row, 1)) for row in rows]


def _with_documents(row: Row, count: int) -> list[Any]:
    """Mark the last columns as the JSON texts that they are."""
    return [*row[:-count], *(None if text is None else JsonText(text) for text in row[-count:])]


def _queue_summary(row: Row, cap: int) -> QueueSummary:
    queue, ready, scheduled, blocked, running, dead, oldest = row[:7]
    is_paused, paused_until, max_running, reason, workers, cut, seen_at = row[7:]
    counts = {"ready": ready, "scheduled": scheduled, "blocked": blocked, "running": running, "dead": dead}
    return QueueSummary(
        queue=queue,
        **{state: min(jobs, cap) for state, jobs in counts.items()},
        oldest_ready_seconds=oldest,
        is_paused=is_paused,
        paused_until=paused_until,
        max_running=max_running,
        reason=reason,
        workers=workers,
        lower_bounds=[state for state, jobs in counts.items() if jobs > cap or state in cut],
        seen_at=seen_at,
    )
