"""complete, fail, release, crash, reap, cancel, redrive: where a job goes, and what is remembered of it."""

from __future__ import annotations

import datetime as dt
import json

import psycopg
import pytest


def wait_seconds(session, job_id):
    """How long the job has to wait from now."""
    return session.one(
        "SELECT extract(epoch FROM run_at - clock_timestamp())::float8 FROM pgqueue.jobs WHERE id = %s",
        job_id,
    )


def start(session, **parameters):
    job_id = session.enqueue(**parameters)
    return next(
        attempt for attempt in session.claim(parameters.get("queue", "default")) if attempt.job_id == job_id
    )


# Success.


def test_a_completed_job_moves_to_the_history_with_its_result(session):
    attempt = start(session, args={"n": 1}, concurrency_key="k", unique_key="u", headers='{"h": 1}')

    completed = session.complete(attempt, results=['{"total": 3}'])

    job = session.finished(attempt.job_id)
    assert completed == [attempt.job_id]
    assert session.job(attempt.job_id) is None
    assert (job.state, job.result, job.args, job.headers) == ("succeeded", {"total": 3}, {"n": 1}, {"h": 1})
    assert (job.claim_token, job.worker_id, job.attempt) == (attempt.token, session.worker_id, 1)
    assert (job.concurrency_key, job.unique_key, job.reason) == ("k", "u", None)


def test_a_result_that_was_not_kept_says_why(session):
    attempt = start(session)

    session.complete(attempt, results=[None], reasons=["the result is larger than 1 MB"])

    job = session.finished(attempt.job_id)
    assert (job.result, job.reason) == (None, "the result is larger than 1 MB")


def test_results_stay_with_their_jobs_whatever_the_order(session):
    first, second = start(session), start(session)

    session.complete(second, first, results=["2", "1"])

    assert (session.finished(first.job_id).result, session.finished(second.job_id).result) == (1, 2)


def test_a_queue_without_history_keeps_none(session):
    session.rows("INSERT INTO pgqueue.queues (name, retention_seconds) VALUES ('q', 0)")
    attempt = start(session, queue="q")
    cancelled = session.enqueue(queue="q")

    assert session.complete(attempt) == [attempt.job_id]
    session.cancel(cancelled)

    assert (session.state(attempt.job_id), session.state(cancelled)) == (None, None)


def test_a_missing_day_in_the_history_is_told_apart_and_heals(session):
    attempt = start(session)
    today = session.one("SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    session.rows(f"DROP TABLE pgqueue.finished_jobs_{today}")

    with pytest.raises(psycopg.errors.CheckViolation, match="no partition of relation"):
        session.complete(attempt)
    made = session.call("make_partitions", days=0)

    assert made == [(1,)]
    assert session.complete(attempt) == [attempt.job_id]


# Failure.


def test_a_failed_job_waits_and_remembers(session):
    attempt = start(session)

    states = session.fail(attempt, errors=["Traceback: no such file"], retry_seconds=[3000])

    job = session.job(attempt.job_id)
    (error,) = job.errors
    assert states == {attempt.job_id: "scheduled"}
    assert wait_seconds(session, attempt.job_id) == pytest.approx(3000, abs=60)
    assert (error["attempt"], error["error"]) == (1, "Traceback: no such file")
    assert error["worker_id"] == str(session.worker_id)
    assert dt.datetime.fromisoformat(error["at"]).tzinfo is not None
    assert (job.attempt, job.claim_token, job.started_at, job.deadline_at) == (1, None, None, None)


def test_a_failed_job_without_a_delay_waits_with_full_jitter(session):
    waits = []
    for attempt in [start(session, max_attempts=20) for _ in range(200)]:
        session.fail(attempt, base_seconds=1000, max_seconds=1500)
        waits.append(wait_seconds(session, attempt.job_id))

    assert -60 < min(waits) < 500
    assert 1000 < max(waits) <= 1500


def test_a_delay_of_zero_is_a_value(session):
    attempt = start(session)

    assert session.fail(attempt, retry_seconds=[0]) == {attempt.job_id: "ready"}
    assert [again.job_id for again in session.claim()] == [attempt.job_id]


def test_each_job_of_a_batch_ends_its_own_way(session):
    scheduled, ready, dead, cancelled, jittered = (start(session) for _ in range(5))

    states = session.fail(
        jittered,
        cancelled,
        dead,
        ready,
        scheduled,
        errors=["e5", "e4", "e3", "e2", "e1"],
        retry_seconds=[None, None, None, 0, 60],
        is_dead=[False, None, True, False, None],
        is_cancelled=[None, True, None, None, None],
    )

    assert states == {
        scheduled.job_id: "scheduled",
        ready.job_id: "ready",
        dead.job_id: "dead",
        cancelled.job_id: "cancelled",
        jittered.job_id: "scheduled",
    }
    assert session.dead(dead.job_id).reason == "e3"
    assert session.finished(cancelled.job_id).reason == "e4"
    assert session.job(scheduled.job_id).errors[0]["error"] == "e1"


def test_the_last_attempt_that_fails_makes_the_job_dead_with_its_whole_history(session):
    job_id = session.enqueue(
        "send", {"n": 1}, max_attempts=2, headers='{"h": 1}', unique_key="u", idempotency_key="i"
    )
    session.fail(*session.claim(), errors=["first"], retry_seconds=[0])

    states = session.fail(*session.claim(), errors=["second"], retry_seconds=[0])

    dead = session.dead(job_id)
    assert states == {job_id: "dead"}
    assert [error["error"] for error in dead.errors] == ["first", "second"]
    assert (dead.reason, dead.attempt, dead.max_attempts) == ("second", 2, 2)
    assert (dead.task, dead.args, dead.headers, dead.unique_key) == ("send", {"n": 1}, {"h": 1}, "u")


def test_a_failure_without_words_still_has_a_reason(session):
    attempt = start(session)

    session.fail(attempt, errors=[None], is_dead=[True])

    assert session.dead(attempt.job_id).reason == "failed"


def test_the_history_keeps_the_last_fifty_errors_cut_to_a_readable_length(session):
    attempt = start(session, max_attempts=100)
    for number in range(60):
        session.fail(attempt, errors=[f"{number} " + "x" * 10_000], retry_seconds=[0])
        (attempt,) = session.claim()

    errors = session.job(attempt.job_id).errors
    assert [error["error"].split()[0] for error in errors] == [str(number) for number in range(10, 60)]
    assert {len(error["error"]) for error in errors} == {8000}


def test_fail_of_one_says_the_state_or_null(session):
    attempt = start(session)

    first = session.call("fail", job_id=attempt.job_id, token=attempt.token, error="x", is_cancelled=True)
    second = session.call("fail", job_id=attempt.job_id, token=attempt.token, error="x")

    assert (first, second) == ([("cancelled",)], [(None,)])


# Giving back.


def test_a_released_job_is_ready_as_if_nothing_had_happened(session):
    attempt = start(session)
    before = attempt.run_at

    states = session.release(attempt)

    job = session.job(attempt.job_id)
    assert states == {attempt.job_id: "ready"}
    assert (job.attempt, job.errors) == (0, None)
    assert session.one("SELECT run_at::text FROM pgqueue.jobs") == before


def test_each_released_job_has_its_own_delay(session):
    snoozed, given_back, at_once = (start(session) for _ in range(3))

    states = session.release(at_once, snoozed, given_back, delay_seconds=[0, 4000, None], reason="not now")

    assert states == {snoozed.job_id: "scheduled", given_back.job_id: "ready", at_once.job_id: "ready"}
    assert wait_seconds(session, snoozed.job_id) == pytest.approx(4000, abs=60)
    assert session.job(snoozed.job_id).errors[0]["error"] == "not now"


def test_a_release_that_burns_counts_the_attempt_and_may_be_the_last(session):
    attempt = start(session, max_attempts=2)
    first = session.release(attempt, burn=True, reason="evicted")
    (attempt,) = session.claim()

    second = session.release(attempt, burn=True, reason="evicted")

    assert first == {attempt.job_id: "ready"}
    assert second == {attempt.job_id: "dead"}
    assert session.dead(attempt.job_id).reason == "evicted"


# Crashes.


def test_the_first_crash_costs_nothing_the_second_time_the_third_its_life(session):
    attempt = start(session, max_attempts=1)
    states, waits = [], []
    for _ in range(3):
        states += session.crash(attempt, reason="the child was killed (signal 9)").values()
        if states[-1] != "dead":
            waits.append(wait_seconds(session, attempt.job_id))
            session.make_due()
            (attempt,) = session.claim()

    dead = session.dead(attempt.job_id)
    assert states == ["ready", "scheduled", "dead"]
    assert waits[0] < 0
    assert -60 < waits[1] <= 2
    assert (dead.reason, dead.attempt, dead.crashes) == ("the child was killed (signal 9)", 3, 3)


def test_crashes_are_not_charged_to_the_attempts(session):
    attempt = start(session, max_attempts=2)
    session.crash(attempt)
    (attempt,) = session.claim()
    first = session.fail(attempt, retry_seconds=[0])
    (attempt,) = session.claim()

    second = session.fail(attempt, retry_seconds=[0])

    assert (first, second) == ({attempt.job_id: "ready"}, {attempt.job_id: "dead"})
    assert session.dead(attempt.job_id).attempt == 3


def test_the_number_of_crashes_allowed_is_the_callers(session):
    attempt = start(session)

    assert session.crash(attempt, max_crashes=1) == {attempt.job_id: "dead"}


# Reaping.


def test_an_expired_lease_is_reaped_once_as_a_crash(session):
    attempt = start(session, task="send", queue="mail")
    session.expire(attempt)

    first, second = session.call("reap"), session.call("reap")

    job = session.job(attempt.job_id)
    assert first == [
        (attempt.job_id, "ready", "lease expired: the worker crashed or was cut off", "send", "mail")
    ]
    assert second == []
    assert (job.attempt, job.crashes, job.state) == (1, 1, "ready")


def test_a_live_lease_is_left_alone(session):
    attempt = start(session)

    assert session.call("reap") == []
    assert session.heartbeat(attempt) == {attempt.job_id: "renewed"}


def test_a_job_past_its_deadline_is_reaped_as_a_failure(session):
    attempt = start(session, max_attempts=1)
    session.overrun(attempt)

    ((job_id, state, reason, _, _),) = session.call("reap")

    assert (job_id, state, reason) == (attempt.job_id, "dead", "timed out")
    assert session.dead(job_id).crashes == 0


def test_the_owner_gets_its_grace_to_report_a_timeout_first(session):
    attempt = start(session)
    session.rows("UPDATE pgqueue.jobs SET deadline_at = clock_timestamp() - interval '1 second'")

    within = session.call("reap")
    beyond = session.call("reap", deadline_grace_seconds=0.5)

    assert within == []
    assert [row.job_id for row in beyond] == [attempt.job_id]


def test_the_reaper_counts_crashes_as_whoever_sees_them_does(session):
    job_id = session.enqueue(max_attempts=1)
    states, waits = [], []
    for _ in range(3):
        session.make_due()
        session.expire(*session.claim())
        states += [row.state for row in session.call("reap")]
        if states[-1] != "dead":
            waits.append(wait_seconds(session, job_id))

    assert states == ["ready", "scheduled", "dead"]
    assert waits[0] < 0
    assert -60 < waits[1] <= 2
    assert session.dead(job_id).reason == "lease expired: the worker crashed or was cut off"


@pytest.mark.parametrize("lease_seconds", [0, -1, 86_401, 1e30, float("inf"), float("nan"), None])
def test_a_lease_that_the_reaper_could_not_count_is_refused(session, lease_seconds):
    session.enqueue()

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="lease_seconds is"):
        session.claim(lease_seconds=lease_seconds)
    assert len(session.claim(lease_seconds=86_400)) == 1
    with pytest.raises(psycopg.errors.CheckViolation):
        session.rows("UPDATE pgqueue.jobs SET lease_seconds = 'infinity'")


# Heartbeats.


def test_a_heartbeat_says_for_each_job_where_it_stands(session, open_session):
    renewed, cancelled, busy, overdue, lost = (start(session) for _ in range(5))
    session.cancel(cancelled.job_id)
    session.overrun(overdue)
    session.complete(lost)
    holder = open_session(autocommit=False)
    holder.rows("SELECT FROM pgqueue.jobs WHERE id = %s FOR UPDATE", busy.job_id)
    session.rows("SET statement_timeout = '20s'")

    verdicts = session.heartbeat(lost, overdue, busy, cancelled, renewed)

    assert verdicts == {
        renewed.job_id: "renewed",
        cancelled.job_id: "cancel",
        busy.job_id: "busy",
        overdue.job_id: "overdue",
        lost.job_id: "lost",
    }


def test_a_heartbeat_prolongs_the_lease_of_a_job_whose_owner_is_about_to_stop_it(session):
    """Else the lease would end before the grace that the owner leaves the handler, and it would run twice."""
    attempt = start(session)
    session.expire(attempt)
    session.overrun(attempt, seconds=20)

    said = session.heartbeat(attempt)
    within = session.call("reap", deadline_grace_seconds=30)
    beyond = session.call("reap", deadline_grace_seconds=10)

    assert (said, within) == ({attempt.job_id: "overdue"}, [])
    assert [(row.job_id, row.reason) for row in beyond] == [(attempt.job_id, "timed out")]


def test_a_job_past_its_deadline_whose_row_is_locked_is_asked_for_again(session, open_session):
    attempt = start(session)
    session.overrun(attempt)
    holder = open_session(autocommit=False)
    holder.rows("SELECT FROM pgqueue.jobs WHERE id = %s FOR UPDATE", attempt.job_id)

    assert session.heartbeat(attempt) == {attempt.job_id: "busy"}


def test_a_heartbeat_prolongs_the_lease(session):
    attempt = start(session)
    session.rows("UPDATE pgqueue.jobs SET heartbeat_at = clock_timestamp() - interval '9 s'")

    session.heartbeat(attempt)

    assert session.one("SELECT clock_timestamp() - heartbeat_at < interval '5 s' FROM pgqueue.jobs")


# Cancelling.


@pytest.mark.parametrize("state", ["ready", "scheduled", "blocked"])
def test_a_waiting_job_ends_at_once_with_the_reason(session, state):
    if state == "blocked":
        start(session, concurrency_key="k")
    job_id = session.enqueue(concurrency_key="k", delay_seconds=60 if state == "scheduled" else 0)
    if state == "blocked":
        session.claim()
    assert session.state(job_id) == state

    outcomes = dict(session.call("cancel", job_ids=[job_id], reason="not wanted any more"))

    assert outcomes == {job_id: "cancelled"}
    assert (session.state(job_id), session.finished(job_id).reason) == ("cancelled", "not wanted any more")


@pytest.mark.parametrize("end", ["fail", "release", "crash", "reap"])
def test_a_running_job_that_is_cancelled_never_runs_again(session, end):
    attempt = start(session)
    outcome = session.cancel(attempt.job_id)

    if end == "reap":
        session.expire(attempt)
        session.call("reap")
    else:
        getattr(session, end)(attempt)

    assert outcome == {attempt.job_id: "requested"}
    assert session.state(attempt.job_id) == "cancelled"


def test_a_running_job_that_is_cancelled_may_still_succeed(session):
    attempt = start(session)
    session.cancel(attempt.job_id)

    session.complete(attempt)

    assert session.state(attempt.job_id) == "succeeded"


def test_what_is_not_live_is_not_cancelled(session):
    attempt = start(session)
    session.complete(attempt)

    assert session.cancel(attempt.job_id, 10**9) == {}


# Promoting.


def test_due_jobs_become_ready_and_others_stay(session):
    due, later = session.enqueue(delay_seconds=60), session.enqueue(delay_seconds=600)
    session.rows("UPDATE pgqueue.jobs SET run_at = clock_timestamp() WHERE id = %s", due)

    assert session.call("promote") == [(1,)]
    assert (session.state(due), session.state(later)) == ("ready", "scheduled")
    assert session.call("promote") == [(0,)]


# Back from the dead.


def test_a_dead_job_comes_back_with_its_history_and_new_attempts(session):
    attempt = start(
        session, max_attempts=1, args={"n": 1}, concurrency_key="k", unique_key="u", idempotency_key="i"
    )
    session.fail(attempt, errors=["first life"])

    outcomes = session.redrive(attempt.job_id)

    job = session.job(attempt.job_id)
    assert outcomes == {attempt.job_id: "ready"}
    assert (job.state, job.attempt, job.max_attempts, job.crashes) == ("ready", 1, 6, 0)
    assert (job.args, job.concurrency_key, job.unique_key, job.idempotency_key) == ({"n": 1}, "k", "u", "i")
    assert job.errors[0]["error"] == "first life"
    assert session.dead(attempt.job_id) is None


def test_a_unique_key_that_is_taken_meanwhile_is_that_rows_outcome(session):
    taken, free = start(session, unique_key="u"), start(session)
    session.fail(taken, free, is_dead=[True, True])
    holder = session.enqueue(unique_key="u")

    outcomes = session.redrive(taken.job_id, free.job_id, 10**9)

    assert outcomes == {taken.job_id: "unique_key_taken", free.job_id: "ready", 10**9: "not_found"}
    assert (session.state(taken.job_id), session.state(holder)) == ("dead", "ready")


def test_two_dead_jobs_of_one_unique_key_cannot_both_come_back(session):
    first = start(session, unique_key="u")
    session.fail(first, is_dead=[True])
    second = start(session, unique_key="u")
    session.fail(second, is_dead=[True])

    outcomes = session.redrive(first.job_id, second.job_id)

    assert sorted(outcomes.values()) == ["ready", "unique_key_taken"]


def test_a_schema_of_errors_that_is_no_array_is_refused(session):
    job_id = session.enqueue()

    with pytest.raises(psycopg.errors.CheckViolation, match="jobs_documents_fit"):
        session.rows("UPDATE pgqueue.jobs SET errors = %s WHERE id = %s", json.dumps({}), job_id)


# Counting.


def test_counts_by_state_and_by_key(session):
    start(session, concurrency_key="k", concurrency_limit=1)
    session.enqueue(concurrency_key="k")
    session.claim()
    session.enqueue(queue="q")

    states = {(row.queue, row.state): row.jobs for row in session.rows("SELECT * FROM pgqueue.job_counts")}
    (key,) = session.rows("SELECT * FROM pgqueue.key_counts")

    assert states == {("default", "running"): 1, ("default", "blocked"): 1, ("q", "ready"): 1}
    assert (key.concurrency_key, key.running, key.ready, key.blocked) == ("k", 1, 0, 1)


def test_the_depth_of_a_queue_is_counted_up_to_a_bound(session):
    session.rows("INSERT INTO pgqueue.jobs (task) SELECT 't' FROM generate_series(1, 30)")

    assert session.call("ready_depth", queue="default") == [(30,)]
    assert session.call("ready_depth", queue="default", up_to=10) == [(11,)]
