"""`pgqueue queues`: what waits where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pgqueue.cli import output
from pgqueue.cli.options import database_options, json_option, open_database

if TYPE_CHECKING:
    from pgqueue.admin import QueueSummary


@click.group(short_help="See how much waits in each queue.")
def command() -> None:
    """See how much waits in each queue, and for how long.

    \b
    Example:
      pgqueue queues list
    """


@command.command("list")
@json_option
@database_options
def list_(as_json: bool, dsn: str | None, schema: str) -> None:
    """List the queues: jobs by state, how long the oldest ready one has waited, live workers.

    Counting stops at 10,000 jobs of a state, so that this is quick however long a queue is; 10,000+
    means there are more. With --json, `lower_bounds` names the states that were not counted out.

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
    columns = [
        output.Column("queue", may_shrink=True),
        *(
            output.Column(name, is_number=True)
            for name in ("ready", "scheduled", "blocked", "running", "dead")
        ),
        output.Column("oldest", is_number=True),
        output.Column("workers", is_number=True),
        output.Column("note"),
    ]
    output.table(columns, [_row(queue) for queue in queues], empty="no queues")


def _row(queue: QueueSummary) -> list[output.Cell]:
    counts = {
        "ready": queue.ready,
        "scheduled": queue.scheduled,
        "blocked": queue.blocked,
        "running": queue.running,
        "dead": queue.dead,
    }
    oldest = queue.oldest_ready_seconds
    return [
        queue.queue,
        *(f"{jobs:,}{'+' if state in queue.lower_bounds else ''}" for state, jobs in counts.items()),
        None if oldest is None else output.duration(oldest),
        queue.workers,
        _note(queue),
    ]


def _note(queue: QueueSummary) -> str:
    if queue.is_paused:
        return "paused"
    is_waiting = queue.ready + queue.scheduled + queue.blocked > 0
    return "no worker" if is_waiting and not queue.workers else ""
