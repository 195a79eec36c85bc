"""pgqueue and other queues on one server, in one run, in both orders; `--table` makes a table in Markdown."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psycopg

from bench.flow import Place, flow, fresh_place, slices
from bench.measure import Meter, Result, in_turn, medians, percentiles, wait_until
from bench.peers.products import PRODUCTS
from bench.plot import Bars, Lines
from bench.recorder import seen, starts
from bench.server import durable_server, surroundings

SINGLE_JOBS, BULK_JOBS, LATENCY_JOBS = 2_000, 50_000, 400
FIGURES = {
    "jobs_per_second": "jobs/s",
    "p50_ms": "ms p50",
    "p99_ms": "ms p99",
    "last_slice": "jobs/s in the last slice",
}


def options(parser: argparse.ArgumentParser) -> None:
    names = [product.name for product in PRODUCTS]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--home", type=Path, default=cache / "pgqueue-bench", help="where they are installed")
    parser.add_argument("--products", nargs="+", choices=names, default=names)
    parser.add_argument("--tests", nargs="+", choices=list(TESTS), default=list(TESTS))
    parser.add_argument("--scale", type=float, default=1, help="of the numbers of jobs")
    parser.add_argument("--seconds", type=float, default=15, help="of the steady state")
    parser.add_argument("--snapshot-seconds", type=float, default=120)
    parser.add_argument("--table", type=Path, help="write the table, in Markdown, to this file")
    parser.add_argument("--lines", type=Path, help="measure nothing: take the results of this file")


def measure(
    *,
    home: Path,
    products: list[str],
    tests: list[str],
    scale: float,
    seconds: float,
    snapshot_seconds: float,
    table: Path | None,
    lines: Path | None,
    runs: int,
) -> Iterator[Result]:
    """Each test with each product in a fresh database; in every second run in the other order."""
    results: list[Result] = []
    found = (
        _read(lines)
        if lines
        else _measure(
            home.absolute(), products, tests, scale, {"steady": seconds, "snapshot": snapshot_seconds}, runs
        )
    )
    for result in found:
        results.append(result)
        yield result
    if table:
        table.write_text(markdown(results), encoding="utf-8")


def _measure(
    home: Path, names: list[str], tests: list[str], scale: float, seconds: dict[str, float], runs: int
) -> Iterator[Result]:
    products = [product for product in PRODUCTS if product.name in names]
    for product in products:
        product.install(home)
    with durable_server() as server:
        for run in range(1, runs + 1):
            for test in tests:
                setting, measure_one = TESTS[test]
                for product in in_turn(products, run):
                    if test == "latency-default" and product.only_polls:
                        continue
                    with fresh_place(server, product, setting, home) as place:
                        found = measure_one(place, scale, seconds.get(test, 0))
                        with psycopg.connect(place.dsn) as connection:
                            about = surroundings(connection)
                    yield {
                        "bench": "peers",
                        "case": f"{test}, {product.name}",
                        "test": test,
                        "product": product.name,
                        "version": product.version,
                        "setting": setting,
                        "setting_in_words": product.settings[setting],
                        "run": run,
                        "date": time.strftime("%Y-%m-%d"),
                        **found,
                        **about,
                    }


def _read(lines: Path) -> list[Result]:
    return [
        json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines() if line.startswith("{")
    ]


# The tests.


def _drain(place: Place, scale: float, _seconds: float) -> Result:
    """From the first start to the moment when nothing is left in the database; every job exactly once."""
    jobs = max(1, round(place.product.drains[place.setting] * scale))
    place.call("enqueue", "--jobs", str(jobs), "--batch", "1000")
    place.settle()
    meter = Meter(place.server.pid)
    with place.worker() as worker:
        wait_until(
            lambda: seen(place.folder).calls >= jobs or worker.poll() is not None,
            180,
            f"{jobs} jobs run",
            0.02,
        )
        while True:
            asked_at = time.monotonic()
            if not place.pending() or worker.poll() is not None:
                break
            time.sleep(max(0.01, 3 * (time.monotonic() - asked_at)))
        spent = meter.per_job(jobs)
        found = seen(place.folder)
    if (found.calls, found.total) != (jobs, jobs * (jobs - 1) // 2) or place.pending():
        raise SystemExit(
            f"{place.product.name}: {jobs} jobs went in, {found} came out, {place.pending()} left"
        )
    seconds = asked_at - found.first_at
    return {"jobs": jobs, "seconds": round(seconds, 3), "jobs_per_second": round(jobs / seconds, 1), **spent}


def _steady(place: Place, _scale: float, seconds: float) -> Result:
    return flow(place, seconds, slice_seconds=seconds)


def _snapshot(place: Place, _scale: float, seconds: float) -> Result:
    found = flow(place, seconds, slice_seconds=min(10, seconds / 2), is_held=True)
    return {**found, "first_slice": found["slices"][0], "last_slice": found["slices"][-1]}


def _latency(place: Place, scale: float, _seconds: float) -> Result:
    jobs = max(1, round(LATENCY_JOBS * scale))
    with place.warm_worker():
        place.call("enqueue", "--jobs", str(jobs), "--pause", "0.03", "--warm")
        wait_until(lambda: len(starts(place.folder)) >= jobs, 30, f"{place.product.name}: {jobs} starts", 0.1)
        return percentiles(start.started - start.sent for start in starts(place.folder))


def _enqueue(place: Place, jobs: int, batch: int) -> Result:
    said = place.call("enqueue", "--jobs", str(jobs), "--batch", str(batch), "--warm")
    if place.pending() != jobs + 1:
        raise SystemExit(f"{place.product.name}: {jobs + 1} jobs went in, {place.pending()} are there")
    return {"jobs": jobs, "batch": batch, "jobs_per_second": round(jobs / said["seconds"], 1)}


def _single(place: Place, scale: float, _seconds: float) -> Result:
    return _enqueue(place, max(1, round(SINGLE_JOBS * scale)), 1)


def _bulk(place: Place, scale: float, _seconds: float) -> Result:
    return _enqueue(place, max(1, round(BULK_JOBS * scale)), 1000)


TESTS: dict[str, tuple[str, Callable[[Place, float, float], Result]]] = {
    "drain": ("best", _drain),
    "drain-default": ("default", _drain),
    "steady": ("best", _steady),
    "latency": ("best", _latency),
    "latency-default": ("default", _latency),
    "enqueue": ("best", _single),
    "enqueue-bulk": ("best", _bulk),
    "snapshot": ("best", _snapshot),
}

# What they say.

ROWS = (
    ("drain", "jobs_per_second", "Drain of no-op jobs, at its best, jobs/s"),
    ("drain-default", "jobs_per_second", "Drain by default, jobs/s"),
    ("drain", "worker_cpu_us_per_job", "Worker's processor time, us a job"),
    ("drain", "server_cpu_us_per_job", "Server's processor time, us a job"),
    ("steady", "jobs_per_second", "Producer and worker at once, jobs/s"),
    ("steady", "p50_ms", "Wait meanwhile, p50, ms"),
    ("latency", "p50_ms", "Pick-up on an idle queue, at its best, p50, ms"),
    ("latency", "p99_ms", "Pick-up on an idle queue, at its best, p99, ms"),
    ("latency-default", "p50_ms", "Pick-up by default, p50, ms"),
    ("latency-default", "p99_ms", "Pick-up by default, p99, ms"),
    ("enqueue", "jobs_per_second", "Enqueue one by one, jobs/s"),
    ("enqueue-bulk", "jobs_per_second", "Enqueue 1,000 at once, jobs/s"),
    ("snapshot", "first_slice", "Beside an open snapshot, first slice, jobs/s"),
    ("snapshot", "last_slice", "Beside an open snapshot, last slice, jobs/s"),
)


def markdown(results: Iterable[Result]) -> str:
    """Make the table: medians, with the least and the greatest, and below it what they depend on."""
    results = list(results)
    products = {result["product"]: result["version"] for result in results}
    lines = [
        "| | " + " | ".join(f"{name} {version}" for name, version in products.items()) + " |",
        "|---|" + "---:|" * len(products),
    ]
    for test, figure, label in ROWS:
        spreads = medians([result for result in results if result["test"] == test], figure, "product")
        if spreads:
            lines.append(f"| {label} | " + " | ".join(_cell(spreads.get(name)) for name in products) + " |")
    words = {(result["product"], result["setting"]): result["setting_in_words"] for result in results}
    about = results[-1]
    runs = max(result["run"] for result in results)
    values = ", ".join(f"{name} {value}" for name, value in about["settings"].items())
    best = "; ".join(f"{name} {setting}: {text}" for (name, setting), text in words.items())
    machine = f"{about['cores']} cores, PostgreSQL {about['postgres']} ({values}), Python {about['python']}"
    lines += [
        "",
        f"Runs: {runs}, in both orders; median (least to greatest). {about['date']}; {machine}.",
        f"Settings: {best}.",
        "",
    ]
    return "\n".join(lines)


def _cell(spread: tuple[float, float, float] | None) -> str:
    if spread is None:
        return ""
    middle, least, greatest = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in spread)
    return middle if least == greatest else f"{middle} ({least} to {greatest})"


def plot(results: list[Result]) -> list[Bars | Lines]:
    charts: list[Bars | Lines] = []
    for test, figure, label in ROWS:
        bars = medians([result for result in results if result["test"] == test], figure, "product")
        if bars and test != "snapshot":
            title, _, unit = label.rpartition(", ")
            charts.append(Bars(title, unit, {"": bars}))
    held = [result for result in results if result["test"] == "snapshot"]
    return [*charts, slices("Beside an open snapshot", held, "product")] if held else charts
