"""Clients of other languages, as programs of their own, and workers for them to wake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from pgqueue.database import run
from pgqueue.embedded import find_psql
from pgqueue.errors import EmbeddedServerError
from pgqueue.sql.presence import register_tasks
from tests.languages import jobs
from tests.process.support import Queue, WorkerProcess, worker
from tests.support import wait_until

APP = "tests.languages.jobs:app"

# Strings that quoting by hand, or a template, would break on.
HOSTILE = [
    "it's",
    'say "hi"',
    "back\\slash and \\u0041 and \\n",
    "line one\nline two\ttab\r",
    "'); DROP TABLE pgqueue.jobs; --",
    "%s %(args)s %% {user_id} {{schema}} $1 $$ $tag$ :name :'name'",
    "naïve 日本語 \U0001f418 \u202egnitirw",
    "",
    "x" * 10_000,
]

# Nobody waits for a poll in these tests: what is picked up within SOON was woken.
POLL_SECONDS = 60
SOON_SECONDS = 20


def register(queue: Queue) -> None:
    """Write down the application's tasks as a worker does when it starts."""
    run(queue.connection, register_tasks(jobs.app.registry.registrations()))


@contextmanager
def sleeping_worker(queue: Queue, folder: Path) -> Iterator[WorkerProcess]:
    """Start a worker that polls once a minute, and wait until it sleeps."""
    arguments = ("-q", "default", "-q", "mail", "--poll-seconds", str(POLL_SECONDS))
    with worker(queue.dsn, folder, *arguments, app=APP) as started:
        wait_until_asleep(queue)
        yield started


def wait_until_asleep(queue: Queue) -> None:
    """Wait until the worker sleeps on both queues: until it holds both bells."""
    asleep = """
        SELECT count(*) = 2
        FROM pg_locks
        WHERE locktype = 'advisory'
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND classid = 1885827445
          AND mode = 'ExclusiveLock'
    """
    wait_until(lambda: queue.one(asleep), 10, "the worker sleeps")


def picked_up_after(queue: Queue, job_id: int) -> float:
    """Wait until a job has succeeded and give the seconds that it waited for a worker."""
    queue.wait_for_state(job_id, "succeeded", SOON_SECONDS)
    waited = (
        "SELECT extract(epoch FROM started_at - created_at)::float8 FROM pgqueue.finished_jobs WHERE id = %s"
    )
    return queue.one(waited, job_id)


# psql.


def psql(
    dsn: str, script: str, *, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script with psql; it prints bare values, one row a line, and stops at the first error."""
    try:
        program = find_psql()
    except EmbeddedServerError as error:
        lacking(str(error))
    said = [f"--set={name}={value}" for name, value in (variables or {}).items()]
    return subprocess.run(
        [program, "-X", "-q", "-A", "-t", "-F", "|", "--set=ON_ERROR_STOP=1", *said, dsn],
        input=script,
        text=True,
        capture_output=True,
        timeout=30,
        check=False,
    )


# Node.


class NodeClient:
    """`client.mjs` in a folder from which it finds `pg`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copy(Path(__file__).with_name("client.mjs"), folder)
        link_node_modules(folder)

    def run(self, dsn: str, *arguments: str) -> Any:
        """Run one of its scenarios and give what it says, a JSON document."""
        ended = run_node(self._folder / "client.mjs", *arguments, dsn=dsn)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)


def run_node(script: Path, *arguments: str, dsn: str) -> subprocess.CompletedProcess[str]:
    """Run a script; it finds the database as any program does, by libpq's variables."""
    return subprocess.run(
        ["node", script, *arguments],
        env={**os.environ, **libpq_environment(dsn)},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def libpq_environment(dsn: str) -> dict[str, str]:
    names = {
        "host": "PGHOST",
        "port": "PGPORT",
        "user": "PGUSER",
        "password": "PGPASSWORD",
        "dbname": "PGDATABASE",
    }
    parts = conninfo_to_dict(dsn)
    return {variable: str(parts[name]) for name, variable in names.items() if parts.get(name)}


def link_node_modules(folder: Path) -> None:
    """Let scripts in this folder import `pg`; installed once, outside the repository."""
    if not (shutil.which("node") and shutil.which("npm")):
        lacking("node and npm are not installed")
    # Beside the runs' own folders, which are removed with them.
    parent = Path(os.environ["PYTEST_DEBUG_TEMPROOT"])
    home = parent / f"pgqueue-node-pg8-{os.getuid()}"
    if not (home / "node_modules" / "pg").is_dir():
        made = Path(tempfile.mkdtemp(prefix=".pgqueue-node-", dir=parent))
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", made, "pg@8"]
        ended = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
        if ended.returncode:
            shutil.rmtree(made)
            lacking(f"npm could not install pg: {ended.stderr.strip()[-500:]}")
        try:
            made.rename(home)
        except OSError:  # another run was quicker
            shutil.rmtree(made)
    assert home.stat().st_uid == os.getuid(), f"{home} is somebody else's"
    (folder / "node_modules").symlink_to(home / "node_modules")


def lacking(what: str) -> Any:
    """Skip the test for want of a program; where everything has to be there, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def first_line(text: str) -> str:
    """Give what an error says before its context: for a program's log, the line that counts."""
    return re.sub(r"^psql:.*?: ", "", text.strip().partition("\n")[0])
