"""One product in a fresh database, its worker and its producer at work at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psycopg

from bench.measure import Result, percentiles, tree_seconds, wait_until
from bench.peers.products import Product
from bench.plot import Lines
from bench.recorder import FOLDER, seen, starts
from bench.server import ROOT, fresh_database, recording, running, settle
from pgqueue import embedded

HELD = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class"


@dataclass(frozen=True)
class Place:
    """A product's database, and the folder of what its handlers leave behind."""

    server: embedded.Server
    product: Product
    setting: str
    home: Path
    dsn: str
    folder: Path

    def call(self, *arguments: str) -> Result:
        """Run the product's adapter to its end, and give what it says."""
        command = self.product.adapter(self.home, *arguments)
        environment = {**os.environ, **self._environment(), FOLDER: str(self.folder)}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
        )
        if ended.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
        said: Result = json.loads((ended.stdout.splitlines() or ["{}"])[-1])
        return said

    def start(self, *arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Run the product's adapter in the background."""
        return running(self.product.adapter(self.home, *arguments), self.folder, self._environment())

    def worker(self) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return running(self.product.worker(self.home, self.setting), self.folder, self._environment())

    @contextlib.contextmanager
    def warm_worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker; it has run a job when this gives its process."""
        with self.worker() as process:
            self.call("enqueue", "--jobs", "1")
            wait_until(
                lambda: seen(self.folder).calls or process.poll() is not None,
                60,
                f"{self.product.name} at work",
            )
            time.sleep(0.5)
            yield process

    def pending(self) -> int:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            row = connection.execute(self.product.pending.encode()).fetchone()
            assert row is not None
            return int(row[0])

    def settle(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            settle(connection)

    def _environment(self) -> dict[str, str]:
        return self.product.environment(self.home, self.dsn, self.setting)


@contextlib.contextmanager
def fresh_place(server: embedded.Server, product: Product, setting: str, home: Path) -> Iterator[Place]:
    """Give a database with the product's schema and nothing else in it."""
    with fresh_database(server, f"bench_{product.module}") as dsn, recording() as folder:
        place = Place(server, product, setting, home, dsn, folder)
        place.call("setup")
        place.settle()
        yield place


def flow(
    place: Place,
    seconds: float,
    *,
    batch: int = 100,
    ahead: int = 5000,
    slice_seconds: float = 10,
    is_held: bool = False,
) -> Result:
    """Let a producer keep jobs waiting and a worker run them; with `is_held` beside an old open snapshot.

    The first second counts for nothing; the waiting times are of one job in each batch.
    """
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(place.warm_worker())
        if is_held:
            held = stack.enter_context(psycopg.connect(place.dsn, autocommit=True))
            held.execute(HELD)
        arguments = ("--seconds", str(seconds + 10), "--batch", str(batch), "--ahead", str(ahead))
        stack.enter_context(place.start("flow", *arguments))
        before = seen(place.folder).calls
        wait_until(lambda: seen(place.folder).calls > before, 60, f"{place.product.name} runs jobs")
        time.sleep(0.9)
        began_at, used = time.monotonic(), (tree_seconds(place.server.pid), tree_seconds(worker.pid))
        marks = [seen(place.folder).calls]
        for nth in range(1, max(1, round(seconds / slice_seconds)) + 1):
            time.sleep(max(0.0, began_at + min(seconds, nth * slice_seconds) - time.monotonic()))
            marks.append(seen(place.folder).calls)
        took = time.monotonic() - began_at
        jobs = max(1, marks[-1] - marks[0])
        server_seconds, worker_seconds = (
            late - early
            for late, early in zip(
                (tree_seconds(place.server.pid), tree_seconds(worker.pid)), used, strict=True
            )
        )
    each = took / (len(marks) - 1)
    rates = [round((late - early) / each) for early, late in pairwise(marks)]
    waits = [start.started - start.sent for start in starts(place.folder) if start.sent >= began_at]
    return {
        "seconds": seconds,
        "batch": batch,
        "ahead": ahead,
        "is_held": is_held,
        "jobs_per_second": round(jobs / took),
        "slices": rates,
        "slice_seconds": round(each, 1),
        "last_to_first": round(rates[-1] / max(1, rates[0]), 3),
        **percentiles(waits),
        "worker_cpu_us_per_job": round(worker_seconds / jobs * 1e6, 1),
        "server_cpu_us_per_job": round(server_seconds / jobs * 1e6, 1),
    }


def slices(title: str, results: list[Result], key: str) -> Lines:
    """Draw the rate of each slice of time, the median of the runs, with a line for each value of `key`."""
    runs: dict[str, list[list[int]]] = {}
    for result in results:
        runs.setdefault(result[key], []).append(result["slices"])
    seconds = results[0]["slice_seconds"]
    series = {
        name: [((nth + 1) * seconds, median(rates)) for nth, rates in enumerate(zip(*found, strict=True))]
        for name, found in runs.items()
    }
    return Lines(title, "seconds", "jobs/s", series)
