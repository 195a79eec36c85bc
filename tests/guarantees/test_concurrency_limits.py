"""At most `limit` attempts of a key run at once, whoever claims, in what batches, from what queues."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import NamedTuple

import pytest

from tests.guarantees.support import OVER_LIMIT, STUCK, at_once, work_for_a_moment
from tests.sql.support import OpenSession, Session

JOBS, KEYS, CLAIMERS = 400, 10, 8


class Held(NamedTuple):
    """One job in a claimer's hands: from the claim's answer to the completion being sent, never too long."""

    key: str
    start: float
    end: float
    job_id: int


def claim_until_all_is_done(session: Session, queues: list[str], batch: int) -> list[Held]:
    session.rows("SET synchronous_commit = off")
    log = []
    patience = time.monotonic() + 30
    while time.monotonic() < patience:
        attempts = session.claim(random.choice(queues), batch)
        start = time.monotonic()
        if attempts:
            work_for_a_moment()
            end = time.monotonic()
            completed = set(session.complete(*attempts))
            log += [Held(a.key, start, end, a.job_id) for a in attempts if a.job_id in completed]
        elif session.one("SELECT NOT EXISTS (SELECT FROM pgqueue.jobs)"):
            break
    return log


def run(session: Session, open_session: OpenSession, limit: int, batch: int, queues: list[str]) -> list[Held]:
    session.rows(
        "INSERT INTO pgqueue.jobs (task, queue, concurrency_key, concurrency_limit) "
        "SELECT 't', (%s::text[])[1 + i %% %s], 'k' || floor(random() * %s)::int, %s "
        "FROM generate_series(1, %s) AS i",
        queues,
        len(queues),
        KEYS,
        limit,
        JOBS,
    )
    claimers = [open_session() for _ in range(CLAIMERS)]
    logs = at_once(*(lambda c=claimer: claim_until_all_is_done(c, queues, batch) for claimer in claimers))
    return [held for log in logs for held in log]


def peak(log: list[Held]) -> int:
    """Give the largest number of jobs of one key that were held at the same time."""
    events = defaultdict(list)
    for held in log:
        events[held.key] += [(held.start, 1), (held.end, -1)]
    most = 0
    for steps in events.values():
        now = 0
        for _, step in sorted(steps):
            now += step
            most = max(most, now)
    return most


@pytest.mark.parametrize("batch", [1, 10, 50])
@pytest.mark.parametrize("limit", [1, 3, 10])
def test_a_limit_is_exact_and_is_used_to_the_full(session, open_session, limit, batch):
    log = run(session, open_session, limit, batch, ["q"])

    assert sorted(held.job_id for held in log) == sorted({held.job_id for held in log})
    assert len(log) == JOBS
    assert peak(log) <= limit
    if batch > limit:
        assert peak(log) == limit


@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_holds_across_queues(session, open_session, limit):
    log = run(session, open_session, limit, 10, ["a", "b"])

    assert len(log) == JOBS
    assert peak(log) == limit


def test_jobs_of_one_key_with_limit_one_run_in_their_order(session, open_session):
    log = run(session, open_session, 1, 10, ["q"])

    by_key = defaultdict(list)
    for held in sorted(log, key=lambda held: held.start):
        by_key[held.key].append(held.job_id)
    assert all(job_ids == sorted(job_ids) for job_ids in by_key.values())


def test_what_a_single_claimer_leaves_is_never_stuck_nor_over_the_limit(session):
    rng = random.Random(1)
    for number in range(300):
        key, queue = f"k{rng.randrange(4)}", rng.choice("ab")
        session.enqueue(
            queue=queue, concurrency_key=key, concurrency_limit=int(key[1]) + 1, priority=number % 3
        )
    held = []

    for _ in range(400):
        held += session.claim(rng.choice("ab"), rng.randrange(1, 6))
        rng.shuffle(held)
        some, held = held[: len(held) // 2], held[len(held) // 2 :]
        if some:
            getattr(session, rng.choice(["complete", "release", "fail", "crash"]))(*some)
            session.make_due()
        assert session.one(STUCK) == 0
        assert session.one(OVER_LIMIT) == 0
