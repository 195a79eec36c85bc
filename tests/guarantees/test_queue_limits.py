"""A queue's ceiling is exact whoever claims; a pause holds everybody, and ends by the database's clock."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import psycopg
import pytest

from tests.guarantees.support import at_once, work_for_a_moment
from tests.sql.support import Session
from tests.support import wait_until


def ids(attempts) -> list[int]:
    return [attempt.job_id for attempt in attempts]


def limit(session: Session, max_running: int | None, name: str = "default") -> None:
    session.call("limit_queue", name=name, max_running=max_running)


# Ceilings.


def test_no_more_than_the_ceiling_run_and_the_others_stay_ready(session):
    limit(session, 3)
    jobs = [session.enqueue() for _ in range(5)]

    first, second = session.claim(max_jobs=2), session.claim(max_jobs=2)

    assert (ids(first), ids(second)) == (jobs[:2], jobs[2:3])
    assert session.claim() == []
    assert {session.state(job_id) for job_id in jobs[3:]} == {"ready"}


def test_a_ceiling_of_nought_starts_nothing(session):
    limit(session, 0)
    session.enqueue()

    assert session.claim() == []


def test_a_ceiling_is_of_its_queue_alone(session):
    limit(session, 1)
    for queue in ("default", "default", "other", "other"):
        session.enqueue(queue=queue)

    assert (len(session.claim()), len(session.claim("other"))) == (1, 2)


def test_lowering_it_interrupts_nobody_and_lifting_it_lets_all_start(session):
    for _ in range(6):
        session.enqueue()
    running = session.claim(max_jobs=3)
    limit(session, 1)

    lowered = session.claim()
    session.complete(*running[:2])
    still_full = session.claim()
    limit(session, None)

    assert (lowered, still_full) == ([], [])
    assert len(session.claim()) == 3
    assert session.complete(running[2]) == [running[2].job_id]


def test_jobs_with_keys_and_with_rates_count_as_well(session):
    session.rows(
        "INSERT INTO pgqueue.rate_limits (name, tokens_per_second, burst) VALUES ('task:slow', 1000, 100)"
    )
    limit(session, 4)
    for number in range(12):
        session.enqueue(
            ("t", "slow")[number % 2], concurrency_key=(None, "k")[number % 3 == 0], concurrency_limit=2
        )

    claimed = [session.claim(max_jobs=3) for _ in range(3)]

    assert sum(map(len, claimed)) == 4


@pytest.mark.parametrize("max_running", [1, 7])
def test_it_is_exact_and_used_to_the_full_while_everybody_claims(session, open_session, max_running):
    limit(session, max_running)
    held, most, guard = Counter[str](), Counter[str](), threading.Lock()

    def work(claimer: Session) -> None:
        claimer.rows("SET synchronous_commit = off")
        patience = time.monotonic() + 240
        while time.monotonic() < patience:
            attempts = claimer.claim(max_jobs=random.choice((1, 3, 10)))
            with guard:
                held["now"] += len(attempts)
                most["held"] = max(most["held"], held["now"])
            if not attempts and session_is_empty(claimer):
                return
            work_for_a_moment()
            with guard:
                held["now"] -= len(attempts)
            for attempt in attempts:
                getattr(claimer, random.choice(["complete", "complete", "release"]))(attempt)

    def session_is_empty(claimer: Session) -> bool:
        return claimer.one("SELECT NOT EXISTS (SELECT FROM pgqueue.jobs)")

    claimers = [open_session() for _ in range(6)]
    for nth in range(1, 21):  # once, unless nobody happened to meet an empty queue with a large batch
        session.rows("INSERT INTO pgqueue.jobs (task) SELECT 't' FROM generate_series(1, 400)")
        at_once(*(lambda c=claimer: work(c) for claimer in claimers))
        assert session.one("SELECT count(*) FROM pgqueue.finished_jobs") == 400 * nth
        assert most["held"] <= max_running
        if most["held"] == max_running:
            break

    assert most["held"] == max_running


@pytest.mark.parametrize(
    "change", [("limit_queue", {"name": "default", "max_running": 0}), ("pause_queues", {})]
)
def test_a_claim_that_had_to_wait_for_another_one_keeps_to_what_was_said_meanwhile(
    session, open_session, change
):
    limit(session, 5)
    for _ in range(4):
        session.enqueue()
    first, second = open_session(autocommit=False), open_session()
    first.claim(max_jobs=1)
    function, parameters = change

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.claim)
        wait_until(
            lambda: session.one("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'")
        )
        session.call(function, **parameters)
        first.connection.commit()

        assert waiting.result(120) == []


# Pauses.


def test_a_paused_queue_starts_nothing_and_goes_on_where_it_was(session):
    jobs = [session.enqueue() for _ in range(3)]
    (running,) = session.claim(max_jobs=1)
    session.call("pause_queues", names=["default"], reason="deploy")

    paused, ended = session.claim(), session.complete(running)
    resumed = session.call("resume_queues")

    assert (paused, ended, resumed) == ([], [running.job_id], [("default",)])
    assert ids(session.claim()) == jobs[1:]


def test_a_pause_ends_by_itself_when_its_time_has_come(session):
    session.enqueue()
    session.call("pause_queues", names=["default"], seconds=3600)
    meanwhile = session.claim()

    session.rows("UPDATE pgqueue.queues SET paused_until = clock_timestamp()")

    assert meanwhile == []
    assert len(session.claim()) == 1


@pytest.mark.parametrize(
    "end", [{"seconds": 0}, {"seconds": -1}, {"until": datetime(2020, 1, 1, tzinfo=UTC)}]
)
@pytest.mark.parametrize("names", [["default"], None, []])
def test_a_pause_whose_end_does_not_lie_ahead_is_refused(session, names, end):
    session.enqueue()

    with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"a pause .* would be over"):
        session.call("pause_queues", names=names, **end)

    assert session.rows("SELECT name FROM pgqueue.queues") == []


def test_pausing_again_says_how_long_from_now_on(session):
    session.call("pause_queues", names=["default"], seconds=1, reason="short")

    session.call("pause_queues", names=["default"])

    row = session.row("SELECT is_paused, paused_until, reason FROM pgqueue.queues")
    assert row == (True, None, None)


def test_all_known_queues_can_be_paused_at_once(session):
    session.enqueue(queue="with jobs")
    session.rows("INSERT INTO pgqueue.queues (name) VALUES ('with settings')")
    session.rows("INSERT INTO pgqueue.tasks (name, queue) VALUES ('t', 'of a task'), ('u', NULL)")
    session.rows(
        "INSERT INTO pgqueue.workers (id, host, pid, version, queues, slots) "
        "VALUES (gen_random_uuid(), 'h', 1, '1', '{of a worker}', 1)"
    )

    paused = [row[0] for row in session.call("pause_queues")]

    assert paused == ["default", "of a task", "of a worker", "with jobs", "with settings"]
    assert session.claim("with jobs") == []


def paused(session):
    return session.rows("SELECT name, paused_until, reason FROM pgqueue.queues WHERE is_paused ORDER BY name")


def test_pausing_everything_leaves_what_is_paused_already_as_it_is(session):
    for name in ("mail", "web", "over"):
        session.enqueue(queue=name)
    session.call("pause_queues", names=["mail"], seconds=28_800, reason="provider is down")
    session.call("pause_queues", names=["over"], seconds=3600, reason="was short")
    session.rows("UPDATE pgqueue.queues SET paused_until = clock_timestamp() WHERE name = 'over'")
    (mail,) = [row for row in paused(session) if row[0] == "mail"]

    answer = session.call("pause_queues", reason="runaway")

    assert answer == [("over",), ("web",)]
    assert paused(session) == [mail, ("over", None, "runaway"), ("web", None, "runaway")]


def test_resuming_everything_for_a_reason_leaves_other_pauses_alone(session):
    session.call("pause_queues", names=["mail"], seconds=28_800, reason="provider is down")
    session.call("pause_queues", names=["silent"])
    session.call("pause_queues", names=["a", "b"], reason="runaway")

    for_a_reason = session.call("resume_queues", reason="runaway")
    without_one = session.call("resume_queues", reason="")

    assert (for_a_reason, without_one) == ([("a",), ("b",)], [("silent",)])
    assert [(name, reason) for name, _, reason in paused(session)] == [("mail", "provider is down")]


def test_resuming_by_name_for_a_reason_makes_no_row_for_what_has_another_one(session):
    session.call("pause_queues", names=["mail"], reason="provider is down")

    assert session.call("resume_queues", names=["mail", "nosuch"], reason="runaway") == []
    assert session.rows("SELECT name, is_paused FROM pgqueue.queues") == [("mail", True)]


def test_a_pause_that_is_over_is_not_resumed_with_the_others(session):
    session.call("pause_queues", names=["mail"], seconds=3600)
    session.rows("UPDATE pgqueue.queues SET paused_until = clock_timestamp()")

    assert session.call("resume_queues", max_running=1) == []
    assert session.one("SELECT max_running FROM pgqueue.queues") is None


def test_resuming_everything_with_slots_keeps_the_ceilings_that_there_are(session):
    session.call("limit_queue", name="reports", max_running=3)
    session.call("limit_queue", name="stopped", max_running=0)
    session.call("pause_queues", names=["mail", "reports", "stopped"])

    session.call("resume_queues", max_running=1)
    kept = session.rows("SELECT name, max_running FROM pgqueue.queues ORDER BY name")
    session.call("resume_queues", names=["reports"], max_running=1)

    assert kept == [("mail", 1), ("reports", 3), ("stopped", 0)]
    assert session.one("SELECT max_running FROM pgqueue.queues WHERE name = 'reports'") == 1


def test_a_pause_for_another_reason_that_came_meanwhile_is_not_resumed(session, open_session):
    session.call("pause_queues", names=["mail"], reason="runaway")
    first, second = open_session(autocommit=False), open_session()
    first.call("pause_queues", names=["mail"], reason="provider is down")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.call, "resume_queues", reason="runaway")
        wait_until(lambda: session.one("SELECT count(*) FROM pg_locks WHERE NOT granted"))
        first.connection.commit()
        resumed = waiting.result(120)

    assert resumed == []
    assert paused(session) == [("mail", None, "provider is down")]


def test_resuming_with_slots_sets_the_ceiling_in_the_same_act(session):
    for _ in range(3):
        session.enqueue()
    session.call("pause_queues", names=["default"])

    session.call("resume_queues", names=["default"], max_running=1)

    assert len(session.claim()) == 1
    assert session.claim() == []


def test_resuming_without_slots_leaves_the_ceiling(session):
    limit(session, 2)
    session.call("pause_queues", names=["default"])

    session.call("resume_queues", names=["default"])

    assert session.row("SELECT is_paused, max_running FROM pgqueue.queues") == (False, 2)


def test_a_reason_goes_with_what_it_was_said_of(session):
    reason = "SELECT reason FROM pgqueue.queues"
    session.call("limit_queue", name="default", max_running=1, reason="small server")
    limited = session.one(reason)
    limit(session, 2)
    raised = session.one(reason)

    limit(session, None)

    assert (limited, raised, session.one(reason)) == ("small server", "small server", None)


def test_an_end_without_a_pause_is_refused(session):
    with pytest.raises(psycopg.errors.CheckViolation, match="queues_pause_has_an_end"):
        session.rows("INSERT INTO pgqueue.queues (name, paused_until) VALUES ('q', now())")


def test_operators_who_pause_and_resume_everything_at_once_do_not_deadlock(session, open_session):
    for number in range(20):
        session.enqueue(queue=f"q{number}")

    def act(operator: Session) -> None:
        for _ in range(20):
            operator.call(random.choice(["pause_queues", "resume_queues"]))

    at_once(*(lambda o=operator: act(o) for operator in [open_session() for _ in range(4)]))

    assert session.one("SELECT count(*) FROM pgqueue.queues") == 20
