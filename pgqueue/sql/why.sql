-- What keeps one job from running, one question each: cheap ones, about one job.

-- name: workers
-- Who could run a job of this task in this queue: live workers, those of them that serve the queue, their slots and
-- how many are used; who served it last; when a worker last said that it knows the task, and the task's breaker.
SELECT
    count(*) FILTER (WHERE worker.is_live),
    count(*) FILTER (WHERE worker.is_live AND worker.serves),
    coalesce(sum(worker.slots) FILTER (WHERE worker.is_live AND worker.serves), 0)::bigint,
    coalesce(sum(worker.running) FILTER (WHERE worker.is_live AND worker.serves), 0)::bigint,
    (array_agg(worker.host ORDER BY worker.seen_at DESC) FILTER (WHERE worker.serves))[1],
    max(worker.seen_at) FILTER (WHERE worker.serves),
    (SELECT task.seen_at FROM {{schema}}.tasks AS task WHERE task.name = %(task)s::text),
    (SELECT task.breaker FROM {{schema}}.tasks AS task WHERE task.name = %(task)s::text)
FROM (
    SELECT
        worker.host,
        worker.seen_at,
        worker.slots,
        worker.queues @> ARRAY[%(queue)s::text] AS serves,
        worker.seen_at > clock_timestamp() - make_interval(secs => %(silent_seconds)s::double precision) AS is_live,
        (
            SELECT count(*) FROM {{schema}}.jobs AS job
            WHERE job.state = 'running' AND job.worker_id = worker.id
        ) AS running
    FROM {{schema}}.workers AS worker
) AS worker;

-- name: line
-- How many jobs of the queue would be taken before this one, counted up to the cap, and how many of it run now.
SELECT
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM {{schema}}.jobs AS other
            WHERE other.queue = job.queue
              AND other.state = 'ready'
              AND (other.priority, other.run_at, other.id) < (job.priority, job.run_at, job.id)
            LIMIT %(cap)s::integer + 1
        ) AS ahead
    ),
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM {{schema}}.jobs AS other
            WHERE other.state = 'running' AND other.queue = job.queue
            LIMIT %(cap)s::integer + 1
        ) AS busy
    )
FROM {{schema}}.jobs AS job
WHERE job.id = %(job_id)s::bigint;

-- name: holders
-- Who holds the concurrency key, the oldest first.
SELECT job.id, job.task, job.started_at, worker.host, worker.pid,
    job.heartbeat_at + make_interval(secs => job.lease_seconds)
FROM {{schema}}.jobs AS job
LEFT JOIN {{schema}}.workers AS worker ON worker.id = job.worker_id
WHERE job.concurrency_key = %(key)s::text
  AND job.concurrency_slot IS NOT NULL
ORDER BY job.started_at, job.id
LIMIT 10;

-- name: breaker
-- Where a breaker stands, if it is not closed.
SELECT breaker.name, breaker.state, breaker.opened_at, breaker.retry_at, breaker.probe_until
FROM {{schema}}.breakers AS breaker
WHERE breaker.name = %(name)s::text
  AND breaker.state <> 'closed';

-- name: rate
-- The limit that a job waits for, its next token, and how many wait before the job, counted up to the cap.
SELECT
    entry.name,
    entry.tokens_per_second,
    entry.burst,
    entry.next_at,
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM {{schema}}.jobs AS other
            JOIN {{schema}}.jobs AS job ON job.id = %(job_id)s::bigint
            WHERE other.rate_key = entry.name
              AND other.queue = job.queue
              AND other.state = 'scheduled'
              AND other.rate_parked_at IS NOT NULL
              AND (other.priority, other.id) < (job.priority, job.id)
            LIMIT %(cap)s::integer + 1
        ) AS ahead
    )
FROM {{schema}}.rate_limits AS entry
WHERE entry.name = %(name)s::text;

-- name: row_lock
-- The transaction that has the job's row locked. Claims pass such a row by, and its end would wait. A lock that
-- several share at once names none of them.
SELECT session.pid, session.usename::text, session.application_name, host(session.client_addr), session.state,
    session.xact_start
FROM {{schema}}.jobs AS job
JOIN pg_locks AS held ON held.locktype = 'transactionid' AND held.granted AND held.transactionid = job.xmax
    AND held.mode = 'ExclusiveLock'
JOIN pg_stat_activity AS session ON session.pid = held.pid
WHERE job.id = %(job_id)s::bigint
  AND session.pid <> pg_backend_pid()
ORDER BY session.xact_start
LIMIT 1;

-- name: effect
-- The attempt that is at work on this idempotency key, if it is another job's.
SELECT processed.job_id, processed.updated_at
FROM {{schema}}.processed_jobs AS processed
WHERE processed.idempotency_key = %(key)s::text
  AND processed.status = 'IN_PROGRESS'
  AND processed.job_id IS DISTINCT FROM %(job_id)s::bigint;

-- name: done_to_queue
-- Who last did this to the queue.
SELECT entry.at, entry.role, entry.actor
FROM {{schema}}.audit_log AS entry
WHERE entry.subject = %(queue)s::text
  AND entry.action = %(action)s::text
ORDER BY entry.id DESC
LIMIT 1;

-- name: done_to_job
-- Who cancelled the job. Of many at once only the first few are named.
SELECT entry.at, entry.role, entry.actor
FROM {{schema}}.audit_log AS entry
WHERE entry.action = 'jobs.cancel'
  AND entry.details @> jsonb_build_object('job_ids', jsonb_build_array(%(job_id)s::bigint))
ORDER BY entry.id DESC
LIMIT 1;

-- name: server
-- Whether anything can be written here at all.
SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on';
