"""How many jobs a second one worker takes off a full queue, against plain SQL and against the work alone."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import psycopg

from bench.measure import Meter, Result, in_turn, medians
from bench.plot import Bars
from bench.raw import drain_rates
from bench.server import ROOT, durable_server, migrated_database, settle, surroundings, worker_command
from bench.work import alone_seconds, steps_of

INSERT = """
SELECT count(*)
FROM generate_series(0, (%(jobs)s - 1) / 1000) AS batch (nth)
CROSS JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object(
        'task', %(task)s::text, 'args', jsonb_build_object('i', i) || %(more)s::jsonb
    )) AS jobs
    FROM generate_series(nth * 1000, least(nth * 1000 + 999, %(jobs)s - 1)) AS job (i)
) AS given
CROSS JOIN LATERAL pgqueue.enqueue_many(given.jobs)
"""

# A job that ran twice, or not at all, makes the figure worthless.
RESULT = """
SELECT count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1), count(DISTINCT args -> 'i'),
    extract(epoch FROM max(finished_at) - min(started_at))::double precision
FROM pgqueue.finished_jobs
"""

# The raw loop claims at the head, past ever more dead index entries: it does 200,000 at 0.7 of this speed.
RAW_JOBS = 100_000

WAL_BYTES = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
PROFILE = """
SELECT left(regexp_replace(s.query, '\\s+', ' ', 'g'), 150), s.calls, s.total_exec_time * 1000, s.wal_bytes
FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid
WHERE d.datname = current_database()
ORDER BY s.total_exec_time DESC
LIMIT 6
"""

FIGURES = {
    "jobs_per_second": "jobs/s",
    "ratio_to_raw_with_history": "of the raw loop with history",
    "ratio_to_raw_deleting": "of the raw loop that deletes",
    "ratio_to_work_alone": "of the speed of the work alone",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=1, help="child processes of the worker; 0 = none")
    parser.add_argument("--concurrency", type=int, default=10, help="slots of the worker")
    parser.add_argument("--handler", choices=("nothing", "nothing_sync"), default="nothing")
    parser.add_argument("--work-us", type=int, default=0, help="microseconds of Python in each handler")
    parser.add_argument("--batch", type=int, default=500, help="of the raw loop")
    parser.add_argument("--profile", action="store_true", help="also what each statement costs")
    parser.add_argument("--log-level", choices=("warning", "info"), default="warning")


def measure(
    *,
    jobs: int,
    processes: int,
    concurrency: int,
    handler: str,
    work_us: int,
    batch: int,
    profile: bool,
    log_level: str,
    runs: int,
) -> Iterator[Result]:
    """Fill a queue and drain it, `runs` times, each in a fresh database; one result for each run."""
    is_sync = handler.endswith("_sync")
    steps = steps_of(work_us) if work_us else 0
    task, more = (
        (handler, "{}") if not work_us else ("work_sync" if is_sync else "work", f'{{"steps": {steps}}}')
    )
    command = worker_command(
        *("--until-empty", "--processes", str(processes), "-c", str(concurrency), "--log-level", log_level)
    )
    settings = {"shared_preload_libraries": "pg_stat_statements"} if profile else {}
    with durable_server(**settings) as server:
        for run in range(1, runs + 1):
            found: Result = {}
            raw: dict[str, float] = {}
            alone: float | None = None
            with migrated_database(server, f"throughput_{run}") as dsn:
                for case in in_turn(("raw", "alone", "worker"), run):
                    if case == "raw":
                        raw = drain_rates(dsn, min(jobs, RAW_JOBS), batch)
                    elif case == "alone":
                        alone = alone_seconds(jobs, steps) if work_us else None
                    else:
                        found = _drain(server.pid, dsn, jobs, task, more, command, profile=profile)
            rate = found["jobs_per_second"]
            yield {
                "bench": "throughput",
                "run": run,
                **found,
                **{f"raw_{name}_jobs_per_second": round(value) for name, value in raw.items()},
                **{f"ratio_to_raw_{name}": round(rate / value, 3) for name, value in raw.items()},
                **(_beside_work_alone(found["seconds"], alone) if alone else {}),
                "processes": processes,
                "concurrency": concurrency,
                "handler": handler,
                "work_us": work_us,
                "batch": batch,
                "log_level": log_level,
            }


def _beside_work_alone(seconds: float, alone: float) -> Result:
    return {"work_alone_seconds": round(alone, 3), "ratio_to_work_alone": round(alone / seconds, 3)}


def plot(results: list[Result]) -> list[Bars]:
    names = {
        "jobs_per_second": "worker",
        "raw_with_history_jobs_per_second": "raw loop, with history",
        "raw_deleting_jobs_per_second": "raw loop, deleting",
    }
    bars = {
        name: spread
        for figure, name in names.items()
        for spread in medians(results, figure, "bench").values()
    }
    return [Bars("Draining a full queue", "jobs/s", {"": bars})]


def _drain(
    server_pid: int, dsn: str, jobs: int, task: str, more: str, command: list[str], *, profile: bool
) -> Result:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(INSERT, {"jobs": jobs, "task": task, "more": more})
        settle(connection)
        if profile:
            connection.execute("CREATE EXTENSION pg_stat_statements; SELECT pg_stat_statements_reset()")
        wal_bytes, meter = _number(connection, WAL_BYTES), Meter(server_pid)
        with tempfile.TemporaryFile() as log:
            environment = {**os.environ, "PGQUEUE_DSN": dsn}
            ended = subprocess.run(command, cwd=ROOT, env=environment, stderr=log, check=False)
            spent = meter.per_job(jobs)
            wal_bytes = _number(connection, WAL_BYTES) - wal_bytes
            if ended.returncode:
                log.seek(0)
                raise SystemExit(f"the worker ended with {ended.returncode}:\n{log.read()[-4000:].decode()}")
        statements = _profile(connection, jobs) if profile else []
        found = connection.execute(RESULT).fetchone()
        if found is None or found[:2] != (jobs, jobs):
            raise SystemExit(f"{jobs} jobs went in, {found} came out")
        return {
            "jobs": jobs,
            "seconds": round(found[2], 3),
            "jobs_per_second": round(jobs / found[2]),
            **spent,
            "wal_bytes_per_job": round(wal_bytes / jobs),
            **({"statements": statements} if profile else {}),
            **surroundings(connection),
        }


def _profile(connection: psycopg.Connection[Any], jobs: int) -> list[Result]:
    """Say what the dearest statements cost a job, those inside functions with them."""
    return [
        {
            "statement": text,
            "calls": calls,
            "us_per_job": round(float(us) / jobs, 2),
            "wal_bytes_per_job": round(wal_bytes / jobs),
        }
        for text, calls, us, wal_bytes in connection.execute(PROFILE).fetchall()
    ]


def _number(connection: psycopg.Connection[Any], question: str) -> int:
    row = connection.execute(question.encode()).fetchone()
    assert row is not None
    return int(row[0])
