"""How soon a job runs again after kill -9 of its process, and of its whole worker, beside another worker."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import psycopg

import pgqueue
from bench.measure import Result, medians, wait_until
from bench.plot import Bars
from bench.recorder import Start, starts
from bench.server import durable_server, migrated_database, recording, surroundings, worker

FIGURES = {"seconds": "s until it runs again"}
RUNS = 10
PATIENCE_SECONDS = 120


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--victims", nargs="+", choices=("child", "worker"), default=["child", "worker"])
    parser.add_argument("--lease-seconds", type=float, default=10)


def measure(*, victims: list[str], lease_seconds: float, runs: int) -> Iterator[Result]:
    """Kill one in each run, and replace it; one result for each kill."""
    with (
        durable_server() as server,
        migrated_database(server, "recovery") as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        pgqueue.App(dsn) as app,
        recording() as folder,
    ):
        for victim in victims:
            for run in range(1, runs + 1):
                connection.execute("DELETE FROM pgqueue.jobs")
                settings = ("--lease-seconds", str(lease_seconds), "--grace-seconds", "0")
                with contextlib.ExitStack() as stack:
                    workers = [stack.enter_context(worker(dsn, folder, *settings)) for _ in range(2)]
                    before = len(starts(folder))
                    app.enqueue("stuck", {"i": before})
                    (first,) = _wait_for_starts(folder, before, 1)
                    # Not at the beat that a start of a worker sets.
                    time.sleep(run % 10 / 10 * 0.3 * lease_seconds)
                    killed_at = _kill(victim, first, workers)
                    _, second = _wait_for_starts(folder, before, 2)
                    yield {
                        "bench": "recovery",
                        "case": f"kill -9 of the {victim}",
                        "run": run,
                        "seconds": round(second.started - killed_at, 3),
                        "lease_seconds": lease_seconds,
                        **surroundings(connection),
                    }


def plot(results: list[Result]) -> list[Bars]:
    return [
        Bars(
            "Until the job runs again",
            "seconds, median; the line is from least to greatest",
            {"": medians(results, "seconds", "case")},
        )
    ]


def _wait_for_starts(folder: Path, before: int, count: int) -> list[Start]:
    wait_until(lambda: len(starts(folder)) >= before + count, PATIENCE_SECONDS, "the job runs")
    return starts(folder)[before:]


def _kill(victim: str, start: Start, workers: list[Popen[bytes]]) -> float:
    """Kill the process that runs the job, or the worker above it, and give the time."""
    pid = start.pid
    if victim == "worker":
        while pid not in {process.pid for process in workers}:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed_at
