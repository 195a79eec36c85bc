"""Workers keep to rate limits together, use them to the full, and need no poll for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from pathlib import Path

from pgqueue.database import run
from pgqueue.sql import presence
from tests.guarantees.support import most_in_any
from tests.process import rate_jobs
from tests.process.support import Queue, worker
from tests.support import wait_until

APP = "tests.process.rate_jobs:app"
# The minute where there is time for it.
SECONDS = 60 if os.environ.get("CI") == "true" else 12
NO_POLL = ("--poll-seconds", "60")


def starts(queue: Queue) -> list[float]:
    return [
        row[0]
        for row in queue.all("SELECT extract(epoch FROM started_at)::float8 FROM pgqueue.finished_jobs")
    ]


def enqueue(queue: Queue, task: str, count: int, args: str = "'{}'") -> None:
    run(queue.connection, presence.register_tasks(rate_jobs.app.registry.registrations()))
    queue.connection.execute(
        f"INSERT INTO pgqueue.jobs (task, args) SELECT '{task}', {args} FROM generate_series(1, {count}) AS i"
    )


def usual_gap(seen: list[float]) -> float:
    """Give the median of what lies between one start and the next: a late one does not change it."""
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(seen))


def starts_by_four_workers(queue: Queue, folder: Path, name: str, task: str, burst: int) -> list[float]:
    """Give when the jobs of a limit of a hundred a second started, its burst and what came after it."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(worker(queue.dsn, folder, "-q", name, "--log-level", "info", app=APP))
        enqueue(queue, task, burst + 200 * SECONDS)
        wait_until(lambda: queue.count("finished_jobs") > burst)
        time.sleep(SECONDS)
        return sorted(starts(queue))


def test_four_workers_start_a_hundred_a_second_and_never_more_than_the_burst_above_it(
    queue: Queue, tmp_path: Path
) -> None:
    seen = starts_by_four_workers(queue, tmp_path, "fast", "hundred_a_second", burst=10)

    assert most_in_any(1.0, seen) <= 110
    # Whoever has no processor for a tenth of a second loses tokens: not in each three seconds.
    assert most_in_any(3.0, [one for one in seen if one > seen[0] + 1]) >= 98 * 3


def test_four_workers_lose_no_token_while_there_is_room_for_it(queue: Queue, tmp_path: Path) -> None:
    seen = starts_by_four_workers(queue, tmp_path, "roomy", "hundred_a_second_with_room", burst=1000)

    # Who lost one never makes up for it; who is late does, as soon as there is a processor.
    lost = [1000 + 100 * (one - seen[0]) - count for count, one in enumerate(seen, 1)]
    assert min(lost[len(seen) // 2 :]) < SECONDS


def test_one_idle_worker_starts_as_many_as_a_slow_limit_allows_without_polling(
    queue: Queue, tmp_path: Path
) -> None:
    with worker(queue.dsn, tmp_path, "-q", "slow", *NO_POLL, app=APP):
        enqueue(queue, "five_a_second", 100)
        wait_until(lambda: queue.count("finished_jobs") >= 20, 60)
        seen = sorted(starts(queue))

    assert most_in_any(1.0, seen) <= 6
    assert usual_gap(seen) < 1 / 4.5


def test_the_limit_of_a_queue_wakes_its_idle_worker_too(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, "-q", "narrow", *NO_POLL, app=APP):
        enqueue(queue, "unlimited", 100)
        wait_until(lambda: queue.count("finished_jobs") >= 20, 60)
        seen = sorted(starts(queue))

    assert most_in_any(1.0, seen) <= 6
    assert usual_gap(seen) < 1 / 4.5


def test_each_customer_has_the_limit_to_itself(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, "-q", "tenants", *NO_POLL, app=APP):
        enqueue(queue, "call", 200, "jsonb_build_object('customer', i % 20)")
        wait_until(lambda: queue.count("finished_jobs") >= 140, 60)

    by_customer = queue.all(
        "SELECT args ->> 'customer', array_agg(extract(epoch FROM started_at)::float8) "
        "FROM pgqueue.finished_jobs GROUP BY 1"
    )
    assert len(by_customer) == 20
    assert all(most_in_any(1.0, instants) <= 3 for _, instants in by_customer)
    # Three and a half seconds if nothing is late, and seventy for all together.
    assert sorted(starts(queue))[139] - min(starts(queue)) < 30


def test_a_worker_that_works_off_a_queue_waits_for_what_is_in_line(queue: Queue, tmp_path: Path) -> None:
    enqueue(queue, "five_a_second", 6)

    with worker(queue.dsn, tmp_path, "--until-empty", "-q", "slow", app=APP, is_up=False) as started:
        ended = started.wait(90)

    assert ended == 0
    assert queue.count("finished_jobs") == 6


def test_what_an_operator_set_outlives_the_workers_and_what_code_says_no_more_goes(
    queue: Queue, tmp_path: Path
) -> None:
    queue.connection.execute("SELECT pgqueue.rate_set('queue:narrow', 7, 2)")
    queue.connection.execute(
        'SELECT pgqueue.rate_declare(\'[{"name": "task:unlimited", "tokens_per_second": 1, "burst": 1}]\')'
    )

    with worker(queue.dsn, tmp_path, app=APP):
        pass

    found = queue.all(
        "SELECT name, tokens_per_second, burst, is_declared FROM pgqueue.rate_limits ORDER BY name"
    )
    assert found == [
        ("api:*", 2, 1, True),
        ("queue:narrow", 7, 2, False),
        ("task:five_a_second", 5, 1, True),
        ("task:hundred_a_second", 100, 10, True),
        ("task:hundred_a_second_with_room", 100, 1000, True),
    ]
