"""How soon a job starts on an idle queue, asked for by Python or by INSERT, and how soon after it is due."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

import pgqueue
from bench.measure import Result, in_turn, medians, paced, percentiles, wait_until
from bench.plot import Bars
from bench.recorder import starts
from bench.server import durable_server, migrated_database, recording, settle, surroundings, worker

INSERT = "INSERT INTO pgqueue.jobs (task, args) VALUES ('counted', %s::jsonb)"
FUTURE = """
INSERT INTO pgqueue.jobs (task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit,
                          is_unique_until_start, state, run_at)
SELECT 'counted', '{"i": 0}', 'default', 0, 5, 300, 1, false, 'scheduled',
    clock_timestamp() + interval '1 day' + i * interval '1 ms'
FROM generate_series(1, %s) AS i
"""
DUE = """
INSERT INTO pgqueue.jobs (task, args, run_at)
SELECT 'counted', job - 'due', to_timestamp((job ->> 'due')::double precision)
FROM jsonb_array_elements(%s::jsonb) AS given (job)
"""
WAYS = ("client", "async client", "sql")
FIGURES = {"p50_ms": "ms p50", "p99_ms": "ms p99"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=400, help="of each way")
    parser.add_argument("--pause-ms", type=float, default=30, help="between two jobs")
    parser.add_argument("--scheduled", type=int, default=1_000_000, help="jobs of tomorrow in the table")


def measure(*, jobs: int, pause_ms: float, scheduled: int, runs: int) -> Iterator[Result]:
    """Measure each way of asking for jobs, and then scheduled ones, in each run."""
    pause = pause_ms / 1000
    with durable_server() as server:
        for run in range(1, runs + 1):
            with (
                migrated_database(server, f"latency_{run}") as dsn,
                psycopg.connect(dsn, autocommit=True) as connection,
            ):
                settle(connection)
                about = {"run": run, "pause_ms": pause_ms, **surroundings(connection)}
                with recording() as folder, worker(dsn, folder):
                    for way in in_turn(WAYS, run):
                        before = len(starts(folder))
                        _ask(way, dsn, connection, jobs, pause)
                        found = _latencies(folder, before, jobs)
                        yield {"bench": "latency", "case": way, **found, **about}
                connection.execute(FUTURE, [scheduled])
                settle(connection)
                with recording() as folder, worker(dsn, folder):
                    _schedule(connection, jobs, pause)
                    found = _latencies(folder, 0, jobs, jobs * pause + 10)
                yield {"bench": "latency", "case": "scheduled", **found, "scheduled": scheduled, **about}


def plot(results: list[Result]) -> list[Bars]:
    series = {f"p{percent}": medians(results, f"p{percent}_ms", "case") for percent in (50, 95, 99)}
    return [Bars("From the call, or the due time, to the start of the handler", "ms", series)]


def _ask(way: str, dsn: str, connection: psycopg.Connection[Any], jobs: int, pause: float) -> None:
    """Ask for jobs, one at a time; the first one, to warm up, has no time."""
    time.sleep(0.5)  # the queue is idle by then
    if way == "sql":
        connection.execute(INSERT, [json.dumps({"i": jobs})], prepare=True)
        for i in paced(jobs, pause):
            connection.execute(INSERT, [json.dumps({"i": i, "sent": time.monotonic()})], prepare=True)
    elif way == "client":
        with pgqueue.App(dsn) as app:
            app.enqueue("counted", {"i": jobs})
            for i in paced(jobs, pause):
                app.enqueue("counted", {"i": i, "sent": time.monotonic()})
    else:
        asyncio.run(_ask_in_loop(dsn, jobs, pause))


async def _ask_in_loop(dsn: str, jobs: int, pause: float) -> None:
    async with pgqueue.App(dsn) as app:
        await app.aenqueue("counted", {"i": jobs})
        began_at = time.monotonic()
        for i in range(jobs):
            await asyncio.sleep(max(0.0, began_at + i * pause - time.monotonic()))
            await app.aenqueue("counted", {"i": i, "sent": time.monotonic()})


def _schedule(connection: psycopg.Connection[Any], jobs: int, pause: float) -> None:
    """Schedule jobs at instants that fit no rhythm of the worker's."""
    now, clock = time.monotonic(), time.time()
    dues = [1 + (i + random.random()) * pause for i in range(jobs)]
    given = [{"i": i, "sent": now + due, "due": clock + due} for i, due in enumerate(dues)]
    connection.execute(DUE, [json.dumps(given)])


def _latencies(folder: Path, before: int, jobs: int, seconds: float = 10) -> Result:
    wait_until(lambda: len(starts(folder)) >= before + jobs, seconds, f"{jobs} jobs start", 0.2)
    found = starts(folder)[before:]
    if sorted(start.i for start in found) != list(range(jobs)):
        raise SystemExit(f"{jobs} jobs went in, {len(found)} came out")
    return percentiles(start.started - start.sent for start in found)
