"""What an old open snapshot, as of a report or a dump, does to the speed of a queue in use."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import psycopg

from bench.flow import flow, fresh_place, slices
from bench.measure import Result, in_turn
from bench.peers.products import NOWHERE, PGQUEUE
from bench.plot import Lines
from bench.server import durable_server, surroundings

FIGURES = {"jobs_per_second": "jobs/s", "last_to_first": "of the first slice's rate in the last"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--slice-seconds", type=float, default=10)
    parser.add_argument("--batch", type=int, default=100, help="jobs of each enqueue call")
    parser.add_argument("--ahead", type=int, default=5000, help="jobs that wait at most")


def measure(*, seconds: float, slice_seconds: float, batch: int, ahead: int, runs: int) -> Iterator[Result]:
    """With the snapshot and without it, both orders in turn, each in a fresh database."""
    with durable_server() as server:
        for run in range(1, runs + 1):
            for is_held in in_turn((True, False), run):
                with fresh_place(server, PGQUEUE, "best", NOWHERE) as place:
                    found = flow(
                        place, seconds, batch=batch, ahead=ahead, slice_seconds=slice_seconds, is_held=is_held
                    )
                    with psycopg.connect(place.dsn) as connection:
                        about = surroundings(connection)
                case = "snapshot held" if is_held else "no snapshot"
                yield {"bench": "snapshot", "case": case, "run": run, **found, **about}


def plot(results: list[Result]) -> list[Lines]:
    return [slices("A producer and a worker at once, beside an open snapshot", results, "case")]
