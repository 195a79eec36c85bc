"""How a worker ends: each signal in each situation, the exit code, and where its job stands then."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.process.support import Queue, worker
from tests.support import DurableServer, run_pgqueue, wait_until

# How it is told, the seconds it may take for what runs, and whether it waits for that.
SIGNALS = {
    "SIGTERM": ([signal.SIGTERM], True),
    "second SIGTERM": ([signal.SIGTERM, signal.SIGTERM], False),
    "SIGINT": ([signal.SIGINT], True),
    "SIGQUIT": ([signal.SIGQUIT], False),
}
# What it does then: the job, and where it stands after a drain and after an end at once.
SITUATIONS = {
    "idle": (None, "", ""),
    "busy": (("sleep", '{"seconds": 4}'), "succeeded", "ready"),
    "hung": (("block", '{"seconds": 600}'), "ready", "ready"),
    # Nobody can be told: the lease runs out by itself.
    "database away": (("block", '{"seconds": 600}'), "running", "running"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("told", SIGNALS)
def test_how_a_worker_ends_and_where_its_job_stands(
    request: pytest.FixtureRequest, tmp_path: Path, told: str, situation: str
) -> None:
    signals, is_drain = SIGNALS[told]
    inserted, after_drain, after_end = SITUATIONS[situation]
    is_away = situation == "database away"
    server: DurableServer | None = request.getfixturevalue("durable_server") if is_away else None
    queue: Queue = Queue(server.dsn) if server else request.getfixturevalue("queue")
    # Long enough for the short job; whoever is to end at once does not wait so long.
    grace = "1" if situation in ("hung", "database away") and is_drain else "30"

    with worker(queue.dsn, tmp_path, "--grace-seconds", grace) as started:
        job = queue.insert(*inserted) if inserted else None
        wait_until(lambda: job is None or queue.effects(job) == 1)
        if server:
            queue.close()
            server.stop()
            started.wait_for("database lost, reconnecting")
        for number, one in enumerate(signals):
            if number:
                wait_until(lambda: started.lines("draining") or started.process.poll() is not None)
            if started.process.poll() is None:  # an idle one may be gone after the first
                started.signal(one)
        code = started.wait(15)

    assert code == 0, started.text()
    if server:
        server.start()
        queue = Queue(server.dsn)
    if job is not None:
        expected = after_drain if is_drain else after_end
        assert queue.state(job) == expected, started.text()
        if expected == "ready":
            assert queue.one("SELECT attempt FROM pgqueue.jobs WHERE id = %s", job) == 0
    if server:
        queue.close()
    else:
        assert queue.count("workers") == 0


def test_other_ends_have_the_exit_codes_that_the_help_names(
    queue: Queue, empty_dsn: str, tmp_path: Path
) -> None:
    def code(*arguments: str, dsn: str = queue.dsn) -> int:
        return run_pgqueue("worker", *arguments, dsn=dsn).returncode

    app = ("--app", "tests.process.jobs:app")
    queue.insert("fail", queue="other")

    assert code(*app, "--until-empty", "-q", "default") == 0
    assert code(*app, dsn=empty_dsn) == 1
    assert code("--app", "tests.process.nowhere:app") == 2
    assert code(*app, "--max-memory-mb", "0") == 2
    assert code(*app, "--max-memory-mb", "100", "--processes", "0") == 2
    assert code(*app, "--until-empty", "-q", "other") == 3
    assert code(*app, dsn=f"host={tmp_path} dbname=nobody connect_timeout=2") == 75
    told = run_pgqueue("worker", "--help").stdout
    assert [
        line.split()[0]
        for line in told.partition("Exit codes:")[2].splitlines()
        if line[:8].strip().isdigit()
    ] == [
        "0",
        "1",
        "2",
        "3",
        "75",
    ]
