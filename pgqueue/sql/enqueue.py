"""Asking for jobs, as statements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pgqueue.model.job import NewJob
from pgqueue.sql import Row, Statement, first_value, load

_TEXT = load("enqueue")

# One parameter of a thousand jobs is where bulk stops getting faster. Large arguments end a batch
# earlier: PostgreSQL takes no more than 256 MB of elements in one array.
BATCH_JOBS = 1_000
BATCH_CHARACTERS = 4_000_000

_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class Enqueued(NamedTuple):
    """The job that stands for a request.

    `outcome` is `inserted`, or what a live job with the same unique key meant: `skipped` (that job
    stands as it was) or `replaced` (it took our arguments).
    """

    job_id: int
    outcome: str


def enqueue(job: NewJob) -> Statement[Enqueued]:
    return Statement(_TEXT["enqueue"], _parameters(job), lambda found: _enqueued(found)[0])


def enqueue_many(jobs: Iterable[NewJob]) -> Iterator[Statement[list[Enqueued]]]:
    """Add jobs in batches, taking from the iterable only what the next batch needs."""
    batch: list[str] = []
    characters = 0
    for job in jobs:
        member = _member(job)
        if batch and (len(batch) >= BATCH_JOBS or characters + len(member) > BATCH_CHARACTERS):
            yield _batch(batch)
            batch, characters = [], 0
        batch.append(member)
        characters += len(member)
    if batch:
        yield _batch(batch)


def find_holder(unique_key: str) -> Statement[int | None]:
    return Statement(_TEXT["find_holder"], {"unique_key": unique_key}, first_value)


def _batch(members: list[str]) -> Statement[list[Enqueued]]:
    return Statement(_TEXT["enqueue_many"], {"jobs": f"[{','.join(members)}]"}, _enqueued)


def _enqueued(found: Sequence[Row]) -> list[Enqueued]:
    return [Enqueued._make(row) for row in found]


def _parameters(job: NewJob) -> dict[str, Any]:
    return {
        "task": job.task,
        "args": job.args,
        "queue": job.queue,
        "run_at": job.run_at,
        "priority": job.priority,
        "max_attempts": job.max_attempts,
        "timeout_seconds": job.timeout_seconds,
        "concurrency_key": job.concurrency_key,
        "concurrency_limit": job.concurrency_limit,
        "unique_key": job.unique_key,
        "on_conflict": job.on_conflict,
        "idempotency_key": job.idempotency_key,
        "headers": None if job.headers is None else _write(job.headers),
        "delay_seconds": job.delay_seconds,
        "unique_until": job.unique_until,
        "max_delay_seconds": job.max_delay_seconds,
    }


def _member(job: NewJob) -> str:
    """Write one job as a member of the array; its arguments are JSON already."""
    shared = _shared(
        job.task,
        job.queue,
        job.priority,
        job.max_attempts,
        job.timeout_seconds,
        job.concurrency_limit,
        job.on_conflict,
    )
    own = {name: value for name in _OWN if (value := getattr(job, name)) is not None}
    if not own:
        return f'{shared}, "args": {job.args}}}'
    if job.run_at is not None:
        own["run_at"] = job.run_at.isoformat()
    return f'{shared}, {_write(own)[1:-1]}, "args": {job.args}}}'


_OWN = (
    "run_at",
    "delay_seconds",
    "max_delay_seconds",
    "concurrency_key",
    "unique_key",
    "unique_until",
    "idempotency_key",
    "headers",
)


@lru_cache(maxsize=1024)
def _shared(
    task: str,
    queue: str | None,
    priority: int | None,
    max_attempts: int | None,
    timeout_seconds: float | None,
    concurrency_limit: int | None,
    on_conflict: str,
) -> str:
    """Write what all jobs of a task have in common, without the closing brace: once, not a million times."""
    said = {
        "task": task,
        "queue": queue,
        "priority": priority,
        "max_attempts": max_attempts,
        "timeout_seconds": timeout_seconds,
        "concurrency_limit": concurrency_limit,
        "on_conflict": on_conflict,
    }
    return _write({name: value for name, value in said.items() if value is not None})[:-1]
