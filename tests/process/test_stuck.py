"""Handlers that nothing can stop but their process's end: others pay nothing, and their slot is soon free."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.hard_jobs import TIMEOUT_SECONDS
from tests.process.support import Queue, WorkerProcess, worker
from tests.support import ROOT, wait_until

GRACE_SECONDS = 0.5
KILL_SECONDS = TIMEOUT_SECONDS + GRACE_SECONDS
OTHERS = 15


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Listen on a port, and never answer anybody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def seconds_to_start_a_child() -> float:
    """Measure how long this machine takes just now to start Python and import what a child does."""
    began_at = time.monotonic()
    modules = "pgqueue.runtime.child, tests.process.hard_jobs"
    subprocess.run([sys.executable, "-c", f"import {modules}"], cwd=ROOT, check=True)
    return time.monotonic() - began_at


@pytest.mark.parametrize("task", ["hear_nothing", "ignore_cancellation", "wait_for_a_dead_lock"])
def test_a_stuck_handler_is_killed_its_slot_comes_back_at_once_and_the_others_are_unharmed(
    task: str, queue: Queue, silent_port: int, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    options = ("-c", str(OTHERS + 1), "--processes", "2", "--kill-grace-seconds", str(GRACE_SECONDS))
    with worker(queue.dsn, tmp_path, *options, app="tests.process.hard_jobs:app") as started:
        # Every slot is taken until the file is there, half of them in the same process.
        others = [queue.insert("wait_for_file", f'{{"path": "{over}"}}') for _ in range(OTHERS)]
        wait_until(lambda: queue.effects() == OTHERS, message=started.text())
        args = f'{{"port": {silent_port}}}' if task == "hear_nothing" else "{}"
        # A second to have it back; on a machine where Python alone takes half of it, two such starts more.
        allowed = KILL_SECONDS + 1.0 + max(0.0, 2 * seconds_to_start_a_child() - 1.0)
        took: list[float] = []
        for _ in range(3):  # again only if the machine stood still just then
            stuck = queue.insert(task, args)
            wait_until(lambda stuck=stuck: queue.effects(stuck) == 1)
            follower = queue.insert("touch")
            queue.wait_for_state(follower, "succeeded")
            took.append(
                queue.one(
                    "SELECT extract(epoch FROM follower.at - stuck.at)::float "
                    "FROM effects AS follower, effects AS stuck "
                    "WHERE follower.job_id = %s AND stuck.job_id = %s",
                    follower,
                    stuck,
                )
            )
            queue.wait_for_state(stuck, "dead")
            reason = queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", stuck)
            assert "timed out after 1 s" in reason
            if took[-1] < allowed:
                break
        over.touch()
        for job in others:
            queue.wait_for_state(job, "succeeded")

        print(f"{task}: slot back after {took} s; timeout and grace are {KILL_SECONDS:g} s")
        assert KILL_SECONDS < min(took) < allowed
        assert len(started.lines("child died")) == len(took)
        assert queue.count("finished_jobs", "attempt = 1 AND crashes = 0") == OTHERS + len(took)
        assert queue.one(
            "SELECT count(DISTINCT pid) FROM effects WHERE job_id = ANY (%s)", others
        ) == 2 + len(took)
        assert started.stop() == 0


def test_a_handler_that_takes_its_grace_to_stop_is_not_run_again_meanwhile(
    queue: Queue, tmp_path: Path
) -> None:
    """The grace is longer than the lease: that has to be renewed until the handler has ended."""
    seconds = 3.0
    options = ("--kill-grace-seconds", "20", "--lease-seconds", "1")
    with worker(queue.dsn, tmp_path, *options, app="tests.process.hard_jobs:app") as started:
        job = queue.insert("put_things_away", f'{{"seconds": {seconds}}}')

        wait_until(lambda: queue.state(job) not in ("ready", "running"), 20, started.text())

        assert queue.state(job) == "succeeded", started.text()
        assert queue.effects(job) == 1, started.text()
        assert started.lines("job taken back") == []


# A handler that holds its process's loop up: what it does to its neighbours, who cannot help it.


def block_the_loop(queue: Queue, until: Path) -> int:
    blocking = queue.insert("block_the_loop", json.dumps({"path": str(until)}))
    wait_until(lambda: queue.effects(blocking) == 1)
    return blocking


def is_past(queue: Queue, job: int, seconds: float) -> bool:
    """Say whether a job's deadline is past by so much, or the job is not there."""
    return queue.one(
        "SELECT coalesce((SELECT deadline_at + make_interval(secs => %s) < clock_timestamp()"
        " FROM pgqueue.jobs WHERE id = %s AND state = 'running'), true)",
        seconds,
        job,
    )


def check_innocent(queue: Queue, started: WorkerProcess, *jobs: int) -> None:
    for job in jobs:
        queue.wait_for_state(job, "succeeded")
        assert queue.effects(job) == 1
    assert queue.count("finished_jobs", "attempt > 1 OR crashes > 0") == 0
    assert not started.lines("child died")


def options(*more: str) -> tuple[str, ...]:
    return ("-c", "4", "--processes", "1", "--kill-grace-seconds", str(GRACE_SECONDS), *more)


def test_nobody_is_killed_over_an_attempt_that_ended_and_could_not_say_so(
    queue: Queue, tmp_path: Path
) -> None:
    over, sent = tmp_path / "over", tmp_path / "sent"
    with worker(queue.dsn, tmp_path, *options(), app="tests.process.hard_jobs:app") as started:
        mail = queue.insert("send_mail", json.dumps({"path": str(sent)}))
        wait_until(lambda: queue.effects(mail) == 1)
        blocking = block_the_loop(queue, over)
        sent.touch()

        wait_until(lambda: is_past(queue, mail, GRACE_SECONDS + 0.3), 20)
        over.touch()

        check_innocent(queue, started, mail, blocking)
        assert started.stop() == 0


def test_a_loop_that_keeps_an_end_to_itself_is_named_and_gets_no_new_work(
    queue: Queue, tmp_path: Path
) -> None:
    over, ended = tmp_path / "over", tmp_path / "ended"
    more = ("--processes", "2", "-c", "6")
    with worker(queue.dsn, tmp_path, *options(*more), app="tests.process.hard_jobs:app") as started:
        blocking = block_the_loop(queue, over)
        # Two of them, so that one is in the same process.
        jobs = [queue.insert("wait_for_file", json.dumps({"path": str(ended)})) for _ in range(4)]
        wait_until(lambda: queue.one("SELECT count(DISTINCT pid) FROM effects") == 2)
        ended.touch()

        [line] = started.wait_for("a child's loop does not answer")
        later = [queue.insert("begin_ever") for _ in range(8)]
        for job in later:
            queue.wait_for_state(job, "succeeded")
        assert queue.state(blocking) == "running"
        over.touch()

        check_innocent(queue, started, *jobs, *later, blocking)
        assert line["running"] == "block_the_loop"
        assert started.stop() == 0


def test_nobody_is_killed_over_an_attempt_that_has_not_begun_and_it_begins_once(
    queue: Queue, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    with worker(queue.dsn, tmp_path, *options(), app="tests.process.hard_jobs:app") as started:
        blocking = block_the_loop(queue, over)
        waiting = queue.insert("begin_in_time")

        [line] = started.wait_for("a child's loop does not answer")
        wait_until(lambda: queue.state(waiting) == "ready", message=started.text())
        unmoved = queue.insert("begin_ever")
        over.touch()

        check_innocent(queue, started, waiting, blocking, unmoved)
        assert line["running"] == "block_the_loop"
        started.wait_for("a child's loop answers again")
        assert started.stop() == 0


def test_a_cancelled_job_that_waits_behind_a_blocked_loop_ends_at_once_and_never_begins(
    queue: Queue, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    lease = ("--lease-seconds", "1.5")
    with worker(queue.dsn, tmp_path, *options(*lease), app="tests.process.hard_jobs:app") as started:
        blocking = block_the_loop(queue, over)
        waiting = queue.insert("begin_ever")
        wait_until(lambda: queue.state(waiting) == "running")
        queue.connection.execute("SELECT pgqueue.cancel(%s)", ([waiting],))

        queue.wait_for_state(waiting, "cancelled")
        over.touch()

        check_innocent(queue, started, blocking, queue.insert("begin_ever"))
        assert queue.effects(waiting) == 0
        assert started.stop() == 0
