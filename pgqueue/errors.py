"""Every exception a user of pgqueue can meet.

The first sentence of a docstring says what happened; a message adds to which job or task, and
what to do. The parts are attributes too. Errors of the driver pass through untouched, except
where a known constraint or a failed connection has a name of its own here.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pgqueue.shell import write_command


class PgqueueError(Exception):
    """Something pgqueue could not do; `exit_code` is what a command ends with."""

    exit_code = 1


# The environment: settings, server, schema.


class ConfigurationError(PgqueueError):
    """A setting is missing or makes no sense."""

    exit_code = 2


class DatabaseUnreachable(PgqueueError):
    """The database could not be reached or refused the login; never names the password."""

    exit_code = 75


class EmbeddedServerError(PgqueueError):
    """The embedded PostgreSQL server could not be started or stopped."""


class SchemaMismatch(PgqueueError):
    """The schema in the database is not the one this version works with."""


class SchemaMissing(SchemaMismatch):
    """The database has no pgqueue schema yet."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        super().__init__(
            f"the database has no schema {schema!r}; run: {write_command('migrate', schema=schema)}"
        )


class SchemaTooOld(SchemaMismatch):
    """The schema in the database is older than this version of pgqueue needs."""

    def __init__(self, schema: str, found: str, needed: str) -> None:
        self.schema, self.found, self.needed = schema, found, needed
        super().__init__(
            f"schema {schema!r} is at revision {found}, this pgqueue needs {needed}; "
            f"run: {write_command('migrate', schema=schema)}"
        )


class SchemaTooNew(SchemaMismatch):
    """The schema in the database was made by a newer pgqueue than this one."""

    def __init__(self, schema: str, found: str, known: str) -> None:
        self.schema, self.found, self.known = schema, found, known
        super().__init__(
            f"schema {schema!r} is at revision {found}, this pgqueue knows up to {known}; "
            "install the newer pgqueue here"
        )


# The door: what is refused before it reaches the queue.


class InvalidJob(PgqueueError, ValueError):
    """A job was refused at the door; nothing was enqueued."""


class UnknownTask(InvalidJob):
    """No task of this name is known here."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, sorted(known)
        super().__init__(f"no task {name!r}; {_hint(name, self.known, 'no task is registered yet')}")


class InvalidArguments(InvalidJob):
    """The arguments do not fit the task's signature, or are not JSON."""

    def __init__(self, task: str, reason: str) -> None:
        self.task, self.reason = task, reason
        super().__init__(f"task {task!r}: {reason}")


class ArgumentsTooLarge(InvalidJob):
    """The arguments are larger than a job may carry."""

    def __init__(self, task: str, size_bytes: int | None, max_bytes: int) -> None:
        self.task, self.size_bytes, self.max_bytes = task, size_bytes, max_bytes
        size = f"{size_bytes:,} bytes" if size_bytes is not None else "too large"
        super().__init__(
            f"task {task!r}: the arguments are {size}, a job carries at most {max_bytes:,}; "
            "store the document elsewhere and pass its key"
        )


class UnknownQueue(PgqueueError, LookupError):
    """Nobody knows a queue of this name: no job, task, setting or worker."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, sorted(known)
        super().__init__(f"no queue {name!r}; {_hint(name, self.known, 'no queue is known yet')}")


class DuplicateJob(InvalidJob):
    """A live job holds this unique key already, and the caller asked for a refusal."""

    def __init__(self, unique_key: str, job_id: int | None = None) -> None:
        self.unique_key, self.job_id = unique_key, job_id
        holder = f"job {job_id}" if job_id is not None else "a live job"
        super().__init__(f"{holder} already holds the unique key {unique_key!r}")


class KeyBusy(PgqueueError):
    """Somebody is doing what this idempotency key stands for just now; nothing was done."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"somebody is at work on the key {key!r} just now; try again later")


# Schedules.


class UnknownSchedule(PgqueueError, LookupError):
    """There is no schedule of this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, sorted(known)
        super().__init__(f"no schedule {name!r}; {_hint(name, self.known, 'there is none yet')}")


class ScheduleConflict(PgqueueError):
    """What was asked for does not go with the schedule that has this name."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"schedule {name!r} {reason}")


class LockBusy(PgqueueError):
    """Somebody else holds the named lock, and did for as long as we waited."""

    def __init__(self, name: str, wait_seconds: float, schema: str = "pgqueue") -> None:
        self.name, self.wait_seconds, self.schema = name, wait_seconds, schema
        see = write_command("locks", schema=schema)
        waited = f" for {wait_seconds:g} s" if wait_seconds else ""
        super().__init__(f"somebody else held the lock {name!r}{waited}; see who: {see}")


class BreakerNotFound(PgqueueError, LookupError):
    """No circuit breaker has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, sorted(known)
        none_known = "there is none; a worker makes those that its tasks name"
        super().__init__(f"no breaker {name!r}; {_hint(name, self.known, none_known)}")


class RateLimitNotFound(PgqueueError, LookupError):
    """No rate limit has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, sorted(known)
        super().__init__(f"no rate limit {name!r}; {_hint(name, self.known, 'there is none')}")


# Looking at a job afterwards.


class JobNotFound(PgqueueError, LookupError):
    """No job of this id exists, or its history was pruned."""

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        super().__init__(f"no job {job_id}: it never existed, or its history is no longer kept")


class ResultNotReady(PgqueueError, TimeoutError):
    """The job had not ended when the caller's patience did."""

    def __init__(self, job_id: int, state: str, timeout_seconds: float) -> None:
        self.job_id, self.state, self.timeout_seconds = job_id, state, timeout_seconds
        super().__init__(f"job {job_id} is still {state} after {timeout_seconds:g} s")


class ResultUnavailable(PgqueueError):
    """The job succeeded, but what it returned was not kept."""

    def __init__(self, job_id: int, reason: str) -> None:
        self.job_id, self.reason = job_id, reason
        super().__init__(f"job {job_id} succeeded, but its result was not kept: {reason}")


class JobDead(PgqueueError):
    """The job used up its attempts, or failed in a way that no retry mends."""

    def __init__(self, job_id: int, reason: str) -> None:
        self.job_id, self.reason = job_id, reason
        super().__init__(f"job {job_id} is dead: {reason}")


class JobCancelled(PgqueueError):
    """The job was cancelled."""

    def __init__(self, job_id: int, reason: str | None) -> None:
        self.job_id, self.reason = job_id, reason
        super().__init__(f"job {job_id} was cancelled" + (f": {reason}" if reason else ""))


# What a handler raises to say how its attempt ends.


class Unrecoverable(PgqueueError):
    """Raise in a handler: no retry can mend this; the job goes to the dead letters at once."""


class RetryAfter(PgqueueError):
    """Raise in a handler: this attempt failed, try again in so many seconds."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        self.seconds, self.reason = _checked_seconds("RetryAfter", seconds), reason
        super().__init__(reason or f"retry after {seconds:.15g} s")


class Snooze(PgqueueError):
    """Raise in a handler: not now; run again in so many seconds, no attempt used up."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        self.seconds, self.reason = _checked_seconds("Snooze", seconds), reason
        super().__init__(reason or f"snoozed for {seconds:.15g} s")


class Cancel(PgqueueError):
    """Raise in a handler: give this job up; it ends as cancelled, not as dead."""


class JobTimeout(PgqueueError):
    """The attempt ran past its deadline."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        super().__init__(f"timed out after {timeout_seconds:g} s")


class LeaseLost(PgqueueError):
    """The lease ran out and another attempt may be running: stop, write nothing."""


def _hint(name: str, known: list[str], none_known: str) -> str:
    """Say what else could have been meant."""
    if near := get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    if known:
        return "known: " + ", ".join(known[:10]) + (", …" if len(known) > 10 else "")
    return none_known


def _checked_seconds(name: str, seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 3.2e7:
        raise ValueError(f"{name}: seconds must be between 0 and one year, not {seconds!r}")
    return float(seconds)
