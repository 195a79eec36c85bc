"""Jobs that take too much memory: what kills their process is named, and their neighbours go on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgqueue.runtime.memory import OomKills
from tests.process.support import Queue, until_empty
from tests.support import wait_until

LIMIT_BYTES = 96 << 20


def memory_files() -> tuple[Path, str, str]:
    """Give our own memory control group, and the names of its limits of memory and of swap."""
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in groups:
        return Path("/sys/fs/cgroup/memory" + groups["memory"]), "memory.limit_in_bytes", "memory.swappiness"
    return Path("/sys/fs/cgroup" + groups.get("", "/")), "memory.max", "memory.swap.max"


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group inside ours, with a limit."""
    try:
        parent, limit, swap = memory_files()
        made = parent / f"pgqueue-test-{os.getpid()}"
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (made / limit).write_text(str(LIMIT_BYTES))
        except OSError as error:
            pytest.skip(f"a control group of ours cannot limit memory: {error}")
        with contextlib.suppress(OSError):
            (made / swap).write_text("0")
        yield made
        wait_until(lambda: not (made / "cgroup.procs").read_text(), message="the group is empty")
    finally:
        made.rmdir()


def test_a_memory_error_is_an_ordinary_failure(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("allocate_too_much")

    ended = until_empty(queue.dsn, tmp_path)

    assert queue.effects(job) == 2
    assert "MemoryError" in queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", job)
    assert queue.one("SELECT crashes FROM pgqueue.dead_jobs WHERE id = %s", job) == 0
    assert ended.lines("child died") == []
    assert queue.one("SELECT count(DISTINCT pid) FROM effects") == 1


def test_a_kill_that_was_not_for_memory_is_not_taken_for_one(queue: Queue, tmp_path: Path) -> None:
    if OomKills(os.getpid()).may_have_risen():
        pytest.skip("no counter of kills for memory can be read here")
    job = queue.insert("kill_itself")

    until_empty(queue.dsn, tmp_path)

    reason = queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", job)
    assert "was killed by signal 9 (SIGKILL)" in reason
    assert "memory" not in reason


def test_a_job_killed_for_its_memory_is_dead_after_three_crashes_and_a_hundred_others_are_unharmed(
    queue: Queue, tmp_path: Path, group: Path
) -> None:
    killer = queue.insert("allocate_until_killed", json.dumps({"group": str(group)}))
    others = [queue.insert("block", '{"seconds": 0.05}') for _ in range(100)]

    ended = until_empty(queue.dsn, tmp_path, "-c", "8", seconds=120)

    assert ended.process.returncode == 3, ended.text()
    assert queue.effects(killer) == 3
    crashes, reason = queue.all("SELECT crashes, reason FROM pgqueue.dead_jobs")[0]
    assert crashes == 3
    assert "was killed by signal 9 (SIGKILL); memory limit?" in reason
    assert [queue.state(job) for job in others] == ["succeeded"] * 100
