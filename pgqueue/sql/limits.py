"""Rate limits, and when the next start is due, as statements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from pgqueue.sql import Statement, column, first_value, load, nothing

_TEXT = load("limits")

COUNT_CAP = 10_000


class NextStart(NamedTuple):
    """Whether an idle worker has anything to wait for but the bell, and the seconds until it comes."""

    is_possible: bool
    seconds: float | None


@dataclass(frozen=True, slots=True)
class LimitSummary:
    """A rate limit at a glance.

    It has let `taken` jobs start; `waiting` are in its line, as far as they were counted, and at
    `next_at` the first may start. A pattern counts for its `keys` together, and is the `pattern` of
    each. One that `is_declared` follows the code.
    """

    name: str
    tokens_per_second: float
    burst: int
    keys: int
    taken: int
    waiting: int
    next_at: datetime | None
    pattern: str | None
    is_declared: bool
    seen_at: datetime


# What workers ask and say.


def declare(definitions: Sequence[Mapping[str, Any]]) -> Statement[None]:
    return Statement(_TEXT["declare"], {"definitions": json.dumps(list(definitions))}, nothing)


def mend() -> Statement[None]:
    return Statement(_TEXT["mend"], {}, nothing)


def next_start(queues: Sequence[str]) -> Statement[NextStart]:
    return Statement(_TEXT["next_start"], {"queues": list(queues)}, lambda found: NextStart._make(found[0]))


# What people ask and do.


def list_limits(limit: int, *, with_keys: bool, cap: int = COUNT_CAP) -> Statement[list[LimitSummary]]:
    return Statement(
        _TEXT["list_limits"],
        {"limit": limit, "with_keys": with_keys, "cap": cap},
        lambda found: [LimitSummary(*row) for row in found],
    )


def set_limit(name: str, tokens_per_second: float, burst: int) -> Statement[None]:
    params = {"name": name, "tokens_per_second": tokens_per_second, "burst": burst}
    return Statement(_TEXT["set_limit"], params, nothing)


def remove_limit(name: str) -> Statement[int | None]:
    """Remove a limit; gives how many jobs had waited, None if there is none of this name."""
    return Statement(_TEXT["remove_limit"], {"name": name}, first_value)


def limit_names() -> Statement[list[str]]:
    return Statement(_TEXT["limit_names"], {}, column)
