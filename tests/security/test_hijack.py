"""Nobody puts a thing of their own in the place of one of ours, and so acts with our rights."""

from __future__ import annotations

import json

import pytest
from psycopg import sql

# Everything that a caller may make in a schema of their own to be taken for ours, and what it would do.
STAND_INS = """
CREATE TABLE {place}.stolen (what text);
CREATE TABLE {place}.jobs (LIKE pgqueue_copy.jobs);
CREATE TABLE {place}.tasks (LIKE pgqueue_copy.tasks);
CREATE TABLE {place}.queues (LIKE pgqueue_copy.queues);
CREATE TYPE {place}.verdict AS (place tid);
"""
FUNCTIONS = """
CREATE FUNCTION {place}.definition(task text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'hijacked as %', current_user; END $$;
CREATE FUNCTION {place}.fill_key(text, jsonb, jsonb, text, text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'hijacked as %', current_user; END $$;
CREATE FUNCTION {place}.ring(text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'hijacked as %', current_user; END $$;
CREATE FUNCTION {place}.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'hijacked as %', current_user; END $$;
CREATE FUNCTION {place}.jsonb_typeof(jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'hijacked as %', current_user; END $$;
CREATE FUNCTION {place}.say_equal(text, text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'hijacked as %', current_user; END $$;
CREATE OPERATOR {place}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {place}.say_equal);
"""


@pytest.fixture
def attacker(login):
    """A producer's session in which everything of its own comes first."""
    owner, producer = login("owner"), login("producer")
    owner.execute("CREATE SCHEMA evil")
    owner.execute("CREATE SCHEMA pgqueue_copy")
    for table in ("jobs", "tasks", "queues"):
        owner.execute(f"CREATE TABLE pgqueue_copy.{table} (LIKE pgqueue.{table})")
    owner.execute("GRANT USAGE ON SCHEMA pgqueue_copy TO PUBLIC")
    owner.execute("GRANT SELECT ON ALL TABLES IN SCHEMA pgqueue_copy TO PUBLIC")
    owner.execute(sql.SQL("GRANT ALL ON SCHEMA evil TO {}").format(sql.Identifier(producer.info.user)))
    producer.execute(STAND_INS.format(place="pg_temp").replace("TABLE pg_temp.", "TEMP TABLE "))
    producer.execute(STAND_INS.format(place="evil"))
    producer.execute(FUNCTIONS.format(place="evil"))
    producer.execute(FUNCTIONS.format(place="pg_temp"))
    producer.execute("SET search_path = pg_temp, evil, pg_catalog")
    yield producer
    producer.close()
    for schema in ("evil", "pgqueue_copy"):
        login("owner").execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.parametrize("settings", ["", "SET search_path = pgqueue"])
def test_the_stand_ins_catch_a_function_that_is_less_careful_than_ours(login, attacker, settings):
    owner = login("owner")
    owner.execute(
        "SET check_function_bodies = off; "
        "CREATE OR REPLACE FUNCTION pgqueue.careless() RETURNS void "
        f"LANGUAGE sql SECURITY DEFINER {settings} "
        "AS $$ INSERT INTO jobs (task) VALUES ('stolen') $$; "
        "GRANT EXECUTE ON FUNCTION pgqueue.careless TO PUBLIC"
    )

    try:
        for column in _required(attacker):
            attacker.execute(f"ALTER TABLE pg_temp.jobs ALTER {column} DROP NOT NULL")
        attacker.execute("GRANT ALL ON pg_temp.jobs TO PUBLIC")
        attacker.execute("SELECT pgqueue.careless()")

        assert attacker.execute("SELECT task FROM pg_temp.jobs").fetchall() == [("stolen",)]
    finally:
        owner.execute("DROP FUNCTION pgqueue.careless")


def _required(session) -> list[str]:
    """Give the columns of the temporary jobs that must not be NULL."""
    found = session.execute(
        "SELECT attname FROM pg_attribute "
        "WHERE attrelid = 'pg_temp.jobs'::regclass AND attnotnull AND attnum > 0"
    )
    return [row[0] for row in found.fetchall()]


@pytest.mark.parametrize(
    "call",
    [
        "SELECT pgqueue.enqueue('t', '{}')",
        "SELECT pgqueue.enqueue('t', '{}', unique_key => 'u', on_conflict => 'replace')",
        "SELECT pgqueue.enqueue_one('t', '{}', delay_seconds => 5)",
        """SELECT pgqueue.enqueue_many('[{"task": "t"}, {"task": "t", "unique_key": "w"}]')""",
        "INSERT INTO pgqueue.jobs (task, args) VALUES ('t', '{}')",
    ],
)
def test_what_a_producer_calls_uses_our_tables_functions_and_operators(attacker, login, call):
    login("owner").execute("INSERT INTO pgqueue.tasks (name, concurrency_key) VALUES ('t', 'k')")

    attacker.execute(call)
    attacker.execute(call)

    assert attacker.execute("SELECT count(*) FROM pg_temp.jobs").fetchone() == (0,)
    assert attacker.execute("SELECT count(*) FROM evil.jobs").fetchone() == (0,)
    stored = login("owner").execute("SELECT DISTINCT task, concurrency_key FROM pgqueue.jobs").fetchall()
    assert stored == [("t", "k")]


def test_the_rest_is_as_safe(accounts, login):
    """Every function that acts with its owner's rights finds our names first and its caller's last."""
    careless = login("owner").execute(
        "SELECT oid::regprocedure::text FROM pg_proc "
        "WHERE pronamespace = 'pgqueue'::regnamespace AND prosecdef "
        "AND NOT 'search_path=pgqueue, pg_temp' = ANY (coalesce(proconfig, '{}'))"
    )

    assert careless.fetchall() == []


def test_what_a_role_may_call_and_what_its_tables_ask_of_it_runs_with_our_rights_or_needs_none(login):
    """A function that reads or writes tables runs with the owner's rights, except for the listed ones."""
    with_its_callers_rights = {
        "begin_once": "ends frozen sessions of its caller's account",
        "end_lost_holder": "ends frozen sessions of its caller's account",
        "known_queues": "only reads, and whoever may call it may read",
        "ready_depth": "only reads, and whoever may call it may read",
    }

    others = (
        login("owner")
        .execute(
            "SELECT DISTINCT p.proname FROM pg_proc AS p "
            "CROSS JOIN LATERAL aclexplode(p.proacl) AS a "
            "WHERE p.pronamespace = 'pgqueue'::regnamespace AND NOT p.prosecdef AND a.grantee <> p.proowner "
            "AND p.prosrc ~ '\\m(jobs|dead_jobs|finished_jobs|processed_jobs|tasks|queues|workers|schedules"
            "|schedule_runs"
            "|rate_limits|breakers|pg_class)\\M' AND p.proname NOT IN ('ring')"
        )
        .fetchall()
    )

    assert {name for (name,) in others} == set(with_its_callers_rights)


HOSTILE = [
    "'",
    '"',
    "'; DROP TABLE pgqueue.jobs; --",
    '"; DROP SCHEMA pgqueue CASCADE; --',
    "$$",
    "%s",
    "{{schema}}",
    "a" * 100,
    "é" * 40,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_only_a_name(accounts, login, name, monkeypatch, capsys):
    from pgqueue.cli import main

    owner = login("owner")
    login("producer").execute(
        "SELECT pgqueue.enqueue(%s, '{}', queue => %s, concurrency_key => %s, unique_key => %s)", [name] * 4
    )
    monkeypatch.setenv("PGQUEUE_DSN", accounts.operator)

    codes = [
        main(list(command))
        for command in (
            ("jobs", "list", "--queue", name),
            ("queues", "pause", name),
            ("queues", "resume", name),
            ("limits", "set", name, "5/s"),
            ("limits", "remove", name),
            ("jobs", "cancel", "--task", name, "--yes"),
        )
    ]

    assert codes == [0] * 6
    assert owner.execute(
        "SELECT count(*) FROM pgqueue.finished_jobs WHERE queue = %s", [name]
    ).fetchone() == (1,)
    capsys.readouterr()


def test_a_schema_that_is_no_plain_name_is_refused_before_any_sql(capsys):
    from pgqueue.cli import main

    for name in ("a;b", 'a"b', "a.b", "A", "pg_x", "a" * 49, "", "a'b", "é"):
        assert main(["roles", "--sql", "--schema", name]) == 2
    assert capsys.readouterr().out == ""


def test_a_task_is_looked_up_by_name_and_never_imported(accounts, login, tmp_path):
    from tests.process.support import Queue, worker

    queue = Queue(accounts.owner)
    names = [
        "os.system",
        "builtins.eval",
        "tests.security.jobs.plain",
        "tests.security.jobs:plain",
        "__import__",
    ]

    jobs = [queue.insert(name, json.dumps({"command": f"touch {tmp_path}/owned"})) for name in names]
    with worker(
        accounts.worker, tmp_path, "--unknown-task-grace-seconds", "0", app="tests.security.jobs:app"
    ):
        for job in jobs:
            queue.wait_for_state(job, "dead")

    assert not (tmp_path / "owned").exists()
    queue.close()
