"""One PostgreSQL server for the whole run, whoever runs it, and a migrated database for each test.

The server is PGQUEUE_TEST_DSN's if that is set; else one is started from PGQUEUE_PG_BINDIR's
programs, or the embedded wheel's, or the newest found here, when the first test asks for it.

A run leaves nothing behind, or fails: no process, no server's folder. What a killed run left, the
next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pytest_postgresql import factories

from pgqueue import embedded
from tests.support import ROOT, DurableServer, make_database, open_folder, processes_with, wait_until

KEPT_VARIABLES = {"PGQUEUE_TEST_DSN", "PGQUEUE_PG_BINDIR"}
RUN_PREFIX = "pgqueue-tests-"

RUN_FOLDER: pytest.StashKey[Path] = pytest.StashKey()
SERVER: pytest.StashKey[embedded.Server] = pytest.StashKey()
LEFT_BEHIND: pytest.StashKey[list[str]] = pytest.StashKey()


@dataclass(frozen=True)
class Postgres:
    """Where the run's server is, in the form that pytest-postgresql takes for a server of somebody else's."""

    dsn: str
    host: str
    port: str
    user: str
    password: str | None
    maintenance_dbname: str
    options: str = ""
    template_dbname: str | None = None

    @classmethod
    def at(cls, dsn: str) -> Postgres:
        parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
        return cls(
            dsn,
            host=parts.get("host", "127.0.0.1"),
            port=parts.get("port", "5432"),
            user=parts.get("user", "postgres"),
            password=parts.get("password"),
            maintenance_dbname=parts.get("dbname", "postgres"),
        )


# The run.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pgbouncer",
        action="store_true",
        help="run the guarantees through a PgBouncer that pools transactions",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in the background deaf to Ctrl-C, and every process of a test would inherit
    # that; a handler of our own is not inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name == "DATABASE_URL" or (name.startswith("PG") and name not in KEPT_VARIABLES):
            del os.environ[name]
    if hasattr(config, "workerinput"):
        folder = Path(config.workerinput["run_folder"])
    else:
        folder = _make_run_folder()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.stash[RUN_FOLDER] = folder
    # Whatever a test starts carries the folder's name in its environment and puts its files there:
    # that is how it is found when the test has forgotten it.
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["PGQUEUE_DATA"] = str(folder / "data")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Under pytest-xdist: start the server before the workers, who share it."""
    node.workerinput["run_folder"] = str(node.config.stash[RUN_FOLDER])
    node.workerinput["server_dsn"] = _server_dsn(node.config)


def pytest_report_header(config: pytest.Config) -> str:
    if dsn := os.environ.get("PGQUEUE_TEST_DSN"):
        try:
            with psycopg.connect(dsn) as conn:
                return f"postgres: {conn.info.parameter_status('server_version')} (PGQUEUE_TEST_DSN)"
        except psycopg.OperationalError as error:
            return f"postgres: PGQUEUE_TEST_DSN leads nowhere: {error}"
    install = next(iter(embedded.installs()), None)
    return f"postgres: {install.version} ({install.origin})" if install else "postgres: none found"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if SERVER in config.stash:
        config.stash[SERVER].close()
    left = config.stash[LEFT_BEHIND] = _left_behind(config.stash[RUN_FOLDER])
    if left and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT_BEHIND, []):
        terminalreporter.section("left behind", sep="=", red=True, bold=True)
        for line in left:
            terminalreporter.line(f"FAILED: the tests left {line}", red=True)


def _make_run_folder() -> Path:
    parent = Path(tempfile.gettempdir())
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(parent))  # tmp_path stays there to be looked at
    for folder in parent.glob(f"{RUN_PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_dead_run(folder)
    # It gets its name only when it is locked, so that no other run takes it for a dead one.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{RUN_PREFIX}"))
    unnamed.chmod(0o1777)
    fcntl.flock(os.open(unnamed / "lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
    return unnamed.rename(parent / unnamed.name.removeprefix("."))


def _remove_dead_run(folder: Path) -> None:
    lock = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while that run lives
        for pid in processes_with(str(folder)):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _left_behind(folder: Path) -> list[str]:
    with contextlib.suppress(AssertionError):  # what is just ending may end
        wait_until(lambda: not processes_with(str(folder)), 30)
    processes = processes_with(str(folder))
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    folders = [
        path for path in folder.iterdir() if path.is_dir() and path.name.startswith(("pgqueue", "data"))
    ]
    return [
        *(f"process {pid}: {command}" for pid, command in processes.items()),
        *(f"folder {path}" for path in folders),
    ]


def _server_dsn(config: pytest.Config) -> str:
    if dsn := os.environ.get("PGQUEUE_TEST_DSN"):
        return dsn
    if SERVER not in config.stash:
        config.stash[SERVER] = embedded.start(throwaway=True, settings={"max_connections": "500"})
    return config.stash[SERVER].dsn("postgres")


# Databases.


@pytest.fixture(scope="session")
def postgres(pytestconfig: pytest.Config) -> Postgres:
    """The run's server."""
    worker = getattr(pytestconfig, "workerinput", {})
    return Postgres.at(worker.get("server_dsn") or _server_dsn(pytestconfig))


def _migrate(**where: Any) -> None:
    from pgqueue.migrate import upgrade

    parts = {name: where[name] for name in ("host", "port", "user", "password", "dbname") if where[name]}
    upgrade(make_conninfo("", **parts))


# The number keeps runs apart that share a server.
postgresql_noproc = factories.postgresql_noproc(
    dbname=f"pgqueue_test_{os.getpid()}", load=[_migrate], depends_on="postgres"
)


@pytest.fixture
def empty_dsn(postgres: Postgres) -> Iterator[str]:
    """An empty database of this test's own, not migrated."""
    with make_database(postgres.dsn) as dsn:
        yield dsn


@pytest.fixture
def dsn(postgres: Postgres, postgresql_noproc: Any) -> Iterator[str]:
    """A fresh migrated database of this test's own."""
    with make_database(postgres.dsn, postgresql_noproc.template_dbname) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def _shared_dsn(postgres: Postgres, postgresql_noproc: Any) -> Iterator[str]:
    with make_database(postgres.dsn, postgresql_noproc.template_dbname) as dsn:
        yield dsn


# Nobody else may still be there: a process that a test killed can have left a backend at work. DELETE
# is twenty times quicker than TRUNCATE on small tables. Partitions stay.
EMPTY_EVERYTHING = """
DO $$
DECLARE
    name text;
BEGIN
    PERFORM pg_terminate_backend(pid, 5000)
    FROM pg_stat_activity
    WHERE datname = current_database()
      AND pid <> pg_backend_pid()
      AND backend_type = 'client backend';
    SET LOCAL session_replication_role = replica;
    FOR name IN
        SELECT format('%I.%I', schemaname, tablename)
        FROM pg_tables
        WHERE schemaname = 'pgqueue'
          AND tablename NOT IN ('alembic_version', 'definitions')
    LOOP
        EXECUTE 'DELETE FROM ' || name;
    END LOOP;
    FOR name IN
        SELECT format('%I.%I', schemaname, sequencename)
        FROM pg_sequences
        WHERE schemaname = 'pgqueue'
          AND last_value IS NOT NULL
    LOOP
        EXECUTE format('ALTER SEQUENCE %s RESTART', name);
    END LOOP;
END
$$
"""


@pytest.fixture
def fast_dsn(_shared_dsn: str) -> str:
    """A migrated database that tests share, without rows: for the many that change nothing but rows."""
    with psycopg.connect(_shared_dsn, autocommit=True) as conn:
        conn.execute(EMPTY_EVERYTHING)
    return _shared_dsn


@pytest.fixture
def durable_server() -> Iterator[DurableServer]:
    """A migrated server of this test's own with production's settings, to stop, kill and start again."""
    from pgqueue.migrate import upgrade

    with open_folder() as folder:
        server = DurableServer(folder)
        try:
            upgrade(server.dsn)
            yield server
        finally:
            server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., psycopg.Connection]]:
    """Open connections (autocommit unless told otherwise) that are closed with the test."""
    with contextlib.ExitStack() as stack:

        def open_connection(dsn: str, **options: Any) -> psycopg.Connection:
            conn = psycopg.connect(dsn, **{"autocommit": True, **options})
            stack.callback(conn.close)
            return conn

        yield open_connection
