"""When a breaker's settings make sense, and which ends of attempts tell it anything."""

from __future__ import annotations

import pytest

from pgqueue.errors import ConfigurationError
from pgqueue.model.breaker import BreakerSettings, declaration, has_worked
from pgqueue.model.outcome import Ending


def test_what_is_not_said_has_its_default() -> None:
    assert declaration("pay", {"min_calls": 5, "open_seconds": None}) == {
        "name": "pay",
        "failure_ratio": 0.5,
        "min_calls": 5,
        "max_failures": None,
        "window_seconds": 10.0,
        "open_seconds": 30.0,
        "max_open_seconds": 600.0,
        "probe_seconds": 15.0,
    }
    assert declaration("pay", {})["open_seconds"] == BreakerSettings().open_seconds


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"failure_ratio": 1.5}, "failure_ratio must be a number above 0 and at most 1, not 1.5"),
        ({"failure_ratio": 0}, "failure_ratio must be a number above 0"),
        ({"min_calls": 2.5}, "min_calls must be a whole number above 0 and at most 1,000,000, not 2.5"),
        ({"max_failures": True}, "max_failures must be a whole number"),
        ({"window_seconds": "10"}, "window_seconds must be a number above 0 and at most 86,400, not '10'"),
        ({"open_seconds": float("inf")}, "open_seconds must be a number"),
        ({"max_open_seconds": float("nan")}, "max_open_seconds must be a number"),
        ({"probe_seconds": -1}, "probe_seconds must be a number"),
        ({"max_failures": 5, "min_calls": 5}, "max_failures counts without regard to the ratio"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(said: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"breaker 'pay': {message}"):
        declaration("pay", said)


@pytest.mark.parametrize("name", ["", "x" * 256, "nul\x00", 7])
def test_a_name_that_the_database_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="its name"):
        declaration(name, {})


def test_only_success_and_what_may_mend_itself_tell_of_the_dependency() -> None:
    told = {ending: has_worked(ending) for ending in Ending}

    assert {ending for ending, worked in told.items() if worked} == {Ending.SUCCEEDED, Ending.SETTLED}
    assert {ending for ending, worked in told.items() if worked is False} == {Ending.FAILED}
