"""claim: the best due jobs of a queue, each to one caller, and everything a worker has to know of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.sql.support import OpenSession, Session


def ids(attempts):
    return [attempt.job_id for attempt in attempts]


def insert(session: Session, count: int, **columns) -> list[int]:
    names, values = "".join(f", {name}" for name in columns), "".join(f", %({name})s" for name in columns)
    text = f"INSERT INTO pgqueue.jobs (task{names}) SELECT 't'{values} FROM generate_series(1, {count})"
    return [row[0] for row in session.connection.execute(f"{text} RETURNING id", columns).fetchall()]


# Which.


def test_the_best_priority_goes_first_then_the_oldest(session):
    low = session.enqueue(priority=2)
    early = session.enqueue(priority=1)
    late = session.enqueue(priority=1)
    first = session.enqueue(priority=0)

    assert ids(session.claim()) == [first, early, late, low]


def test_only_due_jobs_of_that_queue_are_taken(session):
    session.enqueue(queue="other")
    session.enqueue(delay_seconds=60)
    due = session.enqueue()

    assert ids(session.claim()) == [due]


def test_no_more_than_asked_for_are_taken(session):
    jobs = insert(session, 5)

    assert ids(session.claim(max_jobs=2)) == jobs[:2]
    assert session.claim(max_jobs=0) == []
    assert session.claim(max_jobs=-1) == []


def test_never_more_than_two_thousand_are_taken(session):
    insert(session, 2001)

    assert len(session.claim(max_jobs=100_000)) == 2000


def test_a_paused_queue_gives_nothing(session):
    session.enqueue()
    session.rows("INSERT INTO pgqueue.queues (name, is_paused) VALUES ('default', true)")
    while_paused = session.claim()

    session.rows("UPDATE pgqueue.queues SET is_paused = false")

    assert while_paused == []
    assert len(session.claim()) == 1


def test_a_row_that_somebody_holds_is_passed_over_without_waiting(session, open_session: OpenSession):
    held, free = insert(session, 2)
    holder = open_session(autocommit=False)
    holder.rows("SELECT FROM pgqueue.jobs WHERE id = %s FOR UPDATE", held)

    session.rows("SET statement_timeout = '20s'")

    assert ids(session.claim()) == [free]


# What a worker gets to know.


def test_an_attempt_comes_with_all_a_worker_needs(session):
    job_id = session.enqueue(
        "send",
        {"b": [1, 2.5]},
        priority=3,
        max_attempts=7,
        timeout_seconds=45,
        idempotency_key="i",
        headers='{"h": "x"}',
        concurrency_key="k",
    )

    (attempt,) = session.claim(lease_seconds=12)

    job = session.job(job_id)
    assert (attempt.job_id, attempt.attempt, attempt.task, attempt.key) == (job_id, 1, "send", "k")
    assert (attempt.args, attempt.headers) == ('{"b": [1, 2.5]}', '{"h": "x"}')
    assert (attempt.priority, attempt.timeout_seconds, attempt.max_attempts, attempt.crashes) == (3, 45, 7, 0)
    assert (attempt.idempotency_key, attempt.is_scanned) == ("i", True)
    assert attempt.run_at == session.one("SELECT run_at::text FROM pgqueue.jobs")
    assert 0 <= attempt.age_seconds < 60
    assert (job.state, job.claim_token, job.worker_id) == ("running", attempt.token, session.worker_id)
    assert job.lease_seconds == 12
    assert (job.deadline_at - job.started_at).total_seconds() == pytest.approx(45, abs=10)


def test_the_columns_keep_their_order(session):
    session.enqueue()

    (attempt,) = session.claim()

    assert attempt._fields == (
        "job_id",
        "token",
        "attempt",
        "task",
        "args",
        "key",
        "priority",
        "run_at",
        "is_scanned",
        "timeout_seconds",
        "max_attempts",
        "crashes",
        "idempotency_key",
        "headers",
        "age_seconds",
    )


def test_no_timeout_is_no_deadline(session):
    job_id = session.enqueue(timeout_seconds=0)

    session.claim()

    assert session.job(job_id).deadline_at is None


def test_every_claim_has_a_token_of_its_own(session):
    insert(session, 2)

    first, second = session.claim(max_jobs=1), session.claim(max_jobs=1)

    assert first[0].token != second[0].token


def test_a_document_that_no_client_can_decode_does_not_spoil_the_batch(session):
    session.rows("INSERT INTO pgqueue.jobs (task, args) VALUES ('t', '{\"x\": 1e5000}'), ('t', '{}')")

    poisoned, plain = session.claim()

    assert len(poisoned.args) > 5000
    assert plain.args == "{}"


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_claim_under_another_isolation_is_refused(open_session: OpenSession, level):
    session = open_session(autocommit=False)
    session.rows(f"SET TRANSACTION ISOLATION LEVEL {level}")

    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="must run in READ COMMITTED"):
        session.claim()


# The place.


def after(attempt):
    return {
        "after_priority": attempt.priority,
        "after_run_at": attempt.run_at,
        "after_id": attempt.job_id,
    }


def test_a_claim_after_a_place_starts_behind_it(session):
    jobs = insert(session, 6)
    *_, last = session.claim(max_jobs=2)
    session.release(last)

    behind = session.claim(max_jobs=2, **after(last))
    from_the_head = session.claim(max_jobs=2)

    assert ids(behind) == jobs[2:4]
    assert ids(from_the_head) == [jobs[1], jobs[4]]


def test_a_claim_up_to_a_priority_takes_none_that_is_worse(session):
    for priority in (0, 5, 3):
        session.enqueue(priority=priority)

    taken = session.claim(up_to_priority=3)

    assert [attempt.priority for attempt in taken] == [0, 3]


def test_a_job_that_came_in_by_its_key_is_no_place(session):
    for _ in range(4):
        session.enqueue(concurrency_key="k", concurrency_limit=2)
    running = session.claim()
    session.claim()
    session.complete(*running)

    led_there, came_along = session.claim()

    assert (led_there.is_scanned, came_along.is_scanned) == (True, False)


# Keys.


def test_a_full_key_parks_its_jobs_and_a_free_slot_wakes_the_best(session):
    first, second, third = (session.enqueue(concurrency_key="k") for _ in range(3))
    (attempt,) = session.claim()
    parked = session.claim()

    session.complete(attempt)

    assert (attempt.job_id, parked) == (first, [])
    assert (session.state(second), session.state(third)) == ("ready", "blocked")
    assert ids(session.claim()) == [second]


def test_one_claim_fills_every_free_slot_of_a_key(session):
    jobs = [session.enqueue(concurrency_key="k", concurrency_limit=3) for _ in range(5)]

    taken = session.claim()

    assert ids(taken) == jobs[:3]
    slots = session.rows("SELECT concurrency_slot FROM pgqueue.jobs WHERE state = 'running' ORDER BY id")
    assert [slot for (slot,) in slots] == [1, 2, 3]


def test_slots_that_became_free_in_the_middle_are_used_again(session):
    for _ in range(6):
        session.enqueue(concurrency_key="k", concurrency_limit=3)
    one, two, three = session.claim()
    session.complete(one, three)

    session.claim()

    slots = session.rows("SELECT concurrency_slot FROM pgqueue.jobs WHERE state = 'running' ORDER BY 1")
    assert [slot for (slot,) in slots] == [1, 2, 3]
    assert session.job(two.job_id).concurrency_slot == 2


def test_a_key_counts_across_queues(session):
    session.enqueue(queue="a", concurrency_key="k")
    session.enqueue(queue="b", concurrency_key="k")

    first, second = session.claim("a"), session.claim("b")

    assert (len(first), len(second)) == (1, 0)


def test_a_crowd_of_one_key_at_the_head_does_not_hide_the_others(session):
    insert(session, 400, concurrency_key="crowd")
    other = session.enqueue()

    taken = session.claim(max_jobs=10)

    assert other in ids(taken)
    assert len(taken) == 2


# A queue's own limit.


def test_a_queue_never_runs_more_than_its_max(session):
    jobs = insert(session, 5)
    session.rows("INSERT INTO pgqueue.queues (name, max_running) VALUES ('default', 2)")

    first, second = session.claim(), session.claim()
    session.complete(first[0])
    third = session.claim()

    assert (ids(first), second, ids(third)) == (jobs[:2], [], [jobs[2]])


def test_a_queue_with_max_zero_gives_nothing(session):
    session.enqueue()
    session.rows("INSERT INTO pgqueue.queues (name, max_running) VALUES ('default', 0)")

    assert session.claim() == []


def test_many_claimers_at_once_keep_a_queues_max(session, open_session: OpenSession):
    insert(session, 300)
    session.rows("INSERT INTO pgqueue.queues (name, max_running) VALUES ('default', 7)")
    counts = "SELECT count(*) FROM pgqueue.jobs WHERE state = 'running'"
    seen, has_looked, is_over = [], threading.Event(), threading.Event()

    def work(claimer: Session) -> int:
        done = 0
        has_looked.wait(60)
        while not is_over.is_set() and claimer.one("SELECT count(*) FROM pgqueue.jobs"):
            done += len(claimer.complete(*claimer.claim(max_jobs=5)))
        return done

    def watch(watcher: Session) -> None:
        patience = time.monotonic() + 300
        while not is_over.is_set() and time.monotonic() < patience:
            seen.append(watcher.one(counts))
            has_looked.set()
        is_over.set()

    watcher = threading.Thread(target=watch, args=(open_session(),))
    watcher.start()
    with ThreadPoolExecutor(4) as pool:
        done = sum(pool.map(work, [open_session() for _ in range(4)]))
    is_over.set()
    watcher.join()

    assert done == 300
    assert max(seen) <= 7
