"""`pgqueue log`: nobody acts on the queue without an entry, whatever client or statement they use."""

from __future__ import annotations

import json

import psycopg
import pytest

from pgqueue import admin, audit, database
from pgqueue.sql.inspect import LiveFilter

ACTOR = "ann@laptop"


@pytest.fixture(autouse=True)
def _actor(monkeypatch):
    monkeypatch.setenv("PGQUEUE_ACTOR", ACTOR)


@pytest.fixture
def said(pgqueue):
    """Say what the log tells, the latest last, without when."""

    def read(*arguments):
        entries = pgqueue("log", "--json", *arguments).json
        return [
            (entry["action"], entry["subject"] or entry["jobs"], entry["actor"])
            for entry in reversed(entries)
        ]

    return read


def test_what_is_done_to_a_queue_is_written_down_with_who_and_why(pgqueue, queue):
    role = queue.one("SELECT session_user")

    pgqueue("queues", "pause", "mail", "--for", "30m", "--reason", "provider is down", "--force")
    pgqueue("queues", "resume", "mail", "--slots", 2)
    pgqueue("queues", "limit", "mail", 5)
    pgqueue("queues", "limit", "mail", "none")

    lines = pgqueue("log").out.splitlines()
    assert lines[0].split() == ["AT", "WHEN", "WHO", "WHAT"]
    assert all(f"  {ACTOR} ({role})  " in line for line in lines[1:])
    told = [line.partition(f"({role})  ")[2] for line in lines[1:]]
    assert told[:4] == [
        "removed the limit of queue mail, which was 5",
        "limited queue mail to 5 running jobs, was 2",
        "limited queue mail to 2 running jobs",
        "resumed queue mail",
    ]
    assert told[4].startswith("paused queue mail until ")
    assert told[4].endswith(" UTC: provider is down")


def test_what_is_done_to_jobs_is_written_down_with_how_many_and_which(pgqueue, queue, said):
    waiting, running = queue.enqueue(queue="b"), queue.run()
    scheduled, dead, other = queue.enqueue(delay_seconds=60), queue.bury(queue="c"), queue.bury(queue="c")

    pgqueue("jobs", "cancel", waiting, running, "--reason", "wrong customer")
    pgqueue("jobs", "retry", scheduled)
    pgqueue("dlq", "redrive", dead)
    pgqueue("dlq", "purge", other, "--yes")

    assert said() == [
        ("jobs.cancel", 2, ACTOR),
        ("jobs.retry", 1, ACTOR),
        ("jobs.redrive", 1, ACTOR),
        ("jobs.purge", 1, ACTOR),
    ]
    text = pgqueue("log").out
    assert (
        f"cancelled 2 jobs ({waiting}, {running}), 1 of them running and asked to stop: wrong customer\n"
        in text
    )
    assert f"let job {scheduled} run at once\n" in text
    assert f"put back dead job {dead}\n" in text
    assert f"deleted dead job {other}\n" in text


def test_what_is_done_to_limits_breakers_schedules_and_keys_is_written_down(pgqueue, queue, said):
    queue.connection.execute("INSERT INTO pgqueue.breakers (name) VALUES ('bank')")
    queue.connection.execute(
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status) "
        "VALUES ('k', 'send', 'COMPLETED')"
    )
    for arguments in (
        ("limits", "set", "api", "5/s"),
        ("limits", "set", "api", "7/s"),
        ("limits", "remove", "api"),
        ("breakers", "open", "bank", "--for", "15m"),
        ("breakers", "close", "bank"),
        ("breakers", "set", "bank", "--max-failures", "3"),
        ("schedules", "add", "nightly", "0 3 * * *", "send", "--force"),
        ("schedules", "pause", "nightly"),
        ("schedules", "resume", "nightly"),
        ("schedules", "run-now", "nightly"),
        ("schedules", "remove", "nightly"),
        ("processed", "forget", "k"),
    ):
        ended = pgqueue(*arguments)
        assert ended.code == 0, (arguments, ended.err)

    assert said() == [
        ("limit.set", "api", ACTOR),
        ("limit.set", "api", ACTOR),
        ("limit.remove", "api", ACTOR),
        ("breaker.open", "bank", ACTOR),
        ("breaker.close", "bank", ACTOR),
        ("breaker.set", "bank", ACTOR),
        ("schedule.add", "nightly", ACTOR),
        ("schedule.pause", "nightly", ACTOR),
        ("schedule.resume", "nightly", ACTOR),
        ("schedule.run", "nightly", ACTOR),
        ("schedule.remove", "nightly", ACTOR),
        ("processed.forget", "k", ACTOR),
    ]
    text = pgqueue("log").out
    assert "set rate limit api to 7/s (burst 1), was 5/s (burst 1)\n" in text
    assert "opened breaker bank for 15 min\n" in text
    assert "set breaker bank: pinned=" in text


def test_a_plain_statement_of_any_client_is_written_down_like_a_command(queue, said):
    queue.connection.execute("INSERT INTO pgqueue.queues (name, is_paused) VALUES ('mail', true)")
    queue.connection.execute("UPDATE pgqueue.queues SET is_paused = false, max_running = 3")
    queue.connection.execute("UPDATE pgqueue.queues SET retention_seconds = 0")
    queue.connection.execute("DELETE FROM pgqueue.queues")
    queue.connection.execute("SELECT pgqueue.cancel(ARRAY[%s]::bigint[])", [queue.enqueue()])

    assert said() == [
        ("queue.pause", "mail", None),
        ("queue.resume", "mail", None),
        ("queue.limit", "mail", None),
        ("queue.retention", "mail", None),
        ("queue.reset", "mail", None),
        ("jobs.cancel", 1, None),
    ]


def test_an_actor_is_named_in_sql_for_the_transaction_and_no_longer(queue, said):
    with queue.connection.transaction():
        queue.connection.execute("SET LOCAL pgqueue.actor = 'bob'")
        queue.connection.execute("SELECT pgqueue.pause_queues(ARRAY['a'])")
    queue.connection.execute("SELECT pgqueue.pause_queues(ARRAY['b'])")

    assert said() == [("queue.pause", "a", "bob"), ("queue.pause", "b", None)]


@pytest.mark.parametrize("autocommit", [True, False])
def test_an_actor_in_python_leaves_the_transaction_to_the_caller(fast_dsn, connect, autocommit):
    connection = connect(fast_dsn, autocommit=autocommit)
    job_id = connection.execute("SELECT pgqueue.enqueue('send')").fetchone()[0]

    with database.acting("bob"):
        admin.cancel(connection, [job_id])

    is_idle = connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    assert is_idle is autocommit
    assert [entry.actor for entry in audit.read_log(connection)] == ["bob"]
    assert connection.execute("SELECT current_setting('pgqueue.actor', true)").fetchone()[0] in (
        ("", None) if autocommit else ("bob",)
    )


def test_what_was_rolled_back_or_changed_nothing_leaves_no_entry(pgqueue, queue, said):
    with queue.connection.transaction(force_rollback=True):
        queue.connection.execute("SELECT pgqueue.pause_queues(ARRAY['mail'])")
    queue.connection.execute("SELECT pgqueue.cancel(ARRAY[99]::bigint[])")
    pgqueue("dlq", "purge", 99, "--yes")
    pgqueue("queues", "resume", "mail")

    assert said() == []


def test_work_leaves_no_entry(queue, said):
    queue.connection.execute("SELECT pgqueue.rate_set('task:send', 1000, 1000)")
    queue.connection.execute("SELECT pgqueue.rate_set('api:*', 1000, 1000)")
    queue.connection.execute("INSERT INTO pgqueue.breakers (name, max_failures) VALUES ('bank', 1)")
    queue.connection.execute("DELETE FROM pgqueue.audit_log")

    queue.succeed()
    queue.connection.execute("INSERT INTO pgqueue.jobs (task, rate_key) VALUES ('send', 'api:7')")
    queue.claim()
    queue.bury()
    queue.connection.execute("SELECT pgqueue.report('bank', 1, 0, 5)")
    queue.connection.execute("SELECT pgqueue.rate_mend()")

    assert queue.one("SELECT state FROM pgqueue.breakers") == "open"
    assert queue.one("SELECT count(*) FROM pgqueue.rate_limits WHERE pattern IS NOT NULL") == 1
    assert said() == []


def test_a_limit_that_code_changed_is_told_apart_from_an_operators(pgqueue, queue):
    for rate in (5, 7):
        queue.connection.execute(
            "SELECT pgqueue.rate_declare(%s)",
            [json.dumps([{"name": "api", "tokens_per_second": rate, "burst": 1}])],
        )

    lines = pgqueue("log").out.splitlines()

    assert lines[1].endswith("to 7/s (burst 1), was 5/s (burst 1), as the code of a worker says")
    assert len(lines) == 3


def test_a_key_that_gets_a_limit_of_its_own_in_place_of_its_patterns_is_told(queue, said):
    queue.connection.execute("SELECT pgqueue.rate_set('api:*', 5)")
    queue.connection.execute("SELECT pgqueue.rate_make(ARRAY['api:7'])")

    queue.connection.execute("SELECT pgqueue.rate_set('api:7', 5)")

    assert said() == [("limit.set", "api:*", None), ("limit.set", "api:7", None)]


def test_the_batches_of_one_run_are_one_entry(queue, monkeypatch):
    monkeypatch.setattr(admin, "BATCH", 2)
    for _ in range(5):
        queue.enqueue()
    which = LiveFilter(states=["ready"])
    _, until = admin.count_live(queue.connection, which)

    list(admin.cancel_matching(queue.connection, which, until, "wrong"))

    [entry] = audit.read_log(queue.connection)
    assert (entry.action, entry.jobs) == ("jobs.cancel", 5)
    assert queue.one("SELECT count(*) FROM pgqueue.audit_log") == 3


def test_the_log_can_be_narrowed(pgqueue, queue, said):
    pgqueue("queues", "pause", "mail", "other", "--force")
    pgqueue("limits", "set", "api", "5/s")
    queue.connection.execute("UPDATE pgqueue.audit_log SET at = at - interval '1 h' WHERE subject = 'other'")

    assert said("mail") == [("queue.pause", "mail", ACTOR)]
    assert said("--action", "limit") == [("limit.set", "api", ACTOR)]
    assert said("--action", "queue.pause", "--since", "30m") == [("queue.pause", "mail", ACTOR)]
    assert said("--limit", 1) == [("limit.set", "api", ACTOR)]


def test_an_empty_log_says_so_on_stderr(pgqueue):
    ended = pgqueue("log")

    assert (ended.code, ended.out, ended.err) == (0, "", "nothing was done\n")


def test_without_being_told_the_program_says_its_account_and_machine(pgqueue, queue, monkeypatch):
    monkeypatch.delenv("PGQUEUE_ACTOR")
    monkeypatch.setenv("SUDO_USER", "ann")

    pgqueue("queues", "pause", "mail", "--force")

    [entry] = pgqueue("log", "--json").json
    assert entry["actor"].startswith("ann@")
    assert (entry["application"], entry["details"]) == ("pgqueue cli", {})


def test_a_role_that_may_act_cannot_write_entries_of_its_own(queue, connect, fast_dsn):
    queue.connection.execute("DROP ROLE IF EXISTS pgqueue_audit_test")
    queue.connection.execute("CREATE ROLE pgqueue_audit_test")
    try:
        queue.connection.execute("GRANT USAGE ON SCHEMA pgqueue TO pgqueue_audit_test")
        queue.connection.execute("GRANT SELECT, INSERT, UPDATE ON pgqueue.queues TO pgqueue_audit_test")
        mine = connect(fast_dsn)
        mine.execute("SET ROLE pgqueue_audit_test")

        mine.execute("INSERT INTO pgqueue.queues (name, is_paused) VALUES ('mail', true)")

        for forged in (
            "INSERT INTO pgqueue.audit_log (action, role, session_pid) VALUES ('queue.pause', 'boss', 1)",
            "DELETE FROM pgqueue.audit_log",
            "SELECT pgqueue.audit('queue.pause', 'mail', NULL, '{}')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                mine.execute(forged)
        login = queue.one("SELECT session_user")
        assert [(entry.action, entry.role) for entry in audit.read_log(queue.connection)] == [
            ("queue.pause", login)
        ]
    finally:
        queue.connection.execute("DROP OWNED BY pgqueue_audit_test")
        queue.connection.execute("DROP ROLE pgqueue_audit_test")


def test_what_was_done_long_ago_is_forgotten(queue):
    queue.connection.execute("SELECT pgqueue.pause_queues(ARRAY['a', 'b'])")
    queue.connection.execute("UPDATE pgqueue.audit_log SET at = at - interval '91 d' WHERE subject = 'a'")

    forgotten = queue.one("SELECT pgqueue.prune_audit_log(90 * 86400)")

    assert forgotten == 1
    assert queue.one("SELECT subject FROM pgqueue.audit_log") == "b"
    # Nor does anybody get rid of what he has just done.
    assert queue.one("SELECT pgqueue.prune_audit_log(0)") == 0


def test_a_rate_is_written_as_it_is_set(pgqueue, queue):
    for rate in ("1/min", "none", "1/d"):
        pgqueue("limits", "set", "api", rate)

    told = [row.partition(") ")[2] for row in pgqueue("log").rows]

    assert told == [
        "set rate limit api to 1/d (burst 1), was none",
        "set rate limit api to none, was 1/min (burst 1)",
        "set rate limit api to 1/min (burst 1)",
    ]


def test_an_action_that_nobody_took_is_not_said_to_be_none_at_all(pgqueue, queue):
    pgqueue("queues", "pause", "default")

    ended = pgqueue("log", "--action", "queue.pausee")

    assert (ended.code, ended.out, ended.err) == (0, "", "no entry matches\n")
