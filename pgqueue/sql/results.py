"""Looking at a job afterwards, as statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pgqueue.model.job import JobState
from pgqueue.sql import Row, Statement, load

_TEXT = load("results")


class Standing(NamedTuple):
    """Where a job stands; `reason` and `result` (JSON text) as far as it has ended."""

    state: JobState
    task: str
    reason: str | None
    result: str | None


def look_up(job_id: int) -> Statement[Standing | None]:
    """Find a job, live or ended; None if there is none, or not any more."""
    return Statement(_TEXT["look_up"], {"job_id": job_id}, _standing)


def _standing(found: Sequence[Row]) -> Standing | None:
    if not found:
        return None
    state, task, reason, result = found[0]
    return Standing(JobState(state), task, reason, result)
