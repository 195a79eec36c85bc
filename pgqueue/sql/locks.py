"""Named locks, and who holds what, as statements."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from pgqueue.sql import Statement, first_value, load

_TEXT = load("locks")


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who holds something that others may wait for."""

    kind: str
    name: str | None
    job_id: int | None
    task: str | None
    worker_id: str | None
    pid: int | None
    client: str | None
    since: datetime | None
    seen_at: datetime


def try_session(name: str) -> Statement[bool]:
    """Give whether the lock is ours now."""
    return Statement(_TEXT["try_session"], {"name": name}, first_value)


def wait_session(name: str) -> Statement[bool]:
    return Statement(_TEXT["wait_session"], {"name": name}, first_value)


def unlock_session(name: str) -> Statement[bool]:
    return Statement(_TEXT["unlock_session"], {"name": name}, first_value)


def try_transaction(name: str) -> Statement[bool]:
    """Give whether the lock is ours now."""
    return Statement(_TEXT["try_transaction"], {"name": name}, first_value)


def wait_transaction(name: str) -> Statement[bool]:
    return Statement(_TEXT["wait_transaction"], {"name": name}, first_value)


def lock_timeout() -> Statement[str]:
    return Statement(_TEXT["lock_timeout"], {}, first_value)


def set_lock_timeout(value: str, *, is_local: bool) -> Statement[str]:
    return Statement(_TEXT["set_lock_timeout"], {"value": value, "is_local": is_local}, first_value)


def holders(max_rows: int = 200) -> Statement[list[Holder]]:
    return Statement(_TEXT["holders"], {"max_rows": max_rows}, lambda found: [Holder(*row) for row in found])
