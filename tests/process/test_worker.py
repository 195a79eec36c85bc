"""What a worker does with jobs, seen from outside: real processes, real signals."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.process.support import Queue, is_alive, until_empty, worker
from tests.support import wait_until


def test_a_worker_runs_what_was_inserted_and_ends_when_the_queue_is_empty(
    queue: Queue, tmp_path: Path
) -> None:
    for number in range(20):
        queue.insert("double", f'{{"number": {number}}}')
    for _ in range(20):
        queue.insert("nothing")

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 0, ended.text()
    assert queue.count("jobs") == 0
    assert queue.count("finished_jobs", "state = 'succeeded'") == 40
    results = queue.all("SELECT result::int FROM pgqueue.finished_jobs WHERE task = 'double' ORDER BY id")
    assert [row[0] for row in results] == [number * 2 for number in range(20)]
    assert len(ended.lines("job succeeded")) == 40


def test_until_empty_ends_with_3_when_a_job_died(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("fail", '{"message": "no such account"}')

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 3, ended.text()
    assert queue.effects(job) == 3
    reason, attempt, errors = queue.all("SELECT reason, attempt, errors FROM pgqueue.dead_jobs")[0]
    assert "RuntimeError: no such account" in reason
    assert attempt == 3
    assert [error["attempt"] for error in errors] == [1, 2, 3]


STRANGERS = "queues that no task of this application uses and that nobody knows"


def test_a_queue_that_nobody_knows_is_worked_on_with_a_warning(queue: Queue, tmp_path: Path) -> None:
    ended = until_empty(queue.dsn, tmp_path, "-q", "default", "-q", "defualt:3", "-q", "mail:x")
    again = until_empty(queue.dsn, tmp_path, "-q", "defualt")

    (warning,) = ended.lines(STRANGERS)
    assert (warning["level"], warning["queues"]) == ("warning", "defualt,mail:x")
    assert "default" in warning["queues_of_tasks"].split(",")
    assert (ended.process.returncode, again.process.returncode) == (0, 0)
    assert len(again.lines(STRANGERS)) == 1


def test_a_queue_that_anybody_knows_is_no_reason_for_a_warning(queue: Queue, tmp_path: Path) -> None:
    queue.insert("touch", queue="ready")
    queue.insert("touch", queue="later", run_at=datetime.now(UTC) + timedelta(hours=1))
    queue.connection.execute("INSERT INTO pgqueue.tasks (name, queue) VALUES ('other', 'of a task')")
    queue.connection.execute("INSERT INTO pgqueue.queues (name) VALUES ('with settings')")

    ended = until_empty(
        queue.dsn,
        tmp_path,
        *(f"-q{name}" for name in ("default", "ready", "later", "of a task", "with settings")),
    )
    by_itself = until_empty(queue.dsn, tmp_path)

    assert (ended.lines(STRANGERS), by_itself.lines(STRANGERS)) == ([], [])


def test_a_failed_job_is_tried_again_and_succeeds(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("fail_first")

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 0, ended.text()
    assert queue.effects(job) == 2
    assert queue.state(job) == "succeeded"


def test_a_raw_insert_gets_its_tasks_own_settings_and_wakes_a_sleeping_worker(
    queue: Queue, tmp_path: Path
) -> None:
    with worker(queue.dsn, tmp_path, "--poll-seconds", "60") as started:
        # The worker has registered what it knows: the plain columns follow the task.
        job = queue.insert("elsewhere")
        queue.wait_for_state(job, "succeeded", seconds=30)

        assert queue.one("SELECT queue FROM pgqueue.finished_jobs WHERE id = %s", job) == "other"
        assert queue.one("SELECT max_attempts FROM pgqueue.tasks WHERE name = 'fail'") == 3
        assert started.stop() == 0


def test_a_worker_that_only_polls_holds_no_session_that_listens(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path, "--no-wakeups", "--poll-seconds", "0.1"):
        jobs = [
            queue.insert("touch"),
            queue.insert("touch", run_at=datetime.now(UTC) + timedelta(seconds=1)),
        ]

        for job in jobs:
            queue.wait_for_state(job, "succeeded", seconds=30)

        assert not queue.count("jobs")
        assert not queue.one(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'pgqueue worker listen'"
        )


@pytest.mark.parametrize(
    ("task", "args"),
    [
        ("block", '{"seconds": 4}'),
        ("spin", '{"seconds": 4}'),
        ("hold_the_gil", '{"seconds": 4}'),
        ("block_the_loop", '{"seconds": 4}'),
    ],
)
def test_a_handler_busy_for_longer_than_its_lease_starts_once(
    queue: Queue, tmp_path: Path, task: str, args: str
) -> None:
    job = queue.insert(task, args)

    # Two workers, leases of 1.2 s: whoever lets one lapse loses the job to the other.
    with (
        worker(queue.dsn, tmp_path, "--lease-seconds", "1.2") as first,
        worker(queue.dsn, tmp_path, "--lease-seconds", "1.2") as second,
    ):
        queue.wait_for_state(job, "succeeded")

        assert queue.effects(job) == 1
        assert first.lines("job taken back") == second.lines("job taken back") == []


def test_no_exception_takes_a_worker_down_or_loses_the_job(queue: Queue, tmp_path: Path) -> None:
    exits = [
        queue.insert("raise_exit", f'{{"kind": "{kind}"}}', max_attempts=1)
        for kind in ("SystemExit", "KeyboardInterrupt", "GeneratorExit")
    ]
    unprintable, hostile = queue.insert("raise_unprintable"), queue.insert("raise_hostile")
    good = queue.insert("touch")

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 3
    assert [queue.state(job) for job in [*exits, unprintable, hostile]] == ["dead"] * 5
    assert queue.state(good) == "succeeded"
    reasons = dict(queue.all("SELECT id, reason FROM pgqueue.dead_jobs"))
    assert "SystemExit" in reasons[exits[0]]
    assert "its text cannot be shown" in reasons[unprintable]
    assert "nul \\x00" in reasons[hostile]
    assert len(reasons[hostile]) <= 8000


def test_one_poisoned_row_dies_alone(queue: Queue, tmp_path: Path) -> None:
    nested = "[" * 3000 + "]" * 3000
    poisoned = [
        queue.insert("double", '{"number": 1e5000}'),
        queue.insert("double", f'{{"number": {nested}}}'),
        queue.insert("double", '{"number": "four"}'),
        queue.insert("double", '{"nomber": 4}'),
        queue.insert("double", "{}"),
    ]
    good = [queue.insert("double", f'{{"number": {number}}}') for number in range(10)]

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 3
    assert [queue.state(job) for job in poisoned] == ["dead"] * 5
    assert [queue.state(job) for job in good] == ["succeeded"] * 10
    # No retry mends it, so none was made.
    assert queue.one("SELECT max(attempt) FROM pgqueue.dead_jobs") == 1


def test_an_unknown_task_waits_for_a_worker_that_knows_it(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("tuoch")

    with worker(queue.dsn, tmp_path) as started:
        started.wait_for("job left for a worker that knows its task")
        wait_until(lambda: queue.state(job) == "scheduled")

        assert queue.one("SELECT attempt FROM pgqueue.jobs WHERE id = %s", job) == 0

    ended = until_empty(queue.dsn, tmp_path)
    queue.connection.execute(
        "UPDATE pgqueue.jobs SET run_at = now() - interval '1 s' WHERE state = 'scheduled'"
    )
    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 3
    assert "did you mean 'touch'" in queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE id = %s", job)


def test_a_result_too_large_to_keep_is_dropped_and_said(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("big_result", '{"size": 2000000}')

    until_empty(queue.dsn, tmp_path)

    result, reason = queue.all("SELECT result, reason FROM pgqueue.finished_jobs WHERE id = %s", job)[0]
    assert result is None
    assert "2,000,002 bytes" in reason


def test_a_handler_can_enqueue_and_uses_the_workers_database(queue: Queue, tmp_path: Path) -> None:
    queue.insert("enqueue_another")

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 0, ended.text()
    assert queue.count("finished_jobs", "task = 'touch'") == 1


def test_a_snoozed_job_comes_back_without_using_up_an_attempt(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("snooze_once")

    ended = until_empty(queue.dsn, tmp_path)

    assert ended.process.returncode == 0, ended.text()
    assert queue.effects(job) == 2
    assert queue.one("SELECT attempt FROM pgqueue.finished_jobs WHERE id = %s", job) == 1


def test_progress_is_seen_while_the_job_runs(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("report_progress")

    with worker(queue.dsn, tmp_path, "--grace-seconds", "0"):
        wait_until(
            lambda: queue.one("SELECT progress ->> 'done' FROM pgqueue.jobs WHERE id = %s", job) == "3"
        )


def test_handlers_can_run_inside_the_worker_itself(queue: Queue, tmp_path: Path) -> None:
    jobs = [queue.insert("touch") for _ in range(10)]
    failing = queue.insert("fail")

    with worker(queue.dsn, tmp_path, "--processes", "0", "--until-empty", is_up=False) as started:
        assert started.wait() == 3
        pids = {row[0] for row in queue.all("SELECT DISTINCT pid FROM effects")}

        assert pids == {started.pid}
    assert [queue.state(job) for job in jobs] == ["succeeded"] * 10
    assert queue.state(failing) == "dead"


def test_queues_have_slots_of_their_own(queue: Queue, tmp_path: Path) -> None:
    slow = [queue.insert("sleep", '{"seconds": 30}', queue="slow") for _ in range(5)]
    with worker(queue.dsn, tmp_path, "-q", "slow:2", "-q", "default", "-c", "3", "--grace-seconds", "0"):
        wait_until(lambda: queue.count("jobs", "state = 'running'") == 2)
        quick = queue.insert("touch", queue="default")
        queue.wait_for_state(quick, "succeeded")

        assert sorted(queue.state(job) for job in slow) == ["ready"] * 3 + ["running"] * 2


def test_a_drained_worker_finishes_what_runs_and_gives_back_the_rest(queue: Queue, tmp_path: Path) -> None:
    short = queue.insert("sleep", '{"seconds": 1}')
    long = queue.insert("sleep", '{"seconds": 600}')

    with worker(queue.dsn, tmp_path, "--grace-seconds", "3") as started:
        wait_until(lambda: queue.effects() == 2)
        later = queue.insert("touch", run_at="2999-01-01Z")
        code = started.stop()

        assert code == 0, started.text()
    assert queue.state(short) == "succeeded"
    assert queue.state(long) == "ready"
    assert queue.one("SELECT attempt FROM pgqueue.jobs WHERE id = %s", long) == 0
    assert queue.state(later) == "scheduled"
    assert queue.count("workers") == 0


def test_a_second_signal_ends_a_drain_at_once(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("block", '{"seconds": 600}')

    with worker(queue.dsn, tmp_path) as started:
        wait_until(lambda: queue.effects(job) == 1)
        started.signal(signal.SIGTERM)
        started.wait_for("draining")
        started.signal(signal.SIGINT)

        assert started.wait(10) == 0
    assert queue.state(job) == "ready"


def test_a_killed_parent_takes_its_children_with_it(queue: Queue, tmp_path: Path) -> None:
    queue.insert("spin", '{"seconds": 600}')

    with worker(queue.dsn, tmp_path, "--processes", "2") as started:
        wait_until(lambda: queue.effects() == 1)
        children = started.children()
        started.process.kill()

        wait_until(lambda: not any(map(is_alive, children)), 2, "the children are gone")
        assert len(children) == 2
