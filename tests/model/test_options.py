from datetime import UTC, datetime, timedelta, timezone

import pytest

from pgqueue.errors import InvalidJob
from pgqueue.model.options import JobOptions


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("priority", 0),
        ("priority", 32_767),
        ("max_attempts", 1),
        ("timeout_seconds", 0),
        ("delay_seconds", 0),
        ("delay_seconds", 0.0),
        ("concurrency_limit", 1),
        ("run_at", datetime(2024, 1, 1, tzinfo=UTC)),
        ("run_at", datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=9)))),
        ("headers", {}),
    ],
)
def test_zero_and_other_limits_are_values_and_honoured(option, value):
    assert JobOptions(**{option: value}).said() == {option: value}


def test_no_time_limit_is_an_answer_and_written_as_zero():
    assert JobOptions(timeout_seconds=None).said() == {"timeout_seconds": 0.0}
    assert JobOptions().said() == {}


def test_none_leaves_an_option_to_the_task():
    assert JobOptions(queue=None, priority=None, unique_key=None, run_at=None, headers=None).said() == {}


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("queue", "", "queue must be a text"),
        ("queue", "q" * 101, "queue has 101 bytes, at most 100 fit"),
        ("queue", "a\0b", "queue contains a NUL character"),
        ("priority", -1, "priority must be a whole number between 0 and 32,767, not -1"),
        ("priority", 32_768, "priority must be"),
        ("priority", True, "priority must be"),
        ("priority", 1.0, "priority must be"),
        ("max_attempts", 0, "max_attempts must be a whole number between 1 and 100,000, not 0"),
        ("timeout_seconds", -1, "timeout_seconds must be between 0 and 604,800"),
        ("timeout_seconds", float("nan"), "timeout_seconds must be"),
        ("timeout_seconds", 604_801, "timeout_seconds must be"),
        ("timeout_seconds", 10**400, "timeout_seconds must be"),
        ("delay_seconds", -0.1, "delay_seconds must be"),
        ("delay_seconds", float("inf"), "delay_seconds must be"),
        ("delay_seconds", timedelta(seconds=1), "delay_seconds must be"),
        ("concurrency_limit", 0, "concurrency_limit must be"),
        ("run_at", datetime(2024, 1, 1), "2024-01-01T00:00:00 has no time zone"),  # noqa: DTZ001
        ("run_at", datetime(1999, 1, 1, tzinfo=UTC), "between the years 2000 and 3000"),
        ("run_at", datetime(3000, 1, 1, tzinfo=UTC), "between the years 2000 and 3000"),
        ("run_at", "2024-01-01T00:00:00Z", "run_at must be a datetime"),
        ("unique_key", "", "unique_key must be a text"),
        ("unique_key", "k" * 256, "unique_key has 256 bytes"),
        ("concurrency_key", "\0", "concurrency_key contains a NUL"),
        ("idempotency_key", "\ud800", "idempotency_key contains half of a surrogate pair"),
        ("on_conflict", "ignore", "on_conflict must be one of skip, replace, reject, debounce, not 'ignore'"),
        ("headers", [("a", 1)], "headers must be a dict"),
        ("headers", {"a": float("nan")}, "headers.a: nan is not JSON"),
        ("headers", {"a": "x" * 65_536}, "headers are 65,545 bytes, a job carries at most 65,536"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(option, value, reason):
    with pytest.raises(InvalidJob, match=reason):
        JobOptions(**{option: value})


def test_run_at_and_delay_exclude_each_other_also_when_said_one_after_the_other():
    at = JobOptions(run_at=datetime(2024, 1, 1, tzinfo=UTC))

    with pytest.raises(InvalidJob, match="run_at and delay_seconds exclude each other"):
        at.merged({"delay_seconds": 0})


def test_what_is_said_later_wins_and_the_rest_stays():
    options = JobOptions(queue="mail", priority=3).merged({"priority": 0, "timeout_seconds": None})

    assert options.said() == {"queue": "mail", "priority": 0, "timeout_seconds": 0.0}


def test_a_misspelt_option_is_refused_with_those_there_are():
    with pytest.raises(TypeError, match=r"no option 'delay'; there are: .*delay_seconds"):
        JobOptions().merged({"delay": 3})
