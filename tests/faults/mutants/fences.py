"""Who lost a job writes nothing about it, and nobody's live lease is taken: I8."""

from __future__ import annotations

from tests.faults.arena import until
from tests.faults.drill import Drill
from tests.faults.mutants.mutant import mutant
from tests.support import wait_until


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


@mutant("I8", the_power_is_cut_after_a_claim, is_slow=True)
def gives_a_token_that_comes_again(drill: Drill) -> None:
    """As a sequence's next value does, or an attempt's number, when the claim that took it is undone."""
    drill.alter("claim", "uuid := gen_random_uuid()", "uuid := md5('1')::uuid")


def a_worker_wakes_after_its_successor_began(drill: Drill) -> None:
    drill.enqueue()
    frozen, healthy = drill.open(), drill.open()
    late = frozen.claim(lease_seconds=0.2)
    drill.leave_effect(frozen, late[0])
    wait_until(lambda: healthy.call("reap"), 60, "the lease runs out")
    healthy.make_due()
    now = healthy.claim()
    drill.leave_effect(healthy, now[0])

    drill.complete(frozen, *late)
    drill.complete(healthy, *now)


@mutant("I8", a_worker_wakes_after_its_successor_began)
def completes_by_id_and_state(drill: Drill) -> None:
    drill.alter("complete", ")) IS TRUE", ")) IS NOT NULL")


def a_heartbeat_arrives_while_somebody_reaps(drill: Drill) -> None:
    drill.enqueue()
    held = drill.session.claim()
    drill.session.expire(*held)
    reaper = drill.open()
    reaping = drill.start(reaper.call, "reap")
    until(lambda: reaping.done() or drill.is_sleeping(reaper), 60)
    drill.session.heartbeat(*held)
    reaping.result()

    drill.leave_effect(drill.session, held[0])
    drill.complete(drill.session, *held)
    drill.work()


@mutant("I8", a_heartbeat_arrives_while_somebody_reaps)
def reaps_by_id(drill: Drill) -> None:
    """Find what has expired, and take it back by its id, without another look, when it has been renewed."""
    drill.replace_body("reap", BLIND_REAP)


BLIND_REAP = """
DECLARE
    ids bigint[];
    latest timestamptz;
BEGIN
    SELECT array_agg(j.id), max(j.heartbeat_at) INTO ids, latest FROM jobs AS j
    WHERE j.state = 'running' AND j.heartbeat_at + make_interval(secs => j.lease_seconds) < clock_timestamp();
    FOR tries IN 1..600 LOOP
        EXIT WHEN EXISTS (SELECT FROM jobs AS j WHERE j.id = ANY (ids) AND j.heartbeat_at > latest);
        PERFORM pg_sleep(0.1);
    END LOOP;
    RETURN QUERY
    UPDATE jobs AS j SET
        state = 'ready', crashes = j.crashes + 1, claim_token = NULL, worker_id = NULL, heartbeat_at = NULL,
        lease_seconds = NULL, deadline_at = NULL, started_at = NULL, concurrency_slot = NULL,
        errors = append_error(j.errors, j.attempt, j.worker_id, 'lease expired')
    WHERE j.id = ANY (ids)
    RETURNING j.id, j.state, 'lease expired', j.task::text, j.queue::text;
END
"""
