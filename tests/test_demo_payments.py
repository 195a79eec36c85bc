"""`pgqueue demo payments`: money moves once, and the check would find a cent that did not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from pgqueue.demo.payments.bank import open_bank
from pgqueue.demo.payments.course import ACCOUNTS, OPENING_CENTS, find_differences
from pgqueue.sql.demo_payments import Transfer
from tests.support import make_database, run_pgqueue

TRANSFERS = 500


@pytest.fixture(scope="module")
def ran(postgres: Any, postgresql_noproc: Any) -> Iterator[dict[str, Any]]:
    with make_database(postgres.dsn, postgresql_noproc.template_dbname) as dsn:
        ended = run_pgqueue("demo", "payments", "--transfers", str(TRANSFERS), "--json", dsn=dsn, seconds=300)
        assert ended.returncode == 0, ended.stderr
        yield json.loads(ended.stdout)


def test_every_transfer_is_made_once_although_it_was_asked_for_twice(ran: dict[str, Any]) -> None:
    assert ran["differences"] == []
    assert (ran["asked"], ran["transfers"], ran["repeated"]) == (2 * TRANSFERS, TRANSFERS, TRANSFERS)
    assert ran["settled"] == TRANSFERS


def test_meanwhile_processes_died_and_the_bank_was_away(ran: dict[str, Any]) -> None:
    assert ran["killed_children"] > 0
    assert ran["killed_workers"] == 1
    assert ran["bank_refused"] > 0
    # Opened, let a probe through, closed.
    assert ran["breaker_changes"] >= 3


# The check itself.

WANTED = [Transfer(1, 1, 2, 500), Transfer(2, 2, 3, 1)]
RIGHT = {
    **dict.fromkeys(range(1, ACCOUNTS + 1), OPENING_CENTS),
    1: OPENING_CENTS - 500,
    2: OPENING_CENTS + 499,
    3: OPENING_CENTS + 1,
}
BOOKED = {"demo:settle:1": (1, 500), "demo:settle:2": (2, 1)}


def test_what_is_right_makes_no_difference() -> None:
    assert find_differences(WANTED, WANTED, RIGHT, BOOKED) == []


@pytest.mark.parametrize(
    ("moved", "balances", "booked", "found"),
    [
        (WANTED[:1], RIGHT, BOOKED, ["transfer 2 was made 0 times"]),
        ([*WANTED, WANTED[0]], RIGHT, BOOKED, ["transfer 1 was made 2 times"]),
        ([*WANTED, Transfer(3, 1, 2, 9)], RIGHT, BOOKED, ["cents=9): nobody asked for that"]),
        (
            WANTED,
            {**RIGHT, 1: RIGHT[1] + 1},
            BOOKED,
            ["account 1 has 999501 cents, not 999500", "money was made or lost"],
        ),
        (WANTED, RIGHT, {"demo:settle:1": (1, 500)}, ["the bank never heard of demo:settle:2"]),
        (WANTED, RIGHT, {**BOOKED, "x": (9, 9)}, ["the bank was told (9, 9) under x"]),
    ],
)
def test_each_way_of_going_wrong_is_found(
    moved: list[Transfer], balances: dict[int, int], booked: dict[str, tuple[int, int]], found: list[str]
) -> None:
    differences = find_differences(WANTED, moved, balances, booked)

    assert len(differences) == len(found)
    assert all(part in difference for part, difference in zip(found, differences, strict=True))


def test_the_bank_books_a_key_once_and_says_so_when_it_is_away() -> None:
    def tell(cents: int) -> int:
        said = json.dumps({"key": "k", "transfer": 1, "cents": cents}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(bank.url, said), timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    with open_bank() as bank:
        assert [tell(5), tell(5)] == [200, 200]
        assert (bank.booked, bank.repeated, bank.contradicted) == ({"k": (1, 5)}, 1, [])
        assert tell(6) == 200
        assert bank.contradicted == ["k"]
        bank.go_away()
        assert tell(5) == 503
        bank.come_back()
        assert tell(5) == 200
