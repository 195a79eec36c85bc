"""A real PgBouncer that pools transactions, in front of the tests' server."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue.embedded.programs import NAMESPACE
from tests.support import end, open_folder, wait_until

PORT = 6432

# The server connection that waited longest comes next: no client can count on having the same one twice.
CONFIGURATION = """
[databases]
* = host={host} port={port}

[pgbouncer]
pool_mode = transaction
listen_addr =
listen_port = {own_port}
unix_socket_dir = {folder}
unix_socket_mode = 0777
auth_type = trust
auth_file = {folder}/users.txt
server_round_robin = 1
default_pool_size = 60
max_client_conn = 1000
ignore_startup_parameters = extra_float_digits, options
{more}
logfile = {folder}/pgbouncer.log
log_connections = 0
log_disconnections = 0
"""


def program() -> str | None:
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


class Pooler:
    """A running PgBouncer; `lead` gives the DSN that goes through it instead of straight to the server."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        self._command = command
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def lead(self, dsn: str, **more: str) -> str:
        parts = {name: value for name, value in conninfo_to_dict(dsn).items() if name not in ("host", "port")}
        return make_conninfo("", **{**parts, "host": str(self.folder), "port": PORT, **more})

    def restart(self) -> None:
        """Kill it, and start it again: every client's connection breaks."""
        self._process.kill()
        self._process.wait()
        (self.folder / f".s.PGSQL.{PORT}").unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        end(self._process)


@contextlib.contextmanager
def start_pooler(server_dsn: str, **settings: object) -> Iterator[Pooler]:
    """Start one that leads to every database of the server; skip without PgBouncer, but fail in CI."""
    found = program()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("there is no pgbouncer here: apt-get install pgbouncer")
        pytest.skip("there is no pgbouncer here")
    server = conninfo_to_dict(server_dsn)
    with open_folder() as folder:
        configuration = folder / "pgbouncer.ini"
        configuration.write_text(
            CONFIGURATION.format(
                host=server["host"],
                port=server.get("port", 5432),
                own_port=PORT,
                folder=folder,
                more="\n".join(f"{name} = {value}" for name, value in settings.items()),
            ),
            encoding="utf-8",
        )
        (folder / "users.txt").write_text(f'"{server["user"]}" ""\n', encoding="utf-8")
        command = [*_as_no_root(Path(str(server["host"])), folder), found, "-q", str(configuration)]
        pooler = Pooler(folder, command)
        try:
            wait_until((folder / f".s.PGSQL.{PORT}").exists, 10, "PgBouncer is there")
            wait_until(lambda: _answers(pooler.lead(server_dsn)), 10, "PgBouncer answers")
            yield pooler
        finally:
            pooler.close()


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:  # its socket is there a moment before it listens
        return False
    return True


def _as_no_root(socket_folder: Path, folder: Path) -> list[str]:
    """Give what makes PgBouncer, which refuses to be root, an account that may enter the server's folder."""
    if os.geteuid() != 0:
        return []
    nobody = pwd.getpwnam("nobody")
    owner = socket_folder.stat().st_uid if socket_folder.is_dir() else nobody.pw_uid
    if owner == 0:
        return [sys.executable, "-I", "-S", str(NAMESPACE), str(nobody.pw_uid), str(nobody.pw_gid)]
    os.chown(folder, owner, -1)
    return ["setpriv", f"--reuid={owner}", "--clear-groups"]
