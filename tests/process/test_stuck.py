"""Handlers that nothing can stop but their process's end: others pay nothing, and their slot is soon free."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.hard_jobs import TIMEOUT_SECONDS
from tests.process.support import Queue, worker
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
        stuck = queue.insert(task, args)
        wait_until(lambda: queue.effects(stuck) == 1)
        follower = queue.insert("touch")

        queue.wait_for_state(follower, "succeeded")
        seconds = queue.one(
            "SELECT extract(epoch FROM follower.at - stuck.at)::float "
            "FROM effects AS follower, effects AS stuck "
            "WHERE follower.job_id = %s AND stuck.job_id = %s",
            follower,
            stuck,
        )
        over.touch()
        for job in others:
            queue.wait_for_state(job, "succeeded")

        # A second to have it back; on a machine where Python alone takes half of it, two such starts more.
        allowed = KILL_SECONDS + 1.0 + max(0.0, 2 * seconds_to_start_a_child() - 1.0)
        print(f"{task}: slot back after {seconds:.2f} s; timeout and grace are {KILL_SECONDS:g} s")
        assert KILL_SECONDS < seconds < allowed
        assert "timed out after 1 s" in queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", stuck)
        assert len(started.lines("child died")) == 1
        assert queue.count("finished_jobs", "attempt = 1 AND crashes = 0") == OTHERS + 1
        assert queue.one("SELECT count(DISTINCT pid) FROM effects WHERE job_id = ANY (%s)", others) == 3
        assert started.stop() == 0
