"""What the end of an attempt means, and error text that no database and no terminal refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.errors import (
    Cancel,
    InvalidArguments,
    JobTimeout,
    RetryAfter,
    Snooze,
    UnknownTask,
    Unrecoverable,
)
from pgqueue.model.outcome import MAX_ERROR_CHARACTERS, Ending, Outcome, clean, describe, outcome_of


def decide(
    error: BaseException, *, retry_seconds: float | None = 3.0, is_unrecoverable: bool = False
) -> Outcome:
    return outcome_of(error, retry_seconds=retry_seconds, is_unrecoverable=is_unrecoverable)


@pytest.mark.parametrize(
    ("error", "ending", "seconds"),
    [
        (RuntimeError("x"), Ending.FAILED, 3.0),
        (RetryAfter(0), Ending.FAILED, 0.0),
        (RetryAfter(60), Ending.FAILED, 60.0),
        (Snooze(5), Ending.SNOOZED, 5.0),
        (Cancel("enough"), Ending.CANCELLED, None),
        (Unrecoverable("x"), Ending.DEAD, None),
        (InvalidArguments("t", "x"), Ending.DEAD, None),
        (UnknownTask("t", []), Ending.UNKNOWN_TASK, None),
        (JobTimeout(1), Ending.FAILED, 3.0),
        (SystemExit(1), Ending.FAILED, 3.0),
    ],
)
def test_each_kind_of_error_has_its_ending(
    error: BaseException, ending: Ending, seconds: float | None
) -> None:
    outcome = decide(error)

    assert (outcome.ending, outcome.seconds) == (ending, seconds)


def test_an_exception_the_task_lists_is_not_tried_again() -> None:
    assert decide(KeyError("x"), is_unrecoverable=True).ending is Ending.DEAD


def test_an_outcome_survives_the_way_to_the_parent() -> None:
    for outcome in (
        Outcome(Ending.SUCCEEDED),
        Outcome(Ending.FAILED, "x", 0.0),
        Outcome(Ending.SUCCEEDED, "1", None, "n"),
    ):
        assert Outcome.from_wire(outcome.to_wire()) == outcome


@settings(deadline=None)
@given(st.text(st.characters(), max_size=300))
def test_any_text_becomes_storable(text: str) -> None:
    stored = clean(text)

    assert "\x00" not in stored
    stored.encode("utf-8")


def test_a_long_error_keeps_its_beginning_and_its_end() -> None:
    stored = clean("begin " + "x" * 10_000_000 + " end")

    assert len(stored) <= MAX_ERROR_CHARACTERS
    assert stored.startswith("begin")
    assert stored.endswith("end")


def test_describing_an_error_cannot_fail() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    loop = RuntimeError("cycle")
    loop.__cause__ = loop
    deep: BaseException = RuntimeError("bottom")
    for _ in range(3000):
        above = RuntimeError("above")
        above.__cause__ = deep
        deep = above

    for error in (
        Unprintable(),
        loop,
        deep,
        RuntimeError("\ud800\x00"),
        ExceptionGroup("g", [ValueError("v")]),
    ):
        described = describe(error)

        assert type(error).__name__ in described
        assert len(described) <= MAX_ERROR_CHARACTERS


def test_the_line_people_look_for_comes_first() -> None:
    def fails() -> None:
        raise ValueError("no such account")

    with pytest.raises(ValueError, match="no such account") as caught:
        fails()
    first, *rest = describe(caught.value).splitlines()

    assert first == "ValueError: no such account"
    assert any("in fails" in line for line in rest)


def test_every_text_of_an_outcome_is_storable_on_its_way() -> None:
    odd = "caf\udce9 \x00"
    failed = Outcome(Ending.FAILED, odd, None, odd).to_wire()
    succeeded = Outcome(Ending.SUCCEEDED, '"' + "x" * 20_000 + '"', None, odd).to_wire()

    for text in (failed[1], failed[3], succeeded[3]):
        assert text == "caf\\udce9 \\x00"
    # A result is not cut.
    assert len(succeeded[1]) == 20_002
