"""A worker's settings: what is refused, and how queues share slots."""

from __future__ import annotations

from typing import Any

import pytest

from pgqueue.errors import ConfigurationError
from pgqueue.model.settings import QueueSlots, WorkerSettings


def test_a_queue_is_a_name_with_slots_or_without() -> None:
    assert QueueSlots.parse("mail") == QueueSlots("mail")
    assert QueueSlots.parse("mail:5") == QueueSlots("mail", 5)
    assert QueueSlots.parse("a:b:7") == QueueSlots("a:b", 7)
    assert QueueSlots.parse("a:b") == QueueSlots("a:b")


@pytest.mark.parametrize("text", ["", "mail:0", "mail:10001", "x" * 101, "a\x00b"])
def test_what_is_no_queue_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        QueueSlots.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"processes": -1},
        {"lease_seconds": 0.5},
        {"lease_seconds": 9, "heartbeat_seconds": 3.1},
        {"heartbeat_seconds": 0},
        {"grace_seconds": -1},
        {"poll_seconds": 0},
        {"queues": (QueueSlots("a"), QueueSlots("a", 3))},
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        WorkerSettings(**wrong)


def test_three_heartbeats_fit_into_a_lease() -> None:
    for lease_seconds in (1.0, 10.0, 600.0):
        assert WorkerSettings(lease_seconds=lease_seconds).beat_seconds * 3 <= lease_seconds


def test_queues_without_slots_share_the_workers() -> None:
    settings = WorkerSettings(
        concurrency=10, queues=(QueueSlots("mail", 5), QueueSlots("a"), QueueSlots("b"))
    )

    assert settings.pools() == [(10, ["a", "b"]), (5, ["mail"])]
    assert WorkerSettings(queues=(QueueSlots("mail", 5),)).pools() == [(5, ["mail"])]
    assert WorkerSettings(concurrency=3).pools(("x", "y")) == [(3, ["x", "y"])]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 1_000_000}, "concurrency must be between 1 and 10,000, not 1,000,000"),
        ({"max_jobs_per_child": 0}, "max-jobs-per-child must be between 1 and 1,000,000,000, not 0"),
        ({"poll_seconds": 0.01}, "poll-seconds must be between 0.05 and 60, not 0.01"),
        (
            {"retention_seconds": 1e10},
            "retention-seconds must be between 0 and 3,200,000,000, not 10,000,000,000",
        ),
        ({"concurrency": 10**400}, "concurrency must be between 1 and 10,000, not 1"),
        ({"poll_seconds": float("nan")}, "poll-seconds must be between 0.05 and 60, not nan"),
    ],
)
def test_bounds_are_written_out(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        WorkerSettings(**wrong)
