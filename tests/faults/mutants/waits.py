"""Nobody waits for ever, and nobody waits behind a crowd: I9, I11."""

from __future__ import annotations

import time

from tests.faults.arena import until
from tests.faults.drill import KEY, Drill
from tests.faults.mutants.mutant import mutant
from tests.faults.proxy import Proxy
from tests.support import wait_until


def a_stranger_locks_one_of_three_jobs(drill: Drill) -> None:
    drill.enqueue(3)
    held = drill.session.claim(lease_seconds=60)
    drill.session.expire(*held)
    stranger, keeper, reaper = drill.open(autocommit=False), drill.open(), drill.open()
    stranger.rows("SELECT id FROM pgqueue.jobs WHERE id = %s FOR UPDATE", held[0].job_id)

    keeping = drill.start(keeper.heartbeat, *held)
    until(lambda: keeping.done() or drill.is_waiting(keeper), 60)
    # The leases that were not renewed have run out by now.
    reaper.call("reap")
    stranger.connection.rollback()
    lost = {job_id for job_id, verdict in keeping.result().items() if verdict == "lost"}

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
    # In slow motion: unblock tries for half a minute, not a twentieth of a second.
    drill.alter("unblock", "pg_sleep(0.001)", "pg_sleep(0.6)")
    drill.enqueue(2, concurrency_key=KEY)
    held = drill.session.claim()
    claiming, completing = drill.open(autocommit=False), drill.open()
    completing.worker_id = drill.session.worker_id
    claiming.rows("SELECT id FROM pgqueue.jobs WHERE state = 'blocked' FOR NO KEY UPDATE SKIP LOCKED")
    drill.count_up(completing, held[0])
    completion = drill.start(drill.complete, completing, *held)
    until(lambda: completion.done() or drill.is_sleeping(completing), 60)
    claiming.connection.rollback()
    completion.result()
    drill.blame_whoever_nobody_wakes()
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
    until(lambda: completion.done() or drill.is_waiting(completing), 60)
    claiming.connection.commit()
    completion.result()
    drill.blame_whoever_nobody_wakes()
    drill.work()


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
    drill.enqueue_many(2000)
    claimed = drill.session.claim(max_jobs=2000)
    drill.session.fail(*claimed, base_seconds=15.0)
    in_a_second = drill.db.column(
        "SELECT count(*) FROM pgqueue.jobs AS j, (SELECT min(run_at) AS at FROM pgqueue.jobs) AS first "
        "GROUP BY floor(extract(epoch FROM j.run_at - first.at))"
    )
    mean = 2000 / 30  # from now to twice the base, as the first attempt failed
    if max(in_a_second) > 2 * mean:
        drill.blame(f"{max(in_a_second)} retries come in one second, {mean:.0f} would be even")
    drill.cancel_all()


@mutant("I9", two_thousand_jobs_fail_at_once)
def retries_all_at_once(drill: Drill) -> None:
    drill.alter("full_jitter", "random()", "0.5")


def an_idle_worker_gets_a_job(drill: Drill) -> None:
    # Its next poll is nearly a minute away.
    drill.evidence.recovery_bound_seconds = 15.0
    worker = drill.worker("--poll-seconds", "60", "-c", "2")
    wait_until(drill.has_sleeping_worker, 60, "the worker sleeps")

    began_at = time.monotonic()
    drill.enqueue(task="touch")
    until(lambda: drill.db.one("SELECT count(*) FROM faults.effects"), 20)
    drill.evidence.recoveries.append(("insert", time.monotonic() - began_at))
    worker.end()
    drill.work()


@mutant("I9", an_idle_worker_gets_a_job, is_slow=True)
def inserts_without_ringing(drill: Drill) -> None:
    drill.db.connection.execute("DROP TRIGGER jobs_bell ON pgqueue.jobs")


def the_database_is_away_for_longer_than_a_lease(drill: Drill) -> None:
    """Who holds a job gets its network back a moment later than who may reap it."""
    proxy = Proxy(lambda: drill.arena.server.socket)
    drill.on_close(proxy.close)
    far = drill.arena.dsn(drill.name, host="127.0.0.1", port=proxy.port)
    # The holder comes back after its longest pause at most; whoever may reap waits for twice that and more.
    lease_seconds = 12.0
    options = ("--lease-seconds", str(lease_seconds), "--poll-seconds", "0.5", "-c", "2")
    holder, reaper = drill.worker(*options, dsn=far), drill.worker(*options, "-qelsewhere")
    drill.enqueue(task="sleep", args={"seconds": 600})
    wait_until(lambda: drill.db.one("SELECT state FROM pgqueue.jobs") == "running", 60)

    proxy.refuse()
    proxy.cut()
    drill.arena.server.stop()
    time.sleep(lease_seconds + 0.2)
    drill.arena.server.restart()
    drill.reconnect()
    back_at = drill.db.one("SELECT clock_timestamp()")
    if drill.habit == "reaps at once":
        drill.session.call("reap")
    wait_until(drill.has_worker, 60, "whoever may reap is back")
    proxy.heal()

    renewed = "SELECT count(*) FROM pgqueue.jobs WHERE state = 'running' AND heartbeat_at > %s"
    until(lambda: drill.db.one(renewed, back_at), 60)
    claims = drill.db.one("SELECT count(*) FROM faults.history WHERE event = 'claimed'")
    if claims != 1:
        drill.blame("a living worker's job was taken back before it had a chance to renew")
    drill.cancel_all()
    until(lambda: not drill.db.one("SELECT count(*) FROM pgqueue.jobs"), 60)
    holder.end()
    reaper.end()
    drill.work()


@mutant("I9", the_database_is_away_for_longer_than_a_lease, is_slow=True)
def reaps_right_after_an_outage(drill: Drill) -> None:
    drill.habit = "reaps at once"


def others_wait_behind_a_crowd(drill: Drill) -> None:
    drill.enqueue(300, concurrency_key=KEY)
    others = drill.enqueue(10, priority=1)
    session, holding = drill.open(), []
    waiting = set(others)
    # A claim parks what it finds of the crowd; whoever has not come up after so many never does.
    for _ in range(100):
        if not waiting:
            break
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
        SELECT coalesce(extract(epoch FROM min(c.at) - min(b.at)), 'infinity')::double precision
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
