"""How much of its speed a worker keeps with full tables: ready, future, finished, blocked jobs; queues."""

from __future__ import annotations

import argparse
import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from bench import crowd
from bench.blocked import park
from bench.measure import Meter, Result, in_turn, medians, wait_until
from bench.plot import Bars
from bench.recorder import seen
from bench.server import durable_server, migrated_database, recording, settle, surroundings, worker
from pgqueue import embedded

COLUMNS = """
    (task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit, is_unique_until_start,
     state, run_at)
"""
READY = f"""
INSERT INTO pgqueue.jobs {COLUMNS}
SELECT format(%(task)s, i %% {crowd.TASKS}), jsonb_build_object('i', i), 'default', 0, 5, 300, 1, false,
    'ready', clock_timestamp()
FROM generate_series(0, %(jobs)s - 1) AS i
"""
FUTURE = f"""
INSERT INTO pgqueue.jobs {COLUMNS}
SELECT 'counted', jsonb_build_object('i', i), 'default', 0, 5, 300, 1, false,
    'scheduled', clock_timestamp() + interval '1 day' + i * interval '1 ms'
FROM generate_series(0, %s - 1) AS i
"""
FINISHED = """
INSERT INTO pgqueue.finished_jobs (id, finished_at, run_at, created_at, started_at, claim_token, worker_id,
                                   attempt, priority, crashes, state, queue, task, args)
SELECT -i, clock_timestamp(), clock_timestamp(), clock_timestamp(), clock_timestamp(), gen_random_uuid(),
    gen_random_uuid(), 1, 0, 0, 'succeeded', 'default', 'counted', jsonb_build_object('i', i)
FROM generate_series(1, %s) AS i
"""
SETTINGS = """
INSERT INTO pgqueue.queues (name, retention_seconds)
SELECT 'queue-' || i, 864000 FROM generate_series(0, %s - 1) AS i
"""
# Ten jobs in each.
QUEUES = f"""
INSERT INTO pgqueue.jobs {COLUMNS}
SELECT 'counted', jsonb_build_object('i', i), 'queue-' || i / 10, 0, 5, 300, 1, false,
    'ready', clock_timestamp()
FROM generate_series(0, %s * 10 - 1) AS i
"""

FIGURES = {"jobs_per_second": "jobs/s", "ratio": "of the rate on empty tables"}


def _fill(*statements: str) -> Callable[[psycopg.Connection[Any], int], None]:
    def fill(connection: psycopg.Connection[Any], count: int) -> None:
        for statement in statements:
            connection.execute(statement.encode(), [count] * statement.count("%s"))

    return fill


def _fill_ready(connection: psycopg.Connection[Any], count: int) -> None:
    connection.execute(READY, {"task": "counted", "jobs": count})


def _fill_blocked(connection: psycopg.Connection[Any], count: int) -> None:
    # Its one running job has a lease for as long as this may take.
    park(connection, uuid.uuid4(), count, lease_seconds=86_400)


# What is in the way, how much of it, and how it gets there.
CASES: dict[str, tuple[int, Callable[[psycopg.Connection[Any], int], None]]] = {
    "empty": (0, lambda _connection, _count: None),
    "ready": (1_000_000, _fill_ready),
    "future": (1_000_000, _fill(FUTURE)),
    "finished": (10_000_000, _fill(FINISHED)),
    "blocked": (100_000, _fill_blocked),
    "queues": (10_000, _fill(SETTINGS, QUEUES)),
    "tasks": (crowd.TASKS, lambda _connection, _count: None),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--jobs", type=int, default=100_000, help="to run in each case")
    parser.add_argument("--scale", type=float, default=1, help="of what is in the way")


def measure(*, cases: list[str], jobs: int, scale: float, runs: int) -> Iterator[Result]:
    """Each case keeps its database; a result for each in each run, with its ratio to the empty one's."""
    wanted = list(dict.fromkeys(["empty", *cases]))
    with durable_server() as server, contextlib.ExitStack() as stack:
        databases: dict[str, tuple[str, int]] = {}
        for case in wanted:
            count, fill = CASES[case]
            dsn = stack.enter_context(migrated_database(server, f"backlog_{case}"))
            count = count if case == "tasks" else round(count * scale)
            with psycopg.connect(dsn, autocommit=True) as connection:
                fill(connection, count)
            databases[case] = (dsn, count)
        for run in range(1, runs + 1):
            found = {case: _drain(server, databases[case][0], jobs, case) for case in in_turn(wanted, run)}
            for case in wanted:
                yield {
                    "bench": "backlog",
                    "case": case,
                    "run": run,
                    "in_the_way": databases[case][1],
                    "jobs": jobs,
                    "ratio": round(found[case]["jobs_per_second"] / found["empty"]["jobs_per_second"], 3),
                    **found[case],
                }


def plot(results: list[Result]) -> list[Bars]:
    names = {
        result["case"]: f"{result['in_the_way']:,} {result['case']}"
        if result["in_the_way"]
        else result["case"]
        for result in results
    }
    ratios = {names[case]: spread for case, spread in medians(results, "ratio", "case").items()}
    return [Bars("Draining with so much in the way", "of the rate on empty tables", {"": ratios}, mark=1)]


def _drain(server: embedded.Server, dsn: str, jobs: int, case: str) -> Result:
    """Put so many jobs in, and give the rate of as many; what is in the way is there before and after."""
    with psycopg.connect(dsn, autocommit=True) as connection, recording() as folder:
        connection.execute(READY, {"task": "task_%s" if case == "tasks" else "counted", "jobs": jobs})
        settle(connection)
        meter = Meter(server.pid)
        app = "bench.crowd:app" if case == "tasks" else "bench.jobs:app"
        with worker(dsn, folder, "-q", "default", "--grace-seconds", "5", "--log-level", "warning", app=app):
            wait_until(lambda: seen(folder).calls >= jobs, 300, f"{jobs} jobs run", 0.01)
            found = seen(folder)
            spent = meter.per_job(found.calls)
        return {
            "jobs_per_second": round(found.calls / (found.last_at - found.first_at)),
            **spent,
            **surroundings(connection),
        }
