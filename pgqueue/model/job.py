"""A job as a value: what a caller asks for, and the states it goes through."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple

# One million bytes and a bit: room for a document, not for a file. The database checks the same
# number on the text it stores, so a client in another language meets the same door.
MAX_ARGS_BYTES = 1_048_576
MAX_HEADERS_BYTES = 65_536
MAX_RESULT_BYTES = 1_048_576

DEFAULT_QUEUE = "default"
DEFAULT_PRIORITY = 0
DEFAULT_MAX_ATTEMPTS = 5
DEFAULT_TIMEOUT_SECONDS = 300.0
DEFAULT_TAKEOVER_SECONDS = 600.0

OnConflict = Literal["skip", "replace", "reject", "debounce"]
UniqueUntil = Literal["end", "start"]


class JobState(StrEnum):
    """Where a job stands; the same words in SQL, on the command line and in metrics."""

    SCHEDULED = "scheduled"
    READY = "ready"
    BLOCKED = "blocked"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in ENDED


ENDED = frozenset({JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED})

# Every legal step. `dead` goes back to `ready` only by a redrive; from `scheduled` a job that waits in the
# line of a rate limit is claimed directly, or blocked when its concurrency key is full by then.
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.SCHEDULED: frozenset({JobState.READY, JobState.RUNNING, JobState.BLOCKED, JobState.CANCELLED}),
    JobState.READY: frozenset({JobState.RUNNING, JobState.BLOCKED, JobState.SCHEDULED, JobState.CANCELLED}),
    JobState.BLOCKED: frozenset({JobState.READY, JobState.RUNNING, JobState.SCHEDULED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.SCHEDULED, JobState.READY}
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.DEAD: frozenset({JobState.READY}),
    JobState.CANCELLED: frozenset(),
}


class NewJob(NamedTuple):
    """A job asked for: arguments already bound, encoded and checked.

    `args` is the JSON text of an object. None in any other field leaves the choice to the task's
    definition in the database, and to the defaults if it has none. `timeout_seconds` 0 means no
    limit. `delay_seconds` counts from the database's now; it and `run_at` exclude each other.
    `max_delay_seconds` belongs to `debounce`: the longest that a job is put off, ten times the delay
    unless it is said. `is_complete`: the database has nothing to fill in.
    """

    task: str
    args: str = "{}"
    is_complete: bool = False
    # What all jobs of a task have in common, as a rule.
    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    timeout_seconds: float | None = None
    concurrency_limit: int | None = None
    on_conflict: OnConflict = "skip"
    # What is a job's own.
    run_at: datetime | None = None
    delay_seconds: float | None = None
    max_delay_seconds: float | None = None
    concurrency_key: str | None = None
    unique_key: str | None = None
    unique_until: UniqueUntil | None = None
    idempotency_key: str | None = None
    headers: Mapping[str, Any] | None = None

    @property
    def shared(self) -> tuple[Any, ...]:
        return self[_SHARED:_OWN]

    @property
    def own(self) -> tuple[Any, ...]:
        return self[_OWN:]

    @property
    def rest(self) -> tuple[Any, ...]:
        """All but the task and the arguments."""
        return self[_REST:]


_REST, _SHARED, _OWN = (NewJob._fields.index(name) for name in ("is_complete", "queue", "run_at"))
SHARED_FIELDS, OWN_FIELDS = NewJob._fields[_SHARED:_OWN], NewJob._fields[_OWN:]
