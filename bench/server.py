"""Throw-away servers with durable settings, databases, workers, and what has to be said about the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo

from bench.measure import CORES, wait_until
from bench.recorder import FOLDER
from pgqueue import __version__, embedded, migrate

ROOT = Path(__file__).parent.parent

# Durability stays as PostgreSQL ships it (fsync, synchronous_commit and full_page_writes on).
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB"}
REPORTED = ("fsync", "synchronous_commit", "full_page_writes", *SETTINGS)


@contextlib.contextmanager
def durable_server(**settings: str | int) -> Iterator[embedded.Server]:
    """Start a server of our own in a temporary folder; it goes with the block.

    With PGQUEUE_BENCH_DATA it is that folder, which stays, on the disk that is to be measured.
    """
    if (kept := os.environ.get("PGQUEUE_BENCH_DATA")) and not settings:
        with embedded.start(kept, settings=SETTINGS) as server:
            yield server
        return
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # the account that runs the server passes through
        with embedded.start(folder, settings={**SETTINGS, **settings}) as server:
            yield server


@contextlib.contextmanager
def fresh_database(server: embedded.Server, name: str) -> Iterator[str]:
    """Make a database and give its DSN; it goes with the block."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield conninfo.make_conninfo(server.dsn(), dbname=name)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@contextlib.contextmanager
def migrated_database(server: embedded.Server, name: str) -> Iterator[str]:
    """Make a database with the queue in it and give its DSN; it goes with the block."""
    with fresh_database(server, name) as dsn:
        migrate.upgrade(dsn)
        yield dsn


def settle(connection: psycopg.Connection[Any]) -> None:
    """Leave the server nothing to catch up with."""
    connection.execute("VACUUM ANALYZE")
    connection.execute("CHECKPOINT")


@contextlib.contextmanager
def recording() -> Iterator[Path]:
    """Give an empty folder for what handlers leave behind."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], folder: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in the background, with a log in the folder; it is made to end with the block."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="log.", delete=False) as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, FOLDER: str(folder), **env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
        if (process.poll() or 0) > 0:
            raise SystemExit(f"{command} ended with {process.returncode}:\n{_end_of(Path(log.name))}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def worker_command(*arguments: str, app: str = "bench.jobs:app") -> list[str]:
    return [sys.executable, "-m", "pgqueue", "worker", "--app", app, *arguments]


@contextlib.contextmanager
def worker(
    dsn: str, folder: Path, *arguments: str, app: str = "bench.jobs:app"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `pgqueue worker`; it is at work when this gives its process."""
    with (
        running(worker_command(*arguments, app=app), folder, {"PGQUEUE_DSN": dsn}) as process,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        wait_until(
            lambda: is_registered(connection, process), 60, f"worker {process.pid} at work", pause=0.05
        )
        yield process


def is_registered(connection: psycopg.Connection[Any], process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise SystemExit(f"the worker ended with {process.returncode}")
    found = connection.execute("SELECT FROM pgqueue.workers WHERE pid = %s", [process.pid]).fetchone()
    return found is not None


def surroundings(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Say what the figures depend on besides the code."""
    settings = connection.execute(
        "SELECT name, current_setting(name) FROM unnest(%s::text[]) AS wanted (name)", [list(REPORTED)]
    ).fetchall()
    return {
        "pgqueue": __version__,
        "postgres": connection.info.parameter_status("server_version"),
        "python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} {psycopg.pq.__impl__}",
        "cores": CORES,
        "settings": dict(settings),
    }
