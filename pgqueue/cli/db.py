"""`pgqueue db`: the PostgreSQL server that comes along when no other database is configured."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess

import click

from pgqueue.cli import output
from pgqueue.cli.options import json_option

UNREADY = 3


@click.group(short_help="Start, stop, look at or talk to the embedded PostgreSQL.")
def command() -> None:
    """Start, stop, look at or talk to the embedded PostgreSQL server.

    It is the one that pgqueue uses when no database is configured. Its data lies in PGQUEUE_DATA,
    else in /var/lib/pgqueue for root and in ~/.local/share/pgqueue for everyone else.

    \b
    Example:
      pgqueue db start
      pgqueue db psql
    """


@command.command(short_help="Start it, and keep it up until `db stop`.")
def start() -> None:
    """Start the server and keep it up until `pgqueue db stop`; prints its DSN.

    Without this, the server stops when the last process that uses it ends.

    \b
    Example:
      export PGQUEUE_DSN="$(pgqueue db start)"
    """
    from pgqueue import embedded

    with embedded.start(is_kept=True) as server:
        output.say(f"PostgreSQL {server.version} is up in {server.data}; to stop it: pgqueue db stop")
        click.echo(server.dsn())


@command.command(short_help="Stop it, whoever uses it.")
def stop() -> None:
    """Stop the server, whoever uses it. Nothing is lost: the next start finds the same data.

    \b
    Example:
      pgqueue db stop
    """
    from pgqueue import embedded

    output.say("stopped" if embedded.stop() else "it was not running")


@command.command(short_help="Say whether it runs, where, and who uses it.")
@json_option
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Say whether the server runs, where its data is, and which processes use it.

    The exit code is 0 if it takes connections, else 3.

    \b
    Example:
      pgqueue db status --json
    """
    from pgqueue import embedded

    found = embedded.status()
    if as_json:
        output.document({**dataclasses.asdict(found), "data": str(found.data)})
    else:
        output.fields(
            [
                ("state", found.state),
                ("version", found.version),
                ("data", str(found.data)),
                ("dsn", found.dsn),
                ("pid", found.pid),
                ("clients", _said(found.clients)),
                (
                    "kept up",
                    "yes, until pgqueue db stop" if found.is_kept else "no, the last client stops it",
                ),
            ]
        )
    if found.state != "running":
        context.exit(UNREADY)


# -h is psql's, not ours.
@command.command(
    short_help="Open psql on its database.",
    context_settings={
        "help_option_names": ["--help"],
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def psql(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Open psql on the server's database; whatever follows is passed on to it.

    The server is started if it does not run, and stays up for as long as psql does.

    \b
    Example:
      pgqueue db psql
      pgqueue db psql -c 'SELECT state, count(*) FROM pgqueue.jobs GROUP BY state'
    """
    from pgqueue import embedded

    program = embedded.find_psql()
    with embedded.start() as server:
        # In the environment, so that an argument of psql's own still has the last word.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        environment |= server.environment()
        # A Ctrl-C cancels a query in psql and must not end us; a handler, because ignoring is inherited.
        signal.signal(signal.SIGINT, lambda *_: None)
        ended = subprocess.run([program, *arguments], env=environment, check=False)
    context.exit(ended.returncode if ended.returncode >= 0 else 128 - ended.returncode)


def _said(clients: list[int] | None) -> str:
    if clients is None:
        return "unknown"
    return f"{len(clients)} (process {', '.join(map(str, clients))})" if clients else "none"
