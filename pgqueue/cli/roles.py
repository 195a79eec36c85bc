"""`pgqueue roles`: who may do what."""

from __future__ import annotations

import click

from pgqueue.cli import output
from pgqueue.cli.options import database_options, json_option, open_database
from pgqueue.shell import write_command

PURPOSES = {
    "producer": "enqueues, by function or plain INSERT; reads nothing, changes nothing",
    "worker": "runs pgqueue worker; cannot rewrite a job's arguments or act without its token",
    "viewer": "reads everything, arguments too; changes nothing",
    "operator": "cancels, redrives, pauses, limits: what the admin commands do",
}


@click.command(short_help="See who may do what, or print the SQL that makes the roles.")
@click.option(
    "--sql", "as_sql", is_flag=True, help="Print the script that makes the roles, or puts them right."
)
@json_option
@database_options
def command(as_sql: bool, as_json: bool, dsn: str | None, schema: str) -> None:
    """See who may do what, or print the SQL that makes the roles.

    There are four, named after the schema: pgqueue_producer, pgqueue_worker, pgqueue_viewer and
    pgqueue_operator. Nobody logs in as one of them: grant them to the accounts of your programs
    and people. Each has exactly the privileges it needs; pgqueue migrate renews them where the roles exist.

    --sql asks no database. The script is for the owner of the schema, or a superuser; it can be
    run again at any time.

    \b
    Example:
      pgqueue roles --sql | psql "$PGQUEUE_DSN"
      psql "$PGQUEUE_DSN" -c 'GRANT pgqueue_producer TO shop'
      pgqueue roles
    """
    from pgqueue import migrate
    from pgqueue.database import run
    from pgqueue.sql.roles import list_roles

    if as_sql:
        if as_json:
            raise click.UsageError("--sql and --json exclude each other")
        click.echo(migrate.roles_script(schema), nl=False)
        return
    names = {f"{schema}_{name}": purpose for name, purpose in PURPOSES.items()}
    with open_database(dsn, schema) as connection:
        roles = run(connection, list_roles(list(names)), schema)
    if as_json:
        output.document(roles)
        return
    columns = [
        output.Column("role"),
        output.Column("members", may_shrink=True),
        output.Column("what it does", may_shrink=True),
    ]
    output.table(
        columns,
        [
            (role.name, ", ".join(role.members) or "-" if role.exists else "not made", names[role.name])
            for role in roles
        ],
        empty="",
    )
    if not all(role.exists for role in roles):
        script = write_command("roles", schema=schema, sql=True)
        output.say(f'make them with: {script} | psql "$PGQUEUE_DSN"')
