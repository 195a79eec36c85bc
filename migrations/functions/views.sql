-- What a client writes complete jobs through, so that whoever may only ask for jobs gets the new one's id: nobody
-- finds a row in it, and RETURNING gives the row just written. What state the job is in is not for the writer to say.
CREATE OR REPLACE VIEW {{schema}}.new_jobs AS
SELECT j.id, j.task, j.args, j.queue, j.priority, j.max_attempts, j.timeout_seconds, j.concurrency_key,
       j.concurrency_limit, j.is_unique_until_start, j.idempotency_key, j.headers, j.state
FROM {{schema}}.jobs AS j
WHERE false;
ALTER VIEW {{schema}}.new_jobs ALTER COLUMN state SET DEFAULT 'ready';

-- Counts for people.

CREATE OR REPLACE VIEW {{schema}}.job_counts AS
SELECT j.queue, j.state, count(*) AS jobs, min(j.run_at) AS oldest_run_at
FROM {{schema}}.jobs AS j
GROUP BY j.queue, j.state;

CREATE OR REPLACE VIEW {{schema}}.key_counts AS
SELECT j.concurrency_key, max(j.concurrency_limit) AS concurrency_limit,
       count(*) FILTER (WHERE j.state = 'running') AS running,
       count(*) FILTER (WHERE j.state = 'ready') AS ready,
       count(*) FILTER (WHERE j.state = 'blocked') AS blocked
FROM {{schema}}.jobs AS j
WHERE j.concurrency_key IS NOT NULL
GROUP BY j.concurrency_key;

-- Counting a million ready jobs takes its time; a page wants "more than 10,000" at once.
CREATE OR REPLACE FUNCTION {{schema}}.ready_depth(queue text, up_to integer DEFAULT 10000) RETURNS bigint
LANGUAGE sql STABLE
SET search_path = {{schema}}, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
    SELECT count(*)
    FROM (
        SELECT FROM jobs AS j WHERE j.queue = ready_depth.queue AND j.state = 'ready' LIMIT ready_depth.up_to + 1
    ) AS r
$$;

-- The first ready job of each (queue, priority), the oldest of them: the recursion walks the index from one to the next,
-- two index reads each however many jobs lie between, and no further than is read: put a LIMIT on it.
CREATE OR REPLACE VIEW {{schema}}.ready_heads AS
WITH RECURSIVE head AS (
    (
        SELECT j.queue, j.priority, j.run_at
        FROM {{schema}}.jobs AS j
        WHERE j.state = 'ready'
        ORDER BY j.queue, j.priority, j.run_at, j.id
        LIMIT 1
    )
    UNION ALL
    SELECT f.queue, f.priority, f.run_at
    FROM head AS h
    CROSS JOIN LATERAL (
        SELECT j.queue, j.priority, j.run_at
        FROM {{schema}}.jobs AS j
        WHERE j.state = 'ready' AND (j.queue, j.priority) > (h.queue, h.priority)
        ORDER BY j.queue, j.priority, j.run_at, j.id
        LIMIT 1
    ) AS f
)
SELECT h.queue, h.priority, h.run_at FROM head AS h;
