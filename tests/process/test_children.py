"""Children and what handlers do to them: whatever it is, their jobs end and the worker goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.process.support import Queue, until_empty, worker
from tests.support import ROOT, kill, wait_until


def test_a_child_is_missed_at_once_though_a_process_of_its_own_outlives_it(
    queue: Queue, tmp_path: Path
) -> None:
    job = queue.insert("leave_a_grandchild")

    with worker(queue.dsn, tmp_path):
        queue.wait_for_state(job, "succeeded", 10)

    assert queue.effects(job) == 2


def test_a_program_that_a_handler_starts_can_be_terminated(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("terminate_a_program")

    until_empty(queue.dsn, tmp_path)

    assert queue.one("SELECT result::int FROM pgqueue.finished_jobs WHERE id = %s", job) == -signal.SIGTERM


def test_progress_that_is_no_json_harms_nobody(queue: Queue, tmp_path: Path) -> None:
    jobs = [queue.insert("say_nonsense") for _ in range(5)]

    ended = until_empty(queue.dsn, tmp_path, "-c", "2")

    assert [queue.state(job) for job in jobs] == ["succeeded"] * 5, ended.text()
    assert "Traceback" not in ended.text()


@pytest.mark.parametrize("has_orjson", [True, False])
@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_one_handler_returns_harms_nobody_else_whatever_writes_the_json(
    queue: Queue, tmp_path: Path, processes: str, has_orjson: bool
) -> None:
    if not has_orjson:
        (tmp_path / "orjson.py").write_text("raise ImportError")
    jobs = [queue.insert(task) for task in ("double", "find_odd_file", "mask") * 3]
    queue.connection.execute("UPDATE pgqueue.jobs SET args = '{\"number\": 4}' WHERE task = 'double'")

    with worker(
        queue.dsn,
        tmp_path,
        "--until-empty",
        *("-c", "9", "--processes", processes),
        is_up=False,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    ) as started:
        assert started.wait() == 0, started.text()

    assert [queue.state(job) for job in jobs] == ["succeeded"] * 9
    assert queue.count("finished_jobs", "attempt = 1 AND crashes = 0") == 9
    assert queue.all("SELECT DISTINCT reason FROM pgqueue.finished_jobs WHERE task = 'find_odd_file'") == [
        (r"result: Found refuses it: odd path caf\udce9",)
    ]
    masks = queue.all("SELECT DISTINCT result::numeric FROM pgqueue.finished_jobs WHERE task = 'mask'")
    assert masks == [(2**64,)]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_arguments_as_large_as_they_may_be_arrive_whole(queue: Queue, tmp_path: Path, processes: str) -> None:
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args) "
        "SELECT 'measure', jsonb_build_object('text', repeat('x', 1000000)) FROM generate_series(1, 60)"
    )

    ended = until_empty(queue.dsn, tmp_path, "-c", "100", "--processes", processes)

    assert ended.process.returncode == 0, ended.text()
    assert queue.one("SELECT sum(result::int) FROM pgqueue.finished_jobs") == 60_000_000


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_handler_that_ignores_every_cancellation_does_not_keep_the_worker(
    queue: Queue, tmp_path: Path, processes: str
) -> None:
    job = queue.insert("be_deaf")

    with worker(queue.dsn, tmp_path, "--processes", processes, "--grace-seconds", "0.1") as started:
        wait_until(lambda: queue.effects(job) == 1)
        assert started.stop(10) == 0
    assert queue.state(job) == "ready"


@pytest.mark.parametrize("has_uvloop", [True, False])
@pytest.mark.parametrize("processes", ["0", "1"])
def test_who_leaves_from_within_a_handler_takes_no_neighbour_along(
    queue: Queue, tmp_path: Path, processes: str, has_uvloop: bool
) -> None:
    if not has_uvloop:
        (tmp_path / "uvloop.py").write_text("raise ImportError")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    neighbour = queue.insert("sleep", '{"seconds": 3}')
    with worker(queue.dsn, tmp_path, "--processes", processes, "-c", "8", env=env) as started:
        wait_until(lambda: queue.effects(neighbour) == 1)
        leaving = {
            (kind, how): queue.insert("exit_in_a_part", json.dumps({"kind": kind, "how": how}))
            for kind in ("SystemExit", "KeyboardInterrupt")
            for how in ("gather", "left behind", "callback")
        }

        for (kind, how), job in leaving.items():
            # What only happens beside a handler is no failure of it.
            queue.wait_for_state(job, "dead" if how == "gather" else "succeeded")
            if how == "gather":
                assert kind in queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", job)
        queue.wait_for_state(neighbour, "succeeded")

        assert queue.effects(neighbour) == 1
        assert queue.count("finished_jobs", "attempt = 1 AND crashes = 0") == 5
        assert not started.lines("child died")
        assert started.stop() == 0


def test_a_worker_outlives_a_log_that_cannot_be_written(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, log="/dev/full", is_up=False) as started:
        for _ in range(3):
            job = queue.insert("touch")
            queue.wait_for_state(job, "succeeded")
        assert started.stop() == 0


def test_a_child_killed_while_it_starts_is_replaced_soon_though_many_died_at_work(
    queue: Queue, tmp_path: Path
) -> None:
    with worker(queue.dsn, tmp_path, "--processes", "1", "-c", "1") as started:
        for _ in range(10):
            queue.wait_for_state(queue.insert("double", '{"number": 1}'), "succeeded")
            kill(*started.children())
        (starting,) = wait_until(started.children, 30, "the next one starts")

        kill(starting)

        began_at = time.monotonic()
        queue.wait_for_state(queue.insert("double", '{"number": 2}'), "succeeded", seconds=40)
        assert time.monotonic() - began_at < 14
