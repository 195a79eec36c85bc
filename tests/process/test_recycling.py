"""Children that are replaced after so many jobs, or for their memory: nobody's work is lost over it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.support import Queue, until_empty, worker
from tests.support import wait_until

# What a worker must not say when children are only replaced.
TROUBLE = ("child died", "job crashed", "claim lost", "gave back what had not finished")


def test_a_child_is_replaced_after_so_many_jobs_and_finishes_what_it_runs(
    queue: Queue, tmp_path: Path
) -> None:
    with worker(queue.dsn, tmp_path, "-c", "2", "--max-jobs-per-child", "5") as started:
        long = queue.insert("wait_for_file", json.dumps({"path": str(tmp_path / "go on")}))
        wait_until(lambda: queue.effects(long) == 1)
        short = [queue.insert("touch") for _ in range(60)]
        started.wait_for("child retired")
        after = queue.insert("touch")
        queue.wait_for_state(after, "succeeded")

        # Its replacement was at work before it had ended.
        assert queue.state(long) == "running"
        (tmp_path / "go on").touch()
        queue.wait_for_state(long, "succeeded")
        wait_until(lambda: len(started.children()) == 1, message="retired children are closed")
        assert [line for event in TROUBLE for line in started.lines(event)] == []
        assert started.stop() == 0
    assert [queue.state(job) for job in short] == ["succeeded"] * 60
    assert queue.effects() == 62
    assert queue.one("SELECT max(attempt) FROM pgqueue.finished_jobs") == 1
    assert queue.one("SELECT count(DISTINCT pid) FROM effects") >= 2


def test_a_child_that_holds_too_much_memory_is_replaced(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, "--max-memory-mb", "400") as started:
        small, large = queue.insert("touch"), queue.insert("keep", '{"megabytes": 500}')
        started.wait_for("child retired")
        after = queue.insert("touch")
        queue.wait_for_state(after, "succeeded")
        wait_until(lambda: len(started.children()) == 1, message="the retired child is closed")

        assert len(started.lines("child retired")) == 1
        assert [line for event in TROUBLE for line in started.lines(event)] == []
        assert started.stop() == 0
    pids = dict(queue.all("SELECT job_id, pid FROM effects"))
    assert pids[small] == pids[large] != pids[after]


def test_deadlines_apply_in_a_child_that_is_to_be_replaced(queue: Queue, tmp_path: Path) -> None:
    options = ("-c", "2", "--max-jobs-per-child", "1", "--kill-grace-seconds", "0.2")
    with worker(queue.dsn, tmp_path, *options) as started:
        hanging = queue.insert("hang")
        wait_until(lambda: queue.effects(hanging) == 1)
        queue.insert("touch")
        started.wait_for("child retired")
        queue.wait_for_state(hanging, "dead")
        after = queue.insert("touch")
        queue.wait_for_state(after, "succeeded")

        assert "timed out" in queue.one("SELECT reason FROM pgqueue.dead_jobs")
        wait_until(lambda: len(started.children()) == 1, message="it was replaced once, not twice")
        assert started.stop() == 0


def test_a_limit_below_what_the_application_needs_lets_its_jobs_run(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, "-c", "1", "--max-memory-mb", "1") as started:
        started.wait_for("a child holds more than --max-memory-mb before its first job")
        jobs = [queue.insert("touch") for _ in range(3)]
        for job in jobs:
            queue.wait_for_state(job, "succeeded")
        started.wait_for("child retired")

        assert len(started.lines("a child holds more than --max-memory-mb before its first job")) == 1
        assert started.stop() == 0
    assert queue.effects() == 3


def test_nothing_is_lost_when_every_job_costs_its_child_its_place(queue: Queue, tmp_path: Path) -> None:
    jobs = [queue.insert("sleep", '{"seconds": 0.02}') for _ in range(30)]

    ended = until_empty(queue.dsn, tmp_path, "--processes", "2", "-c", "4", "--max-jobs-per-child", "1")

    assert ended.process.returncode == 0, ended.text()
    assert [queue.state(job) for job in jobs] == ["succeeded"] * 30
    assert queue.effects() == 30
    assert queue.one("SELECT max(attempt) FROM pgqueue.finished_jobs") == 1
    assert len(ended.lines("child retired")) >= 4
