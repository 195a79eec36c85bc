-- Partitions of finished_jobs, one per UTC day, named finished_jobs_YYYYMMDD.

-- Make the partitions of the first day (today) and so many days after it. Any worker, any time, all at once.
-- CREATE + ATTACH locks the parent SHARE UPDATE EXCLUSIVE only: inserts go on (CREATE TABLE ... PARTITION OF
-- would stop them behind any long report). Also called with 0 by a worker whose complete() met 23514 "no
-- partition of relation": the history heals itself.
CREATE OR REPLACE FUNCTION {{schema}}.make_partitions(days integer DEFAULT 7, first_day date DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET lock_timeout = '2s' SET datestyle = 'ISO' SET timezone = 'UTC'
AS $$
DECLARE
    day date;
    partition text;
    made integer := 0;
    first date := coalesce(make_partitions.first_day, (clock_timestamp() AT TIME ZONE 'UTC')::date);
BEGIN
    -- pg_class by query, not to_regclass: its cached "no such table" survives the wait for the advisory lock.
    IF NOT EXISTS (
        SELECT to_char(first + d.nth, '"finished_jobs_"YYYYMMDD') FROM generate_series(0, make_partitions.days) AS d (nth)
        EXCEPT
        SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = '{{schema}}'::regnamespace
    ) THEN
        RETURN 0;                                                   -- the daily case: no lock at all
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('{{schema}}.partitions', 0));
    FOR day IN SELECT first + d.nth FROM generate_series(0, make_partitions.days) AS d (nth) LOOP
        partition := to_char(day, '"finished_jobs_"YYYYMMDD');
        CONTINUE WHEN EXISTS (
            SELECT FROM pg_class AS c WHERE c.relname = partition AND c.relnamespace = '{{schema}}'::regnamespace
        );
        EXECUTE format('CREATE TABLE {{schema}}.%I (LIKE {{schema}}.finished_jobs INCLUDING ALL)', partition);
        EXECUTE format(
            'ALTER TABLE {{schema}}.finished_jobs ATTACH PARTITION {{schema}}.%I FOR VALUES FROM (%L) TO (%L)',
            partition, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC'
        );
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;

-- Drop one of the expired partitions at once, for a worker that does not own the tables, or that has no session to keep
-- a lock in. An insert waits for it 0.2 s at the most; if somebody reads the history just then, another time will do.
CREATE OR REPLACE FUNCTION {{schema}}.drop_partition(name text, retention interval) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET lock_timeout = '200ms'
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM expired_partitions(drop_partition.retention) AS e WHERE e.name = drop_partition.name) THEN
        RETURN false;
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS {{schema}}.%I', drop_partition.name);
    RETURN true;
END $$;

-- Partitions that lie wholly before the retention. Who gets pg_try_advisory_lock(hashtextextended(
-- '{{schema}}.partitions', 1)) on its own session (unlock after) runs for each, in autocommit,
--   ALTER TABLE {{schema}}.finished_jobs DETACH PARTITION {{schema}}.X CONCURRENTLY    (FINALIZE when is_half_detached)
--   DROP TABLE {{schema}}.X
-- DETACH CONCURRENTLY cannot run in a function; it never blocks inserts, a plain DETACH or DROP waits with ACCESS
-- EXCLUSIVE.
CREATE OR REPLACE FUNCTION {{schema}}.expired_partitions(retention interval)
RETURNS TABLE (name text, is_attached boolean, is_half_detached boolean)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT c.relname::text, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false)
    FROM pg_class AS c
    LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
    WHERE c.relnamespace = '{{schema}}'::regnamespace AND c.relkind = 'r' AND c.relname ~ '^finished_jobs_\d{8}$'
      AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1
          <= ((clock_timestamp() - greatest(expired_partitions.retention, interval '0')) AT TIME ZONE 'UTC')::date
    ORDER BY c.relname
    LIMIT 50
$$;
