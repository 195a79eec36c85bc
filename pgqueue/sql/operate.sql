-- What a person does to jobs by hand. The functions carry the guarantees; what is only a statement here
-- follows the same order of locks: job rows by id first.

-- name: cancel
-- Waiting jobs end now, running ones are asked to stop; an id that is not returned is not live.
SELECT cancelled.job_id, cancelled.outcome
FROM {{schema}}.cancel(%(job_ids)s::bigint[], %(reason)s::text) AS cancelled;

-- name: run_now
-- Make scheduled jobs ready at once and wake a worker. One that waits for a token of its rate limit
-- stays in its line, one that waits for its circuit breaker goes on waiting. The guard on the state is checked again on the newest version of the row, so a
-- job promoted, cancelled or parked meanwhile is left alone.
WITH held AS MATERIALIZED (
    SELECT job.id
    FROM {{schema}}.jobs AS job
    WHERE job.id = ANY (%(job_ids)s::bigint[])
      AND job.state = 'scheduled'
      AND job.rate_parked_at IS NULL
      AND NOT EXISTS (
          SELECT FROM {{schema}}.breakers AS breaker
          WHERE breaker.parked_until = job.run_at
      )
    ORDER BY job.id
    FOR NO KEY UPDATE
),
woken AS (
    UPDATE {{schema}}.jobs AS job
    SET state = 'ready',
        run_at = clock_timestamp()
    FROM held
    WHERE job.id = held.id
      AND job.state = 'scheduled'
    RETURNING job.id, job.queue
),
rung AS (
    SELECT
        {{schema}}.ring(array_agg(DISTINCT woken.queue)) AS ring,
        {{schema}}.audit_jobs('jobs.retry', array_agg(woken.id)) AS entry
    FROM woken
)
SELECT woken.id, rung.ring, rung.entry
FROM woken
CROSS JOIN rung;

-- name: redrive
-- Put dead letters back, ready at once, history kept; one outcome for each id: ready,
-- unique_key_taken or not_found. A dead letter comes back once, however many ask at the same time.
SELECT redriven.job_id, redriven.outcome
FROM {{schema}}.redrive(%(job_ids)s::bigint[], %(extra_attempts)s::integer) AS redriven;

-- name: purge_dead
-- Delete dead letters for good. One that is being redriven at this moment is left to the redrive.
WITH held AS MATERIALIZED (
    SELECT job.id
    FROM {{schema}}.dead_jobs AS job
    WHERE job.id = ANY (%(job_ids)s::bigint[])
    ORDER BY job.id
    LIMIT cardinality(%(job_ids)s::bigint[])
    FOR UPDATE SKIP LOCKED
),
gone AS (
    DELETE FROM {{schema}}.dead_jobs AS job
    USING held
    WHERE job.id = held.id
    RETURNING job.id
),
written AS (
    SELECT {{schema}}.audit_jobs('jobs.purge', array_agg(gone.id)) AS entry
    FROM gone
)
SELECT gone.id, written.entry
FROM gone
CROSS JOIN written;

-- name: pause_queues
-- Start nothing more in these queues, or in all that are known and not paused yet, for so long or until then; gives
-- their names.
SELECT paused.name
FROM {{schema}}.pause_queues(
    %(queues)s::text[], %(reason)s::text, %(seconds)s::double precision, %(until)s::timestamptz
) AS paused (name)
ORDER BY paused.name;

-- name: resume_queues
-- Go on in these queues, or in all that are paused, for this reason if one is given, and wake their workers; gives
-- their names.
SELECT resumed.name
FROM {{schema}}.resume_queues(%(queues)s::text[], %(max_running)s::integer, %(reason)s::text) AS resumed (name)
ORDER BY resumed.name;

-- name: list_pauses
-- The pauses that are in force.
SELECT queue.name, queue.paused_until, queue.reason, statement_timestamp()
FROM {{schema}}.queues AS queue
WHERE queue.is_paused
  AND (queue.paused_until > statement_timestamp()) IS NOT FALSE
ORDER BY queue.name;

-- name: limit_queue
-- Let at most so many jobs of a queue run at a time; NULL: no limit.
SELECT {{schema}}.limit_queue(%(queue)s::text, %(max_running)s::integer, %(reason)s::text);
