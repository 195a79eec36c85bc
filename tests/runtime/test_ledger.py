"""What a worker holds, and how much it claims ahead."""

from __future__ import annotations

from typing import Any, cast

from pgqueue.runtime.ledger import MAX_AHEAD, Ledger, Pool
from pgqueue.sql.attempts import ClaimedRow

CHILD: Any = cast("Any", None)


def row(job_id: int, attempt: int = 1) -> ClaimedRow:
    return ClaimedRow(job_id, "t", attempt, "touch", "{}", None, 0, "", True, 300.0, 5, 0, None, None, 0.0)


def test_nothing_is_claimed_ahead_before_anything_is_known() -> None:
    assert Pool(10, ["q"]).ahead() == 0


def test_short_jobs_are_claimed_ahead_and_long_ones_are_not() -> None:
    short, long = Pool(10, ["q"]), Pool(10, ["q"])
    for _ in range(100):
        short.observe(0.0001)
        long.observe(0.5)

    assert short.ahead() == MAX_AHEAD
    assert long.ahead() == 0


def test_one_long_job_among_short_ones_stops_the_claiming_ahead_at_once() -> None:
    pool = Pool(10, ["q"])
    for _ in range(100):
        pool.observe(0.0001)
    pool.observe(5.0)

    assert pool.ahead() == 0


def test_a_slot_is_free_when_its_handler_has_ended_not_when_the_database_knows() -> None:
    pool = Pool(2, ["q"])
    ledger = Ledger([pool])
    (held,), _ = ledger.take([row(1)], "q", pool, CHILD, 0.0)
    assert pool.in_flight == 1

    ledger.free(held)
    assert (pool.in_flight, len(ledger.held)) == (0, 1)
    ledger.forget(held)
    assert (pool.in_flight, len(ledger.held)) == (0, 0)


def test_a_job_claimed_again_names_its_older_attempt() -> None:
    pool = Pool(2, ["q"])
    ledger = Ledger([pool])
    (older,), none = ledger.take([row(1)], "q", pool, CHILD, 0.0)
    (newer,), found = ledger.take([row(1, attempt=2)], "q", pool, CHILD, 0.0)

    assert none == []
    assert found == [older]
    ledger.forget(older)
    assert ledger.take([row(1, attempt=3)], "q", pool, CHILD, 0.0)[1] == [newer]
