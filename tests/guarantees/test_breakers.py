"""A breaker opens on failures, lets one probe through, and believes nobody who is late."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue.model.breaker import BreakerSettings
from tests.guarantees.support import STUCK, Crowd, at_once, work_for_a_moment
from tests.sql.support import Session
from tests.support import wait_until


@pytest.fixture
def breaker(session: Session) -> Session:
    session.rows(
        "INSERT INTO pgqueue.breakers (name, min_calls, window_seconds, probe_seconds) "
        "VALUES ('pay', 10, 3600, 3600)"
    )
    return session


def may_run(session: Session) -> Any:
    (answer,) = session.call("may_run", name="pay")
    return answer


def report(session: Session, answer: Any, successes: int = 0, failures: int = 0) -> str:
    return session.call(
        "report",
        name="pay",
        generation=answer.generation,
        successes=successes,
        failures=failures,
        probe=answer.probe,
    )[0][0]


def opened(session: Session, *, is_due: bool = True) -> Any:
    """Open the breaker, and give the answer of the time when it was closed."""
    answer = may_run(session)
    assert report(session, answer, failures=10) == "open"
    if is_due:
        session.rows("UPDATE pgqueue.breakers SET retry_at = clock_timestamp()")
    return answer


def row(session: Session) -> Any:
    return session.row("SELECT * FROM pgqueue.breakers WHERE name = 'pay'")


@contextmanager
def retries_after(session: Session, seconds: float) -> Iterator[None]:
    """What is done meanwhile lets the breaker wait for exactly so long from then on."""
    clock, wait = "SELECT clock_timestamp()", timedelta(seconds=seconds)
    before = session.one(clock)
    yield
    assert before + wait <= row(session).retry_at <= session.one(clock) + wait


def park(session: Session, *claimed: Any) -> dict[int, str]:
    return dict(session._ending("breaker_park", claimed, name="pay"))


def park_ready(session: Session, max_jobs: int = 1000, *tasks: str) -> int:
    return session.call(
        "breaker_park_ready", name="pay", queue="default", tasks=list(tasks or ["call"]), max_jobs=max_jobs
    )[0][0]


def unpark(session: Session, max_jobs: int = 1000) -> int:
    return session.call("breaker_unpark", name="pay", max_jobs=max_jobs)[0][0]


def call_one(session: Session, *queues: str) -> bool:
    return session.call("breaker_call", name="pay", queues=list(queues or ["default"]))[0][0]


def states(session: Session, *job_ids: int) -> list[str | None]:
    return [session.state(job_id) for job_id in job_ids]


def test_nobody_knows_the_breaker_then_it_is_closed(session):
    answer = may_run(session)

    assert (answer.is_allowed, answer.generation, answer.probe) == (True, 0, None)
    assert report(session, answer, failures=1000) is None


@pytest.mark.parametrize(
    ("successes", "failures", "state"),
    [(0, 9, "closed"), (6, 5, "closed"), (5, 5, "open"), (1000, 10, "closed")],
)
def test_it_opens_at_the_ratio_of_enough_calls(breaker, successes, failures, state):
    answer = may_run(breaker)

    assert report(breaker, answer, successes, failures) == state


@pytest.mark.parametrize(("successes", "failures", "state"), [(0, 4, "closed"), (1000, 5, "open")])
def test_with_a_number_of_failures_it_opens_at_that_whatever_the_ratio(breaker, successes, failures, state):
    breaker.rows("UPDATE pgqueue.breakers SET max_failures = 5")

    assert report(breaker, may_run(breaker), successes, failures) == state


def test_failures_of_two_windows_count_together_and_older_ones_not(breaker):
    answer = may_run(breaker)
    report(breaker, answer, failures=6)
    one_window_later = "UPDATE pgqueue.breakers SET window_at = window_at - window_seconds * interval '1 s'"

    breaker.rows(one_window_later)
    report(breaker, answer, failures=1)
    breaker.rows(one_window_later)
    state_after_two = report(breaker, answer, failures=6)
    breaker.rows(one_window_later)
    state_after_three = report(breaker, answer, failures=4)

    assert (state_after_two, state_after_three) == ("closed", "open")


def test_an_open_breaker_says_until_when(breaker):
    with retries_after(breaker, 30):
        opened(breaker, is_due=False)

    answer = may_run(breaker)

    assert not answer.is_allowed
    assert answer.retry_at == row(breaker).retry_at


def test_of_many_callers_one_gets_the_probe(breaker, open_session):
    callers = [open_session() for _ in range(12)]

    for _ in range(20):
        opened(breaker)
        answers = at_once(*(lambda c=caller: may_run(c) for caller in callers))
        (winner,) = [answer for answer in answers if answer.is_allowed]
        assert winner.probe is not None
        report(breaker, winner, successes=1)


def test_a_probe_that_succeeds_closes_it(breaker):
    opened(breaker)
    probe = may_run(breaker)

    assert report(breaker, probe, successes=1) == "closed"
    assert may_run(breaker).is_allowed
    assert row(breaker).opens == 0


def test_a_probe_that_fails_opens_it_for_twice_as_long(breaker):
    opened(breaker)
    probe = may_run(breaker)

    with retries_after(breaker, 60):
        assert report(breaker, probe, failures=1) == "open"


def test_the_wait_never_passes_its_ceiling(breaker):
    breaker.rows("UPDATE pgqueue.breakers SET opens = 1000")

    with retries_after(breaker, 600):
        opened(breaker, is_due=False)


def test_reports_of_another_generation_change_nothing(breaker):
    late = opened(breaker)
    probe = may_run(breaker)
    before = row(breaker)

    said = [report(breaker, late, failures=500), report(breaker, late, successes=500)]
    without_the_probe = report(breaker, probe._replace(probe=None), successes=500)

    assert said == ["half_open", "half_open"]
    assert without_the_probe == "half_open"
    assert row(breaker) == before


def test_a_probe_reports_once(breaker):
    opened(breaker)
    probe = may_run(breaker)
    report(breaker, probe, successes=1)

    assert report(breaker, probe, failures=1) == "closed"
    assert row(breaker).failures == 0


def test_a_silent_probe_is_given_up_and_its_late_word_ignored(breaker):
    opened(breaker)
    silent = may_run(breaker)
    meanwhile = may_run(breaker)
    breaker.rows("UPDATE pgqueue.breakers SET probe_until = clock_timestamp()")

    second = may_run(breaker)

    assert not meanwhile.is_allowed
    assert second.is_allowed
    assert second.probe != silent.probe
    assert report(breaker, silent, successes=1) == "half_open"


def test_a_probe_that_came_to_nothing_is_followed_by_another_in_a_second(breaker):
    opened(breaker)
    probe = may_run(breaker)

    with retries_after(breaker, 1):
        assert report(breaker, probe) == "open"
    assert row(breaker).opens == 1


def test_a_probe_whose_caller_rolled_back_is_free_again(breaker, open_session):
    opened(breaker)
    caller = open_session(autocommit=False)
    breaker.rows("SET statement_timeout = '60s'")
    assert may_run(caller).is_allowed

    meanwhile = may_run(breaker)
    caller.connection.rollback()

    assert not meanwhile.is_allowed
    assert wait_until(lambda: may_run(breaker).is_allowed)


def test_no_report_is_lost_among_many(breaker, open_session):
    breaker.rows("UPDATE pgqueue.breakers SET min_calls = 1000000")
    answer = may_run(breaker)

    def report_often(session: Session) -> None:
        for _ in range(25):
            wait_until(lambda: reported(session), 120)

    def reported(session: Session) -> bool:
        """A report does not wait for long: the counts keep until the next time."""
        try:
            return report(session, answer, successes=2, failures=1) == "closed"
        except psycopg.errors.LockNotAvailable:
            return False

    at_once(*(lambda s=session: report_often(s) for session in [open_session() for _ in range(4)]))

    assert (row(breaker).successes, row(breaker).failures) == (200, 100)


def test_a_report_does_not_wait_for_long_for_somebody_who_holds_the_row(breaker, open_session):
    answer = may_run(breaker)
    breaker.rows("SET statement_timeout = '60s'")
    stranger = open_session(autocommit=False)
    stranger.rows("SELECT FROM pgqueue.breakers FOR UPDATE")

    with pytest.raises(psycopg.errors.LockNotAvailable):
        report(breaker, answer, failures=1)


# By hand.


def test_opened_by_hand_it_stays_open_until_somebody_closes_it(breaker):
    late = may_run(breaker)
    assert breaker.call("breaker_open", name="pay")[0][0]

    answer = may_run(breaker)

    assert (answer.is_allowed, answer.retry_at) == (False, None)
    assert report(breaker, late, successes=1000) == "open"
    assert breaker.call("breaker_close", name="pay")[0][0]
    assert may_run(breaker).is_allowed


def test_opened_by_hand_for_a_time_it_lets_a_probe_through_after_that(breaker):
    with retries_after(breaker, 60):
        breaker.call("breaker_open", name="pay", seconds=60)
    assert not may_run(breaker).is_allowed

    breaker.rows("UPDATE pgqueue.breakers SET retry_at = clock_timestamp()")
    probe = may_run(breaker)

    assert probe.is_allowed
    assert report(breaker, probe, successes=1) == "closed"


def test_closed_by_hand_it_forgets_what_was_counted_and_believes_no_late_report(breaker):
    late = opened(breaker)
    probe = may_run(breaker)

    breaker.call("breaker_close", name="pay")

    assert report(breaker, late, failures=1000) == report(breaker, probe, failures=1) == "closed"
    assert (row(breaker).failures, row(breaker).opens, row(breaker).opened_at) == (0, 0, None)


def test_what_is_done_to_a_breaker_that_is_not_there_is_said(breaker):
    done = [
        breaker.call("breaker_open", name="pai")[0][0],
        breaker.call("breaker_close", name="pai")[0][0],
        breaker.call("breaker_set", name="pai", settings="{}")[0][0],
    ]

    assert done == [False, False, False]


# Settings.


def declare(session: Session, **settings: Any) -> None:
    session.call("breaker_declare", definitions=json.dumps([{"name": "pay", **settings}]))


def change(session: Session, **settings: Any) -> None:
    session.call("breaker_set", name="pay", settings=json.dumps(settings))


def settings_of(session: Session) -> BreakerSettings:
    found = row(session)
    return BreakerSettings(**{one.name: getattr(found, one.name) for one in fields(BreakerSettings)})


def test_a_name_that_no_one_declared_has_the_documented_defaults(session):
    declare(session)

    assert settings_of(session) == BreakerSettings()


def test_what_code_says_is_taken_over_each_time_it_says_something_else(session):
    declare(session, **asdict(BreakerSettings(max_failures=5, open_seconds=1)))
    declare(session, **asdict(BreakerSettings(failure_ratio=0.1)))

    assert settings_of(session) == BreakerSettings(failure_ratio=0.1)


def test_code_that_only_names_a_breaker_leaves_its_settings_alone(session):
    declare(session, **asdict(BreakerSettings(min_calls=7)))

    declare(session)

    assert settings_of(session) == BreakerSettings(min_calls=7)


def test_what_an_operator_set_no_code_changes(session):
    declare(session)
    change(session, open_seconds=5, state="open", generation=77)

    declare(session, **asdict(BreakerSettings(open_seconds=60, min_calls=3)))

    assert settings_of(session) == BreakerSettings(open_seconds=5, min_calls=3)
    assert (row(session).pinned, row(session).state, row(session).generation) == (
        ["open_seconds"],
        "closed",
        1,
    )


def test_declaring_what_is_known_writes_nothing(session):
    declare(session, **asdict(BreakerSettings(min_calls=7)))
    before = session.one("SELECT ctid::text FROM pgqueue.breakers")

    declare(session, **asdict(BreakerSettings(min_calls=7)))

    assert session.one("SELECT ctid::text FROM pgqueue.breakers") == before


# Its jobs wait.


def test_a_job_that_may_not_start_waits_without_losing_an_attempt_or_a_word_about_it(breaker):
    opened(breaker, is_due=False)
    job = breaker.enqueue("call")
    (claimed,) = breaker.claim()

    assert park(breaker, claimed) == {job: "scheduled"}

    waiting = breaker.job(job)
    assert (waiting.attempt, waiting.errors, waiting.claim_token) == (0, None, None)
    assert waiting.run_at == row(breaker).parked_until
    assert breaker.one("SELECT %s - clock_timestamp() > interval '55 min'", waiting.run_at)


def test_a_job_whose_breaker_closed_just_now_is_ready_again(breaker):
    job = breaker.enqueue("call")
    (claimed,) = breaker.claim()

    assert park(breaker, claimed) == {job: "ready"}
    assert (row(breaker).parked_until, breaker.job(job).attempt) == (None, 0)


def test_a_job_that_was_to_be_cancelled_is(breaker):
    opened(breaker, is_due=False)
    job = breaker.enqueue("call")
    (claimed,) = breaker.claim()
    breaker.cancel(job)

    assert park(breaker, claimed) == {job: "cancelled"}
    assert breaker.state(job) == "cancelled"


def test_jobs_that_are_not_ours_any_more_are_left_alone(breaker):
    opened(breaker, is_due=False)
    breaker.enqueue("call")
    (claimed,) = breaker.claim()
    breaker.release(claimed)
    (again,) = breaker.claim()

    assert park(breaker, claimed) == {}
    assert breaker.job(again.job_id).state == "running"


def test_a_crowd_at_the_head_of_a_queue_is_parked_where_it_stands_and_nobody_else(breaker):
    opened(breaker, is_due=False)
    crowd = [breaker.enqueue("call") for _ in range(5)]
    other = breaker.enqueue("other")
    elsewhere = breaker.enqueue("call", queue="mail")
    later = breaker.enqueue("call", delay_seconds=3600)

    parked = [park_ready(breaker, 3), park_ready(breaker), park_ready(breaker)]

    assert parked == [3, 2, 0]
    assert {breaker.job(job).run_at for job in crowd} == {row(breaker).parked_until}
    assert states(breaker, other, elsewhere, later) == ["ready", "ready", "scheduled"]
    assert breaker.job(later).run_at != row(breaker).parked_until


def test_of_a_key_the_blocked_ones_are_parked_too_and_the_others_get_its_slot(breaker):
    opened(breaker, is_due=False)
    running = breaker.enqueue("other", concurrency_key="k")
    (claimed,) = breaker.claim()
    crowd = [breaker.enqueue("call", concurrency_key="k") for _ in range(4)]
    last = breaker.enqueue("other", concurrency_key="k")
    assert breaker.claim() == []
    breaker.complete(claimed)
    assert states(breaker, running, *crowd[:2], last) == ["succeeded", "ready", "blocked", "blocked"]

    assert park_ready(breaker) == 4

    assert states(breaker, *crowd, last) == ["scheduled"] * 4 + ["ready"]


def test_nobody_is_parked_while_it_is_closed(breaker):
    job = breaker.enqueue("call")

    assert park_ready(breaker) == 0
    assert breaker.state(job) == "ready"


def test_once_it_is_closed_they_come_back_in_their_order_in_steps_and_then_nobody_looks_any_more(breaker):
    opened(breaker)
    crowd = [breaker.enqueue("call", queue=queue) for queue in ("default", "mail", "default")]
    newcomer = breaker.enqueue("other")
    assert park_ready(breaker) == 2
    assert park(breaker, *breaker.claim("mail")) == {crowd[1]: "scheduled"}
    assert report(breaker, may_run(breaker), successes=1) == "closed"

    steps = [unpark(breaker, max_jobs=2), unpark(breaker, max_jobs=2), unpark(breaker, max_jobs=2)]

    assert steps == [2, 1, 0]
    assert row(breaker).parked_until is None
    assert [claimed.job_id for claimed in breaker.claim()] == [crowd[0], crowd[2], newcomer]
    assert [claimed.job_id for claimed in breaker.claim("mail")] == [crowd[1]]


def test_one_comes_back_for_the_probe_when_it_is_due_and_of_a_queue_that_is_served(breaker):
    opened(breaker, is_due=False)
    elsewhere = [breaker.enqueue("call", queue="mail") for _ in range(20)]
    job = breaker.enqueue("call")
    park(breaker, *breaker.claim(), *breaker.claim("mail"))

    assert not call_one(breaker)
    breaker.rows("UPDATE pgqueue.breakers SET retry_at = clock_timestamp()")
    assert call_one(breaker)

    assert states(breaker, *elsewhere, job) == ["scheduled"] * 20 + ["ready"]
    breaker.call("breaker_open", name="pay")
    assert not call_one(breaker, "mail")


def test_probes_are_not_always_the_same_job_and_rather_one_that_has_attempts_left(breaker):
    opened(breaker)
    jobs = [breaker.enqueue("call", max_attempts=1 + 4 * (n % 2)) for n in range(100)]
    park(breaker, *breaker.claim())

    for _ in range(20):
        assert call_one(breaker)

    called = {one.id for one in breaker.rows("SELECT id FROM pgqueue.jobs WHERE state = 'ready'")}
    assert len(called) == 20
    assert len(called & set(jobs[1::2])) >= 17
    assert called & set(jobs[50:])


def test_a_job_parked_while_it_closes_is_not_left_behind(breaker, open_session):
    opened(breaker, is_due=False)
    before, job = breaker.enqueue("call"), breaker.enqueue("call")
    claimed = breaker.claim()
    park(breaker, claimed[0])
    parking, closing = open_session(autocommit=False), open_session()
    park(parking, claimed[1])

    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(closing.call, "breaker_close", name="pay")
        wait_until(
            lambda: breaker.one(
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()"
                " AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())"
            )
        )
        parking.connection.commit()
        closed.result()

    assert unpark(breaker) == 2
    assert states(breaker, before, job) == ["ready", "ready"]


def test_one_that_is_locked_just_now_is_not_forgotten(breaker, open_session):
    opened(breaker, is_due=False)
    job = breaker.enqueue("call")
    park(breaker, *breaker.claim())
    stranger = open_session(autocommit=False)
    stranger.rows("SELECT FROM pgqueue.jobs FOR UPDATE")
    breaker.call("breaker_close", name="pay")

    assert unpark(breaker) == 0
    assert row(breaker).parked_until is not None
    stranger.connection.rollback()
    assert unpark(breaker) == 1
    assert breaker.state(job) == "ready"


def test_when_nobody_brings_them_back_they_are_due_by_themselves_and_wait_again_for_a_new_instant(breaker):
    opened(breaker, is_due=False)
    job = breaker.enqueue("call")
    park(breaker, *breaker.claim())
    long_ago = breaker.one(
        "UPDATE pgqueue.breakers SET parked_until = parked_until - interval '2 h' RETURNING parked_until"
    )
    breaker.rows("UPDATE pgqueue.jobs SET run_at = %s", long_ago)

    breaker.call("promote")
    claimed = breaker.claim()
    park(breaker, *claimed)

    assert [one.job_id for one in claimed] == [job]
    assert breaker.job(job).run_at == row(breaker).parked_until > long_ago


@pytest.mark.usefixtures("patient_unblock")
def test_many_park_and_bring_back_while_it_opens_and_closes_and_none_is_left_behind(breaker, open_session):
    jobs = [breaker.enqueue("call", concurrency_key=f"k{n % 7}" if n % 2 else None) for n in range(300)]
    crowd = Crowd(open_session)

    def flap(session: Session, seen: Counter[str]) -> None:
        session.call("breaker_open", name="pay", seconds=0.0)
        work_for_a_moment(0.02)
        session.call("breaker_close", name="pay")
        work_for_a_moment(0.02)

    def claim_and_park(session: Session, seen: Counter[str]) -> None:
        seen.update(park(session, *session.claim(max_jobs=20)).values())

    crowd.add(flap)
    crowd.add(claim_and_park, 2)
    crowd.add(lambda session, seen: seen.update(["swept"] * (park_ready(session, 50) > 0)))
    crowd.add(lambda session, seen: seen.update(["called"] * call_one(session)))
    crowd.add(lambda session, seen: seen.update(["woken"] * (unpark(session, max_jobs=30) > 0)), 2)
    crowd.work(3, until_seen=("scheduled", "swept", "woken"))
    crowd.stop()
    breaker.call("breaker_close", name="pay")
    while unpark(breaker):
        pass

    assert [name for name in crowd.seen if name.startswith("error")] in ([], ["error 55P03"])
    assert breaker.one("SELECT count(*) FROM pgqueue.jobs WHERE state IN ('ready', 'blocked')") == len(jobs)
    assert breaker.one("SELECT sum(attempt) FROM pgqueue.jobs") == 0
    assert breaker.one(STUCK) == 0
