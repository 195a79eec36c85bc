"""`pgqueue schedules`: what runs by the clock, when next, and how to change it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, cast

import click

from pgqueue.cli import output
from pgqueue.cli.enqueue import application_of, known_task_options, read_args
from pgqueue.cli.options import (
    complete_queue,
    complete_schedule,
    complete_task,
    database_options,
    json_option,
    open_database,
)

if TYPE_CHECKING:
    from pgqueue.model.schedule import CatchUp, Cron
    from pgqueue.sql.schedules import ScheduleSummary

NAMES = click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_schedule)


@click.group(short_help="What runs by the clock: list, pause, run now, add.")
def command() -> None:
    """Look at what runs by the clock, and change it.

    Schedules come from an application's code (@app.schedule), or are added here.

    \b
    Example:
      pgqueue schedules list
      pgqueue schedules next 5 nightly_report
    """


@command.command("list")
@json_option
@database_options
def list_(as_json: bool, dsn: str | None, schema: str) -> None:
    """List the schedules: when each is due next, and how its ticks went.

    FIRED counts the ticks that became a job, SKIPPED those that nobody was there for and that were
    not made up for; together they are all that came due. FROM is the application whose code has
    it, or `run time`.

    \b
    Example:
      pgqueue schedules list
    """
    from pgqueue import schedules

    with open_database(dsn, schema) as connection:
        entries = schedules.list_schedules(connection, schema=schema)
    if as_json:
        output.document(entries)
        return
    columns = [
        output.Column("name", may_shrink=True),
        output.Column("cron"),
        output.Column("timezone"),
        output.Column("task", may_shrink=True),
        output.Column("next", is_number=True),
        output.Column("last", is_number=True),
        output.Column("fired", is_number=True),
        output.Column("skipped", is_number=True),
        output.Column("from", may_shrink=True),
        output.Column("note"),
    ]
    output.table(columns, [_row(entry) for entry in entries], empty="no schedules")


@command.command("next")
@click.argument("count", metavar="N", type=click.IntRange(1, 100), default=5)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_schedule)
@click.option("--cron", metavar="CRON", help="Of this expression, instead of a schedule.")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="The time zone of --cron.")
@json_option
@database_options
def next_(
    count: int,
    names: Sequence[str],
    cron: str | None,
    timezone: str,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> int:
    """Show the next N ticks, 5 if not said: of these schedules, or of all that are not paused.

    LOCAL is the time that the clocks of the schedule's time zone show. A note says where they have
    been changed since the tick before. Schedules that cannot be read are named and left out.

    \b
    Example:
      pgqueue schedules next 10
      pgqueue schedules next 3 --cron "30 2 * * sun" --timezone Europe/Berlin
    """
    from pgqueue import schedules
    from pgqueue.errors import ConfigurationError
    from pgqueue.model.schedule import Cron

    if cron is not None and names:
        raise click.UsageError("either --cron or the names of schedules")
    asked = None if cron is None else Cron(cron, timezone)
    with open_database(dsn, schema) as connection:
        now = schedules.database_now(connection, schema)
        if asked is not None:
            crons = [(asked.text, asked)]
        else:
            entries = schedules.list_schedules(connection, names or None, schema)
            chosen = [entry for entry in entries if names or (entry.is_declared and not entry.is_paused)]
            crons = list(_readable(chosen))
            if chosen and not crons:
                return ConfigurationError.exit_code
            for entry in entries if names else []:
                if entry.is_paused:
                    output.say(f"{output.plain(entry.name)} is paused: these ticks would not fire")
    ticks = islice(heapq.merge(*(_ticks(name, each, now) for name, each in crons)), count)
    if as_json:
        output.document(
            [
                {"schedule": name, "tick": tick, "local": local.isoformat(), "timezone": zone, "note": note}
                for tick, name, local, zone, note in ticks
            ]
        )
        return 0
    columns = [
        output.Column("schedule" if cron is None else "cron", may_shrink=True),
        output.Column("local"),
        output.Column("utc"),
        output.Column("when", is_number=True),
        output.Column("note"),
    ]
    rows = [
        (
            name,
            f"{local:%a %Y-%m-%d %H:%M:%S %Z}",
            f"{tick:%Y-%m-%d %H:%M:%S}",
            output.ago(tick, now),
            note,
        )
        for tick, name, local, _, note in ticks
    ]
    output.table(columns, rows, empty="no schedules that are not paused")
    return 0


@command.command()
@NAMES
@database_options
def pause(names: Sequence[str], dsn: str | None, schema: str) -> None:
    """Pause schedules, of code or not: they fire no more until they are resumed.

    Jobs that are there already are not touched. A deployment does not end a pause.

    \b
    Example:
      pgqueue schedules pause nightly_report
    """
    from pgqueue import schedules

    with open_database(dsn, schema) as connection:
        schedules.pause(connection, names, schema)
    for name in names:
        output.say(f"paused {output.plain(name)}")


@command.command()
@NAMES
@database_options
def resume(names: Sequence[str], dsn: str | None, schema: str) -> None:
    """Resume paused schedules from now on; what fell into the pause is not made up for.

    \b
    Example:
      pgqueue schedules resume nightly_report
    """
    from pgqueue import schedules

    with open_database(dsn, schema) as connection:
        now = schedules.database_now(connection, schema)
        resumed = schedules.resume(connection, names, schema)
    for name, next_tick in resumed:
        output.say(
            f"resumed {output.plain(name)}; next at {output.instant(next_tick, now) or 'once a worker looks'}"
        )


@command.command("run-now")
@click.argument("name", metavar="NAME", shell_complete=complete_schedule)
@json_option
@database_options
def run_now(name: str, as_json: bool, dsn: str | None, schema: str) -> None:
    """Add the job of a schedule at once, paused or not, and print its id; its ticks go on as before.

    If its task has a unique key and such a job is live, that one's id is printed.

    \b
    Example:
      pgqueue jobs show $(pgqueue schedules run-now nightly_report)
    """
    from pgqueue import schedules

    with open_database(dsn, schema) as connection:
        job_id = schedules.run_now(connection, name, schema)
    if as_json:
        output.document({"job_id": job_id})
    else:
        click.echo(job_id)


@command.command()
@click.argument("name", metavar="NAME")
@click.argument("cron", metavar="CRON")
@click.argument("task", metavar="TASK", shell_complete=complete_task)
@click.argument("args", metavar="[JSON|-]", required=False)
@click.option(
    "--timezone", default="UTC", show_default=True, metavar="ZONE", help="An IANA name: Europe/Berlin."
)
@click.option(
    "--catch-up",
    type=click.Choice(["latest", "all", "skip"]),
    default="latest",
    show_default=True,
    help="Of the ticks that no worker was there for, fire the last one, all, or none.",
)
@click.option("--catch-up-limit", type=int, default=100, show_default=True, help="At most so many of all.")
@click.option("--queue", "-q", shell_complete=complete_queue, metavar="NAME", help="Instead of the task's.")
@click.option("--priority", type=int, metavar="N", help="Instead of the task's; 0 goes first.")
@click.option("--replace", is_flag=True, help="Change the schedule of this name, if it was added here.")
@known_task_options
@json_option
@database_options
def add(
    name: str,
    cron: str,
    task: str,
    args: str | None,
    timezone: str,
    catch_up: str,
    catch_up_limit: int,
    queue: str | None,
    priority: int | None,
    replace: bool,
    app: str | None,
    force: bool,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Add a schedule beside those of the code; workers notice it within eleven seconds.

    CRON has five fields, minute hour day month weekday, or six with the second first; or is @hourly,
    @daily, @weekly, @monthly or @yearly. JSON is an object with the task's arguments.

    \b
    Example:
      pgqueue schedules add acme_report "0 8 * * mon-fri" make_report '{"account": "acme"}' \\
          --timezone Europe/Berlin
    """
    from pgqueue import schedules

    given = read_args(task, args)
    application = application_of(app)
    definition = None if application is None else application.registry.get(task)
    with open_database(dsn, schema) as connection:
        now = schedules.database_now(connection, schema)
        next_tick = schedules.add(
            connection,
            name,
            cron,
            definition or task,
            given,
            timezone=timezone,
            queue=queue,
            priority=priority,
            catch_up=cast("CatchUp", catch_up),
            catch_up_limit=catch_up_limit,
            replace=replace,
            must_be_known=not force,
            schema=schema,
        )
    if as_json:
        output.document({"name": name, "next_tick": next_tick})
    else:
        output.say(f"added {output.plain(name)}; next at {output.instant(next_tick, now)}")


@command.command()
@NAMES
@database_options
def remove(names: Sequence[str], dsn: str | None, schema: str) -> None:
    """Remove schedules that were added here, or whose code is gone; all of these or none.

    Jobs that are there already are not touched. One of the code can only be paused.

    \b
    Example:
      pgqueue schedules remove acme_report
    """
    from pgqueue import schedules

    with open_database(dsn, schema) as connection:
        schedules.remove(connection, names, schema)
    for name in names:
        output.say(f"removed {output.plain(name)}")


def _row(entry: ScheduleSummary) -> list[output.Cell]:
    is_off = entry.is_paused or not entry.is_declared
    return [
        entry.name,
        entry.cron,
        entry.timezone,
        entry.task,
        None if is_off or entry.next_tick is None else output.ago(entry.next_tick, entry.now),
        None if entry.last_tick is None else output.ago(entry.last_tick, entry.now),
        f"{entry.fired:,}",
        f"{entry.skipped:,}",
        entry.app or "run time",
        "; ".join(_notes(entry)),
    ]


def _notes(entry: ScheduleSummary) -> Iterator[str]:
    from pgqueue.errors import ConfigurationError
    from pgqueue.model.schedule import GRACE, Cron

    if entry.is_paused:
        yield "paused"
    if not entry.is_declared and entry.seen_at is not None:
        yield f"no worker has it in its code since {output.elapsed(entry.seen_at, entry.now)}"
        return
    if not entry.is_task_known:
        yield f"no worker knows task {entry.task!r}"
    try:
        Cron(entry.cron, entry.timezone)
    except ConfigurationError as error:
        yield str(error)
    else:
        if not entry.is_paused and entry.next_tick and entry.now - entry.next_tick > GRACE:
            yield "due, and no worker fires it"


def _readable(entries: Iterable[ScheduleSummary]) -> Iterator[tuple[str, Cron]]:
    """Give the expressions of these schedules, and say of which one cannot be read."""
    from pgqueue.errors import ConfigurationError
    from pgqueue.model.schedule import Cron, has_cron

    for entry in entries:
        try:
            cron = Cron(entry.cron, entry.timezone)
        except ConfigurationError as error:
            if not has_cron():  # it is not the schedule's fault
                raise
            output.say(f"{output.plain(entry.name)} never fires: {error}")
        else:
            yield entry.name, cron


Tick = tuple[datetime, str, datetime, str, str]


def _ticks(name: str, cron: Cron, now: datetime) -> Iterator[Tick]:
    offset = cron.local(now).utcoffset() or timedelta(0)
    for tick in cron.after(now):
        local = cron.local(tick)
        before, offset = offset, local.utcoffset() or timedelta(0)
        yield tick, name, local, cron.timezone, _clock_change(offset - before)


def _clock_change(by: timedelta) -> str:
    if not by:
        return ""
    direction = "forward" if by > timedelta(0) else "back"
    return f"clocks went {direction} {output.duration(by.total_seconds())}"
