"""Real workers for the process tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from tests.faults.proxy import Proxy
from tests.process.jobs import EFFECTS
from tests.support import end, wait_until


class WorkerProcess:
    """A worker in a process of its own; its log lines as they come."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self, event: str = "") -> list[dict[str, Any]]:
        """Give the log's lines so far, those of one event if it is named."""
        found = []
        for text in self._log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if not event or line.get("event") == event:
                    found.append(line)
        return found

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, event: str, count: int = 1, seconds: float = 60) -> list[dict[str, Any]]:
        def enough() -> list[dict[str, Any]]:
            found = self.lines(event)
            assert len(found) >= count or self.process.poll() is None, f"worker ended:\n{self.text()}"
            return found if len(found) >= count else []

        try:
            return wait_until(enough, seconds, f"log line {event!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def children(self) -> list[int]:
        """Give the pids of its children that live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    if int(parent) == self.pid and state != "Z":
                        found.append(int(entry.name))
        return sorted(found)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 60) -> int:
        """Wait for its end and give its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker has not ended within {seconds:g} s:\n{self.text()}") from None

    def stop(self, seconds: float = 60) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(seconds)


@contextlib.contextmanager
def worker(
    dsn: str,
    folder: Path,
    *arguments: str,
    app: str = "tests.process.jobs:app",
    is_up: bool = True,
    log: str | None = None,
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> Iterator[WorkerProcess]:
    """Start a worker, maybe by the program `within`; with `is_up`, wait until it claims."""
    path = Path(log) if log else folder / f"worker-{len(list(folder.glob('worker-*.log')))}.log"
    program = [*within, sys.executable, "-m", "pgqueue"]
    command = [*program, "worker", "--app", app, "--log-format", "json", *arguments]
    with path.open("wb") as stream:
        process = subprocess.Popen(
            command, env={**os.environ, "PGQUEUE_DSN": dsn, **(env or {})}, stderr=stream, stdout=stream
        )
    started = WorkerProcess(process, path)
    try:
        if is_up:
            started.wait_for("worker started", seconds=90)
        yield started
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            end(process)


def until_empty(dsn: str, folder: Path, *arguments: str, seconds: float = 90) -> WorkerProcess:
    """Run a worker until its queues are empty."""
    with worker(dsn, folder, "--until-empty", *arguments, is_up=False) as started:
        started.wait(seconds)
    return started


def is_alive(pid: int) -> bool:
    """Say whether a process lives; one that is dead and waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class Queue:
    """The database of one test, asked and filled by plain SQL."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute(EFFECTS)

    def one(self, query: str, *parameters: Any) -> Any:
        row = self.connection.execute(query, parameters).fetchone()  # type: ignore[arg-type]
        return row[0] if row else None

    def all(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, parameters).fetchall()  # type: ignore[arg-type]

    def insert(self, task: str, args: str = "{}", **columns: Any) -> int:
        """Insert a job as any program in any language would."""
        names = "".join(f", {name}" for name in columns)
        places = ", %s" * len(columns)
        return self.one(
            f"INSERT INTO pgqueue.jobs (task, args{names}) VALUES (%s, %s{places}) RETURNING id",
            task,
            args,
            *columns.values(),
        )

    def count(self, table: str, where: str = "true") -> int:
        return self.one(f"SELECT count(*) FROM pgqueue.{table} WHERE {where}")

    def effects(self, job_id: int | None = None) -> int:
        return self.one(
            "SELECT count(*) FROM effects WHERE %s::bigint IS NULL OR job_id = %s", job_id, job_id
        )

    def state(self, job_id: int) -> str:
        """Say where a job stands, wherever it is."""
        return self.one(
            """
            SELECT state FROM pgqueue.jobs WHERE id = %(id)s
            UNION ALL SELECT state FROM pgqueue.finished_jobs WHERE id = %(id)s
            UNION ALL SELECT 'dead' FROM pgqueue.dead_jobs WHERE id = %(id)s
            """.replace("%(id)s", str(int(job_id)))
        )

    def wait_for_state(self, job_id: int, state: str, seconds: float = 60) -> None:
        wait_until(
            lambda: self.state(job_id) == state, seconds, f"job {job_id} is {state}, not {self.state(job_id)}"
        )

    def close(self) -> None:
        self.connection.close()


def through(proxy: Proxy, queue: Queue) -> str:
    """Give the way to a queue's database through a proxy."""
    return make_conninfo(queue.dsn, host="127.0.0.1", port=proxy.port)
