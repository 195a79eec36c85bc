"""What comes too late touches nothing, and what comes in time is not lost to a row that has just moved."""

from __future__ import annotations

import threading
import uuid

import pytest

from tests.guarantees.support import patient_unblock, waits_for_a_lock
from tests.sql.support import Attempt, Session
from tests.support import wait_until

END = {
    "complete": lambda session, attempt: session.complete(attempt),
    "fail": lambda session, attempt: session.fail(attempt),
    "release": lambda session, attempt: session.release(attempt),
    "crash": lambda session, attempt: session.crash(attempt),
    "heartbeat": lambda session, attempt: [
        verdict for verdict in session.heartbeat(attempt).values() if verdict != "lost"
    ],
}


def everything(session: Session) -> list[tuple]:
    """Give every row that a late writer could spoil."""
    tables = ("jobs", "dead_jobs", "finished_jobs")
    return [session.rows(f"SELECT t::text FROM pgqueue.{table} AS t ORDER BY id") for table in tables]


def lose(session: Session, how: str) -> Attempt:
    """Give an attempt that its owner believes in and has lost."""
    job_id = session.enqueue(concurrency_key="k")
    (attempt,) = session.claim()
    if how == "reaped":
        session.expire(attempt)
        session.call("reap")
    elif how == "claimed again by the same worker":
        session.release(attempt)
        session.claim()
    elif how == "completed":
        session.complete(attempt)
    elif how == "dead":
        session.fail(attempt, is_dead=[True])
    elif how == "cancelled":
        session.cancel(job_id)
        session.release(attempt)
    else:
        session.claim()
        attempt = Attempt(job_id, uuid.uuid4())
    return Attempt(job_id, attempt.token)


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize(
    "how",
    ["reaped", "claimed again by the same worker", "completed", "dead", "cancelled", "never held"],
)
def test_what_comes_too_late_touches_nothing(session, how, end):
    attempt = lose(session, how)
    before = everything(session)

    got = END[end](session, attempt)

    assert not got
    assert everything(session) == before


@pytest.mark.parametrize("end", END)
def test_a_token_is_good_for_its_own_job_only(session, end):
    mine, theirs = session.enqueue(), session.enqueue()
    (first,) = session.claim(max_jobs=1)
    (second,) = session.claim(max_jobs=1)
    before = everything(session)

    got = END[end](session, Attempt(first.job_id, second.token))

    assert (first.job_id, second.job_id) == (mine, theirs)
    assert not got
    assert everything(session) == before


def test_of_a_mixed_batch_only_what_is_ours_is_written(session):
    lost = lose(session, "reaped")
    session.enqueue("other", queue="other")
    (held,) = session.claim("other")

    completed = session.complete(lost, held)

    assert completed == [held.job_id]
    assert session.state(lost.job_id) == "ready"


@pytest.mark.parametrize("end", ["complete", "fail", "release", "crash"])
def test_an_attempt_that_ends_while_a_heartbeat_moves_its_row_is_not_lost(session, open_session, end):
    session.enqueue()
    (attempt,) = session.claim()
    heart, ender = open_session(autocommit=False), open_session()
    heart.heartbeat(attempt)  # has moved the row, and has not committed
    got = []
    thread = threading.Thread(target=lambda: got.append(END[end](ender, attempt)))

    thread.start()
    wait_until(lambda: waits_for_a_lock(session, ender))
    heart.connection.commit()
    thread.join()

    assert len(got[0]) == 1


def test_a_statement_that_locks_and_changes_by_place_at_once_would_lose_it(session, open_session):
    """The control of the test before: this is why the functions take two statements."""
    session.enqueue()
    (attempt,) = session.claim()
    heart, ender = open_session(autocommit=False), open_session()
    heart.heartbeat(attempt)
    got = []
    naive = (
        "WITH held AS MATERIALIZED (SELECT ctid FROM pgqueue.jobs WHERE id = %s FOR NO KEY UPDATE) "
        "DELETE FROM pgqueue.jobs WHERE ctid = ANY (ARRAY(SELECT ctid FROM held)) RETURNING id"
    )
    thread = threading.Thread(target=lambda: got.append(ender.rows(naive, attempt.job_id)))

    thread.start()
    wait_until(lambda: waits_for_a_lock(session, ender))
    heart.connection.commit()
    thread.join()

    assert got == [[]]


def test_unblocking_outlasts_a_claim_that_holds_the_row_by_accident(session, open_session):
    """SKIP LOCKED locks before it looks: a job that stopped being ready is not returned, yet stays locked."""
    job_id = session.enqueue(concurrency_key="k")
    claimer, unblocker = open_session(autocommit=False), open_session()
    claimed, woken = [], []
    gate = open_session()
    gate.rows("SELECT pg_advisory_lock(1)")
    slow_claim = (
        "SELECT id FROM pgqueue.jobs WHERE state = 'ready' AND pg_advisory_lock(1) IS NOT NULL "
        "FOR NO KEY UPDATE SKIP LOCKED"
    )
    claim = threading.Thread(target=lambda: claimed.append(claimer.rows(slow_claim)))
    claim.start()
    wait_until(lambda: waits_for_a_lock(session, claimer))
    session.rows("UPDATE pgqueue.jobs SET state = 'blocked'")
    gate.rows("SELECT pg_advisory_unlock(1)")
    claim.join()
    lockable = session.rows("SELECT id FROM pgqueue.jobs WHERE id = %s FOR NO KEY UPDATE SKIP LOCKED", job_id)

    unblock = threading.Thread(target=lambda: woken.append(unblocker.call("unblock", keys=["k"])))
    # It tries for 50 ms, here for minutes, under the lock of the key; the claim's own lock is the other one.
    locks = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with patient_unblock(session, tries=100_000):
        unblock.start()
        wait_until(lambda: session.one(locks) == 2)
        claimer.connection.rollback()
        unblock.join()

    assert (claimed, lockable) == ([[]], [])
    assert woken == [[(1,)]]
    assert session.state(job_id) == "ready"


def test_the_sweep_mends_what_no_writer_will(session):
    parked_by_hand, waits = session.enqueue(concurrency_key="k"), session.enqueue(concurrency_key="full")
    session.rows("UPDATE pgqueue.jobs SET state = 'blocked' WHERE id = %s", parked_by_hand)
    (running,) = session.claim()
    session.rows("INSERT INTO pgqueue.jobs (task, state, concurrency_key) VALUES ('t', 'blocked', 'full')")

    first, second = session.call("sweep"), session.call("sweep")

    assert running.job_id == waits
    assert (first, second) == ([(1, None)], [(0, None)])
    assert session.state(parked_by_hand) == "ready"


def test_the_sweep_goes_round_all_keys_a_few_at_a_time(session):
    session.rows(
        "INSERT INTO pgqueue.jobs (task, state, concurrency_key) "
        "SELECT 't', 'blocked', 'k' || i FROM generate_series(1, 5) AS i"
    )
    seen, after = [], ""

    for _ in range(3):
        ((woken, after),) = session.call("sweep", after_key=after, max_keys=2)
        seen.append((woken, after))

    assert seen == [(2, "k2"), (2, "k4"), (1, None)]


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_a_job_that_was_parked_while_its_key_was_being_freed_is_woken(session, open_session, end):
    session.enqueue(concurrency_key="k")
    (attempt,) = session.claim()
    if end == "cancel":  # of a ready job, on which the blocked ones of its key rely
        session.complete(attempt)
        attempt = Attempt(session.enqueue(concurrency_key="k"), uuid.uuid4())
        session.rows("UPDATE pgqueue.jobs SET state = 'ready'")
    holder, ender = open_session(autocommit=False), open_session()
    holder.rows("SELECT FROM pgqueue.jobs WHERE id = %s FOR UPDATE", attempt.job_id)
    ending = threading.Thread(
        target=lambda: ender.cancel(attempt.job_id) if end == "cancel" else END[end](ender, attempt)
    )
    ending.start()
    wait_until(lambda: waits_for_a_lock(session, ender))
    parked = session.enqueue(concurrency_key="k")
    if end == "cancel":
        session.rows("UPDATE pgqueue.jobs SET state = 'blocked' WHERE id = %s", parked)
    else:
        assert session.claim() == []

    holder.connection.rollback()
    ending.join()

    assert session.state(parked) == "ready"
