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

-- name: insert
-- Add one job that nothing is left to say about: no function, no trigger has anything to do.
INSERT INTO {{schema}}.new_jobs (
    task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit, is_unique_until_start,
    concurrency_key, idempotency_key, headers
)
VALUES (
    %(task)s::text, %(args)s::jsonb, %(queue)s::text, %(priority)s::smallint, %(max_attempts)s::integer,
    %(timeout_seconds)s::real, %(concurrency_limit)s::smallint, false, %(concurrency_key)s::text,
    %(idempotency_key)s::text, %(headers)s::jsonb
)
RETURNING id;

-- name: insert_alike
-- Add such jobs that differ only in their arguments; the ids come in the order of the array, in which it is read.
INSERT INTO {{schema}}.new_jobs (
    task, args, queue, priority, max_attempts, timeout_seconds, concurrency_limit, is_unique_until_start
)
SELECT %(task)s::text, given.args, %(queue)s::text, %(priority)s::smallint, %(max_attempts)s::integer,
    %(timeout_seconds)s::real, %(concurrency_limit)s::smallint, false
FROM jsonb_array_elements(%(args)s::jsonb) AS given (args)
RETURNING id;

-- name: enqueue_many
-- Add jobs, all or none; gives an id and an outcome for each, in order. We name no member that it does not know.
SELECT job_id, outcome
FROM {{schema}}.enqueue_many(%(jobs)s::jsonb, is_checked => true);

-- name: find_holder
-- The live job that holds a unique key.
SELECT job.id
FROM {{schema}}.jobs AS job
WHERE job.unique_key = %(unique_key)s::text;
