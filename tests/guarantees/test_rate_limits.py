"""Starts never pass a rate limit, and whoever waits for one waits in line, out of everybody's way."""

from __future__ import annotations

import time

import pytest

from tests.guarantees.support import at_once, most_in_any
from tests.sql.support import Session
from tests.support import wait_until

SLOW = 0.001  # tokens a second: no second token in a test's time


def limit(session: Session, name: str, tokens_per_second: float = SLOW, burst: int = 1) -> None:
    session.rows(
        "INSERT INTO pgqueue.rate_limits (name, tokens_per_second, burst) VALUES (%s, %s, %s)",
        name,
        tokens_per_second,
        burst,
    )


def let_pass(session: Session, seconds: float) -> None:
    """Let so much time pass for every limit."""
    session.rows(
        "UPDATE pgqueue.rate_limits SET tat = tat - passed.time, next_at = next_at - passed.time "
        "FROM make_interval(secs => %s) AS passed (time)",
        seconds,
    )


def ids(attempts) -> list[int]:
    return [attempt.job_id for attempt in attempts]


def taken(session: Session, name: str) -> int:
    return session.one("SELECT taken FROM pgqueue.rate_limits WHERE name = %s", name)


# The limit of a task, or of a key.


def test_a_burst_starts_and_the_rest_waits_in_line(session):
    limit(session, "task:t", burst=2)
    jobs = [session.enqueue() for _ in range(5)]

    first, second = session.claim(), session.claim()

    assert (ids(first), second) == (jobs[:2], [])
    assert {session.state(job_id) for job_id in jobs[2:]} == {"scheduled"}
    assert session.one("SELECT count(*) FROM pgqueue.jobs WHERE rate_parked_at IS NOT NULL") == 3


def test_the_line_is_served_in_order_when_its_tokens_come(session):
    limit(session, "task:t", tokens_per_second=1)
    jobs = [session.enqueue() for _ in range(3)]
    urgent = session.enqueue(priority=0)
    session.rows("UPDATE pgqueue.jobs SET priority = 1 WHERE id <> %s", urgent)
    session.claim()
    session.claim()
    served = []

    for _ in range(3):
        let_pass(session, 1)
        served += ids(session.claim())

    assert session.state(urgent) == "running"
    assert served == jobs


def test_a_newcomer_joins_the_line_and_does_not_overtake_it(session):
    limit(session, "task:t", tokens_per_second=1)
    first, waiting = session.enqueue(), session.enqueue()
    session.claim()
    session.claim()
    newcomer = session.enqueue()

    let_pass(session, 1)
    served = ids(session.claim())

    assert session.state(first) == "running"
    assert served == [waiting]
    assert session.state(newcomer) == "scheduled"


def test_a_newcomer_in_another_queue_does_not_overtake_either(session):
    limit(session, "task:t", tokens_per_second=1)
    for _ in range(2):
        session.enqueue(queue="a")
    session.claim("a")
    session.claim("a")
    session.enqueue(queue="b")
    let_pass(session, 1)

    overtaking = session.claim("b")
    let_pass(session, 0.1)  # the line was just looked at in vain

    assert overtaking == []
    assert len(session.claim("a")) == 1


def test_jobs_without_a_limit_pass_by(session):
    limit(session, "task:limited")
    for _ in range(150):
        session.enqueue("limited")
    free = [session.enqueue("free") for _ in range(3)]

    got = [task for _ in range(3) for task in (attempt.task for attempt in session.claim(max_jobs=10))]

    assert got.count("limited") == 1
    assert got.count("free") == len(free)


def test_a_line_is_served_although_its_queue_is_busy(session):
    limit(session, "task:limited", tokens_per_second=1)
    waiting = [session.enqueue("limited") for _ in range(2)][1]
    session.claim()
    session.claim()
    for _ in range(20):
        session.enqueue("free")

    let_pass(session, 1)

    assert waiting in ids(session.claim(max_jobs=5))


def test_each_rate_key_has_its_own_limit(session):
    limit(session, "a")
    limit(session, "b", burst=2)
    for key in "aaabbb":
        session.rows("INSERT INTO pgqueue.jobs (task, rate_key) VALUES ('t', %s)", key)

    session.claim()

    running = session.rows(
        "SELECT rate_key, count(*) FROM pgqueue.jobs WHERE state = 'running' GROUP BY 1 ORDER BY 1"
    )
    assert running == [("a", 1), ("b", 2)]


def test_a_claim_that_rolls_back_has_paid_nothing(session, open_session):
    limit(session, "task:t")
    job_id = session.enqueue()
    undecided = open_session(autocommit=False)
    undecided.claim()

    undecided.connection.rollback()

    assert taken(session, "task:t") == 0
    assert ids(session.claim()) == [job_id]


def test_a_limit_that_another_claim_holds_is_left_alone_without_waiting(session, open_session):
    limit(session, "task:t", burst=10)
    first, second = session.enqueue(), session.enqueue()
    undecided = open_session(autocommit=False)
    undecided.claim(max_jobs=1)
    session.rows("SET statement_timeout = '2s'")

    meanwhile = session.claim()
    undecided.connection.commit()

    assert meanwhile == []
    assert session.state(first) == "running"
    assert ids(session.claim()) == [second]


def test_a_job_cancelled_in_line_costs_no_token(session):
    limit(session, "task:t", tokens_per_second=1)
    _, cancelled, waiting = (session.enqueue() for _ in range(3))
    session.claim()
    session.claim()
    session.cancel(cancelled)

    let_pass(session, 1)

    assert ids(session.claim()) == [waiting]
    assert taken(session, "task:t") == 2


def test_a_job_replaced_in_line_leaves_it(session):
    limit(session, "task:t")
    session.enqueue()
    waiting = session.enqueue(unique_key="u")
    session.claim()
    session.claim()

    session.enqueue("other", unique_key="u", on_conflict="replace")

    assert ids(session.claim()) == [waiting]


def test_removing_a_limit_frees_its_line(session):
    limit(session, "task:t")
    jobs = [session.enqueue() for _ in range(3)]
    session.claim()
    session.claim()

    freed = session.call("rate_dissolve", name="task:t")

    assert freed == [(2,)]
    assert ids(session.claim()) == jobs[1:]


def test_a_limit_deleted_by_hand_strands_nobody_for_good(session):
    limit(session, "task:t")
    jobs = [session.enqueue() for _ in range(2)]
    session.claim()
    session.claim()
    session.rows("DELETE FROM pgqueue.rate_limits")

    session.make_due()

    assert ids(session.claim()) == jobs[1:]


def test_a_job_in_line_that_is_looked_at_again_joins_it_again(session):
    limit(session, "task:t")
    jobs = [session.enqueue() for _ in range(2)]
    session.claim()
    session.claim()

    session.make_due()

    assert session.claim() == []
    assert session.job(jobs[1]).rate_parked_at is not None


def test_the_worker_knows_when_the_next_token_comes(session):
    assert session.call("rate_next_at") == [(None,)]
    limit(session, "task:t", tokens_per_second=0.1)
    session.enqueue()
    session.claim()
    session.enqueue()
    session.claim()

    seconds = session.one("SELECT extract(epoch FROM pgqueue.rate_next_at() - clock_timestamp())::float8")

    assert 8 < seconds <= 10


# With concurrency keys.


def test_a_job_in_line_waits_for_its_key_as_well(session):
    limit(session, "task:t", tokens_per_second=1, burst=2)
    jobs = [session.enqueue(concurrency_key="k", concurrency_limit=1) for _ in range(3)]
    (running,) = session.claim()
    session.claim()
    let_pass(session, 5)

    while_full = session.claim()
    session.complete(running)
    let_pass(session, 5)

    assert while_full == []
    assert ids(session.claim()) == [jobs[1]]
    assert taken(session, "task:t") == 2


def test_a_job_that_joins_the_line_leaves_its_key_to_the_next(session):
    limit(session, "task:limited")
    session.enqueue("limited")
    session.enqueue("free", concurrency_key="k")
    _, running = session.claim()
    in_line = session.enqueue("limited", concurrency_key="k")
    next_of_the_key = session.enqueue("free", concurrency_key="k")
    session.claim()
    session.complete(running)

    refused, taken_instead = session.claim(), session.claim()

    assert (refused, ids(taken_instead)) == ([], [next_of_the_key])
    assert session.state(in_line) == "scheduled"


def test_a_crowd_with_keys_and_a_limit_is_out_of_the_way_in_a_few_calls(session):
    limit(session, "task:limited")
    session.rows(
        "INSERT INTO pgqueue.jobs (task, concurrency_key) "
        "SELECT 'limited', 'k' || i % 20 FROM generate_series(1, 2000) AS i"
    )
    free = session.enqueue("free")

    calls = [ids(session.claim(max_jobs=10)) for _ in range(8)]

    assert free in [job_id for call in calls for job_id in call]
    assert sum(map(len, calls)) == 2


def test_every_job_with_a_key_and_a_limit_gets_its_turn(session):
    limit(session, "task:t", tokens_per_second=1000, burst=3)
    jobs = {session.enqueue(concurrency_key=f"k{number % 3}") for number in range(60)}
    done = []

    def drain():
        attempts = session.claim(max_jobs=10)
        assert len({attempt.key for attempt in attempts}) == len(attempts)
        done.extend(session.complete(*attempts))
        return len(done) == len(jobs)

    wait_until(drain, 20)
    assert set(done) == jobs


# The limit of a queue.


def test_a_queue_starts_no_more_than_its_limit_and_writes_nobody(session):
    limit(session, "queue:default", burst=2)
    jobs = [session.enqueue() for _ in range(4)]

    first, second = session.claim(), session.claim()

    assert (ids(first), second) == (jobs[:2], [])
    assert {session.state(job_id) for job_id in jobs[2:]} == {"ready"}
    assert taken(session, "queue:default") == 2


def test_a_queue_pays_only_for_what_it_started(session):
    limit(session, "queue:default", burst=10)
    session.enqueue()

    session.claim()
    session.claim()

    assert taken(session, "queue:default") == 1


def test_a_worker_of_a_limited_queue_knows_when_to_come_back_and_no_other(session):
    limit(session, "queue:default", tokens_per_second=0.1)
    for _ in range(2):
        session.enqueue()
    session.claim()
    session.claim()
    seconds = "SELECT extract(epoch FROM pgqueue.rate_next_at(%s::text[]) - clock_timestamp())::float8"

    assert 8 < session.one(seconds, ["default", "x"]) <= 10
    assert session.one(seconds, ["x"]) is None


def test_a_limited_queue_that_ran_empty_is_nothing_to_wait_for(session):
    limit(session, "queue:default", burst=10)
    session.enqueue()

    session.claim()

    assert session.call("rate_next_at", queues=["default"]) == [(None,)]


def test_a_jobs_own_rate_key_cannot_pose_as_a_queue(session):
    with pytest.raises(Exception, match="jobs_names_fit"):
        session.rows("INSERT INTO pgqueue.jobs (task, rate_key) VALUES ('t', 'queue:default')")


# All at once.


@pytest.mark.parametrize("name", ["queue:default", "task:t"])
def test_no_second_sees_more_starts_than_the_rate_and_the_burst(session, open_session, name):
    limit(session, name, tokens_per_second=100, burst=10)
    session.rows("INSERT INTO pgqueue.jobs (task) SELECT 't' FROM generate_series(1, 1500)")
    end = time.monotonic() + 2.5

    def claim(claimer: Session) -> list[float]:
        claimer.rows("SET synchronous_commit = off")
        starts = []
        while time.monotonic() < end:
            if attempts := claimer.claim(max_jobs=20):
                started = (
                    "SELECT extract(epoch FROM started_at)::float8 FROM pgqueue.jobs WHERE id = ANY (%s)"
                )
                starts += [row[0] for row in claimer.rows(started, ids(attempts))]
                claimer.complete(*attempts)
            else:
                time.sleep(0.02)
        return starts

    starts = [
        instant
        for each in at_once(*(lambda c=claimer: claim(c) for claimer in [open_session() for _ in range(4)]))
        for instant in each
    ]

    # A start is written down up to some milliseconds after its token was taken.
    assert most_in_any(1.0, starts) <= 100 + 10 + 10
    assert len(starts) > 50
    assert taken(session, name) == len(starts)
