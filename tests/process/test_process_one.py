"""A worker that is process 1, as in a container: it buries what it inherits, and its own children right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.support import Queue, worker
from tests.support import wait_until

AS_PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def children_and_zombies(pid: int) -> list[int]:
    """Give the children of a process, with those that are dead and not buried."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = entry.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(entry.parent.name))
    return found


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    try:
        tried = subprocess.run([*AS_PROCESS_1, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no namespace of processes can be made here: {error}")
    if tried.returncode:
        pytest.skip(f"no namespace of processes can be made here: {tried.stderr.strip()}")


def test_process_1_buries_orphans_and_knows_how_its_own_children_ended(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, within=AS_PROCESS_1) as started:
        (parent,) = children_and_zombies(started.pid)
        orphans = queue.insert("leave_orphans")
        queue.wait_for_state(orphans, "succeeded")

        # Its own child, and the orphan that lives on.
        wait_until(lambda: len(children_and_zombies(parent)) == 2, message="the dead orphan is buried")

        killer = queue.insert("die")
        queue.wait_for_state(killer, "dead", 30)
        assert "exited with status 7" in queue.one("SELECT reason FROM pgqueue.dead_jobs")

        running = queue.insert("sleep", '{"seconds": 1}')
        wait_until(lambda: queue.effects(running) == 1)
        os.kill(parent, signal.SIGTERM)
        assert started.wait() == 0
    assert queue.state(running) == "succeeded"


def test_a_child_that_somebody_waits_for_keeps_the_status_of_its_end() -> None:
    program = """
import os, subprocess
from pgqueue.runtime.orphans import bury_orphans
own = subprocess.Popen(["sh", "-c", "exit 7"])
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
bury_orphans({own.pid})
assert own.wait() == 7, own.returncode
orphan = subprocess.run(["sh", "-c", "sleep 0.2 >&- 2>&- & echo $!"], capture_output=True, text=True).stdout
os.waitid(os.P_PID, int(orphan), os.WEXITED | os.WNOWAIT)
bury_orphans({own.pid})
assert not os.path.exists(f"/proc/{orphan.strip()}")
"""

    ended = subprocess.run(
        [*AS_PROCESS_1, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert ended.returncode == 0, ended.stderr
