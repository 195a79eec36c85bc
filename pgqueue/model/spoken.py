"""Numbers, times and texts as a person says them."""

from __future__ import annotations

from datetime import UTC, datetime


def duration(seconds: float) -> str:
    """Give a length of time as a person says it: 3 s, 12 min, 5 h, 2 d."""
    whole = round(abs(seconds))
    if whole < 60:
        return f"{whole} s"
    if round(whole / 60) < 60:
        return f"{round(whole / 60)} min"
    if round(whole / 3600) < 48:
        return f"{round(whole / 3600)} h"
    return f"{round(whole / 86400)} d"


def elapsed(start: datetime, end: datetime) -> str:
    return duration(max(0.0, (end - start).total_seconds()))


def ago(at: datetime, now: datetime) -> str:
    """Give where an instant lies from now: 12 min ago, in 5 min."""
    seconds = (now - at).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(seconds)}"


def instant(at: datetime | None, now: datetime) -> str | None:
    """Give an instant and where it lies from now: 2026-01-31 14:05:09 UTC (12 min ago)."""
    return None if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC ({ago(at, now)})"


def counted(number: int, noun: str) -> str:
    """Give `1 job`, `2,000 jobs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def headline(text: str) -> str:
    """Give the line that says it: of a traceback the last one, of anything else the first."""
    lines = text.strip().splitlines() or [""]
    return lines[-1].strip() if lines[0].startswith("Traceback (") else lines[0]
