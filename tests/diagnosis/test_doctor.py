"""`pgqueue doctor` finds each fault that somebody planted, and is silent on a healthy system."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import diagnosis, embedded, migrate
from pgqueue.diagnosis import Thresholds
from pgqueue.shell import write_psql
from tests.cli.conftest import WORKER
from tests.outages.support import make_standby
from tests.support import ROOT, make_database, open_folder, run_pgqueue, start_pgqueue, wait_until

SETTINGS = {"max_prepared_transactions": "5", "wal_level": "replica", "max_connections": "60"}


@dataclass
class Patient:
    """A migrated database of an ordinary role's own, on a server with production's settings."""

    dsn: str
    admin: psycopg.Connection
    connection: psycopg.Connection

    def codes(self, **thresholds: Any) -> list[str]:
        """Give the codes of what is found over a connection of its own."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            found = diagnosis.examine(connection, Thresholds(**thresholds))
        return [finding.code for finding in found.findings]

    def findings(self, **thresholds: Any) -> dict[str, diagnosis.Finding]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return {
                finding.code: finding
                for finding in diagnosis.examine(connection, Thresholds(**thresholds)).findings
            }


@pytest.fixture(scope="module")
def production() -> Iterator[embedded.Server]:
    with open_folder() as folder:
        server = embedded.start(folder, settings=SETTINGS)
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
            admin.execute("CREATE ROLE app LOGIN")
            admin.execute("GRANT pg_read_all_stats TO app")
            admin.execute("CREATE DATABASE template_pgqueue OWNER app")
        migrate.upgrade(make_conninfo(server.dsn("template_pgqueue"), user="app"))
        try:
            yield server
        finally:
            server.close()


@pytest.fixture
def patient(production: embedded.Server) -> Iterator[Patient]:
    with (
        make_database(production.dsn("postgres"), "template_pgqueue") as dsn,
        contextlib.ExitStack() as stack,
    ):
        admin = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        admin.execute(f"ALTER DATABASE {admin.info.dbname} OWNER TO app")
        own = make_conninfo(dsn, user="app")
        connection = stack.enter_context(psycopg.connect(own, autocommit=True, application_name="shop"))
        yield Patient(own, admin, connection)


@contextlib.contextmanager
def proxy(dsn: str, *, changes_pid: bool) -> Iterator[str]:
    """Stand between client and server, on TCP; like a pooler, give the client a key of our own if asked."""
    parts = conninfo_to_dict(dsn)
    server = f"{parts['host']}/.s.PGSQL.{parts.get('port', 5432)}"
    sockets: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        must_change = is_answer and changes_pid
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if must_change and (at := data.find(b"K\0\0\0\x0c")) >= 0:
                    data = data[: at + 5] + b"\0\0\0\x07" + data[at + 9 :]
                    must_change = False
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                backend = socket.socket(socket.AF_UNIX)
                backend.connect(server)
                sockets.extend((client, backend))
                threading.Thread(target=pump, args=(client, backend, False), daemon=True).start()
                threading.Thread(target=pump, args=(backend, client, True), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=serve, daemon=True)
        accepting.start()
        try:
            yield make_conninfo(dsn, host="127.0.0.1", port=listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(60)
            for each in sockets:
                each.close()


def worker(patient: Patient, queues: str = "{default}", version: str = "0.1.0", host: str = "web-1") -> None:
    patient.connection.execute(
        "INSERT INTO pgqueue.workers (id, host, pid, version, queues, slots) "
        "VALUES (gen_random_uuid(), %s, 42, %s, %s, 10)",
        [host, version, queues],
    )


def task(patient: Patient) -> None:
    patient.connection.execute("INSERT INTO pgqueue.tasks (name) VALUES ('send')")


# Health.


def test_a_healthy_system_with_a_worker_at_work_is_passed_over_in_silence(patient, tmp_path):
    (tmp_path / "healthy.py").write_text(
        "import pgqueue\napp = pgqueue.App()\n@app.task\ndef send() -> None: ...\n"
    )
    patient.connection.execute("SELECT pgqueue.enqueue('send') FROM generate_series(1, 20)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with start_pgqueue(
        "worker", "--app", "healthy:app", "--processes", "1", dsn=patient.dsn, env={"PYTHONPATH": path}
    ):
        wait_until(
            lambda: (
                patient.connection.execute("SELECT count(*) FROM pgqueue.finished_jobs").fetchone() == (20,)
            ),
            30,
        )

        ended = run_pgqueue("doctor", dsn=patient.dsn)

    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr == "nothing found (18 checks)\n"


def test_a_system_that_is_only_just_migrated_is_healthy(patient):
    assert patient.codes() == []


# Faults.


@dataclass
class Fault:
    """How to plant a fault, and what is to be found."""

    code: str
    plant: Callable[[Patient, contextlib.ExitStack], Any]
    severity: str
    thresholds: dict[str, Any] | None = None
    says: str = ""


def sql(*statements: str, as_admin: bool = False) -> Callable[[Patient, contextlib.ExitStack], None]:
    def plant(patient: Patient, stack: contextlib.ExitStack) -> None:
        for statement in statements:
            (patient.admin if as_admin else patient.connection).execute(statement)

    return plant


def database_setting(assignment: str) -> Callable[[Patient, contextlib.ExitStack], None]:
    def plant(patient: Patient, stack: contextlib.ExitStack) -> None:
        patient.admin.execute(f"ALTER DATABASE {patient.admin.info.dbname} {assignment}")

    return plant


def server_setting(name: str, value: str) -> Callable[[Patient, contextlib.ExitStack], None]:
    def change(patient: Patient, statement: str, wanted: str) -> None:
        patient.admin.execute(statement)
        patient.admin.execute("SELECT pg_reload_conf()")
        wait_until(lambda: patient.admin.execute(f"SHOW {name}").fetchone() == (wanted,))

    def plant(patient: Patient, stack: contextlib.ExitStack) -> None:
        before = patient.admin.execute(f"SHOW {name}").fetchone()[0]
        change(patient, f"ALTER SYSTEM SET {name} = {value}", value)
        stack.callback(change, patient, f"ALTER SYSTEM RESET {name}", before)

    return plant


def session(*statements: str, **options: Any) -> Callable[[Patient, contextlib.ExitStack], None]:
    def plant(patient: Patient, stack: contextlib.ExitStack) -> None:
        other = stack.enter_context(psycopg.connect(patient.dsn, application_name="batch report", **options))
        stack.callback(other.rollback)
        for statement in statements:
            other.execute(statement)

    return plant


def invalid_index(patient: Patient, stack: contextlib.ExitStack) -> None:
    patient.admin.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'pgqueue.jobs_due'::regclass"
    )


def lock_wait(patient: Patient, stack: contextlib.ExitStack) -> None:
    session("LOCK TABLE pgqueue.jobs IN SHARE MODE")(patient, stack)
    waiting = stack.enter_context(psycopg.connect(patient.dsn, application_name="producer"))

    def wait() -> None:
        with contextlib.suppress(psycopg.Error):
            waiting.execute("SELECT pgqueue.enqueue('send')")

    thread = threading.Thread(target=wait)
    thread.start()
    stack.callback(thread.join)
    stack.callback(waiting.cancel_safe)
    wait_until(
        lambda: (
            patient.admin.execute(
                "SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s", [waiting.info.backend_pid]
            ).fetchone()
            == ("Lock",)
        )
    )


def superuser_worker(patient: Patient, stack: contextlib.ExitStack) -> None:
    stack.enter_context(psycopg.connect(patient.admin.info.dsn, application_name="pgqueue worker lease"))


def dead_rows(patient: Patient, stack: contextlib.ExitStack) -> None:
    patient.connection.execute("ALTER TABLE pgqueue.jobs SET (autovacuum_vacuum_threshold = 1000000)")
    patient.connection.execute(
        "SELECT pgqueue.enqueue('send', delay_seconds => 60) FROM generate_series(1, 300)"
    )
    patient.connection.execute("DELETE FROM pgqueue.jobs")
    patient.connection.execute("SELECT pg_stat_force_next_flush()")
    wait_until(
        lambda: (
            patient.connection.execute(
                "SELECT n_dead_tup FROM pg_stat_all_tables WHERE relid = 'pgqueue.jobs'::regclass"
            ).fetchone()[0]
            >= 300
        )
    )


def bloat(patient: Patient, stack: contextlib.ExitStack) -> None:
    patient.connection.execute(
        "SELECT pgqueue.enqueue('send', delay_seconds => 60) FROM generate_series(1, 2000)"
    )
    patient.connection.execute("DELETE FROM pgqueue.jobs WHERE id < 1999")
    patient.connection.execute("VACUUM pgqueue.jobs")


def live_job(set_clause: str) -> Callable[[Patient, contextlib.ExitStack], None]:
    def plant(patient: Patient, stack: contextlib.ExitStack) -> None:
        task(patient)
        patient.connection.execute("SELECT pgqueue.enqueue('send', delay_seconds => 60)")
        patient.connection.execute(f"UPDATE pgqueue.jobs SET {set_clause}")

    return plant


def running_job(patient: Patient, stack: contextlib.ExitStack) -> None:
    task(patient)
    patient.connection.execute("SELECT pgqueue.enqueue('send')")
    patient.connection.execute(f"SELECT pgqueue.claim('default', '{WORKER}', 1)")
    patient.connection.execute("UPDATE pgqueue.jobs SET heartbeat_at = heartbeat_at - interval '2 min'")


def stalled_queue(patient: Patient, stack: contextlib.ExitStack) -> None:
    worker(patient)
    live_job("state = 'ready', run_at = clock_timestamp() - interval '10 min'")(patient, stack)


def unknown_task(patient: Patient, stack: contextlib.ExitStack) -> None:
    worker(patient)
    patient.connection.execute("SELECT pgqueue.enqueue('mial')")


def mixed_versions(patient: Patient, stack: contextlib.ExitStack) -> None:
    worker(patient)
    worker(patient, version="0.2.0")


def forgotten_pause(patient: Patient, stack: contextlib.ExitStack) -> None:
    task(patient)
    patient.connection.execute("SELECT pgqueue.enqueue('send')")
    patient.connection.execute(
        "INSERT INTO pgqueue.queues (name, is_paused, updated_at) "
        "VALUES ('default', true, clock_timestamp() - interval '2 d')"
    )


FAULTS = [
    Fault("fsync", server_setting("fsync", "off"), "critical", says="destroys the database"),
    Fault("full_page_writes", server_setting("full_page_writes", "off"), "critical"),
    Fault(
        "synchronous_commit",
        database_setting("SET synchronous_commit = off"),
        "critical",
        says="acknowledged",
    ),
    Fault("autovacuum", server_setting("autovacuum", "off"), "critical"),
    Fault("track_counts", server_setting("track_counts", "off"), "critical"),
    Fault("read_only", database_setting("SET default_transaction_read_only = on"), "critical"),
    # Too short by the bound, and long enough for the examination itself on a busy machine.
    Fault(
        "statement_timeout", database_setting("SET statement_timeout = '4900ms'"), "warning", says="4,900 ms"
    ),
    Fault(
        "connections_database",
        database_setting("CONNECTION LIMIT 3"),
        "critical",
        says="3 of the 3 connections",
    ),
    Fault("connections", sql("SELECT 1"), "warning", {"connections": 0.01}),
    Fault("superuser", superuser_worker, "warning"),
    Fault("wraparound", sql("SELECT 1"), "critical", {"transaction_age": 0.0}),
    Fault("notifications", sql("SELECT 1"), "critical", {"notifications": 0.0}),
    Fault("schema_new", sql("UPDATE pgqueue.alembic_version SET version_num = '0000'"), "critical"),
    Fault(
        "functions_differ",
        sql("UPDATE pgqueue.definitions SET checksum = 'x' WHERE object LIKE '%%ring(%%'"),
        "critical",
        says="workers refuse to start",
    ),
    Fault("table_missing", sql("DROP TABLE pgqueue.schedule_runs"), "critical", says="pgqueue.schedule_runs"),
    Fault("view_missing", sql("DROP VIEW pgqueue.job_counts"), "critical", says="pgqueue.job_counts"),
    Fault(
        "schema_damaged",
        sql("ALTER TABLE pgqueue.schedules RENAME COLUMN next_tick TO tick"),
        "critical",
        says="next_tick",
    ),
    Fault(
        "function_missing", sql("DROP FUNCTION pgqueue.prune_processed"), "critical", says="prune_processed"
    ),
    Fault(
        "trigger_missing",
        sql("DROP TRIGGER jobs_bell ON pgqueue.jobs"),
        "critical",
        says="jobs_bell on pgqueue.jobs",
    ),
    Fault("trigger_disabled", sql("ALTER TABLE pgqueue.jobs DISABLE TRIGGER jobs_fill"), "critical"),
    Fault("index_missing", sql("DROP INDEX pgqueue.jobs_running_slot"), "critical", says="jobs_running_slot"),
    Fault("index_invalid", invalid_index, "critical", says="jobs_due"),
    Fault(
        "unlogged", sql("ALTER TABLE pgqueue.dead_jobs SET UNLOGGED"), "critical", says="pgqueue.dead_jobs"
    ),
    Fault("autovacuum_table", sql("ALTER TABLE pgqueue.jobs SET (autovacuum_enabled = off)"), "critical"),
    Fault(
        "autovacuum_settings",
        sql("ALTER TABLE pgqueue.jobs RESET (autovacuum_vacuum_scale_factor)"),
        "warning",
    ),
    Fault("dead_rows", dead_rows, "warning", {"dead_rows": 200}, says="300 dead rows to 0 live ones"),
    Fault("bloat", bloat, "warning", {"bloat_bytes": 100_000, "bloat_bytes_a_row": 10_000}),
    Fault(
        "partition_missing",
        sql(
            "DO $$ DECLARE part text; BEGIN FOR part IN SELECT inhrelid::regclass::text FROM "
            "pg_inherits WHERE inhparent = 'pgqueue.finished_jobs'::regclass LOOP "
            "EXECUTE 'DROP TABLE ' || part; END LOOP; END $$"
        ),
        "critical",
    ),
    Fault(
        "partition_default",
        sql("CREATE TABLE pgqueue.rest PARTITION OF pgqueue.finished_jobs DEFAULT"),
        "warning",
    ),
    Fault(
        "idle_in_transaction",
        session("SELECT count(*) FROM pgqueue.jobs"),
        "warning",
        {"snapshot_seconds": 0},
        says="(batch report as app",
    ),
    Fault(
        "prepared_transaction",
        sql("BEGIN", "SELECT pgqueue.enqueue('send')", "PREPARE TRANSACTION 'left'"),
        "critical",
        {"snapshot_seconds": 0},
        says="'left' of app",
    ),
    Fault(
        "slot_unused",
        lambda patient, stack: (
            patient.admin.execute("SELECT pg_create_physical_replication_slot('left', true)"),
            stack.callback(patient.admin.execute, "SELECT pg_drop_replication_slot('left')"),
        ),
        "critical",
    ),
    Fault("lock_wait", lock_wait, "critical", {"lock_wait_seconds": 0.0}, says="(producer) has waited"),
    Fault("leases_expired", running_job, "critical", says="the leases of 1 job ended"),
    Fault("promotion_late", live_job("run_at = clock_timestamp() - interval '2 min'"), "critical"),
    Fault(
        "schedules_late",
        sql(
            "INSERT INTO pgqueue.schedules (name, cron, task, next_tick) "
            "VALUES ('nightly', '0 3 * * *', 'send', clock_timestamp() - interval '1 h')"
        ),
        "critical",
        says="nightly",
    ),
    Fault(
        "schedule_unreadable",
        sql("INSERT INTO pgqueue.schedules (name, cron, task) VALUES ('nightly', 'nonsense', 'send')"),
        "critical",
        says="the schedule 'nightly' never fires: cron 'nonsense' has 1 field",
    ),
    Fault("task_unknown", unknown_task, "critical", says="mial"),
    Fault(
        "queue_unserved",
        live_job("state = 'ready', run_at = clock_timestamp() - interval '2 min'"),
        "critical",
        says="no live worker serves the queue 'default', where a job has waited for 2 min",
    ),
    Fault("queue_stalled", stalled_queue, "critical", says="run nothing of the queue 'default'"),
    Fault("versions_mixed", mixed_versions, "warning", says="0.1.0, 0.2.0"),
    Fault("pause_forgotten", forgotten_pause, "warning"),
    Fault(
        "breaker_forgotten",
        sql(
            "INSERT INTO pgqueue.breakers (name, state, opened_at) "
            "VALUES ('bank', 'open', clock_timestamp() - interval '2 d')"
        ),
        "warning",
        says="'bank' was opened by hand",
    ),
    Fault(
        "clock_set_back",
        sql("INSERT INTO pgqueue.tasks (name, seen_at) VALUES ('send', clock_timestamp() + interval '1 h')"),
        "critical",
        says="1 h in the future",
    ),
]


MENDED_BY_ITS_COMMAND = {
    *(
        "synchronous_commit",
        "read_only",
        "statement_timeout",
        "trigger_disabled",
        "index_missing",
        "index_invalid",
    ),
    *("unlogged", "autovacuum_table", "autovacuum_settings", "dead_rows", "bloat"),
    *("partition_missing", "partition_default"),
}


def follow(patient: Patient, command: str) -> None:
    """Do what a psql command line says, as it does it: one statement after the other in one session."""
    words = shlex.split(command, comments=True)
    assert words[:2] == ["psql", "$PGQUEUE_DSN"]
    with psycopg.connect(patient.dsn, autocommit=True) as connection:
        for flag, statement in zip(words[2::2], words[3::2], strict=True):
            assert flag == "-c"
            connection.execute(statement)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_a_planted_fault_is_found_with_what_to_do(patient, fault):
    with contextlib.ExitStack() as stack:
        fault.plant(patient, stack)
        if fault.code == "prepared_transaction":
            stack.callback(patient.admin.execute, "ROLLBACK PREPARED 'left'")

        findings = patient.findings(**(fault.thresholds or {}))

        assert list(findings) == [fault.code]
        found = findings[fault.code]
        assert (found.severity, "\n" in found.sentence) == (fault.severity, False)
        assert fault.says in found.sentence
        assert found.next
        if fault.code in MENDED_BY_ITS_COMMAND:
            follow(patient, found.next[0])
            assert patient.codes(**(fault.thresholds or {})) == []
        assert all(shlex.split(command, comments=True) for command in found.next)


@pytest.mark.parametrize(
    ("changes_pid", "options", "code"),
    [(True, {}, "pooler"), (False, {"keepalives": 0}, "keepalives"), (False, {}, None)],
)
def test_what_lies_between_us_and_the_server_is_found(patient, changes_pid, options, code):
    with proxy(patient.dsn, changes_pid=changes_pid) as dsn:
        patient.dsn = make_conninfo(dsn, **options)

        assert patient.codes() == ([code] if code else [])


def test_a_wrong_clock_of_this_machine_and_a_slow_driver_are_found(patient):
    path = os.pathsep.join([str(ROOT / "tests" / "faults" / "skew"), os.environ.get("PYTHONPATH", "")])
    skewed = run_pgqueue("doctor", dsn=patient.dsn, env={"PYTHONPATH": path, "FAULTS_SKEW_SECONDS": "-3600"})
    slow = run_pgqueue("doctor", "--json", dsn=patient.dsn, env={"PSYCOPG_IMPL": "python"})

    assert skewed.returncode == 1
    assert skewed.stdout.startswith("warning: this machine's clock is 1 h behind the database's")
    if "no libpq" in slow.stderr:
        pytest.skip("psycopg finds no libpq to run in pure Python with")
    assert slow.returncode == 1
    assert '"code": "psycopg_python"' in slow.stdout


def test_a_standby_is_found(new_node):
    node = new_node()
    with psycopg.connect(node.app_dsn, autocommit=True) as connection:
        job_id = connection.execute("SELECT pgqueue.enqueue('send')").fetchone()[0]
    node.stop()
    make_standby(node.folder)
    node.restart()

    examined = run_pgqueue("doctor", dsn=node.app_dsn)
    asked = run_pgqueue("jobs", "why", str(job_id), dsn=node.app_dsn)

    assert examined.returncode == 3
    assert examined.stdout.startswith(
        "critical: this server is a standby: no job can be enqueued or run here\n"
    )
    assert f"job {job_id} (send) is ready: this server is a standby" in asked.stdout


def test_a_prepared_transaction_is_named_so_that_no_shell_and_no_sql_executes_its_name(patient):
    patient.connection.execute("BEGIN; SELECT pgqueue.enqueue('send')")
    patient.connection.execute("PREPARE TRANSACTION 'it''s; $(touch x)'")

    try:
        [finding] = patient.findings(snapshot_seconds=0).values()
    finally:
        patient.connection.execute("ROLLBACK PREPARED 'it''s; $(touch x)'")

    assert finding.next == [write_psql("ROLLBACK PREPARED 'it''s; $(touch x)'")]
    assert patient.codes(snapshot_seconds=0) == []


def test_a_pooler_past_which_a_way_leads_is_no_fault(patient, monkeypatch):
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", patient.dsn)
    with proxy(patient.dsn, changes_pid=True) as dsn:
        patient.dsn = dsn

        assert patient.codes() == []


def test_of_a_pooler_it_is_said_how_to_lead_one_session_past_it(patient):
    with proxy(patient.dsn, changes_pid=True) as dsn:
        patient.dsn = dsn
        [finding] = patient.findings().values()

    assert finding.next == ["export PGQUEUE_LISTEN_DSN='host=the-server-itself ...'   # for pgqueue worker"]


# How it is told.


def test_of_schedules_without_a_tick_only_those_that_cannot_be_read_are_a_fault(patient):
    patient.connection.execute(
        "INSERT INTO pgqueue.schedules (name, cron, timezone, task, is_paused) VALUES "
        "('new', '@daily', 'UTC', 'send', false), ('off', 'nonsense', 'UTC', 'send', true), "
        "('martian', '@daily', 'Mars', 'send', false), ('never', '0 0 30 2 *', 'UTC', 'send', false)"
    )
    patient.connection.execute(
        "INSERT INTO pgqueue.schedules (name, cron, task, source, app, seen_at) "
        "VALUES ('gone', 'nonsense', 'send', 'code', 'shop', clock_timestamp() - interval '9 days')"
    )

    found = diagnosis.examine(patient.connection).findings

    assert {finding.code for finding in found} == {"schedule_unreadable"}
    assert [finding.sentence.split(" never fires: ")[0] for finding in found] == [
        "the schedule 'martian'",
        "the schedule 'never'",
    ]


def test_when_all_workers_are_gone_one_line_says_so_for_all_queues(patient):
    task(patient)
    patient.connection.execute(
        "SELECT pgqueue.enqueue('send', queue => 'q' || g) FROM generate_series(1, 9) AS g"
    )
    patient.connection.execute("UPDATE pgqueue.jobs SET run_at = run_at - interval '2 min'")

    [finding] = patient.findings().values()

    assert finding.sentence == (
        "no live worker serves the queues 'q1', 'q2', 'q3', 'q4', 'q5' and 4 more, "
        "where a job has waited for 2 min"
    )


def test_the_worst_comes_first_and_decides_the_exit_code(patient):
    mixed_versions(patient, contextlib.ExitStack())
    warned = run_pgqueue("doctor", dsn=patient.dsn)
    patient.connection.execute("DROP INDEX pgqueue.jobs_due")
    critical = run_pgqueue("doctor", dsn=patient.dsn)

    assert warned.returncode == 1
    assert warned.stdout == (
        "warning: live workers run different versions of pgqueue: 0.1.0, 0.2.0\n  pgqueue workers\n"
    )
    assert critical.returncode == 3
    assert critical.stdout.startswith("critical: the index jobs_due is missing")
    assert '  psql "$PGQUEUE_DSN" -c \'CREATE INDEX CONCURRENTLY jobs_due ON pgqueue.jobs' in critical.stdout
    assert "\n\nwarning: live workers" in critical.stdout


def test_the_command_that_it_names_for_an_index_makes_it_again(patient):
    for name in ("jobs_running_slot", "jobs_blocked", "finished_jobs_id"):
        patient.connection.execute(f"DROP INDEX pgqueue.{name}")
    for finding in patient.findings().values():
        assert finding.code == "index_missing"
    with psycopg.connect(patient.dsn, autocommit=True) as connection:
        for finding in diagnosis.examine(connection).findings:
            patient.connection.execute(shlex.split(finding.next[0])[-1])

    assert patient.codes() == []


def test_a_script_gets_one_document(patient):
    mixed_versions(patient, contextlib.ExitStack())

    ended = run_pgqueue("doctor", "--json", dsn=patient.dsn)

    assert ended.returncode == 1
    assert '"severity": "warning"' in ended.stdout
    assert '"checks": 18' in ended.stdout


def test_what_the_role_may_not_see_is_said_and_is_no_fault(patient):
    patient.admin.execute("REVOKE pg_read_all_stats FROM app")
    try:
        ended = run_pgqueue("doctor", dsn=patient.dsn)
    finally:
        patient.admin.execute("GRANT pg_read_all_stats TO app")

    assert (ended.returncode, ended.stdout) == (0, "")
    assert "GRANT pg_read_all_stats TO app" in ended.stderr


def test_a_question_that_may_not_be_asked_keeps_none_of_the_others(patient):
    patient.admin.execute("REVOKE ALL ON pgqueue.schedules FROM app")
    mixed_versions(patient, contextlib.ExitStack())
    patient.admin.execute("ALTER TABLE pgqueue.schedules OWNER TO CURRENT_USER")

    ended = run_pgqueue("doctor", dsn=patient.dsn)

    assert ended.returncode == 1
    assert "not examined: work: permission denied for table schedules" in ended.stderr
    assert "different versions" in ended.stdout


@contextlib.contextmanager
def login(patient: Patient, *grants: str) -> Iterator[str]:
    """Give the DSN of a role that has these rights in the patient's database and no others."""
    patient.admin.execute("CREATE ROLE shop LOGIN")
    for grant in grants:
        patient.admin.execute(f"{grant} TO shop")
    try:
        yield make_conninfo(patient.dsn, user="shop")
    finally:
        patient.admin.execute("DROP OWNED BY shop")
        patient.admin.execute("DROP ROLE shop")


def test_a_role_that_may_not_look_is_not_told_that_all_is_well(patient):
    with login(patient, "GRANT USAGE ON SCHEMA pgqueue") as dsn:
        told, listed = run_pgqueue("doctor", dsn=dsn), run_pgqueue("doctor", "--json", dsn=dsn)

    assert (told.returncode, told.stdout, listed.returncode) == (1, "", 1)
    assert "not examined: work: permission denied for table " in told.stderr
    document = json.loads(listed.stdout)
    assert (document["findings"], document["checks"]) == ([], 18)
    assert 0 < document["examined"] < 18
    refused = [line for line in document["unanswered"] if "pg_read_all_stats" not in line]
    assert document["examined"] == 18 - len(refused)
    assert told.stderr.endswith(f"nothing found ({document['examined']} of 18 checks)\n")


def test_a_database_without_a_schema_is_critical(production):
    with make_database(production.dsn("postgres")) as dsn:
        ended = run_pgqueue("doctor", dsn=dsn)

    assert ended.returncode == 3
    assert ended.stdout == "critical: the database has no schema 'pgqueue'\n  pgqueue migrate\n"
    assert ended.stderr == "not examined: the schema, sessions, work: there is no schema\n"


def test_functions_of_a_newer_pgqueue_are_no_fault(patient):
    patient.connection.execute(
        "UPDATE pgqueue.definitions SET checksum = 'x', version = '99.0' WHERE object ~ 'promote'"
    )

    assert patient.codes() == []


def test_a_table_that_is_gone_keeps_no_other_question_from_being_asked(patient):
    patient.connection.execute("DROP TABLE pgqueue.schedules CASCADE")
    mixed_versions(patient, contextlib.ExitStack())

    ended = run_pgqueue("doctor", dsn=patient.dsn)

    assert ended.returncode == 3
    assert ended.stdout.startswith("critical: tables are missing: pgqueue.schedules")
    assert "different versions" in ended.stdout
    assert "not examined: work: " in ended.stderr


@pytest.mark.parametrize("plant", ["newer schema", "older functions"])
def test_what_a_worker_refuses_to_start_with_is_critical_for_all_who_are_asked(patient, plant):
    if plant == "newer schema":
        patient.connection.execute("UPDATE pgqueue.alembic_version SET version_num = '9999'")
    else:
        patient.connection.execute("UPDATE pgqueue.definitions SET checksum = 'x', version = '0.0.1'")

    codes = [
        run_pgqueue(*words, dsn=patient.dsn).returncode
        for words in (("doctor",), ("health",), ("migrate", "--check"))
    ]

    assert codes == [3, 3, 3]
