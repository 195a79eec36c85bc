"""`pgqueue queues`: what waits where, and what may start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli import output
from pgqueue.cli.options import (
    AT_EXAMPLE,
    DURATION,
    INSTANT,
    complete_queue,
    database_options,
    json_option,
    open_database,
)

if TYPE_CHECKING:
    from pgqueue.admin import QueueSummary
    from pgqueue.database import Connection
    from pgqueue.limits import Pause

MAX_RUNNING = 2_147_483_647

NAMES = click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_queue)
FORCE = click.option("--force", is_flag=True, help="Also for a queue that nobody knows.")


COLUMNS = (
    output.Column("queue", may_shrink=True),
    *(output.Column(name, is_number=True) for name in ("ready", "scheduled", "blocked", "running", "dead")),
    output.Column("oldest", is_number=True),
    output.Column("workers", is_number=True),
    output.Column("note", may_shrink=True),
)


@click.group(short_help="See what waits where; pause, resume and limit queues.")
def command() -> None:
    """See how much waits in each queue, and for how long; hold queues back.

    \b
    Example:
      pgqueue queues list
      pgqueue queues pause mail --for 30m --reason "provider is down"
      pgqueue queues limit reports 3
    """


@command.command("list")
@json_option
@database_options
def list_(as_json: bool, dsn: str | None, schema: str) -> None:
    """List the queues: jobs by state, how long the oldest ready one has waited, live workers.

    Counting stops at 10,000 jobs of a state, so that this is quick however long a queue is; 10,000+
    means there are more. With --json, `lower_bounds` names the states that were not counted out.
    RUNNING says 2/3 where at most three may run at a time.

    \b
    Example:
      pgqueue queues list
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        queues = admin.list_queues(connection, schema=schema)
    if as_json:
        output.document(queues)
        return
    output.table(COLUMNS, map(row, queues), empty="no queues")


@command.command()
@NAMES
@click.option(
    "--all", "is_all", is_flag=True, help="Every queue that has jobs, settings, a task or a worker."
)
@click.option(
    "--for", "seconds", type=DURATION, metavar="TIME", help="So long: 90, 30m, 2h. Then it is over."
)
@click.option("--until", type=INSTANT, metavar="TIME", help=f"Until this instant: {AT_EXAMPLE}.")
@click.option("--reason", metavar="TEXT", help="Shown with the queue and its jobs.")
@FORCE
@json_option
@database_options
def pause(
    names: Sequence[str],
    is_all: bool,
    seconds: float | None,
    until: datetime | None,
    reason: str | None,
    force: bool,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Pause queues: no worker starts another job of them until they are resumed, or the time is over.

    What runs is not interrupted, and jobs can be enqueued as before. With --all, what is paused already
    keeps its end and its reason; to undo it: pgqueue queues resume --all, with the same --reason.

    \b
    Example:
      pgqueue queues pause mail --for 30m --reason "provider is down"
      pgqueue queues pause --all --reason runaway
    """
    from pgqueue import limits

    chosen = _chosen(names, is_all)
    if seconds is not None and until is not None:
        raise click.UsageError("either --for or --until")
    with open_database(dsn, schema) as connection:
        _refuse_unknown(connection, names, "paused", force, schema)
        paused = limits.pause_queues(
            connection, chosen, seconds=seconds, until=until, reason=reason, schema=schema
        )
        others = limits.list_pauses(connection, schema) if is_all else []
    _tell("paused", paused, as_json, others)


@command.command()
@NAMES
@click.option("--all", "is_all", is_flag=True, help="Every queue that is paused.")
@click.option(
    "--slots",
    type=click.IntRange(0, MAX_RUNNING),
    metavar="N",
    help="And let at most N of its jobs run at a time; raise it with: pgqueue queues limit. With --all, "
    "a queue that has a limit keeps it.",
)
@click.option(
    "--reason", metavar="TEXT", help="With --all: only those that were paused for this reason; '': for none."
)
@click.option(
    "--force", is_flag=True, help="Also a queue that nobody knows; with --all, whatever the reasons."
)
@json_option
@database_options
def resume(
    names: Sequence[str],
    is_all: bool,
    slots: int | None,
    reason: str | None,
    force: bool,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Resume paused queues; idle workers start their jobs at once.

    Where not all are paused for the same reason, --all wants to know for which: so nobody ends a pause
    of somebody else by accident.

    \b
    Example:
      pgqueue queues resume mail
      pgqueue queues resume --all --reason runaway --slots 1
    """
    from pgqueue import limits

    chosen = _chosen(names, is_all)
    if reason is not None and not is_all:
        raise click.UsageError("--reason goes with --all")
    with open_database(dsn, schema) as connection:
        _refuse_unknown(connection, names, "resumed", force, schema)
        if is_all and reason is None and not force:
            reason = _only_reason(limits.list_pauses(connection, schema))
        resumed = limits.resume_queues(connection, chosen, max_running=slots, reason=reason, schema=schema)
        others = limits.list_pauses(connection, schema) if is_all else []
    _tell("resumed", resumed, as_json, others)


@command.command()
@click.argument("name", metavar="NAME", shell_complete=complete_queue)
@click.argument("ceiling", metavar="N|none")
@click.option("--reason", metavar="TEXT", help="Shown with the queue and its jobs.")
@FORCE
@database_options
def limit(name: str, ceiling: str, reason: str | None, force: bool, dsn: str | None, schema: str) -> None:
    """Let at most N jobs of a queue run at a time, over all workers. 0: none is started.

    In force at once and exact. What runs beyond it is not interrupted.

    \b
    Example:
      pgqueue queues limit reports 3
      pgqueue queues limit reports none
    """
    from pgqueue import limits

    max_running = _ceiling(ceiling)
    with open_database(dsn, schema) as connection:
        _refuse_unknown(connection, [name], "limited", force, schema)
        limits.limit_queue(connection, name, max_running, reason=reason, schema=schema)
    shown = output.plain(name)
    if max_running is None:
        output.say(f"{shown} has no limit")
    else:
        output.say(f"{shown}: at most {output.counted(max_running, 'job')} at a time")


def _chosen(names: Sequence[str], is_all: bool) -> Sequence[str] | None:
    if bool(names) == is_all:
        raise click.UsageError("which queues? give their names, or --all")
    return None if is_all else names


def _refuse_unknown(
    connection: Connection[Any], names: Sequence[str], done: str, force: bool, schema: str
) -> None:
    """Refuse a misspelt name: a row of its own would look like success, and hold nothing back."""
    from pgqueue import admin
    from pgqueue.errors import PgqueueError, UnknownQueue
    from pgqueue.model.options import check_option

    for name in names:
        try:
            check_option("queue", name)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    if force or not names:
        return
    known = admin.known_queues(connection, schema)
    for name in names:
        if name not in known:
            raise PgqueueError(f"{UnknownQueue(name, known)} (with --force it is {done} all the same)")


def _ceiling(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal() or int(text) > MAX_RUNNING:
        raise click.BadParameter(f"{text!r} is not a number of jobs, or none", param_hint="N|none")
    return int(text)


def _only_reason(pauses: Sequence[Pause]) -> str:
    """Give the reason that all pauses have, "" if that is none."""
    from pgqueue.errors import PgqueueError

    queues: dict[str, list[str]] = {}
    for pause in pauses:
        queues.setdefault(pause.reason or "", []).append(pause.queue)
    if len(queues) > 1:
        told = ", ".join(
            names[0]
            + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
            + f" ({output.headline(reason) or 'no reason given'})"
            for reason, names in list(queues.items())[:5]
        )
        more = ", …" if len(queues) > 5 else ""
        raise PgqueueError(
            f"not all are paused for the same reason: {told}{more}; "
            "say which with --reason, or all with --force"
        )
    return next(iter(queues), "")


def _tell(what: str, queues: Collection[str], as_json: bool, others: Sequence[Pause] = ()) -> None:
    """Say which queues it was, and which of the others stay paused."""
    if as_json:
        output.document({"queues": queues})
        return
    for queue in queues:
        output.say(f"{what} {output.plain(queue)}")
    if not queues:
        output.say("no queues")
    for pause in others:
        if pause.queue not in queues:
            left = f" for another {output.elapsed(pause.seen_at, pause.until)}" if pause.until else ""
            reason = f": {output.headline(pause.reason)}" if pause.reason else ""
            output.say(output.plain(f"{pause.queue} stays paused{left}{reason}"))


def row(queue: QueueSummary) -> list[output.Cell]:
    """Give the cells of COLUMNS."""
    counts = {
        "ready": queue.ready,
        "scheduled": queue.scheduled,
        "blocked": queue.blocked,
        "running": queue.running,
        "dead": queue.dead,
    }
    shown = {state: f"{jobs:,}{'+' if state in queue.lower_bounds else ''}" for state, jobs in counts.items()}
    if queue.max_running is not None:
        shown["running"] += f"/{queue.max_running:,}"
    oldest = queue.oldest_ready_seconds
    return [
        queue.queue,
        *shown.values(),
        None if oldest is None else output.duration(oldest),
        queue.workers,
        _note(queue),
    ]


def _note(queue: QueueSummary) -> str:
    is_waiting = queue.ready + queue.scheduled + queue.blocked > 0
    if queue.is_paused:
        until = queue.paused_until
        note = "paused" + (f" for another {output.elapsed(queue.seen_at, until)}" if until else "")
    else:
        note = "no worker" if is_waiting and not queue.workers else ""
    has_reason = queue.reason is not None and (queue.is_paused or queue.max_running is not None)
    return ": ".join(filter(None, [note, output.headline(queue.reason or "") if has_reason else ""]))
