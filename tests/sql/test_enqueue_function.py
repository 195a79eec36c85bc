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


@pytest.mark.parametrize("on_conflict", ["ignore", "", None])
def test_an_unknown_answer_to_a_conflict_is_refused(session, on_conflict):
    with pytest.raises(
        psycopg.errors.InvalidParameterValue, match=r"on_conflict is .*, not skip, replace or reject"
    ):
        session.enqueue(on_conflict=on_conflict)


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
        "on_conflict",
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
