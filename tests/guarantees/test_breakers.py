"""A breaker opens on failures, lets one probe through, and believes nobody who is late."""

from __future__ import annotations

from typing import Any

import pytest

from tests.guarantees.support import at_once
from tests.sql.support import Session
from tests.support import wait_until


@pytest.fixture
def breaker(session: Session) -> Session:
    session.rows("INSERT INTO pgqueue.breakers (name, min_calls, window_seconds) VALUES ('pay', 10, 3600)")
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
    return session.row("SELECT * FROM pgqueue.breakers")


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
    opened(breaker, is_due=False)

    answer = may_run(breaker)

    assert not answer.is_allowed
    assert (
        25 < breaker.one("SELECT extract(epoch FROM %s - clock_timestamp())::float8", answer.retry_at) <= 30
    )


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

    assert report(breaker, probe, failures=1) == "open"
    seconds = breaker.one("SELECT extract(epoch FROM retry_at - opened_at)::float8 FROM pgqueue.breakers")
    assert seconds == pytest.approx(60)


def test_the_wait_never_passes_its_ceiling(breaker):
    breaker.rows("UPDATE pgqueue.breakers SET opens = 1000")

    opened(breaker, is_due=False)

    seconds = breaker.one("SELECT extract(epoch FROM retry_at - opened_at)::float8 FROM pgqueue.breakers")
    assert seconds == pytest.approx(600)


def test_reports_of_another_generation_change_nothing(breaker):
    late = opened(breaker)
    probe = may_run(breaker)
    before = row(breaker)

    states = [report(breaker, late, failures=500), report(breaker, late, successes=500)]
    without_the_probe = report(breaker, probe._replace(probe=None), successes=500)

    assert states == ["half_open", "half_open"]
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


def test_a_probe_whose_caller_rolled_back_is_free_again(breaker, open_session):
    opened(breaker)
    caller = open_session(autocommit=False)
    breaker.rows("SET statement_timeout = '2s'")
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
            report(session, answer, successes=2, failures=1)

    at_once(*(lambda s=session: report_often(s) for session in [open_session() for _ in range(4)]))

    assert (row(breaker).successes, row(breaker).failures) == (200, 100)
