"""`pgqueue.once`: something happens once for a key, without a worker."""

from __future__ import annotations

import asyncio
import threading

import psycopg
import pytest

import pgqueue
from pgqueue import admin


@pytest.fixture
def conn(fast_dsn, connect):
    opened = connect(fast_dsn)
    opened.execute("DROP TABLE IF EXISTS paid")
    opened.execute("CREATE TABLE paid (who text)")
    yield opened
    opened.rollback()
    opened.execute("DROP TABLE paid")


def paid(conn):
    return conn.execute("SELECT count(*) FROM paid").fetchone()[0]


def pay(conn, key="charge:1", response=None, *, fails=False):
    with pgqueue.once(conn, key, "charge") as claim:
        if claim.is_done:
            return claim.response
        conn.execute("INSERT INTO paid VALUES ('you')")
        claim.response = response
        if fails:
            raise ZeroDivisionError
    return "paid now"


def test_it_happens_once_and_the_answer_is_kept(conn):
    said = [pay(conn, response={"receipt": 7}) for _ in range(3)]

    assert said == ["paid now", {"receipt": 7}, {"receipt": 7}]
    assert paid(conn) == 1


def test_what_raises_has_not_happened(conn):
    with pytest.raises(ZeroDivisionError):
        pay(conn, fails=True)

    assert paid(conn) == 0
    assert pay(conn) == "paid now"


def test_inside_the_callers_transaction_it_shares_its_fate(fast_dsn, conn, connect):
    other = connect(fast_dsn, autocommit=False)
    other.execute("SELECT 1")
    pay(other)
    other.rollback()

    assert paid(conn) == 0
    assert pay(conn) == "paid now"


def test_who_comes_while_somebody_is_at_it_is_told_so(fast_dsn, conn, connect):
    other = connect(fast_dsn)
    with pgqueue.once(conn, "charge:1", "charge"):
        with pytest.raises(pgqueue.KeyBusy, match="'charge:1' just now; try again later"):
            pay(other)
        conn.execute("INSERT INTO paid VALUES ('you')")

    assert pay(other, response="x") is None
    assert paid(conn) == 1


def test_of_fifty_at_once_one_does_it(fast_dsn, conn):
    said = []

    def come():
        with psycopg.connect(fast_dsn, autocommit=True) as own:
            try:
                said.append(pay(own))
            except pgqueue.KeyBusy:
                said.append("busy")

    threads = [threading.Thread(target=come) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(said) == 50
    assert said.count("paid now") == 1
    assert paid(conn) == 1


def test_the_async_form_does_the_same(fast_dsn, conn):
    async def come():
        async with await psycopg.AsyncConnection.connect(fast_dsn, autocommit=True) as own:
            async with pgqueue.aonce(own, "charge:1", "charge") as claim:
                if claim.is_done:
                    return claim.response
                await own.execute("INSERT INTO paid VALUES ('you')")
                claim.response = ["receipt"]
            return "paid now"

    async def come_twice():
        return [await come(), await come()]

    assert asyncio.run(come_twice()) == ["paid now", ["receipt"]]
    assert paid(conn) == 1


def test_a_response_that_is_no_json_is_refused_and_nothing_has_happened(conn):
    with pytest.raises(pgqueue.ConfigurationError, match="key 'charge:1': response: "):
        pay(conn, response=object())

    assert paid(conn) == 0


@pytest.mark.parametrize("key", ["", "x" * 256, "nul \x00", 7])
def test_a_key_that_is_none_is_refused(conn, key):
    with pytest.raises(pgqueue.ConfigurationError, match="the key"):
        pay(conn, key=key)


def test_an_operator_sees_and_forgets_a_key(conn):
    pay(conn, response="receipt")

    shown = admin.show_processed(conn, "charge:1")
    forgotten = [admin.forget_processed(conn, "charge:1") for _ in range(2)]

    assert shown is not None
    assert (shown.job_name, shown.status, shown.response, shown.job_id) == (
        "charge",
        "COMPLETED",
        '"receipt"',
        None,
    )
    assert forgotten == [True, False]
    assert pay(conn) == "paid now"


def test_a_key_that_somebody_is_at_is_not_forgotten(fast_dsn, conn, connect):
    pay(conn)
    other = connect(fast_dsn)
    with pgqueue.once(other, "charge:1", "charge"):
        assert not admin.forget_processed(conn, "charge:1")
