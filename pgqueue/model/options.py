"""What can be said about a job besides its arguments, and which values make sense.

Zero is a value like any other: it is honoured or refused, never taken for "not said".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Literal, TypedDict

from pgqueue.errors import InvalidJob
from pgqueue.model.encoding import Misfit, checked_text, dumps, plain
from pgqueue.model.job import MAX_HEADERS_BYTES, OnConflict, UniqueUntil
from pgqueue.model.keys import MAX_KEY_BYTES

MAX_QUEUE_BYTES = 100
# What its rate limit is called, task:T, is a key too.
MAX_TASK_BYTES = MAX_KEY_BYTES - len("task:")
MAX_PRIORITY = 32_767
MAX_ATTEMPTS = 100_000
MAX_TIMEOUT_SECONDS = 604_800.0
MAX_CONCURRENCY = 10_000
MAX_DELAY_SECONDS = 3.2e9
EARLIEST, LATEST = datetime(2000, 1, 1, tzinfo=UTC), datetime(3000, 1, 1, tzinfo=UTC)
_ON_CONFLICT = ("skip", "replace", "reject", "debounce")
_UNIQUE_UNTIL = ("end", "start")


class Unset(Enum):
    """Tells "not said" from None where None is an answer."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class JobOption(TypedDict, total=False):
    """The keywords of `using()`, for type checkers; `JobOptions` says what they mean."""

    queue: str | None
    priority: int | None
    max_attempts: int | None
    timeout_seconds: float | None
    run_at: datetime | None
    delay_seconds: float | None
    concurrency_key: str | None
    concurrency_limit: int | None
    unique_key: str | None
    unique_until: UniqueUntil | None
    on_conflict: OnConflict | None
    max_delay_seconds: float | None
    idempotency_key: str | None
    headers: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What a caller says about one job. None leaves it to the task.

    Except for `timeout_seconds`: there None is an answer, no limit, as it is where a task is
    declared; 0 says the same, as in SQL. `delay_seconds` counts from the database's now.

    Raises:
        InvalidJob: a value makes no sense, or two exclude each other; names the option.
    """

    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    timeout_seconds: float | Literal[Unset.UNSET] | None = UNSET
    run_at: datetime | None = None
    delay_seconds: float | None = None
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    unique_key: str | None = None
    unique_until: UniqueUntil | None = None
    on_conflict: OnConflict | None = None
    max_delay_seconds: float | None = None
    idempotency_key: str | None = None
    headers: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            for name, value in self.said().items():
                check_option(name, value)
            if self.headers is not None:
                object.__setattr__(self, "headers", _encoded_headers(self.headers))
        except ValueError as error:
            raise InvalidJob(str(error)) from None
        if self.run_at is not None and self.delay_seconds is not None:
            raise InvalidJob("run_at and delay_seconds exclude each other")

    def merged(self, changes: JobOption) -> JobOptions:
        """Give these options with some changed.

        Raises:
            InvalidJob: as when made.
        """
        unknown = sorted(changes.keys() - _NAMES)
        if unknown:
            raise TypeError(f"no option {unknown[0]!r}; there are: {', '.join(sorted(_NAMES))}")
        return JobOptions(**{**self.said(), **changes})

    def said(self) -> dict[str, Any]:
        """Give the options that say something, as NewJob has them."""
        said = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if self.timeout_seconds is UNSET:
            del said["timeout_seconds"]
        elif self.timeout_seconds is None:
            said["timeout_seconds"] = 0.0
        return said


_NAMES = frozenset(one.name for one in fields(JobOptions))
NO_OPTIONS = JobOptions()


def check_option(name: str, value: Any) -> None:
    """Check one option's value.

    Raises:
        ValueError: it makes no sense; says which option, what it may be, and what it was.
    """
    _CHECKS[name](value)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number between {low} and {high:,}, not {value!r:.60}")


def _check_seconds(name: str, value: Any, high: float, remark: str = "") -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= high:
        raise ValueError(f"{name} must be between 0 and {high:,.0f}{remark}, not {value!r:.60}")


def _check_run_at(value: Any) -> None:
    if not isinstance(value, datetime):
        raise ValueError(f"run_at must be a datetime, not {value!r:.60}")  # noqa: TRY004  one kind of refusal
    if value.utcoffset() is None:
        raise ValueError(
            f"run_at {value.isoformat()} has no time zone, so it names no instant; "
            "give it one, or use delay_seconds to count from now"
        )
    if not EARLIEST <= value < LATEST:
        raise ValueError(f"run_at must lie between the years 2000 and 3000, not {value.isoformat()}")


def _check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {value!r:.60}")


def _encoded_headers(headers: Any) -> dict[str, Any]:
    try:
        encoded: dict[str, Any] = plain(dict(headers))
        size = len(dumps(encoded).encode())
    except Misfit as misfit:
        raise ValueError(misfit.where("headers")) from None
    if size > MAX_HEADERS_BYTES:
        raise ValueError(f"headers are {size:,} bytes, a job carries at most {MAX_HEADERS_BYTES:,}")
    return encoded


def _check_headers(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"headers must be a dict, not {value!r:.60}")  # noqa: TRY004  one kind of refusal


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "queue": lambda value: checked_text("queue", value, MAX_QUEUE_BYTES),
    "priority": lambda value: _check_integer("priority", value, 0, MAX_PRIORITY),
    "max_attempts": lambda value: _check_integer("max_attempts", value, 1, MAX_ATTEMPTS),
    "timeout_seconds": lambda value: _check_seconds(
        "timeout_seconds", value, MAX_TIMEOUT_SECONDS, " (0 or None: no limit)"
    ),
    "run_at": _check_run_at,
    "delay_seconds": lambda value: _check_seconds("delay_seconds", value, MAX_DELAY_SECONDS),
    "concurrency_key": lambda value: checked_text("concurrency_key", value, MAX_KEY_BYTES),
    "concurrency_limit": lambda value: _check_integer("concurrency_limit", value, 1, MAX_CONCURRENCY),
    "unique_key": lambda value: checked_text("unique_key", value, MAX_KEY_BYTES),
    "unique_until": lambda value: _check_word("unique_until", value, _UNIQUE_UNTIL),
    "on_conflict": lambda value: _check_word("on_conflict", value, _ON_CONFLICT),
    "max_delay_seconds": lambda value: _check_seconds("max_delay_seconds", value, MAX_DELAY_SECONDS),
    "idempotency_key": lambda value: checked_text("idempotency_key", value, MAX_KEY_BYTES),
    "headers": _check_headers,
}
