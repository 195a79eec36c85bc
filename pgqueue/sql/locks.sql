-- Advisory locks for the application's own purposes, by name; and who holds what.

-- name: try_session
-- Take a lock for the session if it is free now.
SELECT pg_try_advisory_lock(hashtextextended('{{schema}}.lock:' || %(name)s::text, 0));

-- name: wait_session
-- Take a lock for the session, waiting as long as lock_timeout says.
SELECT pg_advisory_lock(hashtextextended('{{schema}}.lock:' || %(name)s::text, 0)) IS NOT NULL;

-- name: unlock_session
SELECT pg_advisory_unlock(hashtextextended('{{schema}}.lock:' || %(name)s::text, 0));

-- name: try_transaction
-- Take a lock until the end of the transaction if it is free now.
SELECT pg_try_advisory_xact_lock(hashtextextended('{{schema}}.lock:' || %(name)s::text, 0));

-- name: wait_transaction
-- Take a lock until the end of the transaction, waiting as long as lock_timeout says.
SELECT pg_advisory_xact_lock(hashtextextended('{{schema}}.lock:' || %(name)s::text, 0)) IS NOT NULL;

-- name: lock_timeout
SELECT current_setting('lock_timeout');

-- name: set_lock_timeout
SELECT set_config('lock_timeout', %(value)s::text, %(is_local)s::boolean);

-- name: holders
-- Who holds concurrency keys, idempotency keys and named locks now, the oldest first.
SELECT holder.kind, holder.name, holder.job_id, holder.task, holder.worker_id, holder.pid, holder.client, holder.since,
    clock_timestamp()
FROM (
    SELECT 'concurrency key' AS kind, job.concurrency_key AS name, job.id AS job_id, job.task,
        job.worker_id::text AS worker_id, NULL::integer AS pid, NULL::text AS client, job.started_at AS since
    FROM {{schema}}.jobs AS job
    WHERE job.state = 'running'
      AND job.concurrency_slot IS NOT NULL
    UNION ALL
    SELECT 'idempotency key', processed.idempotency_key, processed.job_id, processed.job_name,
        job.worker_id::text, NULL, NULL, processed.updated_at
    FROM {{schema}}.processed_jobs AS processed
    LEFT JOIN {{schema}}.jobs AS job
        ON job.id = processed.job_id AND job.claim_token = processed.claim_token AND job.state = 'running'
    WHERE processed.status = 'IN_PROGRESS'
    UNION ALL
    SELECT 'transaction', job.idempotency_key, job.id, job.task, job.worker_id::text, session.pid,
        host(session.client_addr), session.xact_start
    FROM pg_stat_activity AS session
    CROSS JOIN LATERAL regexp_match(session.application_name, '^pgqueue job (\d{1,18}) ([0-9a-f]{8})$') AS found (parts)
    LEFT JOIN {{schema}}.jobs AS job ON job.id = found.parts[1]::bigint
    WHERE session.datname = current_database()
      AND found.parts IS NOT NULL
    UNION ALL
    SELECT 'lock', substr(session.application_name, 14), NULL, NULL, NULL, session.pid, host(session.client_addr),
        session.state_change
    FROM pg_stat_activity AS session
    WHERE session.datname = current_database()
      AND session.application_name LIKE 'pgqueue lock %%'
      AND EXISTS (SELECT FROM pg_locks AS lock WHERE lock.pid = session.pid AND lock.locktype = 'advisory' AND lock.granted)
) AS holder
ORDER BY holder.since, holder.name
LIMIT %(max_rows)s::integer;
