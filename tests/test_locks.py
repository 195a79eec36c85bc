"""`app.lock`: one holder at a time, by a name of the application's own."""

from __future__ import annotations

import asyncio
import threading
import time

import psycopg
import pytest

import pgqueue
from pgqueue import admin
from tests.support import wait_until


@pytest.fixture
def app(fast_dsn):
    with pgqueue.App(fast_dsn) as made:
        yield made


def sessions(conn):
    return conn.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'pgqueue lock %'"
    ).fetchone()[0]


def test_one_holder_at_a_time(app):
    with app.lock("report") as held:
        assert held.is_held
        with pytest.raises(pgqueue.LockBusy, match="somebody else held the lock 'report'; see who"):
            app.lock("report").__enter__()
        with app.lock("another"):
            pass

    assert not held.is_held
    with app.lock("report"):
        pass


def test_trying_says_false_instead_of_raising(app):
    first, second = app.lock("report"), app.lock("report")

    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()


def test_a_wait_ends_with_the_lock_or_with_its_time(app, fast_dsn, connect):
    holder = app.lock("report")
    holder.acquire()
    with pytest.raises(pgqueue.LockBusy, match=r"for 0.2 s"):
        app.lock("report", wait_seconds=0.2).__enter__()
    conn = connect(fast_dsn)
    waiting = app.lock("report", wait_seconds=None)
    got = []
    thread = threading.Thread(target=lambda: got.append(waiting.acquire()))
    thread.start()
    wait_until(
        lambda: conn.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        ).fetchone()[0]
    )

    holder.release()
    thread.join(60)

    assert got == [True]
    waiting.release()


def test_a_lock_without_a_holder_leaves_no_session(app, fast_dsn, connect):
    conn = connect(fast_dsn)
    with app.lock("report"):
        assert not app.lock("report").acquire()
        wait_until(lambda: sessions(conn) == 1)

    wait_until(lambda: sessions(conn) == 0)


def test_a_holder_whose_session_was_ended_knows_it_and_the_lock_is_free(app, fast_dsn, connect):
    conn = connect(fast_dsn)
    with app.lock("report") as held:
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE application_name = 'pgqueue lock report'"
        )

        wait_until(lambda: not held.is_held)
        with app.lock("report"):
            pass


def test_a_holder_is_seen_by_its_locks_name_whatever_the_dsn_calls_itself(fast_dsn, connect):
    conn = connect(fast_dsn)
    named = psycopg.conninfo.make_conninfo(fast_dsn, application_name="shop")

    with pgqueue.App(named) as app, app.lock("report"):
        assert sessions(conn) == 1


def test_on_a_connection_of_the_callers_it_ends_with_the_transaction(app, fast_dsn, connect):
    conn = connect(fast_dsn, autocommit=False)
    with app.lock("report", conn=conn):
        conn.execute("SELECT 1")
    assert not app.lock("report").acquire()

    conn.commit()

    with app.lock("report"):
        pass


@pytest.mark.parametrize("wait_seconds", [0, 0.2, None])
def test_a_connection_without_a_transaction_that_could_hold_it_is_refused(
    app, fast_dsn, connect, wait_seconds
):
    conn = connect(fast_dsn)
    lock = app.lock("report", wait_seconds=wait_seconds, conn=conn)

    with pytest.raises(pgqueue.ConfigurationError, match=r"'report': .*with conn\.transaction\(\)"):
        lock.acquire()
    assert not lock.is_held

    with conn.transaction(), lock:
        assert lock.is_held
        assert not app.lock("report").acquire()
    assert not lock.is_held
    with app.lock("report"):
        pass


def test_a_lock_of_a_transaction_is_held_from_its_acquire_to_the_transactions_end(app, fast_dsn, connect):
    conn = connect(fast_dsn, autocommit=False)
    conn.execute("SELECT 1")
    lock, other = app.lock("report", conn=conn), app.lock("another", conn=conn)
    with app.lock("another"):
        refused = other.acquire()
    before = lock.is_held

    lock.acquire()
    taken = lock.is_held
    lock.release()
    released = lock.is_held
    conn.rollback()

    assert (refused, other.is_held, before, taken, released, lock.is_held) == (
        False,
        False,
        False,
        True,
        True,
        False,
    )


def test_settings_of_a_role_neither_cut_a_wait_short_nor_end_a_lock(app, fast_dsn, connect):
    conn = connect(fast_dsn)
    settings = {
        "statement_timeout": "1s",
        "idle_session_timeout": "1s",
        "idle_in_transaction_session_timeout": "1s",
        "transaction_timeout": "1s",
        "lock_timeout": "100ms",
    }
    if conn.info.server_version < 170_000:
        del settings["transaction_timeout"]
    conn.execute("CREATE ROLE hasty LOGIN SUPERUSER")
    try:
        for name, value in settings.items():
            conn.execute(f"ALTER ROLE hasty SET {name} = '{value}'")
        hasty = pgqueue.App(psycopg.conninfo.make_conninfo(fast_dsn, user="hasty"))
        with app.lock("report"):
            began_at = time.monotonic()
            assert not hasty.lock("report", wait_seconds=2.0).acquire()
            assert time.monotonic() - began_at >= 2.0
            assert not asyncio.run(hasty.alock("report", wait_seconds=1.5).acquire())
        with hasty.lock("report") as held:
            # Longer than any of the role's limits.
            assert not app.lock("report", wait_seconds=1.5).acquire()
            assert held.is_held
    finally:
        conn.execute("DROP ROLE hasty")


@pytest.mark.parametrize("wait_seconds", [0, 0.2])
def test_a_transaction_that_did_not_get_the_lock_is_still_good(app, fast_dsn, connect, wait_seconds):
    conn = connect(fast_dsn, autocommit=False)
    conn.execute("SET LOCAL lock_timeout = '7s'")
    with app.lock("report"):
        assert not app.lock("report", wait_seconds=wait_seconds, conn=conn).acquire()

    assert app.lock("report", wait_seconds=wait_seconds, conn=conn).acquire()
    assert conn.execute("SELECT current_setting('lock_timeout')").fetchone()[0] == "7s"


def test_the_async_form_does_the_same(app, fast_dsn):
    async def come():
        async with app.alock("report") as held:
            assert held.is_held
            assert not await app.alock("report", wait_seconds=0.1).acquire()
            async with await psycopg.AsyncConnection.connect(fast_dsn) as conn:
                assert not await app.alock("report", conn=conn).acquire()
                assert not await app.alock("report", wait_seconds=0.1, conn=conn).acquire()
                assert await app.alock("other", wait_seconds=0.1, conn=conn).acquire()
        assert not held.is_held
        async with app.alock("report", wait_seconds=None):
            pass

    asyncio.run(come())


def test_the_async_form_refuses_a_connection_without_a_transaction_too(app, fast_dsn):
    async def come():
        async with await psycopg.AsyncConnection.connect(fast_dsn, autocommit=True) as conn:
            lock = app.alock("report", conn=conn)
            with pytest.raises(pgqueue.ConfigurationError, match=r"with conn\.transaction\(\)"):
                await lock.acquire()
            before = lock.is_held
            async with conn.transaction(), lock:
                return before, lock.is_held

    assert asyncio.run(come()) == (False, True)


def test_a_release_that_is_cancelled_half_way_still_gives_the_lock_back(app, fast_dsn, connect):
    conn = connect(fast_dsn)

    async def come():
        lock = app.alock("report")
        await lock.acquire()
        releasing = asyncio.create_task(lock.release())
        await asyncio.sleep(0)  # it has begun
        releasing.cancel()
        await asyncio.wait([releasing])
        # It is kept by nobody but the loop, as long as this waits.
        await asyncio.to_thread(wait_until, lambda: sessions(conn) == 0)

    asyncio.run(come())


@pytest.mark.parametrize("name", ["", "x" * 201, "nul \x00", None])
def test_a_name_that_is_none_is_refused(app, name):
    with pytest.raises(pgqueue.ConfigurationError, match="a lock's name"):
        app.lock(name)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "1", True])
def test_a_wait_that_makes_no_sense_is_refused(app, seconds):
    with pytest.raises(pgqueue.ConfigurationError, match="wait_seconds"):
        app.lock("report", wait_seconds=seconds)


def test_an_operator_sees_who_holds_what(app, fast_dsn, connect):
    conn = connect(fast_dsn)
    conn.execute(
        "SELECT pgqueue.enqueue('send', '{}', concurrency_key => 'user:1'),"
        " pgqueue.enqueue('mail', '{}', idempotency_key => 'mail:1')"
    )
    jobs = conn.execute(
        "SELECT job_id, token, task FROM pgqueue.claim('default', gen_random_uuid(), 10) ORDER BY job_id"
    ).fetchall()
    conn.execute("SELECT pgqueue.begin_once('mail:1', 'mail', %s, %s)", (jobs[1][1], jobs[1][0]))

    with app.lock("nightly report"):
        found = {(one.kind, one.name, one.job_id) for one in admin.list_holders(conn)}

    assert found == {
        ("concurrency key", "user:1", jobs[0][0]),
        ("idempotency key", "mail:1", jobs[1][0]),
        ("lock", "nightly report", None),
    }
