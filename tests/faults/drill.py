"""A drill: one database whose history is kept, and whoever works on it there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from tests.faults.arena import WORKER, Arena, Process, until
from tests.faults.invariants import Cancelled, Database, Evidence, Verdict, check
from tests.faults.journal import Enqueues
from tests.guarantees.support import STUCK
from tests.sql.support import Session

KEY = "one:drill"
# The number under which a sleeping worker holds its queue's bell.
BELL_LOCK = 1885827445


class Drill:
    """A database whose history is kept, and whoever works on it: sessions in threads, or real workers."""

    def __init__(self, arena: Arena, name: str) -> None:
        self.arena = arena
        self.name = name
        self.dsn = arena.make_database(name)
        self.enqueues = Enqueues()
        self.evidence = Evidence(enqueues=self.enqueues, recovery_bound_seconds=2.0, fair_bound_seconds=30.0)
        # What an altered worker or producer does otherwise.
        self.habit = ""
        self.launcher = WORKER
        self._stack = contextlib.ExitStack()
        self._threads = self._stack.enter_context(ThreadPoolExecutor(8))
        self._workers = 0
        self.reconnect()
        self.db.connection.execute("INSERT INTO faults.counters (key) VALUES (%s)", (KEY,))

    def open(self, **options: Any) -> Session:
        connection = psycopg.connect(
            self.dsn,
            row_factory=namedtuple_row,
            **{"autocommit": True, "application_name": "drill", **options},
        )
        self._stack.callback(connection.close)
        return Session(connection)

    def reconnect(self) -> None:
        """Open the drill's own sessions anew."""
        self.session = self.open()
        self.db = Database(self._stack.enter_context(contextlib.closing(self.arena.connect(self.name))))

    def close(self) -> None:
        self._stack.close()  # the database goes with the server: dropping it costs a checkpoint

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._threads.submit(function, *arguments)

    # Doing one thing wrong.

    def alter(self, function: str, old: str, new: str) -> None:
        """Replace some text of one of the queue's functions, as it is in this database."""
        text = self._definition(function)
        assert old in text, f"{function} does not say {old!r} any more"
        self.db.connection.execute(text.replace(old, new))

    def replace_body(self, function: str, body: str) -> None:
        """Have one of the queue's functions do something else altogether."""
        head, mark, _ = self._definition(function).partition("AS $function$")
        self.db.connection.execute(f"{head}{mark}{body}$function$")

    def _definition(self, function: str) -> str:
        return self.db.one("SELECT pg_get_functiondef(%s::regproc)", f"pgqueue.{function}")

    # What producers and workers do.

    def enqueue(
        self, count: int = 1, *, task: str = "drill", args: Mapping[str, Any] | None = None, **columns: Any
    ) -> list[int]:
        ids = []
        for mark in self._marks(count):
            for _ in range(2 if self.habit == "asks twice" else 1):
                job_id = self.session.enqueue(task, {"mark": mark, **(args or {})}, **columns)
            self.enqueues.acknowledged[mark] = job_id
            ids.append(job_id)
        return ids

    def enqueue_many(self, count: int) -> None:
        marks = self._marks(count)
        answers = self.session.enqueue_many(*({"task": "drill", "args": {"mark": mark}} for mark in marks))
        self.enqueues.acknowledged |= dict(zip(marks, (job_id for job_id, _ in answers), strict=True))

    def _marks(self, count: int) -> list[str]:
        first = len(self.enqueues.intended)
        marks = [f"{self.name}-{first + number}" for number in range(count)]
        self.enqueues.intended.update(marks)
        return marks

    def leave_effect(self, session: Session, attempt: Any) -> None:
        session.rows(
            "INSERT INTO faults.effects (job_id, attempt, pid) VALUES (%s, %s, 0)",
            attempt.job_id,
            attempt.attempt,
        )

    def complete(self, session: Session, *claimed: Any) -> None:
        """Say that attempts succeeded, and keep what is answered."""
        accepted = set(session.complete(*claimed))
        for attempt in claimed:
            if attempt.job_id in accepted:
                self.accept(session, attempt)
            else:
                self.evidence.refused.append((attempt.job_id, attempt.attempt))

    def accept(self, session: Session, attempt: Any) -> None:
        """Take note that somebody was told that its attempt succeeded."""
        self.evidence.accepted.append((attempt.job_id, attempt.attempt, str(session.worker_id)[:8]))

    def cancel(self, *job_ids: int) -> None:
        for job_id, outcome in self.session.cancel(*job_ids).items():
            at = self.db.one("SELECT clock_timestamp()")
            self.evidence.cancels.append(Cancelled(job_id, outcome, at))

    def cancel_all(self) -> None:
        """Be done with the jobs that were not meant to run."""
        self.cancel(*self.db.column("SELECT id FROM pgqueue.jobs"))

    def count_up(self, session: Session, attempt: Any) -> None:
        """Raise the counter by reading and writing it, protected by the job's key alone."""
        with session.connection.transaction():
            value = session.one("SELECT value FROM faults.counters WHERE key = %s", KEY)
            time.sleep(0.002)
            session.rows("UPDATE faults.counters SET value = %s WHERE key = %s", value + 1, KEY)
            session.rows(
                "INSERT INTO faults.effects (job_id, attempt, key, pid) VALUES (%s, %s, %s, 0)",
                attempt.job_id,
                attempt.attempt,
                KEY,
            )

    def work(self, batch: int = 10, seconds: float = 60.0) -> None:
        """Claim, run and complete until nothing is live."""
        session = self.open()
        end = time.monotonic() + seconds
        while session.one("SELECT count(*) FROM pgqueue.jobs") and time.monotonic() < end:
            session.rows("UPDATE pgqueue.jobs SET run_at = clock_timestamp() WHERE state = 'scheduled'")
            session.call("promote")
            claimed = session.claim(max_jobs=batch)
            for attempt in claimed:
                if attempt.key == KEY:
                    self.count_up(session, attempt)
                else:
                    self.leave_effect(session, attempt)
            if claimed:
                self.complete(session, *claimed)
            else:
                time.sleep(0.005)

    # What a scenario waits for.

    def is_sleeping(self, session: Session) -> bool:
        """Say whether what the session asked for sleeps just now."""
        return self._waits_for(session, "wait_event", "PgSleep")

    def is_waiting(self, session: Session) -> bool:
        """Say whether what the session asked for waits for somebody's lock."""
        return self._waits_for(session, "wait_event_type", "Lock")

    def _waits_for(self, session: Session, column: str, value: str) -> bool:
        pid = session.connection.info.backend_pid
        return self.db.one(f"SELECT {column} FROM pg_stat_activity WHERE pid = %s", pid) == value

    def has_worker(self) -> bool:
        """Say whether some worker is connected."""
        return self.db.one(
            "SELECT count(*) > 0 FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue worker claim'"
        )

    def has_sleeping_worker(self) -> bool:
        """Say whether a worker sleeps: it holds a bell, and claims no more."""
        return self.db.one(
            """
            SELECT EXISTS (
                SELECT FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
                WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.mode = 'ExclusiveLock'
                  AND l.classid = %s
            ) AND EXISTS (
                SELECT FROM pg_stat_activity AS a
                WHERE a.datname = current_database() AND a.application_name = 'pgqueue worker claim'
                  AND a.state = 'idle' AND a.state_change < clock_timestamp() - interval '0.5 s'
            )
            """,
            BELL_LOCK,
        )

    # What happens to the server.

    def delay_writing(self) -> None:
        """Have those who commit write what they ask for themselves, and nobody else anything."""
        self.db.connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        # A page that is written out takes the log up to its last change along, a commit all there is of it.
        self.db.connection.execute("ALTER SYSTEM SET bgwriter_lru_maxpages = 0")
        self.db.connection.execute("ALTER SYSTEM SET autovacuum = off")
        self.db.one("SELECT pg_reload_conf()")
        # The writer of the log is woken by this, if by anything, and from then on sleeps for so long.
        with self.open(options="-c synchronous_commit=off").connection as awakening:
            awakening.execute("INSERT INTO faults.counters (key) VALUES ('awake')")
            row = awakening.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            until(lambda: self.db.one("SELECT pg_current_wal_flush_lsn() >= %s", row and row[0]), 15)

    def cut_the_power(self) -> None:
        self.arena.server.stop_at_once()
        self.arena.server.restart()
        self.arena.heal_settings()
        self.reconnect()

    # What comes of it.

    def blame(self, violation: str) -> None:
        self.evidence.failures.append(violation)

    def blame_whoever_nobody_wakes(self) -> None:
        """No worker sweeps here: whoever sleeps under a free key sleeps for ever."""
        if self.db.one(STUCK):
            self.blame("a job waits for a key that is free, and nobody will wake it")
            self.db.one("SELECT unblocked FROM pgqueue.sweep()")

    def on_close(self, callback: Callable[[], object]) -> None:
        self._stack.callback(callback)

    def worker(self, *options: str, dsn: str = "") -> Process:
        self._workers += 1
        name = f"{self.name}-worker-{self._workers}"
        process = self.arena.worker(name, dsn or self.dsn, *options, launcher=self.launcher)
        self.on_close(process.kill)
        process.start().wait_for("worker started", seconds=120)
        return process

    def verdicts(self) -> list[Verdict]:
        # Of those who are gone the server notices it a moment later.
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND application_name NOT IN ('drill', 'faults admin')"
        )
        until(lambda: not self.db.one(others), 30)
        self.evidence.leaks |= {
            "advisory_locks": (
                self.db.one(
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = "
                    "(SELECT oid FROM pg_database WHERE datname = current_database())"
                ),
                0,
            ),
            "idle_in_transaction": (
                self.db.one(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND state LIKE 'idle in transaction'"
                ),
                0,
            ),
        }
        return check(self.db, self.evidence)
