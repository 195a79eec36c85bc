-- Schedules: what workers ask of them, and what a person does to them. The functions carry the guarantees.

-- name: register
-- Write down what an application's code declares; says what became of each.
SELECT registered.name, registered.outcome
FROM {{schema}}.register_schedules(%(entries)s::jsonb, %(app)s::text, %(is_start)s::boolean) AS registered;

-- name: look
-- What is due, one row for each and at least one in all: the database's now, whether there are schedules at
-- all, and the seconds until the next one is due that is not yet.
SELECT
    clock.now,
    EXISTS (SELECT FROM {{schema}}.schedules),
    (
        SELECT extract(epoch FROM min(schedule.next_tick) - clock.now)::double precision
        FROM {{schema}}.schedules AS schedule
        WHERE NOT schedule.is_paused
          AND schedule.next_tick > statement_timestamp()
    ),
    due.name,
    due.cron,
    due.timezone,
    due.catch_up,
    due.catch_up_limit,
    due.next_tick
FROM (SELECT clock_timestamp() AS now) AS clock
LEFT JOIN {{schema}}.due_schedules(%(except_names)s::text[], %(max_entries)s::integer) AS due ON true;

-- name: fire
-- Enqueue these ticks and move on: `fired`, or `lost` to somebody else. All or nothing.
SELECT {{schema}}.fire(
    %(name)s::text, %(cron)s::text, %(timezone)s::text, %(expected)s::timestamptz, %(ticks)s::timestamptz[],
    %(skipped)s::bigint, %(next_tick)s::timestamptz
);

-- name: prune
-- Forget old ticks, at most so many; gives how many it were.
SELECT {{schema}}.prune_schedule_runs(
    make_interval(secs => %(keep_seconds)s::double precision), %(max_rows)s::integer
);

-- name: list
-- Schedules by name, those of these names if any are given. A task is known while a live worker says so.
SELECT
    schedule.name,
    schedule.cron,
    schedule.timezone,
    schedule.task,
    schedule.args::text,
    schedule.queue,
    schedule.priority,
    schedule.catch_up,
    schedule.catch_up_limit,
    schedule.next_tick,
    schedule.last_tick,
    schedule.fired,
    schedule.skipped,
    schedule.is_paused,
    schedule.source,
    schedule.app,
    schedule.seen_at,
    {{schema}}.is_declared(schedule.source, schedule.seen_at),
    coalesce(task.seen_at > clock_timestamp() - interval '5 minutes', false),
    clock_timestamp()
FROM {{schema}}.schedules AS schedule
LEFT JOIN {{schema}}.tasks AS task ON task.name = schedule.task
WHERE %(names)s::text[] IS NULL
   OR schedule.name = ANY (%(names)s::text[])
ORDER BY schedule.name;

-- name: names
-- The names of all schedules.
SELECT schedule.name
FROM {{schema}}.schedules AS schedule
ORDER BY schedule.name;

-- name: describe_task
-- The database's now and, if a worker has registered the task, the schema of its arguments.
SELECT clock_timestamp(), task.name IS NOT NULL, task.args_schema
FROM (SELECT %(task)s::text AS name) AS asked
LEFT JOIN {{schema}}.tasks AS task ON task.name = asked.name;

-- name: put
-- Add an entry made at run time, or change one if that is wanted; no row: the name is taken. A changed
-- expression counts from now, an unchanged one keeps its next_tick.
INSERT INTO {{schema}}.schedules AS schedule (
    name, cron, timezone, task, args, queue, priority, catch_up, catch_up_limit, next_tick
)
VALUES (
    %(name)s::text, %(cron)s::text, %(timezone)s::text, %(task)s::text, %(args)s::jsonb, %(queue)s::text,
    %(priority)s::smallint, %(catch_up)s::text, %(catch_up_limit)s::integer, %(next_tick)s::timestamptz
)
ON CONFLICT (name) DO UPDATE
SET cron = excluded.cron,
    timezone = excluded.timezone,
    task = excluded.task,
    args = excluded.args,
    queue = excluded.queue,
    priority = excluded.priority,
    catch_up = excluded.catch_up,
    catch_up_limit = excluded.catch_up_limit,
    next_tick = CASE
        WHEN (schedule.cron, schedule.timezone) = (excluded.cron, excluded.timezone) THEN schedule.next_tick
        ELSE excluded.next_tick
    END
WHERE schedule.source = 'runtime'
  AND %(may_replace)s::boolean
RETURNING schedule.next_tick;

-- name: remove
-- Delete entries that no live worker's code declares; gives their names.
DELETE FROM {{schema}}.schedules AS schedule
WHERE schedule.name = ANY (%(names)s::text[])
  AND (schedule.source = 'runtime' OR NOT {{schema}}.is_declared(schedule.source, schedule.seen_at))
RETURNING schedule.name;

-- name: pause
-- Let entries fire no more; gives the names of those that exist.
UPDATE {{schema}}.schedules AS schedule
SET is_paused = true
WHERE schedule.name = ANY (%(names)s::text[])
RETURNING schedule.name;

-- name: resume
-- Let a paused entry go on from next_tick, computed for this expression; gives its name.
UPDATE {{schema}}.schedules AS schedule
SET is_paused = false,
    next_tick = %(next_tick)s::timestamptz
WHERE schedule.name = %(name)s::text
  AND schedule.cron = %(cron)s::text
  AND schedule.timezone = %(timezone)s::text
  AND schedule.is_paused
RETURNING schedule.name;

-- name: run_now
-- Add the job of an entry beside its ticks; gives the job's id.
WITH added AS MATERIALIZED (
    SELECT schedule.name, {{schema}}.enqueue_tick(schedule, clock_timestamp()) AS job_id
    FROM {{schema}}.schedules AS schedule
    WHERE schedule.name = %(name)s::text
)
SELECT
    added.job_id,
    {{schema}}.audit('schedule.run', added.name, NULL, jsonb_build_object('job_ids', jsonb_build_array(added.job_id)))
FROM added;
