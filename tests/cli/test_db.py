from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import psycopg
import pytest

from pgqueue import embedded
from tests.support import open_folder, processes_with, run_pgqueue, start_pgqueue, wait_until


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """The environment of a machine where nothing is configured; no server is left on it."""
    with open_folder() as folder:
        yield {"PGQUEUE_DATA": str(folder / "data")}
        embedded.stop(folder / "data")


def test_db_start_keeps_the_server_up_while_clients_come_and_go_until_db_stop(env):
    assert run_pgqueue("db", "status", env=env).returncode == 3

    started = run_pgqueue("db", "start", env=env)
    assert started.returncode == 0, started.stderr
    assert "is up in " + env["PGQUEUE_DATA"] in started.stderr
    dsn = started.stdout.strip()
    for number in range(2):
        with embedded.start(env["PGQUEUE_DATA"]) as server, psycopg.connect(dsn) as conn:
            assert server.dsn() == dsn
            conn.execute(f"CREATE TABLE visit_{number} ()")
    again = run_pgqueue("db", "start", env=env)
    assert again.stdout == started.stdout

    stopped = run_pgqueue("db", "stop", env=env)

    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "", "stopped\n")
    assert run_pgqueue("db", "status", env=env).returncode == 3
    assert not processes_with(f"-D\0{env['PGQUEUE_DATA']}")
    assert run_pgqueue("db", "stop", env=env).stderr == "it was not running\n"


def test_db_status_says_state_version_folder_dsn_and_clients(env):
    absent = run_pgqueue("db", "status", "--json", env=env)
    with embedded.start(env["PGQUEUE_DATA"]) as server:
        running = run_pgqueue("db", "status", "--json", env=env)
        read = run_pgqueue("db", "status", env=env)
    stopped = run_pgqueue("db", "status", "--json", env=env)

    assert json.loads(absent.stdout)["state"] == "absent"
    assert json.loads(running.stdout) == {
        "state": "running",
        "version": server.version,
        "data": str(server.data),
        "dsn": server.dsn(),
        "pid": server.pid,
        "clients": [os.getpid()],
        "is_kept": False,
    }
    assert running.returncode == 0
    for part in ("running", server.version, str(server.data), server.dsn(), f"1 (process {os.getpid()})"):
        assert part in read.stdout
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert (absent.returncode, stopped.returncode) == (3, 3)


def test_db_psql_passes_its_arguments_on_and_ends_with_psqls_exit_code(env):
    query = run_pgqueue("db", "psql", "-At", "-c", "SELECT current_database(), current_user", env=env)
    script = run_pgqueue("db", "psql", "postgres", "-At", env=env, stdin="SELECT current_database();\n")
    failed = run_pgqueue("db", "psql", "-v", "ON_ERROR_STOP=1", "-c", "SELECT 1/0", env=env)
    elsewhere = run_pgqueue("db", "psql", "-h", "/nowhere", env=env)

    assert (query.stdout, query.returncode) == ("pgqueue|postgres\n", 0)
    assert script.stdout == "postgres\n"
    assert "division by zero" in failed.stderr
    assert failed.returncode == 1
    assert "/nowhere" in elsewhere.stderr
    assert elsewhere.returncode == 2


def test_db_psql_keeps_the_server_up_while_it_is_open_and_no_longer(env):
    with start_pgqueue("db", "psql", "-At", env=env) as psql:
        psql.stdin.write("SELECT 'open';\n")
        psql.stdin.flush()
        assert psql.stdout.readline() == "open\n"
        assert embedded.status(env["PGQUEUE_DATA"]).clients == [psql.pid]

        psql.stdin.close()

        assert psql.wait(60) == 0
    assert embedded.status(env["PGQUEUE_DATA"]).state == "stopped"


def test_a_ctrl_c_is_psqls_to_handle(env):
    with start_pgqueue("db", "psql", "-At", env=env, start_new_session=True) as psql:
        psql.stdin.write("SELECT 'open';\nSELECT pg_sleep(600);\n")
        psql.stdin.flush()
        assert psql.stdout.readline() == "open\n"
        dsn = embedded.status(env["PGQUEUE_DATA"]).dsn
        with psycopg.connect(dsn, autocommit=True) as conn:
            asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            wait_until(lambda: conn.execute(asleep).fetchone()[0], message="the query runs")

        os.killpg(psql.pid, signal.SIGINT)

        assert psql.wait(60) == 3
        assert "canceling statement due to user request" in psql.stderr.read()
    assert embedded.status(env["PGQUEUE_DATA"]).state == "stopped"


def test_a_server_that_cannot_be_started_is_one_line_and_exit_code_1(env, tmp_path):
    (tmp_path / "file").touch()

    failed = run_pgqueue("db", "start", env={"PGQUEUE_DATA": str(tmp_path / "file/data")})

    assert failed.stderr == f"pgqueue: cannot use {tmp_path}/file/data: Not a directory\n"
    assert (failed.returncode, failed.stdout) == (1, "")
