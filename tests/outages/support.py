"""Servers to break, a load to keep up meanwhile, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import embedded
from tests.process.support import Queue, WorkerProcess, worker
from tests.support import children_of, is_alive, wait_until

IN_CI = "CI" in os.environ
APP = "tests.outages.jobs:app"
ROLE = "app"
# A standby may not have fewer connections than the server it is a copy of.
SETTINGS: Mapping[str, str | int] = {"max_connections": 60}

LOST, TROUBLE = "database lost, reconnecting", "database in trouble, trying again"
BACK = "database is back"
KNOWN = (LOST, TROUBLE, "queues that no task of this application uses and that nobody knows")
POLL_SECONDS = 60.0

_ASLEEP = """
SELECT count(*)
FROM pg_locks
WHERE locktype = 'advisory'
  AND mode = 'ExclusiveLock'
  AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND classid = 1885827445
  AND objid::bigint = hashtext(%s)::bigint & 4294967295
"""


class Node:
    """A durable server of one test, with the queue's tables; `settings` are in force at every start."""

    def __init__(self, folder: Path, settings: Mapping[str, str | int] | None = None) -> None:
        self.folder = folder
        self.settings = {**SETTINGS, **(settings or {})}
        self.start()

    def start(self) -> None:
        self._lease = embedded.start(self.folder, settings=self.settings)

    @property
    def app_dsn(self) -> str:
        """The DSN that workers and producers get: an ordinary role's."""
        return make_conninfo(self.admin_dsn, user=ROLE)

    @property
    def admin_dsn(self) -> str:
        return self._lease.dsn()

    @property
    def socket(self) -> str:
        variables = self._lease.environment()
        return f"{variables['PGHOST']}/.s.PGSQL.{variables['PGPORT']}"

    @property
    def is_up(self) -> bool:
        return is_alive(self._lease.pid)

    def says(self, text: str) -> int:
        """Count how often its log says that."""
        return (self._lease.data / "server.log").read_text(errors="replace").count(text)

    def stop(self) -> None:
        """Stop it as an operator does: `pg_ctl -m fast`."""
        self._end(signal.SIGINT)

    def stop_at_once(self) -> None:
        """Stop it without a checkpoint: `pg_ctl -m immediate`. The next start recovers."""
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill all of its processes at once, as a power cut does."""
        for pid in (self._lease.pid, *children_of(self._lease.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        everybody = [self._lease.pid, *children_of(self._lease.pid)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._lease.pid, number)
        wait_until(lambda: not any(map(is_alive, everybody)), 60, "the server has ended")

    def restart(self) -> None:
        self._lease.close()
        self.start()

    def close(self) -> None:
        if self.is_up:
            self.stop_at_once()
        self._lease.close()


def copy_of(seed: Path, folder: Path) -> Path:
    """Copy a stopped server's data, with its owner; gives the copy."""
    (data,) = seed.glob("pg??")
    subprocess.run(["cp", "-a", data, folder], check=True)
    return folder / data.name


def make_standby(folder: Path) -> None:
    """Let the stopped server of this folder be a standby from its next start on."""
    (data,) = (each for each in folder.glob("pg??") if each.is_dir())
    signal_file = data / "standby.signal"
    signal_file.touch()
    if os.geteuid() == 0:
        os.chown(signal_file, data.stat().st_uid, data.stat().st_gid)


def either(*nodes: Node, target_session_attrs: str | None = "read-write") -> str:
    """Give a DSN that leads to the one of these servers that takes writes; None leaves that unsaid."""
    parts = [conninfo_to_dict(node.app_dsn) for node in nodes]
    places = {name: ",".join(str(part[name]) for part in parts) for name in ("host", "port")}
    return make_conninfo(nodes[0].app_dsn, target_session_attrs=target_session_attrs, **places)


class Effect(NamedTuple):
    """One start of a handler; `at` is monotonic, the same clock in all processes."""

    job_id: int
    attempt: int
    pid: int
    at: float


class Crew:
    """Some workers of one test, each with a queue of its own besides the common one."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.workers: list[WorkerProcess] = []
        self._effects = folder / "effects"
        self._effects.touch()

    @contextlib.contextmanager
    def start(self, count: int, *options: str, is_up: bool = True) -> Iterator[list[WorkerProcess]]:
        """Start workers; they are ended with the block."""
        with contextlib.ExitStack() as stack:
            for number in range(count):
                queues = ("-q", "default", "-q", f"solo-{number}")
                self.workers.append(
                    stack.enter_context(
                        worker(
                            self.dsn,
                            self.folder,
                            *queues,
                            *options,
                            app=APP,
                            is_up=False,
                            env={"OUTAGE_EFFECTS": str(self._effects)},
                        )
                    )
                )
            if is_up:
                for started in self.workers:
                    started.wait_for("worker started", seconds=60)
            yield self.workers

    def effects(self) -> list[Effect]:
        found = []
        for line in self._effects.read_text().splitlines():
            job_id, attempt, pid, at = line.split()
            found.append(Effect(int(job_id), int(attempt), int(pid), float(at)))
        return found

    def starts_of(self, job_id: int) -> list[Effect]:
        return [effect for effect in self.effects() if effect.job_id == job_id]

    def wait_for_start(self, job_id: int, seconds: float = 60) -> float:
        """Wait until a job's handler starts, and give when."""
        message = f"job {job_id} starts; the workers said:\n{self.said()}"
        return wait_until(lambda: self.starts_of(job_id), seconds, message)[0].at

    def said(self) -> str:
        """Give what the workers' logs say, but for jobs that went well."""
        lines = [line for one in self.workers for line in one.text().splitlines()]
        return "\n".join(line for line in lines if '"job succeeded"' not in line)

    def wait_until_lost(self, outages: int = 1) -> None:
        for one in self.workers:
            one.wait_for(LOST, outages)

    def complaints(self) -> list[dict[str, Any]]:
        """Give what the workers warned of, but for outages, and for the queues that only we know."""
        return [
            line
            for one in self.workers
            for line in one.lines()
            if line["level"] in ("warning", "error", "critical") and line["event"] not in KNOWN
        ]

    def lines_said(self, event: str) -> list[int]:
        """Count each worker's lines of an event."""
        return [len(one.lines(event)) for one in self.workers]

    def outages_said(self) -> list[tuple[int, int]]:
        """Count, for each worker, the lines that say an outage begins, and that it is over."""
        return list(zip(self.lines_said(LOST), self.lines_said(BACK), strict=True))


class Producer(threading.Thread):
    """Inserts jobs one by one, whatever happens, and remembers which of them it was answered."""

    _marks = itertools.count(1)

    def __init__(self, dsn: str, pause_seconds: float = 0.005, seconds: float = 0.01) -> None:
        super().__init__(daemon=True)
        self._dsn = make_conninfo(dsn, connect_timeout=2)
        self._pause_seconds = pause_seconds
        self._seconds = seconds
        self._is_over = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        self.acknowledged: set[int] = set()
        self.refused: set[int] = set()

    def run(self) -> None:
        while not self._is_over.wait(self._pause_seconds):
            mark = next(self._marks)
            try:
                if self._connection is None:
                    self._connection = psycopg.connect(self._dsn, autocommit=True)
                self._connection.execute(
                    "INSERT INTO pgqueue.jobs (task, args) "
                    "VALUES ('work', jsonb_build_object('mark', %s::int, 'seconds', %s::float))",
                    (mark, self._seconds),
                )
                self.acknowledged.add(mark)
            except psycopg.Error:
                # Whether it is there nobody knows.
                self.refused.add(mark)
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                self._is_over.wait(0.05)

    def stop(self) -> None:
        self._is_over.set()
        self.join(30)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def check_nothing_is_lost(queue: Queue, producer: Producer, seconds: float = 60) -> None:
    """Wait until the queues are empty, and compare what ended with what was acknowledged."""
    wait_until(lambda: queue.count("jobs") == 0, seconds, "the queues are empty")
    asked = producer.acknowledged | producer.refused
    done = queue.all("SELECT (args->>'mark')::int FROM pgqueue.finished_jobs WHERE args ? 'mark'")
    marks = [mark for (mark,) in done if mark >= min(asked)]

    assert len(marks) == len(set(marks))
    assert producer.acknowledged <= set(marks) <= asked
    assert queue.count("dead_jobs") == queue.count("finished_jobs", "state <> 'succeeded'") == 0


def check_no_attempt_is_burnt(queue: Queue) -> None:
    assert queue.count("finished_jobs", "attempt <> 1 OR crashes <> 0 OR errors IS NOT NULL") == 0


def check_nobody_is_deaf(queue: Queue, crew: Crew) -> None:
    """See that each worker sleeps and is woken by an insert, long before it polls."""
    for number in range(len(crew.workers)):
        name = f"solo-{number}"
        wait_until(lambda name=name: queue.one(_ASLEEP, name), 60, f"{name} is asleep\n{crew.said()}")
        began_at = time.monotonic()
        crew.wait_for_start(queue.insert("work", queue=name), POLL_SECONDS / 4)
        assert time.monotonic() - began_at < POLL_SECONDS / 4
