"""Schedules made and changed at run time, beside those that an application's code declares.

On a plain psycopg connection of the caller's, and in its transaction: a schedule exists if, and
only if, that commits. Workers notice within seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from pgqueue.database import Connection, run
from pgqueue.errors import ConfigurationError, ScheduleConflict, UnknownSchedule, UnknownTask
from pgqueue.model import schedule
from pgqueue.model.encoding import several
from pgqueue.model.schedule import DEFAULT_CATCH_UP_LIMIT, CatchUp, Cron
from pgqueue.model.task import TaskDefinition
from pgqueue.shell import write_command
from pgqueue.sql import inspect
from pgqueue.sql import schedules as statements
from pgqueue.sql.schedules import ScheduleSummary

__all__ = [
    "ScheduleSummary",
    "add",
    "database_now",
    "list_schedules",
    "pause",
    "remove",
    "resume",
    "run_now",
    "schedule_names",
]


class DeclaredTask(Protocol):
    """A task whose code is at hand, such as `@app.task` makes it."""

    @property
    def definition(self) -> TaskDefinition: ...


def add(
    conn: Connection[Any],
    name: str,
    cron: str,
    task: DeclaredTask | TaskDefinition | str,
    args: Mapping[str, Any] | None = None,
    *,
    timezone: str = "UTC",
    queue: str | None = None,
    priority: int | None = None,
    catch_up: CatchUp = "latest",
    catch_up_limit: int = DEFAULT_CATCH_UP_LIMIT,
    replace: bool = False,
    must_be_known: bool = True,
    schema: str = "pgqueue",
) -> datetime:
    """Add a schedule and give its next tick; the keywords are those of `@app.schedule`.

    A task given by name is one that a worker has registered, unless it need not be known. With
    `replace` one of this name is changed if it was made at run time: its counters and whether it is
    paused stay, and so does its next tick if the expression does.

    Raises:
        ConfigurationError: a value makes no sense, or the task could not take these arguments.
        UnknownTask: no worker has registered it.
        ScheduleConflict: the name is taken.
    """
    if isinstance(task, str):
        now, is_known, args_schema = run(conn, statements.describe_task(task), schema)
        if must_be_known and not is_known:
            known = run(conn, inspect.task_names(), schema)
            raise UnknownTask(task, known)
        make_job, task_name = schedule.far_job_maker(task, args_schema), task
    else:
        definition = task if isinstance(task, TaskDefinition) else task.definition
        make_job, task_name = schedule.job_maker(definition), definition.name
        now, _, _ = run(conn, statements.describe_task(task_name), schema)
    entry = schedule.define(
        cron,
        task_name,
        make_job,
        name=name,
        timezone=timezone,
        args=args,
        queue=queue,
        priority=priority,
        catch_up=catch_up,
        catch_up_limit=catch_up_limit,
    )
    first = Cron(cron, timezone).next_after(now)
    next_tick = run(conn, statements.put(entry, first, may_replace=replace), schema)
    if next_tick is None:
        raise _taken(conn, name, schema)
    return next_tick


def list_schedules(
    conn: Connection[Any], names: Sequence[str] | None = None, schema: str = "pgqueue"
) -> list[ScheduleSummary]:
    """List the schedules by name, or those of these names in their order.

    Raises:
        UnknownSchedule: there is none of one of these names.
    """
    if names is None:
        return run(conn, statements.list_schedules(), schema)
    names = several("names", names)
    found = {entry.name: entry for entry in run(conn, statements.list_schedules(names), schema)}
    for name in names:
        if name not in found:
            raise UnknownSchedule(name, schedule_names(conn, schema))
    return [found[name] for name in names]


def schedule_names(conn: Connection[Any], schema: str = "pgqueue") -> list[str]:
    """Name all schedules."""
    return run(conn, statements.schedule_names(), schema)


def database_now(conn: Connection[Any], schema: str = "pgqueue") -> datetime:
    """Give the time of the clock that all ticks go by."""
    return run(conn, statements.describe_task(""), schema)[0]


def remove(conn: Connection[Any], names: Sequence[str], schema: str = "pgqueue") -> None:
    """Remove schedules made at run time, or whose code is gone; all of these or none.

    Raises:
        UnknownSchedule: there is none of one of these names.
        ScheduleConflict: the code of a live worker declares one of them.
    """
    names = several("names", names)
    for entry in list_schedules(conn, names, schema):
        if entry.source == "code" and entry.is_declared:
            raise ScheduleConflict(
                entry.name,
                f"is declared in the code of {entry.app} and would come back; take it out there, "
                f"or pause it: {write_command('schedules pause', entry.name, schema=schema)}",
            )
    run(conn, statements.remove(names), schema)


def pause(conn: Connection[Any], names: Sequence[str], schema: str = "pgqueue") -> None:
    """Let schedules fire no more until they are resumed; all of these or none.

    Raises:
        UnknownSchedule: there is none of one of these names.
    """
    names = several("names", names)
    list_schedules(conn, names, schema)
    run(conn, statements.pause(names), schema)


def resume(
    conn: Connection[Any], names: Sequence[str], schema: str = "pgqueue"
) -> list[tuple[str, datetime | None]]:
    """Let paused schedules go on from now: what fell into the pause is neither made up for nor counted.

    Gives the next tick of each.

    Raises:
        UnknownSchedule: there is none of one of these names.
        ConfigurationError: one cannot be read; none was resumed.
    """
    resumed: list[tuple[str, datetime | None]] = []
    statement_of = {}
    for entry in list_schedules(conn, names, schema):
        next_tick = entry.next_tick
        if entry.is_paused:
            next_tick = _cron_of(entry).next_after(entry.now)
            statement_of[entry.name] = statements.resume(entry.name, entry.cron, entry.timezone, next_tick)
        resumed.append((entry.name, next_tick))
    for statement in statement_of.values():
        run(conn, statement, schema)
    return resumed


def run_now(conn: Connection[Any], name: str, schema: str = "pgqueue") -> int:
    """Add the job of a schedule at once, paused or not, and give its id; its ticks and counters stay.

    Raises:
        UnknownSchedule: there is no schedule of this name.
    """
    job_id = run(conn, statements.run_now(name), schema)
    if job_id is None:
        raise UnknownSchedule(name, schedule_names(conn, schema))
    return job_id


def _cron_of(entry: ScheduleSummary) -> Cron:
    try:
        return Cron(entry.cron, entry.timezone)
    except ConfigurationError as error:
        raise ConfigurationError(f"schedule {entry.name!r}: {error}") from None


def _taken(conn: Connection[Any], name: str, schema: str) -> ScheduleConflict:
    for entry in run(conn, statements.list_schedules([name]), schema):
        if entry.source == "code":
            return ScheduleConflict(name, f"is declared in the code of {entry.app}; choose another name")
    return ScheduleConflict(name, "is there already; replace it, or choose another name")
