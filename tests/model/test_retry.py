import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqueue.model.retry import (
    MAX_DELAY_SECONDS,
    Computed,
    Exponential,
    Fixed,
    Steps,
    retry_policy,
)

# A busy machine is no reason to fail.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CHANCE = st.floats(0, 1, exclude_max=True)
SECONDS = st.floats(0, MAX_DELAY_SECONDS)


@patient
@given(base=SECONDS, ceiling=SECONDS, attempt=st.integers(1, 10_000), chance=CHANCE)
def test_an_exponential_delay_is_never_negative_and_never_above_its_ceiling(base, ceiling, attempt, chance):
    policy = Exponential(base, ceiling)

    delay = policy.delay_seconds(attempt, random=chance)

    assert 0 <= delay <= ceiling


@patient
@given(attempt=st.integers(1, 40), base=st.floats(0.001, 100), ceiling=st.floats(1, 1e6))
def test_an_exponential_delay_is_spread_evenly_so_its_mean_is_half_its_ceiling(attempt, base, ceiling):
    policy = Exponential(base, ceiling)
    top = min(ceiling, base * 2**attempt)

    delays = [policy.delay_seconds(attempt, random=step / 1000) for step in range(1000)]

    assert sum(delays) / 1000 == pytest.approx(top / 2, rel=0.01)


def test_the_ceiling_doubles_once_for_each_attempt():
    policy = Exponential(base_seconds=1, max_seconds=600)

    ceilings = [policy.delay_seconds(attempt, random=1.0) for attempt in range(1, 12)]

    assert ceilings == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]


def test_attempt_ten_thousand_is_as_far_as_any_late_one():
    policy = Exponential(base_seconds=0.5, max_seconds=3600)

    delay = policy.delay_seconds(10_000, random=0.5)

    assert delay == 1800


def test_a_fixed_delay_does_not_depend_on_chance_and_may_be_zero():
    policy = retry_policy(0)

    delays = {policy.delay_seconds(attempt, random=chance) for attempt in (1, 9) for chance in (0.0, 0.9)}

    assert delays == {0.0}


def test_the_last_of_a_list_of_delays_stands_for_all_that_follow():
    policy = retry_policy([0, 10, 60])

    delays = [policy.delay_seconds(attempt, random=0.5) for attempt in range(1, 6)]

    assert delays == [0, 10, 60, 60, 60]


def test_a_function_sees_the_attempt_and_the_error():
    policy = retry_policy(lambda attempt, error: attempt * 10 + len(str(error)))

    delay = policy.delay_seconds(3, ValueError("four"), random=0.5)

    assert delay == 34


@pytest.mark.parametrize(
    "answer", [None, -1, float("nan"), float("inf"), "soon", True, 10**400, MAX_DELAY_SECONDS * 2]
)
def test_a_function_that_gives_no_delay_leaves_it_to_the_default(answer):
    policy = Computed(lambda _attempt, _error: answer, otherwise=Fixed(7))

    delay = policy.delay_seconds(1, ValueError(), random=0.5)

    assert delay == 7


def test_a_function_that_raises_leaves_it_to_the_default_and_is_logged(caplog):
    def broken(_attempt, _error):
        raise KeyError("retry_after")

    policy = Computed(broken, otherwise=Fixed(7))

    with caplog.at_level(logging.ERROR):
        delay = policy.delay_seconds(1, ValueError(), random=0.5)

    assert delay == 7
    assert "retry function" in caplog.text
    assert "KeyError" in caplog.text


@pytest.mark.parametrize(
    ("given_retry", "policy"),
    [
        (None, Exponential()),
        (5, Fixed(5)),
        (2.5, Fixed(2.5)),
        ([1, 2], Steps((1, 2))),
        ((1,), Steps((1,))),
        (Exponential(2, 8), Exponential(2, 8)),
    ],
)
def test_a_policy_is_made_from_what_a_task_declares(given_retry, policy):
    assert retry_policy(given_retry) == policy


@pytest.mark.parametrize(
    "refused",
    [-1, float("nan"), float("inf"), True, False, 10**400, [], [1, -1], [1, "2"], "10", object(), {"a": 1}],
)
def test_what_is_no_delay_is_refused_where_it_is_declared(refused):
    with pytest.raises(ValueError, match=r"retry is|must be between 0 and|has at least one"):
        retry_policy(refused)


@pytest.mark.parametrize("make", [lambda: Exponential(-1), lambda: Exponential(1, float("inf"))])
def test_an_exponential_policy_refuses_what_is_no_delay(make):
    with pytest.raises(ValueError, match="must be between 0 and"):
        make()
