"""A shell script with psql is a client like any other."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.languages.jobs import send_welcome
from tests.languages.support import (
    APP,
    HOSTILE,
    POLL_SECONDS,
    SOON_SECONDS,
    first_line,
    picked_up_after,
    psql,
    sleeping_worker,
    wait_until_asleep,
)
from tests.process.support import Queue, until_empty
from tests.support import wait_until


def insert(queue: Queue, script: str, **variables: str) -> int:
    ended = psql(queue.dsn, script, variables=variables)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_a_plain_insert_of_task_and_args_gets_everything_else_from_the_tasks_definition(door: Queue) -> None:
    script = (
        """INSERT INTO pgqueue.jobs (task, args) VALUES ('send_welcome', '{"user_id": 7}') RETURNING id"""
    )

    by_psql = insert(door, script)
    by_python = send_welcome.using(conn=door.connection).enqueue(user_id=7).job_id

    columns = (
        "queue, priority, max_attempts, timeout_seconds, concurrency_key, concurrency_limit, state, args"
    )
    written, wanted = (
        door.all(f"SELECT {columns} FROM pgqueue.jobs WHERE id = %s", job) for job in (by_psql, by_python)
    )
    assert written == wanted == [("mail", 2, 3, 45.0, "user:7", 1, "ready", {"user_id": 7})]


def test_a_job_of_psql_wakes_a_sleeping_worker_as_one_of_python_does(queue: Queue, tmp_path: Path) -> None:
    scripts = [
        """INSERT INTO pgqueue.jobs (task, args) VALUES ('send_welcome', '{"user_id": 7}') RETURNING id""",
        """SELECT pgqueue.enqueue('send_welcome', '{"user_id": 8}')""",
        """SELECT job_id FROM pgqueue.enqueue_many('[{"task": "send_welcome", "args": {"user_id": 9}}]')""",
    ]

    with sleeping_worker(queue, tmp_path):
        waited = []
        for script in scripts:
            waited.append(picked_up_after(queue, insert(queue, script)))
            wait_until_asleep(queue)
        by_python = send_welcome.using(conn=queue.connection).enqueue(user_id=10)
        waited.append(picked_up_after(queue, by_python.job_id))

    assert max(waited) < SOON_SECONDS < POLL_SECONDS / 2
    results = queue.all("SELECT result FROM pgqueue.finished_jobs ORDER BY id")
    assert [row[0] for row in results] == [f"welcome, {user}" for user in (7, 8, 9, 10)]


def test_enqueue_takes_its_arguments_by_name(door: Queue) -> None:
    script = """
        SELECT pgqueue.enqueue(
            task => 'send_welcome',
            args => '{"user_id": 7}',
            queue => 'later',
            delay_seconds => 3600,
            priority => 5,
            max_attempts => 9,
            timeout_seconds => 0,
            concurrency_key => 'all-mail',
            concurrency_limit => 4,
            unique_key => 'welcome:7',
            idempotency_key => 'welcome-7',
            headers => '{"trace": "abc"}'
        )
    """

    job = insert(door, script)

    found = door.all(
        """
        SELECT queue, priority, max_attempts, timeout_seconds, concurrency_key, concurrency_limit, unique_key,
            idempotency_key, headers, state, round(extract(epoch FROM run_at - created_at))::integer
        FROM pgqueue.jobs WHERE id = %s
        """,
        job,
    )
    assert found == [
        (
            *("later", 5, 9, 0.0, "all-mail", 4, "welcome:7", "welcome-7"),
            *({"trace": "abc"}, "scheduled", 3600),
        )
    ]


def test_the_bulk_form_gives_an_id_and_an_outcome_for_each_job_in_order(door: Queue) -> None:
    jobs = [
        {"task": "report", "args": {"day": "monday"}},
        {"task": "send_welcome", "args": {"user_id": 7}, "priority": 9},
        {"task": "report", "args": {"day": "monday"}},
        {"task": "echo", "args": {"text": "hi"}, "delay_seconds": 60},
    ]

    ended = psql(
        door.dsn, "SELECT * FROM pgqueue.enqueue_many(:'jobs')", variables={"jobs": json.dumps(jobs)}
    )

    assert ended.returncode == 0, ended.stderr
    ids, outcomes = zip(*(line.split("|") for line in ended.stdout.split()), strict=True)
    assert outcomes == ("inserted", "inserted", "skipped", "inserted")
    assert ids[0] == ids[2]
    found = door.all("SELECT id::text, task, priority, state FROM pgqueue.jobs ORDER BY id")
    assert sorted(found) == sorted(
        [
            (ids[0], "report", 0, "ready"),
            (ids[1], "send_welcome", 9, "ready"),
            (ids[3], "echo", 0, "scheduled"),
        ]
    )


def test_a_job_exists_if_and_only_if_the_transaction_commits(queue: Queue, tmp_path: Path) -> None:
    script = """
        CREATE TABLE orders (id integer);
        BEGIN;
        INSERT INTO orders VALUES (1);
        INSERT INTO pgqueue.jobs (task, args) VALUES ('echo', '{"text": "never"}');
        ROLLBACK;
        BEGIN;
        INSERT INTO orders VALUES (2);
        SELECT pgqueue.enqueue('echo', '{"text": "once"}') AS kept \\gset
        SAVEPOINT before;
        SELECT pgqueue.enqueue('echo', '{"text": "taken back"}') AS gone \\gset
        ROLLBACK TO before;
        COMMIT;
    """

    with sleeping_worker(queue, tmp_path):
        ended = psql(queue.dsn, script)
        assert ended.returncode == 0, ended.stderr
        job = insert(queue, """SELECT pgqueue.enqueue('echo', '{"text": "last"}')""")
        picked_up_after(queue, job)

    assert [row[0] for row in queue.all("SELECT id FROM orders")] == [2]
    assert queue.all("SELECT result FROM pgqueue.finished_jobs ORDER BY id") == [("once",), ("last",)]
    assert queue.count("jobs") == queue.count("dead_jobs") == 0


def test_hostile_strings_arrive_as_they_were(queue: Queue, tmp_path: Path) -> None:
    by_insert = "INSERT INTO pgqueue.jobs (task, args) VALUES ('echo', jsonb_build_object('text', :'text'))"
    by_function = "SELECT pgqueue.enqueue('echo', :'args') AS id \\gset"

    for text in HOSTILE:
        ended = psql(queue.dsn, by_insert, variables={"text": text})
        assert ended.returncode == 0, ended.stderr
        ended = psql(queue.dsn, by_function, variables={"args": json.dumps({"text": text})})
        assert ended.returncode == 0, ended.stderr
    ended = until_empty(queue.dsn, tmp_path, "--app", APP)

    assert ended.process.returncode == 0, ended.text()
    results = queue.all("SELECT result FROM pgqueue.finished_jobs ORDER BY id")
    assert [row[0] for row in results] == [text for text in HOSTILE for _ in range(2)]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("INSERT INTO pgqueue.jobs (task, args) VALUES ('echo', '[1]')", "jobs_documents_fit"),
        (
            "INSERT INTO pgqueue.jobs (task, args) VALUES ('echo', '{oops')",
            "invalid input syntax for type json",
        ),
        ("INSERT INTO pgqueue.jobs (task, args) VALUES ('', '{}')", "jobs_names_fit"),
        ("INSERT INTO pgqueue.jobs (args) VALUES ('{}')", 'null value in column "task"'),
        (
            "INSERT INTO pgqueue.jobs (task, run_at) VALUES ('echo', 'infinity')",
            "jobs_run_at_is_sane",
        ),
        ("SELECT pgqueue.enqueue('echo', priority => -1)", "jobs_numbers_fit"),
        (
            "SELECT pgqueue.enqueue('echo', on_conflict => 'whatever')",
            "on_conflict is whatever, not skip, replace, reject or debounce",
        ),
        (
            "SELECT pgqueue.enqueue('echo', max_atempts => 3)",
            "function pgqueue.enqueue(unknown, max_atempts => integer) does not exist",
        ),
        (
            """SELECT pgqueue.enqueue('echo', '{"text": "\\u0000"}')""",
            "unsupported Unicode escape sequence",
        ),
        (
            "SELECT pgqueue.enqueue('echo', jsonb_build_object('text', repeat('x', 1048576)))",
            "the args of task echo are 1048588 bytes as text, a job carries at most 1048576",
        ),
        (
            "SELECT pgqueue.enqueue('send_welcome', '{}')",
            "the concurrency_key of task send_welcome needs the argument user_id, which is missing",
        ),
        (
            "INSERT INTO pgqueue.jobs (task, args) VALUES ('send_welcome', '{}')",
            "the concurrency_key of task send_welcome needs the argument user_id, which is missing",
        ),
        ("SELECT * FROM pgqueue.enqueue_many('{}')", "enqueue_many wants a JSON array"),
        ("SELECT * FROM pgqueue.enqueue_many(NULL)", "enqueue_many wants a JSON array"),
        (
            """SELECT * FROM pgqueue.enqueue_many('[{"task": "echo"}, {"task": "a", "priority": "high"}]')""",
            'invalid input syntax for type integer: "high"',
        ),
        (
            """
            SELECT pgqueue.enqueue('report', '{"day": "monday"}');
            SELECT pgqueue.enqueue('report', '{"day": "monday"}', on_conflict => 'reject')
            """,
            "jobs_unique_key",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_a_line_that_says_what(door: Queue, script: str, said: str) -> None:
    ended = psql(door.dsn, f"BEGIN; {script}; COMMIT;")

    assert ended.returncode == 3
    assert first_line(ended.stderr).startswith("ERROR:")
    assert said in first_line(ended.stderr)
    assert door.count("jobs") == 0


def test_a_role_that_may_only_insert_can_enqueue_and_wakes_the_worker(queue: Queue, tmp_path: Path) -> None:
    role = f"pgqueue_test_{uuid.uuid4().hex[:8]}"
    queue.connection.execute(
        f"""
        CREATE ROLE {role};
        GRANT USAGE ON SCHEMA pgqueue TO {role};
        GRANT INSERT ON pgqueue.jobs TO {role};
        """
    )
    try:
        with sleeping_worker(queue, tmp_path):
            ended = psql(
                queue.dsn,
                f"SET ROLE {role};"
                """INSERT INTO pgqueue.jobs (task, args) VALUES ('send_welcome', '{"user_id": 7}')""",
            )
            assert ended.returncode == 0, ended.stderr
            wait_until(lambda: queue.count("finished_jobs") == 1, SOON_SECONDS, "the job has run")
    finally:
        queue.connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
