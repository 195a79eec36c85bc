"""What holds starts back, as an operator sets it: pauses and ceilings of queues, rate limits.

All of it is in force for every worker with the next claim, wherever that is, and by the database's
clock. What runs is never interrupted by any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pgqueue.database import Connection, run
from pgqueue.errors import ConfigurationError, RateLimitNotFound
from pgqueue.model.limits import MAX_BURST, MAX_TOKENS_PER_SECOND, RateLimit, checked_name, rate_limit
from pgqueue.model.options import check_option
from pgqueue.sql import limits, operate
from pgqueue.sql.limits import LimitSummary

__all__ = [
    "LimitSummary",
    "limit_names",
    "limit_queue",
    "list_limits",
    "pause_queues",
    "remove_limit",
    "resume_queues",
    "set_limit",
]

UNLIMITED = RateLimit(MAX_TOKENS_PER_SECOND, MAX_BURST)


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
    """Start nothing more in these queues, or in all that are known; gives their names.

    For so many seconds by the database's clock, until an instant, or until `resume_queues`.

    Raises:
        ConfigurationError: a name or a time makes no sense.
    """
    _check_queues(queues)
    if seconds is not None and until is not None:
        raise ConfigurationError("a pause has a length or an end, not both")
    if until is not None and until.utcoffset() is None:
        raise ConfigurationError(f"{until.isoformat()} has no time zone, so it names no instant")
    return run(connection, operate.pause_queues(queues, seconds, until, reason), schema)


def resume_queues(
    connection: Connection[Any],
    queues: Sequence[str] | None = None,
    *,
    max_running: int | None = None,
    schema: str = "pgqueue",
) -> list[str]:
    """Go on in these queues, or in all that are paused; gives their names. Idle workers hear it at once.

    With `max_running`, at most so many of their jobs run at a time from now on.

    Raises:
        ConfigurationError: a name makes no sense.
    """
    _check_queues(queues)
    return run(connection, operate.resume_queues(queues, max_running), schema)


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
        ConfigurationError: the name makes no sense.
    """
    _check_queues([queue])
    run(connection, operate.limit_queue(queue, max_running, reason), schema)


def _check_queues(queues: Sequence[str] | None) -> None:
    try:
        for queue in queues or ():
            check_option("queue", queue)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


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
    try:
        name = checked_name(name)
        limit = UNLIMITED if rate is None else rate_limit(rate, burst)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    run(connection, limits.set_limit(name, limit.tokens_per_second, limit.burst), schema)
    return limit


def remove_limit(connection: Connection[Any], name: str, schema: str = "pgqueue") -> int:
    """Remove a rate limit, and what it made if it is a pattern; gives how many jobs had waited for it.

    If code declares it, the next worker that starts makes it again.

    Raises:
        RateLimitNotFound: there is none of this name.
    """
    freed = run(connection, limits.remove_limit(name), schema)
    if freed is None:
        raise RateLimitNotFound(name, limit_names(connection, schema))
    return freed
