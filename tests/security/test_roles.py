"""Who may do what: each role does its work, and nothing beyond it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

import pgqueue
from pgqueue import migrate
from pgqueue.cli import main
from tests.process.support import Queue, worker
from tests.security.support import ENDS, ROLES, Accounts
from tests.support import run_pgqueue, wait_until

TABLES = (
    "jobs",
    "dead_jobs",
    "finished_jobs",
    "processed_jobs",
    "tasks",
    "queues",
    "workers",
    "schedules",
    "schedule_runs",
    "rate_limits",
    "breakers",
    "definitions",
    "audit_log",
    "alembic_version",
)


def refused(connection: psycopg.Connection, *statements: str) -> list[str]:
    """Give those of the statements that are not refused for want of a right."""
    allowed = []
    for statement in statements:
        try:
            with connection.transaction(force_rollback=True):
                connection.execute(statement)
        except InsufficientPrivilege:
            continue
        allowed.append(statement)
    return allowed


# The producer.


def test_a_producer_enqueues_in_every_documented_way(accounts, login):
    producer = login("producer")
    app = pgqueue.App(dsn=accounts.producer)

    @app.task(unique_key="welcome:{user_id}")
    def send_welcome(user_id: int) -> None: ...

    producer.execute("INSERT INTO pgqueue.jobs (task, args) VALUES ('t', '{}')")
    producer.execute(
        "INSERT INTO pgqueue.jobs (task, args, queue, run_at, priority, max_attempts, timeout_seconds, "
        "concurrency_key, concurrency_limit, unique_key, is_unique_until_start, idempotency_key, headers) "
        "VALUES ('t', '{}', 'q', now() + interval '1 h', 1, 2, 3, 'k', 4, 'u', false, 'i', '{}')"
    )
    with producer.cursor().copy("COPY pgqueue.jobs (task, args) FROM STDIN") as copy:
        copy.write_row(("t", "{}"))
    by_function = producer.execute("SELECT pgqueue.enqueue('t', '{}', unique_key => 'v')").fetchone()
    many = producer.execute('SELECT outcome FROM pgqueue.enqueue_many(\'[{"task": "t"}]\')').fetchone()
    first, again = send_welcome.enqueue(user_id=1), send_welcome.enqueue(user_id=1)
    of_async = asyncio.run(send_welcome.aenqueue(user_id=2))
    plain = [app.enqueue("t"), asyncio.run(app.aenqueue("t")), *app.enqueue_many([app.new_job("t")] * 2)]
    at_shell = run_pgqueue("enqueue", "t", "{}", dsn=accounts.producer)

    assert many == ("inserted",)
    assert first.job_id == again.job_id != of_async.job_id
    assert at_shell.returncode == 0, at_shell.stderr
    assert len({job.job_id for job in plain}) == 4
    stored = login("owner").execute(
        "SELECT count(*), count(*) FILTER (WHERE id = %s) FROM pgqueue.jobs", by_function
    )
    assert stored.fetchone() == (12, 1)


def test_what_a_client_writes_through_shows_nobody_a_job(login):
    login("owner").execute("INSERT INTO pgqueue.jobs (task, args) VALUES ('t', '{}')")
    producer = login("producer")

    assert producer.execute("SELECT id FROM pgqueue.new_jobs").fetchall() == []
    allowed = refused(
        producer,
        "SELECT args FROM pgqueue.new_jobs",
        "INSERT INTO pgqueue.new_jobs (task, queue) VALUES ('t', 'q') RETURNING args",
        "INSERT INTO pgqueue.new_jobs (task, state) VALUES ('t', 'scheduled')",
        "INSERT INTO pgqueue.new_jobs (id, task) OVERRIDING SYSTEM VALUE VALUES (1, 't')",
        "UPDATE pgqueue.new_jobs SET task = 'x'",
        "DELETE FROM pgqueue.new_jobs",
    )
    assert allowed == []


def test_a_refusal_to_a_producer_does_not_name_the_job_that_holds_the_key(accounts):
    app = pgqueue.App(dsn=accounts.producer)

    @app.task(unique_key="k", on_conflict="reject")
    def once() -> None: ...

    once.enqueue()

    with pytest.raises(pgqueue.DuplicateJob, match="a live job already holds the unique key 'k'"):
        once.enqueue()
    with pytest.raises(pgqueue.DuplicateJob, match="a live job"):
        asyncio.run(once.aenqueue())


def test_a_producer_reads_nothing_forges_nothing_cancels_nothing_and_deletes_nothing(login):
    login("owner").execute("INSERT INTO pgqueue.jobs (task, args) VALUES ('t', '{\"secret\": 1}')")
    producer = login("producer")

    allowed = refused(
        producer,
        *(f"SELECT FROM pgqueue.{table}" for table in TABLES),
        *(f"DELETE FROM pgqueue.{table}" for table in TABLES),
        *(f"TRUNCATE pgqueue.{table}" for table in TABLES),
        *(f"LOCK TABLE pgqueue.{table} IN ACCESS EXCLUSIVE MODE" for table in TABLES),
        "SELECT FROM pgqueue.job_counts",
        "COPY pgqueue.jobs TO STDOUT",
        "INSERT INTO pgqueue.jobs (task) VALUES ('t') RETURNING id",
        "INSERT INTO pgqueue.jobs (task, state) VALUES ('t', 'running')",
        "INSERT INTO pgqueue.jobs (task, attempt) VALUES ('t', 3)",
        "INSERT INTO pgqueue.jobs (task, claim_token) VALUES ('t', gen_random_uuid())",
        "INSERT INTO pgqueue.jobs (task, worker_id) VALUES ('t', gen_random_uuid())",
        "INSERT INTO pgqueue.jobs (task, errors) VALUES ('t', '[]')",
        "INSERT INTO pgqueue.jobs (task, created_at) VALUES ('t', now())",
        "INSERT INTO pgqueue.jobs (id, task) OVERRIDING SYSTEM VALUE VALUES (1, 't')",
        "INSERT INTO pgqueue.dead_jobs DEFAULT VALUES",
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status) "
        "VALUES ('k', 't', 'COMPLETED')",
        "UPDATE pgqueue.jobs SET args = '{}'",
        "UPDATE pgqueue.jobs SET state = 'ready'",
        "SELECT pgqueue.claim('default', gen_random_uuid(), 1)",
        "SELECT pgqueue.cancel(ARRAY[1])",
        "SELECT pgqueue.redrive(ARRAY[1])",
        "SELECT pgqueue.pause_queues()",
        "SELECT pgqueue.audit('queue.pause', 'q', NULL, '{}')",
        "SELECT pgqueue.prune_audit_log(0)",
        "SELECT pgqueue.settle(NULL)",
        "SELECT pgqueue.fill_job(NULL)",
        "SELECT setval(pg_get_serial_sequence('pgqueue.jobs', 'id'), 1)",
        "CREATE TABLE pgqueue.mine ()",
        "CREATE TRIGGER mine BEFORE INSERT ON pgqueue.jobs "
        "EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    )

    assert allowed == []


# The worker.


def test_a_worker_needs_no_more_than_its_role(accounts: Accounts, login, tmp_path: Path):
    owner, queue = login("owner"), Queue(accounts.owner)
    owner.execute("GRANT INSERT ON effects TO PUBLIC")
    owner.execute("SELECT pgqueue.make_partitions(0, current_date - 30)")
    tasks = {**ENDS, "nobody_knows_it": "dead"}

    with worker(
        accounts.worker, tmp_path, "--unknown-task-grace-seconds", "0", app="tests.security.jobs:app"
    ) as started:
        jobs = {task: queue.insert(task) for task in tasks}
        for task, state in tasks.items():
            queue.wait_for_state(jobs[task], state, 90)
        # Last, because it takes along whatever runs beside it.
        queue.wait_for_state(queue.insert("kill_its_process"), "dead", 90)
        wait_until(lambda: queue.count("finished_jobs", "task = 'tick'"), 60, "the schedule fired")
        started.wait_for("history dropped", seconds=60)
        code = started.stop()

    assert code == 0
    assert not any(
        "permission denied" in line or "must be owner" in line for line in started.text().splitlines()
    )
    assert queue.effects() > 0
    queue.close()


def test_a_worker_cannot_rewrite_arguments_or_act_without_a_token(login):
    owner, worker_account = login("owner"), login("worker")
    owner.execute("INSERT INTO pgqueue.jobs (task, args) VALUES ('t', '{}')")
    worker_account.execute("SELECT pgqueue.claim('default', gen_random_uuid(), 1)")

    allowed = refused(
        worker_account,
        *(f"TRUNCATE pgqueue.{table}" for table in TABLES),
        *(f"DELETE FROM pgqueue.{table}" for table in TABLES if table != "workers"),
        "UPDATE pgqueue.jobs SET args = '{\"forged\": true}'",
        "UPDATE pgqueue.jobs SET task = 'other'",
        "UPDATE pgqueue.jobs SET state = 'ready'",
        "UPDATE pgqueue.jobs SET claim_token = gen_random_uuid()",
        "UPDATE pgqueue.jobs SET attempt = 0",
        "UPDATE pgqueue.finished_jobs SET result = '{}'",
        "UPDATE pgqueue.processed_jobs SET status = 'COMPLETED'",
        "UPDATE pgqueue.dead_jobs SET reason = ''",
        "INSERT INTO pgqueue.finished_jobs DEFAULT VALUES",
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status, response_payload) "
        "VALUES ('k', 't', 'COMPLETED', '{}')",
        "SELECT pgqueue.cancel(ARRAY[1])",
        "SELECT pgqueue.redrive(ARRAY[1])",
        "SELECT pgqueue.pause_queues()",
        "SELECT pgqueue.limit_queue('q', 0)",
        "SELECT pgqueue.settle(NULL)",
        "SELECT pgqueue.rate_set('x', 1)",
        "SELECT pgqueue.breaker_open('x')",
        "DROP TABLE pgqueue.finished_jobs",
    )
    by_strange_token = worker_account.execute(
        "SELECT pgqueue.complete(ARRAY[id], ARRAY[gen_random_uuid()]) FROM pgqueue.jobs"
    ).fetchall()

    assert allowed == []
    assert by_strange_token == []
    assert owner.execute("SELECT args FROM pgqueue.jobs").fetchone() == ({},)


def test_a_worker_drops_no_day_that_the_retention_keeps(login):
    owner, worker_account = login("owner"), login("worker")
    today = owner.execute(
        "SELECT to_char(now() AT TIME ZONE 'UTC', '\"finished_jobs_\"YYYYMMDD')"
    ).fetchone()[0]
    owner.execute("SELECT pgqueue.make_partitions(0, current_date - 30)")
    old = owner.execute("SELECT to_char(current_date - 30, '\"finished_jobs_\"YYYYMMDD')").fetchone()[0]
    drop = "SELECT pgqueue.drop_partition(%s, %s::interval)"

    kept = [
        worker_account.execute(drop, asked).fetchone()[0]
        for asked in ((today, "0"), (old, "60 days"), ("jobs", "0"), ("finished_jobs", "0"))
    ]
    dropped = worker_account.execute(drop, (old, "7 days")).fetchone()[0]

    assert kept == [False, False, False, False]
    assert dropped is True
    assert owner.execute("SELECT to_regclass(%s)", [f"pgqueue.{old}"]).fetchone() == (None,)


# The viewer and the operator.

READS = (
    ("jobs", "list"),
    ("jobs", "show", "{dead}"),
    ("dlq", "list"),
    ("dlq", "show", "{dead}"),
    ("queues", "list"),
    ("limits", "list"),
    ("schedules", "list"),
    ("breakers", "list"),
    ("workers",),
    ("locks",),
    ("roles",),
    ("migrate", "--check"),
)
CHANGES = (
    ("jobs", "retry", "{scheduled}"),
    ("jobs", "cancel", "{scheduled}"),
    ("dlq", "redrive", "{dead}"),
    ("dlq", "purge", "{other_dead}", "--yes"),
    ("queues", "pause", "q", "--force"),
    ("queues", "resume", "q"),
    ("queues", "limit", "q", "3"),
    ("limits", "set", "queue:q", "5/s"),
    ("limits", "remove", "queue:q"),
    ("schedules", "add", "nightly", "0 3 * * *", "t"),
    ("schedules", "pause", "nightly"),
    ("schedules", "resume", "nightly"),
    ("schedules", "run-now", "nightly"),
    ("schedules", "remove", "nightly"),
    ("breakers", "open", "api"),
    ("breakers", "close", "api"),
    ("breakers", "set", "api", "--open-seconds", "5"),
    ("processed", "forget", "k"),
    ("enqueue", "t", "{}"),
)


@pytest.fixture
def things(login) -> dict[str, int]:
    """One of each thing that a person can look at or change."""
    owner = login("owner")
    owner.execute('SELECT pgqueue.breaker_declare(\'[{"name": "api"}]\')')
    owner.execute(
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status) "
        "VALUES ('k', 't', 'COMPLETED')"
    )
    owner.execute("INSERT INTO pgqueue.tasks (name) VALUES ('t')")
    made = {}
    for name in ("dead", "other_dead"):
        made[name] = owner.execute("SELECT pgqueue.enqueue('t')").fetchone()[0]
        owner.execute(
            "SELECT pgqueue.fail(job_id, token, 'boom', NULL, true) "
            "FROM pgqueue.claim('default', gen_random_uuid(), 1)"
        )
    made["scheduled"] = owner.execute("SELECT pgqueue.enqueue('t', delay_seconds => 3600)").fetchone()[0]
    return made


@pytest.fixture
def outcomes(monkeypatch, capsys, things):
    """Run commands on a DSN and give what went wrong."""

    def run(dsn: str, commands) -> dict[str, str]:
        monkeypatch.setenv("PGQUEUE_DSN", dsn)
        wrong = {}
        for command in commands:
            code = main([word if word == "{}" else word.format_map(things) for word in command])
            said = capsys.readouterr().err
            if code:
                wrong[" ".join(command)] = said
        return wrong

    return run


def test_an_operator_does_everything_that_the_admin_commands_do(accounts, outcomes):
    assert outcomes(accounts.operator, (*READS, *CHANGES)) == {}


def test_an_operator_cannot_claim_rewrite_or_wipe(login, things):
    allowed = refused(
        login("operator"),
        *(f"TRUNCATE pgqueue.{table}" for table in TABLES),
        *(
            f"DELETE FROM pgqueue.{table}"
            for table in ("jobs", "finished_jobs", "tasks", "queues", "breakers")
        ),
        "UPDATE pgqueue.jobs SET args = '{}'",
        "UPDATE pgqueue.dead_jobs SET args = '{}'",
        "UPDATE pgqueue.finished_jobs SET result = '{}'",
        "SELECT pgqueue.claim('default', gen_random_uuid(), 1)",
        "SELECT pgqueue.complete(ARRAY[1], ARRAY[gen_random_uuid()])",
    )

    assert allowed == []


def test_a_viewer_reads_everything(accounts, outcomes):
    assert outcomes(accounts.viewer, READS) == {}


def test_a_viewer_changes_nothing_by_any_command_statement_or_function(accounts, login, outcomes):
    viewer, owner = login("viewer"), login("owner")
    rows = "SELECT array_agg(t::text ORDER BY t::text) FROM pgqueue.{} AS t"
    before = {table: owner.execute(rows.format(table)).fetchone() for table in TABLES}
    functions = viewer.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace "
        "AND has_function_privilege(oid, 'EXECUTE') ORDER BY 1"
    ).fetchall()

    done = {" ".join(command) for command in CHANGES} - set(outcomes(accounts.viewer, CHANGES))
    allowed = refused(
        viewer,
        *(f"DELETE FROM pgqueue.{table}" for table in TABLES),
        *(f"TRUNCATE pgqueue.{table}" for table in TABLES),
        *(f"INSERT INTO pgqueue.{table} DEFAULT VALUES" for table in TABLES),
        *(f"SELECT FROM pgqueue.{table} FOR UPDATE" for table in TABLES),
    )

    assert done == set()
    assert allowed == []
    assert functions == [("is_declared",), ("known_queues",), ("ready_depth",)]
    assert {table: owner.execute(rows.format(table)).fetchone() for table in TABLES} == before


def test_whoever_has_no_role_gets_no_further_than_the_schemas_door(login):
    allowed = refused(
        login("stranger"),
        *(f"SELECT FROM pgqueue.{table}" for table in TABLES),
        "INSERT INTO pgqueue.jobs (task) VALUES ('t')",
        "SELECT pgqueue.enqueue('t')",
        "SELECT pgqueue.bell_channel('q')",
    )

    assert allowed == []


# The script.


def test_the_script_can_be_run_again_and_takes_back_what_was_given_beyond_it(accounts, login):
    owner = login("owner")
    owner.execute("GRANT ALL ON pgqueue.jobs TO pgqueue_viewer")
    owner.execute("GRANT UPDATE (args) ON pgqueue.jobs TO pgqueue_worker")
    owner.execute("GRANT EXECUTE ON FUNCTION pgqueue.settle TO pgqueue_worker")

    owner.execute(migrate.roles_script())

    assert refused(login("viewer"), "DELETE FROM pgqueue.jobs") == []
    assert (
        refused(login("worker"), "UPDATE pgqueue.jobs SET args = '{}'", "SELECT pgqueue.settle(NULL)") == []
    )


def test_migrate_gives_functions_made_anew_their_grants_again(accounts, login):
    owner = login("owner")
    owner.execute("DROP FUNCTION pgqueue.bell_channel CASCADE")
    owner.execute("DELETE FROM pgqueue.definitions WHERE object LIKE 'FUNCTION pgqueue.bell_channel%'")
    login("producer").execute("SELECT pgqueue.enqueue('t')")

    migrate.upgrade(accounts.owner)

    assert login("worker").execute("SELECT pgqueue.bell_channel('q')").fetchone() == ("pgqueue.q",)
    assert refused(login("producer"), "SELECT pgqueue.bell_channel('q')") == []


def test_roles_says_who_has_what(accounts):
    ended = run_pgqueue("roles", "--json", dsn=accounts.viewer)

    found = {role["name"]: role for role in json.loads(ended.stdout)}
    assert set(found) == {f"pgqueue_{role}" for role in ROLES}
    for role in ROLES:
        account = psycopg.conninfo.conninfo_to_dict(accounts.of(role))["user"]
        assert found[f"pgqueue_{role}"]["exists"]
        assert account in found[f"pgqueue_{role}"]["members"]


def test_the_script_of_another_schema_makes_roles_of_its_own(postgres):
    ended = run_pgqueue("roles", "--sql", "--schema", "q2")

    assert ended.returncode == 0
    assert "q2_producer" in ended.stdout
    assert "pgqueue" not in ended.stdout.replace("`pgqueue migrate`", "").replace("`pgqueue locks`", "")
