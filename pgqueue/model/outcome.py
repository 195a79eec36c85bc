"""How an attempt ended, as a value, and what that means for its job."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pgqueue.errors import (
    Cancel,
    InvalidArguments,
    JobTimeout,
    RetryAfter,
    Snooze,
    UnknownTask,
    Unrecoverable,
)

# What is kept of an error: enough for a person to see where it happened. The database cuts once
# more, so no client can fill it.
MAX_ERROR_CHARACTERS = 8_000


class Ending(StrEnum):
    """The ways an attempt can end; the word travels from child to parent."""

    SUCCEEDED = "succeeded"
    SETTLED = "settled"  # succeeded, and the database has it already: one transaction with its effect
    FAILED = "failed"  # tried again while attempts are left
    DEAD = "dead"  # no retry mends it
    CANCELLED = "cancelled"
    SNOOZED = "snoozed"  # comes back later, no attempt used up
    CRASHED = "crashed"  # its session died under its transaction
    UNKNOWN_TASK = "unknown_task"  # this application does not have the task
    RELEASED = "released"  # not started, or undone through no fault of its own


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one attempt.

    `text` is the result's JSON for SUCCEEDED, otherwise the error or reason a person reads.
    `seconds` is a delay counted by the database: None leaves a failed job to full jitter.
    `note` says why a result was not kept. `is_unsure` says that the handler was stopped from
    outside: what it does beyond the database may have happened.
    """

    ending: Ending
    text: str | None = None
    seconds: float | None = None
    note: str | None = None
    is_unsure: bool = False

    def to_wire(self) -> list[Any]:
        text, note = self.text, self.note
        # A result's JSON is storable already, and may be long.
        if text is not None and self.ending is not Ending.SUCCEEDED:
            text = clean(text)
        if note is not None:
            note = clean(note)
        return [self.ending.value, text, self.seconds, note, self.is_unsure]

    @classmethod
    def from_wire(cls, parts: list[Any]) -> Outcome:
        return PLAIN_SUCCESS if parts == _PLAIN_PARTS else cls(Ending(parts[0]), *parts[1:])


RELEASED = Outcome(Ending.RELEASED)
PLAIN_SUCCESS = Outcome(Ending.SUCCEEDED)
_PLAIN_PARTS = PLAIN_SUCCESS.to_wire()


def outcome_of(
    error: BaseException,
    *,
    retry_seconds: float | None,
    is_unrecoverable: bool,
    is_unsure: bool = False,
) -> Outcome:
    """Decide what an error means.

    `retry_seconds` is what the task's retry policy says about it, `is_unrecoverable` whether the
    task lists its type among those no retry mends, `is_unsure` whether the handler was stopped
    from outside.
    """
    ending, text, seconds = _meaning(error, retry_seconds, is_unrecoverable)
    return Outcome(ending, text, seconds, None, is_unsure)


def _meaning(
    error: BaseException, retry_seconds: float | None, is_unrecoverable: bool
) -> tuple[Ending, str | None, float | None]:
    match error:
        case Snooze():
            return Ending.SNOOZED, safe_text(error) if error.reason else None, error.seconds
        case RetryAfter():
            return Ending.FAILED, describe(error), error.seconds
        case Cancel():
            return Ending.CANCELLED, safe_text(error) or "cancelled by its handler", None
        case UnknownTask():
            return Ending.UNKNOWN_TASK, safe_text(error), None
        case InvalidArguments():
            return Ending.DEAD, safe_text(error), None
        case JobTimeout():
            return Ending.FAILED, safe_text(error), retry_seconds
        case Unrecoverable():
            return Ending.DEAD, describe(error), None
    if is_unrecoverable:
        return Ending.DEAD, describe(error), None
    return Ending.FAILED, describe(error), retry_seconds


def describe(error: BaseException) -> str:
    """Give an error with its traceback as text that any database and terminal can take.

    Must not fail itself: the exception may not be printable, its cause may be a cycle, its text
    may hold NUL, half a surrogate pair, or megabytes.
    """
    summary = f"{type(error).__name__}: {safe_text(error)}"
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-30)
        full = "".join(lines)
    except BaseException:  # noqa: BLE001  whatever formatting raises, the summary stands
        full = ""
    if not full.strip():
        return clean(summary)
    # The line people look for comes first: a list shows only so much.
    return clean(f"{_cut(summary, 500)}\n{full}")


def safe_text(error: BaseException) -> str:
    """Give str(error), or say that it has none."""
    try:
        return clean(str(error))
    except BaseException as failure:  # noqa: BLE001  __str__ is the user's code
        return f"(its text cannot be shown: {type(failure).__name__})"


def clean(text: str) -> str:
    """Make a text storable: no NUL, no lone surrogates, not longer than is worth keeping."""
    # Cut first: replacing in a text of a gigabyte would double it.
    text = _cut(text, MAX_ERROR_CHARACTERS)
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    # Both ends matter: the beginning names the error, the end is where it was raised.
    tail = limit * 2 // 3
    return f"{text[: limit - tail - 20]}\n… cut …\n{text[-tail:]}"
