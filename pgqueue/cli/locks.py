"""`pgqueue locks`: who holds what, since when, and how to free it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pgqueue.cli import output
from pgqueue.cli.options import database_options, json_option, open_database
from pgqueue.shell import write_command, write_termination

if TYPE_CHECKING:
    from pgqueue.sql.locks import Holder


@click.command(short_help="See who holds keys and locks, and how to free them.")
@json_option
@database_options
def command(as_json: bool, dsn: str | None, schema: str) -> None:
    """List who holds concurrency keys, idempotency keys, job transactions and the application's locks.

    The last column says how to free each: what cancels the job, or ends the session. A key whose
    worker is gone is freed by itself within a lease.

    \b
    Example:
      pgqueue locks
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        holders = admin.list_holders(connection, schema=schema)
    if as_json:
        output.document(holders)
        return
    columns = [
        output.Column("what"),
        output.Column("name", may_shrink=True),
        output.Column("for", is_number=True),
        output.Column("by", may_shrink=True),
        output.Column("free it with", may_shrink=True),
    ]
    rows = [
        (
            holder.kind,
            holder.name,
            output.elapsed(holder.since, holder.seen_at) if holder.since else None,
            _who(holder),
            _remedy(holder, schema),
        )
        for holder in holders
    ]
    output.table(columns, rows, empty="nobody holds anything")


def _who(holder: Holder) -> str:
    parts = []
    if holder.job_id is not None:
        parts.append(f"job {holder.job_id} ({holder.task})" if holder.task else f"job {holder.job_id}")
    if holder.worker_id is not None:
        parts.append(f"worker {holder.worker_id[:8]}")
    if holder.pid is not None:
        parts.append(f"session {holder.pid}" + (f" from {holder.client}" if holder.client else ""))
    return ", ".join(parts) or "nobody that runs"


def _remedy(holder: Holder, schema: str) -> str:
    if holder.kind == "idempotency key" and holder.worker_id is None:
        return write_command("processed forget", holder.name, schema=schema)
    if holder.job_id is not None and holder.worker_id is not None:
        return write_command("jobs cancel", holder.job_id, schema=schema)
    return write_termination(holder.pid)
