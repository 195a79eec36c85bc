-- Who is there: the workers, for people, and the tasks they know, for producers in any language.

-- name: register_tasks
-- Write down what this application defines, where it changed or nobody said so lately.
SELECT {{schema}}.register_tasks(%(definitions)s::jsonb);

-- name: see_worker
-- Say that this worker is there, and count those that were there lately on a queue of its own, itself included; and the
-- database's time.
WITH seen AS (
    INSERT INTO {{schema}}.workers AS worker (id, host, pid, version, queues, slots)
    VALUES (
        %(worker_id)s::uuid, %(host)s::text, %(pid)s::integer, %(version)s::text, %(queues)s::text[],
        %(slots)s::integer
    )
    ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp()
)
SELECT 1 + count(*), extract(epoch FROM clock_timestamp())::double precision
FROM {{schema}}.workers AS other
WHERE other.id <> %(worker_id)s::uuid
  AND other.seen_at > clock_timestamp() - interval '30 seconds'
  AND other.queues && %(queues)s::text[];

-- name: unknown_queues
-- Which of these queues have neither a task, nor settings, nor a job that waits. Workers do not count: all those of a
-- deployment have the same slip of the pen. What is not ready is looked through as far as the cap.
WITH scheduled AS MATERIALIZED (
    SELECT job.queue
    FROM {{schema}}.jobs AS job
    WHERE job.state = 'scheduled'
    ORDER BY job.run_at, job.id
    LIMIT %(cap)s::integer
)
SELECT asked.queue
FROM unnest(%(queues)s::text[]) AS asked (queue)
WHERE NOT EXISTS (SELECT FROM {{schema}}.tasks AS task WHERE coalesce(task.queue, 'default') = asked.queue)
  AND NOT EXISTS (SELECT FROM {{schema}}.queues AS queue WHERE queue.name = asked.queue)
  AND NOT EXISTS (SELECT FROM {{schema}}.jobs AS job WHERE job.state = 'ready' AND job.queue = asked.queue)
  AND NOT EXISTS (SELECT FROM scheduled WHERE scheduled.queue = asked.queue)
ORDER BY asked.queue;

-- name: forget_worker
-- Say that this worker is gone, and forget those that left without a word a day ago.
DELETE FROM {{schema}}.workers AS worker
WHERE worker.id = %(worker_id)s::uuid
   OR worker.seen_at < clock_timestamp() - interval '1 day';

-- name: bell_channels
-- The NOTIFY channel of each queue.
SELECT asked.queue, {{schema}}.bell_channel(asked.queue)
FROM unnest(%(queues)s::text[]) AS asked (queue);

-- name: rest
-- On the listening session, after an empty claim: asleep, watch or off.
SELECT {{schema}}.rest(%(queue)s::text, %(on_duty)s::boolean, %(may_sleep)s::boolean);

-- name: rise
-- On the same session: awake again, or handing the watch on.
SELECT {{schema}}.rise(%(queue)s::text, %(was_asleep)s::boolean, %(leaves_duty)s::boolean, %(rings)s::boolean);

-- name: ping
-- Keep the session from being taken for a frozen one.
SELECT 1;

-- name: take_maintenance
-- For the session: one of the few places of those who look after everybody's jobs, or else that of its host's standby,
-- if it is not that already; no row if none is free.
SELECT place <= %(places)s::integer
FROM generate_series(1, %(places)s::integer + CASE WHEN %(stands_by)s::boolean THEN 0 ELSE 1 END) AS place
WHERE pg_try_advisory_lock(CASE WHEN place <= %(places)s::integer
    THEN hashtextextended('{{schema}}.maintenance', place)
    ELSE hashtextextended('{{schema}}.standby', hashtext(%(host)s::text) & 7) END)
LIMIT 1;

-- name: leave_standby
-- For the session: let another one of the host stand by.
SELECT pg_advisory_unlock(hashtextextended('{{schema}}.standby', hashtext(%(host)s::text) & 7));

-- name: end_if_idle
-- For the session: how long it may be silent before the server takes it for frozen and ends it.
SELECT set_config('idle_session_timeout', %(seconds)s::integer || 's', false);

-- name: expired_partitions
-- Partitions of the history that lie wholly before the retention.
SELECT name, is_attached, is_half_detached
FROM {{schema}}.expired_partitions(make_interval(secs => %(retention_seconds)s::double precision));

-- name: take_partition_duty
-- Of all workers one drops partitions at a time.
SELECT pg_try_advisory_lock(hashtextextended('{{schema}}.partitions', 1));

-- name: drop_expired_partition
-- Drop a partition without owning the tables and without a session of our own.
SELECT {{schema}}.drop_partition(%(name)s::text, make_interval(secs => %(retention_seconds)s::double precision));
