"""What waking idle workers costs those who insert while all workers are busy."""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

import pgqueue
from bench.measure import Result, in_turn, medians, wait_until
from bench.plot import Bars
from bench.recorder import seen
from bench.server import durable_server, migrated_database, recording, settle, surroundings, worker
from pgqueue import embedded

# Without triggers, the rest the same.
PLAIN = """
CREATE TABLE pgqueue.plain_jobs (LIKE pgqueue.jobs INCLUDING ALL);
DO $$ BEGIN EXECUTE (
    SELECT format('ALTER TABLE pgqueue.plain_jobs SET (%s)', array_to_string(reloptions, ', '))
    FROM pg_class WHERE oid = 'pgqueue.jobs'::regclass
); END $$;
"""
INSERT = (
    "INSERT INTO {table} (task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit,"
    " is_unique_until_start, state)"
    " VALUES ('nothing', '{{\"i\": 1}}', 'default', 0, 5, 300, 1, false, 'ready');"
)
TABLES = {"queue": "pgqueue.jobs", "no trigger": "pgqueue.plain_jobs"}
FIGURES = {"ratio": "of the commits/s without triggers"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=int, default=8, help="for each table and number of clients")


def measure(*, clients: list[int], seconds: int, runs: int) -> Iterator[Result]:
    """Insert with each number of clients, into one table and the other in turn; one result for each."""
    with (
        durable_server() as server,
        migrated_database(server, "notify") as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        recording() as folder,
        worker(dsn, folder, "-c", "1", "--grace-seconds", "0"),
    ):
        connection.execute(PLAIN)
        with pgqueue.App(dsn) as app:
            app.enqueue("stuck", {"i": 0})
        wait_until(lambda: seen(folder).calls, 10, "the worker is busy")
        for run in range(1, runs + 1):
            for count in clients:
                rates = {
                    name: _commits_per_second(dsn, connection, TABLES[name], count, seconds)
                    for name in in_turn(TABLES, run)
                }
                yield {
                    "bench": "notify",
                    "case": f"{count} clients" if count > 1 else "1 client",
                    "run": run,
                    "clients": count,
                    "seconds": seconds,
                    "commits_per_second": round(rates["queue"]),
                    "commits_per_second_without_trigger": round(rates["no trigger"]),
                    "ratio": round(rates["queue"] / rates["no trigger"], 3),
                    **surroundings(connection),
                }


def plot(results: list[Result]) -> list[Bars]:
    series = {
        "the queue, workers busy": medians(results, "commits_per_second", "case"),
        "the same table without triggers": medians(results, "commits_per_second_without_trigger", "case"),
    }
    return [Bars("Inserting one job per transaction", "commits/s", series)]


def _commits_per_second(
    dsn: str, connection: psycopg.Connection[Any], table: str, clients: int, seconds: int
) -> float:
    # The one that keeps the worker busy stays.
    connection.execute("DELETE FROM pgqueue.jobs WHERE state = 'ready'; TRUNCATE pgqueue.plain_jobs")
    settle(connection)
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(INSERT.format(table=table))
        script.flush()
        ended = subprocess.run(
            [
                *(_pgbench(), "--no-vacuum", "--protocol=prepared", "--client", str(clients)),
                *("--jobs", str(min(clients, 2)), "--time", str(seconds), "--file", script.name, dsn),
            ],
            text=True,
            capture_output=True,
            check=False,
        )
    rate = re.search(r"tps = ([\d.]+)", ended.stdout)
    if ended.returncode or rate is None:
        raise SystemExit(f"pgbench: {ended.stderr[-2000:]}")
    return float(rate[1])


def _pgbench() -> Path:
    for install in embedded.installs():
        if (install.bindir / "pgbench").exists():
            return install.bindir / "pgbench"
    raise SystemExit("no pgbench found: install PostgreSQL's programs")
