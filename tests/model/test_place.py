"""Where the next claim starts."""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.model.place import Cursor

HEAD = (None, None, None)


@dataclass(frozen=True)
class Row:
    job_id: int
    key: str | None = None
    priority: int = 0
    run_at: str = "2026-01-01"
    is_scanned: bool = True


def rows(count: int, first: int = 1) -> list[Row]:
    return [Row(job_id) for job_id in range(first, first + count)]


def test_a_claim_starts_behind_the_last_job_of_a_full_batch() -> None:
    cursor = Cursor()

    assert cursor.start(0.0) == HEAD
    cursor.finish(0.001, rows(10), 10)

    assert cursor.start(0.002) == (0, "2026-01-01", 10)
    assert not cursor.was_rescan


def test_the_head_is_looked_at_again_at_least_every_50_ms() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.001, rows(10), 10)

    assert cursor.start(0.049) != HEAD
    cursor.finish(0.050, rows(10, 11), 10)
    assert cursor.start(0.052) == HEAD


def test_slow_rescans_take_a_tenth_of_the_time() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(1.0, rows(10), 10)

    assert cursor.start(5.0) != HEAD
    cursor.finish(5.001, rows(10, 11), 10)
    assert cursor.start(10.1) == HEAD


def test_a_short_claim_is_followed_by_a_look_at_the_head() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.001, rows(10), 10)
    cursor.start(0.002)
    cursor.finish(0.003, rows(3, 11), 10)

    assert cursor.seconds_to_rescan(0.004) == 0.0
    assert cursor.start(0.004) == HEAD
    assert cursor.was_rescan


def test_a_keyed_job_is_followed_by_a_look_at_the_head() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.001, [Row(1, key="k")], 1)

    assert cursor.start(0.002) == HEAD


def test_an_expensive_head_is_not_looked_at_before_its_time() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.1, rows(10), 10)
    cursor.start(0.2)
    cursor.finish(0.21, [], 10)

    assert cursor.start(0.3) != HEAD
    assert 0.6 < cursor.seconds_to_rescan(0.3) < 0.8
