"""`pgqueue breakers`: what is called and what is not, and the switch of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli import output
from pgqueue.cli.options import DURATION, complete_breaker, database_options, json_option, open_database
from pgqueue.shell import write_command

if TYPE_CHECKING:
    from pgqueue.admin import BreakerSummary


class _ListByDefault(click.Group):
    """A group that lists when no command is named: `pgqueue breakers --json`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_for_us = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_for_us else ["list", *args])


@click.group(cls=_ListByDefault, short_help="See, open and close circuit breakers.")
def command() -> None:
    """See circuit breakers, open and close them by hand, change when they open.

    While a breaker is open, jobs of the tasks that name it wait; that uses up none of their attempts.
    Without a command, this is `pgqueue breakers list`.

    \b
    Example:
      pgqueue breakers
      pgqueue breakers open payments-api --for 15m
      pgqueue breakers close payments-api
    """


@command.command("list")
@json_option
@database_options
def list_(as_json: bool, dsn: str | None, schema: str) -> None:
    """List the breakers: state, failed calls of the last one to two windows, when a probe may go.

    OPENS counts how often it has opened since it last closed, PARKED the jobs that wait for it; counting
    stops at 10,000. With --json also the settings, and which of them were set by hand (`pinned`).

    \b
    Example:
      pgqueue breakers list
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        found = admin.list_breakers(connection, schema)
    if as_json:
        output.document(found)
        return
    columns = [
        output.Column("breaker", may_shrink=True),
        output.Column("state"),
        output.Column("since", is_number=True),
        output.Column("failed", is_number=True),
        output.Column("probe", is_number=True),
        output.Column("opens", is_number=True),
        output.Column("generation", is_number=True),
        output.Column("parked", is_number=True),
        output.Column("tasks", may_shrink=True),
    ]
    output.table(
        columns, [_row(one) for one in found], empty="no breakers: no task that a worker knows names one"
    )


@command.command("open")
@click.argument("name", shell_complete=complete_breaker)
@click.option(
    "--for", "seconds", type=DURATION, metavar="TIME", help="So long: 90, 15m, 2h. Then a probe may close it."
)
@database_options
def open_(name: str, seconds: float | None, dsn: str | None, schema: str) -> None:
    """Open a breaker by hand: its jobs wait until you close it or, with --for, until a probe succeeds.

    What runs is not interrupted.

    \b
    Example:
      pgqueue breakers open payments-api
      pgqueue breakers open payments-api --for 15m
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        admin.open_breaker(connection, name, seconds, schema)
    close_it = write_command("breakers close", name, schema=schema)
    until = f"for {output.duration(seconds)}" if seconds is not None else f"until: {close_it}"
    output.say(f"{output.plain(name)} is open {until}")


@command.command()
@click.argument("name", shell_complete=complete_breaker)
@database_options
def close(name: str, dsn: str | None, schema: str) -> None:
    """Close a breaker by hand, and forget what it counted. Workers take its jobs up within a second.

    If what it protects is still down, it opens again.

    \b
    Example:
      pgqueue breakers close payments-api
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        admin.close_breaker(connection, name, schema)
    output.say(f"{output.plain(name)} is closed")


@command.command("set")
@click.argument("name", shell_complete=complete_breaker)
@click.option(
    "--failure-ratio", type=float, metavar="X", help="Open when so much failed: 0.5 is half of the calls."
)
@click.option("--min-calls", type=int, metavar="N", help="And there were so many calls.")
@click.option("--max-failures", type=int, metavar="N", help="Instead: open when so many failed.")
@click.option("--window-seconds", type=DURATION, metavar="TIME", help="Count over one to two of these.")
@click.option(
    "--open-seconds", type=DURATION, metavar="TIME", help="Stay open so long, then twice as long, …"
)
@click.option("--max-open-seconds", type=DURATION, metavar="TIME", help="… at most so long.")
@click.option(
    "--probe-seconds", type=DURATION, metavar="TIME", help="Give up a probe whose worker is silent so long."
)
@click.option(
    "--from-code", is_flag=True, help="Leave all settings to the code of workers that start from now on."
)
@database_options
def set_(name: str, from_code: bool, dsn: str | None, schema: str, **settings: Any) -> None:
    """Change when a breaker opens and for how long, and print all its settings.

    What is set here stays, whatever the code of a worker says, until --from-code.

    \b
    Example:
      pgqueue breakers set payments-api --failure-ratio 0.8 --open-seconds 2m
      pgqueue breakers set payments-api --max-failures 5
    """
    from dataclasses import fields

    from pgqueue import admin
    from pgqueue.model.breaker import BreakerSettings

    said = {setting: value for setting, value in settings.items() if value is not None}
    if from_code == bool(said):
        raise click.UsageError("give settings, or --from-code")
    with open_database(dsn, schema) as connection:
        if from_code:
            admin.unpin_breaker(connection, name, schema)
        else:
            admin.set_breaker(connection, name, said, schema)
        (found,) = (one for one in admin.list_breakers(connection, schema) if one.name == name)
    output.fields(
        (one.name, _setting(getattr(found, one.name), by_hand=one.name in found.pinned))
        for one in fields(BreakerSettings)
    )


def _row(one: BreakerSummary) -> Sequence[output.Cell]:
    now = one.seen_at
    return [
        one.name,
        one.state.replace("_", "-"),
        None if one.opened_at is None else output.ago(one.opened_at, now),
        f"{one.failures:,}/{one.calls:,}" if one.calls else None,
        _probe(one),
        one.opens,
        one.generation,
        f"{one.parked:,}{'+' if one.parked >= 10_000 else ''}",
        ", ".join(one.tasks),
    ]


def _probe(one: BreakerSummary) -> str | None:
    if one.state == "closed":
        return None
    if one.state == "half_open":
        return "runs"
    if one.retry_at is None:
        return "by hand"
    return output.ago(one.retry_at, one.seen_at) if one.retry_at > one.seen_at else "due"


def _setting(value: float | None, *, by_hand: bool) -> str | None:
    return None if value is None else f"{value:.15g}{' (set by hand)' if by_hand else ''}"
