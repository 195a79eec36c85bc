"""What the payments demo asks the database, as statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pgqueue.sql import Statement, first_value, load, nothing

_TEXT = load("demo_payments")


class Transfer(NamedTuple):
    """One movement of money."""

    transfer: int
    source: int
    target: int
    cents: int


class Ended(NamedTuple):
    """How many jobs of a task ended in a state, and how many of them not at the first try."""

    task: str
    state: str
    jobs: int
    again: int


def clear(tasks: Sequence[str], breaker: str) -> Statement[None]:
    return Statement(_TEXT["clear"], {"tasks": list(tasks), "breaker": breaker}, nothing)


def find_stranger(tasks: Sequence[str]) -> Statement[str | None]:
    return Statement(_TEXT["find_stranger"], {"tasks": list(tasks)}, first_value)


def open_accounts() -> Statement[None]:
    return Statement(_TEXT["open_accounts"], {}, nothing)


def fill_accounts(accounts: int, cents: int) -> Statement[None]:
    return Statement(_TEXT["fill_accounts"], {"accounts": accounts, "cents": cents}, nothing)


def lock_accounts(ids: Sequence[int]) -> Statement[None]:
    return Statement(_TEXT["lock_accounts"], {"ids": list(ids)}, nothing)


def move(what: Transfer, job_id: int, attempt: int) -> Statement[None]:
    return Statement(_TEXT["move"], {**what._asdict(), "job_id": job_id, "attempt": attempt}, nothing)


def insert_job(args: str) -> Statement[None]:
    return Statement(_TEXT["insert_job"], {"args": args}, nothing)


def count_remaining() -> Statement[int]:
    return Statement(_TEXT["count_remaining"], {}, first_value)


def balances() -> Statement[dict[int, int]]:
    return Statement(_TEXT["balances"], {}, lambda found: {row[0]: row[1] for row in found})


def transfers() -> Statement[list[Transfer]]:
    return Statement(_TEXT["transfers"], {}, lambda found: [Transfer._make(row) for row in found])


def outcomes(since: int) -> Statement[list[Ended]]:
    return Statement(_TEXT["outcomes"], {"since": since}, lambda found: [Ended._make(row) for row in found])


def next_job_id() -> Statement[int]:
    return Statement(_TEXT["next_job_id"], {}, first_value)


def breaker(name: str) -> Statement[tuple[str, int] | None]:
    return Statement(
        _TEXT["breaker"], {"breaker": name}, lambda found: (found[0][0], found[0][1]) if found else None
    )
