"""Rate limits: how they are written, and which starts each of them counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pgqueue.errors import ConfigurationError
from pgqueue.model.encoding import checked_text
from pgqueue.model.keys import MAX_KEY_BYTES, KeyTemplate

MAX_TOKENS_PER_SECOND = 1_000_000.0
MAX_BURST = 100_000
# After so long at the latest an empty bucket is full again: later instants cannot be computed.
MAX_REFILL_SECONDS = 3e9
# What may start at once unless it is said: so much time's worth, but at least one.
_BURST_SECONDS = 0.1

_SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)?\s*(s|min|m|h|d)")


@dataclass(frozen=True, slots=True)
class RateLimit:
    """So many starts in the long run, and `burst` at once after a calm.

    No stretch of time sees more than the burst and what the rate gives in it.
    """

    tokens_per_second: float
    burst: int

    def __str__(self) -> str:
        return f"{rate_text(self.tokens_per_second)} with burst {self.burst:,}"


def rate_limit(rate: str, burst: int | None = None) -> RateLimit:
    """Read a rate: `100/s`, `5/min`, `1000/h`, `10/30s`.

    Raises:
        ValueError: it is none, or a number is out of bounds.
    """
    found = _RATE.fullmatch(rate.strip().lower()) if isinstance(rate, str) else None
    if not found:
        raise ValueError(
            f"a rate is a number of starts and a time, as 100/s, 5/min or 10/30s, not {rate!r:.60}"
        )
    seconds = float(found[2] or 1) * _SECONDS[found[3]]
    per_second = float(found[1]) / seconds if seconds else 0.0
    if not 0 < per_second <= MAX_TOKENS_PER_SECOND:
        raise ValueError(
            f"a rate must be above 0 and at most {MAX_TOKENS_PER_SECOND:,.0f}/s, not {rate!r:.60}"
        )
    if burst is None:
        burst = max(1, min(MAX_BURST, int(per_second * _BURST_SECONDS)))
    elif not isinstance(burst, int) or isinstance(burst, bool) or not 1 <= burst <= MAX_BURST:
        raise ValueError(f"burst must be a whole number between 1 and {MAX_BURST:,}, not {burst!r:.60}")
    if burst / per_second > MAX_REFILL_SECONDS:
        raise ValueError(f"at {rate!r:.60} a burst of {burst:,} is there again after a century only")
    return RateLimit(per_second, burst)


def rate_text(tokens_per_second: float) -> str:
    """Write a rate, as it can be set, by the shortest time in which it gives a whole number, if any does."""
    for unit in ("s", "min", "h", "d"):
        number = tokens_per_second * _SECONDS[unit]
        if number >= 1 and abs(number - round(number)) < 1e-6 * number:
            return f"{round(number)}/{unit}"
    if tokens_per_second >= 1e-4:
        return f"{tokens_per_second:.6g}/s"
    days = f"{1 / (tokens_per_second * _SECONDS['d']):.6f}"
    return f"1/{days.rstrip('0').rstrip('.')}d"


def checked_name(name: str) -> str:
    """Check whom a limit is for: `queue:mail`, `task:send`, a rate key, or keys by a pattern: `api:*`.

    Raises:
        ValueError: it is nobody's.
    """
    name = checked_text("a rate limit's name", name, MAX_KEY_BYTES)
    if name.startswith("queue:") and (name == "queue:" or name.endswith("*")):
        raise ValueError(f"{name!r} names no queue: the limit of a queue is that queue's alone")
    return name


def name_for(task: str, rate_key: KeyTemplate | None) -> str:
    """Give the name under which the limit of a task's jobs is kept.

    Raises:
        ValueError: its keys have no beginning in common.
    """
    if rate_key is None:
        return f"task:{task}"
    if not rate_key.names:
        return rate_key.text
    beginning = rate_key.text.partition("{")[0]
    if not beginning:
        raise ValueError(
            f"rate_limit is for the keys that begin like rate_key, and {rate_key.text!r} begins with an "
            "argument; put a word before it: 'api:{...}'"
        )
    return f"{beginning}*"


def declaration(name: str, limit: RateLimit | None) -> dict[str, Any]:
    """Give a limit as code declares it; None: there is none of this name any more."""
    return {
        "name": name,
        "tokens_per_second": limit and limit.tokens_per_second,
        "burst": limit and limit.burst,
    }


class RateLimits:
    """The limits that an application declares."""

    def __init__(self) -> None:
        self._limits: dict[str, RateLimit] = {}

    def add(self, name: str, limit: RateLimit) -> None:
        """Take one in.

        Raises:
            ConfigurationError: another one has its name.
        """
        other = self._limits.setdefault(name, limit)
        if other != limit:
            raise ConfigurationError(f"rate limit {name!r} is declared twice, as {other} and as {limit}")

    def declarations(self, tasks: list[str]) -> list[dict[str, Any]]:
        """Give all of them, and the tasks that have none of their own."""
        undeclared = [name for task in tasks if (name := f"task:{task}") not in self._limits]
        return [
            *(declaration(name, limit) for name, limit in sorted(self._limits.items())),
            *(declaration(name, None) for name in undeclared),
        ]
