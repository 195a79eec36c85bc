-- What a person asks about the queue. Every statement is bounded: it reads a page, or counts up to a
-- cap, so that looking at a queue in trouble does not add to the trouble.

-- name: list_jobs
-- The newest jobs, live and ended, below an id. since_at is when the job came into its state; for a
-- scheduled one it is when it becomes due, unless it waits for its rate limit or its circuit breaker. The arguments are read after the page is chosen: a sort
-- must not fetch those of rows that nobody sees.
WITH live AS (
    SELECT
        job.id,
        job.state,
        job.queue,
        job.task,
        job.priority,
        job.attempt,
        job.max_attempts,
        job.created_at,
        CASE WHEN job.state = 'running' THEN job.started_at ELSE job.run_at END AS since_at,
        CASE
            WHEN job.rate_parked_at IS NOT NULL THEN 'rate_limit'
            WHEN job.state = 'scheduled' AND EXISTS (
                SELECT FROM {{schema}}.breakers AS breaker
                WHERE breaker.parked_until = job.run_at
            ) THEN 'breaker'
        END AS waits_for,
        NULL::text AS reason,
        job.args
    FROM {{schema}}.jobs AS job
    WHERE job.state = ANY (%(states)s::text[])
      AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
      AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
      AND (%(below_id)s::bigint IS NULL OR job.id < %(below_id)s::bigint)
    ORDER BY job.id DESC
    LIMIT %(limit)s::integer
),
finished AS (
    SELECT
        job.id,
        job.state,
        job.queue,
        job.task,
        job.priority,
        job.attempt,
        NULL::integer AS max_attempts,
        job.created_at,
        job.finished_at AS since_at,
        NULL AS waits_for,
        job.reason,
        job.args
    FROM {{schema}}.finished_jobs AS job
    WHERE job.state = ANY (%(states)s::text[])
      AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
      AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
      AND (%(below_id)s::bigint IS NULL OR job.id < %(below_id)s::bigint)
    ORDER BY job.id DESC
    LIMIT %(limit)s::integer
),
dead AS (
    SELECT
        job.id,
        'dead' AS state,
        job.queue,
        job.task,
        job.priority,
        job.attempt,
        job.max_attempts,
        job.created_at,
        job.died_at AS since_at,
        NULL AS waits_for,
        job.reason,
        job.args
    FROM {{schema}}.dead_jobs AS job
    WHERE 'dead' = ANY (%(states)s::text[])
      AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
      AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
      AND (%(below_id)s::bigint IS NULL OR job.id < %(below_id)s::bigint)
    ORDER BY job.id DESC
    LIMIT %(limit)s::integer
),
page AS MATERIALIZED (
    SELECT id, state, queue, task, priority, attempt, max_attempts, created_at, since_at, waits_for, reason, args FROM live
    UNION ALL
    SELECT id, state, queue, task, priority, attempt, max_attempts, created_at, since_at, waits_for, reason, args FROM finished
    UNION ALL
    SELECT id, state, queue, task, priority, attempt, max_attempts, created_at, since_at, waits_for, reason, args FROM dead
    ORDER BY id DESC
    LIMIT %(limit)s::integer
)
SELECT
    id,
    state,
    queue,
    task,
    priority,
    attempt,
    max_attempts,
    created_at,
    since_at,
    waits_for,
    clock_timestamp() AS seen_at,
    reason,
    left(args::text, %(max_chars)s::integer)
FROM page
ORDER BY id DESC;

-- name: show_job
-- All there is to know about one job, wherever it lies; one snapshot, so that a job on its way from
-- one table to the next is found in one of them.
WITH found AS (
    SELECT
        job.id,
        job.state,
        job.queue,
        job.task,
        job.priority,
        job.attempt,
        job.max_attempts,
        job.crashes,
        job.timeout_seconds,
        job.created_at,
        job.run_at,
        job.started_at,
        NULL::timestamptz AS ended_at,
        job.heartbeat_at,
        job.heartbeat_at + make_interval(secs => job.lease_seconds) AS lease_expires_at,
        job.deadline_at,
        job.cancel_requested_at,
        job.worker_id,
        job.concurrency_key,
        job.concurrency_limit,
        job.unique_key,
        job.idempotency_key,
        job.rate_key,
        job.rate_parked_at,
        NULL::text AS reason,
        job.args,
        job.headers,
        job.errors,
        job.progress,
        NULL::jsonb AS result
    FROM {{schema}}.jobs AS job
    WHERE job.id = %(job_id)s::bigint
    UNION ALL
    SELECT
        job.id,
        job.state,
        job.queue,
        job.task,
        job.priority,
        job.attempt,
        NULL,
        job.crashes,
        NULL,
        job.created_at,
        job.run_at,
        job.started_at,
        job.finished_at,
        NULL,
        NULL,
        NULL,
        NULL,
        job.worker_id,
        job.concurrency_key,
        NULL,
        job.unique_key,
        job.idempotency_key,
        NULL,
        NULL,
        job.reason,
        job.args,
        job.headers,
        job.errors,
        NULL,
        job.result
    FROM {{schema}}.finished_jobs AS job
    WHERE job.id = %(job_id)s::bigint
    UNION ALL
    SELECT
        job.id,
        'dead',
        job.queue,
        job.task,
        job.priority,
        job.attempt,
        job.max_attempts,
        job.crashes,
        job.timeout_seconds,
        job.created_at,
        job.run_at,
        job.started_at,
        job.died_at,
        NULL,
        NULL,
        NULL,
        NULL,
        job.worker_id,
        job.concurrency_key,
        job.concurrency_limit,
        job.unique_key,
        job.idempotency_key,
        NULL,
        NULL,
        job.reason,
        job.args,
        job.headers,
        job.errors,
        NULL,
        NULL
    FROM {{schema}}.dead_jobs AS job
    WHERE job.id = %(job_id)s::bigint
)
SELECT
    found.id,
    found.state,
    found.queue,
    found.task,
    found.priority,
    found.attempt,
    found.max_attempts,
    found.crashes,
    found.timeout_seconds,
    found.created_at,
    found.run_at,
    found.started_at,
    found.ended_at,
    clock_timestamp() AS seen_at,
    found.heartbeat_at,
    found.lease_expires_at,
    found.deadline_at,
    found.cancel_requested_at,
    found.worker_id,
    worker.host,
    worker.pid,
    coalesce(queue.is_paused AND coalesce(queue.paused_until > clock_timestamp(), true), false),
    queue.paused_until,
    queue.max_running,
    queue.reason,
    found.concurrency_key,
    found.concurrency_limit,
    ARRAY(
        SELECT holder.id
        FROM {{schema}}.jobs AS holder
        WHERE holder.concurrency_key = found.concurrency_key
          AND holder.concurrency_slot IS NOT NULL
        ORDER BY holder.concurrency_slot
        LIMIT 10
    ),
    found.unique_key,
    found.idempotency_key,
    found.rate_key,
    found.rate_parked_at,
    (
        SELECT breaker.name
        FROM {{schema}}.breakers AS breaker
        WHERE found.state = 'scheduled'
          AND breaker.parked_until = found.run_at
        ORDER BY breaker.name
        LIMIT 1
    ),
    found.reason,
    found.args::text,
    found.headers::text,
    found.errors::text,
    found.progress::text,
    found.result::text
FROM found
LEFT JOIN {{schema}}.workers AS worker ON worker.id = found.worker_id
LEFT JOIN {{schema}}.queues AS queue ON queue.name = found.queue;

-- name: job_states
-- Where these jobs are, for those that are anywhere; a job that waits for a token of its rate limit or
-- for its circuit breaker is told apart, because it is scheduled only in name.
SELECT job.id,
    CASE
        WHEN job.rate_parked_at IS NOT NULL THEN 'rate_limited'
        WHEN job.state = 'scheduled' AND EXISTS (
            SELECT FROM {{schema}}.breakers AS breaker
            WHERE breaker.parked_until = job.run_at
        ) THEN 'parked_by_breaker'
        ELSE job.state
    END
FROM {{schema}}.jobs AS job
WHERE job.id = ANY (%(job_ids)s::bigint[])
UNION ALL
SELECT job.id, job.state
FROM {{schema}}.finished_jobs AS job
WHERE job.id = ANY (%(job_ids)s::bigint[])
UNION ALL
SELECT job.id, 'dead'
FROM {{schema}}.dead_jobs AS job
WHERE job.id = ANY (%(job_ids)s::bigint[]);

-- name: count_live
-- How many live jobs match, by state, and the instant of the count: what is made later is left alone by a run
-- that was told these numbers.
SELECT counted.state, counted.jobs, clock_timestamp()
FROM (SELECT) AS one
LEFT JOIN (
    SELECT job.state, count(*) AS jobs
    FROM {{schema}}.jobs AS job
    WHERE job.state = ANY (%(states)s::text[])
      AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
      AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
      AND (
          %(older_than_seconds)s::double precision IS NULL
          OR job.created_at < clock_timestamp() - make_interval(secs => %(older_than_seconds)s::double precision)
      )
    GROUP BY job.state
) AS counted ON true;

-- name: next_live
-- The next ids of a run over live jobs: each is met once.
SELECT job.id
FROM {{schema}}.jobs AS job
WHERE job.id > %(above_id)s::bigint
  AND job.created_at <= %(until)s::timestamptz
  AND job.state = ANY (%(states)s::text[])
  AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
  AND (
      %(older_than_seconds)s::double precision IS NULL
      OR job.created_at < %(until)s::timestamptz - make_interval(secs => %(older_than_seconds)s::double precision)
  )
ORDER BY job.id
LIMIT %(limit)s::integer;

-- name: list_dead
-- Dead letters that match, the latest first.
SELECT
    job.id,
    job.queue,
    job.task,
    job.attempt,
    job.max_attempts,
    job.crashes,
    job.created_at,
    job.died_at,
    clock_timestamp() AS seen_at,
    job.reason,
    job.args::text
FROM {{schema}}.dead_jobs AS job
WHERE (%(job_ids)s::bigint[] IS NULL OR job.id = ANY (%(job_ids)s::bigint[]))
  AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
  AND (%(reason)s::text IS NULL OR position(lower(%(reason)s::text) IN lower(job.reason)) > 0)
  AND (
      %(older_than_seconds)s::double precision IS NULL
      OR job.died_at < clock_timestamp() - make_interval(secs => %(older_than_seconds)s::double precision)
  )
ORDER BY job.died_at DESC, job.id DESC
LIMIT %(limit)s::integer;

-- name: count_dead
-- How many dead letters match, and the instant of the count: what dies later is left alone by a run
-- that was told this number.
SELECT count(*), clock_timestamp()
FROM {{schema}}.dead_jobs AS job
WHERE (%(job_ids)s::bigint[] IS NULL OR job.id = ANY (%(job_ids)s::bigint[]))
  AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
  AND (%(reason)s::text IS NULL OR position(lower(%(reason)s::text) IN lower(job.reason)) > 0)
  AND (
      %(older_than_seconds)s::double precision IS NULL
      OR job.died_at < clock_timestamp() - make_interval(secs => %(older_than_seconds)s::double precision)
  );

-- name: next_dead
-- The next ids of a run over dead letters: each is met once, even if it comes back dead meanwhile.
SELECT job.id
FROM {{schema}}.dead_jobs AS job
WHERE job.id > %(above_id)s::bigint
  AND job.died_at <= %(until)s::timestamptz
  AND (%(job_ids)s::bigint[] IS NULL OR job.id = ANY (%(job_ids)s::bigint[]))
  AND (%(queue)s::text IS NULL OR job.queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR job.task = %(task)s::text)
  AND (%(reason)s::text IS NULL OR position(lower(%(reason)s::text) IN lower(job.reason)) > 0)
  AND (
      %(older_than_seconds)s::double precision IS NULL
      OR job.died_at < %(until)s::timestamptz - make_interval(secs => %(older_than_seconds)s::double precision)
  )
ORDER BY job.id
LIMIT %(limit)s::integer;

-- name: list_queues
-- Every queue that has jobs, settings, a task or a worker. Ready jobs are counted up to the cap in each
-- queue; the other states in one pass of at most ten caps over all queues: a pass that was cut
-- short makes its numbers lower bounds.
WITH ready AS (
    SELECT oldest.queue, oldest.run_at, depth.jobs
    FROM (
        SELECT head.queue, min(head.run_at) AS run_at
        FROM (SELECT first.queue, first.run_at FROM {{schema}}.ready_heads AS first LIMIT %(cap)s::integer) AS head
        GROUP BY head.queue
    ) AS oldest
    CROSS JOIN LATERAL {{schema}}.ready_depth(oldest.queue, %(cap)s::integer) AS depth (jobs)
),
passed AS (
    (
        SELECT job.queue, 'scheduled' AS state
        FROM {{schema}}.jobs AS job
        WHERE job.state = 'scheduled'
        ORDER BY job.run_at, job.id
        LIMIT %(cap)s::integer * 10 + 1
    )
    UNION ALL
    (
        SELECT job.queue, 'blocked'
        FROM {{schema}}.jobs AS job
        WHERE job.state = 'blocked'
        ORDER BY CASE WHEN job.state = 'blocked' THEN job.concurrency_key END
        LIMIT %(cap)s::integer * 10 + 1
    )
    UNION ALL
    (
        SELECT job.queue, 'running'
        FROM {{schema}}.jobs AS job
        WHERE job.state = 'running'
        ORDER BY job.id
        LIMIT %(cap)s::integer * 10 + 1
    )
    UNION ALL
    (
        SELECT job.queue, 'dead'
        FROM {{schema}}.dead_jobs AS job
        LIMIT %(cap)s::integer * 10 + 1
    )
),
counted AS (
    SELECT
        passed.queue,
        count(*) FILTER (WHERE passed.state = 'scheduled') AS scheduled,
        count(*) FILTER (WHERE passed.state = 'blocked') AS blocked,
        count(*) FILTER (WHERE passed.state = 'running') AS running,
        count(*) FILTER (WHERE passed.state = 'dead') AS dead
    FROM passed
    GROUP BY passed.queue
),
total AS (
    SELECT
        sum(counted.scheduled) AS scheduled,
        sum(counted.blocked) AS blocked,
        sum(counted.running) AS running,
        sum(counted.dead) AS dead
    FROM counted
),
served AS (
    SELECT place.queue, count(*) AS workers
    FROM {{schema}}.workers AS worker
    CROSS JOIN LATERAL unnest(worker.queues) AS place (queue)
    WHERE worker.seen_at > clock_timestamp() - make_interval(secs => %(silent_seconds)s::double precision)
    GROUP BY place.queue
),
named AS (
    SELECT ready.queue FROM ready
    UNION
    SELECT counted.queue FROM counted
    UNION
    SELECT queue.name FROM {{schema}}.queues AS queue
    UNION
    SELECT task.queue FROM {{schema}}.tasks AS task WHERE task.queue IS NOT NULL
    UNION
    SELECT served.queue FROM served
)
SELECT
    named.queue,
    coalesce(ready.jobs, 0),
    coalesce(counted.scheduled, 0),
    coalesce(counted.blocked, 0),
    coalesce(counted.running, 0),
    coalesce(counted.dead, 0),
    CASE WHEN ready.jobs > 0 THEN
        greatest(extract(epoch FROM clock_timestamp() - ready.run_at), 0)::double precision
    END,
    coalesce(queue.is_paused AND coalesce(queue.paused_until > clock_timestamp(), true), false),
    queue.paused_until,
    queue.max_running,
    queue.reason,
    coalesce(served.workers, 0),
    array_remove(ARRAY[
        CASE WHEN total.scheduled > %(cap)s::integer * 10 THEN 'scheduled' END,
        CASE WHEN total.blocked > %(cap)s::integer * 10 THEN 'blocked' END,
        CASE WHEN total.running > %(cap)s::integer * 10 THEN 'running' END,
        CASE WHEN total.dead > %(cap)s::integer * 10 THEN 'dead' END
    ], NULL),
    clock_timestamp()
FROM named
CROSS JOIN total
LEFT JOIN ready ON ready.queue = named.queue
LEFT JOIN counted ON counted.queue = named.queue
LEFT JOIN served ON served.queue = named.queue
LEFT JOIN {{schema}}.queues AS queue ON queue.name = named.queue
ORDER BY named.queue;

-- name: list_workers
-- Who is or was there, the latest sign of life first. For people: whether a worker's jobs
-- are taken over is decided by their leases alone.
SELECT
    worker.id,
    worker.host,
    worker.pid,
    worker.version,
    worker.queues,
    worker.slots,
    coalesce(busy.jobs, 0),
    worker.started_at,
    worker.seen_at,
    clock_timestamp(),
    worker.seen_at <= clock_timestamp() - make_interval(secs => %(silent_seconds)s::double precision)
FROM {{schema}}.workers AS worker
LEFT JOIN (
    SELECT running.worker_id, count(*) AS jobs
    FROM (
        SELECT job.worker_id
        FROM {{schema}}.jobs AS job
        WHERE job.state = 'running'
        ORDER BY job.id
        LIMIT 100000
    ) AS running
    GROUP BY running.worker_id
) AS busy ON busy.worker_id = worker.id
ORDER BY worker.seen_at DESC, worker.id
LIMIT %(limit)s::integer;

-- name: list_running
-- What runs, the longest first, and where.
SELECT
    job.id,
    job.queue,
    job.task,
    job.attempt,
    job.max_attempts,
    job.started_at,
    job.deadline_at,
    job.heartbeat_at + make_interval(secs => job.lease_seconds),
    job.cancel_requested_at,
    worker.host,
    worker.pid,
    clock_timestamp()
FROM {{schema}}.jobs AS job
LEFT JOIN {{schema}}.workers AS worker ON worker.id = job.worker_id
WHERE job.state = 'running'
ORDER BY job.started_at, job.id
LIMIT %(limit)s::integer;

-- name: flow
-- How many jobs have come and gone since the server counts, as far as its sessions have told; and the time.
SELECT coalesce(statistics.n_tup_ins, 0), coalesce(statistics.n_tup_del, 0), clock_timestamp()
FROM (SELECT) AS one
LEFT JOIN pg_stat_all_tables AS statistics ON statistics.relid = '{{schema}}.jobs'::regclass;

-- name: task_names
-- The registered tasks; the command line completes them and names the one that was meant.
SELECT task.name
FROM {{schema}}.tasks AS task
ORDER BY task.name
LIMIT 10000;

-- name: known_queues
-- Every queue that anybody knows: it has jobs, settings, a task or a worker. Reads all jobs.
SELECT queue.name
FROM {{schema}}.known_queues() AS queue (name)
ORDER BY 1;

-- name: queue_names
-- Queues somebody named on purpose: of a task, or with settings. Cheap enough for the Tab key.
SELECT task.queue
FROM {{schema}}.tasks AS task
WHERE task.queue IS NOT NULL
UNION
SELECT queue.name
FROM {{schema}}.queues AS queue
ORDER BY 1
LIMIT 1000;
