"""What a person does to jobs by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pgqueue.sql import Row, Statement, column, load, nothing

_SQL = load("operate")


@dataclass(frozen=True, slots=True)
class Pause:
    """A queue that is paused: until when (None: until it is resumed), and what was said why."""

    queue: str
    until: datetime | None
    reason: str | None
    seen_at: datetime


def cancel(job_ids: Sequence[int], reason: str) -> Statement[dict[int, str]]:
    """Cancel jobs; gives `cancelled` or `requested` for each one that was live."""
    return Statement(_SQL["cancel"], {"job_ids": list(job_ids), "reason": reason}, _outcomes)


def run_now(job_ids: Sequence[int]) -> Statement[list[int]]:
    """Make scheduled jobs ready; gives the ids of those that were."""
    return Statement(_SQL["run_now"], {"job_ids": list(job_ids)}, column)


def redrive(job_ids: Sequence[int], extra_attempts: int) -> Statement[dict[int, str]]:
    """Put dead letters back; gives `ready`, `unique_key_taken` or `not_found` for each id."""
    return Statement(_SQL["redrive"], {"job_ids": list(job_ids), "extra_attempts": extra_attempts}, _outcomes)


def purge_dead(job_ids: Sequence[int]) -> Statement[list[int]]:
    """Delete dead letters; gives the ids of those that were there."""
    return Statement(_SQL["purge_dead"], {"job_ids": list(job_ids)}, column)


def pause_queues(
    queues: Sequence[str] | None, seconds: float | None, until: datetime | None, reason: str | None
) -> Statement[list[str]]:
    """Pause these queues, or all that are not yet, for so long or until then; gives their names."""
    params = {
        "queues": None if queues is None else list(queues),
        "seconds": seconds,
        "until": until,
        "reason": reason,
    }
    return Statement(_SQL["pause_queues"], params, column)


def resume_queues(
    queues: Sequence[str] | None, max_running: int | None, reason: str | None
) -> Statement[list[str]]:
    """Resume these queues, or all that are paused, for this reason if it is given; gives their names."""
    params = {
        "queues": None if queues is None else list(queues),
        "max_running": max_running,
        "reason": reason,
    }
    return Statement(_SQL["resume_queues"], params, column)


def list_pauses() -> Statement[list[Pause]]:
    return Statement(_SQL["list_pauses"], {}, lambda found: [Pause(*row) for row in found])


def limit_queue(queue: str, max_running: int | None, reason: str | None) -> Statement[None]:
    params = {"queue": queue, "max_running": max_running, "reason": reason}
    return Statement(_SQL["limit_queue"], params, nothing)


def _outcomes(rows: Sequence[Row]) -> dict[int, str]:
    return {row[0]: row[1] for row in rows}
