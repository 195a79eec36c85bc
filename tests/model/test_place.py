"""Where the next claim starts."""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.model.place import HEAD, Cursor, Start


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

    assert cursor.start(0.002) == Start(0, "2026-01-01", 10)
    assert not cursor.was_rescan


def test_the_head_is_looked_at_again_at_least_every_50_ms() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.001, rows(10), 10)

    assert cursor.start(0.049) != HEAD
    cursor.finish(0.050, rows(10, 11), 10)
    assert cursor.start(0.052) == HEAD


def test_looks_at_a_dear_head_take_a_thirtieth_of_the_time() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(1.0, rows(10), 10)

    assert cursor.start(29.0) != HEAD
    cursor.finish(29.001, rows(10, 11), 10)
    assert cursor.start(30.1) == HEAD


def test_where_jobs_have_keys_looks_at_a_dear_head_take_a_tenth_of_the_time() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(1.0, [Row(1, key="k")], 1)

    assert cursor.start(9.0) != HEAD
    cursor.finish(9.001, rows(10, 11), 10)
    assert cursor.start(10.1) == HEAD


def test_a_short_claim_is_followed_by_a_look_at_the_head() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.001, rows(10), 10)
    cursor.start(0.002)
    cursor.finish(0.003, rows(3, 11), 10)

    assert cursor.seconds_to_look(0.004) == 0.0
    assert cursor.start(0.004) == HEAD
    assert cursor.was_rescan


def test_a_keyed_job_is_followed_by_a_look_at_the_head() -> None:
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.001, [Row(1, key="k")], 1)

    assert cursor.start(0.002) == HEAD


def dear_cursor(*priorities: int) -> Cursor:
    """Give one that has taken a job of each priority from a head that took 0.1 s, at 0.1 s."""
    cursor = Cursor()
    cursor.start(0.0)
    cursor.finish(0.1, [Row(1 + priority, priority=priority) for priority in priorities], 1000)
    return cursor


def walk(cursor: Cursor, now: float) -> list[Start]:
    """Give the starts of claims that find nothing, until all priorities were walked through."""
    starts = []
    while not starts or cursor.seconds_to_look(now) == 0:
        starts.append(cursor.start(now))
        now += 0.001
        cursor.finish(now, [], 10)
    return starts


def test_while_the_head_is_dear_each_priority_is_taken_up_behind_its_own_last_job() -> None:
    cursor = dear_cursor(0, 3, 5)
    walk(cursor, 0.11)

    starts = walk(cursor, 0.12)

    assert [(start.priority, start.job_id, start.up_to_priority) for start in starts] == [
        (0, 1, 0),
        (3, 4, 3),
        (5, 6, None),
    ]
    assert not any(start.margin_seconds for start in starts)


def test_while_the_head_is_dear_a_better_job_that_comes_goes_first_again() -> None:
    cursor = dear_cursor(0, 3, 5)
    cursor.start(0.11)
    cursor.finish(0.111, [], 10)
    assert cursor.start(0.112).priority == 3

    cursor.finish(0.113, [Row(8, priority=3)], 1)

    assert cursor.start(0.114).priority == 0


def test_while_the_head_is_dear_what_came_late_is_looked_for_now_and_then() -> None:
    cursor = dear_cursor(0)

    early = walk(cursor, 0.2)[0]
    soon = walk(cursor, 0.21)[0]
    later = walk(cursor, 0.6)[0]

    assert [start.margin_seconds for start in (early, soon, later)] == [2.0, 0.0, 2.0]


def test_a_look_for_what_came_late_is_the_more_seldom_the_longer_it_was_in_vain() -> None:
    cursor = dear_cursor(0)
    looks, now = 0, 0.2
    while now < 2.9:
        looks += walk(cursor, now)[0].margin_seconds > 0
        now += 0.01

    assert 4 <= looks <= 8


def test_a_dear_head_is_not_looked_at_before_its_time() -> None:
    cursor = dear_cursor(0)
    walk(cursor, 0.2)

    assert cursor.start(2.9) != HEAD
    assert cursor.start(3.1) == HEAD


def test_more_priorities_than_can_be_told_apart_are_one_from_the_last_on() -> None:
    cursor = dear_cursor(*range(40))

    starts = walk(cursor, 0.2)

    assert len(starts) == 15
    assert starts[-1].up_to_priority is None
