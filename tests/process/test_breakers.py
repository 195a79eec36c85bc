"""Circuit breakers, with real workers and a dependency on loopback that can be down."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pgqueue.database import run
from pgqueue.sql import breakers, presence
from tests.process import breaker_jobs
from tests.process.support import Queue, WorkerProcess, worker
from tests.support import wait_until

APP = "tests.process.breaker_jobs:app"
DOWN_SECONDS = 30.0 if os.environ.get("CI") == "true" else 10.0
# A second after it opened no worker starts anything without having asked; what it had started by then calls.
KNOWN_WITHIN_SECONDS = 4.0


class Dependency:
    """A server on loopback that writes down every call: it answers, hangs up, or lets the caller wait."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.is_up = True
        self.is_slow = False
        self._waiting: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1000)
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.calls.append(time.time())
            if self.is_slow:
                self._waiting.append(connection)
            else:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if self.is_up:
                connection.sendall(b"+")

    def answer_those_who_wait(self) -> None:
        while self._waiting:
            self._answer(self._waiting.pop())

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        self.answer_those_who_wait()

    def calls_between(self, start: float, end: float) -> int:
        return sum(start <= at < end for at in self.calls)


@pytest.fixture
def dependency() -> Iterator[Dependency]:
    made = Dependency()
    yield made
    made.close()


@pytest.fixture
def queue(queue: Queue) -> Queue:
    run(queue.connection, presence.register_tasks(breaker_jobs.app.registry.registrations()))
    return queue


def enqueue(queue: Queue, task: str, port: int, count: int = 1) -> None:
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args) SELECT %s, jsonb_build_object('port', %s::int) "
        "FROM generate_series(1, %s)",
        (task, port, count),
    )


def breaker(queue: Queue, column: str = "state") -> Any:
    return queue.one(f"SELECT {column} FROM pgqueue.breakers WHERE name = 'payments-api'")


def open_it(queue: Queue, dependency: Dependency) -> None:
    """Let so much fail that it opens."""
    dependency.is_up = False
    enqueue(queue, "charge", dependency.port, 20)
    wait_until(lambda: breaker(queue) != "closed", message="the breaker opens")


def wait_until_worked_off(queue: Queue, seconds: float = 60) -> None:
    wait_until(lambda: not queue.count("jobs"), seconds, "every job has ended")


def workers(stack: ExitStack, queue: Queue, folder: Path, count: int = 2, **env: str) -> list[WorkerProcess]:
    return [
        stack.enter_context(
            worker(queue.dsn, folder, "-q", "default:4", "--lease-seconds", "2", app=APP, env=env)
        )
        for _ in range(count)
    ]


def test_while_a_dependency_is_down_it_is_called_by_probes_only_and_then_every_job_succeeds(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    is_over = threading.Event()
    producer = Queue(queue.dsn)

    def produce() -> None:
        while not is_over.wait(0.05):
            enqueue(producer, "charge", dependency.port, 10)
            producer.insert("other")

    with ExitStack() as stack:
        workers(stack, queue, tmp_path)
        producing = threading.Thread(target=produce)
        producing.start()
        wait_until(lambda: len(dependency.calls) > 100, message="calls are made")

        dependency.is_up = False
        down_at = time.time()
        wait_until(lambda: breaker(queue) != "closed", message="it opens")
        opened_at = breaker(queue, "extract(epoch FROM opened_at)::float8")
        others = queue.count("finished_jobs", "task = 'other'")
        wait_until(lambda: time.time() > down_at + DOWN_SECONDS, DOWN_SECONDS + 5)
        others = queue.count("finished_jobs", "task = 'other'") - others
        up_at = time.time()
        dependency.is_up = True
        wait_until(lambda: breaker(queue) == "closed", message="it closes")
        is_over.set()
        producing.join()
        wait_until_worked_off(queue)

    producer.close()
    all_know_at = opened_at + KNOWN_WITHIN_SECONDS
    late = dependency.calls_between(opened_at, all_know_at)
    probes = dependency.calls_between(all_know_at, up_at)
    print(
        f"{dependency.calls_between(down_at, opened_at)} calls until it opened {opened_at - down_at:.2f} s "
        f"later, {late} in the {KNOWN_WITHIN_SECONDS:g} s until all were sure to know, then {probes} in "
        f"{up_at - all_know_at:.1f} s; {others} other jobs meanwhile"
    )
    # Half a second after it opened there is a first probe, and then one a second.
    assert 1 <= probes <= up_at - all_know_at + 1
    assert others > DOWN_SECONDS
    assert queue.count("dead_jobs") == 0
    assert queue.count("finished_jobs", "state <> 'succeeded'") == 0
    # Each attempt that was counted made its call: the breaker used up none, and left no word in a history.
    attempts, errors = queue.all(
        "SELECT sum(attempt), sum(coalesce(jsonb_array_length(errors), 0)) FROM pgqueue.finished_jobs "
        "WHERE task = 'charge'"
    )[0]
    assert attempts == len(dependency.calls)
    assert errors == dependency.calls_between(down_at, up_at)


def test_what_is_open_stays_open_when_all_workers_restart(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        first, second = workers(stack, queue, tmp_path, OPEN_SECONDS="3600")
        open_it(queue, dependency)
        assert first.stop() == 0
        second.process.kill()
    before = len(dependency.calls)
    dependency.is_up = True

    with ExitStack() as stack:
        workers(stack, queue, tmp_path, OPEN_SECONDS="3600")
        enqueue(queue, "charge", dependency.port, 50)
        other = queue.insert("other")
        queue.wait_for_state(other, "succeeded")
        wait_until(lambda: not queue.count("jobs", "state IN ('ready', 'running')"), 20, "all wait")

        assert (breaker(queue), len(dependency.calls)) == ("open", before)
        queue.one("SELECT pgqueue.breaker_close('payments-api')")
        wait_until_worked_off(queue)

    assert queue.count("finished_jobs", "state = 'succeeded'") == 71


def test_a_worker_that_was_idle_asks_before_it_starts_anything(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        (started,) = workers(stack, queue, tmp_path, 1)
        enqueue(queue, "charge", dependency.port)
        wait_until_worked_off(queue)
        # It looks right after its report, then has no reason to; a session does one thing at a time.
        wait_until(lambda: breaker(queue, "successes + last_successes") == 1)
        reported_at = queue.one("SELECT clock_timestamp()")
        wait_until(
            lambda: queue.one(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue worker claim'"
                " AND query LIKE '%%.claim(%%' AND query_start > %s + interval '0.5 seconds'",
                reported_at,
            )
        )
        queue.one("SELECT pgqueue.breaker_open('payments-api')")
        age = "extract(epoch FROM clock_timestamp() - opened_at)"
        wait_until(lambda: breaker(queue, age) > 1.1)
        assert not started.lines("breaker open")

        enqueue(queue, "charge", dependency.port, 50)
        started.wait_for("breaker open")
        wait_until(lambda: queue.count("jobs", "state = 'scheduled'") == 50)

        assert len(dependency.calls) == 1
        queue.one("SELECT pgqueue.breaker_close('payments-api')")
        wait_until_worked_off(queue)


def test_a_probe_whose_worker_dies_is_given_up_and_another_one_goes(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        (first,) = workers(stack, queue, tmp_path, 1, PROBE_SECONDS="1")
        open_it(queue, dependency)
        wait_until(lambda: breaker(queue) == "open" and not queue.count("jobs", "state = 'running'"))
        dependency.is_up = dependency.is_slow = True
        wait_until(lambda: dependency._waiting, message="a probe calls")
        workers(stack, queue, tmp_path, 1, PROBE_SECONDS="1")
        generation, calls = breaker(queue, "generation"), len(dependency.calls)

        first.process.kill()
        dependency.is_slow = False

        wait_until(lambda: breaker(queue) == "closed", message="another probe closes it")
        assert breaker(queue, "generation") >= generation + 2
        assert len(dependency.calls) > calls
        wait_until_worked_off(queue)
    assert queue.count("dead_jobs") == 0


def test_a_probe_may_take_longer_than_it_may_be_silent(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    run(queue.connection, breakers.declare([{"name": "payments-api"}]))
    queue.one("SELECT pgqueue.breaker_open('payments-api', 0.5)")
    generation = breaker(queue, "generation")
    enqueue(queue, "charge_slowly", dependency.port, 2)

    with ExitStack() as stack:
        workers(stack, queue, tmp_path, PROBE_SECONDS="1")
        wait_until_worked_off(queue)

    # One probe, and it closed it.
    assert (breaker(queue), breaker(queue, "generation")) == ("closed", generation + 2)
    assert len(dependency.calls) == queue.count("finished_jobs", "state = 'succeeded'") == 2


def test_a_result_of_before_cannot_close_what_opened_since(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        (started,) = workers(stack, queue, tmp_path, 1)
        dependency.is_slow = True
        enqueue(queue, "charge", dependency.port)
        wait_until(lambda: dependency._waiting, message="a call waits for its answer")
        queue.one("SELECT pgqueue.breaker_open('payments-api')")
        generation = breaker(queue, "generation")

        dependency.answer_those_who_wait()
        wait_until_worked_off(queue)
        assert started.stop() == 0

    assert queue.count("finished_jobs", "state = 'succeeded'") == 1
    assert (breaker(queue), breaker(queue, "generation")) == ("open", generation)


def test_one_whose_row_somebody_deleted_starts_anew(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        (started,) = workers(stack, queue, tmp_path, 1)
        queue.one("SELECT pgqueue.breaker_open('payments-api')")
        enqueue(queue, "charge", dependency.port)
        started.wait_for("breaker open")

        queue.connection.execute("DELETE FROM pgqueue.breakers")
        started.wait_for("breaker closed")
        enqueue(queue, "charge", dependency.port)

        wait_until(lambda: dependency.calls, message="it is called")
        assert breaker(queue) == "closed"


def test_what_is_about_the_job_and_not_the_dependency_opens_nothing(queue: Queue, tmp_path: Path) -> None:
    with ExitStack() as stack:
        (started,) = workers(stack, queue, tmp_path, 1)
        for _ in range(30):
            queue.insert("refuse")
            queue.insert("snooze")
            queue.insert("charge", '{"prot": 1}')
        wait_until(lambda: queue.count("dead_jobs") == 60, 20)
        wait_until(lambda: queue.count("jobs", "state = 'scheduled'") == 30, 20)
        assert started.stop() == 0

    assert (breaker(queue), breaker(queue, "failures + successes")) == ("closed", 0)


def test_until_empty_waits_for_the_jobs_that_wait_for_a_breaker(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    run(queue.connection, breakers.declare([{"name": "payments-api"}]))
    queue.one("SELECT pgqueue.breaker_open('payments-api', 2)")
    enqueue(queue, "charge", dependency.port, 20)

    with worker(queue.dsn, tmp_path, "--until-empty", app=APP, is_up=False) as started:
        assert started.wait() == 0

    assert len(dependency.calls) == queue.count("finished_jobs", "state = 'succeeded'") == 20


def test_a_crowd_that_waits_is_written_once_however_often_a_probe_fails(
    queue: Queue, dependency: Dependency, tmp_path: Path
) -> None:
    dependency.is_up = False
    with ExitStack() as stack:
        workers(stack, queue, tmp_path)
        enqueue(queue, "charge", dependency.port, 5000)
        others = [queue.insert("other") for _ in range(10)]
        for other in others:
            queue.wait_for_state(other, "succeeded")
        wait_until(lambda: not queue.count("jobs", "state = 'ready'"), 30, "the crowd is parked")

        # Not those that failed before both workers knew that it is open: their retries come due.
        parked_until = breaker(queue, "parked_until")
        crowd = "SELECT id, xmin::text FROM pgqueue.jobs WHERE state = 'scheduled' AND run_at = %s"
        before = dict(queue.all(crowd, parked_until))
        opens = breaker(queue, "opens")
        wait_until(lambda: breaker(queue, "opens") >= opens + 4, 20, "four probes fail")
        after = dict(queue.all(crowd, parked_until))

        moved = sum(written != after.get(job) for job, written in before.items())
        assert len(before) > 2500
        # Each of two workers calls one for a probe, maybe twice.
        assert 1 <= moved <= 20
        dependency.is_up = True
        wait_until_worked_off(queue, 60)
    assert queue.count("finished_jobs", "state = 'succeeded'") == 5010
