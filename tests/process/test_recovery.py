"""Kills and freezes: nothing is lost, nothing a zombie writes counts, and how soon it runs again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psycopg

from pgqueue.runtime.bell import MAINTAINERS
from tests.process.support import Queue, until_empty, worker
from tests.support import wait_until


def test_twenty_thousand_jobs_survive_a_killed_child_and_a_killed_worker(
    queue: Queue, tmp_path: Path
) -> None:
    total = 20_000
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args) SELECT 'touch', '{}' FROM generate_series(1, %s)", (total,)
    )
    options = ("--processes", "2", "-c", "8", "--lease-seconds", "3")

    with worker(queue.dsn, tmp_path, *options) as first, worker(queue.dsn, tmp_path, *options) as second:
        wait_until(lambda: queue.effects() > total // 5, 60, "a fifth is done")
        os.kill(first.children()[0], signal.SIGKILL)
        wait_until(lambda: queue.effects() > total // 2, 60, "half is done")
        second.process.kill()
        wait_until(lambda: queue.count("jobs") == 0, 90, "all jobs have ended")
        assert first.stop() == 0

    assert queue.one("SELECT count(DISTINCT job_id) FROM effects") == total
    succeeded, cancelled, dead = (
        queue.count("finished_jobs", "state = 'succeeded'"),
        queue.count("finished_jobs", "state = 'cancelled'"),
        queue.count("dead_jobs"),
    )
    assert succeeded + cancelled + dead == total
    assert (succeeded, dead) == (total, 0)
    # What ran twice says so, and why.
    unexplained = queue.all(
        "SELECT id, attempt, crashes FROM pgqueue.finished_jobs WHERE errors IS NULL"
        " AND id IN (SELECT job_id FROM effects GROUP BY job_id HAVING count(*) > 1)"
    )
    assert unexplained == []


def test_a_crashed_childs_jobs_run_again_at_once_in_another_child(queue: Queue, tmp_path: Path) -> None:
    options = ("--processes", "2", "-c", "8", "--lease-seconds", "60", "--kill-grace-seconds", "0.2")
    with worker(queue.dsn, tmp_path, *options) as started:
        # Only the first attempt waits to be killed with its process.
        for _ in range(4):
            queue.insert("wait_at_first")
        wait_until(lambda: queue.effects() == 4)
        victim = queue.one("SELECT pid FROM effects LIMIT 1")
        its_jobs = [row[0] for row in queue.all("SELECT job_id FROM effects WHERE pid = %s", victim)]
        killed_at = queue.one("SELECT clock_timestamp()")
        os.kill(victim, signal.SIGKILL)
        for job in its_jobs:
            queue.wait_for_state(job, "succeeded")
        restarted = queue.all(
            "SELECT extract(epoch FROM at - %s)::float FROM effects WHERE attempt = 2 ORDER BY at", killed_at
        )

        assert len(restarted) == len(its_jobs)
        # Long before any lease could have run out.
        assert max(row[0] for row in restarted) < 10
        assert len(started.lines("job crashed")) == len(its_jobs)
        started.process.kill()


def test_a_crashed_workers_jobs_run_again_within_lease_and_one_reaper_pass(
    queue: Queue, tmp_path: Path
) -> None:
    jobs = [queue.insert("wait_at_first") for _ in range(3)]

    with worker(queue.dsn, tmp_path) as crashing, worker(queue.dsn, tmp_path) as other:
        wait_until(lambda: queue.effects() == 3)
        other.wait_for("worker started", seconds=60)
        # The reaper waits one lease before it trusts its own sight.
        owners = [
            row[0]
            for row in queue.all("SELECT DISTINCT worker_id::text FROM pgqueue.jobs WHERE state = 'running'")
        ]
        victims = [
            one
            for one in (crashing, other)
            if any(one.lines("worker started")[0]["worker"] in owner for owner in owners)
        ]
        killed_at = queue.one("SELECT clock_timestamp()")
        for victim in victims[:1]:
            victim.process.kill()
        killed_jobs = [
            row[0]
            for row in queue.all(
                "SELECT id FROM pgqueue.jobs WHERE left(worker_id::text, 8) = %s",
                victims[0].lines("worker started")[0]["worker"],
            )
        ]
        for job in killed_jobs:
            queue.wait_for_state(job, "succeeded")
        seconds = queue.one(
            "SELECT extract(epoch FROM max(at) - %s)::float FROM effects WHERE attempt = 2", killed_at
        )

        assert killed_jobs
        assert seconds < 15
        queue.connection.execute("SELECT pgqueue.cancel(%s)", (jobs,))


def test_who_stands_by_takes_jobs_back_while_those_who_should_are_silent(
    queue: Queue, tmp_path: Path
) -> None:
    job = queue.insert("touch")
    with psycopg.connect(queue.dsn, autocommit=True) as silent:
        for place in range(1, MAINTAINERS + 1):
            silent.execute("SELECT pg_advisory_lock(hashtextextended('pgqueue.maintenance', %s))", (place,))
        silent.execute("SELECT pgqueue.claim('default', gen_random_uuid(), 1, 2)")

        with worker(queue.dsn, tmp_path, "--lease-seconds", "2") as standby:
            standby.wait_for("job taken back")
            queue.wait_for_state(job, "succeeded")


def test_a_frozen_worker_writes_nothing_when_it_wakes_and_works_on(queue: Queue, tmp_path: Path) -> None:
    options = ("--lease-seconds", "4", "-c", "2")
    with worker(queue.dsn, tmp_path, *options) as frozen:
        job = queue.insert("sleep", '{"seconds": 2}')
        wait_until(lambda: queue.effects(job) == 1)
        for pid in (frozen.pid, *frozen.children()):
            os.kill(pid, signal.SIGSTOP)

        with worker(queue.dsn, tmp_path, *options) as healthy:
            # The successor takes the job back, runs it and finishes it; only then the frozen one wakes.
            queue.wait_for_state(job, "succeeded")
            fence = queue.one("SELECT claim_token FROM pgqueue.finished_jobs WHERE id = %s", job)
            assert healthy.lines("job taken back")
            assert healthy.stop() == 0
        for pid in (*frozen.children(), frozen.pid):
            os.kill(pid, signal.SIGCONT)
        lost = frozen.wait_for("claim lost")

        assert [line["job_id"] for line in lost] == [job]
        assert queue.effects(job) == 2
        assert queue.count("finished_jobs") == 1
        assert queue.one("SELECT claim_token FROM pgqueue.finished_jobs WHERE id = %s", job) == fence
        after = queue.insert("touch")
        queue.wait_for_state(after, "succeeded")
        assert frozen.stop() == 0
        assert frozen.lines("worker ended")[0]["lost"] == 1


def test_a_job_that_kills_its_process_is_dead_after_three_crashes_and_others_are_unharmed(
    queue: Queue, tmp_path: Path
) -> None:
    killer = queue.insert("die")
    others = [queue.insert("block", '{"seconds": 0.05}') for _ in range(100)]

    ended = until_empty(queue.dsn, tmp_path, "-c", "8")

    assert ended.process.returncode == 3, ended.text()
    assert queue.effects(killer) == 3
    # Neighbours may die with it twice; the third time it runs apart from them.
    assert queue.one("SELECT max(crashes) FROM pgqueue.finished_jobs") <= 2
    assert "exited with status 7" in queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", killer)
    assert [queue.state(job) for job in others] == ["succeeded"] * 100


def test_a_handler_that_does_not_stop_is_killed_and_its_neighbours_go_back_unharmed(
    queue: Queue, tmp_path: Path
) -> None:
    neighbour = queue.insert("wait_at_first")
    with worker(queue.dsn, tmp_path, "-c", "4", "--kill-grace-seconds", "0.5") as started:
        wait_until(lambda: queue.effects(neighbour) == 1)
        hanging, deaf, slow = queue.insert("hang"), queue.insert("hang_async"), queue.insert("too_slow")

        for job in (hanging, deaf, slow):
            queue.wait_for_state(job, "dead")
        wait_until(
            lambda: queue.state(neighbour) in ("running", "succeeded") and queue.effects(neighbour) >= 2
        )

        for job in (hanging, deaf, slow):
            assert "timed out after 1 s" in queue.one(
                "SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", job
            )
        assert queue.one("SELECT max(attempt) FROM effects WHERE job_id = %s", neighbour) == 1
        errors = queue.one("SELECT errors::text FROM pgqueue.jobs WHERE id = %s", neighbour)
        assert "began, but its process" in errors
        queue.connection.execute("SELECT pgqueue.cancel(%s)", ([neighbour],))
        assert started.stop() == 0


def test_a_job_that_ended_unreported_has_crashed_and_says_why(queue: Queue, tmp_path: Path) -> None:
    file = tmp_path / "go on"
    with worker(queue.dsn, tmp_path, "-c", "4") as started:
        ending = queue.insert("wait_for_file", json.dumps({"path": str(file)}))
        wait_until(lambda: queue.effects(ending) == 1)
        # A blocked loop reports nobody's end.
        blocking = queue.insert("block_the_loop", '{"seconds": 600}')
        wait_until(lambda: queue.effects(blocking) == 1)
        file.touch()
        wait_until(lambda: not file.exists())

        os.kill(started.children()[0], signal.SIGKILL)
        wait_until(lambda: queue.effects(ending) == 2)

        attempt, crashes, errors = queue.all(
            "SELECT attempt, crashes, errors::text FROM pgqueue.jobs WHERE id = %s", ending
        )[0]
        # No attempt is used up, but three of these are enough.
        assert (attempt - crashes, crashes) == (1, 1)
        assert "ended, but before it was reported its process was killed by signal 9" in errors
        queue.connection.execute("SELECT pgqueue.cancel(%s)", ([ending, blocking],))


def test_a_cancelled_job_stops_and_never_runs_again(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, "--lease-seconds", "1.5", "--kill-grace-seconds", "0.5") as started:
        polite, deaf = queue.insert("sleep", '{"seconds": 600}'), queue.insert("block", '{"seconds": 600}')
        wait_until(lambda: queue.effects() == 2)
        queue.connection.execute("SELECT pgqueue.cancel(%s, 'not needed')", ([polite, deaf],))

        queue.wait_for_state(polite, "cancelled")
        queue.wait_for_state(deaf, "cancelled")
        assert started.stop() == 0
    assert queue.effects() == 2


def test_a_worker_rides_out_a_terminated_backend_at_every_session(queue: Queue, tmp_path: Path) -> None:
    sessions = (
        "SELECT pid FROM pg_stat_activity "
        "WHERE application_name LIKE 'pgqueue worker%%' AND datname = current_database()"
    )
    with worker(queue.dsn, tmp_path, "--lease-seconds", "3") as started:
        for _ in range(3):
            wait_until(lambda: len(queue.all(sessions)) == 4, message="claim, finish, listen, lease are up")
            queue.all(f"SELECT pg_terminate_backend(pid) FROM ({sessions}) AS session")
            job = queue.insert("touch")

            queue.wait_for_state(job, "succeeded")
        assert queue.one("SELECT max(attempt) FROM pgqueue.finished_jobs") == 1
        assert started.stop() == 0


def test_one_job_after_another_that_hangs_does_not_keep_the_worker_from_its_other_jobs(
    queue: Queue, tmp_path: Path
) -> None:
    with worker(queue.dsn, tmp_path, "-c", "4", "--kill-grace-seconds", "0.1") as started:
        for _ in range(10):
            queue.wait_for_state(queue.insert("hang"), "dead")
        started.wait_for("child died", count=10)
        innocent = queue.insert("touch")

        # Who counts these deaths as those of a program that cannot start waits for fifteen to thirty.
        queue.wait_for_state(innocent, "succeeded", seconds=14)
