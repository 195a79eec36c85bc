"""How many jobs a second one producer asks for: single, bulk, very many; against the same rows by SQL."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

import pgqueue
from bench.jobs import nothing
from bench.measure import Result, in_turn, medians
from bench.plot import Bars
from bench.server import durable_server, migrated_database, settle, surroundings

# The rows as the client's calls make them, with everything said: no trigger has anything to fill in.
COLUMNS = """
    (task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit, is_unique_until_start,
     state)
"""
INSERT = f"""
INSERT INTO pgqueue.jobs {COLUMNS}
VALUES (%s, %s::jsonb, 'default', 0, 5, 300, 1, false, 'ready') RETURNING id
"""
INSERT_MANY = f"""
INSERT INTO pgqueue.jobs {COLUMNS}
SELECT job ->> 'task', job -> 'args', 'default', 0, 5, 300, 1, false, 'ready'
FROM jsonb_array_elements(%s::jsonb) AS given (job) RETURNING id
"""
COPY = f"COPY pgqueue.jobs {COLUMNS} FROM STDIN"

Action = Callable[[int], None]
FIGURES = {"rows_per_second": "rows/s", "ratio": "of the raw statement"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=3_000, help="one by one")
    parser.add_argument("--bulk", type=int, default=100_000, help="in batches")
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--large", type=int, default=300_000, help="in one call")


def measure(*, jobs: int, bulk: int, batch: int, large: int, runs: int) -> Iterator[Result]:
    """Do each in turn on an empty table; three results a size and run, the raw one's ratio being 1."""
    with (
        durable_server() as server,
        migrated_database(server, "enqueue") as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        pgqueue.App(dsn) as app,
        asyncio.Runner() as runner,
    ):
        ways = {
            "single": (jobs, _singly(app, runner, connection)),
            "bulk": (bulk, _in_batches(app, runner, connection, batch)),
            "large": (large, _at_once(app, runner, connection)),
        }
        for run in range(1, runs + 1):
            for size, (count, actions) in ways.items():
                rates = {way: _rate(connection, actions[way], count) for way in in_turn(actions, run)}
                for way in actions:
                    yield {
                        "bench": "enqueue",
                        "case": f"{size}, {way}",
                        "run": run,
                        "rows": count,
                        "rows_per_second": round(rates[way]),
                        "ratio": round(rates[way] / rates["raw"], 3),
                        **({"batch": batch} if size == "bulk" else {}),
                        **surroundings(connection),
                    }
        runner.run(app.aclose())


def plot(results: list[Result]) -> list[Bars]:
    rates = medians(results, "rows_per_second", "case")
    single = {case: spread for case, spread in rates.items() if case.startswith("single")}
    many = {case: spread for case, spread in rates.items() if case not in single}
    return [
        Bars("Asking for jobs one by one", "jobs/s, each committed", {"": single}),
        Bars("Asking for many jobs", "jobs/s", {"": many}),
    ]


def _rate(connection: psycopg.Connection[Any], action: Action, count: int) -> float:
    connection.execute("TRUNCATE pgqueue.jobs")
    settle(connection)
    action(1)  # connects and prepares
    began_at = time.monotonic()
    action(count)
    seconds = time.monotonic() - began_at
    found = connection.execute("SELECT count(*) FROM pgqueue.jobs").fetchone()
    if found != (count + 1,):
        raise SystemExit(f"{count} jobs went in, {found} are there")
    return count / seconds


def _singly(
    app: pgqueue.App, runner: asyncio.Runner, connection: psycopg.Connection[Any]
) -> dict[str, Action]:
    def client(count: int) -> None:
        for i in range(count):
            app.client.enqueue(nothing.job(i))

    async def in_loop(count: int) -> None:
        for i in range(count):
            await app.aclient.enqueue(nothing.job(i))

    def raw(count: int) -> None:
        for i in range(count):
            connection.execute(INSERT, ["nothing", json.dumps({"i": i})], prepare=True).fetchone()

    return {"client": client, "async client": lambda count: runner.run(in_loop(count)), "raw": raw}


def _in_batches(
    app: pgqueue.App, runner: asyncio.Runner, connection: psycopg.Connection[Any], batch: int
) -> dict[str, Action]:
    def batches(count: int) -> Iterator[range]:
        return (range(first, min(count, first + batch)) for first in range(0, count, batch))

    def client(count: int) -> None:
        for numbers in batches(count):
            app.client.enqueue_many([nothing.job(i) for i in numbers])

    async def in_loop(count: int) -> None:
        for numbers in batches(count):
            await app.aclient.enqueue_many([nothing.job(i) for i in numbers])

    def raw(count: int) -> None:
        for numbers in batches(count):
            rows = json.dumps([{"task": "nothing", "args": {"i": i}} for i in numbers])
            connection.execute(INSERT_MANY, [rows], prepare=True).fetchall()

    return {"client": client, "async client": lambda count: runner.run(in_loop(count)), "raw": raw}


def _at_once(
    app: pgqueue.App, runner: asyncio.Runner, connection: psycopg.Connection[Any]
) -> dict[str, Action]:
    def client(count: int) -> None:
        app.client.enqueue_many(nothing.job(i) for i in range(count))

    async def in_loop(count: int) -> None:
        await app.aclient.enqueue_many(nothing.job(i) for i in range(count))

    def raw(count: int) -> None:
        with connection.cursor() as cursor, cursor.copy(COPY) as copy:
            for i in range(count):
                copy.write(f'nothing\t{{"i": {i}}}\tdefault\t0\t5\t300\t1\tf\tready\n')

    return {"client": client, "async client": lambda count: runner.run(in_loop(count)), "raw": raw}
