"""When a failed job is tried again.

Chance comes in as an argument, a number from 0 up to 1, so that the same failure always gives the
same answer to a test. Attempts count from 1: `attempt` is the one that just failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# The longest delay there is: who wants to wait for longer wants another job.
MAX_DELAY_SECONDS = 3.2e7

# 2**60 seconds pass every ceiling; beyond 2**1023 a float gives up.
_MAX_EXPONENT = 60

_log = logging.getLogger("pgqueue.retry")


def _check(seconds: float, name: str) -> None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_DELAY_SECONDS:
        raise ValueError(f"{name} must be between 0 and {MAX_DELAY_SECONDS:,.0f} (a year), not {seconds!r}")


class RetryPolicy(Protocol):
    """Says how many seconds a job waits before its next attempt."""

    def delay_seconds(self, attempt: int, error: BaseException | None, *, random: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """Full jitter: anything up to `base_seconds` doubled once for each attempt, at most `max_seconds`.

    Jobs that failed together come back apart: spreading over the whole range loads a server that
    recovers least.

    Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    base_seconds: float = 1.0
    max_seconds: float = 600.0

    def __post_init__(self) -> None:
        _check(self.base_seconds, "base_seconds")
        _check(self.max_seconds, "max_seconds")

    def delay_seconds(self, attempt: int, error: BaseException | None = None, *, random: float) -> float:  # noqa: ARG002
        # The exponent is capped before the arithmetic: 2.0**1024 is an OverflowError, and this
        # runs where an attempt has already failed.
        ceiling = self.base_seconds * 2.0 ** min(max(attempt, 0), _MAX_EXPONENT)
        return random * min(self.max_seconds, ceiling)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same pause after each attempt; 0 is at once."""

    seconds: float

    def __post_init__(self) -> None:
        _check(self.seconds, "seconds")

    def delay_seconds(self, attempt: int, error: BaseException | None = None, *, random: float) -> float:  # noqa: ARG002
        return float(self.seconds)


@dataclass(frozen=True, slots=True)
class Steps:
    """A pause of its own for each attempt; the last one stands for all that follow."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("a list of retry delays has at least one")
        for place, seconds in enumerate(self.seconds):
            _check(seconds, f"seconds[{place}]")

    def delay_seconds(self, attempt: int, error: BaseException | None = None, *, random: float) -> float:  # noqa: ARG002
        return float(self.seconds[min(max(attempt, 1), len(self.seconds)) - 1])


@dataclass(frozen=True, slots=True)
class Computed:
    """What a function of the application says, given the attempt and the error.

    None, an exception or a number that is no delay leave it to `otherwise`: a mistake in this
    function must not lose the job that it was asked about.
    """

    function: Callable[[int, Any], float | None]
    otherwise: RetryPolicy = Exponential()

    def delay_seconds(self, attempt: int, error: BaseException | None = None, *, random: float) -> float:
        try:
            seconds = self.function(attempt, error)
            if seconds is not None:
                _check(seconds, "the delay")
                return float(seconds)
        except Exception:  # noqa: BLE001  the function is the user's code, and we are failing already
            _log.exception("the retry function %r failed; using %r", self.function, self.otherwise)
        return self.otherwise.delay_seconds(attempt, error, random=random)


Retry = RetryPolicy | float | Sequence[float] | Callable[[int, Any], float | None]
DEFAULT_RETRY: RetryPolicy = Exponential()


def retry_policy(retry: Retry | None) -> RetryPolicy:
    """Give the policy for a policy, a number of seconds, a list of them, a function, or None (the default).

    Raises:
        ValueError: it is none of these, or a number is no delay.
    """
    if retry is None:
        return DEFAULT_RETRY
    if isinstance(retry, (Exponential, Fixed, Steps, Computed)):
        return retry
    if isinstance(retry, (int, float)):
        return Fixed(retry)
    if isinstance(retry, (list, tuple)):
        return Steps(tuple(retry))
    if callable(retry):
        return Computed(retry)
    raise ValueError(
        "retry is a number of seconds, a list of them, a policy, or a function of attempt and error, "
        f"not {retry!r}"
    )
