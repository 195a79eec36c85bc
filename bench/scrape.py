"""What being watched costs: a scrape of a worker, and the reads of the database behind it; full tables."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from bench.measure import Result, medians, tree_seconds, wait_until
from bench.plot import Bars
from bench.server import (
    durable_server,
    migrated_database,
    recording,
    running,
    settle,
    surroundings,
    worker_command,
)

FIGURES = {
    "scrape_ms": "ms a scrape",
    "database_cpu_ms": "ms of the server's processor a read",
    "series": "series",
}
RUNS = 1
_APP = "bench.many:app"
_REFRESH_SECONDS = 0.25


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1_000_000, help="nine of ten ready, the others scheduled")
    parser.add_argument("--queues", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--restarts", type=int, default=500, help="children replaced before the second look")
    parser.add_argument("--reads", type=int, default=100)


def measure(*, jobs: int, queues: int, tasks: int, restarts: int, reads: int, runs: int) -> Iterator[Result]:
    """Scrape a worker that has run each task, then one whose children were replaced so often."""
    environment = {
        **os.environ,
        "PGQUEUE_BENCH_QUEUES": str(queues),
        "PGQUEUE_BENCH_TASKS": str(tasks),
    }
    with (
        durable_server() as server,
        migrated_database(server, "scrape") as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        recording() as folder,
    ):
        _fill(connection, jobs, queues, tasks)
        for run in range(1, runs + 1):
            for case, more, count in (
                ("at first", (), tasks),
                (f"after {restarts} children", ("--max-jobs-per-child", "1"), restarts),
            ):
                command = worker_command("-q", "open", "--metrics-port", "0", *more, app=_APP)
                with running(command, folder, {**environment, "PGQUEUE_DSN": dsn}) as process:
                    _run_jobs(connection, tasks, count)
                    port = _port(folder, "metrics served")
                    found = _scrapes(port, reads)
                    process.terminate()
                    process.wait(30)
                with _exporter(dsn, folder) as port:
                    cpu = _database_cpu_ms(connection, port, reads)
                    seconds = _value(_get(port), "pgqueue_database_read_seconds")
                yield {
                    "bench": "scrape",
                    "case": case,
                    "run": run,
                    "jobs": jobs,
                    "queues": queues,
                    "tasks": tasks,
                    **found,
                    "database_cpu_ms": cpu,
                    "database_wall_ms": round(seconds * 1000, 1),
                    **surroundings(connection),
                }


def plot(results: list[Result]) -> list[Bars]:
    series = {
        "a scrape, ms": medians(results, "scrape_ms", "case"),
        "the server's processor for a read, ms": medians(results, "database_cpu_ms", "case"),
    }
    return [Bars("Watching a million jobs", "ms", series)]


def _fill(connection: psycopg.Connection[Any], jobs: int, queues: int, tasks: int) -> None:
    # Nobody works on these: their queues are paused.
    connection.execute(
        "INSERT INTO pgqueue.jobs (task, args, queue, priority, max_attempts, timeout_seconds, "
        "concurrency_limit, is_unique_until_start, state, run_at) "
        "SELECT 'task_' || n %% %(tasks)s, '{}', 'queue_' || n %% %(queues)s, 0, 5, 300, 1, false, "
        "CASE WHEN n %% 10 = 0 THEN 'scheduled' ELSE 'ready' END, "
        "clock_timestamp() + CASE WHEN n %% 10 = 0 THEN interval '1 d' ELSE interval '0' END "
        "FROM generate_series(1, %(jobs)s) AS n",
        {"jobs": jobs, "queues": queues, "tasks": tasks},
    )
    connection.execute(
        "SELECT pgqueue.pause_queues(array_agg('queue_' || n)) FROM generate_series(0, %s - 1) AS n", [queues]
    )
    settle(connection)


def _run_jobs(connection: psycopg.Connection[Any], tasks: int, count: int) -> None:
    """Have so many jobs run, in a queue that is not paused, of each task as many."""
    connection.execute(
        "INSERT INTO pgqueue.jobs (task, args, queue) SELECT 'task_' || n %% %s, '{}', 'open' "
        "FROM generate_series(1, %s) AS n",
        [tasks, count],
    )

    def are_done() -> bool:
        row = connection.execute("SELECT count(*) FROM pgqueue.jobs WHERE queue = 'open'").fetchone()
        return row == (0,)

    wait_until(are_done, 600, "the jobs have run", pause=0.2)


def _port(folder: Path, event: str) -> int:
    def found() -> int:
        for log in folder.glob("log.*"):
            if port := re.findall(rf"{event}.*port=(\d+)", log.read_text(errors="replace")):
                log.unlink()
                return int(port[-1])
        return 0

    return int(wait_until(found, 60, event))


@contextlib.contextmanager
def _exporter(dsn: str, folder: Path) -> Iterator[int]:
    command = (
        *(sys.executable, "-m", "pgqueue", "exporter", "--port", "0"),
        *("--refresh-seconds", str(_REFRESH_SECONDS)),
    )
    with running(command, folder, {"PGQUEUE_DSN": dsn}) as process:
        yield _port(folder, "exporter started")
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _scrapes(port: int, count: int) -> Result:
    wait_until(lambda: "pgqueue_queue_jobs{" in _get(port), 60, "the worker has read the database", pause=0.5)
    took = []
    for _ in range(min(count, 20)):
        began_at = time.monotonic()
        text = _get(port)
        took.append(time.monotonic() - began_at)
    return {
        "scrape_ms": round(sorted(took)[len(took) // 2] * 1000, 1),
        "slowest_scrape_ms": round(max(took) * 1000, 1),
        "series": sum(not line.startswith("#") for line in text.splitlines()),
        "bytes": len(text),
    }


def _database_cpu_ms(connection: psycopg.Connection[Any], port: int, count: int) -> float:
    """Give the processor time of the session that reads, for each read."""
    wait_until(
        lambda: "pgqueue_queue_jobs{" in _get(port), 60, "the exporter has read the database", pause=0.5
    )
    (pid,) = connection.execute(
        "SELECT pid FROM pg_stat_activity "
        "WHERE application_name LIKE '%metrics%' AND datname = current_database()"
    ).fetchone() or (0,)
    before, began_at = tree_seconds(pid), time.monotonic()
    time.sleep(count * _REFRESH_SECONDS)
    reads = (time.monotonic() - began_at) / _REFRESH_SECONDS
    return round((tree_seconds(pid) - before) / reads * 1000, 2)
