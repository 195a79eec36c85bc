"""The program itself: quick help, one line for every error, exit codes, and no password in sight."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import click
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import __version__, cli, migrate
from pgqueue.cli import main
from tests.faults.proxy import Proxy
from tests.support import run_pgqueue, start_pgqueue, wait_until

SECRET = "s3cret-w0rd"
UNREACHABLE = f"postgresql://someone:{SECRET}@127.0.0.1:1/jobs"


# Help.


def test_the_help_names_every_command_and_how_to_complete_them(pgqueue):
    ended = pgqueue("--help")

    assert ended.code == 0
    for name in ("enqueue", "jobs", "dlq", "queues", "workers", "worker", "migrate", "db", "demo"):
        assert f"\n  {name} " in ended.out
    assert "_PGQUEUE_COMPLETE=bash_source pgqueue" in ended.out
    assert "75 database unreachable" in ended.out


def test_every_command_ends_its_help_with_an_example():
    def commands(group, path):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            yield f"{path} {name}", command
            if isinstance(command, click.Group):
                yield from commands(command, f"{path} {name}")

    without = [path for path, each in commands(cli.root, "pgqueue") if "Example:" not in (each.help or "")]

    assert without == []


def test_help_imports_no_driver_and_no_migrations():
    code = (
        "import sys; from pgqueue.cli import main; main(['--help']); "
        "print([m for m in ('psycopg', 'alembic', 'sqlalchemy', 'asyncio') if m in sys.modules])"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines()[-1] == "[]"


def test_a_group_without_a_command_shows_its_help(pgqueue):
    ended = pgqueue("jobs")

    # Where and with which code is click's to say, and it changed its mind in 8.2.
    assert "Usage: pgqueue jobs" in ended.err + ended.out
    assert ended.code in (0, 2)


def test_the_version_is_told(pgqueue):
    assert pgqueue("--version").out == f"pgqueue {__version__}\n"


# Errors.


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["jbos"], "pgqueue: no command 'jbos'; did you mean 'jobs'? (see: pgqueue --help)\n"),
        (["jobs", "list", "--nope"], "pgqueue: no such option '--nope' (see: pgqueue jobs list --help)\n"),
        (["jobs", "show"], "pgqueue: missing argument 'ID' (see: pgqueue jobs show --help)\n"),
    ],
)
def test_a_usage_error_is_one_line_that_says_where_to_look(pgqueue, arguments, line):
    ended = pgqueue(*arguments)

    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.replace("option: --nope", "option '--nope'") == line


def test_a_database_that_is_not_there_is_75_and_its_password_is_not_told(pgqueue):
    ended = pgqueue("jobs", "list", "--dsn", UNREACHABLE)

    assert ended.code == 75
    assert ended.err.startswith("pgqueue: cannot connect to 127.0.0.1:1/jobs: ")
    assert ended.err.count("\n") == 1
    assert SECRET not in ended.err


def test_a_database_that_the_environment_of_libpq_names_is_named(pgqueue, monkeypatch):
    monkeypatch.delenv("PGQUEUE_DSN")
    monkeypatch.setenv("PGDATABASE", "shop")
    monkeypatch.setenv("PGHOST", "/nosuch")
    by_socket = pgqueue("jobs", "list")
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    monkeypatch.setenv("PGPORT", "1")
    by_network = pgqueue("jobs", "list")

    assert (by_socket.code, by_network.code) == (75, 75)
    assert by_socket.err.startswith("pgqueue: cannot connect to /nosuch/shop: No such file")
    assert by_network.err.startswith("pgqueue: cannot connect to 127.0.0.1:1/shop: ")


def test_a_dsn_that_cannot_be_read_is_not_quoted(pgqueue):
    ended = pgqueue("jobs", "list", "--dsn", f"postgresql:/someone:{SECRET}@host/jobs")

    assert ended.code == 2
    assert SECRET not in ended.err


def test_a_connection_lost_in_the_middle_is_75(pgqueue, queue):
    queue.connection.execute(
        "CREATE FUNCTION pg_temp.suicide() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END'"
    )
    queue.connection.execute(
        "CREATE TRIGGER suicide BEFORE DELETE ON pgqueue.dead_jobs EXECUTE FUNCTION pg_temp.suicide()"
    )
    queue.bury()
    try:
        ended = pgqueue("dlq", "purge", "--all", "--yes")
    finally:
        queue.connection.execute("DROP TRIGGER suicide ON pgqueue.dead_jobs")

    assert ended.code == 75
    assert "pgqueue: " in ended.err
    assert "Traceback" not in ended.err


def test_a_schema_that_is_not_there_says_what_to_run(pgqueue):
    ended = pgqueue("jobs", "list", "--schema", "other")

    assert ended.code == 1
    assert ended.err == "pgqueue: the database has no schema 'other'; run: pgqueue migrate --schema other\n"


def test_the_schema_can_come_from_the_environment(pgqueue, monkeypatch):
    monkeypatch.setenv("PGQUEUE_SCHEMA", "other")

    assert "no schema 'other'" in pgqueue("jobs", "list").err


def test_what_is_suggested_acts_on_the_schema_that_was_asked_about(pgqueue, queue):
    migrate.upgrade(queue.dsn, "staging")
    queue.connection.execute(
        "INSERT INTO staging.jobs (task, state, run_at) "
        "VALUES ('send', 'scheduled', now() + interval '1 h'), ('send', 'ready', now())"
    )
    queue.connection.execute("SELECT staging.pause_queues(ARRAY['default'])")
    queue.connection.execute("INSERT INTO staging.breakers (name) VALUES ('bank')")
    queue.connection.execute("SELECT staging.limit_queue('default', 0)")
    queue.connection.execute(
        "INSERT INTO staging.processed_jobs (idempotency_key, job_name, status, job_id)"
        " VALUES ('mail:1', 'mail', 'IN_PROGRESS', 12)"
    )
    queue.connection.execute("DROP FUNCTION staging.prune_processed")

    told = [
        pgqueue("--schema", "staging", *words)
        for words in (
            ("jobs", "why", 1),
            ("jobs", "why", 2),
            ("breakers", "open", "bank"),
            ("locks",),
            ("roles",),
            ("doctor",),
            ("jobs", "retry", 1, 2),
            ("jobs", "cancel", 1),
        )
    ]

    text = "\n".join(ended.out + ended.err for ended in told)
    names = "|".join(name for section in cli.SECTIONS.values() for name in section)
    commands = re.findall(rf"pgqueue (?:{names})\b(?!;).*", text)
    assert len(commands) >= 10
    assert [command for command in commands if "--schema staging" not in command] == []
    assert "pgqueue jobs retry --schema staging 1\n" in text
    assert "pgqueue queues resume --schema staging default\n" in text
    assert "pgqueue queues limit --schema staging default none\n" in text
    assert "pgqueue breakers close --schema staging bank\n" in text
    assert 'pgqueue roles --sql --schema staging | psql "$PGQUEUE_DSN"\n' in text
    assert "&& pgqueue migrate --schema staging\n" in text


def test_database_and_schema_can_stand_before_the_command_and_count_less_there(
    pgqueue, fast_dsn, monkeypatch
):
    monkeypatch.setenv("PGQUEUE_DSN", UNREACHABLE)
    monkeypatch.setenv("PGQUEUE_SCHEMA", "of_the_environment")

    before = pgqueue("--dsn", fast_dsn, "--schema", "other", "jobs", "list")
    behind = pgqueue("--dsn", UNREACHABLE, "jobs", "list", "--dsn", fast_dsn, "--schema", "pgqueue")

    assert "no schema 'other'" in before.err
    assert (behind.code, behind.err) == (0, "no jobs\n")


def test_a_schema_name_that_needs_quoting_is_refused(pgqueue):
    ended = pgqueue("jobs", "list", "--schema", 'a"; DROP TABLE jobs; --')

    assert ended.code == 2
    assert "not a plain schema name" in ended.err


@pytest.fixture
def broken(monkeypatch):
    """A command with a bug, whose error quotes a DSN."""
    module = types.ModuleType("pgqueue.cli.broken")

    @click.command()
    def command():
        raise ZeroDivisionError(f"in {UNREACHABLE}")

    module.command = command
    monkeypatch.setitem(sys.modules, "pgqueue.cli.broken", module)
    monkeypatch.setitem(cli.SECTIONS, "Broken", ("broken",))


@pytest.mark.usefixtures("broken")
def test_a_bug_is_one_line_too_and_says_how_to_see_more(pgqueue):
    ended = pgqueue("broken")

    assert ended.code == 1
    assert ended.err.startswith(
        "pgqueue: unexpected ZeroDivisionError: in postgresql://someone:***@127.0.0.1:1/jobs"
    )
    assert ended.err.endswith("(run with PGQUEUE_DEBUG=1 for the traceback)\n")
    assert ended.err.count("\n") == 1


@pytest.mark.usefixtures("broken")
def test_the_traceback_is_shown_on_demand_without_the_password(pgqueue, monkeypatch):
    monkeypatch.setenv("PGQUEUE_DEBUG", "1")

    ended = pgqueue("broken")

    assert "Traceback (most recent call last):" in ended.err
    assert SECRET not in ended.err


@pytest.mark.parametrize("arguments", [["jobs", "list"], ["enqueue", "send", "--force"]])
def test_a_driver_without_its_library_says_what_to_install(arguments):
    ended = run_pgqueue(*arguments, dsn="host=127.0.0.1", env={"PSYCOPG_IMPL": "c"})

    assert ended.returncode == 1
    assert ended.stderr == (
        "pgqueue: the database driver finds no libpq; run: pip install 'psycopg[binary]'\n"
    )


# Ends from outside.


def test_a_reader_that_went_away_is_no_error_of_ours(fast_dsn):
    with psycopg.connect(fast_dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO pgqueue.jobs (task) SELECT 'send' FROM generate_series(1, 5000)")
    reading, writing = os.pipe()
    os.close(reading)

    with start_pgqueue("jobs", "list", "--limit", "5000", dsn=fast_dsn, stdout=writing) as process:
        os.close(writing)
        _, err = process.communicate(timeout=120)

    assert (process.returncode, err) == (141, "")


def test_an_interrupt_ends_with_130_and_takes_back_what_was_begun(fast_dsn):
    with start_pgqueue("enqueue", "--lines", "-", "--force", dsn=fast_dsn) as process:
        process.stdin.write('{"task": "send"}\n' * 2_001)
        process.stdin.flush()
        wait_until(lambda: connected(fast_dsn, "idle in transaction"), 60)

        process.send_signal(signal.SIGINT)

        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (out, err.strip()) == ("", "")
    with psycopg.connect(fast_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM pgqueue.jobs").fetchone() == (0,)


def test_an_interrupt_is_no_reason_to_talk_though_the_server_fell_silent(fast_dsn, connect):
    server = conninfo_to_dict(fast_dsn)
    proxy = Proxy(lambda: f"{server['host']}/.s.PGSQL.{server.get('port', 5432)}")
    try:
        connect(fast_dsn, autocommit=False).execute("LOCK TABLE pgqueue.jobs")
        way = make_conninfo(fast_dsn, host="127.0.0.1", port=proxy.port)
        with start_pgqueue("enqueue", "--force", "send", dsn=way) as process:
            wait_until(lambda: connected(fast_dsn, "active"), 60)
            proxy.silence()

            process.send_signal(signal.SIGINT)

            out, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert (out, err.strip()) == ("", "")
    finally:
        proxy.close()


def connected(dsn, state="idle"):
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue cli' AND state = %s",
            [state],
        ).fetchone()[0]


# A password on the command line.


@pytest.fixture(params=["python -m pgqueue", "script"])
def program(request, tmp_path):
    if request.param == "script":
        script = tmp_path / "pgqueue"
        script.write_text(
            "import sys\nfrom pgqueue.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        )
        return [sys.executable, str(script)]
    return [sys.executable, "-X", "utf8", "-m", "pgqueue"]


@pytest.mark.parametrize("form", [["--dsn", "{}"], ["--dsn={}"]], ids=["two words", "one word"])
def test_a_password_does_not_stay_on_the_command_line(fast_dsn, program, form):
    dsn = [each.format(f"{fast_dsn} password={SECRET}") for each in form]
    command = [*program, "enqueue", *dsn, "--force", "--lines", "-"]

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: connected(fast_dsn), 60)
        shown = Path(f"/proc/{process.pid}/cmdline").read_text()
        out, _ = process.communicate('{"task": "send"}\n', timeout=120)

    assert SECRET not in shown
    assert shown.endswith("enqueue\0--force\0--lines\0-\0")
    assert (process.returncode, out) == (0, "1\n")


def test_a_password_that_should_have_been_escaped_does_not_stay_there_either(tmp_path):
    shown = tmp_path / "shown"
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, pathlib\n"
        "line = pathlib.Path('/proc/self/cmdline')\n"
        f"atexit.register(lambda: pathlib.Path({str(shown)!r}).write_text(line.read_text()))\n"
    )

    ended = run_pgqueue(
        *("jobs", "list", "--dsn", f"postgresql://shop:{SECRET}/1@db/shop"), env={"PYTHONPATH": str(tmp_path)}
    )

    assert shown.read_text().endswith("jobs\0list\0")
    assert SECRET not in ended.stdout + ended.stderr


def test_a_dsn_without_a_password_stays_where_it_is(fast_dsn):
    with start_pgqueue("enqueue", "--dsn", fast_dsn, "--force", "--lines", "-") as process:
        wait_until(lambda: connected(fast_dsn), 60)
        shown = Path(f"/proc/{process.pid}/cmdline").read_text()
        process.communicate("", timeout=120)

    assert f"--dsn\0{fast_dsn}\0" in shown


def test_the_last_dsn_counts_and_no_other_stays_either(fast_dsn):
    ended = run_pgqueue("jobs", "list", "--dsn", UNREACHABLE, "--dsn", fast_dsn)

    assert (ended.returncode, ended.stderr) == (0, "no jobs\n")


def test_what_follows_two_dashes_is_nobodys_option(fast_dsn):
    ended = run_pgqueue("enqueue", "--force", "--", "--dsn", '{"of": "postgresql://a:b@c/d"}', dsn=fast_dsn)

    assert (ended.returncode, ended.stdout) == (0, "1\n")


def test_a_missing_dsn_is_a_usage_error():
    assert run_pgqueue("jobs", "list", "--dsn").returncode == 2


# Completion.


def complete(words, dsn):
    completed = run_pgqueue(
        dsn=dsn,
        env={
            "_PGQUEUE_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        },
    )
    assert completed.stderr == ""
    return [line.partition(",")[2] for line in completed.stdout.splitlines() if line]


def test_commands_queues_and_tasks_are_completed(fast_dsn):
    with psycopg.connect(fast_dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO pgqueue.tasks (name, queue) VALUES ('send_mail', 'mail'), ('resize', 'media')"
        )

    for words, completions in {
        "pgqueue d": ["demo", "dlq", "db", "doctor"],
        "pgqueue jobs list --queue ma": ["mail"],
        "pgqueue dlq list --task re": ["resize"],
        "pgqueue enqueue se": ["send_mail"],
    }.items():
        # A completion has little patience with a database: on a busy machine it is silent now and then.
        assert wait_until(lambda words=words: complete(words, fast_dsn), 60) == completions


def test_completion_without_a_database_is_silent():
    assert complete("pgqueue jobs list --queue ma", UNREACHABLE) == []


def test_completion_does_not_wait_for_a_server_that_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started_at = time.monotonic()

        port = silent.getsockname()[1]
        completed = complete("pgqueue jobs list --queue ma", f"host=127.0.0.1 port={port} connect_timeout=60")

        # Its own patience is 1.5 s, that of the DSN a minute; the rest is the start of a program.
        assert completed == []
        assert time.monotonic() - started_at < 20


def test_the_shell_function_can_be_had():
    ended = run_pgqueue(env={"_PGQUEUE_COMPLETE": "bash_source"})

    assert "_pgqueue_completion" in ended.stdout


def test_main_gives_the_exit_code_and_never_raises():
    assert main(["--version"]) == 0
    assert main(["nope"]) == 2
