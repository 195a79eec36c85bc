"""A circuit breaker: when it opens, for how long, and which ends of attempts tell it anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pgqueue.errors import ConfigurationError
from pgqueue.model.encoding import checked_text
from pgqueue.model.keys import MAX_KEY_BYTES
from pgqueue.model.outcome import Ending

MAX_OPEN_SECONDS = 604_800.0
MAX_WINDOW_SECONDS = 86_400.0
MAX_CALLS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When a breaker opens, and what follows.

    It opens when, of the calls in the last one to two windows, there are at least `min_calls` and
    `failure_ratio` of them failed; or, with `max_failures`, when so many failed, whatever the ratio.
    Then it is open for `open_seconds`, twice as long after each probe that fails, at most
    `max_open_seconds`. A probe whose worker is silent for `probe_seconds` is given up.
    """

    failure_ratio: float = 0.5
    min_calls: int = 20
    max_failures: int | None = None
    window_seconds: float = 10.0
    open_seconds: float = 30.0
    max_open_seconds: float = 600.0
    probe_seconds: float = 15.0


_HIGHEST: Mapping[str, tuple[type, float]] = {
    "failure_ratio": (float, 1.0),
    "min_calls": (int, MAX_CALLS),
    "max_failures": (int, MAX_CALLS),
    "window_seconds": (float, MAX_WINDOW_SECONDS),
    "open_seconds": (float, MAX_OPEN_SECONDS),
    "max_open_seconds": (float, MAX_OPEN_SECONDS),
    "probe_seconds": (float, MAX_WINDOW_SECONDS),
}


def checked_settings(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Give what was said about a breaker, without what was not.

    Raises:
        ConfigurationError: a value makes no sense, or two exclude each other.
    """
    try:
        checked_text("its name", name, MAX_KEY_BYTES)
        known = {setting: value for setting, value in said.items() if value is not None}
        for setting, value in known.items():
            kind, highest = _HIGHEST[setting]
            is_number = isinstance(value, (int, float) if kind is float else int)
            if not is_number or isinstance(value, bool) or not 0 < value <= highest:
                what = "a whole number" if kind is int else "a number"
                raise ValueError(  # noqa: TRY301  one kind of refusal
                    f"{setting} must be {what} above 0 and at most {highest:,.0f}, not {value!r:.60}"
                )
        if "max_failures" in known and known.keys() & {"failure_ratio", "min_calls"}:
            raise ValueError(  # noqa: TRY301
                "max_failures counts without regard to the ratio: give it, or failure_ratio and min_calls"
            )
    except ValueError as error:
        raise ConfigurationError(f"breaker {name!r:.80}: {error}") from None
    return known


def declaration(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Give a breaker as code declares it: all its settings, the defaults for what was not said.

    Raises:
        ConfigurationError: a value makes no sense, or two exclude each other.
    """
    return {"name": name, **asdict(BreakerSettings(**checked_settings(name, said)))}


def has_worked(ending: Ending) -> bool | None:
    """Say what the end of an attempt tells of what its task depends on: it worked, it failed, nothing.

    An error that no retry mends (`Unrecoverable`, what the task lists as such, arguments that do not
    fit) is about the job. So is a decision of the handler: to snooze, to cancel.
    """
    match ending:
        case Ending.SUCCEEDED | Ending.SETTLED:
            return True
        case Ending.FAILED:  # an error, a timeout, a process that died
            return False
    return None
