"""enqueue and enqueue_many: one row, or the one that stands for it; refused at the door or in the queue."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.sql.support import OpenSession


def waiting_seconds(session, job_id):
    return session.one(
        "SELECT extract(epoch FROM run_at - created_at)::float8 FROM pgqueue.jobs WHERE id = %s", job_id
    )


# When.


def test_a_delay_counts_from_the_databases_now(session):
    job_id = session.enqueue(delay_seconds=90.5)

    assert session.state(job_id) == "scheduled"
    assert waiting_seconds(session, job_id) == 90.5


def test_no_delay_is_ready_at_once(session):
    assert session.state(session.enqueue(delay_seconds=0)) == "ready"


def test_a_run_at_goes_before_a_delay(session):
    past = session.one("SELECT clock_timestamp() - interval '1 min'")

    job = session.job(session.enqueue(run_at=past, delay_seconds=60))

    assert (job.state, job.run_at) == ("ready", past)


@pytest.mark.parametrize("run_at", ["infinity", "-infinity", "1999-12-31", "3000-01-02"])
def test_a_time_that_cannot_be_meant_is_refused(session, run_at):
    with pytest.raises(psycopg.errors.CheckViolation, match="jobs_run_at_is_sane"):
        session.enqueue(run_at=run_at)


# Unique keys.


def test_skip_gives_the_live_job_of_that_key(session):
    first = session.enqueue(args={"n": 1}, unique_key="u")

    second = session.enqueue(args={"n": 2}, unique_key="u")

    assert second == first
    assert session.job(first).args == {"n": 1}


def test_a_key_is_free_again_when_its_job_has_ended(session):
    first = session.enqueue(unique_key="u")
    session.complete(*session.claim())

    assert session.enqueue(unique_key="u") != first


def test_reject_raises_and_leaves_the_live_job_alone(session):
    first = session.enqueue(args={"n": 1}, unique_key="u")

    with pytest.raises(psycopg.errors.UniqueViolation) as refused:
        session.enqueue(args={"n": 2}, unique_key="u", on_conflict="reject")

    assert refused.value.diag.constraint_name == "jobs_unique_key"
    assert session.job(first).args == {"n": 1}


def test_replace_makes_the_waiting_job_ours_from_head_to_foot(session):
    first = session.enqueue("old", {"n": 1}, unique_key="u", queue="a", headers='{"h": 1}')

    second = session.enqueue(
        "new",
        {"n": 2},
        unique_key="u",
        on_conflict="replace",
        queue="b",
        priority=4,
        timeout_seconds=0,
        concurrency_key="c",
        concurrency_limit=3,
        idempotency_key="i",
        delay_seconds=60,
    )

    job = session.job(first)
    assert second == first
    assert (job.task, job.args, job.queue, job.priority, job.timeout_seconds) == ("new", {"n": 2}, "b", 4, 0)
    assert (job.concurrency_key, job.concurrency_limit, job.idempotency_key, job.headers) == (
        "c",
        3,
        "i",
        None,
    )
    assert job.state == "scheduled"


def test_replace_with_a_later_time_again_and_again_is_a_debounce(session):
    ids = {
        session.enqueue(args={"n": n}, unique_key="u", on_conflict="replace", delay_seconds=30)
        for n in range(5)
    }

    assert len(ids) == 1
    assert session.job(*ids).args == {"n": 4}


def test_replace_leaves_a_running_job_alone(session):
    first = session.enqueue(args={"n": 1}, unique_key="u")
    (attempt,) = session.claim()

    second = session.enqueue(args={"n": 2}, unique_key="u", on_conflict="replace")

    assert (second, session.job(first).args) == (first, {"n": 1})
    assert session.complete(attempt) == [first]


def test_replace_does_not_hold_up_the_end_of_a_running_job(session, open_session: OpenSession):
    first = session.enqueue(unique_key="u")
    (attempt,) = session.claim()
    undecided = open_session(autocommit=False)
    undecided.enqueue(unique_key="u", on_conflict="replace")
    session.rows("SET lock_timeout = '20s'")

    assert session.complete(attempt) == [first]


def test_replace_gives_all_attempts_anew(session):
    job_id = session.enqueue(unique_key="u", max_attempts=2)
    session.fail(*session.claim())

    session.enqueue(unique_key="u", max_attempts=2, on_conflict="replace")

    job = session.job(job_id)
    assert (job.attempt, job.max_attempts) == (1, 3)


def test_replacing_the_ready_job_of_a_key_wakes_the_one_that_waited_behind_it(session):
    running = session.enqueue(concurrency_key="k")
    (attempt,) = session.claim()
    ready, blocked = (
        session.enqueue(concurrency_key="k", unique_key="u"),
        session.enqueue(concurrency_key="k"),
    )
    session.claim()
    session.complete(attempt)
    assert (session.state(ready), session.state(blocked)) == ("ready", "blocked")

    session.enqueue(concurrency_key="k", unique_key="u", on_conflict="replace", delay_seconds=60)

    assert session.state(running) == "succeeded"
    assert (session.state(ready), session.state(blocked)) == ("scheduled", "ready")


# Debounce.


def debounce(session, seconds=60.0, **parameters):
    return session.enqueue(unique_key="u", on_conflict="debounce", delay_seconds=seconds, **parameters)


def made_ago(session, job_id, seconds):
    """Let a job have been made so long ago."""
    session.rows(
        "UPDATE pgqueue.jobs SET created_at = created_at - make_interval(secs => %s) WHERE id = %s",
        seconds,
        job_id,
    )


def due_in_seconds(session, job_id):
    return session.one(
        "SELECT extract(epoch FROM run_at - clock_timestamp())::float8 FROM pgqueue.jobs WHERE id = %s",
        job_id,
    )


def test_debounce_puts_the_waiting_job_off_again_with_the_latest_arguments(session):
    first = debounce(session, args={"n": 1})
    made_ago(session, first, 100)
    session.rows("UPDATE pgqueue.jobs SET run_at = clock_timestamp() + interval '1 s'")

    second = debounce(session, args={"n": 2})

    assert (second, session.job(first).args) == (first, {"n": 2})
    assert 30 < due_in_seconds(session, first) <= 60


def test_debounce_puts_off_no_longer_than_ten_times_the_delay(session):
    job_id = debounce(session)
    made_ago(session, job_id, 570)

    debounce(session)

    assert waiting_seconds(session, job_id) == 600


def test_debounce_puts_off_no_longer_than_is_said(session):
    job_id = debounce(session)
    made_ago(session, job_id, 570)

    debounce(session, max_delay_seconds=580)

    assert waiting_seconds(session, job_id) == 580


def test_a_job_that_was_put_off_long_enough_is_ready_at_once(session):
    job_id = debounce(session)
    made_ago(session, job_id, 3600)

    debounce(session)

    assert session.state(job_id) == "ready"
    assert [attempt.job_id for attempt in session.claim()] == [job_id]


def test_debounce_puts_off_a_job_that_is_ready_but_not_one_that_runs(session):
    job_id = debounce(session, 0.0)
    was, now = session.state(job_id), session.state(debounce(session))
    session.make_due()
    session.claim()

    while_running = debounce(session, args={"n": 2})

    assert (was, now) == ("ready", "scheduled")
    assert (while_running, session.state(job_id), session.job(job_id).args) == (job_id, "running", {})


def test_debounce_without_a_delay_is_refused(session):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="it needs delay_seconds"):
        session.enqueue(unique_key="u", on_conflict="debounce")


# Until its start, or its end.


def test_a_key_counts_until_the_job_has_ended_unless_it_is_said(session):
    first = session.enqueue(unique_key="u")
    session.claim()

    assert session.enqueue(unique_key="u") == first


def test_a_job_that_is_unique_until_its_start_gives_its_key_up_when_it_is_claimed(session):
    first = session.enqueue(unique_key="u", unique_until="start", concurrency_key="k")
    waiting = session.enqueue(unique_key="u", unique_until="start")
    (attempt,) = session.claim()

    second = session.enqueue(unique_key="u", unique_until="start")

    assert waiting == first == attempt.job_id
    assert second != first
    assert (session.job(first).unique_key, session.job(second).unique_key) == (None, "u")


def test_a_started_job_that_waits_for_its_retry_does_not_hold_the_key(session):
    first = session.enqueue(unique_key="u", unique_until="start")
    session.fail(*session.claim(), retry_seconds=[60])

    second = session.enqueue(unique_key="u", unique_until="start")
    session.make_due()

    assert second != first
    assert sorted(attempt.job_id for attempt in session.claim()) == [first, second]


def test_one_from_the_line_of_a_rate_limit_gives_its_key_up_too(session):
    session.rows("INSERT INTO pgqueue.rate_limits (name, tokens_per_second) VALUES ('task:t', 1000)")
    session.enqueue()
    first = session.enqueue(unique_key="u", unique_until="start")
    session.claim(max_jobs=1)
    while session.state(first) != "running":
        session.claim()

    assert session.enqueue(unique_key="u") != first


def test_how_long_a_key_counts_comes_from_the_task(session):
    session.rows(
        "INSERT INTO pgqueue.tasks (name, unique_key, is_unique_until_start) "
        "VALUES ('t', 'u', true), ('s', 'v', NULL)"
    )
    session.rows("INSERT INTO pgqueue.jobs (task) VALUES ('t'), ('s')")
    session.claim()

    held = session.rows("SELECT task, unique_key FROM pgqueue.jobs ORDER BY task")
    session.enqueue("t", unique_until="end")
    session.claim()

    assert held == [("s", "v"), ("t", None)]
    assert session.one("SELECT count(*) FROM pgqueue.jobs WHERE unique_key = 'u'") == 1


def test_an_unknown_end_of_uniqueness_is_refused(session):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="unique_until is never, not end or start"):
        session.enqueue(unique_until="never")


@pytest.mark.parametrize("on_conflict", ["ignore", "", None])
def test_an_unknown_answer_to_a_conflict_is_refused(session, on_conflict):
    with pytest.raises(
        psycopg.errors.InvalidParameterValue,
        match=r"on_conflict is .*, not skip, replace, reject or debounce",
    ):
        session.enqueue(on_conflict=on_conflict)


def test_enqueue_one_says_what_it_took(session):
    def outcome(**parameters):
        return session.call("enqueue_one", task="t", **parameters)[0][1]

    without_key, first = outcome(), outcome(unique_key="u")
    skipped, replaced = outcome(unique_key="u"), outcome(unique_key="u", on_conflict="replace")
    put_off = outcome(unique_key="u", on_conflict="debounce", delay_seconds=0)
    session.claim()
    running = outcome(unique_key="u", on_conflict="replace")

    assert (without_key, first) == ("inserted", "inserted")
    assert (skipped, replaced, put_off, running) == ("skipped", "replaced", "replaced", "skipped")


@pytest.mark.parametrize("on_conflict", ["skip", "replace"])
def test_of_many_callers_at_once_all_get_the_same_job(session, open_session: OpenSession, on_conflict):
    callers = [open_session() for _ in range(8)]
    start = threading.Barrier(8)

    def enqueue(caller):
        start.wait()
        return {caller.enqueue(unique_key=f"u{n}", on_conflict=on_conflict) for n in range(20)}

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(enqueue, callers))

    assert all(each == ids[0] for each in ids)
    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 20


# What is refused.


def test_arguments_beyond_a_megabyte_are_refused_by_their_size_as_text(session):
    fits = {"x": "y" * (1_048_576 - len('{"x": ""}'))}
    job_id = session.enqueue(args=fits)

    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        session.enqueue("send", args={"x": fits["x"] + "y"})

    assert session.state(job_id) == "ready"
    assert refused.value.diag.constraint_name == "jobs_args_fit"
    assert refused.value.diag.message_primary == (
        "the args of task send are 1048577 bytes as text, a job carries at most 1048576"
    )


def test_a_small_number_that_is_large_as_text_counts_as_large(session):
    numbers = ",".join(["1e131071"] * 8)

    with pytest.raises(psycopg.errors.CheckViolation, match="bytes as text"):
        session.rows("SELECT pgqueue.enqueue('t', %s::jsonb)", f'{{"x": [{numbers}]}}')


def test_headers_and_progress_are_bounded_too(session):
    large = json.dumps({"x": "y" * 65_536})
    job_id = session.enqueue()

    for refuse in (
        lambda: session.enqueue(headers=large),
        lambda: session.rows("UPDATE pgqueue.jobs SET progress = %s WHERE id = %s", large, job_id),
    ):
        with pytest.raises(psycopg.errors.CheckViolation) as refused:
            refuse()
        assert refused.value.diag.constraint_name == "jobs_headers_fit"


@pytest.mark.parametrize(
    "wrong",
    [
        {"queue": ""},
        {"queue": "q" * 101},
        {"task": "t" * 256},
        {"priority": -1},
        {"max_attempts": 0},
        {"timeout_seconds": -1},
        {"timeout_seconds": 604_801},
        {"concurrency_key": "k", "concurrency_limit": 0},
        {"unique_key": "u" * 256},
        {"headers": "[]"},
    ],
)
def test_what_no_job_can_have_is_refused(session, wrong):
    with pytest.raises(psycopg.errors.CheckViolation):
        session.enqueue(**wrong)

    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 0


def test_arguments_that_are_no_object_are_refused(session):
    with pytest.raises(psycopg.errors.CheckViolation, match="jobs_documents_fit"):
        session.rows("SELECT pgqueue.enqueue('t', '[1]')")


def test_a_temporary_table_cannot_stand_in_for_ours(session):
    session.rows("CREATE TEMP TABLE jobs (LIKE pgqueue.jobs); CREATE TEMP TABLE tasks (LIKE pgqueue.tasks)")

    session.enqueue()

    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 1
    assert session.one("SELECT count(*) FROM pg_temp.jobs") == 0


def test_a_job_of_a_transaction_that_rolls_back_never_was(session):
    with session.connection.transaction(force_rollback=True):
        session.enqueue()

    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 0


# Many.


def test_many_come_back_in_the_order_given(session):
    session.enqueue(unique_key="b")

    outcomes = session.enqueue_many(
        {"task": "t", "unique_key": "z"},
        {"task": "t", "unique_key": "b", "on_conflict": "replace", "priority": 5},
        {"task": "t"},
        {"task": "t", "unique_key": "b"},
        {"task": "t", "unique_key": "a"},
    )

    assert [outcome for _, outcome in outcomes] == ["inserted", "replaced", "inserted", "skipped", "inserted"]
    keys = [session.job(job_id).unique_key for job_id, _ in outcomes]
    assert keys == ["z", "b", None, "b", "a"]


def test_many_without_unique_keys_keep_their_order_too(session):
    outcomes = session.enqueue_many(*({"task": "t", "args": {"n": n}} for n in range(50)))

    assert [session.job(job_id).args["n"] for job_id, _ in outcomes] == list(range(50))
    assert [job_id for job_id, _ in outcomes] == sorted(job_id for job_id, _ in outcomes)


def test_a_missing_and_a_null_member_mean_the_same(session):
    members = (
        "args",
        "queue",
        "run_at",
        "delay_seconds",
        "priority",
        "max_attempts",
        "timeout_seconds",
        "concurrency_key",
        "concurrency_limit",
        "unique_key",
        "unique_until",
        "on_conflict",
        "max_delay_seconds",
        "idempotency_key",
        "headers",
    )

    (missing, _), (null, _) = session.enqueue_many({"task": "t"}, {"task": "t", **dict.fromkeys(members)})
    (slow, _), _ = session.enqueue_many(
        {"task": "t", **dict.fromkeys(members)}, {"task": "t", "unique_key": "u"}
    )

    interesting = (
        "SELECT queue, priority, max_attempts, timeout_seconds, concurrency_limit, state, args, headers "
        "FROM pgqueue.jobs WHERE id = %s"
    )
    assert (
        session.row(interesting, missing) == session.row(interesting, null) == session.row(interesting, slow)
    )


@pytest.mark.parametrize("unique_key", [None, "u"])
def test_many_take_delays_and_times_alike(session, unique_key):
    (delayed, _), (past, _) = session.enqueue_many(
        {"task": "t", "delay_seconds": 60, "unique_key": unique_key},
        {"task": "t", "run_at": "2020-01-01T00:00:00Z", "delay_seconds": 60},
    )

    assert (session.state(delayed), session.state(past)) == ("scheduled", "ready")
    assert waiting_seconds(session, delayed) == 60


def test_one_wrong_job_refuses_the_batch(session):
    with pytest.raises(psycopg.errors.CheckViolation):
        session.enqueue_many({"task": "t"}, {"task": "t", "priority": -1})

    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 0


@pytest.mark.parametrize("keyed", [{}, {"unique_key": "u"}])
@pytest.mark.parametrize("without", [{"args": {}}, {"task": None}])
def test_a_job_without_a_task_refuses_the_batch_by_its_place(session, without, keyed):
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        session.enqueue_many({"task": "t"}, {**without, **keyed}, {"args": {}})

    assert caught.value.diag.message_primary == "job 1 of enqueue_many has no task"
    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 0


def test_a_misspelt_task_is_called_that_and_not_missing(session):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=r'job 0 of enqueue_many .* "tsak"'):
        session.enqueue_many({"tsak": "t"})


def test_one_job_without_a_task_is_refused(session):
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        session.rows("SELECT pgqueue.enqueue(NULL)")

    assert caught.value.diag.message_primary == "the job has no task"


@pytest.mark.parametrize("unique_key", [None, "u"])
def test_a_member_that_is_not_known_refuses_the_batch_by_its_name(session, unique_key):
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        session.enqueue_many({"task": "t"}, {"task": "t", "unique_key": unique_key, "prority": 5})

    assert refused.value.diag.message_primary.startswith(
        'job 1 of enqueue_many has the member "prority", which is none of: task, args, queue, '
    )
    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 0


@pytest.mark.parametrize("jobs", ['["t"]', "[[]]", "[null]", '[{"task": "t"}, 5]'])
def test_what_is_no_object_is_refused(session, jobs):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="wants a JSON array of objects"):
        session.call("enqueue_many", jobs=jobs)


@pytest.mark.parametrize(
    "wrong", [{"on_conflict": "ignore"}, {"unique_until": "never"}, {"on_conflict": "debounce"}]
)
def test_a_choice_that_is_none_is_refused_in_a_batch_without_unique_keys_too(session, wrong):
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        session.enqueue_many({"task": "t"}, {"task": "t", **wrong})


def test_many_take_everything_that_one_takes(session):
    one = {
        "unique_key": "u",
        "unique_until": "start",
        "on_conflict": "debounce",
        "delay_seconds": 60,
        "max_delay_seconds": 90,
    }
    ((job_id, _),) = session.enqueue_many({"task": "t", **one})
    made_ago(session, job_id, 80)

    ((again, outcome),) = session.enqueue_many({"task": "t", **one})

    assert (again, outcome) == (job_id, "replaced")
    assert waiting_seconds(session, job_id) == 90
    assert session.job(job_id).is_unique_until_start


@pytest.mark.parametrize("jobs", ['{"task": "t"}', '"t"', "null", None])
def test_what_is_no_array_is_refused(session, jobs):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="wants a JSON array"):
        session.call("enqueue_many", jobs=jobs)


def test_no_jobs_are_no_rows(session):
    assert session.enqueue_many() == []


def test_two_batches_with_the_same_keys_in_another_order_do_not_deadlock(open_session: OpenSession):
    jobs = [{"task": "t", "unique_key": f"u{number}", "on_conflict": "replace"} for number in range(100)]

    def enqueue(order):
        session = open_session()
        return [len(session.enqueue_many(*order)) for _ in range(5)]

    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(enqueue, [jobs, jobs[::-1]]))

    assert counts == [[100] * 5, [100] * 5]
