"""The log of what people and programs did to the queue, as statements."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pgqueue.sql import Row, Statement, first_value, load, nothing
from pgqueue.sql.inspect import JsonText

_SQL = load("audit")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that somebody did.

    `role` is the one that logged in, `actor` who was behind it, as they said themselves; `subject` is
    the name of the queue, limit, schedule or breaker, `jobs` how many jobs it was done to.
    """

    id: int
    at: datetime
    action: str
    subject: str | None
    jobs: int | None
    role: str
    actor: str | None
    application: str | None
    address: str | None
    session_pid: int
    details: JsonText
    seen_at: datetime


def act_as(actor: str) -> Statement[None]:
    """Say who is behind what the transaction does."""
    return Statement(_SQL["act_as"], {"actor": actor}, nothing)


def entries(
    action: str | None = None,
    subject: str | None = None,
    within_seconds: float | None = None,
    limit: int = 50,
) -> Statement[list[Entry]]:
    params = {"action": action, "subject": subject, "within_seconds": within_seconds, "limit": limit}
    return Statement(_SQL["entries"], params, lambda rows: list(map(_entry, rows)))


def prune(older_than_seconds: float) -> Statement[int]:
    return Statement(_SQL["prune"], {"older_than_seconds": older_than_seconds}, first_value)


def _entry(row: Row) -> Entry:
    *known, details, seen_at = row
    return Entry(*[*known, JsonText(details), seen_at])
