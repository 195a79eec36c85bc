"""No two writers of the queue ever wait for each other, whatever jobs they meet in whatever order."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.guarantees.support import Crowd, waits_for_a_lock
from tests.sql.support import Attempt, Session
from tests.support import wait_until


def some_running(session: Session, count: int) -> list[Attempt]:
    rows = session.rows(
        "SELECT id, claim_token FROM pgqueue.jobs WHERE state = 'running' ORDER BY random() LIMIT 40"
    )
    return [Attempt(*row) for row in rows][:count]


def claim(session: Session, seen: Counter[str]) -> None:
    seen["claimed"] += len(session.claim("q", 50, lease_seconds=0.3))
    session.call("promote")


def complete(session: Session, seen: Counter[str]) -> None:
    seen["completed"] += len(session.complete(*some_running(session, 15)))


def fail(session: Session, seen: Counter[str]) -> None:
    seen["failed"] += len(session.fail(*some_running(session, 10), base_seconds=0))


def crash(session: Session, seen: Counter[str]) -> None:
    seen["crashed"] += len(session.crash(*some_running(session, 5), max_crashes=1000))


def release(session: Session, seen: Counter[str]) -> None:
    seen["released"] += len(session.release(*some_running(session, 10)))


def heartbeat(session: Session, seen: Counter[str]) -> None:
    seen["renewed"] += len(session.heartbeat(*some_running(session, 40)))


def reap(session: Session, seen: Counter[str]) -> None:
    seen["reaped"] += len(session.call("reap", max_jobs=20, base_seconds=0, max_crashes=1000))
    session.call("sweep")


def cancel_and_enqueue(session: Session, seen: Counter[str]) -> None:
    ids = [row[0] for row in session.rows("SELECT id FROM pgqueue.jobs ORDER BY random() LIMIT 6")]
    seen["cancelled"] += len(session.cancel(*ids))
    dead = [row[0] for row in session.rows("SELECT id FROM pgqueue.dead_jobs ORDER BY random() LIMIT 20")]
    session.redrive(*dead)
    unique = {"unique_key": f"u{random.randrange(5)}", "on_conflict": "replace"}
    session.enqueue_many(
        *({"task": "t", "queue": "q", "concurrency_key": f"k{random.randrange(10)}"} for _ in range(12)),
        *(
            {"task": "t", "queue": "q", "concurrency_key": f"k{random.randrange(10)}", **unique}
            for _ in range(2)
        ),
    )


def change_in_no_order(session: Session, _seen: Counter[str]) -> None:
    with session.connection.transaction():
        for attempt in some_running(session, 15):
            session.rows("UPDATE pgqueue.jobs SET errors = errors WHERE id = %s", attempt.job_id)


# Not asked of its process: behind a proxy that is anybody's.
WAITS_FOR_A_KEY = """
SELECT EXISTS (
    SELECT FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted
)
"""

WRITERS = [claim, claim, complete, complete, fail, crash, heartbeat, reap, release, cancel_and_enqueue]


def test_a_batch_that_replaces_jobs_of_many_keys_takes_the_locks_of_the_keys_in_their_order(
    session, open_session
):
    keys = [row.key for row in session.rows(
        "SELECT k.key FROM unnest(%s::text[]) AS k (key) ORDER BY pgqueue.key_lock(k.key)", ["a", "b", "c"]
    )]  # fmt: skip
    holder, enqueuer = open_session(autocommit=False), open_session()
    # The locks are wanted in one order, the unique keys come in the other one.
    jobs = [
        {"task": "t", "unique_key": f"u{nth}", "concurrency_key": key} for nth, key in enumerate(keys[::-1])
    ]
    session.enqueue_many(*jobs)
    elsewhere = [{**job, "queue": "other", "on_conflict": "replace"} for job in jobs]

    holder.rows("SELECT pg_advisory_xact_lock(pgqueue.key_lock(%s))", keys[0])
    with ThreadPoolExecutor(1) as pool:
        replaced = pool.submit(enqueuer.enqueue_many, *elsewhere)
        wait_until(lambda: session.one(WAITS_FOR_A_KEY), 120)
        taken = [key for key in keys[1:] if not session.one(
            "SELECT pg_try_advisory_xact_lock(pgqueue.key_lock(%s))", key
        )]  # fmt: skip
        holder.connection.rollback()

        assert taken == []
        assert [outcome for _, outcome in replaced.result(120)] == ["replaced"] * 3


def test_a_batch_that_replaces_jobs_locks_them_in_order_of_id_like_everybody(session, open_session):
    first, second = (session.enqueue(unique_key=key, delay_seconds=3600) for key in "ba")
    holder, enqueuer = open_session(autocommit=False), open_session()
    holder.rows("SELECT FROM pgqueue.jobs WHERE id = %s FOR UPDATE", first)
    with ThreadPoolExecutor(1) as pool:
        batch = [{"task": "t", "unique_key": key, "on_conflict": "replace"} for key in "ab"]
        replaced = pool.submit(enqueuer.enqueue_many, *batch)
        wait_until(lambda: waits_for_a_lock(session, enqueuer), 120)

        assert holder.one("SELECT id FROM pgqueue.jobs WHERE id = %s FOR UPDATE NOWAIT", second) == second

        holder.connection.rollback()
        assert replaced.result(120) == [(second, "replaced"), (first, "replaced")]


@pytest.fixture
def crowd(session, open_session):
    session.rows(
        "INSERT INTO pgqueue.jobs (task, queue, concurrency_key, concurrency_limit, max_attempts) "
        "SELECT 't', 'q', CASE WHEN i % 3 > 0 THEN 'k' || i % 10 END, 5, 1000 "
        "FROM generate_series(1, 1500) AS i"
    )

    def open_impatient(**options):
        return open_session(options="-c deadlock_timeout=50ms", **options)

    crowd = Crowd(open_impatient)
    yield crowd
    crowd.stop()


def test_the_writers_of_the_queue_never_deadlock(crowd):
    for writer in WRITERS:
        crowd.add(writer)

    done = ("claimed", "completed", "failed", "crashed", "released", "renewed", "cancelled")
    crowd.work(4, until_seen=done)
    crowd.stop()

    assert [name for name in crowd.seen if name.startswith("error")] == []


def test_a_writer_that_keeps_no_order_does_deadlock(crowd, session):
    """The control: the crowd of the test before would show a deadlock if there were one."""
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = session.one(deadlocks)

    for writer in [claim, complete, fail, change_in_no_order, change_in_no_order, change_in_no_order]:
        crowd.add(writer)

    wait_until(lambda: session.one(deadlocks) > before, 240)
