"""What a crowd of one full key at the head of a queue costs the other jobs' claims."""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg

from bench.measure import Result, in_turn
from bench.plot import Bars
from bench.server import durable_server, migrated_database, settle, surroundings

BATCH = 100
KEY = "hot"

CROWD = """
INSERT INTO pgqueue.jobs (task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit,
                          state, concurrency_key)
SELECT 'crowd', '{}', 'default', 0, 5, 300, 1, 'ready', %s FROM generate_series(1, %s)
"""
OTHERS = """
INSERT INTO pgqueue.jobs (task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit,
                          state)
SELECT 'other', '{}', 'default', 1, 5, 300, 1, 'ready' FROM generate_series(1, %s)
"""
CLAIM = "SELECT job_id, token FROM pgqueue.claim('default', %s, %s, %s)"
COMPLETE = "SELECT count(*) FROM pgqueue.complete(%s::bigint[], %s::uuid[])"

LEASE_SECONDS = 10.0
FIGURES = {"ratio": "of the time without the crowd"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--crowd", type=int, default=100_000, help="jobs of the full key")
    parser.add_argument("--jobs", type=int, default=20_000, help="the others")


def measure(*, crowd: int, jobs: int, runs: int) -> Iterator[Result]:
    """Drain the other jobs with and without a crowd before them, both orders in turn; one result a run."""
    with durable_server() as server:
        for run in range(1, runs + 1):
            seconds: dict[bool, float] = {}
            parking = 0.0
            for has_crowd in in_turn((False, True), run):
                with (
                    migrated_database(server, f"blocked_{run}_{int(has_crowd)}") as dsn,
                    psycopg.connect(dsn, autocommit=True) as connection,
                ):
                    worker = uuid.uuid4()
                    if has_crowd:
                        parking = park(connection, worker, crowd)
                    connection.execute(OTHERS, (jobs,))
                    settle(connection)
                    seconds[has_crowd] = _drain(connection, worker, jobs)
                    about = surroundings(connection)
            yield {
                "bench": "blocked",
                "run": run,
                "crowd": crowd,
                "jobs": jobs,
                "batch": BATCH,
                "seconds_alone": round(seconds[False], 3),
                "seconds_behind_crowd": round(seconds[True], 3),
                "ratio": round(seconds[True] / seconds[False], 3),
                "seconds_to_park": round(parking, 3),
                **about,
            }


def plot(results: list[Result]) -> list[Bars]:
    ratios = {f"run {result['run']}": (result["ratio"],) * 3 for result in results}
    title = f"Time to drain {results[0]['jobs']:,} jobs behind {results[0]['crowd']:,} of a full key"
    return [Bars(title, "of the time without the crowd", {"": ratios}, mark=1)]


def park(
    connection: psycopg.Connection[Any], worker: uuid.UUID, crowd: int, lease_seconds: float = LEASE_SECONDS
) -> float:
    """Let one job of the key run and claims meet the rest; gives the time until all are out of the way."""
    connection.execute(CROWD, (KEY, crowd + 1))
    began_at = time.monotonic()
    claimed = connection.execute(CLAIM, (worker, BATCH, lease_seconds)).fetchall()
    while connection.execute("SELECT count(*) FROM pgqueue.jobs WHERE state = 'ready'").fetchone() != (0,):
        if connection.execute(CLAIM, (worker, BATCH, lease_seconds)).fetchall():
            raise SystemExit("a second job of the key was claimed")
    if len(claimed) != 1:
        raise SystemExit(f"{len(claimed)} jobs of the key run")
    return time.monotonic() - began_at


def _drain(connection: psycopg.Connection[Any], worker: uuid.UUID, jobs: int) -> float:
    began_at, done = time.monotonic(), 0
    while claimed := connection.execute(CLAIM, (worker, BATCH, LEASE_SECONDS)).fetchall():
        ids, tokens = zip(*claimed, strict=True)
        connection.execute(COMPLETE, (list(ids), list(tokens)))
        done += len(claimed)
    if done != jobs:
        raise SystemExit(f"{jobs} jobs went in, {done} came out")
    return time.monotonic() - began_at
