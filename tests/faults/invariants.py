"""What must hold, whatever happened: I1 to I12, asked of the database, the journals, the logs and /proc.

The same checks serve the campaign, the step table and the mutants. A check that was given nothing
to look at says so in its numbers.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.faults.journal import Enqueues
from tests.guarantees.support import OVER_LIMIT, STUCK

# Deaths that no number of attempts explains: the handler or the arguments said that no retry helps.
HOPELESS = "^(Unrecoverable:|no task '|task '[^']+': )"
LOST_PROCESS = "^(its process |lease expired|crash|undone, because its session broke off)"
TAKEN_BACK = "lease expired"
MAX_CRASHES = 3


@dataclass
class Verdict:
    """One invariant's line: what was counted, and what broke it."""

    name: str
    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    skipped: str = ""

    def demand(self, is_held: bool, violation: str) -> None:
        if not is_held:
            self.violations.append(violation)

    def line(self) -> str:
        if self.skipped:
            return f"{self.name} {self.title}: skipped, {self.skipped}"
        counted = " ".join(f"{name}={_number(value)}" for name, value in self.facts.items())
        word = "VIOLATED" if self.violations else "ok"
        return f"{self.name} {self.title}: {word} {counted}" + "".join(
            f" | {text}" for text in self.violations[:5]
        )


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass
class Cancelled:
    """A cancel that was answered: what was said of which job, and when by the database's clock."""

    job_id: int
    outcome: str
    at: Any


@dataclass
class Evidence:
    """What is known besides the database itself."""

    enqueues: Enqueues = field(default_factory=Enqueues)
    cancels: list[Cancelled] = field(default_factory=list)
    # Each outcome that a worker says was accepted as a success (job, attempt, the worker's first eight
    # letters), or refused (job, attempt); and each attempt that it gave up before it came so far.
    accepted: list[tuple[int, int, str]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    looks: Counter[str] = field(default_factory=Counter)
    # The first few of what no look may see.
    seen: list[str] = field(default_factory=list)
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    recovery_bound_seconds: float = 0.0
    # What did not work again within the bound, workers that ended by themselves, and the like.
    failures: list[str] = field(default_factory=list)
    drain_seconds: float = 0.0
    swept: int = 0
    leaks: dict[str, tuple[float, float]] = field(default_factory=dict)
    # The tasks whose effect is in one transaction with their end.
    transactional: list[str] = field(default_factory=list)
    # How many ticks of each schedule have come.
    ticks_due: dict[str, int] = field(default_factory=dict)
    fair_waits: list[float] = field(default_factory=list)
    fair_bound_seconds: float = 0.0
    secret: str = ""
    secret_logs: Sequence[Path] = ()


class Database:
    """Questions to the database under test."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def one(self, query: str, *parameters: Any) -> Any:
        row = self.connection.execute(query, parameters or None).fetchone()  # type: ignore[arg-type]
        return row[0] if row else None

    def all(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, parameters or None).fetchall()  # type: ignore[arg-type]

    def column(self, query: str, *parameters: Any) -> list[Any]:
        return [row[0] for row in self.all(query, *parameters)]


def check(db: Database, evidence: Evidence) -> list[Verdict]:
    """Check every invariant; the run is over and drained."""
    checks: tuple[Callable[[Database, Evidence], Verdict], ...] = (
        no_loss,
        effects,
        one_holder,
        cron,
        conservation,
        attempts,
        cancels,
        fences,
        liveness,
        leaks,
        fairness,
        secrets,
    )
    return [one(db, evidence) for one in checks]


def no_loss(db: Database, evidence: Evidence) -> Verdict:
    """acknowledged ⊆ present ⊆ acknowledged + ambiguous; nothing twice."""
    verdict = Verdict("I1", "no loss")
    asked = evidence.enqueues
    rows = db.all("SELECT id, args ->> 'mark', unique_key IS NOT NULL FROM faults.everywhere")
    ids = {row[0] for row in rows}
    marks = Counter(mark for _, mark, _ in rows if mark)
    lost = [job_id for job_id in asked.acknowledged.values() if job_id not in ids]
    # A unique job's arguments may be those of a later request, so there only its id tells.
    by_mark = {mark: job_id for job_id, mark, is_unique in rows if mark and not is_unique}
    stolen = [mark for mark, job_id in by_mark.items() if asked.acknowledged.get(mark, job_id) != job_id]
    uninvited = [mark for mark in marks if mark not in asked.intended]
    undead = [mark for mark in marks if mark in asked.refused]
    doubled = [mark for mark, count in marks.items() if count > 1]
    verdict.facts = {
        "acknowledged": len(asked.acknowledged),
        "refused": len(asked.refused),
        "ambiguous": len(asked.ambiguous),
        "of_these_present": len(asked.ambiguous & marks.keys()),
        "present": len(rows),
        "lost": len(lost),
        "doubled": len(doubled),
    }
    verdict.demand(not lost, f"{len(lost)} acknowledged jobs are gone, as {lost[:3]}")
    verdict.demand(not uninvited, f"{len(uninvited)} jobs that nobody asked for, as {uninvited[:3]}")
    verdict.demand(not undead, f"{len(undead)} jobs that were refused are there, as {undead[:3]}")
    verdict.demand(not doubled, f"{len(doubled)} jobs are there twice, as {doubled[:3]}")
    verdict.demand(not stolen, f"{len(stolen)} jobs have another id than was answered, as {stolen[:3]}")
    return verdict


def effects(db: Database, evidence: Evidence) -> Verdict:
    """At least once: what succeeded has an effect, what never ran has none. In its transaction: once."""
    verdict = Verdict("I2", "effects")
    succeeded, effects, again = db.all(
        """
        SELECT (SELECT count(*) FROM pgqueue.finished_jobs WHERE state = 'succeeded'), count(*),
               count(*) - count(DISTINCT job_id)
        FROM faults.effects
        """
    )[0]
    empty = db.column(
        """
        SELECT f.id FROM pgqueue.finished_jobs AS f
        WHERE f.state = 'succeeded' AND f.task <> ALL (%s)
          AND NOT EXISTS (SELECT FROM faults.effects AS e WHERE e.job_id = f.id)
        """,
        evidence.transactional,
    )
    unclaimed = db.column(
        """
        SELECT DISTINCT e.job_id FROM faults.effects AS e
        WHERE NOT EXISTS (SELECT FROM faults.history AS h WHERE h.job_id = e.job_id AND h.event = 'claimed')
        """
    )
    # One for a job, or for a key that several jobs have; and none for a job that ended otherwise.
    once = db.all(
        """
        SELECT j.key, count(e.job_id), bool_or(j.state = 'succeeded'),
               count(e.job_id) FILTER (WHERE j.state <> 'succeeded')
        FROM (
            SELECT j.id, j.state, coalesce('order ' || (j.args ->> 'order'), 'job ' || j.id) AS key
            FROM faults.everywhere AS j WHERE j.task = ANY (%s)
        ) AS j
        LEFT JOIN faults.effects AS e ON e.job_id = j.id
        GROUP BY j.key
        """,
        evidence.transactional,
    )
    not_once = [(key, count) for key, count, is_due, undue in once if count != is_due or undue]
    verdict.facts = {"succeeded": succeeded, "effects": effects, "more_than_one": again}
    verdict.facts["once"] = sum(count for _, count, _, _ in once)
    verdict.demand(not empty, f"{len(empty)} jobs succeeded without an effect, as {empty[:3]}")
    verdict.demand(not unclaimed, f"{len(unclaimed)} jobs that never ran have effects, as {unclaimed[:3]}")
    verdict.demand(not not_once, f"{len(not_once)} not once, as (of what, effects) {not_once[:3]}")
    return verdict


def one_holder(db: Database, evidence: Evidence) -> Verdict:
    """Never more holders than a key's limit: by every look, by the whole history, by the counters."""
    verdict = Verdict("I3", "one holder")
    over = db.all(
        """
        SELECT s.concurrency_key, max(s.holders), max(s.concurrency_limit)
        FROM (
            SELECT h.concurrency_key, h.concurrency_limit,
                   sum(CASE h.event WHEN 'claimed' THEN 1 ELSE -1 END)
                       OVER (PARTITION BY h.concurrency_key ORDER BY h.at, h.seq) AS holders
            FROM faults.history AS h
            WHERE h.concurrency_key IS NOT NULL AND h.event IN ('claimed', 'ended')
        ) AS s
        GROUP BY s.concurrency_key
        HAVING max(s.holders) > max(s.concurrency_limit)
        """
    )
    crowded = db.all(
        """
        SELECT s.queue, max(s.holders), max(q.max_running)
        FROM (
            SELECT h.queue, sum(CASE h.event WHEN 'claimed' THEN 1 ELSE -1 END)
                       OVER (PARTITION BY h.queue ORDER BY h.at, h.seq) AS holders
            FROM faults.history AS h
            WHERE h.event IN ('claimed', 'ended')
        ) AS s
        JOIN pgqueue.queues AS q ON q.name = s.queue
        GROUP BY s.queue
        HAVING max(s.holders) > max(q.max_running)
        """
    )
    counted, wrong = db.all(
        """
        SELECT coalesce(sum(c.value), 0)::bigint, count(*) FILTER (WHERE c.value <> e.raised)
        FROM faults.counters AS c
        CROSS JOIN LATERAL (SELECT count(*) AS raised FROM faults.effects AS e WHERE e.key = c.key) AS e
        """
    )[0]
    verdict.facts = {
        "looks": evidence.looks["looks"],
        "keyed_claims": db.one(
            "SELECT count(*) FROM faults.history WHERE event = 'claimed' AND concurrency_key IS NOT NULL"
        ),
        "counted": counted,
        "over": len(over) + len(crowded),
    }
    verdict.demand(
        not evidence.looks["over the limit"], f"{evidence.looks['over the limit']} looks saw too many holders"
    )
    verdict.demand(not over, f"{len(over)} keys had too many holders, as (key, holders, limit) {over[:3]}")
    verdict.demand(not crowded, f"a queue ran too many at once: (queue, running, max_running) {crowded[:3]}")
    verdict.demand(not wrong, f"{wrong} counters lost an update")
    return verdict


def cron(db: Database, evidence: Evidence) -> Verdict:
    """Each tick fires at most once, and is fired or counted as skipped."""
    verdict = Verdict("I4", "cron")
    if not evidence.ticks_due:
        verdict.skipped = "no schedule here"
        return verdict
    fired = db.all(
        """
        SELECT e.headers ->> 'schedule', count(*), count(DISTINCT e.headers ->> 'tick')
        FROM faults.everywhere AS e WHERE e.headers ? 'schedule' GROUP BY 1
        """
    )
    skipped = dict(db.all("SELECT name, skipped FROM pgqueue.schedules"))
    counted = {name: ticks + skipped[name] for name, _, ticks in fired}
    doubled = sum(jobs - ticks for _, jobs, ticks in fired)
    off = [
        (name, due, counted.get(name, 0))
        for name, due in evidence.ticks_due.items()
        if counted.get(name, 0) != due
    ]
    verdict.facts = {
        "due": sum(evidence.ticks_due.values()),
        "fired": sum(ticks for _, _, ticks in fired),
        "skipped": sum(skipped.values()),
    }
    verdict.demand(not doubled, f"{doubled} ticks fired twice")
    verdict.demand(not off, f"(schedule, ticks due, fired or skipped) {off[:3]}")
    return verdict


def conservation(db: Database, evidence: Evidence) -> Verdict:
    """Every job born is in exactly one place, at every look; after the drain nothing is live."""
    verdict = Verdict("I5", "conservation")
    born, present, live, twice = db.all(LOOK_CONSERVATION)[0]
    verdict.facts = {"looks": evidence.looks["looks"], "born": born, "present": present, "live": live}
    verdict.demand(not evidence.looks["unbalanced"], f"{evidence.looks['unbalanced']} looks did not add up")
    verdict.demand(born == present, f"born {born}, present {present}")
    verdict.demand(not twice, f"{twice} jobs are in two places")
    verdict.demand(not live, f"{live} jobs are still live")
    return verdict


LOOK_CONSERVATION = """
SELECT (SELECT count(DISTINCT job_id) FROM faults.history WHERE event = 'born'), count(*),
       count(*) FILTER (WHERE place = 'live'), count(*) - count(DISTINCT id)
FROM faults.everywhere
"""


def attempts(db: Database, _: Evidence) -> Verdict:
    """Attempts within their limit, crashes within theirs, and no death without a reason."""
    verdict = Verdict("I6", "attempts")
    over = db.all(
        """
        SELECT e.id, e.attempt, e.crashes, h.max_attempts
        FROM faults.everywhere AS e
        CROSS JOIN LATERAL (
            SELECT h.max_attempts FROM faults.history AS h WHERE h.job_id = e.id ORDER BY h.seq DESC LIMIT 1
        ) AS h
        WHERE e.attempt - e.crashes > h.max_attempts
        """
    )
    unexplained = db.all(
        """
        SELECT d.id, d.reason FROM pgqueue.dead_jobs AS d
        WHERE d.attempt - d.crashes < d.max_attempts AND d.crashes < %s AND d.reason !~ %s OR d.reason = ''
        """,
        MAX_CRASHES,
        HOPELESS,
    )
    # A crash counts, or a job that kills its process does so for ever. Births are enqueue and redrives.
    crashed = db.all(
        """
        SELECT h.job_id, count(*)
        FROM (
            SELECT h.job_id, h.event, h.note, h.was_overdue,
                   count(*) FILTER (WHERE h.event = 'born') OVER earlier AS life
            FROM faults.history AS h
            WINDOW earlier AS (PARTITION BY h.job_id ORDER BY h.seq)
        ) AS h
        WHERE h.event = 'ended' AND h.note ~ %s AND h.note !~ 'timed out'
        GROUP BY h.job_id, h.life
        HAVING count(*) >= %s
        """,
        LOST_PROCESS,
        MAX_CRASHES,
    )
    claims, jobs = db.all(
        "SELECT count(*), count(DISTINCT job_id) FROM faults.history WHERE event = 'claimed'"
    )[0]
    verdict.facts = {
        "claims": claims,
        "extra": claims - jobs,
        "dead": db.one("SELECT count(*) FROM pgqueue.dead_jobs"),
        "dead_of_crashes": db.one("SELECT count(*) FROM pgqueue.dead_jobs WHERE crashes >= %s", MAX_CRASHES),
        "over": len(over) + len(crashed),
    }
    verdict.demand(not over, f"over the limit: (job, attempt, crashes, max_attempts) {over[:3]}")
    verdict.demand(not unexplained, f"dead without a cause: {unexplained[:3]}")
    verdict.demand(
        not crashed, f"{len(crashed)} jobs went on after {MAX_CRASHES} crashes: (job, crashes) {crashed[:3]}"
    )
    return verdict


def cancels(db: Database, evidence: Evidence) -> Verdict:
    """Whoever was answered `cancelled` or `requested` sees no later attempt; the end is as was said."""
    verdict = Verdict("I7", "cancel")
    outcomes = Counter(one.outcome for one in evidence.cancels)
    verdict.facts = {"cancelled": outcomes["cancelled"], "requested": outcomes["requested"]}
    named = ([one.job_id for one in evidence.cancels], [one.at for one in evidence.cancels])
    later = db.column(
        """
        SELECT DISTINCT c.job_id FROM unnest(%s::bigint[], %s::timestamptz[]) AS c (job_id, at)
        WHERE EXISTS (
            SELECT FROM faults.history AS h WHERE h.job_id = c.job_id AND h.event = 'claimed' AND h.at > c.at
        )
        """,
        *named,
    )
    states = dict(db.all("SELECT id, state FROM faults.everywhere WHERE id = ANY (%s)", named[0]))
    meant = {"cancelled": ("cancelled",), "requested": ("cancelled", "succeeded")}
    otherwise = [
        (one.job_id, one.outcome, states.get(one.job_id))
        for one in evidence.cancels
        if states.get(one.job_id) not in meant[one.outcome]
    ]
    verdict.demand(not later, f"{len(later)} jobs ran again after their cancel, as {later[:3]}")
    verdict.demand(not otherwise, f"ended otherwise: (job, answer, state) {otherwise[:3]}")
    return verdict


def fences(db: Database, evidence: Evidence) -> Verdict:
    """What ended a job was its last claim, and that one was told so; no live lease was taken back."""
    verdict = Verdict("I8", "fence")
    strangers = db.column(
        """
        SELECT e.id
        FROM faults.everywhere AS e
        CROSS JOIN LATERAL (
            SELECT h.token FROM faults.history AS h WHERE h.job_id = e.id AND h.event = 'claimed'
            ORDER BY h.seq DESC LIMIT 1
        ) AS h
        WHERE e.state IN ('succeeded', 'dead') AND e.claim_token IS DISTINCT FROM h.token
        """
    )
    final = set(
        db.all(
            "SELECT id, attempt, left(worker_id::text, 8) FROM pgqueue.finished_jobs "
            "WHERE state = 'succeeded'"
        )
    )
    usurpers = [accepted for accepted in evidence.accepted if accepted not in final]
    known = {
        (job_id, attempt)
        for job_id, attempt in db.all(
            "SELECT job_id, attempt FROM faults.history WHERE event IN ('ended', 'gone')"
        )
    }
    unexplained = [pair for pair in (*evidence.refused, *evidence.lost) if pair not in known]
    # A lease's end is written down a moment before the reaper's own look at the clock is over.
    robbed = db.all(
        """
        SELECT h.job_id, round(h.lease_left::numeric, 3)
        FROM faults.history AS h
        LEFT JOIN pgqueue.dead_jobs AS d ON d.id = h.job_id AND d.claim_token = h.token
        WHERE h.event = 'ended' AND coalesce(h.note, d.reason) LIKE %s AND h.lease_left > 0.01
        """,
        f"{TAKEN_BACK}%",
    )
    verdict.facts = {
        "accepted": len(evidence.accepted),
        "refused_writes": len(evidence.refused),
        "given_up": len(evidence.lost),
        "taken_back": db.one(
            "SELECT count(*) FROM faults.history WHERE event = 'ended' AND note LIKE %s", f"{TAKEN_BACK}%"
        ),
    }
    verdict.demand(not strangers, f"{len(strangers)} jobs ended under another token than their last claim's")
    verdict.demand(
        not usurpers, f"accepted as a success, but not how it ended: (job, attempt, worker) {usurpers[:3]}"
    )
    verdict.demand(not unexplained, f"refused or given up without a loss: (job, attempt) {unexplained[:3]}")
    verdict.demand(not robbed, f"live leases taken back: (job, seconds left) {robbed[:3]}")
    return verdict


def liveness(_: Database, evidence: Evidence) -> Verdict:
    """Everybody works again soon after each fault; after healing nothing hangs."""
    verdict = Verdict("I9", "liveness")
    seconds = sorted(value for _, value in evidence.recoveries)
    verdict.facts = {"recoveries": len(seconds)}
    if seconds:
        verdict.facts |= {"p50": statistics.median(seconds), "max": seconds[-1]}
        verdict.facts |= {"bound": evidence.recovery_bound_seconds}
    verdict.facts |= {"drain": evidence.drain_seconds, "swept": evidence.swept}
    slow = [
        f"{name} {value:.1f} s"
        for name, value in evidence.recoveries
        if value > evidence.recovery_bound_seconds
    ]
    verdict.demand(
        not slow, f"not all worked again in {evidence.recovery_bound_seconds:.1f} s: {', '.join(slow[:3])}"
    )
    verdict.demand(
        not evidence.looks["expired"], f"{evidence.looks['expired']} looks saw a lease that nobody takes back"
    )
    for failure in evidence.failures:
        verdict.demand(False, failure)
    return verdict


def leaks(_: Database, evidence: Evidence) -> Verdict:
    """What was there before the load is there after it, and no more."""
    verdict = Verdict("I10", "no leaks")
    verdict.facts = {name: _number(found) for name, (found, _) in evidence.leaks.items()}
    verdict.facts["leaks"] = sum(found > most for found, most in evidence.leaks.values())
    for name, (found, most) in evidence.leaks.items():
        verdict.demand(found <= most, f"{name}: {_number(found)}, at most {_number(most)} expected")
    return verdict


def fairness(_: Database, evidence: Evidence) -> Verdict:
    """Jobs without a key do not wait behind the crowd of a hot one."""
    verdict = Verdict("I11", "fairness")
    waits = sorted(evidence.fair_waits)
    verdict.facts = {"jobs": len(waits)}
    if waits:
        p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))]
        verdict.facts |= {"p50": statistics.median(waits), "p99": p99}
        verdict.demand(
            p99 <= evidence.fair_bound_seconds,
            f"waited {p99:.2f} s behind a crowd, the bound is {evidence.fair_bound_seconds:g} s",
        )
    return verdict


def secrets(_: Database, evidence: Evidence) -> Verdict:
    """The password of the DSN is in no log and on no command line."""
    verdict = Verdict("I12", "secrets")
    secret = evidence.secret.encode()
    found = [path.name for path in evidence.secret_logs if secret and secret in path.read_bytes()]
    verdict.facts = {"logs": len(evidence.secret_logs), "looks_at_processes": evidence.looks["processes"]}
    verdict.demand(not found, f"the password is in {found[:3]}")
    verdict.demand(not evidence.looks["secret seen"], "the password was on a command line")
    return verdict


class Watch:
    """Looks again and again, in a thread of its own and in one snapshot each; the server may come and go."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        *,
        secret: str = "",
        every_seconds: float = 0.25,
    ) -> None:
        self.looks: Counter[str] = Counter()
        self.seen: list[str] = []
        self._healed_at: Any = None
        self._expiry_bound_seconds = 0.0
        self._connect = connect
        self._secret = secret.encode()
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def healed(self, at: Any, expiry_bound_seconds: float) -> None:
        """Take note that faults are over: a lease that has expired for so long is one too many."""
        self._expiry_bound_seconds = expiry_bound_seconds
        self._healed_at = at

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        pause = self._every_seconds
        while not self._stop.wait(pause):
            began_at = time.monotonic()
            try:
                if connection is None:
                    connection = self._connect()
                self._look(Database(connection))
            except psycopg.Error:
                if connection is not None:
                    connection.close()
                connection = None
            self._look_at_processes()
            # What there is to count grows all the while: looking may take a tenth of the time, no more.
            pause = max(self._every_seconds, 9 * (time.monotonic() - began_at))
        if connection is not None:
            connection.close()

    def _look(self, db: Database) -> None:
        born, present, _, twice = db.all(LOOK_CONSERVATION)[0]
        over = db.one(OVER_LIMIT)
        stuck = db.one(STUCK)
        expired = 0
        if self._healed_at is not None:
            expired = db.one(
                """
                SELECT count(*) FROM pgqueue.jobs
                WHERE state = 'running'
                  AND greatest(heartbeat_at + make_interval(secs => lease_seconds), %s)
                      + make_interval(secs => %s) < clock_timestamp()
                """,
                self._healed_at,
                self._expiry_bound_seconds,
            )
        self.looks["looks"] += 1
        self._note("unbalanced", born != present or twice, f"born {born}, present {present}, twice {twice}")
        self._note("over the limit", over, f"{over} keys")
        self._note("stuck", stuck, f"{stuck} keys")
        self._note("expired", expired, f"{expired} jobs")

    def _note(self, what: str, is_seen: Any, how: str) -> None:
        if is_seen:
            self.looks[what] += 1
            if len(self.seen) < 20:
                self.seen.append(f"{what}: {how}")

    def _look_at_processes(self) -> None:
        if not self._secret:
            return
        self.looks["processes"] += 1
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if self._secret in entry.read_bytes():
                    self._note("secret seen", True, str(entry))


def wait_for_drain(db: Database, seconds: float) -> tuple[float, int]:
    """Wait until nothing is live; gives how long that took, and how many keys only the sweep could wake.

    Retries that wait are called at once, so that the drain shows what hangs rather than what waits;
    so is the sweep, which a worker makes every minute.
    """
    began_at = time.monotonic()
    swept, sweep_at = 0, began_at + 3.0
    while db.one("SELECT count(*) FROM pgqueue.jobs"):
        if time.monotonic() - began_at > seconds:
            break
        db.connection.execute(
            """
            UPDATE pgqueue.jobs SET run_at = clock_timestamp()
            WHERE id IN (
                SELECT id FROM pgqueue.jobs
                WHERE state = 'scheduled' AND run_at > clock_timestamp() + interval '0.5 s'
                ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
            )
            """
        )
        if time.monotonic() > sweep_at:
            swept += db.one("SELECT unblocked FROM pgqueue.sweep()")
            sweep_at += 3.0
        time.sleep(0.1)
    return time.monotonic() - began_at, swept
