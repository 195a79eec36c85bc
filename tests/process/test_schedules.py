"""Schedules as workers fire them, seen from outside: real processes, real signals."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

from tests.process.support import Queue, worker
from tests.support import wait_until

APP = "tests.process.scheduled:app"
TICK = "(headers ->> 'tick')::timestamptz"
JOBS = f"SELECT {TICK} FROM pgqueue.jobs UNION ALL SELECT {TICK} FROM pgqueue.finished_jobs ORDER BY 1"
SECONDS = 60 if "CI" in os.environ else 7


def ticks(queue: Queue) -> list[datetime]:
    return [tick for (tick,) in queue.all(JOBS)]


def fired(queue: Queue) -> int:
    return queue.one("SELECT sum(fired) FROM pgqueue.schedules") or 0


def test_three_workers_of_which_one_is_killed_fire_each_tick_of_a_second_once(
    queue: Queue, tmp_path: Path
) -> None:
    with (
        worker(queue.dsn, tmp_path, app=APP),
        worker(queue.dsn, tmp_path, app=APP) as second,
        worker(queue.dsn, tmp_path, app=APP) as third,
    ):
        wait_until(lambda: fired(queue) >= 2)
        connections = queue.one(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND starts_with(application_name, 'pgqueue worker')"
        )
        before = fired(queue)
        second.signal(signal.SIGKILL)
        third.signal(signal.SIGSTOP)
        wait_until(lambda: fired(queue) >= before + SECONDS - 3, SECONDS + 10)
        third.signal(signal.SIGCONT)
        wait_until(lambda: fired(queue) >= before + SECONDS, 20)
        queue.connection.execute("UPDATE pgqueue.schedules SET is_paused = true")
        wait_until(lambda: queue.count("jobs") == 0, 20, "all jobs have ended")

    found = ticks(queue)
    assert found == [found[0] + number * timedelta(seconds=1) for number in range(len(found))]
    assert len(found) == fired(queue) == queue.count("schedule_runs")
    assert queue.one("SELECT skipped FROM pgqueue.schedules") == 0
    assert queue.one("SELECT count(DISTINCT job_id) FROM effects") == len(found)
    assert connections <= 12


def test_what_was_missed_between_two_workers_is_caught_up_with(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, app=APP) as first:
        first.wait_for("schedule fired")
        first.stop()
    before = fired(queue)
    queue.connection.execute(
        "UPDATE pgqueue.schedules SET next_tick = next_tick - interval '90 min', "
        "cron = '0 * * * * *', seen_at = seen_at - interval '90 min'"
    )

    with worker(queue.dsn, tmp_path, app=APP, env={"BEAT": "0 * * * * *"}) as second:
        second.wait_for("schedule fired")

    ticks_fired = [line["ticks"] for line in second.lines("schedule fired")]
    assert ticks_fired[0] >= 90
    assert fired(queue) == before + sum(ticks_fired)


def test_a_changed_expression_does_not_fire_the_past(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, app=APP) as first:
        first.wait_for("schedule fired")
        first.stop()
    before = fired(queue)
    queue.connection.execute("UPDATE pgqueue.schedules SET next_tick = next_tick - interval '3 days'")

    with worker(queue.dsn, tmp_path, app=APP, env={"BEAT": "@yearly"}) as second:
        (line,) = second.wait_for("schedule declared")
        wait_until(lambda: queue.one("SELECT next_tick > clock_timestamp() FROM pgqueue.schedules"))

    assert line["outcome"] == "changed"
    assert fired(queue) == before
    assert queue.one("SELECT cron FROM pgqueue.schedules") == "@yearly"


def test_a_worker_that_works_off_what_is_there_adds_nothing_to_it(queue: Queue, tmp_path: Path) -> None:
    queue.connection.execute(
        "INSERT INTO pgqueue.schedules (name, cron, task, next_tick) "
        "VALUES ('due', '* * * * * *', 'tick', clock_timestamp())"
    )
    job = queue.insert("tick")

    with worker(queue.dsn, tmp_path, "--until-empty", app=APP, is_up=False) as started:
        assert started.wait() == 0

    assert queue.state(job) == "succeeded"
    assert fired(queue) == 0


def test_an_application_with_a_bad_schedule_is_not_run_and_says_why(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, app=APP, env={"BEAT": "61 * * * *"}, is_up=False) as started:
        assert started.wait() == 2

    assert "'61' for the minute, which takes 0-59" in started.text()
