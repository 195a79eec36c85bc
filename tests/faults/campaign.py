"""The campaign: load, faults, healing, a drain, and the checks.

What is promised is checked against journals and a history that the queue knows nothing of.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pgqueue.runtime import link
from pgqueue.runtime.bell import MAINTAINERS
from tests.faults.arena import Arena, Process, log_lines, until
from tests.faults.invariants import Database, Evidence, Verdict, Watch, check, wait_for_drain
from tests.faults.jobs import ASIDE_THREADS, TRANSACTIONAL
from tests.faults.journal import Enqueues, Journal
from tests.faults.nemesis import Nemesis
from tests.faults.producer import CROSSED_KEYS, QUEUES, SINGLE_KEYS
from tests.faults.proxy import Proxy

DBNAME = "campaign"
LEASE_SECONDS = 2.0
# Half of it may be the pause between two tries to connect; then come a poll, a claim, and a busy machine.
RECOVERY_SECONDS = 2 * link._LONGEST_PAUSE_SECONDS
# Longer than this no machine takes to start a worker that has nothing wrong with it. What a machine takes to
# start one tells how slow it is: everything else that a recovery needs is less than two more of them.
SLOWEST_START_SECONDS = 10.0
STARTS_A_RECOVERY = 3
# A reaper takes back what has expired once it has looked for a lease without a gap, perhaps the second time.
EXPIRY_SECONDS = 2 * LEASE_SECONDS + 10.0
# Who waits behind a crowd waits until most of it is gone: on a slow machine a part of that time is the bound.
FAIR_SECONDS = 3.0
FAIR_PART = 0.4
SCHEDULE = "beat"
TICK_SECONDS = 2
MAKE_SCHEDULE = """
INSERT INTO pgqueue.schedules (name, cron, task, catch_up, catch_up_limit, next_tick)
VALUES (%s, %s, 'tick', 'all', 1000,
        to_timestamp(%s * ceil(extract(epoch FROM clock_timestamp()) / %s)::bigint))
RETURNING next_tick
"""
# Connections that broke, a server that has no room or goes away, statements that were cancelled or could not
# wait, a server that takes no writes; and two handlers that lock each other's rows.
EXPLAINED = re.compile("08...|53...|57...|55P03|25006")
HANDLERS_EMBRACE = ("40P01", "handler")
_ERROR = re.compile(r"\] (\w{5}) ([^:]*): (?:ERROR|FATAL|PANIC):  ")
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
        45, workers=3, processes=2, slots=8, producers=3, jobs_per_second=20, crowd=150, drain_seconds=120
    ),
    "long": Size(
        600, workers=4, processes=2, slots=12, producers=4, jobs_per_second=15, crowd=600, drain_seconds=120
    ),
}


class Campaign:
    """One run. `run` gives the verdicts; what was seen on the way is in the arena's logs."""

    def __init__(self, arena: Arena, size: Size, seed: int, only: Collection[str]) -> None:
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
        self.evidence = Evidence(secret=arena.secret, transactional=TRANSACTIONAL)
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
            only=only,
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
        for worker in self._workers:
            worker.start()
        for worker in self._workers:
            worker.wait_for("worker started")
            worker.look()
        with self._arena.connect(DBNAME) as connection:
            for key in (*SINGLE_KEYS, *CROSSED_KEYS, "crowd"):
                connection.execute("INSERT INTO faults.counters (key) VALUES (%s)", (key,))
            self._first_tick = Database(connection).one(
                MAKE_SCHEDULE, SCHEDULE, f"*/{TICK_SECONDS} * * * * *", TICK_SECONDS, TICK_SECONDS
            )
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
                # What is asked in the end looks at everything there ever was.
                connection.execute("SET statement_timeout = 0")
                return self._conclude(Database(connection), descriptors)
        finally:
            self._watch.stop()
            self._nemesis.close()
            self._proxy.close()

    def _settle(self, db: Database) -> int:
        """Wait until the workers are idle; gives the most descriptors that one of them has."""
        until(lambda: _count_sessions(db, "pgqueue worker%") == IDLE_CONNECTIONS * len(self._workers), 60)
        return max(_count_descriptors(worker) for worker in self._workers)

    def _conclude(self, db: Database, descriptors: int) -> list[Verdict]:
        evidence = self.evidence
        self._watch.healed(db.one("SELECT clock_timestamp()"), EXPIRY_SECONDS)
        evidence.ticks_due[SCHEDULE] = self._stop_ticks(db)
        evidence.drain_seconds, evidence.swept = wait_for_drain(db, self._size.drain_seconds)
        crowd, others = self._send_crowd(db)
        wait_for_drain(db, self._size.drain_seconds)
        if left := db.all("SELECT to_jsonb(j) FROM pgqueue.jobs AS j ORDER BY id LIMIT 100"):
            text = "".join(f"{json.dumps(row)}\n" for (row,) in left)
            (self._arena.logs / "left.jsonl").write_text(text)
        evidence.fair_waits = db.column(
            """
            SELECT extract(epoch FROM min(h.at) - b.at)::double precision
            FROM faults.history AS b
            JOIN faults.history AS h ON h.job_id = b.job_id AND h.event = 'claimed'
            WHERE b.event = 'born' AND b.job_id = ANY (%s)
            GROUP BY b.job_id, b.at
            """,
            others,
        )
        evidence.fair_bound_seconds = max(FAIR_SECONDS, FAIR_PART * self._crowd_seconds(db, crowd))
        self._watch.stop()
        evidence.looks, evidence.seen = self._watch.looks, self._watch.seen
        self._look_for_leaks(db, descriptors)
        evidence.enqueues = Enqueues.read(self._arena.logs)
        evidence.cancels = self._nemesis.cancels
        evidence.recoveries, evidence.failures = self._nemesis.recoveries, self._nemesis.failures
        # Who was killed has to start first, and how long that takes is this machine's business.
        slowest = max(worker.slowest_start_seconds for worker in self._workers)
        evidence.recovery_bound_seconds = RECOVERY_SECONDS + STARTS_A_RECOVERY * min(
            slowest, SLOWEST_START_SECONDS
        )
        self._read_logs()
        self._read_server_log()
        evidence.secret_logs = [*self._arena.logs.iterdir(), self._arena.server.log]
        return check(db, evidence)

    def _stop_ticks(self, db: Database) -> int:
        """Wait until what was missed has been caught up with, and pause; gives how many ticks have come."""
        if not until(lambda: db.one("SELECT next_tick > clock_timestamp() FROM pgqueue.schedules"), 60):
            self.evidence.failures.append("nobody fires a tick that is due")
        next_tick = db.one("UPDATE pgqueue.schedules SET is_paused = true RETURNING next_tick")
        return round((next_tick - self._first_tick).total_seconds() / TICK_SECONDS)

    def _crowd_seconds(self, db: Database, crowd: list[int]) -> float:
        """Tell how long the crowd took, from its first birth to its last end."""
        return db.one(
            "SELECT coalesce(extract(epoch FROM max(h.at) - min(h.at)), 0)::double precision "
            "FROM faults.history AS h WHERE h.job_id = ANY (%s)",
            crowd,
        )

    def _send_crowd(self, db: Database) -> tuple[list[int], list[int]]:
        """Put a crowd of one hot key at the head, and others behind it; gives both."""
        journal = Journal(self._arena.logs, "crowd")

        def send(task: str, count: int, more: str, priority: int) -> list[int]:
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
            return ids

        crowd = send("count", self._size.crowd, '{"key": "crowd"}', 0)
        others = []
        for _ in range(20):
            others += send("touch", 5, "{}", 1)
            time.sleep(0.05)
        journal.close()
        return crowd, others

    def _look_for_leaks(self, db: Database, descriptors: int) -> None:
        evidence, workers = self.evidence, self._workers
        # Threads of a pool end, sessions of those who were killed are noticed: give it a moment.
        until(lambda: _count_sessions(db, "pgqueue worker%") == IDLE_CONNECTIONS * len(workers), 60)
        # Of a worker: its slots, its own queue's, two in the child for suspects, and async handlers' threads.
        handlers = self._size.slots + 1 + 2 + (self._size.processes + 1) * ASIDE_THREADS
        evidence.leaks = {
            "worker_sessions": (_count_sessions(db, "pgqueue worker%"), IDLE_CONNECTIONS * len(workers)),
            "handler_sessions": (_count_sessions(db, "handler"), handlers * len(workers)),
            "idle_in_transaction": (
                db.one(
                    "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%%' AND %s",
                    True,
                ),
                0,
            ),
            # Of each queue's idle workers one holds the bell and the duty; a few look after everybody, and
            # one stands by.
            "advisory_locks": (
                _count_advisory_locks(db),
                2 * (len(QUEUES) + len(workers)) + min(MAINTAINERS + 1, len(workers)),
            ),
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
        until(lambda: not self._arena.left_processes(), 30)
        until(lambda: not _count_sessions(db, "%"), 60)
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
                    case "claim lost" if line["ending"] is None:
                        self.evidence.lost.append((line["job_id"], line["attempt"]))
                    case "claim lost":
                        self.evidence.refused.append((line["job_id"], line["attempt"]))
                    case "a part of the worker failed" | "outcome refused" | "maintenance failed":
                        self.evidence.failures.append(f"{worker.name}: {line['event']}: {line.get('error')}")

    def _read_server_log(self) -> None:
        """Count the server's errors, and blame those that no fault and no handler of ours explains."""
        self._errors: Counter[str] = Counter()
        for state, application in _errors(self._arena.server.log):
            self._errors[state] += 1
            if not EXPLAINED.match(state) and (state, application) != HANDLERS_EMBRACE:
                self.evidence.failures.append(f"an error of {application or 'somebody'}: SQLSTATE {state}")

    def summary(self, verdicts: Sequence[Verdict]) -> list[str]:
        """Tell what was done and what came of it, for people."""
        facts = {verdict.name: verdict.facts for verdict in verdicts}
        with self._arena.connect(DBNAME) as connection:
            states = Counter(
                dict(Database(connection).all("SELECT state, count(*) FROM faults.everywhere GROUP BY state"))
            )
        seconds = [value for _, value in self.evidence.recoveries]
        bound = self.evidence.recovery_bound_seconds
        large, small = self._nemesis.faults, self._nemesis.small_faults
        return [
            *self._fault_table(),
            f"faults {large.total() + small.total()}: large {large.total()}, small {small.total()}",
            f"jobs {states.total()}: {_counted(states)}",
            f"claims {facts['I6']['claims']}: {facts['I6']['extra']} beyond one a job",
            f"refused writes {facts['I8']['refused_writes']}: outcomes that came too late",
            f"answers lost on the way {self._proxy.answers_lost}",
            f"recovery p50 {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s, bound {bound:.2f} s",
            f"errors by SQLSTATE: {_counted(self._errors)}",
            *([f"seen: {'; '.join(self.evidence.seen[:5])}"] if self.evidence.seen else []),
        ]

    def _fault_table(self) -> list[str]:
        """Make a row for each kind of fault: how often it came, and how soon everybody worked again."""
        recoveries: dict[str, list[float]] = {}
        for name, seconds in self.evidence.recoveries:
            recoveries.setdefault(name, []).append(seconds)
        rows = [
            f"{name:<28} {count:>5}  "
            f"{statistics.median(recoveries[name]):>10.2f} s {max(recoveries[name]):>6.2f} s"
            for name, count in sorted(self._nemesis.faults.items())
        ]
        rows += [f"{name:<28} {count:>5}" for name, count in sorted(self._nemesis.small_faults.items())]
        return [f"{'fault':<28} {'times':>5}  {'recovery p50':>12} {'max':>8}", *rows]


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


def _errors(log: Path) -> Iterator[tuple[str, str]]:
    """Give each error's SQLSTATE and the application that met it."""
    with log.open(errors="replace") as lines:
        for line in lines:
            if found := _ERROR.search(line):
                yield found[1], found[2]


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.most_common()) or "none"


def run(
    arena: Arena,
    size_name: str,
    seconds: float | None,
    seed: int,
    say: Callable[[str], None],
    *,
    only: Collection[str] = (),
    kind: type[Campaign] = Campaign,
) -> bool:
    """Run one campaign, say what came of it, and whether everything held."""
    size = SIZES[size_name]
    seconds = size.seconds if seconds is None else seconds
    began_at = time.monotonic()
    say(
        f"seed {seed}, {size_name}, {seconds:g} s of faults: PostgreSQL {arena.server.lease.version}, "
        f"{size.workers} workers of {size.processes} children, {size.producers} producers, "
        f"lease {LEASE_SECONDS:g} s, psycopg {psycopg.__version__}, Python {sys.version.partition(' ')[0]}"
    )
    campaign = kind(arena, size, seed, only)
    verdicts = campaign.run(seconds)
    for line in (*campaign.summary(verdicts), *(verdict.line() for verdict in verdicts)):
        say(line)
    facts = {verdict.name: verdict.facts for verdict in verdicts}
    over = facts["I3"]["over"] + facts["I6"]["over"]
    say(
        f"lost {facts['I1']['lost']}, doubled {facts['I1']['doubled']}, over the limit {over}, "
        f"leaks {facts['I10']['leaks']}"
    )
    violated = [verdict.name for verdict in verdicts if verdict.violations]
    said = f"VIOLATED: {', '.join(violated)}" if violated else "all invariants hold"
    say(f"{said} ({time.monotonic() - began_at:.0f} s)")
    return not violated
