"""Trouble in the database: outcomes wait for its end, nobody waits for another's, nothing runs twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg
import pytest

from tests.process.support import Queue, until_empty, worker
from tests.support import DurableServer, children_of, wait_until


def test_an_outcome_whose_row_a_stranger_holds_keeps_no_other_waiting(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, "--log-level", "debug") as started:
        held = queue.insert("sleep", '{"seconds": 3}')
        wait_until(lambda: queue.effects(held) == 1)
        with psycopg.connect(queue.dsn) as stranger:
            stranger.execute("SELECT id FROM pgqueue.jobs WHERE id = %s FOR UPDATE", (held,))
            started.wait_for("outcome put off")
            others = [queue.insert("touch") for _ in range(20)]
            for job in others:
                queue.wait_for_state(job, "succeeded")
            stranger.rollback()
        queue.wait_for_state(held, "succeeded")
        assert started.stop() == 0

    assert queue.effects(held) == 1


def test_outcomes_that_the_database_refuses_are_kept_until_it_takes_them(
    queue: Queue, tmp_path: Path
) -> None:
    queue.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN RAISE EXCEPTION 'not today'; END$$; "
        "CREATE TRIGGER refuse BEFORE INSERT ON pgqueue.finished_jobs FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    with worker(queue.dsn, tmp_path, "--lease-seconds", "2") as started:
        jobs = [queue.insert("touch") for _ in range(10)]
        started.wait_for("outcome put off", 10)
        queue.connection.execute("DROP TRIGGER refuse ON pgqueue.finished_jobs")
        for job in jobs:
            queue.wait_for_state(job, "succeeded")
        assert started.stop() == 0

    assert queue.effects() == 10
    assert "not today" in started.lines("outcome put off")[0]["reason"]


def test_a_worker_that_waited_for_its_outcomes_goes_on_when_they_are_written(
    queue: Queue, tmp_path: Path
) -> None:
    with (
        psycopg.connect(queue.dsn) as stranger,
        worker(queue.dsn, tmp_path, "--poll-seconds", "60") as started,
    ):
        stranger.execute("LOCK TABLE pgqueue.finished_jobs IN SHARE MODE")
        queue.connection.execute(
            "INSERT INTO pgqueue.jobs (task, args) SELECT 'nothing', '{}' FROM generate_series(1, 15000)"
        )
        # More would be too many to lose.
        wait_until(lambda: queue.count("jobs", "state = 'running'") > 5000, 60)
        stranger.rollback()

        wait_until(lambda: queue.count("jobs") == 0, 45)
        assert started.stop() == 0


def test_beside_an_old_snapshot_and_many_dead_entries_every_job_starts_soon(
    queue: Queue, tmp_path: Path
) -> None:
    with psycopg.connect(queue.dsn) as old, worker(queue.dsn, tmp_path, "--poll-seconds", "60") as started:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM pgqueue.jobs")
        for priority in (5, 2):
            queue.connection.execute(
                "INSERT INTO pgqueue.jobs (task, args, priority) "
                "SELECT 'nothing', '{}', %s FROM generate_series(1, 60000)",
                (priority,),
            )
        wait_until(lambda: queue.count("jobs") == 0, 60)

        for priority in (5, 0, 2, 9):
            jobs = [queue.insert("touch", priority=priority) for _ in range(3)]
            with psycopg.connect(queue.dsn) as late:
                jobs += late.execute(
                    "INSERT INTO pgqueue.jobs (task, args, priority) VALUES ('touch', '{}', %s) RETURNING id",
                    (priority,),
                ).fetchone()  # type: ignore[arg-type]
                jobs.append(queue.insert("touch", priority=priority))
                queue.wait_for_state(jobs[-1], "succeeded")
            for job in jobs:
                queue.wait_for_state(job, "succeeded")
        failing = queue.insert("fail_first")
        queue.wait_for_state(failing, "succeeded", seconds=30)
        assert started.stop() == 0


def test_a_day_without_a_partition_gets_one(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("touch")
    with worker(queue.dsn, tmp_path, "-q", "other") as started:
        for name in queue.all(
            "SELECT inhrelid::regclass::text FROM pg_inherits "
            "WHERE inhparent = 'pgqueue.finished_jobs'::regclass"
        ):
            queue.connection.execute(f"DROP TABLE {name[0]}")  # type: ignore[arg-type]
        queue.connection.execute("UPDATE pgqueue.jobs SET queue = 'other'")
        queue.wait_for_state(job, "succeeded")

        assert started.lines("outcome put off") == []
    assert queue.effects() == 1


def test_jobs_of_a_worker_whose_server_stood_still_are_not_taken_for_lost(
    durable_server: DurableServer, tmp_path: Path
) -> None:
    queue = Queue(durable_server.dsn)
    options = ("--lease-seconds", "2")
    with (
        worker(durable_server.dsn, tmp_path, *options) as first,
        worker(durable_server.dsn, tmp_path, *options) as second,
    ):
        jobs = [queue.insert("sleep", '{"seconds": 7}') for _ in range(3)]
        wait_until(lambda: queue.effects() == 3)
        began = queue.one("SELECT clock_timestamp()")
        # Both have looked for longer than a lease: they would take back what is not renewed.
        wait_until(lambda: queue.one("SELECT clock_timestamp() > %s + interval '2.5 s'", began))
        processes = [durable_server.pid, *children_of(durable_server.pid)]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(AssertionError):
            wait_until(lambda: False, 3)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        for job in jobs:
            queue.wait_for_state(job, "succeeded")

        assert queue.effects() == 3
        assert first.lines("job taken back") == second.lines("job taken back") == []
    queue.close()


def test_a_worker_ends_soon_though_the_database_is_away(
    durable_server: DurableServer, tmp_path: Path
) -> None:
    queue = Queue(durable_server.dsn)
    with worker(durable_server.dsn, tmp_path, "--grace-seconds", "0.5") as started:
        job = queue.insert("block", '{"seconds": 60}')
        wait_until(lambda: queue.effects(job) == 1)
        queue.close()
        durable_server.stop()
        started.wait_for("database lost, reconnecting")

        assert started.stop(15) == 0
    durable_server.start()
    queue = Queue(durable_server.dsn)
    assert queue.state(job) == "running"
    queue.close()


def test_a_snoozed_job_is_waited_for(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("snooze_long_once")

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 0, ended.text()
    assert queue.effects(job) == 2
