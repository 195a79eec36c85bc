"""The course of the demo: enqueue in three ways, work, kill a child half-way, measure, check."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from pgqueue import migrate
from pgqueue.client import Client
from pgqueue.database import Connection, connect, run
from pgqueue.demo import tasks
from pgqueue.demo.check import find_differences, read_files
from pgqueue.demo.processes import ended_by_signals, kill_at_work, start_python
from pgqueue.demo.report import Report, make_report
from pgqueue.errors import PgqueueError
from pgqueue.sql import Statement
from pgqueue.sql import demo as statements
from pgqueue.sql.demo import RunningAttempt
from pgqueue.sql.presence import register_tasks

T = TypeVar("T")

APP = "pgqueue.demo.tasks:app"
QUEUE = "demo"
PROCESSES = 2
SLOTS = 4
PICK_UPS = 50
# The fewest among which a child can still be caught at work at half-time.
FEWEST_FILES = 100

_POLL_SECONDS = 0.02
_STALL_SECONDS = 60.0
_STOP_SECONDS = 40.0
# A worker that finds nothing polls for some 30 ms and then sleeps until it is rung: only that is idle.
_IDLE_SECONDS = (0.03, 0.06)
_LOG_LINES = 20

# Three ways for a file not to be Python.
BROKEN: Mapping[str, bytes] = {
    "syntax_error.py": b"def greet(name:\n    print(name)\n",
    "nul_byte.py": b"answer = 42\0\n",
    "not_utf8.py": 'greeting = "grüß dich"\n'.encode("latin-1"),
}


@dataclass(frozen=True, slots=True)
class Narrator:
    """Where the demo says what it does: a sentence, or how far it is (a label and a total)."""

    say: Callable[[str], None]
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def find_library_files() -> list[str]:
    """Find the source files of the running Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    strangers = {"site-packages", "dist-packages"}
    return sorted(
        str(path)
        for path in root.rglob("*.py")
        if path.is_file() and strangers.isdisjoint(path.relative_to(root).parts)
    )


def perform(dsn: str, schema: str, narrator: Narrator, max_files: int | None = None) -> Report:
    """Run the demo on this database; its tables and its dead jobs stay there to be looked at.

    Raises:
        SchemaMismatch: the database has no schema of ours, or another version's.
        PgqueueError: it came to no end. What came out wrong is in the report instead.
    """
    began_at = time.monotonic()
    migrate.check(dsn, schema)
    files = find_library_files()[:max_files]
    if len(files) < FEWEST_FILES:
        raise PgqueueError(
            f"the demo needs {FEWEST_FILES} source files; in {sysconfig.get_path('stdlib')} are {len(files)}"
        )
    with (
        ended_by_signals(),
        TemporaryDirectory(prefix="pgqueue-demo-") as folder,
        connect(dsn, application_name="pgqueue demo") as connection,
    ):
        return _Course(dsn, schema, connection, Path(folder), narrator).run(files, began_at)


class _Course:
    def __init__(
        self, dsn: str, schema: str, connection: Connection[Any], folder: Path, narrator: Narrator
    ) -> None:
        self._schema = schema
        self._connection = connection
        self._client = Client(schema=schema)
        self._folder = folder
        self._say = narrator.say
        self._progress = narrator.progress
        # What Python has to say about the style of its own library is nobody's business here.
        self._environment = {**os.environ, "PGQUEUE_SCHEMA": schema, "PYTHONWARNINGS": "ignore"}
        if dsn:
            self._environment["PGQUEUE_DSN"] = dsn
        self._since = 0
        self._remaining = 0

    def run(self, files: Sequence[str], began_at: float) -> Report:
        self._prepare()
        self._say(
            f"Cataloguing the {len(files):,} source files of Python {platform.python_version()}'s standard "
            f"library, and {len(BROKEN)} broken ones."
        )
        broken = self._plant()
        paths = [*files, *broken]
        self._enqueue(paths)
        with self._worker() as worker:
            killed = self._work_off(worker)
            self._say(f"Measuring how long {PICK_UPS} single jobs take to their handler, in an idle queue.")
            self._enqueue_singly(worker)
            wrong = self._stop(worker)
        self._say("Reading every file again, to check.")
        with self._progress("Reading", len(paths)) as advance:
            readings = read_files(paths, self._environment, advance)
        jobs = self._ask(statements.outcomes(self._since))
        catalogue = self._ask(statements.catalogue())
        pick_up_seconds = self._ask(statements.pick_up_seconds())
        wrong += find_differences(readings, catalogue, jobs, [attempt.job_id for attempt in killed])
        wrong += [
            f"{reading.path}: meant to be broken, and parses"
            for reading in readings
            if reading.path in broken and reading.fault is None
        ]
        if not killed:
            wrong.append("no child could be caught at work, so none was killed")
        if len(pick_up_seconds) != PICK_UPS:
            wrong.append(f"of {PICK_UPS} single jobs {len(pick_up_seconds)} met their handler")
        total_seconds = time.monotonic() - began_at
        return make_report(catalogue, jobs, killed, pick_up_seconds, total_seconds, wrong)

    def _prepare(self) -> None:
        """Have the stage for ourselves, and clear it of an earlier run."""
        if not self._ask(statements.take_stage()):
            raise PgqueueError("another demo is running in this database; wait for its end")
        names = [task.name for task in tasks.app.registry]
        if stranger := self._ask(statements.find_stranger(names)):
            raise PgqueueError(
                f"queue {QUEUE!r} holds jobs that are not the demo's (task {stranger!r}), "
                "and must be left alone; try another database"
            )
        self._ask(statements.clear(names))
        self._ask(statements.make_catalogue())
        # As a worker does when it starts: from now on a plain INSERT knows the task's queue and limits.
        self._ask(register_tasks(tasks.app.registry.registrations()))

    def _plant(self) -> list[str]:
        paths = [self._folder / name for name in BROKEN]
        for path in paths:
            path.write_bytes(BROKEN[path.name])
        return [str(path) for path in paths]

    def _enqueue(self, paths: Sequence[str]) -> None:
        """Ask for a job for each file, a third of them in each way."""
        by_sql, by_python, by_shell = paths[0::3], paths[1::3], paths[2::3]
        job_ids = self._ask(statements.insert_jobs(by_sql))
        self._since = min(job_ids)
        self._say(f"{len(by_sql):6,} jobs by SQL      INSERT INTO {self._schema}.jobs (task, args) SELECT …")

        wanted = tasks.catalogue.using(headers={"way": "enqueue_many"})
        self._client.enqueue_many((wanted.job(path=path) for path in by_python), self._connection)
        self._say(
            f"{len(by_python):6,} jobs in Python   app.enqueue_many(catalogue.job(path=path) for path in …)"
        )

        lines = [
            json.dumps({"task": tasks.catalogue.name, "args": {"path": path}, "headers": {"way": "cli"}})
            for path in by_shell
        ]
        self._run_enqueue("\n".join(lines).encode())
        self._say(f"{len(by_shell):6,} jobs by a shell  … | pgqueue enqueue --lines -")
        self._remaining = len(paths)

    def _run_enqueue(self, lines: bytes) -> None:
        with start_python(
            *("-m", "pgqueue", "enqueue", "--app", APP, "--lines", "-"),
            environment=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as enqueue:
            _, told = enqueue.communicate(lines)
            if enqueue.returncode:
                raise PgqueueError(
                    f"pgqueue enqueue ended with {enqueue.returncode}: {told.decode(errors='replace')}"
                )

    @contextmanager
    def _worker(self) -> Iterator[subprocess.Popen[bytes]]:
        arguments = ("worker", "--app", APP, "-q", f"{QUEUE}:{SLOTS}", "--processes", str(PROCESSES))
        self._say(f"       a worker         pgqueue {' '.join(arguments)}")
        with (
            (self._folder / "worker.log").open("wb") as log,
            start_python(
                *("-m", "pgqueue", *arguments),
                environment=self._environment,
                stdout=log.fileno(),
                stderr=log.fileno(),
            ) as worker,
        ):
            yield worker

    def _work_off(self, worker: subprocess.Popen[bytes]) -> list[RunningAttempt]:
        """See all jobs end, and kill a child half-way; give what ran in it."""
        half = self._remaining // 2
        with self._progress("Working", self._remaining - half) as advance:
            self._wait(worker, half, advance)
        killed = self._kill_a_child()
        if killed:
            names = " and ".join(Path(attempt.path).name for attempt in killed)
            self._say(
                f"Half-way: killed child process {killed[0].pid} (SIGKILL) while it was reading {names}."
            )
        with self._progress("Working on", self._remaining) as advance:
            self._wait(worker, 0, advance)
        return killed

    def _kill_a_child(self) -> list[RunningAttempt]:
        """Kill a child while it runs jobs, and give those; nothing if the queue is empty first."""
        while self._ask(statements.count_remaining(self._since)):
            attempts = self._ask(statements.running())
            for pid in {attempt.pid for attempt in attempts}:
                killed = kill_at_work(pid, partial(self._ask, statements.running(pid)))
                if killed:
                    return killed
            time.sleep(0.001)
        return []

    def _enqueue_singly(self, worker: subprocess.Popen[bytes]) -> None:
        for _ in range(PICK_UPS):
            time.sleep(random.uniform(*_IDLE_SECONDS))
            self._client.enqueue(tasks.pick_up.job(), self._connection)
            self._wait(worker, 0)

    def _stop(self, worker: subprocess.Popen[bytes]) -> list[str]:
        """Stop the worker as any supervisor would, and say what is wrong with how it ends."""
        worker.send_signal(signal.SIGTERM)
        try:
            code = worker.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"the worker has not ended {_STOP_SECONDS:g} s after SIGTERM"]
        return [f"the worker ended with {code} on SIGTERM"] if code else []

    def _wait(
        self,
        worker: subprocess.Popen[bytes],
        at_most: int,
        advance: Callable[[int], None] = lambda _ended: None,
    ) -> None:
        """Wait until at most so many jobs remain."""
        moved_at = time.monotonic()
        while (remaining := self._ask(statements.count_remaining(self._since))) > at_most:
            if remaining != self._remaining:
                advance(self._remaining - remaining)
                self._remaining = remaining
                moved_at = time.monotonic()
            if worker.poll() is not None:
                raise self._failure(f"the worker ended with {worker.returncode} in the middle of its work")
            if time.monotonic() - moved_at > _STALL_SECONDS:
                raise self._failure(f"no job has ended for {_STALL_SECONDS:g} s, {remaining:,} remain")
            time.sleep(_POLL_SECONDS)
        advance(self._remaining - remaining)
        self._remaining = remaining

    def _failure(self, message: str) -> PgqueueError:
        lines = (self._folder / "worker.log").read_text(errors="replace").splitlines()
        self._say("\n".join(["The end of the worker's log:", *lines[-_LOG_LINES:]]))
        return PgqueueError(message)

    def _ask(self, statement: Statement[T]) -> T:
        return run(self._connection, statement, self._schema)
