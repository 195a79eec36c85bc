"""Pauses and ceilings of queues, as running workers keep to them; nobody waits for a poll."""

from __future__ import annotations

import time
from pathlib import Path

from pgqueue import limits
from tests.process.support import Queue, worker
from tests.support import wait_until

NO_POLL = ("--poll-seconds", "60")
# Far less than a poll, and enough for a busy machine.
AT_ONCE_SECONDS = 20.0

MOST_AT_ONCE = """
SELECT max(n) FROM (
    SELECT count(*) AS n FROM pgqueue.finished_jobs AS a
    JOIN pgqueue.finished_jobs AS b ON b.started_at <= a.started_at AND b.finished_at > a.started_at
    GROUP BY a.id
) AS at_once
"""


def test_a_ceiling_holds_over_all_workers_and_the_next_job_starts_when_one_ends(
    queue: Queue, tmp_path: Path
) -> None:
    limits.limit_queue(queue.connection, "default", 2)
    with worker(queue.dsn, tmp_path, *NO_POLL), worker(queue.dsn, tmp_path, *NO_POLL):
        began_at = time.monotonic()
        for _ in range(12):
            queue.insert("sleep", '{"seconds": 0.3}')
        wait_until(lambda: queue.count("finished_jobs") == 12, 60)
        took = time.monotonic() - began_at

    assert queue.one(MOST_AT_ONCE) == 2
    assert took < 6 * 0.3 + AT_ONCE_SECONDS


def test_a_job_that_fails_makes_room_for_the_next_one_too(queue: Queue, tmp_path: Path) -> None:
    limits.limit_queue(queue.connection, "default", 1)
    with worker(queue.dsn, tmp_path, *NO_POLL):
        for _ in range(4):
            queue.insert("touch", '{"unknown": 1}')  # dead at once: no such argument
        last = queue.insert("touch")
        queue.wait_for_state(last, "succeeded", AT_ONCE_SECONDS)

    assert queue.count("dead_jobs") == 4


def test_a_paused_queue_starts_nothing_and_a_resumed_one_at_once(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, *NO_POLL):
        running = queue.insert("sleep", '{"seconds": 2}')
        wait_until(lambda: queue.effects(running) == 1)
        limits.pause_queues(queue.connection, ["default"], reason="deploy")
        waiting = queue.insert("touch")

        queue.wait_for_state(running, "succeeded")
        state_in_the_pause = queue.state(waiting)
        limits.resume_queues(queue.connection, ["default"])

        queue.wait_for_state(waiting, "succeeded", AT_ONCE_SECONDS)
        assert state_in_the_pause == "ready"


def test_a_pause_is_over_when_its_time_is(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, *NO_POLL):
        limits.pause_queues(queue.connection, ["default"], seconds=2)
        job_id = queue.insert("touch")
        queue.wait_for_state(job_id, "succeeded", 2 + AT_ONCE_SECONDS)

    waited = queue.one(
        "SELECT extract(epoch FROM j.started_at - (q.paused_until - interval '2 s'))::float8 "
        "FROM pgqueue.finished_jobs AS j CROSS JOIN pgqueue.queues AS q"
    )
    assert 2 <= waited < 2 + AT_ONCE_SECONDS


def test_a_runaway_is_stopped_and_let_go_on_one_at_a_time(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, *NO_POLL):
        limits.pause_queues(queue.connection, None, reason="runaway")
        for _ in range(6):
            queue.insert("sleep", '{"seconds": 0.1}')

        limits.resume_queues(queue.connection, None, max_running=1)
        wait_until(lambda: queue.count("finished_jobs") >= 3)
        most = queue.one(MOST_AT_ONCE)
        limits.limit_queue(queue.connection, "default", None)
        wait_until(lambda: queue.count("finished_jobs") == 6, AT_ONCE_SECONDS)

    assert most == 1
