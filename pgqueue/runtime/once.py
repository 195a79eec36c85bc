"""Effects that happen once: a handler's transaction, or the key that is taken before an effect elsewhere.

In a transaction, the handler's work, the key and the job's end are one commit: nothing of it remains,
or all. Outside the database that cannot be had: there the key is taken first, so that an effect whose
end nobody heard of is known to be in doubt.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pgqueue.connections import AsyncConnections, Connections
from pgqueue.database import (
    AsyncConnection,
    Connection,
    Error,
    arenew,
    arun,
    errors,
    is_infrastructure,
    redact,
    renew,
    run,
)
from pgqueue.errors import DatabaseUnreachable, LeaseLost
from pgqueue.model.outcome import Ending, Outcome, clean
from pgqueue.model.task import TaskDefinition
from pgqueue.runtime.attempt import Attempt
from pgqueue.shell import write_command
from pgqueue.sql import Statement, attempts, once

# A key that somebody is at: look again after about this; or, while its owner may only be cut off, later.
_BUSY_SECONDS = 1.0
_LONGEST_BUSY_SECONDS = 30.0
# The database is away: the worker that claims will wait for it, so this need not be long.
_AWAY_SECONDS = 1.0

# What the server says when it ends a session for reasons of its own.
_SHUTDOWN = (errors.AdminShutdown, errors.CrashShutdown)
_ENDED_EARLY = "PQ001"


class _Stage(Enum):
    """How far a transaction has come."""

    BEGINNING = auto()
    WORKING = auto()
    COMMITTING = auto()
    OVER = auto()


@dataclass(slots=True)
class _Course:
    """One transaction of one attempt: how far it is, and how it ended."""

    stage: _Stage = _Stage.BEGINNING
    is_broken: bool = False
    outcome: Outcome | None = None


class Once:
    """Begins and ends such effects for the attempts of one process, on connections of its own."""

    def __init__(self, schema: str, slots: int) -> None:
        self._schema = schema
        # The parent has told this process its database in PGQUEUE_DSN.
        self._connections = Connections(None, schema, slots, must_write=True)
        self._aconnections = AsyncConnections(None, schema, slots, must_write=True)

    def close(self) -> None:
        self._connections.close()

    # A transaction.

    def transact(
        self, attempt: Attempt, definition: TaskDefinition, handler: Callable[[Connection[Any]], Any]
    ) -> Outcome:
        """Run a handler inside a transaction that also ends its job."""
        course = _Course()
        with _converted(attempt, course), self._connections.lend() as conn:
            try:
                with conn.transaction():
                    begun = run(conn, self._begin(attempt, definition), self._schema)
                    course.outcome = _without_handler(attempt, begun, self._schema)
                    if course.outcome is None:
                        course.stage = _Stage.WORKING
                        with _cancellable(attempt, conn):
                            course.outcome = definition.success(handler(conn))
                    if course.outcome.ending is Ending.SUCCEEDED:
                        course.outcome = _settled(
                            attempt, run(conn, self._finish(attempt, begun, course.outcome), self._schema)
                        )
                    course.stage = _Stage.COMMITTING
                course.stage = _Stage.OVER
                # No job is to run under another one's role, search_path or temporary tables.
                renew(conn)
            except BaseException:
                # What a broken transaction leaves behind is not for the next attempt.
                course.is_broken = conn.closed
                conn.pgconn.finish()
                raise
        return _ended(course)

    async def atransact(
        self,
        attempt: Attempt,
        definition: TaskDefinition,
        handler: Callable[[AsyncConnection[Any]], Awaitable[Any]],
    ) -> Outcome:
        """Run an async handler inside a transaction that also ends its job."""
        course = _Course()
        with _converted(attempt, course):
            async with self._aconnections.lend() as conn:
                try:
                    async with conn.transaction():
                        begun = await arun(conn, self._begin(attempt, definition), self._schema)
                        course.outcome = _without_handler(attempt, begun, self._schema)
                        if course.outcome is None:
                            course.stage = _Stage.WORKING
                            course.outcome = definition.success(await handler(conn))
                        if course.outcome.ending is Ending.SUCCEEDED:
                            finish = self._finish(attempt, begun, course.outcome)
                            course.outcome = _settled(attempt, await arun(conn, finish, self._schema))
                        course.stage = _Stage.COMMITTING
                    course.stage = _Stage.OVER
                    await arenew(conn)
                except BaseException:
                    course.is_broken = conn.closed
                    conn.pgconn.finish()
                    raise
        return _ended(course)

    # An effect elsewhere.

    def begin(self, attempt: Attempt, definition: TaskDefinition) -> Outcome | None:
        """Take the attempt's key before its handler runs; an outcome says that it need not, or must not."""
        statement = self._begin(attempt, definition)
        for is_last in (False, True):
            try:
                with self._connections.lend() as conn, _closed_on_error(conn):
                    return _without_handler(attempt, run(conn, statement, self._schema), self._schema)
            except (Error, DatabaseUnreachable, OSError) as error:
                # Asked twice under one token, the answer is the same.
                if is_last or not is_infrastructure(error):
                    return _put_off(error)
        return None

    async def abegin(self, attempt: Attempt, definition: TaskDefinition) -> Outcome | None:
        """Take the attempt's key before its async handler runs; see `begin`."""
        statement = self._begin(attempt, definition)
        for is_last in (False, True):
            try:
                async with self._aconnections.lend() as conn:
                    with _closed_on_error(conn):
                        begun = await arun(conn, statement, self._schema)
                        return _without_handler(attempt, begun, self._schema)
            except (Error, DatabaseUnreachable, OSError) as error:
                if is_last or not is_infrastructure(error):
                    return _put_off(error)
        return None

    # Statements.

    def _begin(self, attempt: Attempt, definition: TaskDefinition) -> Statement[once.Begun]:
        return once.begin(
            attempt.key,
            attempt.task_name,
            attempt.token,
            attempt.job_id,
            may_take_over=definition.may_take_over,
            takeover_seconds=definition.takeover_seconds,
        )

    def _finish(self, attempt: Attempt, begun: once.Begun, outcome: Outcome) -> Statement[str]:
        if begun.verdict == "done":
            # A repetition: only this job's own end is left to write.
            completed = attempts.complete([attempt.job_id], [attempt.token], [outcome.text], [outcome.note])
            return Statement(completed.text, completed.params, lambda found: "done" if found else "lost")
        return once.finish(
            attempt.key, attempt.token, attempt.job_id, outcome.text, outcome.note, begun.began
        )


def _without_handler(attempt: Attempt, begun: once.Begun, schema: str) -> Outcome | None:
    """Say how the attempt ends without its handler; None: the effect is to happen here and now."""
    match begun.verdict:
        case "started":
            return None
        case "takeover":
            attempt.is_takeover = True
            return None
        case "done":
            return Outcome(Ending.SUCCEEDED, begun.response)
        case "unknown":
            return Outcome(
                Ending.DEAD,
                "outcome unknown: an earlier attempt was cut off after it had begun, and the task is neither "
                f"idempotent nor has a reconcile function; find out whether {attempt.key!r} happened, and if "
                f"not: {write_command('processed forget', attempt.key, schema=schema)}, then "
                f"{write_command('dlq redrive', attempt.job_id, schema=schema)}",
            )
        case "lost":
            raise _lost(attempt)
    seconds = min(begun.retry_seconds or _BUSY_SECONDS, _LONGEST_BUSY_SECONDS)
    return Outcome(Ending.SNOOZED, None, seconds * random.uniform(0.5, 1.5))


def _settled(attempt: Attempt, word: str) -> Outcome:
    if word != "done":
        raise _lost(attempt)
    return Outcome(Ending.SETTLED)


def _ended(course: _Course) -> Outcome:
    if course.stage is not _Stage.OVER or course.outcome is None:
        # psycopg.Rollback ends the driver's block without an error, and takes the job's end along.
        raise RuntimeError("its handler rolled the transaction back that it was given")
    return course.outcome


@contextmanager
def _converted(attempt: Attempt, course: _Course) -> Iterator[None]:
    """Give the meaning of an error by how far the transaction was, as an outcome that ends the attempt."""
    try:
        yield
    except Exception as error:
        if getattr(error, "sqlstate", None) == _ENDED_EARLY:
            reason = "its handler ended the transaction it was given; it must leave that to the worker"
            raise EndsAs(Outcome(Ending.DEAD, reason)) from error
        if isinstance(error, errors.QueryCanceled) and (stop := attempt.reason_to_stop()) is not None:
            raise stop from error
        if course.stage is _Stage.BEGINNING and isinstance(error, (Error, DatabaseUnreachable, OSError)):
            raise EndsAs(_put_off(error)) from error
        if not course.is_broken:
            raise
        summary = clean(redact(str(error)).strip().partition("\n")[0])
        if course.stage is _Stage.COMMITTING:
            # Whether it happened is on record: the parent looks there before it gives the job back.
            unheard = Outcome(Ending.RELEASED, f"its COMMIT failed: {summary}", _jitter(_AWAY_SECONDS))
            raise EndsAs(unheard) from error
        if isinstance(error, _SHUTDOWN):
            away = f"undone, because its session was ended: {summary}"
            raise EndsAs(Outcome(Ending.RELEASED, away, _jitter(_AWAY_SECONDS))) from error
        raise EndsAs(Outcome(Ending.CRASHED, f"undone, because its session broke off: {summary}")) from error


class EndsAs(Exception):  # not an error: an outcome on its way out of a handler's frames
    """Carries the outcome of an attempt."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.text)


@contextmanager
def _closed_on_error(conn: Connection[Any] | AsyncConnection[Any]) -> Iterator[None]:
    """Let the next try have another connection: this one may be to a standby, or in any state."""
    try:
        yield
    except BaseException:
        conn.pgconn.finish()
        raise


def _put_off(error: BaseException) -> Outcome:
    """Give the attempt back before its handler ran; infrastructure is no attempt's fault."""
    if is_infrastructure(error) or isinstance(error, (errors.QueryCanceled, errors.LockNotAvailable)):
        return Outcome(Ending.RELEASED, None, _jitter(_AWAY_SECONDS))
    return Outcome(Ending.FAILED, clean(f"its key could not be taken: {redact(str(error)).strip()}"))


def _jitter(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)


def _lost(attempt: Attempt) -> LeaseLost:
    return LeaseLost(f"job {attempt.job_id}: the lease ran out, another attempt may be running")


@contextmanager
def _cancellable(attempt: Attempt, conn: Connection[Any]) -> Iterator[None]:
    """Let an interruption of the attempt end the statement that its thread waits for."""
    turn = threading.Lock()
    is_over = False

    def cancel() -> None:
        with turn:
            if not is_over:
                with suppress(Error, OSError):
                    conn.cancel_safe(timeout=5)

    attempt.cancel_statement = lambda: threading.Thread(target=cancel, daemon=True).start()
    try:
        yield
    finally:
        attempt.cancel_statement = None
        with turn:
            is_over = True
