"""What a worker's port tells, asked over HTTP while real jobs run, fail, die and hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from pgqueue.database import run
from pgqueue.sql import presence
from tests.process import jobs
from tests.process.support import Queue, WorkerProcess, worker
from tests.support import DurableServer, installed, run_pgqueue, start_pgqueue, wait_until

SAMPLE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


def ask(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> dict[str, float]:
    """Give each sample by its name with labels, as it is written."""
    status, text = ask(port, "/metrics")
    assert status == 200, text
    return {name: float(value) for name, value in SAMPLE.findall(text)}


def reasons(port: int, probe: str) -> list[str]:
    status, text = ask(port, probe)
    document = json.loads(text)
    assert (status == 200) == (not document["reasons"])
    return document["reasons"]


def port_of(started: WorkerProcess) -> int:
    return started.wait_for("metrics served")[0]["port"]


@contextmanager
def served(
    dsn: str, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, is_up: bool = True
) -> Iterator[tuple[WorkerProcess, int]]:
    with worker(dsn, folder, "--metrics-port", "0", *arguments, env=env, is_up=is_up) as started:
        yield started, port_of(started)


def wait_for_sample(port: int, name: str, value: float, seconds: float = 20) -> dict[str, float]:
    """Scrape until a sample has at least that value, and give all."""
    found: dict[str, float] = {}

    def has_it() -> bool:
        found.clear()
        found.update(scrape(port))
        return found.get(name, -1) >= value

    try:
        wait_until(has_it, seconds, f"{name} is {value}")
    except AssertionError as error:
        near = {key: number for key, number in found.items() if key.startswith(name.partition("{")[0])}
        raise AssertionError(f"{error}, not {near}") from None
    return found


def processed(task: str, outcome: str) -> str:
    return f'pgqueue_jobs_processed_total{{queue="default",task="{task}",outcome="{outcome}"}}'


def test_what_became_of_jobs_is_counted_by_queue_task_and_outcome(queue: Queue, tmp_path: Path) -> None:
    for task in ("nothing", "nothing", "fail_first", "fail", "snooze_once"):
        queue.insert(task)
    with served(queue.dsn, tmp_path) as (_, port):
        wait_for_sample(port, processed("nothing", "succeeded"), 2)
        wait_for_sample(port, processed("snooze_once", "succeeded"), 1)
        wait_for_sample(port, processed("fail_first", "succeeded"), 1)
        wait_for_sample(port, processed("fail", "dead"), 1)
        # By itself: what runs beside it is given back.
        queue.insert("die")
        found = wait_for_sample(port, processed("die", "dead"), 1)

    assert found[processed("fail_first", "succeeded")] == 1
    assert found[processed("fail_first", "retried")] == 1
    assert found[processed("fail", "retried")] == 2
    assert found[processed("snooze_once", "snoozed")] == 1
    assert found[processed("die", "crashed")] == 2
    assert found['pgqueue_dead_jobs_total{queue="default",task="fail",reason="failed"}'] == 1
    assert found['pgqueue_dead_jobs_total{queue="default",task="die",reason="crashed"}'] == 1
    assert found['pgqueue_job_duration_seconds_count{queue="default",task="nothing"}'] == 2
    assert found['pgqueue_job_attempts_bucket{le="1",queue="default",task="fail"}'] == 0
    assert found['pgqueue_job_attempts_bucket{le="3",queue="default",task="fail"}'] == 1
    assert found['pgqueue_job_wait_seconds_count{queue="default"}'] >= 6
    assert found["pgqueue_children_died_total"] == 3
    assert found['pgqueue_jobs_rescued_total{cause="child_died"}'] >= 3
    assert found["pgqueue_fetch_seconds_count"] > 0


def test_a_worker_tells_its_slots_its_children_and_the_whole_queue(queue: Queue, tmp_path: Path) -> None:
    arguments = ("-q", "default", "-q", "mail:3", "-c", "4", "--processes", "2")
    queue.insert("block", '{"seconds": 30}')
    with served(queue.dsn, tmp_path, *arguments) as (_, port):
        found = wait_for_sample(port, 'pgqueue_worker_jobs_running{queue="default"}', 1)
        assert found['pgqueue_worker_slots{queue="default"}'] == 4
        assert found['pgqueue_worker_slots{queue="mail"}'] == 3
        wait_for_sample(port, "pgqueue_worker_children", 2)

        # Alone, it is the one that reads the whole queue.
        found = wait_for_sample(port, "pgqueue_workers_alive", 1)
        assert found["pgqueue_leader"] == 1
        assert found["pgqueue_database_up"] == 1
        assert found['pgqueue_queue_workers{queue="mail"}'] == 1


def test_of_two_workers_one_tells_the_whole_queue(queue: Queue, tmp_path: Path) -> None:
    with served(queue.dsn, tmp_path) as (first, one), served(queue.dsn, tmp_path) as (_, other):
        wait_until(lambda: scrape(one)["pgqueue_leader"] + scrape(other)["pgqueue_leader"] == 1, 20)
        leader, follower = (one, other) if scrape(one)["pgqueue_leader"] else (other, one)
        for port in (one, other):
            wait_for_sample(port, "pgqueue_database_up", 1)
        wait_for_sample(leader, "pgqueue_workers_alive", 2)

        assert "pgqueue_workers_alive" not in scrape(follower)
        assert first.stop() == 0


def test_without_a_port_nothing_listens(queue: Queue, tmp_path: Path) -> None:
    with worker(queue.dsn, tmp_path) as started:
        assert started.lines("metrics served") == []
        listening = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
        held = {
            str(entry.readlink()).partition("[")[2].rstrip("]")
            for entry in Path(f"/proc/{started.pid}/fd").iterdir()
            if "socket:" in str(entry.readlink())
        }

        assert not held & listening


def test_a_port_that_is_taken_ends_the_worker_with_one_sentence(queue: Queue, tmp_path: Path) -> None:
    with served(queue.dsn, tmp_path) as (_, port):
        arguments = ("worker", "--app", "tests.process.jobs:app", "--metrics-port", str(port))

        ended = run_pgqueue(*arguments, dsn=queue.dsn)

    assert ended.returncode == 2
    assert ended.stderr == f"pgqueue: cannot serve metrics on 127.0.0.1:{port}: Address already in use\n"


def test_a_worker_is_alive_while_it_loads_ready_when_it_works_and_unready_when_it_drains(
    queue: Queue, tmp_path: Path
) -> None:
    with served(queue.dsn, tmp_path, is_up=False) as (started, port):
        assert reasons(port, "/healthz") == []
        assert "it is starting" in reasons(port, "/readyz")
        started.wait_for("worker started", seconds=60)
        wait_until(lambda: not reasons(port, "/readyz"), 20)
        assert reasons(port, "/startupz") == []
        job = queue.insert("block", '{"seconds": 5}')
        wait_until(lambda: queue.effects(job) == 1)

        started.signal(signal.SIGTERM)

        started.wait_for("draining")
        assert "it is draining" in reasons(port, "/readyz")
        assert reasons(port, "/healthz") == []
        assert reasons(port, "/startupz") == []
        assert started.wait() == 0
    with pytest.raises((OSError, HTTPException)):
        ask(port, "/healthz")


def test_the_port_answers_while_the_loop_stands_still(queue: Queue, tmp_path: Path) -> None:
    """The handler runs inside the parent, on its loop, and blocks it."""
    with served(queue.dsn, tmp_path, "--processes", "0") as (_, port):
        job = queue.insert("block_the_loop", '{"seconds": 2}')
        wait_until(lambda: queue.effects(job) == 1)

        found = scrape(port)

        assert queue.state(job) == "running"
        assert found['pgqueue_worker_jobs_running{queue="default"}'] == 1


def test_an_outage_makes_a_worker_unready_but_not_dead(durable_server: DurableServer, tmp_path: Path) -> None:
    queue = Queue(durable_server.dsn)
    run(queue.connection, presence.register_tasks(jobs.app.registry.registrations()))
    with served(durable_server.dsn, tmp_path) as (started, port):
        wait_for_sample(port, "pgqueue_workers_alive", 1)
        # Held over the outage, so that there is a lease to renew.
        queue.insert("block", '{"seconds": 60}')
        wait_for_sample(port, 'pgqueue_worker_jobs_running{queue="default"}', 1)
        queue.close()
        durable_server.stop()
        try:
            wait_until(lambda: "the database is away" in reasons(port, "/readyz"), 20)
            found = wait_for_sample(port, "pgqueue_heartbeat_failures_total", 1)
            assert reasons(port, "/healthz") == []
            assert found["pgqueue_database_up"] == 0
            assert found["pgqueue_database_errors_total"] >= 1
            wait_until(lambda: "pgqueue_workers_alive" not in scrape(port), 60, "old numbers are gone")
            assert run_pgqueue("health", "--port", str(port)).returncode == 3
            assert run_pgqueue("health", "--port", str(port), "--live").returncode == 0
        finally:
            durable_server.start()
        wait_until(lambda: not reasons(port, "/readyz"), 30)
        wait_for_sample(port, "pgqueue_listener_reconnects_total", 1)
        wait_for_sample(port, "pgqueue_database_up", 1)
        started.signal(signal.SIGQUIT)
        assert started.wait() == 0


def test_a_killed_child_leaves_no_series_behind(queue: Queue, tmp_path: Path) -> None:
    with served(queue.dsn, tmp_path) as (started, port):
        queue.insert("nothing")
        before = wait_for_sample(port, processed("nothing", "succeeded"), 1)
        (child,) = started.children()

        os.kill(child, signal.SIGKILL)
        after = wait_for_sample(port, "pgqueue_children_died_total", 1)
        wait_for_sample(port, "pgqueue_worker_children", 1)

        # The numbers of the whole queue come when they come.
        assert {name for name in after if "child" in name} == {name for name in before if "child" in name}
        assert [name for name in after if str(child) in name] == []
        assert after[processed("nothing", "succeeded")] == 1


def test_a_job_taken_back_is_counted_by_who_took_it_and_by_who_lost_it(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("wait_at_first")
    quick = ("--lease-seconds", "2")
    with served(queue.dsn, tmp_path, *quick) as (frozen, lost), worker(queue.dsn, tmp_path, *quick) as other:
        wait_until(lambda: queue.effects(job) == 1)
        holder = queue.one(
            "SELECT pid FROM pgqueue.workers AS w JOIN pgqueue.jobs AS j ON j.worker_id = w.id"
        )
        if holder != frozen.pid:
            pytest.skip("the other worker was quicker")
        frozen.signal(signal.SIGSTOP)
        other.wait_for("job taken back")
        frozen.signal(signal.SIGCONT)

        wait_for_sample(lost, processed("wait_at_first", "lost"), 1)

        assert scrape(lost)['pgqueue_claims_lost_total{queue="default"}'] == 1


def test_promtool_finds_nothing_to_say_about_the_metrics(queue: Queue, tmp_path: Path) -> None:
    for task in ("nothing", "fail"):
        queue.insert(task)
    queue.connection.execute("INSERT INTO pgqueue.breakers (name) VALUES ('bank')")
    queue.connection.execute(
        "INSERT INTO pgqueue.rate_limits (name, tokens_per_second) VALUES ('task:touch', 1)"
    )
    with served(queue.dsn, tmp_path) as (_, port):
        wait_for_sample(port, processed("fail", "dead"), 1)
        wait_for_sample(port, "pgqueue_workers_alive", 1)
        text = ask(port, "/metrics")[1]

    command = [installed("promtool", "prometheus"), "check", "metrics"]
    checked = subprocess.run(command, input=text, text=True, capture_output=True, check=False)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_an_exporter_tells_the_whole_queue_whatever_workers_do(queue: Queue, tmp_path: Path) -> None:
    queue.insert("elsewhere")
    log = (tmp_path / "exporter.log").open("w+")
    arguments = ("exporter", "--port", "0", "--refresh-seconds", "0.2", "--log-format", "json")
    with start_pgqueue(*arguments, dsn=queue.dsn, stderr=log) as exporter:
        port = wait_until(lambda: _port(Path(log.name)), 20, "the exporter's port")
        found = wait_for_sample(port, 'pgqueue_queue_jobs{queue="other",state="ready"}', 1)
        assert found["pgqueue_workers_alive"] == 0
        assert found["pgqueue_leader"] == 1
        assert reasons(port, "/readyz") == []
        with worker(queue.dsn, tmp_path):
            wait_for_sample(port, 'pgqueue_queue_workers{queue="other"}', 1)
            wait_until(lambda: scrape(port)['pgqueue_queue_jobs{queue="other",state="ready"}'] == 0, 20)
        wait_until(lambda: scrape(port)["pgqueue_workers_alive"] == 0, 20)

        exporter.send_signal(signal.SIGTERM)

        assert exporter.wait(10) == 0
    log.close()


def test_an_exporter_waits_for_a_database_that_is_away_and_says_so(
    durable_server: DurableServer, tmp_path: Path
) -> None:
    durable_server.stop()
    log = (tmp_path / "exporter.log").open("w+")
    arguments = ("exporter", "--port", "0", "--refresh-seconds", "0.2", "--log-format", "json")
    try:
        with start_pgqueue(*arguments, dsn=durable_server.dsn, stderr=log):
            port = wait_until(lambda: _port(Path(log.name)), 20, "the exporter's port")
            assert scrape(port)["pgqueue_database_up"] == 0
            assert reasons(port, "/readyz") == ["the queue's numbers cannot be read"]
            assert reasons(port, "/healthz") == []

            durable_server.start()

            wait_for_sample(port, "pgqueue_database_up", 1)
            durable_server.stop()
            wait_until(lambda: scrape(port)["pgqueue_database_up"] == 0, 20)
            assert "pgqueue_workers_alive" not in scrape(port)
    finally:
        log.close()
        durable_server.start()


def _port(log: Path) -> int:
    found = re.search(r'"event": ?"exporter started".*"port": ?(\d+)', log.read_text())
    return int(found[1]) if found else 0
