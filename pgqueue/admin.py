"""What an operator asks of a queue and does to it, on a plain connection in autocommit.

Each function says what became of every job it was given: an operator at night must not have to
guess which of forty ids were not there any more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqueue.database import Connection, run
from pgqueue.errors import BreakerNotFound, JobNotFound
from pgqueue.model.breaker import checked_settings
from pgqueue.model.encoding import several
from pgqueue.model.job import JobState
from pgqueue.shell import write_command
from pgqueue.sql import Statement, breakers, inspect, locks, once, operate
from pgqueue.sql.breakers import BreakerSummary
from pgqueue.sql.inspect import (
    DeadFilter,
    DeadJob,
    Flow,
    JobDetails,
    JobSummary,
    LiveFilter,
    QueueSummary,
    RunningJob,
    WorkerSummary,
)

__all__ = [
    "BreakerSummary",
    "DeadFilter",
    "DeadJob",
    "Flow",
    "JobDetails",
    "JobSummary",
    "LiveFilter",
    "Outcome",
    "QueueSummary",
    "RunningJob",
    "WorkerSummary",
    "breaker_names",
    "cancel",
    "cancel_matching",
    "close_breaker",
    "count_dead",
    "count_live",
    "flow",
    "forget_processed",
    "known_queues",
    "list_breakers",
    "list_dead",
    "list_holders",
    "list_jobs",
    "list_queues",
    "list_running",
    "list_workers",
    "open_breaker",
    "purge_dead",
    "queue_names",
    "redrive",
    "retry",
    "set_breaker",
    "show_job",
    "show_processed",
    "task_names",
    "unpin_breaker",
]

EXTRA_ATTEMPTS = 5
BATCH = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one job; `reason` says why when it is not what was asked for."""

    job_id: int
    outcome: str
    is_done: bool
    reason: str | None = None


# Looking.


def list_jobs(
    connection: Connection[Any],
    *,
    states: Sequence[JobState] = tuple(JobState),
    queue: str | None = None,
    task: str | None = None,
    below_id: int | None = None,
    limit: int = 50,
    max_chars: int | None = None,
    schema: str = "pgqueue",
) -> list[JobSummary]:
    """List jobs in any of the states, the newest first; `below_id` continues a page."""
    statement = inspect.list_jobs(
        several("states", states, "states"),
        queue=queue,
        task=task,
        below_id=below_id,
        limit=limit,
        max_chars=max_chars,
    )
    return run(connection, statement, schema)


def show_job(connection: Connection[Any], job_id: int, schema: str = "pgqueue") -> JobDetails:
    """Give everything kept about a job, live or ended.

    Raises:
        JobNotFound: there is none, or its history is no longer kept.
    """
    details = run(connection, inspect.show_job(job_id), schema)
    if details is None:
        raise JobNotFound(job_id)
    return details


def list_dead(
    connection: Connection[Any], which: DeadFilter | None = None, limit: int = 50, schema: str = "pgqueue"
) -> list[DeadJob]:
    """List dead letters, the latest first."""
    return run(connection, inspect.list_dead(which or DeadFilter(), limit), schema)


def count_dead(
    connection: Connection[Any], which: DeadFilter, schema: str = "pgqueue"
) -> tuple[int, datetime]:
    """Count dead letters, and say as of when: `redrive` and `purge_dead` leave later ones alone."""
    return run(connection, inspect.count_dead(which), schema)


def count_live(
    connection: Connection[Any], which: LiveFilter, schema: str = "pgqueue"
) -> tuple[dict[str, int], datetime]:
    """Count live jobs by state, and say as of when: `cancel_matching` leaves later ones alone."""
    return run(connection, inspect.count_live(which), schema)


def list_queues(
    connection: Connection[Any], count_cap: int = inspect.COUNT_CAP, schema: str = "pgqueue"
) -> list[QueueSummary]:
    """List the queues at a cost that does not grow with their length: counting stops at the cap."""
    return run(connection, inspect.list_queues(count_cap), schema)


def list_workers(connection: Connection[Any], schema: str = "pgqueue") -> list[WorkerSummary]:
    """List workers, the one seen last first."""
    return run(connection, inspect.list_workers(), schema)


def list_running(connection: Connection[Any], limit: int = 100, schema: str = "pgqueue") -> list[RunningJob]:
    """List what runs, the longest first."""
    return run(connection, inspect.list_running(limit), schema)


def flow(connection: Connection[Any], schema: str = "pgqueue") -> Flow:
    """Give how many jobs have come and gone; two answers make a rate. A second behind, or so."""
    return run(connection, inspect.flow(), schema)


def task_names(connection: Connection[Any], schema: str = "pgqueue") -> list[str]:
    """Name the tasks that workers registered."""
    return run(connection, inspect.task_names(), schema)


def known_queues(connection: Connection[Any], schema: str = "pgqueue") -> list[str]:
    """Name every queue that anybody knows: it has jobs, settings, a task or a worker."""
    return run(connection, inspect.known_queues(), schema)


def queue_names(connection: Connection[Any], schema: str = "pgqueue") -> list[str]:
    """Name the queues of registered tasks and those with settings."""
    return run(connection, inspect.queue_names(), schema)


# Acting.


def cancel(
    connection: Connection[Any], job_ids: Sequence[int], reason: str = "cancelled", schema: str = "pgqueue"
) -> list[Outcome]:
    """Cancel jobs: waiting ones end now, running ones are asked to stop and never run again."""
    job_ids = several("job_ids", job_ids, "ids")
    done = run(connection, operate.cancel(job_ids, reason), schema)
    rest = _states(connection, [job_id for job_id in job_ids if job_id not in done], schema)
    return [
        _cancelled(job_id, done[job_id]) if job_id in done else _not_cancelled(job_id, rest[job_id], schema)
        for job_id in dict.fromkeys(job_ids)
    ]


def cancel_matching(
    connection: Connection[Any],
    which: LiveFilter,
    until: datetime,
    reason: str = "cancelled",
    schema: str = "pgqueue",
) -> Iterator[list[Outcome]]:
    """Cancel the live jobs that were made by `until`, in batches that commit by themselves.

    Stopping in between is safe: what was not reached goes on as before. A waiting job that is
    claimed at this moment is asked to stop.
    """
    last_id = 0
    while batch := run(connection, inspect.next_live(which, last_id, until, BATCH), schema):
        yield cancel(connection, batch, reason, schema)
        last_id = batch[-1]


def retry(
    connection: Connection[Any],
    job_ids: Sequence[int],
    extra_attempts: int = EXTRA_ATTEMPTS,
    schema: str = "pgqueue",
) -> list[Outcome]:
    """Let jobs run now: scheduled ones become ready, dead ones come back with more attempts."""
    job_ids = several("job_ids", job_ids, "ids")
    woken = run(connection, operate.run_now(job_ids), schema)
    rest = _states(connection, [job_id for job_id in job_ids if job_id not in woken], schema)
    dead = [job_id for job_id, state in rest.items() if state == JobState.DEAD]
    redriven = run(connection, operate.redrive(dead, extra_attempts), schema) if dead else {}
    outcomes = []
    for job_id in dict.fromkeys(job_ids):
        if job_id in woken:
            outcomes.append(Outcome(job_id, "ready", is_done=True))
        elif job_id in redriven:
            outcomes.append(_redriven(job_id, redriven[job_id]))
        else:
            outcomes.append(_not_retried(job_id, rest[job_id], schema))
    return outcomes


def redrive(
    connection: Connection[Any],
    which: DeadFilter,
    until: datetime,
    *,
    per_second: float | None = None,
    extra_attempts: int = EXTRA_ATTEMPTS,
    schema: str = "pgqueue",
) -> Iterator[list[Outcome]]:
    """Put dead letters that died by `until` back, in batches that commit by themselves.

    At most `per_second` a second. Each is tried once, also when it dies again meanwhile, and each id
    of the filter gets an outcome. Stopping in between is safe: what was not reached stays dead.
    """
    missing = dict.fromkeys(which.job_ids or ())
    for batch in _batches(connection, which, until, per_second, schema):
        outcomes = run(connection, operate.redrive(batch, extra_attempts), schema)
        yield [_redriven(job_id, outcomes[job_id]) for job_id in batch]
        for job_id in batch:
            missing.pop(job_id, None)
    if missing:
        yield [_redriven(job_id, "not_found") for job_id in missing]


def purge_dead(
    connection: Connection[Any], which: DeadFilter, until: datetime, schema: str = "pgqueue"
) -> Iterator[list[int]]:
    """Delete dead letters that died by `until`, in batches that commit by themselves; gives their ids."""
    for batch in _batches(connection, which, until, None, schema):
        yield run(connection, operate.purge_dead(batch), schema)


def _batches(
    connection: Connection[Any], which: DeadFilter, until: datetime, per_second: float | None, schema: str
) -> Iterator[list[int]]:
    size = BATCH if per_second is None else max(1, min(BATCH, math.floor(per_second / 4)))
    last_id, done, started_at = 0, 0, time.monotonic()
    while batch := run(connection, inspect.next_dead(which, last_id, until, size), schema):
        if per_second is not None:
            time.sleep(max(0.0, started_at + done / per_second - time.monotonic()))
        yield batch
        last_id, done = batch[-1], done + len(batch)


def _states(connection: Connection[Any], job_ids: Sequence[int], schema: str) -> dict[int, str | None]:
    states = run(connection, inspect.job_states(job_ids), schema) if job_ids else {}
    return {job_id: states.get(job_id) for job_id in job_ids}


def _cancelled(job_id: int, outcome: str) -> Outcome:
    reason = "it is running and was asked to stop" if outcome == "requested" else None
    return Outcome(job_id, outcome, is_done=True, reason=reason)


def _not_cancelled(job_id: int, state: str | None, schema: str) -> Outcome:
    if state is None:
        return _not_found(job_id)
    if state == JobState.CANCELLED:
        return Outcome(job_id, "cancelled", is_done=True, reason="it was cancelled before")
    if state == JobState.DEAD:
        return _refused(
            job_id, f"it is dead; delete it with: {write_command('dlq purge', job_id, schema=schema)}"
        )
    return _refused(job_id, "it succeeded already" if state == JobState.SUCCEEDED else f"it is {state} again")


_NOT_RETRIED = {
    JobState.RUNNING: "it is running; cancel it first, or wait",
    JobState.BLOCKED: "it waits for its concurrency key; see: {show}",
    "rate_limited": "it waits for its rate limit; see: {show}",
    "parked_by_breaker": "it waits for its circuit breaker; see: {breakers}",
    JobState.SUCCEEDED: "it succeeded; enqueue a new job to do it again",
    JobState.CANCELLED: "it was cancelled; enqueue a new job to do it after all",
    JobState.SCHEDULED: "it was put back at this moment; try again",
    JobState.DEAD: "it died at this moment; try again",
}


def _not_retried(job_id: int, state: str | None, schema: str) -> Outcome:
    if state is None:
        return _not_found(job_id)
    if state == JobState.READY:
        return Outcome(job_id, "ready", is_done=True, reason="it was ready already")
    commands = {
        "show": write_command("jobs show", job_id, schema=schema),
        "breakers": write_command("breakers", schema=schema),
    }
    return _refused(job_id, _NOT_RETRIED[state].format_map(commands))


def _redriven(job_id: int, outcome: str) -> Outcome:
    reasons = {
        "unique_key_taken": "a live job holds its unique key; try again when that one has ended",
        "not_found": "it is not among these dead jobs",
    }
    return Outcome(job_id, outcome, is_done=outcome == "ready", reason=reasons.get(outcome))


def _refused(job_id: int, reason: str) -> Outcome:
    return Outcome(job_id, "refused", is_done=False, reason=reason)


def _not_found(job_id: int) -> Outcome:
    reason = "it never existed, or its history is no longer kept"
    return Outcome(job_id, "not_found", is_done=False, reason=reason)


# Idempotency keys.


def show_processed(connection: Connection[Any], key: str, schema: str = "pgqueue") -> once.Processed | None:
    """Give what became of an idempotency key, or None: nothing that is remembered."""
    return run(connection, once.show(key), schema)


def forget_processed(connection: Connection[Any], key: str, schema: str = "pgqueue") -> bool:
    """Forget a key, so that its effect may happen again; False if nothing was forgotten.

    Not while a job is at work on it.
    """
    return run(connection, once.forget(key), schema) is not None


# Who holds what.


def list_holders(
    connection: Connection[Any], max_rows: int = 200, schema: str = "pgqueue"
) -> list[locks.Holder]:
    """List who holds concurrency keys, idempotency keys and named locks now, the oldest first."""
    return run(connection, locks.holders(max_rows), schema)


# Circuit breakers.


def list_breakers(connection: Connection[Any], schema: str = "pgqueue") -> list[BreakerSummary]:
    """List circuit breakers by name."""
    return run(connection, breakers.list_breakers(), schema)


def breaker_names(connection: Connection[Any], schema: str = "pgqueue") -> list[str]:
    """Name the circuit breakers."""
    return [one.name for one in list_breakers(connection, schema)]


def open_breaker(
    connection: Connection[Any], name: str, seconds: float | None = None, schema: str = "pgqueue"
) -> None:
    """Open a circuit breaker for so long, after which a probe may close it, or until it is closed.

    Raises:
        BreakerNotFound: there is none of this name.
    """
    _change_breaker(connection, name, breakers.open_by_hand(name, seconds), schema)


def close_breaker(connection: Connection[Any], name: str, schema: str = "pgqueue") -> None:
    """Close a circuit breaker, and forget what it counted; workers bring its jobs back within a second.

    Raises:
        BreakerNotFound: there is none of this name.
    """
    _change_breaker(connection, name, breakers.close_by_hand(name), schema)


def set_breaker(
    connection: Connection[Any], name: str, settings: Mapping[str, Any], schema: str = "pgqueue"
) -> None:
    """Change settings of a circuit breaker; code does not change these any more.

    Raises:
        ConfigurationError: a value makes no sense.
        BreakerNotFound: there is none of this name.
    """
    known = checked_settings(name, settings)
    if known.keys() & {"failure_ratio", "min_calls"}:
        known["max_failures"] = None  # else that would count
    _change_breaker(connection, name, breakers.change(name, known), schema)


def unpin_breaker(connection: Connection[Any], name: str, schema: str = "pgqueue") -> None:
    """Let code say all settings of a circuit breaker again, from the next start of a worker on.

    Raises:
        BreakerNotFound: there is none of this name.
    """
    _change_breaker(connection, name, breakers.unpin(name), schema)


def _change_breaker(connection: Connection[Any], name: str, change: Statement[bool], schema: str) -> None:
    if not run(connection, change, schema):
        raise BreakerNotFound(name, breaker_names(connection, schema))
