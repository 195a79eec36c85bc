"""Calling the database's functions, as a client in any language does."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from tests.pooler import Pooler, start_pooler

WORKER = uuid.UUID("00000000-0000-4000-8000-000000000001")


class Attempt(NamedTuple):
    """One attempt that somebody claims to hold."""

    job_id: int
    token: uuid.UUID


class Session:
    """A connection on which the queue's functions are called; its worker's id is its own."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.worker_id = uuid.uuid4()

    def rows(self, text: str, *parameters: Any) -> list[Any]:
        cursor = self.connection.execute(text, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def row(self, text: str, *parameters: Any) -> Any:
        return next(iter(self.rows(text, *parameters)), None)

    def one(self, text: str, *parameters: Any) -> Any:
        row = self.row(text, *parameters)
        return row and row[0]

    def call(self, function: str, **parameters: Any) -> list[Any]:
        names = ", ".join(f"{name} => %({name})s" for name in parameters)
        return self.connection.execute(f"SELECT * FROM pgqueue.{function}({names})", parameters).fetchall()

    def enqueue(self, task: str = "t", args: Any = None, **parameters: Any) -> int:
        return self.call("enqueue", task=task, args=json.dumps(args or {}), **parameters)[0][0]

    def enqueue_many(self, *jobs: dict[str, Any]) -> list[tuple[int, str]]:
        return [tuple(row) for row in self.call("enqueue_many", jobs=json.dumps(jobs))]

    def claim(self, queue: str = "default", max_jobs: int = 100, **parameters: Any) -> list[Any]:
        return self.call("claim", queue=queue, worker_id=self.worker_id, max_jobs=max_jobs, **parameters)

    def heartbeat(self, *attempts: Any) -> dict[int, str]:
        return dict(self._ending("heartbeat", attempts))

    def complete(self, *attempts: Any, **parameters: Any) -> list[int]:
        return [row[0] for row in self._ending("complete", attempts, **parameters)]

    def fail(self, *attempts: Any, errors: list[str] | None = None, **parameters: Any) -> dict[int, str]:
        errors = errors or ["boom"] * len(attempts)
        return dict(self._ending("fail_many", attempts, errors=errors, **parameters))

    def release(self, *attempts: Any, **parameters: Any) -> dict[int, str]:
        return dict(self._ending("release", attempts, **parameters))

    def crash(self, *attempts: Any, reason: str = "the child died", **parameters: Any) -> dict[int, str]:
        return dict(self._ending("crash", attempts, reason=reason, **parameters))

    def cancel(self, *job_ids: int) -> dict[int, str]:
        return dict(self.call("cancel", job_ids=list(job_ids)))

    def redrive(self, *job_ids: int) -> dict[int, str]:
        return dict(self.call("redrive", job_ids=list(job_ids)))

    def job(self, job_id: int) -> Any:
        """The row of a live job, or None."""
        return self.row("SELECT * FROM pgqueue.jobs WHERE id = %s", job_id)

    def dead(self, job_id: int) -> Any:
        return self.row("SELECT * FROM pgqueue.dead_jobs WHERE id = %s", job_id)

    def finished(self, job_id: int) -> Any:
        return self.row("SELECT * FROM pgqueue.finished_jobs WHERE id = %s", job_id)

    def state(self, job_id: int) -> str | None:
        """Where the job is now, live or ended."""
        live, finished = self.job(job_id), self.finished(job_id)
        return (live and live.state) or (finished and finished.state) or (self.dead(job_id) and "dead")

    def expire(self, *attempts: Any) -> None:
        """Let time pass for these leases: their last heartbeat was long ago."""
        self.rows(
            "UPDATE pgqueue.jobs SET heartbeat_at = heartbeat_at - interval '1 day' WHERE id = ANY (%s)",
            [attempt.job_id for attempt in attempts],
        )

    def overrun(self, *attempts: Any, seconds: float = 86_400.0) -> None:
        """Let the deadlines of these attempts be over for so long."""
        self.rows(
            "UPDATE pgqueue.jobs SET deadline_at = clock_timestamp() - make_interval(secs => %s) "
            "WHERE id = ANY (%s)",
            seconds,
            [attempt.job_id for attempt in attempts],
        )

    def make_due(self) -> None:
        """Let the time of every scheduled job come."""
        self.rows("UPDATE pgqueue.jobs SET run_at = clock_timestamp() WHERE state = 'scheduled'")
        self.call("promote")

    def _ending(self, function: str, attempts: Sequence[Any], **parameters: Any) -> list[Any]:
        ids = [attempt.job_id for attempt in attempts]
        tokens = [attempt.token for attempt in attempts]
        return self.call(function, job_ids=ids, tokens=tokens, **parameters)


OpenSession = Callable[..., Session]


@pytest.fixture(scope="session")
def pooler(pytestconfig: pytest.Config, postgres: Any) -> Iterator[Pooler | None]:
    """With --pgbouncer, the way to the server."""
    if not pytestconfig.getoption("--pgbouncer"):
        yield None
        return
    with start_pooler(postgres.dsn) as started:
        yield started


@pytest.fixture
def open_session(fast_dsn: str, pooler: Pooler | None) -> Iterator[OpenSession]:
    """Open sessions on the test's database; they are closed with the test."""
    with ExitStack() as stack:

        def open_one(dsn: str = fast_dsn, **options: Any) -> Session:
            if pooler is not None:
                dsn, options = pooler.lead(dsn), {**options, "prepare_threshold": None}
            connection = psycopg.connect(dsn, row_factory=namedtuple_row, **{"autocommit": True, **options})
            stack.callback(connection.close)
            return Session(connection)

        yield open_one


@pytest.fixture
def session(open_session: OpenSession) -> Session:
    return open_session()
