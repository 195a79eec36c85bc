"""Effects that happen once, by their key, as statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pgqueue.sql import Statement, first_value, load

_TEXT = load("once")


class Begun(NamedTuple):
    """The database's word on beginning an effect; `response` is JSON text."""

    verdict: str
    response: str | None
    retry_seconds: float | None
    began: str | None


@dataclass(frozen=True, slots=True)
class Processed:
    """What became of a key; `response` is JSON text."""

    key: str
    job_name: str
    status: str
    response: str | None
    job_id: int | None
    claim_token: str | None
    created_at: datetime
    updated_at: datetime
    seen_at: datetime


def begin(
    key: str,
    job_name: str,
    token: str,
    job_id: int | None = None,
    *,
    may_take_over: bool = True,
    takeover_seconds: float = 600.0,
) -> Statement[Begun]:
    return Statement(
        _TEXT["begin"],
        {
            "key": key,
            "job_name": job_name,
            "token": token,
            "job_id": job_id,
            "may_take_over": may_take_over,
            "takeover_seconds": takeover_seconds,
        },
        lambda found: Begun._make(found[0]),
    )


def finish(
    key: str,
    token: str,
    job_id: int | None = None,
    response: str | None = None,
    reason: str | None = None,
    began: str | None = None,
) -> Statement[str]:
    return Statement(
        _TEXT["finish"],
        {
            "key": key,
            "token": token,
            "job_id": job_id,
            "response": response,
            "reason": reason,
            "began": began,
        },
        first_value,
    )


def settled(job_ids: Sequence[int], tokens: Sequence[str], keys: Sequence[str]) -> Statement[list[int]]:
    return Statement(
        _TEXT["settled"],
        {"job_ids": list(job_ids), "tokens": list(tokens), "keys": list(keys)},
        lambda found: [row[0] for row in found],
    )


def show(key: str) -> Statement[Processed | None]:
    return Statement(_TEXT["show"], {"key": key}, lambda found: Processed(*found[0]) if found else None)


def forget(key: str) -> Statement[str | None]:
    """Give the status that was forgotten, or None: no such key, or somebody is at it."""
    return Statement(_TEXT["forget"], {"key": key}, lambda found: found[0][0] if found else None)


def prune(older_than_seconds: float) -> Statement[int]:
    return Statement(_TEXT["prune"], {"older_than_seconds": older_than_seconds}, first_value)
