"""Alive or not, ready or not, and why."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from pgqueue.runtime import health as module
from pgqueue.runtime.children import Child
from pgqueue.runtime.health import STILL_SECONDS, Health, stuck
from pgqueue.runtime.ledger import Held, Pool
from pgqueue.sql.attempts import ClaimedRow


def held(past_seconds: float, timeout_seconds: float = 5.0) -> Held:
    """Give an attempt whose deadline was so many seconds ago."""
    row = ClaimedRow(42, "t", 1, "send", "{}", None, 0, "", True, timeout_seconds, 5, 0, None, None, 1.0)
    claimed_at = time.monotonic() - timeout_seconds - past_seconds
    return Held(1, row, "mail", Pool(1, ["mail"]), cast("Child", None), claimed_at)


def test_a_loop_that_stands_still_is_a_reason_to_restart(monkeypatch):
    health = Health()
    assert health.against_life() == []

    later = time.monotonic() + STILL_SECONDS + 10
    monkeypatch.setattr(module.time, "monotonic", lambda: later)

    assert health.against_life() == ["the loop has not turned for 40 s"]
    assert health.against_work() == health.against_life()


def test_a_loop_that_turns_is_none(monkeypatch):
    async def turn() -> list[str]:
        health = Health()
        health._turned_at -= STILL_SECONDS + 10
        task = asyncio.create_task(health.turn())
        await asyncio.sleep(0)
        task.cancel()
        return health.against_life()

    assert asyncio.run(turn()) == []


def test_what_hinders_work_is_no_reason_to_restart():
    health = Health()
    health.hindrances.append(lambda: ["the database is away"])

    assert health.against_work() == ["the database is away"]
    assert health.against_life() == []


def test_a_job_long_past_its_deadline_is_a_reason():
    assert stuck([held(5)], 5) == []
    assert stuck([held(STILL_SECONDS + 6)], 5) == ["job 42 runs past its deadline and does not end"]


def test_a_job_without_a_deadline_is_none():
    assert stuck([held(1e6, timeout_seconds=0)], 5) == []


def test_a_job_that_a_neighbour_keeps_waiting_is_none():
    waiting = held(STILL_SECONDS + 6)
    waiting.is_kept_waiting = True

    assert stuck([waiting], 5) == []
