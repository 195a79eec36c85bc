"""The campaign: load, faults, healing, a drain, and the checks.

What is promised is checked against journals and a history that the queue knows nothing of.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.faults.arena import Arena, Process, log_lines, until
from tests.faults.invariants import Database, Evidence, Verdict, Watch, check, wait_for_drain
from tests.faults.journal import Enqueues, Journal
from tests.faults.nemesis import Nemesis
from tests.faults.producer import CROSSED_KEYS, QUEUES, SINGLE_KEYS
from tests.faults.proxy import Proxy

DBNAME = "campaign"
LEASE_SECONDS = 2.0
# The longest pause between two tries to connect is 5 s; then come a poll, a claim, and a busy machine.
RECOVERY_SECONDS = 10.0
FAIR_SECONDS = 3.0
IDLE_CONNECTIONS = 4  # of a worker: claim, finish, listen, lease


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    seconds: float
    workers: int
    processes: int
    slots: int
    producers: int
    jobs_per_second: float  # of each producer
    crowd: int
    drain_seconds: float


SIZES = {
    "smoke": Size(
        28, workers=3, processes=2, slots=8, producers=3, jobs_per_second=20, crowd=150, drain_seconds=30
    ),
    "long": Size(
        600, workers=4, processes=2, slots=12, producers=4, jobs_per_second=25, crowd=600, drain_seconds=90
    ),
}


class Campaign:
    """One run. `run` gives the verdicts; what was seen on the way is in the arena's logs."""

    def __init__(self, arena: Arena, size: Size, seed: int) -> None:
        self._arena = arena
        self._size = size
        self._seed = seed
        dsn = arena.make_database(DBNAME)
        self._proxy = Proxy(lambda: arena.server.socket)
        through_proxy = arena.dsn(DBNAME, host="127.0.0.1", port=self._proxy.port)
        # The last worker and the last producer have a network between them and the server; the others'
        # clocks are wrong, by an hour, either way.
        self._workers = [
            arena.worker(
                f"worker-{number}",
                through_proxy if number == size.workers - 1 else dsn,
                *self._options(number),
                skew_seconds=(3600.0, -3600.0, 0.0)[number % 3],
            )
            for number in range(size.workers)
        ]
        self._producers = [
            arena.program(
                f"producer-{number}",
                through_proxy if number == size.producers - 1 else dsn,
                *("-m", "tests.faults.producer", str(number), str(seed), str(size.jobs_per_second)),
            )
            for number in range(size.producers)
        ]
        self.evidence = Evidence(secret=arena.secret)
        self._watch = Watch(lambda: arena.connect(DBNAME, connect_timeout=2), secret=arena.secret)
        self._nemesis = Nemesis(
            arena,
            DBNAME,
            self._workers,
            self._producers,
            self._proxy,
            seed=seed,
            lease_seconds=LEASE_SECONDS,
            recovery_seconds=RECOVERY_SECONDS,
            is_patient=size is SIZES["long"],
        )

    def _options(self, number: int) -> list[str]:
        queues = [f"-q{queue}" for queue in QUEUES]
        return [
            *queues,
            f"-qown-{number}:1",
            *("-c", str(self._size.slots), "--processes", str(self._size.processes)),
            *("--lease-seconds", str(LEASE_SECONDS), "--poll-seconds", "0.5"),
            *("--kill-grace-seconds", "0.5", "--grace-seconds", "2", "--unknown-task-grace-seconds", "0"),
        ]

    def run(self, seconds: float) -> list[Verdict]:
        began_at = time.monotonic()
        for worker in self._workers:
            worker.start()
        for worker in self._workers:
            worker.wait_for("worker started", seconds=60)
        # Who was killed has to start first, and how long that takes is this machine's business.
        self.evidence.recovery_bound_seconds = RECOVERY_SECONDS + time.monotonic() - began_at
        with self._arena.connect(DBNAME) as connection:
            for key in (*SINGLE_KEYS, *CROSSED_KEYS, "crowd"):
                connection.execute("INSERT INTO faults.counters (key) VALUES (%s)", (key,))
            descriptors = self._settle(Database(connection))
        for producer in self._producers:
            producer.start()
        for producer in self._producers:
            producer.wait_for("producer started")
        self._watch.start()
        try:
            self._nemesis.run(seconds)
            self._nemesis.retire_producers()
            self._nemesis.heal()
            with self._arena.connect(DBNAME) as connection:
                return self._conclude(Database(connection), descriptors)
        finally:
            self._watch.stop()
            self._nemesis.close()
            self._proxy.close()

    def _settle(self, db: Database) -> int:
        """Wait until the workers are idle; gives the most descriptors that one of them has."""
        until(lambda: _count_sessions(db, "pgqueue worker%") == IDLE_CONNECTIONS * len(self._workers), 10)
        return max(_count_descriptors(worker) for worker in self._workers)

    def _conclude(self, db: Database, descriptors: int) -> list[Verdict]:
        evidence = self.evidence
        # With the nemesis gone, a reaper looks for a lease and then takes back what has expired.
        self._watch.healed(db.one("SELECT clock_timestamp()"), LEASE_SECONDS + 3.0)
        evidence.drain_seconds, evidence.swept = wait_for_drain(db, self._size.drain_seconds)
        self._send_crowd(db)
        wait_for_drain(db, self._size.drain_seconds)
        if left := db.all("SELECT to_jsonb(j) FROM pgqueue.jobs AS j ORDER BY id LIMIT 100"):
            text = "".join(f"{json.dumps(row)}\n" for (row,) in left)
            (self._arena.logs / "left.jsonl").write_text(text)
        evidence.fair_waits = db.column(
            """
            SELECT extract(epoch FROM min(h.at) - b.at)::double precision
            FROM faults.history AS b
            JOIN faults.history AS h ON h.job_id = b.job_id AND h.event = 'claimed'
            WHERE b.event = 'born' AND b.run_at > %s::timestamptz AND b.concurrency_key IS NULL
            GROUP BY b.job_id, b.at
            """,
            self._crowd_at,
        )
        evidence.fair_bound_seconds = FAIR_SECONDS
        self._watch.stop()
        evidence.looks, evidence.seen = self._watch.looks, self._watch.seen
        self._look_for_leaks(db, descriptors)
        evidence.enqueues = Enqueues.read(self._arena.logs)
        evidence.cancels = self._nemesis.cancels
        evidence.recoveries, evidence.failures = self._nemesis.recoveries, self._nemesis.failures
        self._read_logs()
        evidence.secret_logs = [*self._arena.logs.iterdir(), self._arena.server.log]
        return check(db, evidence)

    def _send_crowd(self, db: Database) -> None:
        """Put a crowd of one hot key at the head, and others behind it: how long do these wait?"""
        journal = Journal(self._arena.logs, "crowd")
        self._crowd_at = db.one("SELECT clock_timestamp()::text")

        def send(task: str, count: int, more: str, priority: int) -> None:
            marks = [journal.mark() for _ in range(count)]
            journal.intend(*marks)
            ids = db.column(
                "INSERT INTO pgqueue.jobs (task, queue, priority, args) SELECT %s, %s, %s, "
                "jsonb_build_object('mark', m) || %s::jsonb "
                "FROM unnest(%s::text[]) WITH ORDINALITY AS b (m, nth) ORDER BY nth RETURNING id",
                task,
                QUEUES[0],
                priority,
                more,
                marks,
            )
            journal.acknowledge(marks, ids)

        send("count", self._size.crowd, '{"key": "crowd"}', 0)
        for _ in range(20):
            send("touch", 5, "{}", 1)
            time.sleep(0.05)
        journal.close()

    def _look_for_leaks(self, db: Database, descriptors: int) -> None:
        evidence, workers = self.evidence, self._workers
        # Threads of a pool end, sessions of those who were killed are noticed: give it a moment.
        until(lambda: _count_sessions(db, "pgqueue worker%") == IDLE_CONNECTIONS * len(workers), 10)
        handlers = self._size.workers * (self._size.slots + 1 + self._size.processes * 10)
        evidence.leaks = {
            "worker_sessions": (_count_sessions(db, "pgqueue worker%"), IDLE_CONNECTIONS * len(workers)),
            "handler_sessions": (_count_sessions(db, "handler"), handlers),
            "idle_in_transaction": (
                db.one(
                    "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%%' AND %s",
                    True,
                ),
                0,
            ),
            # Of each queue's idle workers one holds the bell and the duty.
            "advisory_locks": (_count_advisory_locks(db), 2 * (len(QUEUES) + len(workers))),
            # One more may have been started for the suspects of a crash; a child is a socket and a board.
            "children": (
                sum(len(worker.children()) for worker in workers),
                (self._size.processes + 1) * len(workers),
            ),
            "parent_descriptors": (max(_count_descriptors(worker) for worker in workers), descriptors + 4),
        }
        for worker in workers:
            code = worker.end()
            if code != 0:
                evidence.failures.append(f"{worker.name} ended with {code} at the end")
        until(lambda: not self._arena.left_processes(), 5)
        until(lambda: not _count_sessions(db, "%"), 10)
        evidence.leaks |= {
            "sessions_after": (_count_sessions(db, "%"), 0),
            "advisory_locks_after": (_count_advisory_locks(db), 0),
            "processes_after": (len(self._arena.left_processes()), 0),
            "temporary_files": (len(list(self._arena.temporary.iterdir())), 0),
        }

    def _read_logs(self) -> None:
        for worker in self._workers:
            for line in log_lines(worker.log):
                match line.get("event"):
                    case "job succeeded":
                        self.evidence.accepted.append((line["job_id"], line["attempt"], line["worker"]))
                    case "claim lost":
                        self.evidence.refused.append((line["job_id"], line["attempt"]))
                    case "a part of the worker failed" | "outcome refused" | "maintenance failed":
                        self.evidence.failures.append(f"{worker.name}: {line['event']}: {line.get('error')}")

    def summary(self) -> list[str]:
        """Tell what was done and what came of it, a few lines for people."""
        evidence = self.evidence
        with self._arena.connect(DBNAME) as connection:
            states = Database(connection).all(
                "SELECT state, count(*) FROM faults.everywhere GROUP BY state ORDER BY state"
            )
        faults = self._nemesis.faults
        worst: dict[str, float] = {}
        for name, seconds in evidence.recoveries:
            worst[name] = max(worst.get(name, 0.0), seconds)
        slowest = sorted(worst.items(), key=lambda pair: -pair[1])[:5]
        return [
            f"faults {faults.total()}: " + _counted(faults),
            "jobs: " + ", ".join(f"{state} {count}" for state, count in states),
            f"answers lost on the way: {self._proxy.answers_lost}",
            "slowest recoveries: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in slowest),
            "errors by SQLSTATE: " + _counted(_count_errors(self._arena.server.log)),
            *([f"seen: {'; '.join(evidence.seen[:5])}"] if evidence.seen else []),
        ]


def _count_sessions(db: Database, application_name: str) -> int:
    return db.one(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name LIKE %s "
        "AND application_name <> 'faults admin' AND backend_type = 'client backend'",
        DBNAME,
        application_name,
    )


def _count_advisory_locks(db: Database) -> int:
    return db.one(
        "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database "
        "WHERE l.locktype = 'advisory' AND d.datname = %s",
        DBNAME,
    )


def _count_descriptors(worker: Process) -> int:
    return len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))


def _count_errors(log: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    with log.open(errors="replace") as lines:
        for line in lines:
            head, _, rest = line.partition("] ")
            if head and rest[6:].partition(": ")[2].startswith(("ERROR:", "FATAL:", "PANIC:")):
                found[rest[:5]] += 1
    return found


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.most_common()) or "none"


def run(arena: Arena, size_name: str, seconds: float | None, seed: int, say: Any = print) -> bool:
    """Run one campaign, say what came of it, and whether everything held."""
    size = SIZES[size_name]
    seconds = size.seconds if seconds is None else seconds
    began_at = time.monotonic()
    say(
        f"seed {seed}, {size_name}, {seconds:g} s of faults: PostgreSQL {arena.server.lease.version}, "
        f"{size.workers} workers of {size.processes} children, {size.producers} producers, "
        f"lease {LEASE_SECONDS:g} s, psycopg {psycopg.__version__}, Python {sys.version.partition(' ')[0]}"
    )
    campaign = Campaign(arena, size, seed)
    verdicts = campaign.run(seconds)
    for line in (*campaign.summary(), *(verdict.line() for verdict in verdicts)):
        say(line)
    violated = [verdict.name for verdict in verdicts if verdict.violations]
    said = f"VIOLATED: {', '.join(violated)}" if violated else "all invariants hold"
    say(f"{said} ({time.monotonic() - began_at:.0f} s)")
    return not violated
