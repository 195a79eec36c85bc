-- Asking for jobs. The functions carry the guarantees; here they only get their parameters' types.

-- name: enqueue
-- Add one job; gives the id of the job that now stands for the request, and what it took.
SELECT job_id, outcome
FROM {{schema}}.enqueue_one(
    task => %(task)s::text,
    args => %(args)s::jsonb,
    queue => %(queue)s::text,
    run_at => %(run_at)s::timestamptz,
    priority => %(priority)s::integer,
    max_attempts => %(max_attempts)s::integer,
    timeout_seconds => %(timeout_seconds)s::double precision,
    concurrency_key => %(concurrency_key)s::text,
    concurrency_limit => %(concurrency_limit)s::integer,
    unique_key => %(unique_key)s::text,
    on_conflict => %(on_conflict)s::text,
    idempotency_key => %(idempotency_key)s::text,
    headers => %(headers)s::jsonb,
    delay_seconds => %(delay_seconds)s::double precision,
    unique_until => %(unique_until)s::text,
    max_delay_seconds => %(max_delay_seconds)s::double precision
);

-- name: enqueue_many
-- Add jobs, all or none; gives an id and an outcome for each, in order. We name no member that it does not know.
SELECT job_id, outcome
FROM {{schema}}.enqueue_many(%(jobs)s::jsonb, is_checked => true);

-- name: find_holder
-- The live job that holds a unique key.
SELECT job.id
FROM {{schema}}.jobs AS job
WHERE job.unique_key = %(unique_key)s::text;
