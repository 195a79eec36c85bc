"""The parent's view of one breaker: what may start, what is counted, when it has to be said."""

from __future__ import annotations

import asyncio
import math

import pytest

from pgqueue.model.outcome import Ending
from pgqueue.runtime.breakers import FRESH_SECONDS, HASTY_REPORT_SECONDS, REPORT_SECONDS, Breaker
from pgqueue.sql.breakers import BreakerView, Permission, Results

CLOSED = BreakerView(
    "pay",
    "closed",
    generation=1,
    seconds=None,
    probe=None,
    has_parked=False,
    calls=0,
    failures=0,
    min_calls=10,
    failure_ratio=0.5,
    max_failures=None,
    probe_seconds=15.0,
)
OPEN = CLOSED._replace(state="open", generation=2, seconds=30.0)
GRANTED = Permission(is_allowed=True, generation=3, probe="uuid", seconds=15.0)


@pytest.fixture
def breaker() -> Breaker:
    made = Breaker("pay", ["charge"], asyncio.Event())
    made.learn(CLOSED, 0.0)
    return made


def end(breaker: Breaker, ending: Ending, count: int = 1) -> None:
    for _ in range(count):
        ticket = breaker.admit("q")
        assert ticket is not None
        ticket.note(ending)


def test_while_it_is_closed_everything_starts_and_is_counted(breaker: Breaker) -> None:
    end(breaker, Ending.SUCCEEDED, 3)
    end(breaker, Ending.FAILED, 2)
    end(breaker, Ending.DEAD, 5)
    end(breaker, Ending.SNOOZED)
    end(breaker, Ending.CANCELLED)
    end(breaker, Ending.RELEASED)

    assert breaker.take_results(1.0) == [Results("pay", 1, 3, 2, None)]
    assert breaker.take_results(2.0) == []


def test_success_is_reported_once_in_a_while_and_soon_when_it_is_half_way_to_opening(
    breaker: Breaker,
) -> None:
    breaker.take_results(100.0)
    nothing = breaker.report_at()
    end(breaker, Ending.SUCCEEDED, 3)
    end(breaker, Ending.FAILED, 2)
    success = breaker.report_at()
    end(breaker, Ending.FAILED)
    failure = breaker.report_at()

    assert (nothing, success, failure) == (math.inf, 100 + REPORT_SECONDS, 100 + HASTY_REPORT_SECONDS)


def test_what_others_have_seen_fail_counts_for_half_way(breaker: Breaker) -> None:
    breaker.learn(CLOSED._replace(calls=100, failures=40), 1.0)
    breaker.take_results(100.0)

    end(breaker, Ending.SUCCEEDED)
    assert breaker.report_at() == 100 + REPORT_SECONDS
    end(breaker, Ending.FAILED)
    assert breaker.report_at() == 100 + HASTY_REPORT_SECONDS


def test_half_way_to_a_number_of_failures_is_half_of_it(breaker: Breaker) -> None:
    breaker.learn(CLOSED._replace(max_failures=4), 1.0)
    breaker.take_results(100.0)

    end(breaker, Ending.FAILED)
    assert breaker.report_at() == 100 + REPORT_SECONDS
    end(breaker, Ending.FAILED)
    assert breaker.report_at() == 100 + HASTY_REPORT_SECONDS


def test_what_has_not_been_heard_of_for_a_while_is_asked_for_before_a_start(breaker: Breaker) -> None:
    assert not breaker.must_ask(FRESH_SECONDS - 0.1)
    assert breaker.must_ask(FRESH_SECONDS)


def test_while_it_is_open_nothing_starts_and_results_of_before_are_not_counted(breaker: Breaker) -> None:
    late = breaker.admit("q")
    assert late is not None
    breaker.learn(OPEN, 1.0)

    late.note(Ending.FAILED)

    assert breaker.admit("q") is None
    assert breaker.crowded == {"q"}
    assert breaker.take_results(2.0) == []


def test_counts_of_a_generation_are_not_told_of_the_next(breaker: Breaker) -> None:
    end(breaker, Ending.FAILED, 3)

    breaker.learn(CLOSED._replace(generation=4), 1.0)
    end(breaker, Ending.SUCCEEDED)

    assert breaker.take_results(2.0) == [Results("pay", 4, 1, 0, None)]


def test_a_probe_is_one_attempt_and_its_end_is_told_at_once(breaker: Breaker) -> None:
    breaker.learn(OPEN, 1.0)
    assert not breaker.must_ask(30.9)
    assert breaker.must_ask(31.1)
    breaker.hear(GRANTED, 31.1)

    probe, another = breaker.admit("q"), breaker.admit("q")

    assert probe is not None
    assert another is None
    assert not breaker.must_ask(32.0)
    assert breaker.report_at() == math.inf
    probe.note(Ending.SUCCEEDED)
    assert breaker.report_at() == -math.inf
    assert breaker.take_results(33.0) == [Results("pay", 3, 1, 0, "uuid")]


def test_a_probe_that_nobody_used_is_given_back(breaker: Breaker) -> None:
    breaker.learn(OPEN, 1.0)
    breaker.hear(GRANTED, 40.0)

    assert breaker.report_at() == 40.0 + FRESH_SECONDS
    assert breaker.take_results(40.5) == []
    assert breaker.take_results(41.0) == [Results("pay", 3, 0, 0, "uuid")]
    assert breaker.admit("q") is None


def test_who_was_not_allowed_asks_again_when_the_other_ones_probe_is_over(breaker: Breaker) -> None:
    breaker.learn(OPEN, 1.0)
    breaker.hear(Permission(is_allowed=False, generation=3, probe=None, seconds=15.0), 31.0)

    assert breaker.admit("q") is None
    assert not breaker.must_ask(45.9)
    assert breaker.must_ask(46.1)


def test_an_answer_that_was_overtaken_is_not_believed(breaker: Breaker) -> None:
    breaker.learn(OPEN, 1.0)
    breaker.hear(GRANTED, 31.1)

    breaker.learn(OPEN, 31.2)

    assert breaker.admit("q") is not None


def test_a_probe_that_was_given_up_by_the_database_is_given_up_here(breaker: Breaker) -> None:
    breaker.learn(OPEN, 1.0)
    breaker.hear(GRANTED, 31.1)
    probe = breaker.admit("q")
    assert probe is not None
    breaker.learn(OPEN._replace(state="half_open", generation=4, probe="another"), 50.0)

    probe.note(Ending.SUCCEEDED)

    assert breaker.take_results(51.0) == []


def test_a_report_that_failed_is_made_again_but_counts_are_not_told_twice(breaker: Breaker) -> None:
    end(breaker, Ending.FAILED, 3)
    counts = breaker.take_results(1.0)
    breaker.put_back(counts, was_undone=True)
    assert breaker.take_results(2.0) == counts
    breaker.put_back(counts, was_undone=False)
    assert breaker.take_results(3.0) == []

    ended = [Results("pay", 3, 1, 0, "uuid")]
    breaker.put_back(ended, was_undone=False)
    assert breaker.take_results(4.0) == ended


def test_open_by_hand_it_is_looked_at_and_never_asked(breaker: Breaker) -> None:
    breaker.learn(OPEN._replace(seconds=None), 1.0)

    assert not breaker.must_ask(1e9)
    assert breaker.look_at() == 1.0 + FRESH_SECONDS


def test_parked_jobs_are_brought_back_at_once_when_it_is_closed_and_one_when_a_probe_is_due(
    breaker: Breaker,
) -> None:
    breaker.learn(OPEN._replace(has_parked=True), 1.0)
    due, breaker.unparked_at = breaker.unpark_at(), 31.1
    later = breaker.unpark_at()
    breaker.hear(GRANTED, 31.2)
    while_we_probe = breaker.unpark_at()
    breaker.learn(CLOSED._replace(generation=4, has_parked=True), 33.0)

    assert 31.0 <= due <= 31.1
    assert later == 31.1 + FRESH_SECONDS
    assert while_we_probe == math.inf
    assert breaker.unpark_at() < 33.0
