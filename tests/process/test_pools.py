"""Queues that share a worker: each gets its slots and its turn, and is heard when it rings."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.process.support import Queue, worker
from tests.support import wait_until

# How many queues are slept on: the bell's locks that are held exclusively.
ASLEEP = (
    "SELECT count(*) FROM pg_locks JOIN pg_database AS d ON d.oid = database "
    "WHERE d.datname = current_database() AND locktype = 'advisory' AND classid = 1885827445 "
    "AND mode = 'ExclusiveLock'"
)


def test_a_busy_queue_does_not_starve_one_with_slots_of_its_own(queue: Queue, tmp_path: Path) -> None:
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args, queue) "
        "SELECT 'nothing', '{}', 'fast' FROM generate_series(1, 60000)"
    )
    with worker(queue.dsn, tmp_path, "-q", "fast", "-q", "slow:2", "--log-level", "warning", is_up=False):
        wait_until(lambda: queue.count("finished_jobs") > 1000, 30, "the fast queue is under way")
        slow = queue.insert("touch", queue="slow")
        queue.wait_for_state(slow, "succeeded", 30)

        assert queue.count("jobs", "queue = 'fast' AND state = 'ready'") > 0


def test_a_queue_never_runs_more_jobs_than_its_slots_when_short_jobs_turn_long(
    queue: Queue, tmp_path: Path
) -> None:
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args, queue) "
        "SELECT 'nothing', '{}', 'mail' FROM generate_series(1, 3000)"
    )
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args, queue) "
        """SELECT 'sleep', '{"seconds": 1}', 'mail' FROM generate_series(1, 8)"""
    )
    with worker(queue.dsn, tmp_path, "-q", "mail:2", "-q", "default", "--log-level", "warning", is_up=False):
        wait_until(lambda: queue.count("jobs") == 0, 60, "all have ended")

    assert queue.effects() == 8
    most = queue.one(
        "SELECT max(n) FROM (SELECT count(*) AS n FROM effects AS a JOIN effects AS b "
        "ON b.at <= a.at AND b.at > a.at - interval '0.95 s' GROUP BY a.job_id) AS at_once"
    )
    assert most == 2


def test_two_queues_of_one_slot_take_turns(queue: Queue, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for _ in range(8):
            queue.insert("block", '{"seconds": 0.5}', queue=name)
    options = ("-q", "a", "-q", "b", "-c", "1", "--poll-seconds", "0.3")
    with worker(queue.dsn, tmp_path, *options, "--grace-seconds", "0"):
        wait_until(lambda: queue.effects() >= 6, 30)
        order = queue.all(
            "SELECT coalesce(j.queue, f.queue) FROM effects AS e "
            "LEFT JOIN pgqueue.jobs AS j ON j.id = e.job_id "
            "LEFT JOIN pgqueue.finished_jobs AS f ON f.id = e.job_id ORDER BY e.at LIMIT 6"
        )

    assert sorted(row[0] for row in order) == ["a"] * 3 + ["b"] * 3


def test_a_worker_that_just_became_full_hands_its_watch_on_at_once(queue: Queue, tmp_path: Path) -> None:
    options = ("-c", "1", "-q", "default", "--poll-seconds", "60", "--grace-seconds", "0")
    with worker(queue.dsn, tmp_path, *options):
        wait_until(lambda: queue.one(ASLEEP) == 1, message="it watches")
        with worker(queue.dsn, tmp_path, *options) as other:
            # The other one sleeps through the first job, and hears of it when everything is over.
            os.kill(other.pid, signal.SIGSTOP)
            long = queue.insert("sleep", '{"seconds": 60}')
            wait_until(lambda: queue.effects(long) == 1)
            os.kill(other.pid, signal.SIGCONT)
            wait_until(lambda: queue.one(ASLEEP) == 1, message="the other one watches")
            began = time.monotonic()
            short = queue.insert("touch")
            queue.wait_for_state(short, "succeeded")

            assert time.monotonic() - began < 20


def test_every_queue_is_heard_at_once_when_several_ring_together(queue: Queue, tmp_path: Path) -> None:
    names = [f"q{number}" for number in range(6)]
    options = [option for name in names for option in ("-q", name)]
    with worker(queue.dsn, tmp_path, *options, "--poll-seconds", "60"):
        time.sleep(1)
        slowest = 0.0
        for step in range(40):
            began = time.monotonic()
            # The second rings while the worker is busy with the first.
            first = queue.insert("touch", queue=names[step % 6])
            time.sleep(0.001 * (step % 20))
            second = queue.insert("touch", queue=names[(step + 1 + step // 6) % 6])
            for job in (first, second):
                queue.wait_for_state(job, "succeeded")
            slowest = max(slowest, time.monotonic() - began)

    assert slowest < 20


def test_a_queue_whose_claims_fail_does_not_keep_the_others_of_its_worker_waiting(
    queue: Queue, tmp_path: Path
) -> None:
    queue.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not here' USING ERRCODE = 'check_violation'; END $$"
    )
    queue.connection.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.jobs FOR EACH ROW "
        "WHEN (NEW.queue = 'bad' AND NEW.state = 'running') EXECUTE FUNCTION refuse()"
    )
    bad = queue.insert("touch", queue="bad")
    with worker(queue.dsn, tmp_path, "-q", "bad", "-q", "good") as started:
        started.wait_for("claim refused, trying again")
        for _ in range(3):
            queue.wait_for_state(queue.insert("touch", queue="good"), "succeeded")
        queue.connection.execute("DROP TRIGGER refuse ON pgqueue.jobs")
        queue.wait_for_state(bad, "succeeded")

        (refused,) = started.lines("claim refused, trying again")
        assert (refused["queue"], refused["error"]) == ("bad", "not here")


def test_a_queue_whose_claims_wait_for_a_stranger_does_not_keep_the_others_waiting_for_long(
    queue: Queue, tmp_path: Path
) -> None:
    queue.connection.execute("SELECT pgqueue.limit_queue('stuck', 5)")
    stuck = queue.insert("touch", queue="stuck")
    with Queue(queue.dsn).connection as stranger:
        stranger.execute("SELECT pg_advisory_lock(hashtextextended('pgqueue.queue:stuck', 0))")
        with worker(queue.dsn, tmp_path, "-q", "stuck", "-q", "good") as started:
            started.wait_for("claim put off")
            for _ in range(3):
                queue.wait_for_state(queue.insert("touch", queue="good"), "succeeded")
            stranger.execute("SELECT pg_advisory_unlock_all()")
            queue.wait_for_state(stuck, "succeeded", 30)

            assert len(started.lines("claim put off")) == 1
