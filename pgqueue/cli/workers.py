"""`pgqueue workers`: who is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pgqueue.cli import output
from pgqueue.cli.options import database_options, json_option, open_database

if TYPE_CHECKING:
    from pgqueue.admin import WorkerSummary

COLUMNS = (
    output.Column("id"),
    output.Column("host", may_shrink=True),
    output.Column("pid", is_number=True),
    output.Column("version"),
    output.Column("queues", may_shrink=True),
    output.Column("running", is_number=True),
    output.Column("slots", is_number=True),
    output.Column("up", is_number=True),
    output.Column("seen", is_number=True),
    output.Column("note"),
)


@click.command(short_help="See which workers are there.")
@json_option
@database_options
def command(as_json: bool, dsn: str | None, schema: str) -> None:
    """See which workers are there, and when each showed a sign of life.

    A silent worker has not been seen for a minute. Its jobs do not depend on this list: they are
    taken over when their leases end.

    \b
    Example:
      pgqueue workers
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        workers = admin.list_workers(connection, schema)
    if as_json:
        output.document(workers)
        return
    output.table(COLUMNS, map(row, workers), empty="no workers")


def row(worker: WorkerSummary) -> list[output.Cell]:
    """Give the cells of COLUMNS."""
    return [
        str(worker.id)[:8],
        worker.host,
        worker.pid,
        worker.version,
        ", ".join(worker.queues),
        worker.running,
        worker.slots,
        output.elapsed(worker.started_at, worker.now),
        output.ago(worker.seen_at, worker.now),
        "silent" if worker.is_silent else "",
    ]
