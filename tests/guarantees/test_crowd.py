"""A crowd of one key at the head of a queue costs the jobs behind it little, once, and then nothing."""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from tests.sql.support import OpenSession, Session

CROWD = 100_000 if os.environ.get("CI") == "true" else 6_000
DECIDED = "priority, max_attempts, timeout_seconds, concurrency_limit, is_unique_until_start, queue, state"
BATCH = 10


@pytest.fixture
def session(dsn: str, open_session: OpenSession) -> Session:
    """A database in which nobody vacuums or analyzes but we: a snapshot of theirs would keep dead rows."""
    session = open_session(dsn)
    session.rows("ALTER TABLE pgqueue.jobs SET (autovacuum_enabled = off)")
    return session


def make_crowd(session: Session) -> None:
    session.rows(
        f"INSERT INTO pgqueue.jobs (task, concurrency_key, {DECIDED}) "
        f"SELECT 'crowd', 'crowd', 0, 5, 300, 1, false, 'default', 'ready' FROM generate_series(1, {CROWD})"
    )


def make_others(session: Session, count: int) -> None:
    session.rows(
        f"INSERT INTO pgqueue.jobs (task, {DECIDED}) "
        f"SELECT 'other', 0, 5, 300, 1, false, 'default', 'ready' FROM generate_series(1, {count})"
    )


def park_crowd(session: Session) -> int:
    """Claim until the crowd is out of the way; gives the number of calls."""
    calls = 1
    while "other" not in {attempt.task for attempt in session.claim(max_jobs=BATCH)} and calls < 1000:
        calls += 1
    return calls


def test_a_crowd_of_one_key_is_parked_once_and_out_of_everybodys_way(session):
    session.rows("SET synchronous_commit = off")
    make_crowd(session)
    make_others(session, 300)

    calls = park_crowd(session)
    after = [len(session.claim(max_jobs=BATCH)) for _ in range(20)]

    assert calls <= 1 + CROWD / 1000
    assert after == [BATCH] * 20
    assert session.one("SELECT count(*) FROM pgqueue.jobs WHERE state = 'blocked'") == CROWD - 1


def pages_per_claim(session: Session, *, goes_on: bool) -> float:
    """Give how many pages the server looks at for a claim that takes others only."""
    after: tuple[Any, ...] = (None, None, None)
    pages = []
    for _ in range(15):
        last = session.row(
            "SELECT priority, run_at, id FROM pgqueue.jobs WHERE state = 'ready' AND task = 'other' "
            f"ORDER BY priority, run_at, id OFFSET {BATCH - 1} LIMIT 1"
        )
        plan = session.one(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT * FROM pgqueue.claim("
            f"'default', gen_random_uuid(), {BATCH}, 60, %s::integer, %s::timestamptz, %s::bigint)",
            *after,
        )
        (root,) = json.loads(plan) if isinstance(plan, str) else plan
        pages.append(root["Plan"]["Shared Hit Blocks"] + root["Plan"]["Shared Read Blocks"])
        assert root["Plan"]["Actual Rows"] == BATCH
        if goes_on:
            after = tuple(last)
    return statistics.median(pages)


@pytest.mark.parametrize("way", ["after its last place", "from the head, vacuumed"])
def test_claims_of_others_read_as_much_as_if_the_crowd_were_not_there(session, way):
    session.rows("SET synchronous_commit = off")
    make_others(session, 500)
    session.rows("VACUUM ANALYZE pgqueue.jobs")
    goes_on = way.startswith("after")
    without = pages_per_claim(session, goes_on=goes_on)
    session.rows("DELETE FROM pgqueue.jobs")
    make_crowd(session)
    make_others(session, 500)
    session.rows("VACUUM ANALYZE pgqueue.jobs")

    park_crowd(session)
    if not goes_on:
        session.rows("VACUUM pgqueue.jobs")
    else:
        pages_per_claim(session, goes_on=True)  # finds the place behind the crowd

    assert pages_per_claim(session, goes_on=goes_on) <= 1.2 * without


def drained(session: Session, count: int, max_jobs: int = 10) -> Sequence[int]:
    done: list[int] = []
    for _ in range(count):
        done += session.complete(*session.claim(max_jobs=max_jobs))
    return done


def test_a_crowd_drains_one_after_the_other_in_its_order(session):
    ids = [session.enqueue(concurrency_key="crowd") for _ in range(100)]

    assert drained(session, len(ids)) == ids


def test_within_a_priority_who_came_first_goes_first_and_the_urgent_before_all(session):
    for _ in range(60):
        session.enqueue(concurrency_key="crowd", priority=random.randrange(3))
    urgency = dict(session.rows("SELECT id, priority FROM pgqueue.jobs"))
    (first,) = session.claim(max_jobs=1)
    session.claim()  # parks the others
    late = session.enqueue(concurrency_key="crowd", priority=0)
    urgency[late] = 0

    order = [*session.complete(first), *drained(session, len(urgency))]

    rest = [job_id for job_id in urgency if job_id != first.job_id]
    assert order == [first.job_id, *sorted(rest, key=lambda job_id: (urgency[job_id], job_id))]
