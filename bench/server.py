"""A throw-away PostgreSQL server with durable settings, and what has to be said about the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo

from pgqueue import __version__, embedded, migrate

# Durability stays as PostgreSQL ships it (fsync, synchronous_commit and full_page_writes on).
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB"}
REPORTED = ("fsync", "synchronous_commit", "full_page_writes", *SETTINGS)


@contextlib.contextmanager
def durable_server() -> Iterator[embedded.Server]:
    """Start a server of our own in a temporary folder; it goes with the block."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # the account that runs the server passes through
        with embedded.start(folder, settings=SETTINGS) as server:
            yield server


@contextlib.contextmanager
def migrated_database(server: embedded.Server, name: str) -> Iterator[str]:
    """Make a database with the queue in it and give its DSN; it goes with the block."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        dsn = conninfo.make_conninfo(server.dsn(), dbname=name)
        try:
            migrate.upgrade(dsn)
            yield dsn
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


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
        "cores": os.cpu_count(),
        "settings": dict(settings),
    }
