-- Schedules. No leader, and no transaction held open while a client computes: read what is due, compute the
-- ticks from the database's time, fire by compare-and-set. schedule_runs is the judge of last resort.

-- Whether an entry stands: one made at run time does until it is removed, one of an application's code
-- while a live worker says so. Five minutes bridge a restart; what was missed meanwhile is caught up with.
CREATE OR REPLACE FUNCTION {{schema}}.is_declared(source text, seen_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE
RETURN is_declared.source = 'runtime' OR is_declared.seen_at > statement_timestamp() - interval '5 minutes';

-- What is due, or has no next_tick yet, and the database's time to compute with. Takes no locks. A caller
-- names what it cannot deal with just now, so that this does not stand before the rest for ever.
CREATE OR REPLACE FUNCTION {{schema}}.due_schedules(
    except_names text[] DEFAULT '{}', max_entries integer DEFAULT 100
) RETURNS TABLE (
    name text, cron text, timezone text, catch_up text, catch_up_limit integer, next_tick timestamptz,
    database_now timestamptz
)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT s.name, s.cron, s.timezone, s.catch_up, s.catch_up_limit, s.next_tick, clock_timestamp()
    FROM schedules AS s
    WHERE NOT s.is_paused
      AND (s.next_tick <= statement_timestamp() OR s.next_tick IS NULL)
      AND is_declared(s.source, s.seen_at)
      AND s.name <> ALL (due_schedules.except_names)
    ORDER BY s.next_tick NULLS FIRST, s.name
    LIMIT due_schedules.max_entries
$$;

-- Enqueue these ticks and move on. 'fired', or 'lost': another worker was first, is at it, or the entry was
-- edited. All or nothing in one statement, so a crash anywhere leaves the tick due. A client that computed with
-- a wrong clock is refused: no tick may lie in the future of this database. (next_tick may already be due
-- again: a slow client, not an error.) A task with a unique_key that is still live takes the tick as its own.
-- With nothing expected, only the first next_tick is set.
CREATE OR REPLACE FUNCTION {{schema}}.fire(
    name text, cron text, timezone text, expected timestamptz, ticks timestamptz[], skipped bigint,
    next_tick timestamptz
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    entry schedules;
    now timestamptz;
    due timestamptz;
    count integer := 0;
BEGIN
    SELECT s.* INTO entry FROM schedules AS s
    WHERE s.name = fire.name AND s.next_tick IS NOT DISTINCT FROM fire.expected
      AND s.cron = fire.cron AND s.timezone = fire.timezone AND NOT s.is_paused
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    now := clock_timestamp();
    IF fire.next_tick IS NULL OR fire.next_tick <= fire.expected OR fire.expected > now OR fire.skipped < 0
       OR cardinality(fire.ticks) > (CASE WHEN fire.expected IS NULL THEN 0 ELSE entry.catch_up_limit END)
       OR EXISTS (
           SELECT FROM unnest(fire.ticks) AS t (tick)
           WHERE t.tick > now OR t.tick < fire.expected OR t.tick >= fire.next_tick
       )
    THEN
        RAISE EXCEPTION 'schedule %: ticks % with next % do not fit the database time %',
            fire.name, fire.ticks, fire.next_tick, now USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOREACH due IN ARRAY coalesce(fire.ticks, '{}') LOOP
        -- The entry may have been edited back in time.
        CONTINUE WHEN EXISTS (SELECT FROM schedule_runs AS r WHERE r.schedule = fire.name AND r.tick = due);
        INSERT INTO schedule_runs (schedule, tick, job_id)
        VALUES (fire.name, due, enqueue_tick(entry, due));
        count := count + 1;
    END LOOP;
    UPDATE schedules AS s SET
        next_tick = fire.next_tick, last_tick = coalesce(fire.ticks[cardinality(fire.ticks)], s.last_tick),
        fired = s.fired + count, skipped = s.skipped + fire.skipped
    WHERE s.name = fire.name;
    RETURN 'fired';
END $$;

-- Add the job of one tick. In UTC whatever the session's time zone is, so that handlers can rely on it.
CREATE OR REPLACE FUNCTION {{schema}}.enqueue_tick(entry {{schema}}.schedules, tick timestamptz) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT enqueue(
        task => entry.task, args => entry.args, queue => entry.queue, priority => entry.priority,
        headers => jsonb_build_object(
            'schedule', entry.name,
            'tick', to_char(enqueue_tick.tick AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
        )
    )
$$;

-- Write down what an application's code declares, from a JSON array of objects with the columns of schedules
-- as members (args as text). Gives what became of each: added, changed, kept; runtime: an entry made by hand
-- has the name and stays; other: a live worker declares it otherwise. A worker that starts is newer than
-- those that run, and its word counts; later it only speaks up when nobody stands for the other one any
-- more. So two versions of an application, side by side for a while, do not undo each other's all the time,
-- which would lose ticks. A changed expression counts from now: next_tick is computed anew.
CREATE OR REPLACE FUNCTION {{schema}}.register_schedules(entries jsonb, app text, is_start boolean)
RETURNS TABLE (name text, outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    now timestamptz := clock_timestamp();
    entry record;
    old schedules;
BEGIN
    FOR entry IN
        SELECT e.name, e.cron, e.timezone, e.task, e.args::jsonb AS args, e.queue, e.priority, e.catch_up,
               e.catch_up_limit
        FROM jsonb_to_recordset(register_schedules.entries) AS e (
            name text, cron text, timezone text, task text, args text, queue text, priority smallint,
            catch_up text, catch_up_limit integer
        )
        ORDER BY e.name
    LOOP
        -- Read without a lock: mostly there is nothing to write.
        SELECT s.* INTO old FROM schedules AS s WHERE s.name = entry.name;
        name := entry.name;
        outcome := CASE
            WHEN old.name IS NULL THEN 'added'
            WHEN old.source = 'runtime' THEN 'runtime'
            WHEN (old.app, old.cron, old.timezone, old.task, old.args, old.queue, old.priority, old.catch_up,
                  old.catch_up_limit)
                 IS NOT DISTINCT FROM
                 (register_schedules.app, entry.cron, entry.timezone, entry.task, entry.args, entry.queue,
                  entry.priority, entry.catch_up, entry.catch_up_limit)
                THEN 'kept'
            WHEN NOT is_declared(old.source, old.seen_at)
                 OR (register_schedules.is_start AND old.app = register_schedules.app)
                THEN 'changed'
            ELSE 'other'
        END;
        IF outcome = 'added' THEN
            INSERT INTO schedules (name, cron, timezone, task, args, queue, priority, catch_up, catch_up_limit,
                                   source, app, seen_at)
            VALUES (entry.name, entry.cron, entry.timezone, entry.task, entry.args, entry.queue, entry.priority,
                    entry.catch_up, entry.catch_up_limit, 'code', register_schedules.app, now)
            ON CONFLICT (name) DO NOTHING;
        ELSIF outcome = 'changed' THEN
            UPDATE schedules AS s SET
                cron = entry.cron, timezone = entry.timezone, task = entry.task, args = entry.args,
                queue = entry.queue, priority = entry.priority, catch_up = entry.catch_up,
                catch_up_limit = entry.catch_up_limit, app = register_schedules.app, seen_at = now,
                next_tick = CASE WHEN (s.cron, s.timezone) = (entry.cron, entry.timezone) THEN s.next_tick END
            WHERE s.name = entry.name AND s.source = 'code';
        ELSIF outcome = 'kept' AND old.seen_at < now - interval '30 seconds' THEN
            UPDATE schedules AS s SET seen_at = now
            WHERE s.name = entry.name AND s.source = 'code' AND s.seen_at < now;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

-- Forget ticks older than `keep`, but of each schedule never the latest ones that it may catch up with: they
-- are what keeps a tick from firing again when next_tick is set back by hand. At most max_rows; gives how
-- many.
CREATE OR REPLACE FUNCTION {{schema}}.prune_schedule_runs(keep interval, max_rows integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    of_schedule text := (SELECT min(r.schedule) FROM schedule_runs AS r);
    kept integer;
    oldest timestamptz;
    pruned integer := 0;
    count integer;
BEGIN
    WHILE of_schedule IS NOT NULL AND pruned < prune_schedule_runs.max_rows LOOP
        oldest := clock_timestamp() - prune_schedule_runs.keep;
        SELECT s.catch_up_limit INTO kept FROM schedules AS s WHERE s.name = of_schedule;
        IF FOUND THEN
            oldest := least(oldest, coalesce((
                SELECT r.tick FROM schedule_runs AS r
                WHERE r.schedule = of_schedule
                ORDER BY r.tick DESC OFFSET kept - 1 LIMIT 1
            ), '-infinity'));
        END IF;
        DELETE FROM schedule_runs AS r WHERE r.ctid = ANY (ARRAY(
            SELECT old.ctid FROM schedule_runs AS old
            WHERE old.schedule = of_schedule AND old.tick < oldest
            ORDER BY old.tick
            LIMIT prune_schedule_runs.max_rows - pruned
            FOR UPDATE SKIP LOCKED
        ));
        GET DIAGNOSTICS count = ROW_COUNT;
        pruned := pruned + count;
        of_schedule := (SELECT min(r.schedule) FROM schedule_runs AS r WHERE r.schedule > of_schedule);
    END LOOP;
    RETURN pruned;
END $$;
