"""Mutants: the same queue with one thing done wrong, and a scenario in which the checker has to find it.

Each scenario runs twice, on databases of their own: as shipped, where every invariant must hold, and
altered, where the named one must not. The functions are altered by replacing text of the real ones in
the test's own database; a worker by a habit of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from psycopg import sql

from tests.faults.arena import Arena, until
from tests.faults.drill import KEY, Drill
from tests.faults.invariants import Verdict, Watch
from tests.faults.proxy import Proxy
from tests.guarantees.support import STUCK
from tests.sql.support import Session
from tests.support import wait_until


@dataclass(frozen=True)
class Mutant:
    """One thing done wrong, and the scenario in which the named invariant shows it."""

    name: str
    invariant: str
    scenario: Callable[[Drill], None]
    alter: Callable[[Drill], None]

    @property
    def is_quick(self) -> bool:
        """Whether it takes neither a worker's start nor the server's."""
        return self.scenario not in SLOW_SCENARIOS


MUTANTS: list[Mutant] = []


def mutant(
    invariant: str, scenario: Callable[[Drill], None]
) -> Callable[[Callable[[Drill], None]], Callable[[Drill], None]]:
    """Make a mutant of a function that alters a drill; its name is the mutant's."""

    def made(alter: Callable[[Drill], None]) -> Callable[[Drill], None]:
        MUTANTS.append(Mutant(alter.__name__.replace("_", "-"), invariant, scenario, alter))
        return alter

    return made


# Nothing lost, nothing twice, nothing without an effect.


def the_power_is_cut(drill: Drill) -> None:
    drill.delay_writing()
    drill.enqueue(20)
    claimed = drill.session.claim(max_jobs=10)
    for attempt in claimed:
        drill.leave_effect(drill.session, attempt)
    drill.complete(drill.session, *claimed)

    drill.cut_the_power()

    drill.work()


@mutant("I1", the_power_is_cut)
def commits_everything_asynchronously(drill: Drill) -> None:
    name = sql.Identifier(drill.name)
    drill.db.connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(name))
    drill.reconnect()


def the_power_is_cut_after_a_claim(drill: Drill) -> None:
    """A claim need not be on the disk when it is answered; here it is not, and the job is claimed again."""
    drill.enqueue()
    drill.delay_writing()
    unlucky = drill.open(options="-c synchronous_commit=off")
    lost = unlucky.claim()

    drill.cut_the_power()

    if drill.db.one("SELECT state FROM pgqueue.jobs") == "running":  # the writer of the log was quicker
        drill.session.expire(*lost)
        drill.session.call("reap")
        drill.session.make_due()
    now = drill.session.claim()
    revenant = drill.open()
    revenant.worker_id = unlucky.worker_id
    drill.leave_effect(revenant, lost[0])
    drill.complete(revenant, *lost)
    drill.leave_effect(drill.session, now[0])
    drill.complete(drill.session, *now)


@mutant("I8", the_power_is_cut_after_a_claim)
def gives_a_token_that_comes_again(drill: Drill) -> None:
    """As a sequence's next value does, or an attempt's number, when the claim that took it is undone."""
    drill.alter("claim", "uuid := gen_random_uuid()", "uuid := md5('1')::uuid")


def jobs_run(drill: Drill) -> None:
    drill.enqueue(10)
    session = drill.open()
    claimed = session.claim()
    for attempt in claimed[:8]:
        drill.leave_effect(session, attempt)
    if drill.habit == "completes first":
        drill.complete(session, *claimed)
    # Here it dies; the effects of two were still to come.
    session.connection.close()
    drill.session.expire(*claimed)
    drill.session.call("reap")
    drill.work()


@mutant("I2", jobs_run)
def completes_before_the_effect(drill: Drill) -> None:
    drill.habit = "completes first"


@mutant("I1", jobs_run)
def asks_twice(drill: Drill) -> None:
    """Repeat a request as if its answer had been lost."""
    drill.habit = "asks twice"


def jobs_die(drill: Drill) -> None:
    drill.enqueue(3)
    drill.session.fail(*drill.session.claim(), is_dead=[True] * 3, errors=["Unrecoverable: no"] * 3)


@mutant("I5", jobs_die)
def loses_dead_letters(drill: Drill) -> None:
    drill.alter("settle", "WHERE g.state = 'dead'", "WHERE g.state = 'dead' AND false")


# One holder.


def many_claimers_of_one_key(drill: Drill) -> None:
    drill.enqueue(60, concurrency_key=KEY)
    for future in [drill.start(drill.work, 10, 8.0) for _ in range(4)]:
        future.result()


@mutant("I3", many_claimers_of_one_key)
def claims_in_one_statement(drill: Drill) -> None:
    """Look for running jobs of the key and lock the key in the statement that takes the job, as most do."""
    drill.db.connection.execute("DROP INDEX pgqueue.jobs_running_slot")
    text = drill.db.one("SELECT pg_get_functiondef('pgqueue.claim'::regproc)")
    head, _, _ = text.partition("AS $function$")
    drill.db.connection.execute(head + NAIVE_CLAIM)


NAIVE_CLAIM = """AS $function$
BEGIN
    RETURN QUERY
    WITH candidate AS MATERIALIZED (
        SELECT j.id FROM jobs AS j
        WHERE j.queue = claim.queue AND j.state = 'ready' AND j.run_at <= statement_timestamp()
          AND NOT EXISTS (
              SELECT FROM jobs AS r WHERE r.concurrency_key = j.concurrency_key AND r.state = 'running'
          )
          AND (j.concurrency_key IS NULL OR pg_try_advisory_xact_lock(key_lock(j.concurrency_key)))
        ORDER BY j.priority, j.run_at, j.id
        LIMIT claim.max_jobs
        FOR NO KEY UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE jobs AS j SET
            state = 'running', attempt = j.attempt + 1, claim_token = gen_random_uuid(),
            worker_id = claim.worker_id, lease_seconds = claim.lease_seconds,
            heartbeat_at = clock_timestamp(), started_at = clock_timestamp(),
            deadline_at = clock_timestamp() + make_interval(secs => j.timeout_seconds),
            concurrency_slot = CASE WHEN j.concurrency_key IS NOT NULL THEN 1 END
        FROM candidate AS c
        WHERE j.id = c.id
        RETURNING j.*
    )
    SELECT t.id, t.claim_token, t.attempt, t.task, t.args::text, t.concurrency_key, t.priority,
           t.run_at::text, true, t.timeout_seconds, t.max_attempts, t.crashes, t.idempotency_key,
           t.headers::text, 0::double precision
    FROM taken AS t;
END $function$
"""


def many_claimers_of_a_narrow_queue(drill: Drill) -> None:
    drill.db.connection.execute("INSERT INTO pgqueue.queues (name, max_running) VALUES ('default', 2)")
    drill.enqueue(40)
    for future in [drill.start(drill.work, 2, 5.0) for _ in range(4)]:
        future.result()


@mutant("I3", many_claimers_of_a_narrow_queue)
def claims_beyond_max_running(drill: Drill) -> None:
    drill.alter("claim", "IF max_running IS NOT NULL THEN", "IF false THEN")


# The fence.


def a_worker_wakes_after_its_successor_began(drill: Drill) -> None:
    drill.enqueue()
    frozen, healthy = drill.open(), drill.open()
    late = frozen.claim(lease_seconds=0.2)
    drill.leave_effect(frozen, late[0])
    wait_until(lambda: healthy.call("reap"), 5, "the lease runs out")
    healthy.make_due()
    now = healthy.claim()
    drill.leave_effect(healthy, now[0])

    drill.complete(frozen, *late)
    drill.complete(healthy, *now)


@mutant("I8", a_worker_wakes_after_its_successor_began)
def completes_by_id_and_state(drill: Drill) -> None:
    drill.alter("complete", "j.id = g.id AND j.claim_token = g.token AND j.state", "j.id = g.id AND j.state")


def a_heartbeat_arrives_while_somebody_reaps(drill: Drill) -> None:
    drill.enqueue()
    held = drill.session.claim(lease_seconds=0.3)
    time.sleep(0.35)
    reaper = drill.open()
    reaping = drill.start(reaper.call, "reap")
    until(lambda: reaping.done() or _is_sleeping(drill, reaper), 5)
    drill.session.heartbeat(*held)
    reaping.result()

    drill.leave_effect(drill.session, held[0])
    drill.complete(drill.session, *held)
    drill.work()


def _is_sleeping(drill: Drill, session: Session) -> bool:
    return (
        drill.db.one(
            "SELECT wait_event FROM pg_stat_activity WHERE pid = %s", session.connection.info.backend_pid
        )
        == "PgSleep"
    )


@mutant("I8", a_heartbeat_arrives_while_somebody_reaps)
def reaps_by_id(drill: Drill) -> None:
    """Find what has expired, and take it back by its id a moment later, without another look."""
    text = drill.db.one("SELECT pg_get_functiondef('pgqueue.reap'::regproc)")
    head, _, _ = text.partition("AS $function$")
    drill.db.connection.execute(head + BLIND_REAP)


BLIND_REAP = """AS $function$
DECLARE
    ids bigint[];
BEGIN
    SELECT array_agg(j.id) INTO ids FROM jobs AS j
    WHERE j.state = 'running' AND j.heartbeat_at + make_interval(secs => j.lease_seconds) < clock_timestamp();
    PERFORM pg_sleep(0.1);
    RETURN QUERY
    UPDATE jobs AS j SET
        state = 'ready', crashes = j.crashes + 1, claim_token = NULL, worker_id = NULL, heartbeat_at = NULL,
        lease_seconds = NULL, deadline_at = NULL, started_at = NULL, concurrency_slot = NULL,
        errors = append_error(j.errors, j.attempt, j.worker_id, 'lease expired')
    WHERE j.id = ANY (ids)
    RETURNING j.id, j.state, 'lease expired', j.task, j.queue;
END $function$
"""


# Attempts and crashes.


def a_job_kills_its_process_again_and_again(drill: Drill) -> None:
    drill.enqueue()
    for _ in range(8):
        drill.session.make_due()
        if claimed := drill.session.claim():
            drill.session.crash(*claimed, reason="its process exited with status 9", base_seconds=0)
    drill.cancel(*drill.db.column("SELECT id FROM pgqueue.jobs"))


@mutant("I6", a_job_kills_its_process_again_and_again)
def gives_attempts_back_on_a_crash(drill: Drill) -> None:
    drill.alter("crash", "h.attempt, h.crashes + 1,", "h.attempt - 1, h.crashes,")


def a_job_fails_again_and_again(drill: Drill) -> None:
    drill.enqueue(max_attempts=2)
    for _ in range(4):
        drill.session.make_due()
        if claimed := drill.session.claim():
            drill.session.fail(*claimed)
    drill.cancel(*drill.db.column("SELECT id FROM pgqueue.jobs"))


@mutant("I6", a_job_fails_again_and_again)
def retries_for_ever(drill: Drill) -> None:
    drill.alter("fail_many", "h.attempt - h.crashes >= h.max_attempts", "false")


def a_running_job_is_cancelled_and_then_fails(drill: Drill) -> None:
    (job_id,) = drill.enqueue()
    claimed = drill.session.claim()
    drill.cancel(job_id)
    drill.session.fail(*claimed)
    drill.work()


@mutant("I7", a_running_job_is_cancelled_and_then_fails)
def forgets_the_cancel_when_failing(drill: Drill) -> None:
    drill.alter("fail_many", "h.is_cancel_requested OR ", "")


# Liveness.


def a_stranger_locks_one_of_three_jobs(drill: Drill) -> None:
    drill.enqueue(3)
    held = drill.session.claim(lease_seconds=0.6)
    stranger, keeper, reaper = drill.open(autocommit=False), drill.open(), drill.open()
    stranger.rows("SELECT id FROM pgqueue.jobs WHERE id = %s FOR UPDATE", held[0].job_id)
    is_over = threading.Event()
    lost: set[int] = set()

    def keep() -> None:
        while not is_over.wait(0.1):
            for job_id, verdict in keeper.heartbeat(*held).items():
                if verdict == "lost":
                    lost.add(job_id)

    keeping = drill.start(keep)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        reaper.call("reap")
        time.sleep(0.05)
    is_over.set()
    stranger.connection.rollback()
    keeping.result()

    if innocent := lost - {held[0].job_id}:
        drill.blame(f"{len(innocent)} leases of a living worker ran out because one row was locked")
    for attempt in held:
        drill.leave_effect(drill.session, attempt)
    drill.complete(drill.session, *held)
    drill.work()


@mutant("I9", a_stranger_locks_one_of_three_jobs)
def waits_for_rows_in_heartbeats(drill: Drill) -> None:
    drill.alter("heartbeat", "FOR NO KEY UPDATE SKIP LOCKED", "FOR NO KEY UPDATE")


def a_claim_has_the_only_waiting_job_locked(drill: Drill) -> None:
    """SKIP LOCKED locks before it looks: for a moment a claim holds a row that it will not take."""
    # In slow motion: unblock tries for half a second, not a twentieth.
    drill.alter("unblock", "pg_sleep(0.001)", "pg_sleep(0.01)")
    drill.enqueue(2, concurrency_key=KEY)
    held = drill.session.claim()
    claiming, completing = drill.open(autocommit=False), drill.open()
    completing.worker_id = drill.session.worker_id
    claiming.rows("SELECT id FROM pgqueue.jobs WHERE state = 'blocked' FOR NO KEY UPDATE SKIP LOCKED")
    drill.count_up(completing, held[0])
    completion = drill.start(drill.complete, completing, *held)
    until(lambda: completion.done() or _is_sleeping(drill, completing), 5)
    claiming.connection.rollback()
    completion.result()
    _blame_who_sleeps(drill)


def _blame_who_sleeps(drill: Drill) -> None:
    """No sweep here: whoever sleeps under a free key sleeps for ever."""
    if drill.db.one(STUCK):
        drill.blame("a job waits for a key that is free, and nobody will wake it")
        drill.db.one("SELECT unblocked FROM pgqueue.sweep()")
    drill.work()


@mutant("I9", a_claim_has_the_only_waiting_job_locked)
def wakes_the_next_one_once(drill: Drill) -> None:
    drill.alter("unblock", "tries >= 50", "tries >= 0")


def a_claim_parks_while_the_holder_completes(drill: Drill) -> None:
    first, _ = drill.enqueue(2, concurrency_key=KEY)
    held = drill.session.claim(max_jobs=1)
    assert [attempt.job_id for attempt in held] == [first]
    # The first claim parked the second job or left it ready; here it is ready, as if it had just come.
    drill.session.rows("UPDATE pgqueue.jobs SET state = 'ready' WHERE state = 'blocked'")
    claiming, completing = drill.open(autocommit=False), drill.open()
    completing.worker_id = drill.session.worker_id
    claiming.claim()
    drill.count_up(completing, held[0])
    completion = drill.start(drill.complete, completing, *held)
    until(lambda: completion.done() or _is_waiting(drill, completing), 5)
    claiming.connection.commit()
    completion.result()
    _blame_who_sleeps(drill)


def _is_waiting(drill: Drill, session: Session) -> bool:
    return (
        drill.db.one(
            "SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s", session.connection.info.backend_pid
        )
        == "Lock"
    )


@mutant("I9", a_claim_parks_while_the_holder_completes)
def looks_for_the_next_one_without_the_lock(drill: Drill) -> None:
    drill.alter(
        "unblock",
        "CASE WHEN unblock.must_wait THEN pg_advisory_xact_lock(o.number) IS NOT NULL",
        "CASE WHEN unblock.must_wait THEN true",
    )


def somebody_refers_to_a_job(drill: Drill) -> None:
    """A row of the application's with a foreign key to the job, in a transaction that is still open."""
    (job_id,) = drill.enqueue()
    drill.session.rows(
        "CREATE TABLE public.receipts (job_id bigint REFERENCES pgqueue.jobs ON DELETE CASCADE)"
    )
    application = drill.open(autocommit=False)
    application.rows("INSERT INTO public.receipts VALUES (%s)", job_id)
    claimed = drill.session.claim()
    application.connection.commit()
    if not claimed:
        drill.blame("a job could not be claimed because somebody refers to it")
    for attempt in claimed:
        drill.leave_effect(drill.session, attempt)
    drill.complete(drill.session, *claimed)
    drill.work()


@mutant("I9", somebody_refers_to_a_job)
def locks_rows_against_references(drill: Drill) -> None:
    drill.alter("claim", "FOR NO KEY UPDATE", "FOR UPDATE")


def two_thousand_jobs_fail_at_once(drill: Drill) -> None:
    many = [{"task": "drill", "args": {"mark": f"{drill.name}-{number}"}} for number in range(2000)]
    drill.enqueues.intended |= {job["args"]["mark"] for job in many}
    drill.session.enqueue_many(*many)
    claimed = drill.session.claim(max_jobs=2000)
    drill.session.fail(*claimed, base_seconds=15.0)
    in_a_second = drill.db.column(
        "SELECT count(*) FROM pgqueue.jobs AS j, (SELECT min(run_at) AS at FROM pgqueue.jobs) AS first "
        "GROUP BY floor(extract(epoch FROM j.run_at - first.at))"
    )
    mean = 2000 / 30  # from now to twice the base, as the first attempt failed
    if max(in_a_second) > 2 * mean:
        drill.blame(f"{max(in_a_second)} retries come in one second, {mean:.0f} would be even")
    drill.cancel(*drill.db.column("SELECT id FROM pgqueue.jobs"))


@mutant("I9", two_thousand_jobs_fail_at_once)
def retries_all_at_once(drill: Drill) -> None:
    text = drill.db.one("SELECT pg_get_functiondef('pgqueue.full_jitter'::regproc)")
    drill.db.connection.execute(text.replace("random()", "0.5"))


def an_idle_worker_gets_a_job(drill: Drill) -> None:
    worker = drill.worker("--poll-seconds", "20", "-c", "2")
    wait_until(
        lambda: drill.db.one(
            "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.datname = current_database() "
            "AND a.application_name = 'pgqueue worker claim' AND a.state = 'idle' "
            "AND a.state_change < clock_timestamp() - interval '0.5 s') "
            "AND classid = ((SELECT (regexp_match(pg_get_functiondef('pgqueue.ring'::regproc), "
            "'lock_shared\\((\\d+)'))[1])::bigint)::oid"
        ),
        20,
        "the worker sleeps",
    )
    mark = f"{drill.name}-bell"
    drill.enqueues.intended.add(mark)
    began_at = time.monotonic()
    job_id = drill.session.enqueue("touch", {"mark": mark})
    drill.enqueues.acknowledged[mark] = job_id
    until(lambda: drill.db.one("SELECT count(*) FROM faults.effects"), 3)
    drill.evidence.recoveries.append(("insert", time.monotonic() - began_at))
    worker.end()
    drill.work()


@mutant("I9", an_idle_worker_gets_a_job)
def inserts_without_ringing(drill: Drill) -> None:
    drill.db.connection.execute("DROP TRIGGER jobs_bell ON pgqueue.jobs")


def the_database_is_away_for_longer_than_a_lease(drill: Drill) -> None:
    """Who holds a job gets its network back a moment later than who may reap it."""
    proxy = Proxy(lambda: drill.arena.server.socket)
    drill.on_close(proxy.close)
    far = drill.arena.dsn(drill.name, host="127.0.0.1", port=proxy.port)
    options = ("--lease-seconds", "2.5", "--poll-seconds", "0.5", "-c", "2")
    holder, reaper = drill.worker(*options, dsn=far), drill.worker(*options, "-qelsewhere")
    mark = f"{drill.name}-long"
    drill.enqueues.intended.add(mark)
    job_id = drill.session.enqueue("sleep", {"mark": mark, "seconds": 6.5})
    drill.enqueues.acknowledged[mark] = job_id
    wait_until(lambda: drill.db.one("SELECT state FROM pgqueue.jobs") == "running", 10)

    proxy.refuse()
    proxy.cut()
    drill.arena.server.stop()
    time.sleep(2.7)
    drill.arena.server.restart()
    drill.reconnect()
    if drill.habit == "reaps at once":
        drill.session.call("reap")
    proxy.heal()

    until(lambda: not drill.db.one("SELECT count(*) FROM pgqueue.jobs"), 10)
    claims = drill.db.one("SELECT count(*) FROM faults.history WHERE event = 'claimed'")
    if claims > 1:
        drill.blame("a living worker's job was taken back before it had a chance to renew")
    holder.end()
    reaper.end()
    drill.work()


@mutant("I9", the_database_is_away_for_longer_than_a_lease)
def reaps_right_after_an_outage(drill: Drill) -> None:
    drill.habit = "reaps at once"


# Leaks, fairness, secrets.


def keyed_jobs_run(drill: Drill) -> None:
    drill.enqueue(5, concurrency_key=KEY)
    session = drill.session
    while claimed := session.claim():
        for attempt in claimed:
            drill.count_up(session, attempt)
        drill.complete(session, *claimed)


@mutant("I10", keyed_jobs_run)
def keeps_the_key_locked(drill: Drill) -> None:
    drill.alter("claim", "pg_try_advisory_xact_lock(key_lock", "pg_try_advisory_lock(key_lock")


def others_wait_behind_a_crowd(drill: Drill) -> None:
    drill.enqueue(300, concurrency_key=KEY)
    others = drill.enqueue(10, priority=1)
    session, holding = drill.open(), []
    end = time.monotonic() + 1.5
    waiting = set(others)
    while waiting and time.monotonic() < end:
        claimed = session.claim(max_jobs=5)
        holding += [attempt for attempt in claimed if attempt.key]
        done = [attempt for attempt in claimed if not attempt.key]
        for attempt in done:
            drill.leave_effect(session, attempt)
            waiting.discard(attempt.job_id)
        if done:
            drill.complete(session, *done)
    drill.evidence.fair_waits = drill.db.column(
        """
        SELECT extract(epoch FROM coalesce(min(c.at), clock_timestamp()) - min(b.at))::double precision
        FROM faults.history AS b
        LEFT JOIN faults.history AS c ON c.job_id = b.job_id AND c.event = 'claimed'
        WHERE b.event = 'born' AND b.job_id = ANY (%s)
        GROUP BY b.job_id
        """,
        others,
    )
    drill.cancel(*drill.db.column("SELECT id FROM pgqueue.jobs WHERE state <> 'running'"))
    for attempt in holding:
        drill.count_up(session, attempt)
    drill.complete(session, *holding)


@mutant("I11", others_wait_behind_a_crowd)
def leaves_the_crowd_at_the_head(drill: Drill) -> None:
    drill.alter("claim", ">= j.concurrency_limit;", ">= j.concurrency_limit AND false;")


def a_worker_starts_and_ends(drill: Drill) -> None:
    drill.evidence.secret = drill.arena.secret
    watch = Watch(lambda: drill.arena.connect(drill.name), secret=drill.arena.secret, every_seconds=0.05)
    watch.start()
    worker = drill.worker("-c", "2")
    until(lambda: watch.looks["processes"] > 2, 5)
    worker.signal(signal.SIGTERM)
    worker.end()
    watch.stop()
    drill.evidence.looks = watch.looks
    drill.evidence.secret_logs = [worker.log]


@mutant("I12", a_worker_starts_and_ends)
def says_its_password(drill: Drill) -> None:
    """Be started by a script that takes the DSN as an argument."""
    drill.launcher = (
        "-c",
        "import sys; from pgqueue.cli import main; del sys.argv[1]; sys.exit(main())",
        drill.dsn,
    )


@mutant("I12", a_worker_starts_and_ends)
def logs_its_password(drill: Drill) -> None:
    """Be started by a script that writes down its settings."""
    code = "import os, sys; from pgqueue.cli import main; print(os.environ['PGQUEUE_DSN']); sys.exit(main())"
    drill.launcher = ("-c", code)


SLOW_SCENARIOS = {
    the_power_is_cut,
    the_power_is_cut_after_a_claim,
    an_idle_worker_gets_a_job,
    the_database_is_away_for_longer_than_a_lease,
    a_worker_starts_and_ends,
}


# Running them.


@contextlib.contextmanager
def _drill(arena: Arena, name: str) -> Iterator[Drill]:
    drill = Drill(arena, name)
    try:
        yield drill
    finally:
        drill.close()


def _violated(arena: Arena, name: str, mutant: Mutant, *, is_altered: bool) -> list[Verdict]:
    with _drill(arena, name) as drill:
        if is_altered:
            mutant.alter(drill)
        mutant.scenario(drill)
        return [verdict for verdict in drill.verdicts() if verdict.violations]


def run(arena: Arena, only: str | None, say: Callable[[str], None], *, is_quick: bool = False) -> bool:
    """Run the mutants, or one of them; True if every one was caught and every scenario holds as shipped."""
    chosen = [mutant for mutant in MUTANTS if only in (None, mutant.name)]
    if is_quick:
        chosen = [mutant for mutant in chosen if mutant.is_quick]
    if not chosen:
        say(f"no mutant {only!r}; there are: {', '.join(mutant.name for mutant in MUTANTS)}")
        return False
    began_at = time.monotonic()
    bad = []
    sound: dict[Callable[[Drill], None], list[Verdict]] = {}
    for number, mutant in enumerate(chosen):
        if mutant.scenario not in sound:
            found = sound[mutant.scenario] = _violated(arena, f"sound_{number}", mutant, is_altered=False)
            name = mutant.scenario.__name__.replace("_", " ")
            if found:
                bad.append(name)
                say(f"as shipped, {name}: VIOLATED\n  " + "\n  ".join(verdict.line() for verdict in found))
            else:
                say(f"as shipped, {name}: holds")
        found = _violated(arena, f"mutant_{number}", mutant, is_altered=True)
        names = [verdict.name for verdict in found]
        if mutant.invariant in names:
            told = next(verdict for verdict in found if verdict.name == mutant.invariant)
            say(f"mutant {mutant.name}: caught by {told.name} ({told.violations[0]})")
        else:
            bad.append(mutant.name)
            say(f"mutant {mutant.name}: NOT CAUGHT by {mutant.invariant}, only by {names or 'nothing'}")
    say(
        f"{len(chosen)} mutants, {'all caught' if not bad else 'FAILED: ' + ', '.join(bad)} "
        f"({time.monotonic() - began_at:.0f} s)"
    )
    return not bad
