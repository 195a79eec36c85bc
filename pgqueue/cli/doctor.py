"""`pgqueue doctor`: what is wrong, and what to do about it."""

from __future__ import annotations

import click

from pgqueue.cli import output
from pgqueue.cli.options import DURATION, database_options, json_option, open_database

WARNING = 1
CRITICAL = 3


@click.command(short_help="Find what is wrong with the server, the schema, the workers.")
@click.option(
    "--transactions-older-than",
    "snapshot_seconds",
    type=DURATION,
    default="5m",
    show_default=True,
    metavar="TIME",
    help="Name sessions whose transaction has been open for longer.",
)
@json_option
@database_options
def command(snapshot_seconds: float, as_json: bool, dsn: str | None, schema: str) -> None:
    """Examine everything the queue depends on; say what is wrong and which command comes next.

    Settings of the server and the role, the schema with its functions, triggers, indexes and
    partitions, autovacuum and bloat, open transactions and locks, connections, clocks, the driver;
    and the work: queues without workers, expired leases, late schedules, forgotten pauses. It changes
    nothing, and prints nothing when all is well.

    \b
    Exit codes: 0 all is well, 1 warnings, or not everything could be examined, 3 something critical,
    or nothing can work here.

    \b
    Example:
      pgqueue doctor
      pgqueue doctor --transactions-older-than 30s --json
    """
    from pgqueue import diagnosis

    thresholds = diagnosis.Thresholds(snapshot_seconds=snapshot_seconds)
    with open_database(dsn, schema) as connection:
        found = diagnosis.examine(connection, thresholds, schema)
    if as_json:
        output.document(found)
    else:
        for number, finding in enumerate(found.findings):
            click.echo(("\n" if number else "") + output.plain(f"{finding.severity}: {finding.sentence}"))
            output.commands(finding.next)
        for line in found.unanswered:
            output.say(output.plain(f"not examined: {line}"))
        if not found.findings:
            made = f"{found.checks}" if found.is_complete else f"{found.examined} of {found.checks}"
            output.say(f"nothing found ({made} checks)")
    if found.findings or not found.is_complete:
        click.get_current_context().exit(CRITICAL if found.is_critical else WARNING)
