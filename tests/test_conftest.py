from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, is_alive, open_folder, wait_until

FORGETFUL = """
import subprocess
from pgqueue import embedded

def test_forgets_what_it_started():
    embedded.start(is_kept=True)
    sleep = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print("pid", sleep.pid, flush=True)
"""

KILLED = """
import os, signal, subprocess

def test_is_killed():
    sleep = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print("pid", sleep.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

HARMLESS = """
def test_needs_no_database():
    pass
"""


def run_pytest(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.run(
        [*command, "-sq", "-W", "ignore", folder],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
    )


INSERT = "INSERT INTO pgqueue.jobs (task) VALUES ('mail') RETURNING id"
COUNT = "SELECT count(*) FROM pgqueue.jobs"
PARTITIONS = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'pgqueue.finished_jobs'::regclass"


@pytest.mark.parametrize("visit", [1, 2])
def test_dsn_is_a_migrated_database_of_the_tests_own(dsn, connect, visit):
    conn = connect(dsn)
    assert conn.execute(COUNT).fetchone() == (0,)

    conn.execute(INSERT)
    conn.execute("CREATE TABLE pgqueue.mine ()")


@pytest.mark.parametrize("visit", [1, 2])
def test_fast_dsn_has_no_rows_all_partitions_and_counts_from_one(fast_dsn, connect, visit):
    conn = connect(fast_dsn)
    assert conn.execute(COUNT).fetchone() == (0,)
    assert conn.execute(PARTITIONS).fetchone()[0] > 1

    assert conn.execute(INSERT).fetchone() == (1,)
    conn.execute("INSERT INTO pgqueue.queues (name) VALUES ('mail')")


def test_a_durable_server_keeps_what_was_acknowledged_when_stopped_or_killed(durable_server, connect):
    for end in (durable_server.stop, durable_server.kill):
        connect(durable_server.dsn).execute(INSERT)
        end()
        durable_server.start()

    assert connect(durable_server.dsn).execute(COUNT).fetchone() == (2,)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own: its path is too long for a socket.
    with open_folder() as folder:
        yield folder


def pid_in(output: str) -> int:
    return int(re.search(r"^pid (\d+)$", output, re.MULTILINE)[1])


def test_a_run_that_leaves_a_process_or_a_server_behind_fails(folder):
    ended = run_pytest(folder, FORGETFUL)

    pid = pid_in(ended.stdout)
    assert ended.returncode == 1, ended.stdout
    assert f"the tests left process {pid}: sleep 600" in ended.stdout
    assert "/data/pg" in ended.stdout
    assert "the tests left folder" in ended.stdout
    wait_until(lambda: not is_alive(pid))
    assert not [*folder.glob("pgqueue*")]


def test_what_a_killed_run_left_is_removed_by_the_next_one(folder):
    killed = run_pytest(folder, KILLED)
    assert killed.returncode == -signal.SIGKILL
    assert is_alive(pid_in(killed.stdout))
    assert [*folder.glob("pgqueue-tests-*")]

    following = run_pytest(folder, HARMLESS)

    assert following.returncode == 0, following.stdout
    wait_until(lambda: not is_alive(pid_in(killed.stdout)))
    assert not [*folder.glob("pgqueue*")]
