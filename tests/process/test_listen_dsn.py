"""The server of --listen-dsn is away, the database is not: jobs do not wait for wake-ups to come back."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import uuid4

import pytest

from pgqueue.database import run
from pgqueue.model.place import Cursor
from pgqueue.sql import attempts
from tests.faults.proxy import Proxy
from tests.process.support import Queue, through, worker
from tests.support import wait_until

LOST = "server for wake-ups lost, reconnecting"
BACK = "server for wake-ups is back"
LISTENING = """
SELECT count(*) FROM pg_stat_activity
WHERE application_name = 'pgqueue worker listen' AND datname = current_database()
"""


def abandon(queue: Queue) -> int:
    """Leave a job as a worker does that has just died: soon nobody renews it."""
    with queue.connection.transaction():
        job = queue.insert("double", '{"number": 1}')
        (claimed,) = run(
            queue.connection, attempts.claim("default", str(uuid4()), 1, 2.0, Cursor().start(0.0))
        )
    assert claimed.job_id == job
    return job


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_a_worker_that_loses_the_server_for_wake_ups_polls_until_it_is_back(
    how: str, queue: Queue, proxy: Proxy, tmp_path: Path
) -> None:
    options = ("--listen-dsn", through(proxy, queue), "--poll-seconds", "0.5")
    with worker(queue.dsn, tmp_path, *options) as started:
        wait_until(lambda: queue.one(LISTENING) == 1, message="it listens")
        queue.wait_for_state(queue.insert("double", '{"number": 1}'), "succeeded")

        if how == "refused":
            proxy.refuse()
        else:
            proxy.strand_new()
        proxy.cut()
        started.wait_for(LOST)
        for number in range(3):
            queue.wait_for_state(queue.insert("double", f'{{"number": {number}}}'), "succeeded", seconds=30)
        assert not started.lines(BACK)

        proxy.heal()
        started.wait_for(BACK, seconds=30)
        queue.wait_for_state(queue.insert("double", '{"number": 4}'), "succeeded")

        assert len(started.lines(LOST)) == 1
        assert not [line for line in started.lines() if "database" in line["event"]]
        assert started.stop() == 0


def test_a_server_for_wake_ups_that_falls_silent_holds_jobs_up_for_seconds_once(
    queue: Queue, proxy: Proxy, tmp_path: Path
) -> None:
    options = ("--listen-dsn", through(proxy, queue), "--poll-seconds", "0.5")
    with worker(queue.dsn, tmp_path, *options) as started:
        wait_until(lambda: queue.one(LISTENING) == 1, message="it listens")
        queue.wait_for_state(queue.insert("double", '{"number": 1}'), "succeeded")

        proxy.strand_new()
        assert proxy.strand() == 1
        while not started.lines(LOST):
            queue.wait_for_state(queue.insert("double", '{"number": 2}'), "succeeded", seconds=30)
        queue.wait_for_state(queue.insert("double", '{"number": 3}'), "succeeded", seconds=30)

        assert started.stop() == 0


def test_a_worker_starts_without_the_server_for_wake_ups_and_is_woken_once_that_is_there(
    queue: Queue, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.refuse()
    options = ("--listen-dsn", through(proxy, queue), "--poll-seconds", "60")
    with worker(queue.dsn, tmp_path, *options) as started:
        job = queue.insert("double", '{"number": 1}')
        started.wait_for(LOST)
        proxy.heal()

        # What came while nobody listened is found when somebody does, and not by the next poll.
        began_at = time.monotonic()
        queue.wait_for_state(job, "succeeded", seconds=30)
        wait_until(lambda: queue.one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") > 1)
        queue.wait_for_state(queue.insert("double", '{"number": 2}'), "succeeded", seconds=30)
        assert time.monotonic() - began_at < 50

        assert started.stop() == 0


def test_a_job_that_nobody_renews_is_taken_back_while_the_server_for_wake_ups_is_away(
    queue: Queue, proxy: Proxy, tmp_path: Path
) -> None:
    options = ("--listen-dsn", through(proxy, queue), "--lease-seconds", "2", "--poll-seconds", "0.5")
    with worker(queue.dsn, tmp_path, *options) as started:
        proxy.refuse()
        proxy.cut()
        started.wait_for(LOST)

        queue.wait_for_state(abandon(queue), "succeeded", seconds=20)

        assert not started.lines(BACK)
        assert started.stop() == 0
