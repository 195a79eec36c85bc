"""What a person does to jobs by hand."""

from __future__ import annotations

from collections.abc import Sequence

from pgqueue.sql import Row, Statement, column, load

_SQL = load("operate")


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


def _outcomes(rows: Sequence[Row]) -> dict[int, str]:
    return {row[0]: row[1] for row in rows}
