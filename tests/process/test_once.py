"""Effects that happen once, in real workers: in a transaction with the job's end, or elsewhere by a key."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgqueue.database import run
from pgqueue.sql import presence
from tests.process import once_jobs
from tests.process.support import Queue, WorkerProcess, worker
from tests.support import wait_until

APP = "tests.process.once_jobs:app"
IN_CI = "CI" in os.environ
# At each step so many of either kind.
JOBS = 100 if IN_CI else 20


@pytest.fixture
def payments(dsn: str) -> Iterator[Queue]:
    """A queue of jobs that pay."""
    made = Queue(dsn)
    run(made.connection, presence.register_tasks(once_jobs.app.registry.registrations()))
    made.connection.execute(once_jobs.TABLES)
    yield made
    made.close()


def paid(queue: Queue, job_id: int) -> int:
    return queue.one("SELECT count(*) FROM payments WHERE job_id = %s", job_id)


def calls(queue: Queue, job_id: int) -> list[str]:
    return [
        row[0] for row in queue.all("SELECT what FROM calls WHERE job_id = %s ORDER BY attempt, what", job_id)
    ]


def work(queue: Queue, folder: Path, *arguments: str) -> None:
    with worker(queue.dsn, folder, "--until-empty", "-c", "4", *arguments, app=APP, is_up=False) as started:
        started.wait(60)


# In a transaction.


@pytest.mark.parametrize("task", ["pay", "pay_async"])
def test_work_key_and_end_of_a_job_are_one_commit(payments: Queue, tmp_path: Path, task: str) -> None:
    job = payments.insert(task)

    work(payments, tmp_path)

    ended = payments.all(
        "SELECT state, result, f.xmin::text, p.xmin::text, k.xmin::text"
        " FROM pgqueue.finished_jobs AS f, payments AS p, pgqueue.processed_jobs AS k WHERE f.id = %s",
        job,
    )
    [(state, result, *transactions)] = ended
    assert (state, result) == ("succeeded", {"job": job})
    assert len(set(transactions)) == 1


def test_a_repeated_key_does_nothing_and_is_answered_as_the_first_time(
    payments: Queue, tmp_path: Path
) -> None:
    jobs = [payments.insert("charge", '{"order": "17"}') for _ in range(6)]

    work(payments, tmp_path)

    assert payments.one("SELECT count(*) FROM payments") == 1
    results = payments.all("SELECT result FROM pgqueue.finished_jobs WHERE id = ANY (%s)", jobs)
    assert len(results) == 6
    assert len(set(results)) == 1
    assert results[0][0].startswith("receipt of")


def test_a_failed_attempt_leaves_nothing_and_is_tried_again(payments: Queue, tmp_path: Path) -> None:
    job = payments.insert("pay_and_fail", '{"times": 2}')

    work(payments, tmp_path)

    assert payments.state(job) == "succeeded"
    assert payments.all("SELECT DISTINCT attempt FROM payments") == [(3,)]
    assert paid(payments, job) == 2


@pytest.mark.parametrize(
    ("how", "reason", "count"),
    [
        ("COMMIT", "must leave that to the worker", 1),
        ("ROLLBACK", "must leave that to the worker", 0),
        ("commit()", "commit()", 0),
        ("rollback exception", "rolled the transaction back", 0),
    ],
)
def test_a_handler_that_ends_its_transaction_itself_is_dead_and_says_so(
    payments: Queue, tmp_path: Path, how: str, reason: str, count: int
) -> None:
    job = payments.insert("end_the_transaction", json.dumps({"how": how}))
    after = payments.insert("pay")

    work(payments, tmp_path, "-c", "1")

    assert payments.state(job) == "dead"
    assert reason in payments.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", job)
    assert paid(payments, job) == count
    assert (payments.state(after), paid(payments, after)) == ("succeeded", 1)


@pytest.mark.parametrize("task", ["leave_traces", "leave_traces_async"])
def test_what_a_handler_leaves_in_its_session_no_other_job_meets(
    payments: Queue, tmp_path: Path, task: str
) -> None:
    jobs = [payments.insert(task) for _ in range(3)]

    work(payments, tmp_path, "-c", "1")

    assert [payments.state(job) for job in jobs] == ["succeeded"] * 3
    # One row: it is the same session that they find like new.
    found = payments.all("SELECT DISTINCT result FROM pgqueue.finished_jobs WHERE id = ANY (%s)", jobs)
    assert [result[1:] for (result,) in found] == [['"$user", public', True, 0, "read committed", 0]]


def test_jobs_that_a_handler_enqueues_exist_if_it_commits(payments: Queue, tmp_path: Path) -> None:
    payments.insert("pay_and_pass_on", '{"fails": true}')
    payments.insert("pay_and_pass_on")

    work(payments, tmp_path)

    assert payments.one("SELECT count(*) FROM pgqueue.finished_jobs WHERE task = 'pay'") == 1


@pytest.mark.parametrize("task", ["wait_in_a_statement", "wait_in_a_statement_async"])
def test_a_statement_past_the_deadline_is_cancelled_and_its_child_lives_on(
    payments: Queue, tmp_path: Path, task: str
) -> None:
    with worker(payments.dsn, tmp_path, "-c", "2", app=APP) as started:
        child = started.children()
        job = payments.insert(task)

        payments.wait_for_state(job, "dead")

        assert payments.one("SELECT reason FROM pgqueue.dead_jobs") == "timed out after 1 s"
        assert started.children() == child
        assert paid(payments, job) == 0
        assert started.stop() == 0


def test_a_job_whose_session_breaks_off_every_time_is_dead_after_three_of_them(
    payments: Queue, tmp_path: Path
) -> None:
    job = payments.insert("crash_the_session")

    work(payments, tmp_path)

    assert payments.state(job) == "dead"
    assert paid(payments, job) == 0
    attempt, crashes, reason = payments.all("SELECT attempt, crashes, reason FROM pgqueue.dead_jobs")[0]
    assert (attempt, crashes) == (3, 3)
    assert "its session broke off" in reason


# Whatever breaks, wherever.

STEPS = ("begin", "before", "after", "finish", "commit")


@contextlib.contextmanager
def held_at(queue: Queue, step: str, jobs: int) -> Iterator[list[int]]:
    """Give jobs of both kinds that have all come to a step, and cannot go on until the block ends."""
    with psycopg.connect(queue.dsn) as holder:
        match step:
            case "begin":
                holder.execute("LOCK TABLE pgqueue.processed_jobs IN SHARE MODE")
            case "finish":
                holder.execute("LOCK TABLE pgqueue.finished_jobs IN SHARE MODE")
            case _:
                holder.execute("SELECT pg_advisory_xact_lock(%s)", (once_jobs.HOLD,))
        args = json.dumps({"step": step})
        ids = [queue.insert(task, args) for task in ("pay", "pay_async") for _ in range(jobs)]
        wait_until(lambda: waiting(queue) == len(ids), 60, f"all have come to {step}")
        yield ids
        holder.rollback()


SESSIONS = (
    "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgqueue job %%'"
)


def waiting(queue: Queue) -> int:
    return queue.one(f"SELECT count(*) {SESSIONS} AND wait_event_type = 'Lock'")


def check_paid_once(queue: Queue, jobs: list[int]) -> None:
    def ended() -> int:
        return queue.one(
            "SELECT count(*) FROM pgqueue.finished_jobs WHERE state = 'succeeded' AND id = ANY (%s)", jobs
        )

    wait_until(lambda: ended() == len(jobs), 150, f"{len(jobs)} jobs have succeeded")
    assert queue.all("SELECT job_id, count(*) FROM payments GROUP BY job_id HAVING count(*) <> 1") == []
    assert queue.one("SELECT count(*) FROM payments WHERE job_id = ANY (%s)", jobs) == len(jobs)
    assert queue.count("dead_jobs") == 0


def options(lease: float = 9) -> tuple[str, ...]:
    return ("-c", str(2 * JOBS), "--lease-seconds", str(lease), "--kill-grace-seconds", "1")


def test_a_child_killed_at_any_step_has_paid_once(payments: Queue, tmp_path: Path) -> None:
    with worker(payments.dsn, tmp_path, *options(), app=APP) as started:
        for step in STEPS:
            with held_at(payments, step, JOBS) as jobs:
                os.kill(started.children()[0], signal.SIGKILL)
                wait_until(lambda: started.lines("child died"), 10)

            check_paid_once(payments, jobs)
        assert started.stop() == 0


def test_sessions_terminated_at_any_step_have_paid_once(payments: Queue, tmp_path: Path) -> None:
    with worker(payments.dsn, tmp_path, *options(), app=APP) as started:
        for step in STEPS:
            with held_at(payments, step, JOBS) as jobs:
                ended = payments.one(f"SELECT count(pg_terminate_backend(pid)) {SESSIONS}")
                assert ended == len(jobs)

            check_paid_once(payments, jobs)
        # None of that was the jobs' fault.
        assert payments.count("finished_jobs", "attempt - crashes > 1") == 0
        assert started.stop() == 0


def freeze(frozen: WorkerProcess, number: signal.Signals) -> None:
    for pid in (frozen.pid, *frozen.children()):
        os.kill(pid, number)


@pytest.mark.timeout(600)  # five times two hundred sessions, on whatever cores there are
def test_workers_frozen_at_any_step_past_their_lease_have_paid_once(payments: Queue, tmp_path: Path) -> None:
    lease = options(1.5)
    for step in STEPS:
        with worker(payments.dsn, tmp_path, *lease, app=APP) as frozen:
            with held_at(payments, step, JOBS) as jobs:
                freeze(frozen, signal.SIGSTOP)
            with worker(payments.dsn, tmp_path, *lease, app=APP) as healthy:
                check_paid_once(payments, jobs)
                freeze(frozen, signal.SIGCONT)
                after = payments.insert("pay")
                payments.wait_for_state(after, "succeeded")
                assert healthy.stop() == 0
                assert frozen.stop() == 0
            check_paid_once(payments, [*jobs, after])


def test_a_worker_killed_after_the_commit_it_had_not_heard_of_has_paid_once(
    payments: Queue, tmp_path: Path
) -> None:
    with worker(payments.dsn, tmp_path, *options(1.5), app=APP) as deaf:
        with held_at(payments, "commit", JOBS) as jobs:
            os.kill(deaf.pid, signal.SIGSTOP)
        wait_until(lambda: payments.one("SELECT count(*) FROM payments") == len(jobs), 30)
        os.kill(deaf.pid, signal.SIGCONT)
        deaf.process.kill()
    with worker(payments.dsn, tmp_path, *options(1.5), app=APP) as healthy:
        check_paid_once(payments, jobs)
        assert healthy.stop() == 0


def test_what_a_child_has_committed_is_no_lost_claim(payments: Queue, tmp_path: Path) -> None:
    """The lease keeper sees the row gone before the child's word comes."""
    with worker(payments.dsn, tmp_path, *options(1.5), app=APP) as started:
        with held_at(payments, "commit", JOBS) as jobs:
            child = started.children()[0]
            os.kill(child, signal.SIGSTOP)
        wait_until(lambda: payments.one("SELECT count(*) FROM payments") == len(jobs), 30)
        # Beats go by while the child cannot say what it did.
        after = payments.insert("pay")
        wait_until(
            lambda: payments.one(
                "SELECT count(*) FROM pgqueue.workers WHERE seen_at > clock_timestamp() - interval '30 s'"
            )
        )
        beats_until = payments.one("SELECT clock_timestamp() + interval '1.5 s'")
        wait_until(lambda: payments.one("SELECT clock_timestamp() > %s", beats_until), 5)
        os.kill(child, signal.SIGCONT)
        payments.wait_for_state(after, "succeeded")
        assert started.stop() == 0
        assert started.lines("claim lost") == []
        assert started.lines("worker ended")[0]["succeeded"] == len(jobs) + 1


# Effects elsewhere.


def insert_mail(queue: Queue, task: str, to: str, **more: object) -> int:
    return queue.insert(task, json.dumps({"to": to, **more}))


def test_an_effect_elsewhere_happens_once_for_its_key(payments: Queue, tmp_path: Path) -> None:
    jobs = [insert_mail(payments, "mail", "you") for _ in range(5)]

    work(payments, tmp_path)

    assert payments.one("SELECT count(*) FROM calls") == 1
    assert payments.all("SELECT DISTINCT result FROM pgqueue.finished_jobs") == [("sent",)]
    assert all(payments.state(job) == "succeeded" for job in jobs)


@pytest.mark.parametrize(
    ("task", "to", "state", "effects"),
    [
        ("mail", "you", "dead", ["mail"]),
        ("mail_with_key", "you", "succeeded", ["mail", "mail again"]),
        ("mail_and_ask", "sent before", "succeeded", ["mail", "ask"]),
        ("mail_and_ask", "never heard of", "succeeded", ["mail", "ask", "mail"]),
        ("mail_and_ask_async", "sent before", "succeeded", ["mail", "ask"]),
        ("mail_and_ask_async", "never heard of", "succeeded", ["mail", "ask", "mail"]),
    ],
)
def test_an_effect_that_was_cut_off_is_not_repeated_unless_the_task_knows_how(
    payments: Queue, tmp_path: Path, task: str, to: str, state: str, effects: list[str]
) -> None:
    job = insert_mail(payments, task, to, hangs=True)
    with worker(payments.dsn, tmp_path, app=APP) as started:
        wait_until(lambda: calls(payments, job) == ["mail"])
        os.kill(started.children()[0], signal.SIGKILL)

        payments.wait_for_state(job, state)

        assert calls(payments, job) == effects
        assert started.stop() == 0
    if state == "dead":
        reason = payments.one("SELECT reason FROM pgqueue.dead_jobs")
        assert "outcome unknown" in reason
        assert "pgqueue processed forget mail:you, then pgqueue dlq redrive" in reason


def test_a_transaction_or_a_question_that_did_not_run_has_not_succeeded(
    payments: Queue, tmp_path: Path
) -> None:
    mail = insert_mail(payments, "mail_and_ask_later", "sent before", hangs=True)
    with worker(payments.dsn, tmp_path, app=APP) as started:
        wait_until(lambda: calls(payments, mail) == ["mail"])
        os.kill(started.children()[0], signal.SIGKILL)
        pay = payments.insert("pay_later")

        for job in (mail, pay):
            payments.wait_for_state(job, "dead")

        for job in (mail, pay):
            reason = payments.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", job)
            assert "did not run: to call it only made a coroutine" in reason
        assert paid(payments, pay) == 0
        assert started.stop() == 0


def test_a_failure_that_the_handler_reports_is_tried_again(payments: Queue, tmp_path: Path) -> None:
    job = insert_mail(payments, "mail_and_fail", "you")

    work(payments, tmp_path)

    assert (payments.state(job), calls(payments, job)) == ("succeeded", ["mail"] * 3)


def test_a_timeout_leaves_the_outcome_unknown(payments: Queue, tmp_path: Path) -> None:
    job = insert_mail(payments, "mail_too_slowly", "you")

    work(payments, tmp_path)

    assert (payments.state(job), calls(payments, job)) == ("dead", ["mail"])
    assert "outcome unknown" in payments.one("SELECT reason FROM pgqueue.dead_jobs")


def test_the_same_key_waits_while_another_job_is_at_it(payments: Queue, tmp_path: Path) -> None:
    path = tmp_path / "go on"
    with worker(payments.dsn, tmp_path, "-c", "4", app=APP) as started:
        first = insert_mail(payments, "mail_when_told", "you", path=str(path))
        wait_until(lambda: calls(payments, first) == ["mail"])
        second = insert_mail(payments, "mail_when_told", "you", path=str(path))
        started.wait_for("job snoozed")

        path.touch()

        payments.wait_for_state(second, "succeeded")
        assert calls(payments, second) == []
        assert payments.one("SELECT attempt FROM pgqueue.finished_jobs WHERE id = %s", second) == 1
        assert started.stop() == 0
