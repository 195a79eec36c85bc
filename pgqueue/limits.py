"""What holds starts back, as an operator sets it: pauses and ceilings of queues, rate limits.

All of it is in force for every worker with the next claim, wherever that is, and by the database's
clock. What runs is never interrupted by any of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from pgqueue.database import Connection, errors, run
from pgqueue.errors import ConfigurationError, RateLimitNotFound
from pgqueue.model.encoding import checked_text, several
from pgqueue.model.keys import MAX_KEY_BYTES
from pgqueue.model.limits import MAX_BURST, MAX_TOKENS_PER_SECOND, RateLimit, checked_name, rate_limit
from pgqueue.model.options import EARLIEST, LATEST, MAX_DELAY_SECONDS, check_option
from pgqueue.sql import limits, operate
from pgqueue.sql.limits import LimitSummary
from pgqueue.sql.operate import Pause

__all__ = [
    "LimitSummary",
    "Pause",
    "limit_names",
    "limit_queue",
    "list_limits",
    "list_pauses",
    "pause_queues",
    "remove_limit",
    "resume_queues",
    "set_limit",
]

UNLIMITED = RateLimit(MAX_TOKENS_PER_SECOND, MAX_BURST)
MAX_RUNNING = 1_000_000
MAX_REASON_BYTES = 10_000


# Queues.


def pause_queues(
    connection: Connection[Any],
    queues: Sequence[str] | None = None,
    *,
    seconds: float | None = None,
    until: datetime | None = None,
    reason: str | None = None,
    schema: str = "pgqueue",
) -> list[str]:
    """Start nothing more in these queues, or in all that are known; gives the names of those it paused.

    For so many seconds by the database's clock, until an instant, or until `resume_queues`. With all
    of them, one that is paused already keeps its end and its reason.

    Raises:
        ConfigurationError: a name, a time or the reason makes no sense, or the end does not lie ahead.
    """
    with _refused():
        queues = _checked_queues(queues)
        _check_reason(reason)
        _check_end(seconds, until)
    try:
        return run(connection, operate.pause_queues(queues, seconds, until, reason), schema)
    except errors.InvalidParameterValue as error:
        raise ConfigurationError(str(error.diag.message_primary)) from error


def resume_queues(
    connection: Connection[Any],
    queues: Sequence[str] | None = None,
    *,
    max_running: int | None = None,
    reason: str | None = None,
    schema: str = "pgqueue",
) -> list[str]:
    """Go on in these queues, or in all that are paused; gives their names. Idle workers hear it at once.

    With a `reason`, only in those that were paused for it; "" is none. With `max_running`, at most
    so many of their jobs run at a time from now on; with all of them, limits that there are stay.

    Raises:
        ConfigurationError: a name, the number or the reason makes no sense.
    """
    with _refused():
        queues = _checked_queues(queues)
        _check_max_running(max_running)
        if reason:
            _check_reason(reason)
    return run(connection, operate.resume_queues(queues, max_running, reason), schema)


def list_pauses(connection: Connection[Any], schema: str = "pgqueue") -> list[Pause]:
    """List the queues that are paused now, by name."""
    return run(connection, operate.list_pauses(), schema)


def limit_queue(
    connection: Connection[Any],
    queue: str,
    max_running: int | None,
    *,
    reason: str | None = None,
    schema: str = "pgqueue",
) -> None:
    """Let at most so many jobs of a queue run at a time, over all workers: 0 is none, None is no limit.

    Raises:
        ConfigurationError: the name, the number or the reason makes no sense.
    """
    with _refused():
        check_option("queue", queue)
        _check_max_running(max_running)
        _check_reason(reason)
    run(connection, operate.limit_queue(queue, max_running, reason), schema)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _checked_queues(queues: Sequence[str] | None) -> list[str] | None:
    if queues is None:
        return None
    names = several("queues", queues)
    for name in names:
        check_option("queue", name)
    return names


def _check_max_running(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_RUNNING:
        raise ValueError(
            f"max_running must be a whole number between 0 and {MAX_RUNNING:,}, or None, not {value!r:.60}"
        )


def _check_reason(reason: Any) -> None:
    if reason is not None:
        checked_text("reason", reason, MAX_REASON_BYTES)


def _check_end(seconds: Any, until: Any) -> None:
    if seconds is not None and until is not None:
        raise ValueError("a pause has a length or an end, not both")
    if seconds is not None:
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds <= MAX_DELAY_SECONDS:
            raise ValueError(
                f"seconds must be above 0 and at most {MAX_DELAY_SECONDS:,.0f}, not {seconds!r:.60}"
            )
    if until is not None:
        if not isinstance(until, datetime):
            raise ValueError(f"until must be a datetime, not {until!r:.60}")
        if until.utcoffset() is None:
            raise ValueError(f"{until.isoformat()} has no time zone, so it names no instant")
        if not EARLIEST <= until < LATEST:
            raise ValueError(f"until must lie between the years 2000 and 3000, not {until.isoformat()}")


# Rate limits.


def list_limits(
    connection: Connection[Any], *, with_keys: bool = False, max_rows: int = 1000, schema: str = "pgqueue"
) -> list[LimitSummary]:
    """List rate limits by name; after a pattern, if they are asked for, those that it made for keys."""
    return run(connection, limits.list_limits(max_rows, with_keys=with_keys), schema)


def limit_names(connection: Connection[Any], schema: str = "pgqueue") -> list[str]:
    """Name the rate limits, but for those that patterns made."""
    return run(connection, limits.limit_names(), schema)


def set_limit(
    connection: Connection[Any],
    name: str,
    rate: str | None,
    *,
    burst: int | None = None,
    schema: str = "pgqueue",
) -> RateLimit:
    """Make or change a rate limit, from now on an operator's: code does not change it any more.

    None lets everything pass, whatever the code says.

    Raises:
        ConfigurationError: the name or the rate makes no sense.
    """
    with _refused():
        name = checked_name(name)
        limit = UNLIMITED if rate is None else rate_limit(rate, burst)
    run(connection, limits.set_limit(name, limit.tokens_per_second, limit.burst), schema)
    return limit


def remove_limit(connection: Connection[Any], name: str, schema: str = "pgqueue") -> int:
    """Remove a rate limit, and what it made if it is a pattern; gives how many jobs had waited for it.

    If code declares it, the next worker that starts makes it again.

    Raises:
        RateLimitNotFound: there is none of this name.
        ConfigurationError: no limit can have it.
    """
    with _refused():
        checked_text("a rate limit's name", name, MAX_KEY_BYTES)
    freed = run(connection, limits.remove_limit(name), schema)
    if freed is None:
        raise RateLimitNotFound(name, limit_names(connection, schema))
    return freed
