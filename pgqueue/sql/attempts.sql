-- What a worker asks of the queue: take jobs, keep them, end them, look after everybody's.
-- The functions carry the guarantees; here they only get their parameters' types.

-- name: claim
-- Take up to max_jobs due jobs of a queue under a fresh token. Never waits.
SELECT job_id, token::text, attempt, task, args, key, priority, run_at, is_scanned,
    timeout_seconds, max_attempts, crashes, idempotency_key, headers, age_seconds
FROM {{schema}}.claim(
    %(queue)s::text, %(worker_id)s::uuid, %(max_jobs)s::integer, %(lease_seconds)s::double precision,
    %(after_priority)s::integer,
    %(after_run_at)s::timestamptz - make_interval(secs => %(margin_seconds)s::double precision),
    %(after_id)s::bigint, %(up_to_priority)s::integer
);

-- name: heartbeat
-- Renew leases; one verdict for each job. Never waits.
SELECT job_id, verdict
FROM {{schema}}.heartbeat(%(job_ids)s::bigint[], %(tokens)s::uuid[]);

-- name: complete
-- End attempts as succeeded; gives the ids that were still ours.
SELECT job_id
FROM {{schema}}.complete(
    %(job_ids)s::bigint[], %(tokens)s::uuid[], %(results)s::jsonb[], %(reasons)s::text[]
) AS completed (job_id);

-- name: complete_once
-- The same for attempts whose effect was begun by its key: the keys are done as well.
SELECT job_id
FROM {{schema}}.complete_once(
    %(job_ids)s::bigint[], %(tokens)s::uuid[], %(keys)s::text[], %(results)s::jsonb[], %(reasons)s::text[]
) AS completed (job_id);

-- name: fail
-- End attempts as failed; gives the new state of each job that was still ours.
SELECT job_id, state
FROM {{schema}}.fail_many(
    %(job_ids)s::bigint[], %(tokens)s::uuid[], %(errors)s::text[], %(retry_seconds)s::double precision[],
    %(is_dead)s::boolean[], %(is_cancelled)s::boolean[], is_unsure => %(is_unsure)s::boolean[]
);

-- name: release
-- Give attempts back; gives the new state of each job that was still ours.
SELECT job_id, state
FROM {{schema}}.release(
    %(job_ids)s::bigint[], %(tokens)s::uuid[], false, %(reason)s::text, %(delay_seconds)s::double precision[],
    %(is_unsure)s::boolean
);

-- name: crash
-- Say that the process running these attempts died; gives the new state of each that was still ours.
SELECT job_id, state
FROM {{schema}}.crash(%(job_ids)s::bigint[], %(tokens)s::uuid[], %(reason)s::text);

-- name: note_progress
-- Keep what handlers said of how far they are; whose attempt is not ours any more is passed over, and so is
-- a row that is locked: the next word will do.
WITH held AS MATERIALIZED (
    SELECT job.place, said.progress
    FROM unnest(%(job_ids)s::bigint[], %(tokens)s::uuid[], %(progress)s::jsonb[]) AS said (job_id, token, progress)
    CROSS JOIN LATERAL (
        SELECT job.ctid AS place
        FROM {{schema}}.jobs AS job
        WHERE job.id = said.job_id
          AND job.claim_token = said.token
          AND job.state = 'running'
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS job
)
UPDATE {{schema}}.jobs AS job
SET progress = held.progress
FROM held
WHERE job.ctid = held.place;

-- name: landed
-- Which of these attempts we ended ourselves, and the state that gave: the answer to "did my COMMIT land?"
-- A job that we completed has succeeded under our token. Of any other its history tells, whether it stayed in
-- the queue or left it: whoever else ends an attempt of ours, because its lease ran out, leaves a line there,
-- and so do we unless the reason is NULL.
SELECT asked.job_id, CASE WHEN job.claim_token = asked.token THEN job.state ELSE 'ready' END
FROM unnest(
    %(job_ids)s::bigint[], %(tokens)s::uuid[], %(attempts)s::integer[], %(ages)s::double precision[],
    %(reasons)s::text[]
) AS asked (job_id, token, attempt, age_seconds, reason)
CROSS JOIN LATERAL (
    SELECT live.claim_token, live.state, live.created_at, live.errors
    FROM {{schema}}.jobs AS live
    WHERE live.id = asked.job_id
    UNION ALL
    SELECT finished.claim_token, finished.state, finished.created_at, finished.errors
    FROM {{schema}}.finished_jobs AS finished
    WHERE finished.id = asked.job_id
    UNION ALL
    SELECT dead.claim_token, 'dead', dead.created_at, dead.errors
    FROM {{schema}}.dead_jobs AS dead
    WHERE dead.id = asked.job_id
) AS job
CROSS JOIN LATERAL (
    SELECT count(*) AS lines, count(*) FILTER (WHERE line.said ->> 'error' = left(asked.reason, 8000)) AS ours
    FROM jsonb_array_elements(job.errors) AS line (said)
    WHERE CASE WHEN line.said ->> 'worker_id' = %(worker_id)s::text
                AND line.said ->> 'attempt' = asked.attempt::text
               THEN (line.said ->> 'at')::timestamptz >= job.created_at + make_interval(secs => asked.age_seconds)
               ELSE false END
) AS history
WHERE CASE WHEN %(goes_on)s::boolean
           THEN (job.claim_token IS DISTINCT FROM asked.token OR job.state <> 'running')
                AND CASE WHEN asked.reason IS NULL THEN history.lines = 0 ELSE history.ours > 0 END
           ELSE job.claim_token = asked.token AND job.state = 'succeeded' END;

-- name: release_orphans
-- Give back what this worker claimed without hearing of it: the connection broke under the answer.
SELECT released.job_id, released.state
FROM (
    SELECT array_agg(job.id) AS job_ids, array_agg(job.claim_token) AS tokens
    FROM {{schema}}.jobs AS job
    WHERE job.state = 'running'
      AND job.worker_id = %(worker_id)s::uuid
      AND job.id <> ALL (%(held_ids)s::bigint[])
) AS orphan
CROSS JOIN LATERAL {{schema}}.release(orphan.job_ids, orphan.tokens, false, NULL::text, NULL::double precision[]) AS released
WHERE orphan.job_ids IS NOT NULL;

-- name: reap
-- Take back jobs whose lease ran out, while the database's clock has not passed the given second, and tell
-- that clock. Each expired job is taken by exactly one of those who ask.
SELECT extract(epoch FROM clock_timestamp())::double precision, job_id, state, reason, task, queue
FROM (SELECT) AS always
LEFT JOIN LATERAL {{schema}}.reap(
    CASE WHEN extract(epoch FROM clock_timestamp()) < %(not_after)s::double precision THEN 500 ELSE 0 END,
    deadline_grace_seconds => %(deadline_grace_seconds)s::double precision
) AS reaped ON true;

-- name: promote
-- Make due jobs ready, and say in how many seconds the next one is due (NULL: none waits).
SELECT promoted.jobs, (
    SELECT extract(epoch FROM job.run_at - clock_timestamp())::double precision
    FROM {{schema}}.jobs AS job
    WHERE job.state = 'scheduled'
    ORDER BY job.run_at, job.id
    LIMIT 1
)
FROM {{schema}}.promote(1000) AS promoted (jobs);

-- name: sweep
-- Wake blocked jobs that nobody else will wake.
SELECT unblocked, last_key
FROM {{schema}}.sweep(%(after_key)s::text);

-- name: make_partitions
-- Make the history's partitions for the days ahead, counted from the database's today.
SELECT {{schema}}.make_partitions(%(days)s::integer);

-- name: count_remaining
-- Jobs of these queues that a worker should still wait for: whatever is due, runs or waits for a rate limit or
-- a circuit breaker, and retries.
SELECT count(*)
FROM (
    SELECT
    FROM {{schema}}.jobs AS job
    WHERE job.queue = ANY (%(queues)s::text[])
      AND (
          job.state <> 'scheduled'
          OR job.attempt > 0
          OR job.run_at <= clock_timestamp()
          OR job.rate_parked_at IS NOT NULL
          OR job.run_at IN (SELECT breaker.parked_until FROM {{schema}}.breakers AS breaker)
      )
    LIMIT 1
) AS remaining;

-- name: count_dead_since
-- Jobs of these queues that died since the given instant of the database's clock.
SELECT count(*)
FROM {{schema}}.dead_jobs AS dead
WHERE dead.queue = ANY (%(queues)s::text[])
  AND dead.died_at >= %(since)s::timestamptz;

-- name: database_now
-- The database's clock, and who answers.
SELECT clock_timestamp()::text, current_setting('server_version');
