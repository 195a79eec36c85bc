"""Never more holders than the limit: I3."""

from __future__ import annotations

from tests.faults.drill import KEY, Drill
from tests.faults.mutants.mutant import mutant


def many_claimers_of_one_key(drill: Drill) -> None:
    drill.enqueue(60, concurrency_key=KEY)
    for future in [drill.start(drill.work, 10) for _ in range(4)]:
        future.result()


@mutant("I3", many_claimers_of_one_key)
def claims_in_one_statement(drill: Drill) -> None:
    """Look for running jobs of the key and lock the key in the statement that takes the job, as most do."""
    drill.db.connection.execute("DROP INDEX pgqueue.jobs_running_slot")
    drill.replace_body("claim", NAIVE_CLAIM)


NAIVE_CLAIM = """
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
    SELECT t.id, t.claim_token, t.attempt::integer, t.task::text, t.args::text, t.concurrency_key::text,
           t.priority::smallint, t.run_at::text, true, t.timeout_seconds::real, t.max_attempts::integer,
           t.crashes::smallint, t.idempotency_key::text, t.headers::text, 0::double precision
    FROM taken AS t;
END
"""


def many_claimers_of_a_narrow_queue(drill: Drill) -> None:
    drill.db.connection.execute("INSERT INTO pgqueue.queues (name, max_running) VALUES ('default', 2)")
    drill.enqueue(40)
    claimers = [drill.open() for _ in range(4)]
    held = [(claimer, claimer.claim(max_jobs=2)) for claimer in claimers]
    for claimer, attempts in held:
        for attempt in attempts:
            drill.leave_effect(claimer, attempt)
        drill.complete(claimer, *attempts)
    for future in [drill.start(drill.work, 2) for _ in claimers]:
        future.result()


@mutant("I3", many_claimers_of_a_narrow_queue)
def claims_beyond_max_running(drill: Drill) -> None:
    drill.alter("claim", "IF max_running IS NOT NULL THEN", "IF false THEN")
