"""`pgqueue limits`: how many jobs may start in a time, and how to change it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli import output
from pgqueue.cli.options import complete_limit, database_options, json_option, open_database

if TYPE_CHECKING:
    from pgqueue.database import Connection
    from pgqueue.sql.limits import LimitSummary

NAME = click.argument("name", metavar="NAME", shell_complete=complete_limit)


@click.group(short_help="See and set rate limits.")
def command() -> None:
    """See how many jobs may start in a time, over all workers, and change it.

    A limit is for a queue (queue:mail), a task (task:send_welcome), a rate key (api:acme), or for
    each rate key with the same beginning (api:*). How many may RUN at a time is another matter:
    pgqueue queues limit.

    \b
    Example:
      pgqueue limits list
      pgqueue limits set task:send_welcome 100/s --burst 10
    """


@command.command("list")
@click.option("--keys", "with_keys", is_flag=True, help="Also each key that a pattern has met.")
@click.option(
    "--limit",
    "max_rows",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    help="At most so many.",
)
@json_option
@database_options
def list_(with_keys: bool, max_rows: int, as_json: bool, dsn: str | None, schema: str) -> None:
    """List the rate limits: what each allows, how many jobs wait for it, when the next may start.

    STARTED counts what it has let pass; a pattern counts for its keys together. FROM says whose it is:
    the code's, an operator's, or the pattern's that made it. Counting who waits stops at 10,000 for
    each; jobs that wait for the limit of their queue are ready and not counted.

    \b
    Example:
      pgqueue limits list
      pgqueue limits list --keys
    """
    from pgqueue import limits

    with open_database(dsn, schema) as connection:
        found = limits.list_limits(connection, with_keys=with_keys, max_rows=max_rows + 1, schema=schema)
    if as_json:
        output.document(found[:max_rows])
        return
    columns = [
        output.Column("name", may_shrink=True),
        output.Column("rate", is_number=True),
        output.Column("burst", is_number=True),
        output.Column("keys", is_number=True),
        output.Column("waiting", is_number=True),
        output.Column("next", is_number=True),
        output.Column("started", is_number=True),
        output.Column("from", may_shrink=True),
    ]
    output.table(columns, [_row(one) for one in found[:max_rows]], empty="no rate limits")
    if len(found) > max_rows:
        output.say("there are more: use a higher --limit")


@command.command("set")
@NAME
@click.argument("rate", metavar="RATE|none")
@click.option("--burst", type=int, metavar="N", help="So many may start at once after a calm.")
@click.option("--force", is_flag=True, help="Also for a task or a queue that nobody knows.")
@database_options
def set_(name: str, rate: str, burst: int | None, force: bool, dsn: str | None, schema: str) -> None:
    """Make or change a rate limit; it is in force with the next claim of any worker.

    RATE is a number of starts and a time: 100/s, 5/min, 1000/h, 10/30s; none lets everything pass.
    Without --burst a tenth of a second's worth, at least one, may start at once. What is set here
    stays, whatever the code of a worker says, until it is removed.

    \b
    Example:
      pgqueue limits set queue:mail 100/s --burst 10
      pgqueue limits set 'api:*' 5/min
    """
    from pgqueue import limits
    from pgqueue.model.limits import checked_name, rate_limit

    if rate == "none" and burst is not None:
        raise click.UsageError("--burst goes with a rate")
    try:
        name = checked_name(name)
        if rate != "none":
            rate_limit(rate, burst)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with open_database(dsn, schema) as connection:
        if not force:
            _refuse_unknown(connection, name, schema)
        limit = limits.set_limit(
            connection, name, None if rate == "none" else rate, burst=burst, schema=schema
        )
    allowed = "everything passes" if rate == "none" else str(limit)
    output.say(f"{output.plain(name)}: {allowed}")


@command.command()
@NAME
@database_options
def remove(name: str, dsn: str | None, schema: str) -> None:
    """Remove a rate limit; what waits for it is ready at once.

    If a worker's code declares it, the next one that starts makes it again; to lift it for longer:
    pgqueue limits set NAME none.

    \b
    Example:
      pgqueue limits remove task:send_welcome
    """
    from pgqueue import limits

    with open_database(dsn, schema) as connection:
        freed = limits.remove_limit(connection, name, schema)
    waited = f"; {output.counted(freed, 'job')} waited for it" if freed else ""
    output.say(f"removed {output.plain(name)}{waited}")


def _refuse_unknown(connection: Connection[Any], name: str, schema: str) -> None:
    """Refuse a misspelt task or queue; of a key or a pattern nobody can know whether jobs will have it."""
    from pgqueue import admin, limits
    from pgqueue.errors import PgqueueError, UnknownQueue, UnknownTask

    kind, colon, subject = name.partition(":")
    if kind not in ("task", "queue") or not colon or name.endswith("*"):
        return
    if name in limits.limit_names(connection, schema):
        return
    error: type[UnknownTask | UnknownQueue]
    if kind == "task":
        known, error = admin.task_names(connection, schema), UnknownTask
    else:
        known, error = admin.known_queues(connection, schema), UnknownQueue
    if subject not in known:
        raise PgqueueError(f"{error(subject, known)} (with --force it is limited all the same)")


def _row(one: LimitSummary) -> list[output.Cell]:
    from pgqueue import limits
    from pgqueue.model.limits import rate_text

    is_lifted = one.tokens_per_second == limits.UNLIMITED.tokens_per_second
    return [
        one.name,
        "none" if is_lifted else rate_text(one.tokens_per_second),
        None if is_lifted else f"{one.burst:,}",
        f"{one.keys:,}" if one.keys else None,
        f"{one.waiting:,}{'+' if one.waiting >= 10_000 else ''}",
        None if one.next_at is None else output.ago(max(one.next_at, one.seen_at), one.seen_at),
        f"{one.taken:,}",
        one.pattern or ("code" if one.is_declared else "operator"),
    ]
