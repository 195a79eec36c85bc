"""`pgqueue migrate`: make the schema, bring it up to date, or say whether it is."""

from __future__ import annotations

import os

import click

from pgqueue.cli import output
from pgqueue.cli.options import database_options

UNREADY = 3


@click.command(short_help="Make the schema or bring it up to date.")
@click.option(
    "--check", "only_check", is_flag=True, help="Change nothing; exit 3 if there is something to do."
)
@click.option(
    "--sql", "as_sql", is_flag=True, help="Print the script that would do it, for somebody else to run."
)
@click.option("--since", metavar="REVISION", help="With --sql: for a schema at that revision, not for none.")
@database_options
def command(only_check: bool, as_sql: bool, since: str | None, dsn: str | None, schema: str) -> int:
    """Make the schema or bring it up to date: tables by revision, functions by their text.

    What is applied is printed, a line each; nothing printed means there was nothing to do. It happens
    in one transaction, completely or not at all, and any number of processes may start it at once.
    Workers and callers of this version go on meanwhile; those of the version before may stay
    until they are replaced.

    --sql prints the same as a script: for a database without the schema, or with --since for one
    at that revision (SELECT version_num FROM pgqueue.alembic_version).

    \b
    Example:
      pgqueue migrate
      pgqueue migrate --sql | psql "$PGQUEUE_DSN"
    """
    from pgqueue import migrate
    from pgqueue.dsn import resolve
    from pgqueue.errors import SchemaMismatch

    if since is not None and not as_sql:
        raise click.UsageError("--since goes with --sql")
    if as_sql and only_check:
        raise click.UsageError("--sql and --check exclude each other")
    if as_sql:
        click.echo(migrate.render(schema, since), nl=False)
        return 0
    where = resolve(dsn, os.environ, schema=schema).dsn
    if only_check:
        try:
            migrate.check(where, schema)
        except SchemaMismatch as error:
            output.say(f"pgqueue: {output.plain(str(error))}")
            return UNREADY
        output.say(f"schema {schema} is up to date")
        return 0
    applied = migrate.upgrade(where, schema)
    for name in applied:
        click.echo(output.plain(name))
    output.say(f"schema {schema} {'is now' if applied else 'was already'} up to date")
    return 0
