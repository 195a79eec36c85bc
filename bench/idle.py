"""What workers cost that have nothing to do, and what a worker's memory does as it works."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from bench.measure import Result, medians, resident_mb, tree_seconds, wait_until
from bench.plot import Bars
from bench.recorder import seen
from bench.server import (
    durable_server,
    is_registered,
    migrated_database,
    recording,
    running,
    surroundings,
    worker,
    worker_command,
)
from bench.throughput import INSERT
from pgqueue import embedded

FIGURES = {
    "statements_per_second_and_worker": "statements/s a worker",
    "worker_cpu_ms_per_second_and_worker": "ms of processor time a second and worker",
    "resident_mb": "MB of the parent",
}
STATEMENTS = """
SELECT left(regexp_replace(s.query, '\\s+', ' ', 'g'), 100), s.calls
FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid
WHERE d.datname = current_database() AND s.query NOT LIKE '%pg_stat_%'
ORDER BY s.calls DESC
"""
TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
CONNECTIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
CHUNK = 50_000


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 10, 100])
    parser.add_argument("--processes", type=int, default=1, help="child processes of each; 0 = none")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--settle-seconds", type=float, default=10, help="before the clock starts")
    parser.add_argument(
        "--memory", type=int, nargs="*", default=[10_000, 1_000_000], help="jobs after which to look"
    )


def measure(
    *, workers: list[int], processes: int, seconds: float, settle_seconds: float, memory: list[int], runs: int
) -> Iterator[Result]:
    """Real workers, as many as asked for, in a fresh database each time; then one at work."""
    with durable_server(shared_preload_libraries="pg_stat_statements", max_connections=1000) as server:
        for run in range(1, runs + 1):
            for count in workers:
                with migrated_database(server, f"idle_{count}") as dsn:
                    found = _idle(server, dsn, count, processes, seconds, settle_seconds)
                    yield {"bench": "idle", "case": f"{count} workers", "run": run, **found}
            if memory:
                with migrated_database(server, "memory") as dsn:
                    for found in _memory(dsn, memory):
                        yield {"bench": "idle", "run": run, **found}


def plot(results: list[Result]) -> list[Bars]:
    charts = [
        Bars(title, unit, {"": medians(results, figure, "case")})
        for figure, title, unit in (
            ("statements_per_second_and_worker", "Idle workers: statements", "statements/s a worker"),
            (
                "worker_cpu_ms_per_second_and_worker",
                "Idle workers: their processor time",
                "ms a second and worker",
            ),
            (
                "server_cpu_ms_per_second_and_worker",
                "Idle workers: the server's processor time",
                "ms a second and worker",
            ),
        )
    ]
    charts.append(
        Bars("Memory of the worker's parent process", "MB", {"": medians(results, "resident_mb", "case")})
    )
    return [chart for chart in charts if chart.series[""]]


def _idle(
    server: embedded.Server, dsn: str, count: int, processes: int, seconds: float, settle_seconds: float
) -> Result:
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        recording() as folder,
        contextlib.ExitStack() as stack,
    ):
        connection.execute("CREATE EXTENSION pg_stat_statements")
        started = [stack.enter_context(_worker(dsn, folder, processes, connection)) for _ in range(count)]
        pids = [process.pid for process in started]
        time.sleep(settle_seconds)
        before, began_at = _costs(server, connection, pids), time.monotonic()
        connection.execute("SELECT pg_stat_statements_reset()")
        time.sleep(seconds)
        statements = connection.execute(STATEMENTS).fetchall()
        took = time.monotonic() - began_at
        transactions, server_seconds, worker_seconds = (
            (late - early) / took / count
            for late, early in zip(_costs(server, connection, pids), before, strict=True)
        )
        connections = _number(connection, CONNECTIONS)
        memory = sum(map(resident_mb, pids)) / count
        for process in started:  # all at once: one after the other takes long
            process.terminate()
        return {
            "workers": count,
            "processes": processes,
            "seconds": seconds,
            "statements_per_second_and_worker": round(
                sum(calls for _, calls in statements) / took / count, 3
            ),
            "transactions_per_second_and_worker": round(transactions, 3),
            "server_cpu_ms_per_second_and_worker": round(server_seconds * 1000, 3),
            "worker_cpu_ms_per_second_and_worker": round(worker_seconds * 1000, 3),
            "connections_per_worker": round(connections / count, 2),
            "parent_resident_mb": round(memory, 1),
            "statements": {text: round(calls / took / count, 3) for text, calls in statements[:6]},
            **surroundings(connection),
        }


@contextlib.contextmanager
def _worker(
    dsn: str, folder: Path, processes: int, connection: psycopg.Connection[Any]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker without a connection of ours for each."""
    command = worker_command("--processes", str(processes))
    with running(command, folder, {"PGQUEUE_DSN": dsn}) as process:
        wait_until(lambda: is_registered(connection, process), 60, "a worker at work", 0.05)
        yield process


def _costs(
    server: embedded.Server, connection: psycopg.Connection[Any], pids: list[int]
) -> tuple[float, float, float]:
    return _number(connection, TRANSACTIONS), tree_seconds(server.pid), tree_seconds(*pids)


def _number(connection: psycopg.Connection[Any], question: str) -> int:
    row = connection.execute(question.encode()).fetchone()
    assert row is not None
    return int(row[0])


def _memory(dsn: str, looks: list[int]) -> Iterator[Result]:
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        recording() as folder,
        worker(dsn, folder, "--log-level", "warning") as process,
    ):
        done, first = 0, 0.0
        for look in sorted(looks):
            while done < look:
                chunk = min(CHUNK, look - done)
                connection.execute(INSERT, {"jobs": chunk, "task": "counted", "more": "{}"})
                done += chunk
                wait_until(lambda: seen(folder).calls >= done, 120, "the jobs have run", 0.05)  # noqa: B023  asked in this turn only
            time.sleep(1)
            held = resident_mb(process.pid)
            first = first or held
            yield {
                "case": f"after {look:,} jobs",
                "resident_mb": round(held, 1),
                "ratio": round(held / first, 3),
                **surroundings(connection),
            }
