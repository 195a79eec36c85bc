"""`pgqueue health`: a probe for whoever starts processes, and a first question for a person."""

from __future__ import annotations

import json
from typing import Any

import click

from pgqueue.cli import output
from pgqueue.cli.options import DURATION, database_options, json_option, open_database

UNREADY = 3


@click.command(short_help="Ask whether a worker, an exporter or the queue is well.")
@click.option(
    "--port",
    type=click.IntRange(1, 65_535),
    metavar="PORT",
    envvar="PGQUEUE_METRICS_PORT",
    show_envvar=True,
    help="Ask the worker or exporter that serves this port; without one, the database is asked.",
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where that port is.")
@click.option(
    "--live",
    is_flag=True,
    help="Ask whether the process lives, not whether it is ready: no matter how the database is.",
)
@click.option(
    "--timeout-seconds",
    type=DURATION,
    default=3.0,
    show_default=True,
    help="How long to wait for its answer.",
)
@json_option
@database_options
def command(
    port: int | None,
    host: str,
    live: bool,
    timeout_seconds: float,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> int:
    """Ask whether a worker, an exporter or the queue is well: exit 0, or 3 with the reasons.

    With a port, the process there is asked: ready means that it can use the database, is not
    draining, and has children up. With --live only whether it lives, which a supervisor may take for a
    reason to restart it; the database is no part of that.

    Without a port, the database is asked: it must answer, its schema must be this version's, and every
    queue in which jobs are ready must have a live worker, unless it is paused.

    \b
    Exit codes: 0 well, 3 not, 75 database unreachable.

    \b
    Example:
      pgqueue health
      pgqueue health --port 9464 --live
    """
    if port is None:
        if live:
            raise click.UsageError("--live is about a process: give its --port")
        asked, reasons = "the queue", _ask_database(dsn, schema)
    else:
        asked, reasons = f"{host}:{port}", _ask_process(host, port, live, timeout_seconds)
    if as_json:
        output.document({"status": "unready" if reasons else "ok", "reasons": reasons})
    elif reasons:
        told = f"{asked} is not {'alive' if live else 'ready'}: " + "; ".join(reasons)
        output.say(f"pgqueue: {output.plain(told)}")
    else:
        click.echo(f"{output.plain(asked)} is {'alive' if live else 'ready'}")
    return UNREADY if reasons else 0


def _ask_process(host: str, port: int, live: bool, timeout_seconds: float) -> list[str]:
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request("GET", "/healthz" if live else "/readyz")
        answer = connection.getresponse()
        document: Any = json.loads(answer.read(65_536))
        reasons = [str(reason) for reason in document["reasons"]]
    except TimeoutError:
        return [f"no answer within {timeout_seconds:g} s"]
    except OSError as error:
        return [(error.strerror or str(error)).lower()]
    except (HTTPException, ValueError, KeyError, TypeError):
        return ["whoever listens there is not a worker or exporter of pgqueue"]
    finally:
        connection.close()
    return reasons or ([] if answer.status == 200 else [f"it answered {answer.status}"])


def _ask_database(dsn: str | None, schema: str) -> list[str]:
    import os

    from pgqueue import admin, migrate
    from pgqueue.database import Error, errors, is_infrastructure
    from pgqueue.dsn import resolve
    from pgqueue.errors import SchemaMismatch

    try:
        migrate.check(resolve(dsn, os.environ, schema=schema).dsn, schema)
        with open_database(dsn, schema) as connection:
            queues = admin.list_queues(connection, schema=schema)
    except SchemaMismatch as error:
        return [str(error)]
    except Error as error:
        if isinstance(error, errors.OperationalError) or is_infrastructure(error):
            raise
        return [(error.diag.message_primary or str(error)).partition("\n")[0]]
    idle = [queue.queue for queue in queues if queue.ready and not queue.workers and not queue.is_paused]
    return [f"queue {name} has jobs to run and no live worker" for name in idle[:10]]
