"""Asking for jobs, as statements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pgqueue.model.encoding import write
from pgqueue.model.job import OWN_FIELDS, SHARED_FIELDS, NewJob
from pgqueue.sql import Row, Statement, first_value, load

_TEXT = load("enqueue")

# One parameter of a thousand jobs is where bulk stops getting faster. Large arguments end a batch
# earlier: PostgreSQL takes no more than 256 MB of elements in one array.
BATCH_JOBS = 1_000
BATCH_CHARACTERS = 4_000_000


class Enqueued(NamedTuple):
    """The job that stands for a request.

    `outcome` is `inserted`, or what a live job with the same unique key meant: `skipped` (that job
    stands as it was) or `replaced` (it took our arguments).
    """

    job_id: int
    outcome: str


def enqueue(job: NewJob) -> Statement[Enqueued]:
    if job.is_complete and _is_plain(job):
        own = {"concurrency_key": job.concurrency_key, "idempotency_key": job.idempotency_key}
        return Statement(
            _TEXT["insert"],
            {**_alike(job), "args": job.args, **own, "headers": _document(job.headers)},
            lambda found: Enqueued(found[0][0], "inserted"),
        )
    return Statement(_TEXT["enqueue"], _parameters(job), lambda found: _enqueued(found)[0])


def enqueue_many(jobs: Iterable[NewJob]) -> Iterator[Statement[list[Enqueued]]]:
    """Add jobs in batches, taking from the iterable only what the next batch needs."""
    batch: list[NewJob] = []
    characters = 0
    for job in jobs:
        size = len(job.args) + len(_document(job.headers) or "")
        if batch and (len(batch) >= BATCH_JOBS or characters + size > BATCH_CHARACTERS):
            yield _batch(batch)
            batch, characters = [], 0
        batch.append(job)
        characters += size
    if batch:
        yield _batch(batch)


def find_holder(unique_key: str) -> Statement[int | None]:
    return Statement(_TEXT["find_holder"], {"unique_key": unique_key}, first_value)


def _batch(batch: list[NewJob]) -> Statement[list[Enqueued]]:
    first = batch[0]
    task, rest = first.task, first.rest
    is_plain = first.is_complete and first.own == _NOTHING
    if is_plain and all(job.rest == rest and job.task == task for job in batch):
        args = ",".join([job.args for job in batch])
        return Statement(_TEXT["insert_alike"], {**_alike(first), "args": f"[{args}]"}, _inserted)
    members = ",".join(map(_member, batch))
    return Statement(_TEXT["enqueue_many"], {"jobs": f"[{members}]"}, _enqueued)


def _is_plain(job: NewJob) -> bool:
    """Say whether a job is ready at once and meets no other one by a unique key."""
    said = (job.run_at, job.delay_seconds, job.max_delay_seconds, job.unique_key, job.unique_until)
    return all(one is None for one in said)


def _enqueued(found: Sequence[Row]) -> list[Enqueued]:
    return [Enqueued._make(row) for row in found]


def _inserted(found: Sequence[Row]) -> list[Enqueued]:
    return [Enqueued(job_id, "inserted") for (job_id,) in found]


def _alike(job: NewJob) -> dict[str, Any]:
    return {
        "task": job.task,
        "queue": job.queue,
        "priority": job.priority,
        "max_attempts": job.max_attempts,
        "timeout_seconds": job.timeout_seconds,
        "concurrency_limit": job.concurrency_limit,
    }


def _document(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else write(value)


def _parameters(job: NewJob) -> dict[str, Any]:
    return {
        **_alike(job),
        "args": job.args,
        "run_at": job.run_at,
        "concurrency_key": job.concurrency_key,
        "unique_key": job.unique_key,
        "on_conflict": job.on_conflict,
        "idempotency_key": job.idempotency_key,
        "headers": _document(job.headers),
        "delay_seconds": job.delay_seconds,
        "unique_until": job.unique_until,
        "max_delay_seconds": job.max_delay_seconds,
    }


def _member(job: NewJob) -> str:
    """Write one job as a member of the array; its arguments are JSON already."""
    shared = _shared(job.task, job.shared)
    if job.own == _NOTHING:
        return f'{shared}, "args": {job.args}}}'
    own = {name: value for name, value in zip(OWN_FIELDS, job.own, strict=True) if value is not None}
    if job.run_at is not None:
        own["run_at"] = job.run_at.isoformat()
    return f'{shared}, {write(own)[1:-1]}, "args": {job.args}}}'


_NOTHING = (None,) * len(OWN_FIELDS)


@lru_cache(maxsize=1024)
def _shared(task: str, shared: tuple[Any, ...]) -> str:
    """Write what all jobs of a task have in common, without the closing brace: once, not a million times."""
    said = {"task": task, **dict(zip(SHARED_FIELDS, shared, strict=True))}
    return write({name: value for name, value in said.items() if value is not None})[:-1]
