-- What monitoring asks of the whole queue, every few seconds and for ever. Each statement reads a bounded number
-- of rows, however long the queues are: a queue in trouble must not be made slower by being watched.

-- name: ready
-- The ready jobs of each queue, and for how long the oldest one could have run; at most `budget` jobs are read, and
-- if there are more, all of this is void: ask for `ready_heads` and `ready_counts`.
WITH page AS (
    SELECT job.queue, job.run_at
    FROM {{schema}}.jobs AS job
    WHERE job.state = 'ready'
    ORDER BY job.queue, job.priority, job.run_at, job.id
    LIMIT %(budget)s::integer + 1
)
SELECT
    page.queue,
    count(*),
    sum(count(*)) OVER () > %(budget)s::integer,
    greatest(extract(epoch FROM clock_timestamp() - min(page.run_at)), 0)::double precision
FROM page
GROUP BY page.queue;

-- name: ready_heads
-- When there are many: for how long the oldest ready job of each queue could have run.
SELECT head.queue, greatest(extract(epoch FROM clock_timestamp() - min(head.run_at)), 0)::double precision
FROM (SELECT first.queue, first.run_at FROM {{schema}}.ready_heads AS first LIMIT %(max_heads)s::integer) AS head
GROUP BY head.queue;

-- name: ready_counts
-- The ready jobs of some queues, up to a cap in each.
SELECT asked.queue, counted.jobs
FROM unnest(%(queues)s::text[]) AS asked (queue)
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
        SELECT
        FROM {{schema}}.jobs AS job
        WHERE job.queue = asked.queue
          AND job.state = 'ready'
        LIMIT %(cap)s::integer + 1
    ) AS page
) AS counted;

-- name: waiting
-- The scheduled and blocked jobs of each queue, the first `budget` of each state: more of them than that, and the
-- numbers are only the least there can be.
WITH passed AS (
    (
        SELECT 'scheduled' AS state, job.queue
        FROM {{schema}}.jobs AS job
        WHERE job.state = 'scheduled'
        ORDER BY job.run_at, job.id
        LIMIT %(budget)s::integer + 1
    )
    UNION ALL
    (
        SELECT 'blocked', job.queue
        FROM {{schema}}.jobs AS job
        WHERE job.state = 'blocked'
        ORDER BY CASE WHEN job.state = 'blocked' THEN job.concurrency_key END
        LIMIT %(budget)s::integer + 1
    )
),
counted AS (
    SELECT passed.state, passed.queue, count(*) AS jobs
    FROM passed
    GROUP BY passed.state, passed.queue
)
SELECT
    counted.state,
    counted.queue,
    counted.jobs,
    sum(counted.jobs) OVER (PARTITION BY counted.state) > %(budget)s::integer
FROM counted;

-- name: dead
-- The dead letters of each queue, the latest `budget`: more than that, and the numbers are only the least there can be.
SELECT page.queue, count(*), sum(count(*)) OVER () > %(budget)s::integer
FROM (
    SELECT dead.queue
    FROM {{schema}}.dead_jobs AS dead
    ORDER BY dead.died_at DESC
    LIMIT %(budget)s::integer + 1
) AS page
GROUP BY page.queue;

-- name: deaths
-- Which slice of time it is, of so many seconds each, and how many jobs of each queue died in which slice: within the
-- last so many seconds, and of all these the latest `budget`. At least one row.
SELECT clock.slice, death.slice, death.queue, count(death.queue)
FROM (
    SELECT floor(date_part('epoch', statement_timestamp()) / %(slice_seconds)s::integer)::bigint AS slice
) AS clock
LEFT JOIN (
    SELECT floor(date_part('epoch', dead.died_at) / %(slice_seconds)s::integer)::bigint AS slice, dead.queue
    FROM {{schema}}.dead_jobs AS dead
    WHERE dead.died_at > statement_timestamp() - make_interval(secs => %(seconds)s::double precision)
    ORDER BY dead.died_at DESC
    LIMIT %(budget)s::integer
) AS death ON true
GROUP BY clock.slice, death.slice, death.queue;

-- name: running
-- The running jobs of each queue: for how long the oldest one runs, the greatest share that one has used of its
-- timeout, and of its lease since the last heartbeat. There are as many as all workers have slots; beyond `budget`
-- the numbers are only the least there can be. (extract() computes in numeric, and takes longer.)
SELECT
    job.queue,
    count(*),
    sum(count(*)) OVER () > %(budget)s::integer,
    date_part('epoch', clock_timestamp() - min(job.started_at)),
    max(
        CASE WHEN job.timeout_seconds > 0
             THEN date_part('epoch', statement_timestamp() - job.started_at) / job.timeout_seconds END
    ),
    max(date_part('epoch', statement_timestamp() - job.heartbeat_at) / job.lease_seconds)
FROM (
    SELECT running.queue, running.started_at, running.heartbeat_at, running.timeout_seconds, running.lease_seconds
    FROM {{schema}}.jobs AS running
    WHERE running.state = 'running'
    ORDER BY running.id
    LIMIT %(budget)s::integer + 1
) AS job
GROUP BY job.queue;

-- name: queues
-- Whether a queue is paused, and how many live workers it has: each of these that somebody named on purpose, and of the
-- other queues so many.
SELECT
    named.queue,
    coalesce(bool_or(named.is_paused), false),
    coalesce(sum(named.workers), 0)::bigint
FROM (
    SELECT
        queue.name AS queue,
        queue.is_paused AND coalesce(queue.paused_until > clock_timestamp(), true) AS is_paused,
        NULL::bigint AS workers
    FROM {{schema}}.queues AS queue
    UNION ALL
    SELECT task.queue, NULL, NULL
    FROM {{schema}}.tasks AS task
    WHERE task.queue IS NOT NULL
    UNION ALL
    SELECT place.queue, NULL, 1
    FROM {{schema}}.workers AS worker
    CROSS JOIN LATERAL unnest(worker.queues) AS place (queue)
    WHERE worker.seen_at > clock_timestamp() - make_interval(secs => %(silent_seconds)s::double precision)
) AS named
LEFT JOIN unnest(%(met)s::text[]) AS met (queue) ON met.queue = named.queue
GROUP BY named.queue
ORDER BY count(met.queue) = 0, named.queue
LIMIT cardinality(%(met)s::text[]) + %(limit)s::integer;

-- name: estimates
-- What the planner's statistics say of how many jobs there are, for states of which too many were met to count. As old
-- as the last ANALYZE, scaled to today's size. Without a queue: all jobs of the state. With one: its dead jobs, and its
-- ready ones as far as queues have the same share of every live state; queue '' stands for each that is not named.
WITH size AS (
    SELECT
        class.oid,
        class.reltuples,
        CASE WHEN class.relpages > 0
             THEN pg_relation_size(class.oid) / current_setting('block_size')::double precision / class.relpages
             ELSE 1 END AS growth
    FROM pg_class AS class
    WHERE class.oid IN ('{{schema}}.jobs'::regclass, '{{schema}}.dead_jobs'::regclass)
),
total AS MATERIALIZED (
    SELECT kind.state, size.growth * rows_class.reltuples AS jobs
    FROM (
        VALUES
            ('ready', '{{schema}}.jobs', '{{schema}}.jobs_ready'),
            ('scheduled', '{{schema}}.jobs', '{{schema}}.jobs_due'),
            ('blocked', '{{schema}}.jobs', '{{schema}}.jobs_blocked'),
            ('running', '{{schema}}.jobs', '{{schema}}.jobs_running'),
            ('dead', '{{schema}}.dead_jobs', '{{schema}}.dead_jobs')
    ) AS kind (state, source, relation)
    JOIN size ON size.oid = kind.source::regclass
    JOIN pg_class AS rows_class ON rows_class.oid = kind.relation::regclass
    WHERE rows_class.reltuples >= 0
),
known AS MATERIALIZED (
    SELECT
        source.state,
        stats.most_common_vals::text::text[] AS queues,
        stats.most_common_freqs AS shares,
        CASE WHEN stats.n_distinct < 0
             THEN -stats.n_distinct * size.reltuples
             ELSE stats.n_distinct END AS queues_in_all
    FROM (VALUES ('ready', 'jobs'), ('dead', 'dead_jobs')) AS source (state, relation)
    JOIN size ON size.oid = ('{{schema}}.' || source.relation)::regclass
    JOIN pg_stats AS stats ON stats.schemaname = '{{schema}}'
                          AND stats.tablename = source.relation
                          AND stats.attname = 'queue'
),
share AS (
    SELECT known.state, common.queue, common.share::double precision
    FROM known
    CROSS JOIN LATERAL unnest(known.queues, known.shares) AS common (queue, share)
    UNION ALL
    SELECT
        known.state,
        '',
        greatest(1 - coalesce((SELECT sum(each.share) FROM unnest(known.shares) AS each (share)), 0), 0)
        / greatest(known.queues_in_all - coalesce(cardinality(known.queues), 0), 1)
    FROM known
)
SELECT total.state, NULL::text, total.jobs
FROM total
UNION ALL
SELECT total.state, share.queue, total.jobs * share.share
FROM total
JOIN share ON share.state = total.state;

-- name: overview
-- One row about the whole: workers alive; schedules that should have fired by now, and for how long; those that no
-- worker has given a tick, because they are new or cannot be read; the ids given to jobs so far; how full the server's
-- notification queue is; and for how long the oldest snapshot has been held that keeps dead rows of this database
-- from being removed. That one needs the role pg_read_all_stats, else it sees our own sessions only.
SELECT
    (
        SELECT count(*)
        FROM {{schema}}.workers AS worker
        WHERE worker.seen_at > clock_timestamp() - make_interval(secs => %(silent_seconds)s::double precision)
    ),
    late.schedules,
    late.seconds,
    late.unplanned,
    coalesce(pg_sequence_last_value(pg_get_serial_sequence('{{schema}}.jobs', 'id')::regclass), 0),
    pg_notification_queue_usage(),
    greatest(
        (
            SELECT extract(epoch FROM clock_timestamp() - min(session.xact_start))
            FROM pg_stat_activity AS session
            WHERE session.pid <> pg_backend_pid()
              AND session.backend_xmin IS NOT NULL
              AND (session.datname = current_database() OR session.backend_type = 'walsender')
              AND session.backend_type <> 'autovacuum worker'
        ),
        (
            SELECT extract(epoch FROM clock_timestamp() - min(prepared.prepared))
            FROM pg_prepared_xacts AS prepared
            WHERE prepared.database = current_database()
        ),
        0
    )::double precision
FROM (
    SELECT
        count(schedule.next_tick) AS schedules,
        coalesce(max(extract(epoch FROM clock_timestamp() - schedule.next_tick)), 0)::double precision AS seconds,
        count(*) - count(schedule.next_tick) AS unplanned
    FROM {{schema}}.schedules AS schedule
    WHERE NOT schedule.is_paused
      AND {{schema}}.is_declared(schedule.source, schedule.seen_at)
      AND (
          schedule.next_tick < statement_timestamp() - make_interval(secs => %(late_seconds)s::double precision)
          OR schedule.next_tick IS NULL
      )
) AS late;

-- name: tables
-- The tables that turn over: rows, dead rows, and bytes with indexes and long values as of the last vacuum or analyze.
-- The days of the history are one table.
SELECT
    known.name,
    sum(coalesce(pg_stat_get_live_tuples(known.oid), 0))::bigint,
    sum(coalesce(pg_stat_get_dead_tuples(known.oid), 0))::bigint,
    sum(
        (
            known.relpages
            + coalesce((SELECT long.relpages FROM pg_class AS long WHERE long.oid = known.reltoastrelid), 0)
            + (
                SELECT coalesce(sum(index_class.relpages), 0)
                FROM pg_index AS index
                JOIN pg_class AS index_class ON index_class.oid = index.indexrelid
                WHERE index.indrelid = known.oid
            )
        )::bigint * current_setting('block_size')::bigint
    )::bigint
FROM (
    SELECT class.oid, class.relname::text AS name, class.relpages, class.reltoastrelid
    FROM pg_class AS class
    WHERE class.oid IN (
        '{{schema}}.jobs'::regclass, '{{schema}}.dead_jobs'::regclass, '{{schema}}.processed_jobs'::regclass,
        '{{schema}}.rate_limits'::regclass, '{{schema}}.breakers'::regclass, '{{schema}}.schedule_runs'::regclass
    )
    UNION ALL
    SELECT class.oid, 'finished_jobs', class.relpages, class.reltoastrelid
    FROM pg_inherits AS day
    JOIN pg_class AS class ON class.oid = day.inhrelid
    WHERE day.inhparent = '{{schema}}.finished_jobs'::regclass
) AS known
GROUP BY known.name
ORDER BY known.name;

-- name: breakers
-- How each circuit breaker stands.
SELECT breaker.name, breaker.state
FROM {{schema}}.breakers AS breaker
ORDER BY breaker.name
LIMIT %(limit)s::integer;

-- name: rate_limits
-- For how long the next in line has waited, for each rate limit; the keys of a pattern count as one.
SELECT coalesce(busy.pattern, busy.name), max(busy.waited_seconds)
FROM (
    SELECT
        rate.name,
        rate.pattern,
        coalesce((
            SELECT extract(epoch FROM clock_timestamp() - job.rate_parked_at)
            FROM {{schema}}.jobs AS job
            WHERE job.rate_key = rate.name
              AND job.state = 'scheduled'
              AND job.rate_parked_at IS NOT NULL
            ORDER BY job.rate_key, job.queue, job.priority, job.id
            LIMIT 1
        ), 0)::double precision AS waited_seconds
    FROM (
        SELECT waiting.name, waiting.pattern
        FROM {{schema}}.rate_limits AS waiting
        WHERE waiting.next_at IS NOT NULL
        ORDER BY waiting.next_at
        LIMIT %(limit)s::integer
    ) AS rate
    UNION ALL
    (
        SELECT quiet.name, NULL, 0
        FROM {{schema}}.rate_limits AS quiet
        WHERE quiet.pattern IS NULL
          AND quiet.next_at IS NULL
        ORDER BY quiet.name
        LIMIT %(limit)s::integer
    )
) AS busy
GROUP BY 1
ORDER BY 2 DESC, 1
LIMIT %(limit)s::integer;

-- name: take_metrics
-- For the session: of all workers one shows the numbers of the whole queue.
SELECT pg_try_advisory_lock(hashtextextended('{{schema}}.metrics', 1));
