"""Schedules as statements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from pgqueue.model.schedule import ScheduleDefinition
from pgqueue.sql import Row, Statement, column, first_value, load
from pgqueue.sql.inspect import JsonText

_SQL = load("schedules")


class DueSchedule(NamedTuple):
    """An entry that is due, or is new and has no next_tick yet."""

    name: str
    cron: str
    timezone: str
    catch_up: str
    catch_up_limit: int
    next_tick: datetime | None


class Look(NamedTuple):
    """What a look at the schedules found; `next_in_seconds` is when the next one comes due, if any does."""

    now: datetime
    has_schedules: bool
    next_in_seconds: float | None
    due: list[DueSchedule]


@dataclass(frozen=True, slots=True)
class ScheduleSummary:
    """A schedule as the database keeps it; `queue` and `priority` None are those of the task.

    Not `is_declared`: no live worker's code has it any more, and it does not fire.
    """

    name: str
    cron: str
    timezone: str
    task: str
    args: JsonText
    queue: str | None
    priority: int | None
    catch_up: str
    catch_up_limit: int
    next_tick: datetime | None
    last_tick: datetime | None
    fired: int
    skipped: int
    is_paused: bool
    source: str
    app: str | None
    seen_at: datetime | None
    is_declared: bool
    is_task_known: bool
    now: datetime


def register(
    entries: Sequence[Mapping[str, Any]], app: str, *, is_start: bool
) -> Statement[list[tuple[str, str]]]:
    """Write down what an application's code declares; gives name and outcome of each."""
    return Statement(
        _SQL["register"],
        {"entries": json.dumps(list(entries)), "app": app, "is_start": is_start},
        lambda rows: [(row[0], row[1]) for row in rows],
    )


def look(except_names: Sequence[str] = (), max_entries: int = 100) -> Statement[Look]:
    params = {"except_names": list(except_names), "max_entries": max_entries}
    return Statement(_SQL["look"], params, _look)


def fire(entry: DueSchedule, ticks: Sequence[datetime], skipped: int, next_tick: datetime) -> Statement[str]:
    """Fire these ticks of an entry, if it still is as it was found."""
    params = {
        "name": entry.name,
        "cron": entry.cron,
        "timezone": entry.timezone,
        "expected": entry.next_tick,
        "ticks": list(ticks),
        "skipped": skipped,
        "next_tick": next_tick,
    }
    return Statement(_SQL["fire"], params, first_value)


def prune(keep_seconds: float, max_rows: int) -> Statement[int]:
    return Statement(_SQL["prune"], {"keep_seconds": keep_seconds, "max_rows": max_rows}, first_value)


def list_schedules(names: Sequence[str] | None = None) -> Statement[list[ScheduleSummary]]:
    params = {"names": None if names is None else list(names)}
    return Statement(_SQL["list"], params, lambda rows: [_summary(row) for row in rows])


def schedule_names() -> Statement[list[str]]:
    return Statement(_SQL["names"], {}, column)


def describe_task(task: str) -> Statement[tuple[datetime, bool, Mapping[str, Any] | None]]:
    """Give the database's now, whether the task is registered, and the schema of its arguments."""
    return Statement(_SQL["describe_task"], {"task": task}, lambda rows: (rows[0][0], rows[0][1], rows[0][2]))


def put(
    definition: ScheduleDefinition, next_tick: datetime, *, may_replace: bool
) -> Statement[datetime | None]:
    """Add an entry, or change it; gives its next tick, or None if the name is taken."""
    params = {**definition.registration(), "next_tick": next_tick, "may_replace": may_replace}
    return Statement(_SQL["put"], params, first_value)


def remove(names: Sequence[str]) -> Statement[list[str]]:
    return Statement(_SQL["remove"], {"names": list(names)}, column)


def pause(names: Sequence[str]) -> Statement[list[str]]:
    return Statement(_SQL["pause"], {"names": list(names)}, column)


def resume(name: str, cron: str, timezone: str, next_tick: datetime) -> Statement[str | None]:
    params = {"name": name, "cron": cron, "timezone": timezone, "next_tick": next_tick}
    return Statement(_SQL["resume"], params, first_value)


def run_now(name: str) -> Statement[int | None]:
    """Add the job of an entry; gives its id, or None if there is no such entry."""
    return Statement(_SQL["run_now"], {"name": name}, first_value)


def _look(rows: Sequence[Row]) -> Look:
    now, has_schedules, next_in_seconds = rows[0][:3]
    due = [DueSchedule(*row[3:]) for row in rows if row[3] is not None]
    return Look(now, has_schedules, next_in_seconds, due)


def _summary(row: Row) -> ScheduleSummary:
    return ScheduleSummary(*[*row[:4], JsonText(row[4]), *row[5:]])
