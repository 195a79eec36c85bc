"""What tests of several modules need: waiting, running the program, databases, processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import embedded

ROOT = Path(__file__).parent.parent
PROGRAM = (sys.executable, "-m", "pgqueue")


def wait_until(predicate: Callable[[], Any], seconds: float = 30.0, message: str = "") -> Any:
    """Ask again and again until the answer is true, and give it; fail the test when the time is over."""
    end = time.monotonic() + seconds
    while not (answer := predicate()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {message or predicate}")
        time.sleep(0.01)
    return answer


# The program.


def run_pgqueue(
    *arguments: str,
    dsn: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    seconds: float = 180.0,
) -> subprocess.CompletedProcess[str]:
    """Run `pgqueue` with these arguments to its end."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=_environment(dsn, env),
        input=stdin,
        text=True,
        capture_output=True,
        timeout=seconds,
        check=False,
    )


@contextlib.contextmanager
def start_pgqueue(
    *arguments: str, dsn: str | None = None, env: Mapping[str, str] | None = None, **popen: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start `pgqueue` with pipes in and out; it is asked to end with the block, and then made to."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
    with subprocess.Popen([*PROGRAM, *arguments], env=_environment(dsn, env), text=True, **pipes) as process:
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[Any], seconds: float = 30.0) -> None:
    """Ask a process to end, wait, and kill it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _environment(dsn: str | None, env: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **({"PGQUEUE_DSN": dsn} if dsn else {}), **(env or {})}


def installed(program: str, package: str) -> str:
    """Find a program that the machine may lack: then the test is skipped, and in the gate it fails."""
    found = shutil.which(program)
    if not found:
        reason = f"{program} is not installed (Debian: the package {package})"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return found


# Databases.


@contextlib.contextmanager
def make_database(server_dsn: str, template: str = "template1") -> Iterator[str]:
    """Make a database of a random name on that server and give its DSN; it goes with the block."""
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        conn.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
    try:
        yield make_conninfo(server_dsn, dbname=name)
    finally:
        with psycopg.connect(server_dsn, autocommit=True) as conn:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Make a temporary folder that any account may pass through, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="folder-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


class DurableServer:
    """A server of the test's own with production's settings, to stop, kill and start again at will."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = embedded.start(folder)

    @property
    def dsn(self) -> str:
        return self._server.dsn()

    @property
    def pid(self) -> int:
        return self._server.pid

    def start(self) -> None:
        """Start it again after `stop` or `kill`."""
        self._server = embedded.start(self.folder)

    def stop(self) -> None:
        """Stop it as an operator does: every connection ends, nothing needs recovery."""
        self._server.stop()
        self._server.close()

    def kill(self) -> None:
        """Kill it as a power cut does, all of its processes at once."""
        for pid in [self.pid, *children_of(self.pid)]:
            kill(pid)
        self._server.close()

    def close(self) -> None:
        self._server.close()


# Processes, as /proc shows them.


def is_alive(pid: int) -> bool:
    """Say whether the process runs; a zombie does not."""
    # Not by its command line: a process that has just been started has none for a moment.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def kill(pid: int) -> None:
    """Kill a process, whoever's child it is, and wait until it is dead."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), message=f"process {pid} is dead")


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                found.append(int(entry.name))
    return found


def processes_with(text: str) -> dict[int, str]:
    """Find the living processes with the text in their command, environment or working folder, but us."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            known = [command, b"", b""]
            with contextlib.suppress(PermissionError):
                known[1] = (entry / "environ").read_bytes()
                known[2] = os.fsencode((entry / "cwd").readlink())
            if command and any(text.encode() in part for part in known) and int(entry.name) != os.getpid():
                found[int(entry.name)] = os.fsdecode(command).replace("\0", " ").strip()
    return found
