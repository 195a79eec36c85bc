"""What a worker asks of the queue, as statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pgqueue.model.place import HEAD, Start
from pgqueue.sql import Row, Statement, column, first_value, load, nothing

_TEXT = load("attempts")


class ClaimedRow(NamedTuple):
    """One row of a claim. Documents stay text: decoding is the attempt's own risk, not the batch's."""

    job_id: int
    token: str
    attempt: int
    task: str
    args: str
    key: str | None
    priority: int
    run_at: str
    is_scanned: bool
    timeout_seconds: float
    max_attempts: int
    crashes: int
    idempotency_key: str | None
    headers: str | None
    age_seconds: float


class ReapedRow(NamedTuple):
    job_id: int
    state: str
    reason: str
    task: str
    queue: str


def claim(
    queue: str, worker_id: str, max_jobs: int, lease_seconds: float, start: Start = HEAD
) -> Statement[list[ClaimedRow]]:
    return Statement(
        _TEXT["claim"],
        {
            "queue": queue,
            "worker_id": worker_id,
            "max_jobs": max_jobs,
            "lease_seconds": lease_seconds,
            "after_priority": start.priority,
            "after_run_at": start.run_at,
            "after_id": start.job_id,
            "margin_seconds": start.margin_seconds,
            "up_to_priority": start.up_to_priority,
        },
        _claimed,
    )


def heartbeat(job_ids: Sequence[int], tokens: Sequence[str]) -> Statement[dict[int, str]]:
    return Statement(_TEXT["heartbeat"], _attempts(job_ids, tokens), _pairs)


def complete(
    job_ids: Sequence[int],
    tokens: Sequence[str],
    results: Sequence[str | None],
    reasons: Sequence[str | None],
) -> Statement[list[int]]:
    return Statement(
        _TEXT["complete"],
        {
            **_attempts(job_ids, tokens),
            "results": _unless_empty(results),
            "reasons": _unless_empty(reasons),
        },
        column,
    )


def complete_once(
    job_ids: Sequence[int],
    tokens: Sequence[str],
    keys: Sequence[str],
    results: Sequence[str | None],
    reasons: Sequence[str | None],
) -> Statement[list[int]]:
    return Statement(
        _TEXT["complete_once"],
        {
            **_attempts(job_ids, tokens),
            "keys": list(keys),
            "results": list(results),
            "reasons": list(reasons),
        },
        column,
    )


def fail(
    job_ids: Sequence[int],
    tokens: Sequence[str],
    errors: Sequence[str | None],
    retry_seconds: Sequence[float | None],
    is_dead: Sequence[bool],
    is_cancelled: Sequence[bool],
    is_unsure: Sequence[bool],
) -> Statement[dict[int, str]]:
    return Statement(
        _TEXT["fail"],
        {
            **_attempts(job_ids, tokens),
            "errors": list(errors),
            "retry_seconds": list(retry_seconds),
            "is_dead": list(is_dead),
            "is_cancelled": list(is_cancelled),
            "is_unsure": list(is_unsure),
        },
        _pairs,
    )


def release(
    job_ids: Sequence[int],
    tokens: Sequence[str],
    reason: str | None = None,
    delay_seconds: Sequence[float | None] | None = None,
    *,
    is_unsure: bool = False,
) -> Statement[dict[int, str]]:
    return Statement(
        _TEXT["release"],
        {
            **_attempts(job_ids, tokens),
            "reason": reason,
            "delay_seconds": None if delay_seconds is None else list(delay_seconds),
            "is_unsure": is_unsure,
        },
        _pairs,
    )


def crash(job_ids: Sequence[int], tokens: Sequence[str], reason: str) -> Statement[dict[int, str]]:
    return Statement(_TEXT["crash"], {**_attempts(job_ids, tokens), "reason": reason}, _pairs)


def note_progress(job_ids: Sequence[int], tokens: Sequence[str], progress: Sequence[str]) -> Statement[None]:
    return Statement(
        _TEXT["note_progress"], {**_attempts(job_ids, tokens), "progress": list(progress)}, nothing
    )


def landed(
    job_ids: Sequence[int],
    tokens: Sequence[str],
    attempts: Sequence[int],
    ages: Sequence[float],
    reasons: Sequence[str | None],
    worker_id: str,
    *,
    goes_on: bool,
) -> Statement[dict[int, str]]:
    """Find which attempts were ended by a statement whose answer got lost, and as what.

    `ages` are their jobs' `age_seconds` at the claim, `reasons` what that statement gave. With `goes_on`
    it was one that leaves the job in the queue.
    """
    return Statement(
        _TEXT["landed"],
        {
            **_attempts(job_ids, tokens),
            "attempts": list(attempts),
            "ages": list(ages),
            "reasons": list(reasons),
            "worker_id": worker_id,
            "goes_on": goes_on,
        },
        _pairs,
    )


def release_orphans(worker_id: str, held_ids: Sequence[int]) -> Statement[dict[int, str]]:
    return Statement(_TEXT["release_orphans"], {"worker_id": worker_id, "held_ids": list(held_ids)}, _pairs)


def reap(not_after: float, deadline_grace_seconds: float) -> Statement[tuple[float, list[ReapedRow]]]:
    return Statement(
        _TEXT["reap"],
        {"not_after": not_after, "deadline_grace_seconds": deadline_grace_seconds},
        lambda found: (found[0][0], [ReapedRow._make(row[1:]) for row in found if row[1] is not None]),
    )


def promote() -> Statement[tuple[int, float | None]]:
    return Statement(_TEXT["promote"], {}, lambda found: (found[0][0], found[0][1]))


def sweep(after_key: str = "") -> Statement[tuple[int, str | None]]:
    return Statement(_TEXT["sweep"], {"after_key": after_key}, lambda found: (found[0][0], found[0][1]))


def make_partitions(days: int) -> Statement[None]:
    return Statement(_TEXT["make_partitions"], {"days": days}, nothing)


def count_remaining(queues: Sequence[str]) -> Statement[int]:
    return Statement(_TEXT["count_remaining"], {"queues": list(queues)}, first_value)


def count_dead_since(queues: Sequence[str], since: str) -> Statement[int]:
    return Statement(_TEXT["count_dead_since"], {"queues": list(queues), "since": since}, first_value)


def database_now() -> Statement[tuple[str, str]]:
    return Statement(_TEXT["database_now"], {}, lambda found: (found[0][0], found[0][1]))


def _claimed(found: Sequence[Row]) -> list[ClaimedRow]:
    return list(map(ClaimedRow._make, found))


def _attempts(job_ids: Sequence[int], tokens: Sequence[str]) -> dict[str, Any]:
    # Array literals, written here: numbers and uuids need no escaping, and the driver's own way of
    # dumping a list costs as much as the rest of a batch.
    return {"job_ids": "{" + ",".join(map(str, job_ids)) + "}", "tokens": "{" + ",".join(tokens) + "}"}


def _unless_empty(values: Sequence[str | None]) -> list[str | None] | None:
    return list(values) if any(value is not None for value in values) else None


def _pairs(found: Sequence[Row]) -> dict[int, str]:
    return {row[0]: row[1] for row in found}
