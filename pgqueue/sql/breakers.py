"""Circuit breakers, as statements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from pgqueue.sql import Statement, first_value, load, nothing

_TEXT = load("breakers")

COUNT_CAP = 10_000
UNPARK_JOBS = 500
PARK_JOBS = 1000


class BreakerView(NamedTuple):
    """A breaker as a worker sees it. `seconds` is the time until a probe may be asked for, if it comes."""

    name: str
    state: str
    generation: int
    seconds: float | None
    probe: str | None
    has_parked: bool
    calls: int
    failures: int
    min_calls: int
    failure_ratio: float
    max_failures: int | None
    probe_seconds: float


class Permission(NamedTuple):
    """Whether a job may start, under which generation, and as which probe; `seconds` as in BreakerView."""

    is_allowed: bool
    generation: int
    probe: str | None
    seconds: float | None


class Results(NamedTuple):
    """What a worker has to tell of a breaker."""

    name: str
    generation: int
    successes: int
    failures: int
    probe: str | None


@dataclass(frozen=True, slots=True)
class BreakerSummary:
    """A breaker at a glance; `calls` and `failures` are those of the last one to two windows."""

    name: str
    state: str
    generation: int
    opens: int
    opened_at: datetime | None
    retry_at: datetime | None
    probe_until: datetime | None
    calls: int
    failures: int
    parked: int
    tasks: list[str]
    failure_ratio: float
    min_calls: int
    max_failures: int | None
    window_seconds: float
    open_seconds: float
    max_open_seconds: float
    probe_seconds: float
    pinned: list[str]
    seen_at: datetime


# What workers ask and say.


def declare(definitions: Sequence[Mapping[str, Any]]) -> Statement[None]:
    return Statement(_TEXT["declare"], {"definitions": json.dumps(list(definitions))}, nothing)


def look(names: Sequence[str]) -> Statement[list[BreakerView]]:
    return Statement(
        _TEXT["look"], {"names": list(names)}, lambda found: [BreakerView._make(row) for row in found]
    )


def ask(name: str) -> Statement[Permission]:
    return Statement(_TEXT["ask"], {"name": name}, lambda found: Permission._make(found[0]))


def report(results: Sequence[Results]) -> Statement[dict[str, str | None]]:
    """Report results; gives the state of each breaker afterwards, None for one that is not there."""
    ordered = sorted(results, key=lambda one: one.name)
    return Statement(
        _TEXT["report"],
        {
            "names": [one.name for one in ordered],
            "generations": [one.generation for one in ordered],
            "successes": [one.successes for one in ordered],
            "failures": [one.failures for one in ordered],
            "probes": [one.probe for one in ordered],
        },
        lambda found: {row[0]: row[1] for row in found},
    )


def keep_probe(name: str, probe: str) -> Statement[bool]:
    return Statement(_TEXT["keep_probe"], {"name": name, "probe": probe}, bool)


def park(job_ids: Sequence[int], tokens: Sequence[str], name: str) -> Statement[dict[int, str]]:
    return Statement(
        _TEXT["park"],
        {"job_ids": list(job_ids), "tokens": list(tokens), "name": name},
        lambda found: {row[0]: row[1] for row in found},
    )


def park_ready(name: str, queue: str, tasks: Sequence[str], max_jobs: int = PARK_JOBS) -> Statement[int]:
    return Statement(
        _TEXT["park_ready"],
        {"name": name, "queue": queue, "tasks": list(tasks), "max_jobs": max_jobs},
        first_value,
    )


def unpark(name: str, max_jobs: int = UNPARK_JOBS) -> Statement[int]:
    return Statement(_TEXT["unpark"], {"name": name, "max_jobs": max_jobs}, first_value)


def call(name: str, queues: Sequence[str]) -> Statement[bool]:
    return Statement(_TEXT["call"], {"name": name, "queues": list(queues)}, first_value)


# What people ask and do.


def list_breakers(cap: int = COUNT_CAP) -> Statement[list[BreakerSummary]]:
    return Statement(
        _TEXT["list_breakers"], {"cap": cap}, lambda found: [BreakerSummary(*row) for row in found]
    )


def open_by_hand(name: str, seconds: float | None) -> Statement[bool]:
    return Statement(_TEXT["open"], {"name": name, "seconds": seconds}, first_value)


def close_by_hand(name: str) -> Statement[bool]:
    return Statement(_TEXT["close"], {"name": name}, first_value)


def change(name: str, settings: Mapping[str, Any]) -> Statement[bool]:
    return Statement(_TEXT["change"], {"name": name, "settings": json.dumps(dict(settings))}, first_value)


def unpin(name: str) -> Statement[bool]:
    return Statement(_TEXT["unpin"], {"name": name}, bool)
