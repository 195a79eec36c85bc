"""Every benchmark in its tiniest form: it runs to its end and says what it promises to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers.products import PRODUCTS
from bench.server import SETTINGS
from pgqueue import embedded
from tests.support import ROOT, open_folder

ABOUT = {"bench", "run", "pgqueue", "postgres", "python", "psycopg", "cores", "settings"}

SPENT = {"worker_cpu_us_per_job", "server_cpu_us_per_job"}
FLOW = {"jobs_per_second", "slices", "last_to_first", "p50_ms", "p99_ms", *SPENT}
TINY = {
    "throughput": (
        ("--jobs", "300", "--work-us", "50", "--profile"),
        1,
        {
            *("seconds", "jobs_per_second", "wal_bytes_per_job", "statements", "other_cores", *SPENT),
            *("ratio_to_raw_with_history", "ratio_to_raw_deleting", "ratio_to_work_alone"),
        },
    ),
    "steady": (("--seconds", "0.5", "--batches", "10", "--ahead", "100"), 1, FLOW),
    "snapshot": (("--seconds", "0.6", "--slice-seconds", "0.3", "--ahead", "100"), 2, FLOW),
    "latency": (
        ("--jobs", "5", "--pause-ms", "5", "--scheduled", "50"),
        4,
        {"case", "p50_ms", "p95_ms", "p99_ms"},
    ),
    "enqueue": (
        ("--jobs", "5", "--bulk", "20", "--batch", "10", "--large", "20"),
        9,
        {"case", "rows_per_second", "ratio"},
    ),
    "notify": (("--clients", "2", "--seconds", "1"), 1, {"case", "commits_per_second", "ratio"}),
    "backlog": (
        ("--jobs", "50", "--scale", "0.001", "--cases", "ready", "future", "finished", "blocked", "queues"),
        6,
        {"case", "in_the_way", "jobs_per_second", "ratio", *SPENT},
    ),
    "blocked": (
        ("--crowd", "200", "--jobs", "50"),
        1,
        {"seconds_alone", "seconds_behind_crowd", "seconds_to_park", "ratio"},
    ),
    "recovery": (("--lease-seconds", "3"), 2, {"case", "seconds", "lease_seconds"}),
    "scrape": (
        ("--jobs", "200", "--queues", "5", "--tasks", "6", "--restarts", "2", "--reads", "2"),
        2,
        {"case", "scrape_ms", "series", "database_cpu_ms", "database_wall_ms"},
    ),
}


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """Give the folder of a server that runs already: most of the time would be its start."""
    with open_folder() as folder, embedded.start(folder, settings=SETTINGS):
        yield folder


def bench(data: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a benchmark, once, and give its results."""
    ended = subprocess.run(
        [sys.executable, "-m", "bench", *arguments, "--runs", "1"],
        cwd=ROOT,
        env={**os.environ, "PGQUEUE_BENCH_DATA": str(data)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_says_what_it_measured_and_on_what_and_draws_it(
    name: str, data: Path, tmp_path: Path
) -> None:
    options, count, figures = TINY[name]

    results = bench(data, name, *options, "--plot", str(tmp_path / "plot.svg"))

    assert len(results) == count
    for result in results:
        assert {*ABOUT, *figures} <= set(result)
    assert ET.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")


def test_idle_workers_are_counted_and_a_busy_ones_memory_is_looked_at_after_each_number_of_jobs(
    data: Path,
) -> None:
    options = ("--workers", "1", "--seconds", "0.5", "--settle-seconds", "0", "--memory", "20", "60")

    idle, *busy = bench(data, "idle", *options)

    assert {
        *("statements_per_second_and_worker", "transactions_per_second_and_worker"),
        *("worker_cpu_ms_per_second_and_worker", "server_cpu_ms_per_second_and_worker"),
        *("connections_per_worker", "parent_resident_mb", *ABOUT),
    } <= set(idle)
    assert [look["case"] for look in busy] == ["after 20 jobs", "after 60 jobs"]
    assert all(look["resident_mb"] > 5 for look in busy)


def test_pgqueue_is_compared_by_the_same_tests_as_the_others(data: Path, tmp_path: Path) -> None:
    tests = ("drain", "latency", "enqueue")
    options = ("--tests", *tests, "--scale", "0.001")

    results = bench(data, "peers", "--products", "pgqueue", *options, "--table", str(tmp_path / "table.md"))

    assert [result["test"] for result in results] == list(tests)
    assert "| Drain of no-op jobs, at its best, jobs/s |" in (tmp_path / "table.md").read_text()


def test_the_table_has_a_column_for_each_product_and_medians_in_it(data: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    about = {
        "bench": "peers",
        "date": "2026-11-30",
        "cores": 2,
        "pgqueue": "1",
        "postgres": "18",
        "python": "3",
        "settings": {"fsync": "on"},
    }
    with lines.open("w") as file:
        for run, rates in enumerate(((100, 10), (300, 30), (200, 20)), 1):
            for product, rate in zip(PRODUCTS[:2], rates, strict=True):
                drain = {"test": "drain", "setting": "best", "jobs_per_second": rate, "run": run}
                named = {
                    "product": product.name,
                    "version": product.version,
                    "setting_in_words": product.settings["best"],
                }
                file.write(json.dumps({**about, **named, **drain}) + "\n")

    bench(data, "peers", "--lines", str(lines), "--table", str(tmp_path / "table.md"))

    first, second = PRODUCTS[:2]
    head, _, drains, *_, machine, settings = (tmp_path / "table.md").read_text().splitlines()
    assert head == f"| | {first.name} {first.version} | {second.name} {second.version} |"
    assert drains == "| Drain of no-op jobs, at its best, jobs/s | 200 (100 to 300) | 20 (10 to 30) |"
    assert machine.startswith("Runs: 3, in both orders")
    assert "2026-11-30" in machine
    assert "fsync on" in machine
    assert all(product.settings["best"] in settings for product in PRODUCTS[:2])


def test_every_other_product_has_an_adapter_and_a_version_that_is_installed() -> None:
    for product in PRODUCTS[1:]:
        assert (ROOT / f"bench/peers/{product.module}.{'mjs' if product.is_node else 'py'}").exists()
        assert any(product.version in package for package in product.packages)
