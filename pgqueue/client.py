"""Enqueueing jobs and looking at them afterwards, sync and async.

Without a connection of the caller's, an enqueue is one autocommit statement on a pooled connection
of our own: when it returns, the job is committed. With one, the job is part of the caller's
transaction and exists if, and only if, that commits; it is never committed or rolled back here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pgqueue import database
from pgqueue.connections import AsyncConnections, Connections
from pgqueue.database import AsyncConnection, Connection, Error
from pgqueue.errors import (
    DuplicateJob,
    InvalidArguments,
    JobCancelled,
    JobDead,
    JobNotFound,
    PgqueueError,
    ResultNotReady,
    ResultUnavailable,
)
from pgqueue.model.job import JobState, NewJob
from pgqueue.model.task import TaskDefinition
from pgqueue.sql import Statement
from pgqueue.sql import enqueue as enqueueing
from pgqueue.sql.enqueue import Enqueued
from pgqueue.sql.refusals import refusal
from pgqueue.sql.results import Standing, look_up

T = TypeVar("T")

DEFAULT_MAX_CONNECTIONS = 4
DEFAULT_WAIT_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5


class Client:
    """Enqueues jobs and waits for them. Safe to share between threads, and across a fork.

    It connects at the first use, up to `max_connections` times at once. After `close()` the next
    use connects again.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str = "pgqueue",
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self._schema = schema
        self._connections = Connections(dsn, schema, max_connections)

    def enqueue(self, job: NewJob, conn: Connection[Any] | None = None) -> Enqueued:
        """Add one job, committed when this returns, or as part of the transaction on `conn`.

        Raises:
            InvalidJob: it was refused; nothing was enqueued. On `conn`, as after any error of the
                database, the transaction can only be rolled back.
            DuplicateJob: a live job has its unique key, and `on_conflict` is `reject`.
            DatabaseUnreachable: no connection could be had; nothing was enqueued.
            psycopg.OperationalError: the connection broke; the job may or may not be there.
        """
        if conn is not None:
            return _run(conn, enqueueing.enqueue(job), self._schema, job)
        try:
            with self._connections.lend() as own, _doubt(own):
                return _run(own, enqueueing.enqueue(job), self._schema, job)
        except DuplicateJob as error:
            raise self._with_holder(error) from error.__cause__

    def enqueue_many(self, jobs: Iterable[NewJob], conn: Connection[Any] | None = None) -> list[Enqueued]:
        """Add all of these jobs or none, in order; from a generator as it comes, however long.

        Without `conn` it is one transaction of our own, open while the iterable is read. With one,
        a failure takes back what this call did and leaves the transaction usable.

        Raises:
            InvalidJob: one was refused; none was enqueued.
            DuplicateJob, DatabaseUnreachable, psycopg.OperationalError: see `enqueue`.
        """
        statements = enqueueing.enqueue_many(_checked_jobs(jobs))
        first = next(statements, None)
        if first is None:
            return []
        if conn is None:
            try:
                with self._connections.lend() as own, _doubt(own):
                    return self._enqueue_batches(own, first, statements)
            except DuplicateJob as error:
                raise self._with_holder(error) from error.__cause__
        if not isinstance(conn, Connection):
            raise _not_a_connection(conn, "Connection")
        if not conn.autocommit and conn.info.transaction_status.name == "IDLE":
            # Begin the caller's transaction, so that ours below is a savepoint in it and commits nothing.
            conn.execute("SELECT")
        return self._enqueue_batches(conn, first, statements)

    def _enqueue_batches(
        self,
        conn: Connection[Any],
        first: Statement[list[Enqueued]],
        rest: Iterator[Statement[list[Enqueued]]],
    ) -> list[Enqueued]:
        with conn.transaction():
            enqueued = _run(conn, first, self._schema)
            for statement in rest:
                more = _run(conn, statement, self._schema)
                enqueued += more
        return enqueued

    def look_up(self, job_id: int) -> Standing:
        """Say where a job stands now.

        Raises:
            JobNotFound: there is no such job, or not any more.
        """
        return _found(job_id, self._ask(look_up(job_id)))

    def wait(self, job_id: int, timeout_seconds: float | None = DEFAULT_WAIT_SECONDS) -> Standing:
        """Wait until a job has ended, for ever if `timeout_seconds` is None, and say how.

        Raises:
            ResultNotReady: it has not ended by then.
            JobNotFound: see `look_up`.
        """
        patience = _Patience(timeout_seconds)
        while True:
            standing = self.look_up(job_id)
            if standing.state.has_ended:
                return standing
            time.sleep(patience.pause(job_id, standing))

    def close(self) -> None:
        """Close our connections."""
        self._connections.close()

    def _with_holder(self, error: DuplicateJob) -> DuplicateJob:
        """Say which job holds the key; in the caller's transaction, broken by then, nothing can be asked."""
        try:
            holder = self._ask(enqueueing.find_holder(error.unique_key))
        except database.errors.InsufficientPrivilege:
            holder = None  # whoever may only enqueue is not to know
        return DuplicateJob(error.unique_key, holder)

    def _ask(self, statement: Statement[T]) -> T:
        """Run a statement that only reads, once more if the connection broke under it."""
        try:
            with self._connections.lend() as conn:
                return _run(conn, statement, self._schema)
        except (database.errors.OperationalError, database.errors.InterfaceError):
            with self._connections.lend() as conn:
                return _run(conn, statement, self._schema)


class AsyncClient:
    """The async twin of `Client`, for any number of event loops: each gets connections of its own."""

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str = "pgqueue",
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self._schema = schema
        self._connections = AsyncConnections(dsn, schema, max_connections)

    async def enqueue(self, job: NewJob, conn: AsyncConnection[Any] | None = None) -> Enqueued:
        """Add one job; see `Client.enqueue`."""
        if conn is not None:
            return await _arun(conn, enqueueing.enqueue(job), self._schema, job)
        try:
            async with self._connections.lend() as own:
                with _doubt(own):
                    return await _arun(own, enqueueing.enqueue(job), self._schema, job)
        except DuplicateJob as error:
            raise await self._with_holder(error) from error.__cause__

    async def enqueue_many(
        self, jobs: Iterable[NewJob], conn: AsyncConnection[Any] | None = None
    ) -> list[Enqueued]:
        """Add all of these jobs or none; see `Client.enqueue_many`."""
        statements = enqueueing.enqueue_many(_checked_jobs(jobs))
        first = next(statements, None)
        if first is None:
            return []
        if conn is None:
            try:
                async with self._connections.lend() as own:
                    with _doubt(own):
                        return await self._enqueue_batches(own, first, statements)
            except DuplicateJob as error:
                raise await self._with_holder(error) from error.__cause__
        if not isinstance(conn, AsyncConnection):
            raise _not_a_connection(conn, "AsyncConnection")
        if not conn.autocommit and conn.info.transaction_status.name == "IDLE":
            await conn.execute("SELECT")
        return await self._enqueue_batches(conn, first, statements)

    async def _enqueue_batches(
        self,
        conn: AsyncConnection[Any],
        first: Statement[list[Enqueued]],
        rest: Iterator[Statement[list[Enqueued]]],
    ) -> list[Enqueued]:
        async with conn.transaction():
            enqueued = await _arun(conn, first, self._schema)
            for statement in rest:
                more = await _arun(conn, statement, self._schema)
                enqueued += more
        return enqueued

    async def look_up(self, job_id: int) -> Standing:
        """Say where a job stands now; see `Client.look_up`."""
        return _found(job_id, await self._ask(look_up(job_id)))

    async def wait(self, job_id: int, timeout_seconds: float | None = DEFAULT_WAIT_SECONDS) -> Standing:
        """Wait until a job has ended; see `Client.wait`."""
        patience = _Patience(timeout_seconds)
        while True:
            standing = await self.look_up(job_id)
            if standing.state.has_ended:
                return standing
            await asyncio.sleep(patience.pause(job_id, standing))

    async def aclose(self) -> None:
        """Close the running loop's connections."""
        self._connections.close()

    async def _with_holder(self, error: DuplicateJob) -> DuplicateJob:
        try:
            holder = await self._ask(enqueueing.find_holder(error.unique_key))
        except database.errors.InsufficientPrivilege:
            holder = None
        return DuplicateJob(error.unique_key, holder)

    async def _ask(self, statement: Statement[T]) -> T:
        try:
            async with self._connections.lend() as conn:
                return await _arun(conn, statement, self._schema)
        except (database.errors.OperationalError, database.errors.InterfaceError):
            async with self._connections.lend() as conn:
                return await _arun(conn, statement, self._schema)


def result_of(job_id: int, standing: Standing, definition: TaskDefinition | None) -> Any:
    """Give the result of a job that has ended, by the return annotation of its task if that is known.

    Raises:
        JobDead, JobCancelled, ResultUnavailable: there is none; says why.
    """
    if standing.state is JobState.DEAD:
        raise JobDead(job_id, standing.reason or "no reason is known")
    if standing.state is JobState.CANCELLED:
        raise JobCancelled(job_id, standing.reason)
    if standing.result is None:
        if standing.reason:
            raise ResultUnavailable(job_id, standing.reason)
        if definition is not None and not definition.stores_result:
            raise ResultUnavailable(job_id, f"task {definition.name!r} is declared with store_result=False")
        return None
    if definition is None:
        return json.loads(standing.result)
    try:
        return definition.signature.decode_result(standing.result)
    except InvalidArguments as error:
        raise ResultUnavailable(job_id, error.reason) from error


# Running statements, with errors by their names.


def _run(conn: Connection[Any], statement: Statement[T], schema: str, job: NewJob | None = None) -> T:
    if not isinstance(conn, Connection):
        raise _not_a_connection(conn, "Connection")
    try:
        return database.run(conn, statement, schema)
    except Error as error:
        known = _by_name(error, schema, job)
        if known is None:
            raise
        raise known from database.without_detail(error)


async def _arun(
    conn: AsyncConnection[Any], statement: Statement[T], schema: str, job: NewJob | None = None
) -> T:
    if not isinstance(conn, AsyncConnection):
        raise _not_a_connection(conn, "AsyncConnection")
    try:
        return await database.arun(conn, statement, schema)
    except Error as error:
        known = _by_name(error, schema, job)
        if known is None:
            raise
        raise known from database.without_detail(error)


_MAYBE = "the connection broke before the answer came: the job may have been enqueued, or not"


def _by_name(error: Error, schema: str, job: NewJob | None) -> PgqueueError | None:
    message = error.diag.message_primary or str(error)
    # A text that the driver itself refuses, one with a NUL, has no SQLSTATE.
    is_unsendable = error.sqlstate is None and isinstance(error, database.errors.DataError)
    return refusal(
        "22021" if is_unsendable else error.sqlstate,
        error.diag.constraint_name,
        message,
        error.diag.message_detail or "",
        schema=schema,
        job=job,
    )


@contextmanager
def _doubt(own: Connection[Any] | AsyncConnection[Any]) -> Iterator[None]:
    try:
        yield
    except Error as error:
        if own.closed:
            error.add_note(_MAYBE)
        raise


def _not_a_connection(conn: Any, wanted: str) -> TypeError:
    kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
    if isinstance(conn, (Connection, AsyncConnection)):
        hint = "the sync methods take a Connection, those that begin with a an AsyncConnection"
    else:
        hint = "with SQLAlchemy on psycopg, pass session.connection().connection.driver_connection"
    return TypeError(f"conn must be a psycopg.{wanted}, not a {kind}; {hint}")


def _checked_jobs(jobs: Iterable[NewJob]) -> Iterator[NewJob]:
    place = 0
    try:
        for job in jobs:
            yield _checked_job(job)
            place += 1
    except (PgqueueError, TypeError) as error:
        error.add_note(f"at job {place:,} of enqueue_many, counted from 0; none was enqueued")
        raise


def _checked_job(job: Any) -> NewJob:
    if not isinstance(job, NewJob):
        raise TypeError(f"enqueue_many takes jobs as task.job(...) makes them, not {job!r:.60}")
    return job


def _found(job_id: int, standing: Standing | None) -> Standing:
    if standing is None:
        raise JobNotFound(job_id)
    return standing


class _Patience:
    """How long to go on looking: often at first, as most jobs end soon, then less."""

    def __init__(self, timeout_seconds: float | None) -> None:
        if timeout_seconds is not None and not timeout_seconds >= 0:
            raise ValueError(
                f"timeout_seconds must be at least 0, or None to wait for ever, not {timeout_seconds!r}"
            )
        self._seconds = timeout_seconds
        self._end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._pause = _FIRST_PAUSE_SECONDS

    def pause(self, job_id: int, standing: Standing) -> float:
        """Give the seconds until the next look; the last one is at the very end.

        Raises:
            ResultNotReady: the time is over.
        """
        pause, self._pause = self._pause, min(self._pause * 1.5, _LONGEST_PAUSE_SECONDS)
        if self._end is None or self._seconds is None:
            return pause
        left = self._end - time.monotonic()
        if left <= 0:
            raise ResultNotReady(job_id, standing.state.value, self._seconds)
        return min(pause, left)
