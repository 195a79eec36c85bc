"""Who did what to the queue: paused, cancelled, redrove, changed a limit.

The database writes it down, in the transaction that does it, whoever asks in whatever language.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pgqueue.database import Connection, run
from pgqueue.sql import audit
from pgqueue.sql.audit import Entry
from pgqueue.sql.inspect import JsonText

__all__ = ["Entry", "read_log"]

# A run over many jobs commits in batches, each with an entry of its own.
_ONE_RUN_SECONDS = 60.0
_MOST_BATCHES = 20


def read_log(
    connection: Connection[Any],
    *,
    action: str | None = None,
    subject: str | None = None,
    within_seconds: float | None = None,
    limit: int = 50,
    schema: str = "pgqueue",
) -> list[Entry]:
    """Give what was done, the latest first; the batches of one run over many jobs are one entry.

    `action` is one such as `queue.pause`, or a kind such as `queue`; `subject` the name of a queue, a
    limit, a schedule or a breaker.
    """
    statement = audit.entries(action, subject, within_seconds, limit * _MOST_BATCHES)
    entries = run(connection, statement, schema)
    return list(_runs(entries))[:limit]


def _runs(entries: Iterable[Entry]) -> Iterator[Entry]:
    later: Entry | None = None
    for entry in entries:
        if later is not None and _is_same_run(entry, later):
            later = replace(entry, jobs=(entry.jobs or 0) + (later.jobs or 0), details=_sum(entry, later))
            continue
        if later is not None:
            yield later
        later = entry
    if later is not None:
        yield later


def _is_same_run(entry: Entry, later: Entry) -> bool:
    return (
        entry.jobs is not None
        and _of_whom(entry) == _of_whom(later)
        and (later.at - entry.at).total_seconds() <= _ONE_RUN_SECONDS
    )


def _of_whom(entry: Entry) -> tuple[object, ...]:
    reason = json.loads(entry.details).get("reason")
    return entry.action, entry.role, entry.actor, entry.application, entry.session_pid, reason


def _sum(entry: Entry, later: Entry) -> JsonText:
    details, more = json.loads(entry.details), json.loads(later.details)
    if asked := details.get("asked_to_stop", 0) + more.get("asked_to_stop", 0):
        details["asked_to_stop"] = asked
    return JsonText(json.dumps(details))
