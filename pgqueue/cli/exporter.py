"""`pgqueue exporter`: the whole queue's numbers for Prometheus."""

from __future__ import annotations

import os

import click

from pgqueue.cli.options import DURATION, database_options, log_format_option


@click.command(short_help="Serve the whole queue's metrics to Prometheus.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=9465,
    show_default=True,
    help="The port to serve /metrics, /healthz and /readyz on; 0: any that is free, which the log names.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="The address to serve them on; 0.0.0.0 or :: where others on the network may read them.",
)
@click.option(
    "--refresh-seconds",
    type=DURATION,
    default=15.0,
    show_default=True,
    help="How often the database is read, however often /metrics is.",
)
@log_format_option
@database_options
def command(
    port: int, host: str, refresh_seconds: float, log_format: str, dsn: str | None, schema: str
) -> None:
    """Serve the numbers of the whole queue to Prometheus until told to stop.

    Queues, their age and depth, leases, dead letters, breakers, limits, schedules, tables, snapshots:
    what is in the database, whichever workers come and go. One connection reads it every few seconds,
    a bounded number of rows however long the queues are. Among workers with --metrics-port one does the
    same, so either will do; with both, the numbers are the same twice.

    While the database is away the numbers are gone and pgqueue_database_up is 0. To see for how long other
    programs' transactions have been open, the role needs pg_read_all_stats.

    \b
    Example:
      pgqueue exporter --port 9465
      curl -s 127.0.0.1:9465/metrics
    """
    import asyncio
    from typing import cast

    from pgqueue.runtime.exporter import Exporter
    from pgqueue.runtime.log import LogFormat, configure

    if not 0.1 <= refresh_seconds <= 3600:
        raise click.UsageError(f"--refresh-seconds must be between 0.1 and 3600, not {refresh_seconds:g}")
    configure(cast("LogFormat", log_format), "info")
    exporter = Exporter(
        dsn=dsn,
        schema=schema,
        environment=os.environ,
        host=host,
        port=port,
        refresh_seconds=refresh_seconds,
    )
    asyncio.run(exporter.run())
