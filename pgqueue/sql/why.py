"""What keeps one job from running: the questions, and their answers as values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, TypeVar

from pgqueue.sql import Row, Statement, load
from pgqueue.sql.inspect import SILENT_SECONDS

_SQL = load("why")

T = TypeVar("T")

COUNT_CAP = 10_000


class Workers(NamedTuple):
    """Who could run a job: live workers, those that serve its queue, their slots and the used ones."""

    live: int
    serving: int
    slots: int
    running: int
    last_host: str | None
    last_seen_at: datetime | None
    task_seen_at: datetime | None
    breaker: str | None


class Line(NamedTuple):
    """How many of the same queue go before a job, and how many run; above the cap, more than that."""

    ahead: int
    running: int


class Holder(NamedTuple):
    """A running job that holds a slot of a concurrency key."""

    job_id: int
    task: str
    started_at: datetime
    host: str | None
    pid: int | None
    lease_expires_at: datetime


class Breaker(NamedTuple):
    """A circuit breaker that is not closed."""

    name: str
    state: str
    opened_at: datetime | None
    retry_at: datetime | None
    probe_until: datetime | None


class Rate(NamedTuple):
    """A rate limit and the line before it."""

    name: str
    tokens_per_second: float
    burst: int
    next_at: datetime | None
    ahead: int


class RowLock(NamedTuple):
    """A session whose transaction has a job's row locked."""

    pid: int
    role: str | None
    application: str | None
    address: str | None
    state: str | None
    since: datetime | None


class Effect(NamedTuple):
    """Another job's attempt at the same idempotency key."""

    job_id: int | None
    since: datetime


class Deed(NamedTuple):
    """Who did it, and when."""

    at: datetime
    role: str
    actor: str | None


class Server(NamedTuple):
    """Whether the server takes writes."""

    is_standby: bool
    is_read_only: bool


def workers(queue: str, task: str) -> Statement[Workers]:
    params = {"queue": queue, "task": task, "silent_seconds": SILENT_SECONDS}
    return Statement(_SQL["workers"], params, lambda rows: Workers(*rows[0]))


def line(job_id: int) -> Statement[Line | None]:
    return Statement(_SQL["line"], {"job_id": job_id, "cap": COUNT_CAP}, _first(Line._make))


def holders(key: str) -> Statement[list[Holder]]:
    return Statement(_SQL["holders"], {"key": key}, lambda rows: [Holder(*row) for row in rows])


def breaker(name: str) -> Statement[Breaker | None]:
    return Statement(_SQL["breaker"], {"name": name}, _first(Breaker._make))


def rate(name: str, job_id: int) -> Statement[Rate | None]:
    params = {"name": name, "job_id": job_id, "cap": COUNT_CAP}
    return Statement(_SQL["rate"], params, _first(Rate._make))


def row_lock(job_id: int) -> Statement[RowLock | None]:
    return Statement(_SQL["row_lock"], {"job_id": job_id}, _first(RowLock._make))


def effect(key: str, job_id: int) -> Statement[Effect | None]:
    return Statement(_SQL["effect"], {"key": key, "job_id": job_id}, _first(Effect._make))


def done_to_queue(queue: str, action: str) -> Statement[Deed | None]:
    return Statement(_SQL["done_to_queue"], {"queue": queue, "action": action}, _first(Deed._make))


def done_to_job(job_id: int) -> Statement[Deed | None]:
    return Statement(_SQL["done_to_job"], {"job_id": job_id}, _first(Deed._make))


def server() -> Statement[Server]:
    return Statement(_SQL["server"], {}, lambda rows: Server(*rows[0]))


def _first(make: Callable[[Row], T]) -> Callable[[Sequence[Row]], T | None]:
    return lambda rows: make(rows[0]) if rows else None
