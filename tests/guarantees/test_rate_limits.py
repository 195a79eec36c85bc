"""Starts never pass a rate limit, and whoever waits for one waits in line, out of everybody's way."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.guarantees.support import at_once, most_in_any, waits_for_a_lock
from tests.sql.support import Session
from tests.support import wait_until

SLOW = 0.001  # tokens a second: no second token in a test's time
A_TOKENS_TIME = 1 / SLOW


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


def test_who_waits_in_line_and_who_is_ready_share_the_slots_of_their_key(session):
    limit(session, "task:limited")
    session.enqueue("limited")
    waiting = session.enqueue("limited", concurrency_key="k")
    session.claim()
    session.claim()
    ready = session.enqueue("free", concurrency_key="k")
    let_pass(session, A_TOKENS_TIME)

    claimed = session.claim()
    session.complete(*claimed)

    assert ids(claimed) == [waiting]
    assert ids(session.claim()) == [ready]


@pytest.mark.parametrize("end", ["release", "crash", "reap"])
def test_who_started_from_the_line_and_is_given_back_is_due_at_once(session, end):
    limit(session, "task:t")
    session.enqueue()
    waiting = session.enqueue()
    session.claim()
    session.claim()
    let_pass(session, A_TOKENS_TIME)
    (attempt,) = session.claim()
    if end == "reap":
        session.expire(attempt)
        session.call("reap")
    else:
        getattr(session, end)(attempt)
    let_pass(session, A_TOKENS_TIME)

    assert attempt.job_id == waiting
    assert ids(session.claim()) == [waiting]


@pytest.mark.parametrize("what", ["changed", "removed"])
def test_a_pattern_takes_along_what_a_claim_is_just_making_of_it(session, open_session, what):
    limit(session, "key:*", tokens_per_second=100, burst=100)
    session.rows("INSERT INTO pgqueue.tasks (name, rate_key) VALUES ('t', 'key:{a}')")
    session.enqueue(args={"a": "x"})
    claimer, operator = open_session(autocommit=False), open_session()
    claimer.claim()
    with ThreadPoolExecutor(1) as pool:
        if what == "changed":
            done = pool.submit(operator.call, "rate_set", name="key:*", tokens_per_second=SLOW, burst=1)
        else:
            done = pool.submit(operator.call, "rate_remove", name="key:*")
        wait_until(lambda: done.done() or waits_for_a_lock(session, operator))

        claimer.connection.commit()
        done.result()

    limits = session.rows("SELECT name, tokens_per_second, burst FROM pgqueue.rate_limits ORDER BY name")
    assert limits == ([("key:*", SLOW, 1), ("key:x", SLOW, 1)] if what == "changed" else [])


def test_the_longest_name_of_a_task_meets_a_pattern(session):
    limit(session, "task:*", burst=2)
    jobs = [session.enqueue(), session.enqueue("t" * 250)]

    assert ids(session.claim()) == jobs
    with pytest.raises(psycopg.errors.CheckViolation):
        session.enqueue("t" * 251)


def test_a_rate_that_no_clock_can_count_is_refused(session):
    limit(session, "task:t", tokens_per_second=1e-9, burst=2)
    session.enqueue()
    assert len(session.claim()) == 1
    assert session.call("rate_mend") == [(0,)]

    with pytest.raises(psycopg.errors.CheckViolation, match="rate_limits_can_be_waited_for"):
        session.call("rate_set", name="task:t", tokens_per_second=1e-9, burst=100_000)


def test_a_burst_starts_and_the_rest_waits_in_line(session):
    limit(session, "task:t", burst=2)
    jobs = [session.enqueue() for _ in range(5)]

    first, second = session.claim(), session.claim()

    assert (ids(first), second) == (jobs[:2], [])
    assert {session.state(job_id) for job_id in jobs[2:]} == {"scheduled"}
    assert session.one("SELECT count(*) FROM pgqueue.jobs WHERE rate_parked_at IS NOT NULL") == 3


def test_the_line_is_served_in_order_when_its_tokens_come(session):
    limit(session, "task:t")
    jobs = [session.enqueue() for _ in range(3)]
    urgent = session.enqueue(priority=0)
    session.rows("UPDATE pgqueue.jobs SET priority = 1 WHERE id <> %s", urgent)
    session.claim()
    session.claim()
    served = []

    for _ in range(3):
        let_pass(session, A_TOKENS_TIME)
        served += ids(session.claim())

    assert session.state(urgent) == "running"
    assert served == jobs


def test_a_newcomer_joins_the_line_and_does_not_overtake_it(session):
    limit(session, "task:t")
    first, waiting = session.enqueue(), session.enqueue()
    session.claim()
    session.claim()
    newcomer = session.enqueue()

    let_pass(session, A_TOKENS_TIME)
    served = ids(session.claim())

    assert session.state(first) == "running"
    assert served == [waiting]
    assert session.state(newcomer) == "scheduled"


def test_a_newcomer_in_another_queue_does_not_overtake_either(session):
    limit(session, "task:t")
    for _ in range(2):
        session.enqueue(queue="a")
    session.claim("a")
    session.claim("a")
    session.enqueue(queue="b")
    let_pass(session, A_TOKENS_TIME)

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
    limit(session, "task:limited")
    waiting = [session.enqueue("limited") for _ in range(2)][1]
    session.claim()
    session.claim()
    for _ in range(20):
        session.enqueue("free")

    let_pass(session, A_TOKENS_TIME)

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
    session.rows("SET statement_timeout = '60s'")

    meanwhile = session.claim()
    undecided.connection.commit()

    assert meanwhile == []
    assert session.state(first) == "running"
    assert ids(session.claim()) == [second]


def test_a_job_cancelled_in_line_costs_no_token(session):
    limit(session, "task:t")
    _, cancelled, waiting = (session.enqueue() for _ in range(3))
    session.claim()
    session.claim()
    session.cancel(cancelled)

    let_pass(session, A_TOKENS_TIME)

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
    limit(session, "task:t")
    session.enqueue()
    session.claim()
    session.enqueue()
    session.claim()

    seconds = session.one("SELECT extract(epoch FROM pgqueue.rate_next_at() - clock_timestamp())::float8")

    assert 900 < seconds <= A_TOKENS_TIME


# With concurrency keys.


def test_a_job_in_line_waits_for_its_key_as_well(session):
    limit(session, "task:t", burst=2)
    jobs = [session.enqueue(concurrency_key="k", concurrency_limit=1) for _ in range(3)]
    (running,) = session.claim()
    session.claim()
    let_pass(session, 5 * A_TOKENS_TIME)

    while_full = session.claim()
    session.complete(running)
    let_pass(session, 5 * A_TOKENS_TIME)

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

    wait_until(drain, 120)
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
    limit(session, "queue:default")
    for _ in range(2):
        session.enqueue()
    session.claim()
    session.claim()
    seconds = "SELECT extract(epoch FROM pgqueue.rate_next_at(%s::text[]) - clock_timestamp())::float8"

    assert 900 < session.one(seconds, ["default", "x"]) <= A_TOKENS_TIME
    assert session.one(seconds, ["x"]) is None


def test_a_limited_queue_that_ran_empty_is_nothing_to_wait_for(session):
    limit(session, "queue:default", burst=10)
    session.enqueue()

    session.claim()

    assert session.call("rate_next_at", queues=["default"]) == [(None,)]


def test_a_jobs_own_rate_key_cannot_pose_as_a_queue(session):
    with pytest.raises(Exception, match="jobs_names_fit"):
        session.rows("INSERT INTO pgqueue.jobs (task, rate_key) VALUES ('t', 'queue:default')")


def test_a_waiting_job_that_somebody_has_locked_is_looked_at_again_soon(session, open_session):
    limit(session, "task:t")
    waiting = [session.enqueue() for _ in range(2)][1]
    session.claim()
    session.claim()
    stranger = open_session(autocommit=False)
    stranger.job(waiting)
    stranger.rows("SELECT FROM pgqueue.jobs WHERE id = %s FOR UPDATE", waiting)
    let_pass(session, A_TOKENS_TIME)

    while_locked = session.claim()
    stranger.connection.rollback()

    assert while_locked == []
    assert ids(wait_until(session.claim)) == [waiting]


def test_all_that_one_claim_starts_counts_for_the_limit_with_keys_or_without(session):
    limit(session, "task:t", burst=3)
    for key in (None, None, "a", "a", "b", "c"):
        session.enqueue(concurrency_key=key)

    assert len(session.claim()) == 3
    assert taken(session, "task:t") == 3


# Several queues in one line.


def test_claims_of_another_queue_do_not_put_off_whose_turn_it_is(session):
    limit(session, "task:t")
    for queue in ("a", "a", "b"):
        session.enqueue(queue=queue)
    session.claim("a")
    session.claim("a")
    session.claim("b")
    session.rows("UPDATE pgqueue.jobs SET state = 'ready', rate_parked_at = NULL WHERE queue = 'b'")
    session.enqueue("free", queue="b")
    let_pass(session, A_TOKENS_TIME)

    session.claim("b")

    assert len(session.claim("a")) == 1


def test_a_worker_waits_only_for_lines_in_which_its_queues_have_jobs(session):
    limit(session, "task:t")
    for _ in range(2):
        session.enqueue(queue="a")
    session.claim("a")
    session.claim("a")

    assert session.call("rate_next_at", queues=["b"]) == [(None,)]
    assert session.call("rate_next_at", queues=["b", "a"]) == session.call("rate_next_at")


def test_what_a_queue_leaves_of_the_tokens_is_for_the_next_queue_at_once(session):
    limit(session, "task:t", burst=2)
    for queue in ("a", "a", "a", "b"):
        session.enqueue(queue=queue)
    for queue in ("a", "a", "b"):
        session.claim(queue)
    let_pass(session, 5 * A_TOKENS_TIME)

    assert (len(session.claim("a")), len(session.claim("b"))) == (1, 1)


# What is seen of it by started_at.


def test_a_start_is_never_later_than_its_payment(session):
    """So no stretch of time sees more than the burst and what the rate gives in it."""
    limit(session, "task:t", tokens_per_second=100, burst=10)
    for _ in range(300):
        session.enqueue()

    started = session.claim(max_jobs=10)
    full_at = session.one(
        "SELECT extract(epoch FROM tat)::float8 - 10 * 0.01 FROM pgqueue.rate_limits WHERE name = 'task:t'"
    )

    last = session.one("SELECT max(extract(epoch FROM started_at))::float8 FROM pgqueue.jobs")
    assert len(started) == 10
    assert full_at >= last


# Changing a limit.


def rate_set(session: Session, name: str, tokens_per_second: float, burst: int = 1) -> None:
    session.call("rate_set", name=name, tokens_per_second=tokens_per_second, burst=burst)


@pytest.mark.parametrize(
    "change",
    [
        "SELECT pgqueue.rate_set('task:t', 1000)",
        "UPDATE pgqueue.rate_limits SET tokens_per_second = 1000 WHERE name = 'task:t'",
    ],
)
def test_a_higher_rate_holds_at_once_for_whoever_waits_already(session, change):
    limit(session, "task:t")
    waiting = [session.enqueue() for _ in range(3)][1:]
    session.claim()
    session.claim()

    session.rows(change)
    got = []

    def waited() -> bool:
        got.extend(ids(session.claim()))
        return len(got) == 2

    wait_until(waited)
    assert got == waiting


def test_a_lower_rate_gives_no_tokens_and_takes_none_away(session):
    limit(session, "task:t", tokens_per_second=10 * SLOW, burst=10)
    for _ in range(20):
        session.enqueue()
    session.claim(max_jobs=4)

    rate_set(session, "task:t", SLOW, 10)

    assert len(session.claim()) == 6


def test_a_clock_that_was_set_back_does_not_stop_a_limit_for_long(session):
    limit(session, "task:t")
    waiting = [session.enqueue() for _ in range(3)][1]
    session.claim()
    session.claim()
    let_pass(session, -100 * A_TOKENS_TIME)
    meanwhile = session.claim()

    session.call("rate_mend")
    let_pass(session, A_TOKENS_TIME)

    assert meanwhile == []
    assert ids(session.claim()) == [waiting]


# Limits for keys, by a pattern.


def enqueue_for(session: Session, *keys: str) -> None:
    for key in keys:
        session.rows("INSERT INTO pgqueue.jobs (task, rate_key) VALUES ('t', %s)", key)


def running_by_key(session: Session) -> dict[str, int]:
    return dict(
        session.rows("SELECT rate_key, count(*) FROM pgqueue.jobs WHERE state = 'running' GROUP BY 1")
    )


def test_a_pattern_gives_each_key_that_it_meets_a_limit_of_its_own(session):
    limit(session, "api:*", burst=2)
    enqueue_for(session, *["api:a"] * 3, *["api:b"] * 3, *["other"] * 3)

    session.claim()

    assert running_by_key(session) == {"api:a": 2, "api:b": 2, "other": 3}


def test_the_longest_pattern_counts_and_a_limit_of_the_keys_own_before_any(session):
    limit(session, "*", burst=1)
    limit(session, "api:*", burst=2)
    limit(session, "api:vip*", burst=3)
    limit(session, "api:vip:acme", burst=4)
    enqueue_for(session, *["x"] * 5, *["api:a"] * 5, *["api:vip:b"] * 5, *["api:vip:acme"] * 5)

    session.claim()

    assert running_by_key(session) == {"x": 1, "api:a": 2, "api:vip:b": 3, "api:vip:acme": 4}


def test_a_pattern_can_be_for_tasks(session):
    limit(session, "task:mail.*")
    for task in ("mail.a", "mail.a", "mail.b", "other", "other"):
        session.enqueue(task)

    claimed = [attempt.task for attempt in session.claim()]

    assert sorted(claimed) == ["mail.a", "mail.b", "other", "other"]


def test_a_pattern_that_changes_takes_the_limits_that_it_made_along(session):
    limit(session, "api:*")
    rate_set(session, "api:own", SLOW, 1)
    enqueue_for(session, *["api:a"] * 3, *["api:own"] * 3)
    session.claim()
    session.claim()

    rate_set(session, "api:*", 1000, 5)
    wait_until(lambda: session.claim() == [] and running_by_key(session)["api:a"] == 3)

    assert running_by_key(session) == {"api:a": 3, "api:own": 1}


def test_a_pattern_that_is_removed_frees_all_of_its_lines(session):
    limit(session, "api:*")
    enqueue_for(session, *["api:a"] * 3, *["api:b"] * 2)
    session.claim()
    session.claim()

    freed = session.one("SELECT pgqueue.rate_remove('api:*')")

    assert freed == 3
    assert session.one("SELECT count(*) FROM pgqueue.rate_limits") == 0
    assert len(session.claim()) == 3
    assert session.one("SELECT pgqueue.rate_remove('api:*')") is None


def test_two_claims_that_meet_a_new_key_at_once_pass_its_limit_neither(session, open_session):
    limit(session, "api:*", burst=2)
    enqueue_for(session, *["api:a"] * 4)
    undecided = open_session(autocommit=False)
    undecided.claim(max_jobs=1)
    session.rows("SET statement_timeout = '60s'")

    meanwhile = session.claim()
    undecided.connection.commit()
    session.claim()

    assert meanwhile == []
    assert running_by_key(session) == {"api:a": 2}


def test_keys_that_nobody_uses_any_more_are_forgotten_and_start_with_a_full_burst(session):
    limit(session, "api:*", burst=2)
    enqueue_for(session, "api:a", "api:b", "api:b", "api:b")
    session.claim()
    session.claim()
    let_pass(session, 0)
    session.rows("UPDATE pgqueue.rate_limits SET tat = tat - interval '1 year'")

    forgotten = session.one("SELECT pgqueue.rate_mend()")

    assert forgotten == 1  # somebody waits for the other
    assert session.one("SELECT count(*) FROM pgqueue.rate_limits WHERE pattern = 'api:*'") == 1
    enqueue_for(session, *["api:a"] * 3)
    session.claim()
    session.claim()
    assert running_by_key(session)["api:a"] == 3  # the first, and two of these


def test_hundreds_of_keys_are_served_side_by_side(session):
    limit(session, "api:*")
    enqueue_for(
        session, *(f"api:{number}" for number in range(300)), *(f"api:{number}" for number in range(300))
    )
    session.rows("SET synchronous_commit = off")
    done = []

    def drain() -> int:
        attempts = session.claim(max_jobs=100)
        done.extend(session.complete(*attempts))
        return len(done)

    wait_until(lambda: drain() >= 300, 120)
    assert session.claim() == []
    let_pass(session, A_TOKENS_TIME)
    wait_until(lambda: drain() >= 600, 120)


# What code declares.


def declare(session: Session, **limits: tuple[float, int] | None) -> None:
    definitions = [
        {
            "name": name.replace("_", ":"),
            "tokens_per_second": said and said[0],
            "burst": said and said[1],
        }
        for name, said in limits.items()
    ]
    session.call("rate_declare", definitions=json.dumps(definitions))


def test_code_makes_changes_and_takes_back_what_it_declared(session):
    declare(session, task_t=(SLOW, 1), task_u=(5, 1))
    for _ in range(3):
        session.enqueue()
    session.claim()
    session.claim()

    declare(session, task_t=None, task_u=(6, 2))

    assert session.rows("SELECT name, tokens_per_second, burst FROM pgqueue.rate_limits") == [
        ("task:u", 6, 2)
    ]
    assert len(session.claim()) == 2


def test_code_leaves_alone_what_an_operator_made_or_changed(session):
    declare(session, task_changed=(5, 1))
    rate_set(session, "task:changed", 7)
    session.rows("INSERT INTO pgqueue.rate_limits (name, tokens_per_second) VALUES ('task:made', 8)")

    declare(session, task_changed=(5, 1), task_made=(5, 1))
    declare(session, task_changed=None, task_made=None)

    found = session.rows("SELECT name, tokens_per_second FROM pgqueue.rate_limits ORDER BY name")
    assert found == [("task:changed", 7), ("task:made", 8)]


def test_workers_that_start_at_once_declare_without_a_deadlock(session, open_session):
    names = [f"task:{number}" for number in range(50)]

    def start(worker: Session) -> None:
        for nth in range(5):
            some = [
                {"name": name, "tokens_per_second": nth + 1, "burst": 1}
                for name in random.sample(names, len(names))
            ]
            worker.call("rate_declare", definitions=json.dumps(some))

    at_once(*(lambda w=worker: start(w) for worker in [open_session() for _ in range(4)]))

    assert session.one("SELECT count(*) FROM pgqueue.rate_limits") == 50


# All at once.


@pytest.mark.parametrize("name", ["queue:default", "task:t"])
def test_no_second_sees_more_starts_than_the_rate_and_the_burst(session, open_session, name):
    limit(session, name, tokens_per_second=100, burst=10)
    session.rows("INSERT INTO pgqueue.jobs (task) SELECT 't' FROM generate_series(1, 1500)")
    starts: list[float] = []
    patience = time.monotonic() + 240

    def claim(claimer: Session) -> None:
        claimer.rows("SET synchronous_commit = off")
        while len(starts) < 250 and time.monotonic() < patience:
            if attempts := claimer.claim(max_jobs=20):
                started = (
                    "SELECT extract(epoch FROM started_at)::float8 FROM pgqueue.jobs WHERE id = ANY (%s)"
                )
                starts.extend([row[0] for row in claimer.rows(started, ids(attempts))])
                claimer.complete(*attempts)
            else:
                time.sleep(0.02)

    at_once(*(lambda c=claimer: claim(c) for claimer in [open_session() for _ in range(4)]))

    assert most_in_any(1.0, starts) <= 100 + 10
    assert len(starts) >= 250
    assert taken(session, name) == len(starts)
