"""A program in JavaScript is a client like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.languages.jobs import send_welcome
from tests.languages.support import (
    APP,
    HOSTILE,
    POLL_SECONDS,
    SOON_SECONDS,
    NodeClient,
    picked_up_after,
    sleeping_worker,
    wait_until_asleep,
)
from tests.process.support import Queue, until_empty


@pytest.fixture
def node(tmp_path: Path) -> NodeClient:
    return NodeClient(tmp_path)


def test_a_job_of_node_wakes_a_sleeping_worker_as_one_of_python_does(
    queue: Queue, node: NodeClient, tmp_path: Path
) -> None:
    bulk = json.dumps([{"task": "send_welcome", "args": {"user_id": 9}}])

    with sleeping_worker(queue, tmp_path):
        inserted = node.run(queue.dsn, "insert", "send_welcome", '{"user_id": 7}')
        waited = [picked_up_after(queue, int(inserted["id"]))]
        wait_until_asleep(queue)
        enqueued = node.run(queue.dsn, "enqueue", "send_welcome", '{"user_id": 8}')
        waited.append(picked_up_after(queue, int(enqueued["id"])))
        wait_until_asleep(queue)
        many = node.run(queue.dsn, "enqueueMany", bulk)
        waited.append(picked_up_after(queue, int(many[0]["job_id"])))
        wait_until_asleep(queue)
        waited.append(
            picked_up_after(queue, send_welcome.using(conn=queue.connection).enqueue(user_id=10).job_id)
        )

    assert {name: inserted[name] for name in ("queue", "priority", "state")} == {
        "queue": "mail",
        "priority": 2,
        "state": "ready",
    }
    assert max(waited) < SOON_SECONDS < POLL_SECONDS / 2
    results = queue.all("SELECT result FROM pgqueue.finished_jobs ORDER BY id")
    assert [row[0] for row in results] == [f"welcome, {user}" for user in (7, 8, 9, 10)]


def test_a_job_exists_if_and_only_if_the_transaction_commits(
    queue: Queue, node: NodeClient, tmp_path: Path
) -> None:
    node.run(queue.dsn, "transaction")

    ended = until_empty(queue.dsn, tmp_path, "--app", APP)

    assert ended.process.returncode == 0, ended.text()
    assert queue.all("SELECT id FROM orders") == [(2,)]
    assert queue.all("SELECT result FROM pgqueue.finished_jobs") == [("order 2",)]


def test_hostile_strings_arrive_as_they_were(queue: Queue, node: NodeClient, tmp_path: Path) -> None:
    node.run(queue.dsn, "hostile", json.dumps(HOSTILE))

    ended = until_empty(queue.dsn, tmp_path, "--app", APP)

    assert ended.process.returncode == 0, ended.text()
    assert [row[0] for row in queue.all("SELECT result FROM pgqueue.finished_jobs ORDER BY id")] == HOSTILE


@pytest.mark.parametrize(
    ("query", "parameters", "refusal"),
    [
        (
            "SELECT pgqueue.enqueue($1, $2)",
            ["send_welcome", "{}"],
            {
                "code": "22023",
                "constraint": None,
                "message": "the concurrency_key of task send_welcome needs the argument user_id, "
                "which is missing",
            },
        ),
        (
            "INSERT INTO pgqueue.jobs (task, args) VALUES ($1, $2)",
            ["echo", "[1]"],
            {
                "code": "23514",
                "constraint": "jobs_documents_fit",
                "message": (
                    'value for domain pgqueue.object_document violates check constraint "jobs_documents_fit"'
                ),
            },
        ),
        (
            "SELECT * FROM pgqueue.enqueue_many($1)",
            ['{"task": "echo"}'],
            {"code": "22023", "constraint": None, "message": "enqueue_many wants a JSON array"},
        ),
    ],
)
def test_what_is_wrong_is_refused_with_a_code_and_a_sentence(
    door: Queue, node: NodeClient, query: str, parameters: list[str], refusal: dict[str, str | None]
) -> None:
    said = node.run(door.dsn, "refused", query, *parameters)

    assert said == refusal
    assert door.count("jobs") == 0
