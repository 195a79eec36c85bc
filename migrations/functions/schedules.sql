-- Schedules. No leader, and no transaction held open while a client computes: read what is due, compute the
-- ticks from the database's time, fire by compare-and-set. schedule_runs is the judge of last resort.

-- What is due, and the database's time to compute with. Takes no locks.
CREATE OR REPLACE FUNCTION {{schema}}.due_schedules() RETURNS TABLE (
    name text, cron text, timezone text, catch_up text, catch_up_limit integer, next_tick timestamptz,
    database_now timestamptz
)
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT s.name, s.cron, s.timezone, s.catch_up, s.catch_up_limit, s.next_tick, clock_timestamp()
    FROM schedules AS s
    WHERE NOT s.is_paused AND s.next_tick <= statement_timestamp()
    ORDER BY s.next_tick
    LIMIT 100
$$;

-- Enqueue these ticks and move on. 'fired', or 'lost': another worker was first, is at it, or the entry was
-- edited. All or nothing in one statement, so a crash anywhere leaves the tick due. A client that computed with
-- a wrong clock is refused: no tick may lie in the future of this database. (next_tick may already be due
-- again: a slow client, not an error.) A task with a unique_key that is still live takes the tick as its own.
CREATE OR REPLACE FUNCTION {{schema}}.fire(
    name text, cron text, timezone text, expected timestamptz, ticks timestamptz[], skipped bigint,
    next_tick timestamptz
) RETURNS text
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    entry schedules;
    now timestamptz;
    due timestamptz;
    count integer := 0;
BEGIN
    SELECT s.* INTO entry FROM schedules AS s
    WHERE s.name = fire.name AND s.next_tick = fire.expected AND s.cron = fire.cron AND s.timezone = fire.timezone
      AND NOT s.is_paused
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    now := clock_timestamp();
    IF fire.next_tick <= fire.expected OR fire.expected > now OR fire.skipped < 0
       OR cardinality(fire.ticks) > entry.catch_up_limit
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
        VALUES (fire.name, due, enqueue(
            task => entry.task, args => entry.args, queue => entry.queue, priority => entry.priority,
            headers => jsonb_build_object('schedule', fire.name, 'tick', due)
        ));
        count := count + 1;
    END LOOP;
    UPDATE schedules AS s SET
        next_tick = fire.next_tick, last_tick = coalesce(fire.ticks[cardinality(fire.ticks)], s.last_tick),
        fired = s.fired + count, skipped = s.skipped + fire.skipped
    WHERE s.name = fire.name;
    RETURN 'fired';
END $$;
