-- The demo's catalogue, in a schema of its own, and its look at the queue from outside. Only the jobs of
-- queue `demo` are touched.

-- name: take_stage
-- One demo at a time in a database; held until the session ends.
SELECT pg_try_advisory_lock(hashtextextended('pgqueue_demo', 0));

-- name: find_stranger
-- A task of somebody else's in the queue that the demo wants for itself.
SELECT job.task
FROM {{schema}}.jobs AS job
WHERE job.queue = 'demo'
  AND job.task <> ALL (%(tasks)s::text[])
LIMIT 1;

-- name: clear
-- Take away what an aborted run left, and the dead letters of the one before.
WITH left_over AS (
    DELETE FROM {{schema}}.jobs AS job
    WHERE job.queue = 'demo'
      AND job.task = ANY (%(tasks)s::text[])
)
DELETE FROM {{schema}}.dead_jobs AS job
WHERE job.queue = 'demo'
  AND job.task = ANY (%(tasks)s::text[]);

-- name: make_catalogue
-- Empty tables. `running` holds the attempts that have started and not ended, by the handlers' own word;
-- `pick_ups` when each of the single jobs met its handler, by the database's clock.
CREATE SCHEMA IF NOT EXISTS pgqueue_demo;
DROP TABLE IF EXISTS pgqueue_demo.files, pgqueue_demo.running, pgqueue_demo.pick_ups;
CREATE TABLE pgqueue_demo.files (
    path text PRIMARY KEY,
    bytes bigint NOT NULL,
    lines integer NOT NULL,
    sha256 text NOT NULL,
    definitions text[] NOT NULL
);
CREATE TABLE pgqueue_demo.running (
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    pid integer NOT NULL,
    path text NOT NULL,
    PRIMARY KEY (job_id, attempt)
);
CREATE TABLE pgqueue_demo.pick_ups (
    job_id bigint PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: insert_jobs
-- Ask for jobs as any program in any language can.
INSERT INTO {{schema}}.jobs (task, args, headers)
SELECT 'demo.catalogue', jsonb_build_object('path', file.path), '{"way": "sql"}'
FROM unnest(%(paths)s::text[]) AS file (path)
RETURNING id;

-- name: start
-- By a handler: this attempt runs in this process.
INSERT INTO pgqueue_demo.running (job_id, attempt, pid, path)
VALUES (%(job_id)s::bigint, %(attempt)s::integer, %(pid)s::integer, %(path)s::text)
ON CONFLICT (job_id, attempt) DO NOTHING;

-- name: end
-- By a handler: this attempt does not run any more.
DELETE FROM pgqueue_demo.running AS attempt
WHERE attempt.job_id = %(job_id)s::bigint
  AND attempt.attempt = %(attempt)s::integer;

-- name: store
-- By a handler: this is in the file, and the attempt is over. Run twice, it leaves the same row.
WITH ended AS (
    DELETE FROM pgqueue_demo.running AS attempt
    WHERE attempt.job_id = %(job_id)s::bigint
      AND attempt.attempt = %(attempt)s::integer
)
INSERT INTO pgqueue_demo.files (path, bytes, lines, sha256, definitions)
VALUES (%(path)s::text, %(bytes)s::bigint, %(lines)s::integer, %(sha256)s::text, %(definitions)s::text[])
ON CONFLICT (path) DO UPDATE SET
    bytes = excluded.bytes,
    lines = excluded.lines,
    sha256 = excluded.sha256,
    definitions = excluded.definitions;

-- name: pick_up
-- By a handler: the job has met it.
INSERT INTO pgqueue_demo.pick_ups (job_id)
VALUES (%(job_id)s::bigint)
ON CONFLICT (job_id) DO NOTHING;

-- name: running
-- The attempts that run at this instant, all of them or those in one process.
SELECT attempt.pid, attempt.job_id, attempt.path
FROM pgqueue_demo.running AS attempt
WHERE attempt.pid = coalesce(%(pid)s::integer, attempt.pid)
ORDER BY attempt.pid, attempt.job_id;

-- name: count_remaining
-- The jobs of this run that have not ended.
SELECT count(*)
FROM {{schema}}.jobs AS job
WHERE job.id >= %(since)s::bigint
  AND job.queue = 'demo';

-- name: catalogue
SELECT path, bytes, lines, sha256, definitions
FROM pgqueue_demo.files;

-- name: outcomes
-- Where each job of this run is, and whatever else is still in its queue.
SELECT
    job.id, job.task, job.args ->> 'path' AS path, job.headers ->> 'way' AS way, job.state, job.crashes,
    job.reason, job.started_at, job.finished_at AS ended_at
FROM {{schema}}.finished_jobs AS job
WHERE job.id >= %(since)s::bigint
  AND job.queue = 'demo'
UNION ALL
SELECT
    job.id, job.task, job.args ->> 'path', job.headers ->> 'way', 'dead', job.crashes,
    job.reason, job.started_at, job.died_at
FROM {{schema}}.dead_jobs AS job
WHERE job.id >= %(since)s::bigint
  AND job.queue = 'demo'
UNION ALL
SELECT
    job.id, job.task, job.args ->> 'path', job.headers ->> 'way', job.state, job.crashes,
    NULL, job.started_at, NULL
FROM {{schema}}.jobs AS job
WHERE job.queue = 'demo'
ORDER BY 1;

-- name: pick_up_seconds
-- From the insert of each single job to its handler.
SELECT extract(epoch FROM pick_up.at - job.created_at)::double precision
FROM pgqueue_demo.pick_ups AS pick_up
JOIN {{schema}}.finished_jobs AS job ON job.id = pick_up.job_id
ORDER BY 1;
