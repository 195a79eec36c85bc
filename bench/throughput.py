"""How many no-op jobs a second one worker takes off a full queue."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from bench.server import durable_server, migrated_database, surroundings

ROOT = Path(__file__).parent.parent

INSERT = """
SELECT count(*)
FROM generate_series(0, (%(jobs)s - 1) / 1000) AS batch (nth)
CROSS JOIN LATERAL (
    SELECT jsonb_agg(jsonb_build_object('task', %(task)s::text, 'args', jsonb_build_object('i', i))) AS jobs
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


def measure(
    *, jobs: int, processes: int, concurrency: int, handler: str, log_level: str, runs: int
) -> Iterator[dict[str, Any]]:
    """Fill a queue and drain it, `runs` times, each in a fresh database; one result for each run."""
    with durable_server() as server:
        for run in range(1, runs + 1):
            with migrated_database(server, f"throughput_{run}") as dsn:
                yield {
                    "bench": "throughput",
                    "run": run,
                    **_drain(server.pid, dsn, jobs, processes, concurrency, handler, log_level),
                }


def _drain(
    server_pid: int, dsn: str, jobs: int, processes: int, concurrency: int, handler: str, log_level: str
) -> dict[str, Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(INSERT, {"jobs": jobs, "task": handler})
        connection.execute("VACUUM ANALYZE")
        connection.execute("CHECKPOINT")
        spent = _work(server_pid, dsn, processes, concurrency, log_level)
        found = connection.execute(RESULT).fetchone()
        if found is None or found[:2] != (jobs, jobs):
            raise SystemExit(f"{jobs} jobs went in, {found} came out")
        return {
            "jobs": jobs,
            "seconds": round(found[2], 3),
            "jobs_per_second": round(jobs / found[2]),
            "worker_cpu_us_per_job": round(spent.worker_seconds / jobs * 1e6, 1),
            "server_cpu_us_per_job": round(spent.server_seconds / jobs * 1e6, 1),
            "processes": processes,
            "concurrency": concurrency,
            "handler": handler,
            "log_level": log_level,
            "other_cores": round(spent.other_cores, 2),
            **surroundings(connection),
        }


class Spent(NamedTuple):
    """Processor time while the worker lived, and how many cores everybody else took meanwhile."""

    worker_seconds: float
    server_seconds: float
    other_cores: float


def _work(server_pid: int, dsn: str, processes: int, concurrency: int, log_level: str) -> Spent:
    """Run a worker until nothing is left, and say what it cost."""
    began_at, before = (
        time.monotonic(),
        (_children_seconds(), _server_seconds(server_pid), _machine_seconds()),
    )
    with tempfile.TemporaryFile() as log:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "pgqueue", "worker", "--app", "bench.jobs:app", "--until-empty"),
                *("--processes", str(processes), "-c", str(concurrency), "--log-level", log_level),
            ],
            cwd=ROOT,
            env={**os.environ, "PGQUEUE_DSN": dsn},
            stderr=log,
            check=False,
        )
        if ended.returncode:
            log.seek(0)
            raise SystemExit(f"the worker ended with {ended.returncode}:\n{log.read()[-4000:].decode()}")
    after = (_children_seconds(), _server_seconds(server_pid), _machine_seconds())
    worker, server, machine = (late - early for late, early in zip(after, before, strict=True))
    return Spent(worker, server, max(0.0, machine - worker - server) / (time.monotonic() - began_at))


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _server_seconds(pid: int) -> float:
    """Give the processor time of the server and of all its backends, those that have ended too."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if path.parent.name == str(pid):
                ticks += sum(map(int, fields[11:15]))
            elif fields[1] == str(pid):
                ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _machine_seconds() -> float:
    """Give the processor time that was used at all, by anybody."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
