-- What an examination looks at. Every question is cheap, counts up to a cap, and takes no lock that anybody
-- could wait for.

-- name: identity
-- The server's side of this connection.
SELECT pg_backend_pid(), pg_is_in_recovery(), clock_timestamp(), pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
    current_user::text, current_database()::text;

-- name: settings
-- Settings as they are for this role in this database, and where each comes from.
SELECT setting.name, setting.setting, setting.source
FROM pg_settings AS setting
WHERE setting.name IN (
    'fsync', 'full_page_writes', 'synchronous_commit', 'autovacuum', 'track_counts', 'default_transaction_read_only',
    'statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout'
);

-- name: definitions
-- The functions, triggers and views that the schema was given.
SELECT definition.object
FROM {{schema}}.definitions AS definition;

-- name: relations
-- The tables and views that are there.
SELECT relation.relname::text
FROM pg_class AS relation
WHERE relation.relnamespace = %(schema)s::text::regnamespace
  AND relation.relkind IN ('r', 'p', 'v');

-- name: functions
-- The functions that are there.
SELECT DISTINCT function.proname::text
FROM pg_proc AS function
WHERE function.pronamespace = %(schema)s::text::regnamespace;

-- name: triggers
-- The triggers that are there, and whether they fire.
SELECT trigger.tgname::text, relation.relname::text, trigger.tgenabled IN ('O', 'A')
FROM pg_trigger AS trigger
JOIN pg_class AS relation ON relation.oid = trigger.tgrelid
WHERE relation.relnamespace = %(schema)s::text::regnamespace
  AND NOT trigger.tgisinternal;

-- name: indexes
-- The indexes that are there, and whether they are used.
SELECT relation.relname::text, entry.indisvalid AND entry.indisready
FROM pg_index AS entry
JOIN pg_class AS relation ON relation.oid = entry.indexrelid
WHERE relation.relnamespace = %(schema)s::text::regnamespace;

-- name: tables
-- The tables that turn over: durable or not, their own settings, their size, live and dead rows.
SELECT
    relation.relname::text,
    relation.relpersistence = 'u',
    coalesce(relation.reloptions, '{}'),
    pg_relation_size(relation.oid),
    coalesce(statistics.n_live_tup, 0),
    coalesce(statistics.n_dead_tup, 0),
    greatest(statistics.last_autovacuum, statistics.last_vacuum)
FROM pg_class AS relation
LEFT JOIN pg_stat_all_tables AS statistics ON statistics.relid = relation.oid
WHERE relation.relnamespace = %(schema)s::text::regnamespace
  AND relation.relkind = 'r'
ORDER BY relation.relname;

-- name: partitions
-- Days of the history, from today on, that have no partition; days that are half detached.
SELECT
    ARRAY(
        SELECT to_char(day.day, 'YYYY-MM-DD')
        FROM generate_series(
            (clock_timestamp() AT TIME ZONE 'UTC')::date, (clock_timestamp() AT TIME ZONE 'UTC')::date + 1, interval '1 day'
        ) AS day (day)
        WHERE NOT EXISTS (
            SELECT
            FROM pg_inherits AS part
            JOIN pg_class AS relation ON relation.oid = part.inhrelid
            WHERE relation.relnamespace = %(schema)s::text::regnamespace
              AND relation.relname = to_char(day.day, '"finished_jobs_"YYYYMMDD')
        )
        ORDER BY day.day
    ),
    ARRAY(
        SELECT relation.relname::text
        FROM pg_inherits AS part
        JOIN pg_class AS relation ON relation.oid = part.inhrelid
        WHERE relation.relnamespace = %(schema)s::text::regnamespace
          AND part.inhdetachpending
    ),
    ARRAY(
        SELECT relation.relname::text
        FROM pg_inherits AS part
        JOIN pg_class AS relation ON relation.oid = part.inhrelid
        WHERE relation.relnamespace = %(schema)s::text::regnamespace
          AND pg_get_expr(relation.relpartbound, relation.oid) = 'DEFAULT'
    );

-- name: snapshots
-- Who keeps dead rows from being removed, the oldest first: transactions of this database, prepared ones, and
-- replication slots that nobody reads. Not what they run: that may quote payloads.
SELECT holder.kind, holder.name, holder.pid, holder.role, holder.address, holder.state, holder.seconds,
    holder.query_seconds
FROM (
    SELECT
        'session' AS kind,
        session.application_name AS name,
        session.pid,
        session.usename::text AS role,
        host(session.client_addr) AS address,
        session.state,
        extract(epoch FROM clock_timestamp() - session.xact_start)::double precision AS seconds,
        extract(epoch FROM clock_timestamp() - session.query_start)::double precision AS query_seconds
    FROM pg_stat_activity AS session
    WHERE session.datname = current_database()
      AND session.backend_type = 'client backend'
      AND session.pid <> pg_backend_pid()
      AND session.xact_start IS NOT NULL
    UNION ALL
    SELECT 'prepared', prepared.gid, NULL, prepared.owner::text, NULL, NULL,
        extract(epoch FROM clock_timestamp() - prepared.prepared)::double precision, NULL
    FROM pg_prepared_xacts AS prepared
    WHERE prepared.database = current_database()
    UNION ALL
    SELECT 'slot', slot.slot_name::text, NULL, NULL, NULL, NULL, 'infinity', NULL
    FROM pg_replication_slots AS slot
    WHERE NOT slot.active
      AND (slot.xmin IS NOT NULL OR slot.restart_lsn IS NOT NULL)
) AS holder
WHERE holder.seconds >= %(seconds)s::double precision
ORDER BY holder.seconds DESC
LIMIT 5;

-- name: waits
-- Sessions that have waited for a lock for so long while they use our tables, and who holds it.
SELECT waiting.pid, waiting.application_name, blocker.pid, blocker.application_name, blocker.state,
    extract(epoch FROM clock_timestamp() - waiting.query_start)::double precision
FROM pg_stat_activity AS waiting
CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS held (pid)
JOIN pg_stat_activity AS blocker ON blocker.pid = held.pid
WHERE waiting.wait_event_type = 'Lock'
  AND waiting.datname = current_database()
  AND waiting.query_start < clock_timestamp() - make_interval(secs => %(seconds)s::double precision)
  AND EXISTS (
      SELECT
      FROM pg_locks AS lock
      JOIN pg_class AS relation ON relation.oid = lock.relation
      WHERE lock.pid = waiting.pid
        AND relation.relnamespace = %(schema)s::text::regnamespace
  )
ORDER BY waiting.query_start
LIMIT 5;

-- name: connections
-- Connections that are open and may be: of the server, of this database, of this role (-1: no limit); who has most.
SELECT
    (SELECT count(*) FROM pg_stat_activity AS session WHERE session.backend_type = 'client backend'),
    current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer,
    (
        SELECT count(*) FROM pg_stat_activity AS session
        WHERE session.datname = current_database() AND session.backend_type = 'client backend'
    ),
    (SELECT base.datconnlimit FROM pg_database AS base WHERE base.datname = current_database()),
    (
        SELECT count(*) FROM pg_stat_activity AS session
        WHERE session.usename = current_user AND session.backend_type = 'client backend'
    ),
    (SELECT role.rolconnlimit FROM pg_roles AS role WHERE role.rolname = current_user),
    ARRAY(
        SELECT count(*) || ' of ' || coalesce(nullif(session.application_name, ''), 'no name')
        FROM pg_stat_activity AS session
        WHERE session.backend_type = 'client backend'
        GROUP BY session.application_name
        ORDER BY count(*) DESC, session.application_name
        LIMIT 3
    );

-- name: roles
-- Roles that workers are logged in as although they may do everything.
SELECT DISTINCT session.usename::text
FROM pg_stat_activity AS session
JOIN pg_roles AS role ON role.rolname = session.usename
WHERE session.datname = current_database()
  AND session.application_name LIKE 'pgqueue worker%%'
  AND role.rolsuper;

-- name: ages
-- How far the transaction counter has come, from 0 to 1, and how full the queue of notifications is.
SELECT age(base.datfrozenxid)::double precision / 2147483648, pg_notification_queue_usage()
FROM pg_database AS base
WHERE base.datname = current_database();

-- name: work
-- What should have been done and was not: leases that ended and jobs that came due so long ago, schedules that did not
-- fire; each counted up to the cap, with the oldest.
SELECT
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM {{schema}}.jobs AS job
            WHERE job.state = 'running'
              AND job.heartbeat_at + make_interval(secs => job.lease_seconds)
                  < clock_timestamp() - make_interval(secs => %(late_seconds)s::double precision)
            LIMIT 1000
        ) AS expired
    ),
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM {{schema}}.jobs AS job
            WHERE job.state = 'scheduled'
              AND job.run_at < statement_timestamp() - make_interval(secs => %(late_seconds)s::double precision)
            ORDER BY job.run_at
            LIMIT 1000
        ) AS due
    ),
    ARRAY(
        SELECT schedule.name
        FROM {{schema}}.schedules AS schedule
        WHERE NOT schedule.is_paused
          AND schedule.next_tick < statement_timestamp() - make_interval(secs => %(late_seconds)s::double precision)
          AND {{schema}}.is_declared(schedule.source, schedule.seen_at)
        ORDER BY schedule.next_tick
        LIMIT 5
    ),
    ARRAY(
        SELECT DISTINCT head.task::text
        FROM (
            SELECT job.task
            FROM {{schema}}.jobs AS job
            WHERE job.state IN ('ready', 'scheduled')
            LIMIT 1000
        ) AS head
        LEFT JOIN {{schema}}.tasks AS task ON task.name = head.task
        WHERE coalesce(task.seen_at < clock_timestamp() - interval '5 minutes', true)
        ORDER BY 1
    );

-- name: unplanned_schedules
-- Schedules that stand and that no worker has given a tick: they are new, or cannot be read.
SELECT schedule.name, schedule.cron, schedule.timezone, schedule.task
FROM {{schema}}.schedules AS schedule
WHERE NOT schedule.is_paused
  AND schedule.next_tick IS NULL
  AND {{schema}}.is_declared(schedule.source, schedule.seen_at)
ORDER BY schedule.name
LIMIT 100;

-- name: forgotten
-- What an operator has held back for longer than that and until he says otherwise, while jobs wait for it.
SELECT 'queue', queue.name, queue.updated_at
FROM {{schema}}.queues AS queue
WHERE queue.is_paused
  AND queue.paused_until IS NULL
  AND queue.updated_at < clock_timestamp() - make_interval(secs => %(seconds)s::double precision)
  AND EXISTS (SELECT FROM {{schema}}.jobs AS job WHERE job.state = 'ready' AND job.queue = queue.name)
UNION ALL
SELECT 'breaker', breaker.name, breaker.opened_at
FROM {{schema}}.breakers AS breaker
WHERE breaker.state = 'open'
  AND breaker.retry_at IS NULL
  AND breaker.opened_at < clock_timestamp() - make_interval(secs => %(seconds)s::double precision)
ORDER BY 1, 2;

-- name: future
-- How far in the future the latest sign of life lies: a clock was set back.
SELECT extract(epoch FROM max(sign.at) - clock_timestamp())::double precision
FROM (
    SELECT worker.seen_at AS at FROM {{schema}}.workers AS worker
    UNION ALL
    SELECT job.heartbeat_at FROM {{schema}}.jobs AS job WHERE job.state = 'running'
    UNION ALL
    SELECT task.seen_at FROM {{schema}}.tasks AS task
) AS sign;
