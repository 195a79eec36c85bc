"""Migrating: all or nothing, once however many try, the same by script, and never backwards."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from pgqueue import embedded, migrate
from pgqueue.errors import (
    ConfigurationError,
    DatabaseUnreachable,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
)
from tests.shape.test_schema import dump_schema
from tests.support import ROOT, make_database, run_pgqueue, wait_until

ADDED = "ALTER TABLE {{schema}}.workers ADD COLUMN region text;"
OTHER_BODY = ("migrations/functions/admin.sql", r"RETURN 0;", "RETURN -1;")
OTHER_RESULT = (
    "migrations/functions/views.sql",
    r"RETURNS bigint(.*SELECT )count\(\*\)",
    r"RETURNS text\1count(*)::text",
)
GONE = ("migrations/functions/partitions.sql", r"-- Partitions that lie wholly.*", "")


def run_from(folder: Path, *arguments: str, dsn: str) -> subprocess.CompletedProcess[str]:
    """Run the `pgqueue` that lies in that folder."""
    return subprocess.run(
        [sys.executable, "-m", "pgqueue", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PGQUEUE_DSN": dsn},
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
    )


class Checkout:
    """A copy of this checkout, to be edited into the pgqueue of another day and run as a program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "pgqueue", folder / "pgqueue", ignore=ignored)
        shutil.copytree(ROOT / "migrations", folder / "migrations", ignore=ignored)

    def edit(self, path: str, pattern: str, replacement: str) -> None:
        file = self.folder / path
        text, count = re.subn(pattern, replacement, file.read_text(), flags=re.DOTALL)
        assert count == 1
        file.write_text(text)

    def release(self, version: str) -> None:
        self.edit("pgqueue/__init__.py", r'__version__ = "[^"]*"', f'__version__ = "{version}"')

    def add_revision(self, text: str) -> None:
        (self.folder / "migrations/versions/0002_next.py").write_text(
            "from pgqueue.migrate import run\n"
            'revision, down_revision = "0002", "0001"\n'
            f"def upgrade(schema):\n    run({text!r}, schema)\n"
        )

    def run(self, *arguments: str, dsn: str) -> subprocess.CompletedProcess[str]:
        return run_from(self.folder, *arguments, dsn=dsn)


@pytest.fixture
def other_day(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def psql(dsn: str, text: str) -> None:
    subprocess.run(
        [embedded.find_psql(), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", dsn],
        input=text,
        text=True,
        check=True,
        capture_output=True,
    )


# Once.


def test_the_second_time_there_is_nothing_to_do(empty_dsn):
    first = migrate.upgrade(empty_dsn)
    before = dump_schema(empty_dsn)

    second = migrate.upgrade(empty_dsn)

    assert first[0] == "0001"
    assert "functions/claim.sql" in first
    assert second == []
    assert dump_schema(empty_dsn) == before


def test_of_eight_processes_at_once_one_migrates_and_the_others_find_it_done(empty_dsn, connect):
    starter = connect(empty_dsn)
    starter.execute("SELECT pg_advisory_lock(hashtextextended('pgqueue.migrate', 0))")

    def wait_at_the_start() -> bool:
        waiting = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return starter.execute(waiting).fetchone() == (8,)

    with ThreadPoolExecutor(8) as pool:
        processes = [pool.submit(run_pgqueue, "migrate", dsn=empty_dsn) for _ in range(8)]
        wait_until(wait_at_the_start, 60)
        starter.execute("SELECT pg_advisory_unlock_all()")
    ended = [process.result() for process in processes]

    assert [process.returncode for process in ended] == [0] * 8
    assert [process.stdout.split()[0] for process in ended if process.stdout] == ["0001"]
    migrate.check(empty_dsn)


def test_threads_of_one_process_may_migrate_at_once(empty_dsn):
    schemas = ["one", "two", "one", "two"]

    with ThreadPoolExecutor(4) as pool:
        applied = list(pool.map(lambda schema: migrate.upgrade(empty_dsn, schema), schemas))

    assert sorted(map(bool, applied)) == [False, False, True, True]
    assert all(migrate.current(empty_dsn, schema) == "0001" for schema in schemas)


def test_a_migration_that_fails_changes_nothing(dsn, other_day):
    before = dump_schema(dsn)
    other_day.add_revision(ADDED + "SELECT 1 / 0;")

    ended = other_day.run("migrate", dsn=dsn)

    assert (ended.returncode, ended.stderr) == (1, "pgqueue: division by zero\n")
    assert dump_schema(dsn) == before
    assert migrate.current(dsn) == "0001"


# Where.


def test_two_schemas_in_one_database_do_not_meet(empty_dsn, connect):
    migrate.upgrade(empty_dsn)
    migrate.upgrade(empty_dsn, "other")
    connection = connect(empty_dsn)

    connection.execute("SELECT other.enqueue('t')")

    def count(schema: str) -> int:
        return connection.execute(f"SELECT count(*) FROM {schema}.jobs").fetchone()[0]

    assert (count("pgqueue"), count("other")) == (0, 1)
    outside = connection.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace"
    ).fetchall()
    assert outside == []


def test_the_bells_and_keys_of_two_schemas_are_different_locks(empty_dsn, connect):
    migrate.upgrade(empty_dsn)
    migrate.upgrade(empty_dsn, "other")
    sleeper, inserter = connect(empty_dsn), connect(empty_dsn)

    asleep = sleeper.execute("SELECT pgqueue.rest('q', false), other.rest('q', false)").fetchone()
    channels = inserter.execute("SELECT pgqueue.bell_channel('q'), other.bell_channel('q')").fetchone()
    keys = inserter.execute("SELECT pgqueue.key_lock('k') = other.key_lock('k')").fetchone()

    assert asleep == ("asleep", "asleep")
    assert channels == ("pgqueue.q", "other.q")
    assert keys == (False,)


@pytest.mark.parametrize("name", ["Pgqueue", "a-b", "pg_queue", "x" * 49, "", 'a"; DROP SCHEMA public; --'])
def test_a_name_that_would_need_quotes_is_refused(empty_dsn, name):
    for ask in (migrate.upgrade, migrate.check, migrate.current):
        with pytest.raises(ConfigurationError, match="cannot name the schema"):
            ask(empty_dsn, name)
    with pytest.raises(ConfigurationError, match="cannot name the schema"):
        migrate.render(name)


def test_a_word_of_sql_is_refused(empty_dsn):
    with pytest.raises(ConfigurationError, match="'user' cannot name the schema: it is a word of SQL"):
        migrate.upgrade(empty_dsn, "user")


def test_a_role_that_owns_the_schema_needs_no_right_to_make_schemas(empty_dsn, connect):
    connect(empty_dsn).execute(
        "DROP ROLE IF EXISTS pgqueue_test_owner; CREATE ROLE pgqueue_test_owner LOGIN; "
        "CREATE SCHEMA pgqueue AUTHORIZATION pgqueue_test_owner"
    )

    try:
        applied = migrate.upgrade(psycopg.conninfo.make_conninfo(empty_dsn, user="pgqueue_test_owner"))
    finally:
        connect(empty_dsn).execute("DROP OWNED BY pgqueue_test_owner CASCADE; DROP ROLE pgqueue_test_owner")

    assert applied[0] == "0001"


def test_a_database_that_is_not_there_is_named_in_one_line():
    with pytest.raises(DatabaseUnreachable, match="cannot connect to /nowhere"):
        migrate.upgrade("host=/nowhere dbname=x")


# By script.


def test_the_script_does_what_migrate_does(dsn, empty_dsn):
    script = run_pgqueue("migrate", "--sql").stdout

    psql(empty_dsn, script)

    assert dump_schema(empty_dsn) == dump_schema(dsn)
    assert migrate.upgrade(empty_dsn) == []
    migrate.check(empty_dsn)


def test_the_script_since_a_revision_does_what_migrate_does(dsn, empty_dsn, postgres, other_day):
    migrate.upgrade(empty_dsn)
    other_day.release("99.0")
    other_day.add_revision(ADDED)
    other_day.edit(*OTHER_RESULT)
    other_day.edit(*GONE)

    psql(empty_dsn, other_day.run("migrate", "--sql", "--since", "0001", dsn=dsn).stdout)
    online = other_day.run("migrate", dsn=dsn)

    assert online.returncode == 0
    with make_database(postgres.dsn) as fresh:
        other_day.run("migrate", dsn=fresh)
        assert dump_schema(empty_dsn) == dump_schema(dsn) == dump_schema(fresh)
    assert other_day.run("migrate", "--check", dsn=empty_dsn).returncode == 0


def test_a_revision_nobody_knows_is_refused():
    ended = run_pgqueue("migrate", "--sql", "--since", "0009")

    assert (ended.returncode, ended.stderr) == (2, "pgqueue: no revision '0009'; known: 0001\n")


# Functions.


def test_a_function_whose_text_changed_is_replaced_and_keeps_its_grants(dsn, connect, other_day):
    connection = connect(dsn)
    before = connection.execute("SELECT 'pgqueue.promote'::regproc::oid").fetchone()
    connection.execute("GRANT EXECUTE ON FUNCTION pgqueue.promote TO pg_monitor")
    other_day.edit(*OTHER_BODY)

    ended = other_day.run("migrate", dsn=dsn)

    assert ended.stdout == "functions/admin.sql\n"
    assert connection.execute("SELECT pgqueue.promote()").fetchone() == (-1,)
    assert connection.execute("SELECT 'pgqueue.promote'::regproc::oid").fetchone() == before
    granted = "SELECT has_function_privilege('pg_monitor', 'pgqueue.promote(integer)', 'EXECUTE')"
    assert connection.execute(granted).fetchone() == (True,)


def test_a_function_whose_result_changed_is_made_anew(dsn, connect, other_day):
    other_day.edit(*OTHER_RESULT)

    ended = other_day.run("migrate", dsn=dsn)

    assert ended.stdout == "functions/views.sql\n"
    assert connect(dsn).execute("SELECT pgqueue.ready_depth('q')").fetchone() == ("0",)


def test_what_has_gone_from_the_files_is_dropped_and_nothing_else(dsn, connect, other_day):
    connection = connect(dsn)
    connection.execute("CREATE FUNCTION pgqueue.their_own() RETURNS integer LANGUAGE sql RETURN 1")
    other_day.edit(*GONE)

    ended = other_day.run("migrate", dsn=dsn)

    assert ended.stdout == "DROP FUNCTION pgqueue.expired_partitions(retention interval)\n"
    left = "SELECT to_regproc('pgqueue.expired_partitions'), pgqueue.their_own()"
    assert connection.execute(left).fetchone() == (None, 1)


def test_what_somebody_built_on_a_function_stops_the_migration_that_would_drop_it(dsn, connect, other_day):
    connect(dsn).execute("CREATE VIEW depth AS SELECT pgqueue.ready_depth('q')")
    other_day.edit(*OTHER_RESULT)

    ended = other_day.run("migrate", dsn=dsn)

    assert ended.returncode == 1
    assert "other objects depend on it" in ended.stderr


def test_functions_of_a_newer_pgqueue_are_good_enough_and_left_alone(dsn, connect, other_day):
    other_day.release("99.0")
    other_day.edit(*OTHER_BODY)
    other_day.run("migrate", dsn=dsn)

    migrate.check(dsn)
    applied = migrate.upgrade(dsn)

    assert applied == []
    assert connect(dsn).execute("SELECT pgqueue.promote()").fetchone() == (-1,)


def test_each_function_is_taken_from_its_file_as_a_drop_names_it():
    definitions = {definition.object: definition for definition in migrate.definitions("pgqueue")}

    assert (
        "FUNCTION pgqueue.complete(job_ids bigint[], tokens uuid[], results jsonb[], reasons text[])"
        in definitions
    )
    assert "TRIGGER jobs_bell ON pgqueue.jobs" in definitions
    assert "VIEW pgqueue.job_counts" in definitions
    text = "".join(path.read_text() for path in (ROOT / "migrations/functions").glob("*.sql"))
    assert (
        len(definitions)
        == text.count("CREATE OR REPLACE ")
        == len(re.findall(r"^CREATE ", text, re.MULTILINE))
    )


def test_no_placeholder_is_left_in_what_is_run():
    assert "{{" not in migrate.render("other")


# The check.


def test_a_schema_that_is_not_there_is_missing(empty_dsn):
    with pytest.raises(SchemaMissing, match=r"no schema 'pgqueue'; run: pgqueue migrate$"):
        migrate.check(empty_dsn)

    assert migrate.current(empty_dsn) is None


def test_an_older_revision_is_too_old_and_a_newer_one_too_new(dsn, other_day):
    other_day.add_revision(ADDED)

    before = other_day.run("migrate", "--check", dsn=dsn)
    other_day.run("migrate", dsn=dsn)

    assert before.returncode == 3
    assert "is at revision 0001, this pgqueue needs 0002; run: pgqueue migrate" in before.stderr
    for ask in (migrate.check, migrate.upgrade):
        with pytest.raises(SchemaTooNew, match="is at revision 0002, this pgqueue knows up to 0001"):
            ask(dsn)


def test_older_functions_are_too_old(dsn, connect):
    connect(dsn).execute(
        "UPDATE pgqueue.definitions SET version = '0.0.1', checksum = 'older' WHERE object ~ 'promote'"
    )

    with pytest.raises(SchemaTooOld, match=r"with functions .*; run: pgqueue migrate$"):
        migrate.check(dsn)

    assert migrate.upgrade(dsn) == ["functions/admin.sql"]
    migrate.check(dsn)


def test_the_check_writes_nothing_and_needs_no_alembic(dsn):
    code = (
        "import sys\n"
        "from pgqueue import migrate\n"
        f"migrate.check({dsn + ' options=-cdefault_transaction_read_only=on'!r})\n"
        "assert not {'alembic', 'sqlalchemy'} & set(sys.modules)\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


# The command.


def test_the_command_says_what_it_applied_and_whether_it_is_current(empty_dsn):
    unready = run_pgqueue("migrate", "--check", dsn=empty_dsn)
    applied = run_pgqueue("migrate", dsn=empty_dsn)
    again = run_pgqueue("migrate", dsn=empty_dsn)
    ready = run_pgqueue("migrate", "--check", dsn=empty_dsn)

    assert (unready.returncode, unready.stdout) == (3, "")
    assert unready.stderr == "pgqueue: the database has no schema 'pgqueue'; run: pgqueue migrate\n"
    assert (applied.returncode, applied.stdout.split()[0]) == (0, "0001")
    assert (again.returncode, again.stdout, again.stderr) == (
        0,
        "",
        "schema pgqueue was already up to date\n",
    )
    assert (ready.returncode, ready.stderr) == (0, "schema pgqueue is up to date\n")


def test_the_command_ends_with_75_without_a_database():
    ended = run_pgqueue("migrate", dsn="host=/nowhere dbname=x")

    assert ended.returncode == 75
    assert ended.stderr.startswith("pgqueue: cannot connect to /nowhere")


@pytest.mark.parametrize("arguments", [["--since", "0001"], ["--sql", "--check"]])
def test_options_that_make_no_sense_together_are_refused(arguments):
    assert run_pgqueue("migrate", *arguments).returncode == 2


# The package.


def test_the_wheel_and_the_sdist_carry_the_migrations(tmp_path, empty_dsn):
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "wheel")
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        # The filter came with 3.11.4, and later versions want one named.
        filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        sdist.extractall(tmp_path / "sdist", **filtered)
    (sdist,) = (tmp_path / "sdist").iterdir()

    from_wheel = run_from(tmp_path / "wheel", "migrate", dsn=empty_dsn)
    from_sdist = run_from(sdist, "migrate", dsn=empty_dsn)

    assert (from_wheel.returncode, from_wheel.stdout.split()[0]) == (0, "0001")
    assert (from_sdist.returncode, from_sdist.stdout) == (0, "")
    assert (tmp_path / "wheel/pgqueue/migrations/env.py").is_file()


def test_an_installation_without_migrations_says_so(other_day, empty_dsn):
    shutil.rmtree(other_day.folder / "migrations")

    ended = other_day.run("migrate", dsn=empty_dsn)

    assert ended.returncode == 1
    assert (
        ended.stderr
        == "pgqueue: the migrations are missing from this installation of pgqueue; install it again\n"
    )
