"""A crowd of one key at the head of a queue costs the jobs behind it little, once, and then nothing."""

from __future__ import annotations

CROWD = 6000
DECIDED = "priority, max_attempts, timeout_seconds, concurrency_limit, queue, state"


def test_a_crowd_of_one_key_is_parked_once_and_out_of_everybodys_way(session):
    session.rows("SET synchronous_commit = off")
    session.rows(
        f"INSERT INTO pgqueue.jobs (task, concurrency_key, {DECIDED}) "
        f"SELECT 'crowd', 'crowd', 0, 5, 300, 1, 'default', 'ready' FROM generate_series(1, {CROWD})"
    )
    session.rows(
        f"INSERT INTO pgqueue.jobs (task, {DECIDED}) "
        "SELECT 'other', 0, 5, 300, 1, 'default', 'ready' FROM generate_series(1, 300)"
    )

    calls = 1
    while "other" not in {attempt.task for attempt in session.claim(max_jobs=10)} and calls < 100:
        calls += 1
    after = [len(session.claim(max_jobs=10)) for _ in range(20)]

    assert calls <= 1 + CROWD / 1000
    assert after == [10] * 20
    assert session.one("SELECT count(*) FROM pgqueue.jobs WHERE state = 'blocked'") == CROWD - 1


def test_a_crowd_drains_one_after_the_other_in_its_order(session):
    ids = [session.enqueue(concurrency_key="crowd") for _ in range(100)]
    done = []

    for _ in ids:
        done += session.complete(*session.claim(max_jobs=10))

    assert done == ids
