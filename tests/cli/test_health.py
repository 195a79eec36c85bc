"""`pgqueue health`: a probe for whoever starts processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from psycopg.conninfo import make_conninfo

from pgqueue.runtime.health import Health
from pgqueue.runtime.http import Answer, Server, pages

UNREACHABLE = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def pulse() -> Health:
    return Health()


@pytest.fixture
def port(pulse: Health) -> Iterator[int]:
    server = Server("127.0.0.1", 0, pages(lambda: b"", pulse))
    yield server.port
    server.close()


def test_a_queue_without_trouble_is_ready(pgqueue, queue):
    queue.see_worker(["default"])
    queue.enqueue()

    ended = pgqueue("health")

    assert (ended.code, ended.out, ended.err) == (0, "the queue is ready\n", "")


def test_a_queue_that_nobody_serves_is_named(pgqueue, queue):
    queue.see_worker(["mail"])
    queue.enqueue(queue="lonely")
    queue.enqueue(queue="paused")
    pgqueue("queues", "pause", "paused")

    told, listed = pgqueue("health"), pgqueue("health", "--json")

    assert (told.code, told.out) == (3, "")
    assert told.err == "pgqueue: the queue is not ready: queue lonely has jobs to run and no live worker\n"
    assert listed.json == {
        "status": "unready",
        "reasons": ["queue lonely has jobs to run and no live worker"],
    }


def test_every_queue_that_nobody_serves_is_named_not_only_the_first(pgqueue, queue):
    for name in ("a", "b", "c"):
        queue.enqueue(queue=name)
    pgqueue("queues", "pause", "a")

    ended = pgqueue("health")

    assert ended.code == 3
    assert "queue b has jobs to run and no live worker" in ended.err
    assert "queue c has jobs to run and no live worker" in ended.err


def test_the_names_of_queues_are_harmless_for_the_terminal(pgqueue, queue):
    queue.enqueue(queue="a\x1b[31m\nb")

    told, listed = pgqueue("health"), pgqueue("health", "--json")

    assert told.err.endswith("queue a\\x1b[31m\\nb has jobs to run and no live worker\n")
    assert told.err.count("\n") == 1
    assert listed.json["reasons"] == ["queue a\x1b[31m\nb has jobs to run and no live worker"]


def test_what_a_process_answers_is_harmless_for_the_terminal(pgqueue, pulse, port):
    pulse.hindrances.append(lambda: ["no\x1b[31m\nway"])

    ended = pgqueue("health", "--port", port)

    assert ended.err == f"pgqueue: 127.0.0.1:{port} is not ready: no\\x1b[31m\\nway\n"


def test_a_database_that_is_away_is_75(pgqueue):
    ended = pgqueue("health", "--dsn", UNREACHABLE)

    assert (ended.code, ended.out) == (75, "")
    assert ended.err.startswith("pgqueue: cannot connect to 127.0.0.1:1/none: ")


def test_a_schema_that_is_not_there_is_a_reason(pgqueue):
    ended = pgqueue("health", "--schema", "elsewhere")

    assert ended.code == 3
    assert "pgqueue migrate" in ended.err


def test_a_schema_that_lacks_a_table_is_a_reason(pgqueue, queue):
    queue.connection.execute("ALTER TABLE pgqueue.queues RENAME TO gone")
    try:
        ended = pgqueue("health")
    finally:
        queue.connection.execute("ALTER TABLE pgqueue.gone RENAME TO queues")

    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith("pgqueue: the queue is not ready: relation ")


def test_a_role_that_may_not_look_is_not_told_that_all_is_well(pgqueue, queue):
    queue.connection.execute("CREATE ROLE health_nobody LOGIN")
    try:
        told = pgqueue("health", "--dsn", make_conninfo(queue.dsn, user="health_nobody"))
        listed = pgqueue("health", "--json", "--dsn", make_conninfo(queue.dsn, user="health_nobody"))
    finally:
        queue.connection.execute("DROP ROLE health_nobody")

    assert (told.code, told.out) == (3, "")
    assert "permission denied" in told.err
    assert (listed.code, listed.json["status"]) == (3, "unready")


def test_a_process_is_asked_by_its_port(pgqueue, pulse, port):
    assert pgqueue("health", "--port", port).out == f"127.0.0.1:{port} is ready\n"
    pulse.hindrances.append(lambda: ["the database is away"])

    unready, alive = pgqueue("health", "--port", port), pgqueue("health", "--port", port, "--live")

    assert (unready.code, unready.err) == (
        3,
        f"pgqueue: 127.0.0.1:{port} is not ready: the database is away\n",
    )
    assert (alive.code, alive.out) == (0, f"127.0.0.1:{port} is alive\n")


def test_the_port_may_stand_in_the_environment(pgqueue, port, monkeypatch):
    monkeypatch.setenv("PGQUEUE_METRICS_PORT", str(port))

    assert pgqueue("health").out == f"127.0.0.1:{port} is ready\n"


def test_asking_a_process_needs_no_database(pgqueue, port):
    assert pgqueue("health", "--port", port, "--dsn", UNREACHABLE).code == 0


def test_nobody_at_the_port_is_a_reason(pgqueue):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        ended = pgqueue("health", "--port", port, "--live")

    assert (ended.code, ended.err) == (
        3,
        f"pgqueue: 127.0.0.1:{port} is not alive: connection refused\n",
    )


def test_somebody_who_does_not_answer_is_a_reason(pgqueue):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        ended = pgqueue("health", "--port", port, "--timeout-seconds", "0.2")

    assert (ended.code, ended.err) == (
        3,
        f"pgqueue: 127.0.0.1:{port} is not ready: no answer within 0.2 s\n",
    )


def test_somebody_else_at_the_port_is_a_reason(pgqueue):
    server = Server("127.0.0.1", 0, {"/readyz": lambda: Answer(200, "text/html", b"<h1>hello</h1>")})

    ended = pgqueue("health", "--port", server.port)
    server.close()

    assert ended.code == 3
    assert "whoever listens there is not a worker or exporter of pgqueue" in ended.err


def test_live_is_about_a_process(pgqueue):
    ended = pgqueue("health", "--live")

    assert (ended.code, ended.err) == (
        2,
        "pgqueue: --live is about a process: give its --port (see: pgqueue health --help)\n",
    )
