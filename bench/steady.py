"""How many jobs a second go through a producer and a worker at work at once, and how long each waits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import psycopg

from bench.flow import flow, fresh_place
from bench.measure import Result, medians
from bench.peers.products import NOWHERE, PGQUEUE
from bench.plot import Bars
from bench.server import durable_server, surroundings

FIGURES = {"jobs_per_second": "jobs/s", "p50_ms": "ms p50", "p99_ms": "ms p99"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[100, 1], help="jobs of each enqueue call")
    parser.add_argument("--ahead", type=int, default=5000, help="jobs that wait at most")
    parser.add_argument("--setting", choices=("default", "best"), default="best")


def measure(*, seconds: float, batches: list[int], ahead: int, setting: str, runs: int) -> Iterator[Result]:
    """Each size of batch in a fresh database, in each run."""
    with durable_server() as server:
        for run in range(1, runs + 1):
            for batch in batches:
                with fresh_place(server, PGQUEUE, setting, NOWHERE) as place:
                    found = flow(place, seconds, batch=batch, ahead=ahead, slice_seconds=seconds)
                    with psycopg.connect(place.dsn) as connection:
                        about = surroundings(connection)
                yield {
                    "bench": "steady",
                    "case": f"batches of {batch}" if batch > 1 else "one by one",
                    "run": run,
                    "setting": setting,
                    **found,
                    **about,
                }


def plot(results: list[Result]) -> list[Bars]:
    waits = {f"p{percent}": medians(results, f"p{percent}_ms", "case") for percent in (50, 99)}
    return [
        Bars("A producer and a worker at once", "jobs/s", {"": medians(results, "jobs_per_second", "case")}),
        Bars("From the enqueue call to the start of the handler", "ms", waits),
    ]
