"""What the demo asks the database, as statements."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from pgqueue.sql import Statement, column, first_value, load, nothing

_TEXT = load("demo")


class RunningAttempt(NamedTuple):
    pid: int
    job_id: int
    path: str


class CatalogueRow(NamedTuple):
    path: str
    bytes: int
    lines: int
    sha256: str
    definitions: list[str]


class DemoJob(NamedTuple):
    """Where a job of the demo is; `way` says how it was enqueued."""

    job_id: int
    task: str
    path: str | None
    way: str | None
    state: str
    crashes: int
    reason: str | None
    started_at: datetime | None
    ended_at: datetime | None


def take_stage() -> Statement[bool]:
    return Statement(_TEXT["take_stage"], {}, first_value)


def find_stranger(tasks: Sequence[str]) -> Statement[str | None]:
    return Statement(_TEXT["find_stranger"], {"tasks": list(tasks)}, first_value)


def clear(tasks: Sequence[str]) -> Statement[None]:
    return Statement(_TEXT["clear"], {"tasks": list(tasks)}, nothing)


def make_catalogue() -> Statement[None]:
    return Statement(_TEXT["make_catalogue"], {}, nothing)


def insert_jobs(paths: Sequence[str]) -> Statement[list[int]]:
    return Statement(_TEXT["insert_jobs"], {"paths": list(paths)}, column)


def start(job_id: int, attempt: int, pid: int, path: str) -> Statement[None]:
    return Statement(
        _TEXT["start"], {"job_id": job_id, "attempt": attempt, "pid": pid, "path": path}, nothing
    )


def end(job_id: int, attempt: int) -> Statement[None]:
    return Statement(_TEXT["end"], {"job_id": job_id, "attempt": attempt}, nothing)


def store(job_id: int, attempt: int, row: CatalogueRow) -> Statement[None]:
    return Statement(_TEXT["store"], {"job_id": job_id, "attempt": attempt, **row._asdict()}, nothing)


def pick_up(job_id: int) -> Statement[None]:
    return Statement(_TEXT["pick_up"], {"job_id": job_id}, nothing)


def running(pid: int | None = None) -> Statement[list[RunningAttempt]]:
    return Statement(
        _TEXT["running"], {"pid": pid}, lambda found: [RunningAttempt._make(row) for row in found]
    )


def count_remaining(since: int) -> Statement[int]:
    return Statement(_TEXT["count_remaining"], {"since": since}, first_value)


def catalogue() -> Statement[list[CatalogueRow]]:
    return Statement(_TEXT["catalogue"], {}, lambda found: [CatalogueRow._make(row) for row in found])


def outcomes(since: int) -> Statement[list[DemoJob]]:
    return Statement(_TEXT["outcomes"], {"since": since}, lambda found: [DemoJob._make(row) for row in found])


def pick_up_seconds() -> Statement[list[float]]:
    return Statement(_TEXT["pick_up_seconds"], {}, column)
