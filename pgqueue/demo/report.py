"""What the demo found out, as a value: from what the database says, not from what we think we did."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.sql.demo import CatalogueRow, DemoJob, RunningAttempt


@dataclass(frozen=True, slots=True)
class DeadFile:
    """A file whose job is dead, and the reason in a line."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What came out; all is well if `differences` is empty.

    `ways` counts the jobs by how they were enqueued. `ran_again` are those whose process died.
    A pick-up is the time from a job's insert to its handler, None if there was none to measure.
    """

    python: str
    files: int
    bytes: int
    lines: int
    definitions: int
    jobs: int
    ways: dict[str, int]
    succeeded: int
    dead: list[DeadFile]
    killed_pid: int | None
    killed_while_reading: list[str]
    ran_again: int
    work_seconds: float
    jobs_per_second: float
    pick_ups: int
    pick_up_p50_ms: float | None
    pick_up_p95_ms: float | None
    total_seconds: float
    differences: list[str]


def make_report(
    catalogue: Sequence[CatalogueRow],
    jobs: Sequence[DemoJob],
    killed: Sequence[RunningAttempt],
    pick_up_seconds: Sequence[float],
    total_seconds: float,
    differences: list[str],
) -> Report:
    about_files = [job for job in jobs if job.path is not None]
    work_seconds = _work_seconds(about_files)
    return Report(
        python=platform.python_version(),
        files=len(catalogue),
        bytes=sum(row.bytes for row in catalogue),
        lines=sum(row.lines for row in catalogue),
        definitions=sum(len(row.definitions) for row in catalogue),
        jobs=len(about_files),
        ways=dict(Counter(job.way or "unknown" for job in about_files)),
        succeeded=sum(job.state == "succeeded" for job in about_files),
        dead=[DeadFile(job.path or "", _headline(job)) for job in about_files if job.state == "dead"],
        killed_pid=killed[0].pid if killed else None,
        killed_while_reading=[attempt.path for attempt in killed],
        ran_again=sum(job.crashes > 0 for job in about_files),
        work_seconds=round(work_seconds, 2),
        jobs_per_second=round(len(about_files) / work_seconds, 1) if work_seconds else 0.0,
        pick_ups=len(pick_up_seconds),
        pick_up_p50_ms=_percentile_ms(pick_up_seconds, 0.5),
        pick_up_p95_ms=_percentile_ms(pick_up_seconds, 0.95),
        total_seconds=round(total_seconds, 1),
        differences=differences,
    )


def _headline(job: DemoJob) -> str:
    """Give the reason of a dead job in a line: what its handler raised, without the traceback."""
    return (job.reason or "").partition("\n")[0].removeprefix("Unrecoverable: ")


def _work_seconds(jobs: Sequence[DemoJob]) -> float:
    """Give the time from the first claim to the last end, by the database's clock."""
    started = [job.started_at for job in jobs if job.started_at]
    ended = [job.ended_at for job in jobs if job.ended_at]
    return (max(ended) - min(started)).total_seconds() if started and ended else 0.0


def _percentile_ms(seconds: Sequence[float], share: float) -> float | None:
    if not seconds:
        return None
    return round(1000 * sorted(seconds)[round(share * (len(seconds) - 1))], 2)
