-- Circuit breakers. One row per dependency. Every change of state is a new generation: reports of an older one
-- are ignored. Counts are sent per batch or per second, never per job.

-- May a job that depends on this start? No row, or closed: yes, with the generation to report under.
-- Open and due, or the probe gone silent: exactly one caller in the cluster gets a probe and may run ONE job.
CREATE OR REPLACE FUNCTION {{schema}}.may_run(name text)
RETURNS TABLE (is_allowed boolean, generation bigint, probe uuid, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    breaker breakers;
BEGIN
    SELECT b.* INTO breaker FROM breakers AS b WHERE b.name = may_run.name;     -- no lock on the common path
    IF NOT FOUND OR breaker.state = 'closed' THEN
        RETURN QUERY SELECT true, coalesce(breaker.generation, 0), NULL::uuid, NULL::timestamptz;
        RETURN;
    END IF;
    is_allowed := false;
    generation := breaker.generation;
    retry_at := CASE WHEN breaker.state = 'open' THEN breaker.retry_at ELSE breaker.probe_until END;
    IF retry_at <= clock_timestamp() THEN
        SELECT b.* INTO breaker FROM breakers AS b WHERE b.name = may_run.name FOR NO KEY UPDATE SKIP LOCKED;
        -- Otherwise somebody else has just won.
        IF FOUND AND breaker.state <> 'closed' AND clock_timestamp() >= (
            CASE WHEN breaker.state = 'open' THEN breaker.retry_at ELSE breaker.probe_until END
        ) THEN
            UPDATE breakers AS b SET
                state = 'half_open', generation = b.generation + 1, probe = gen_random_uuid(),
                probe_until = clock_timestamp() + make_interval(secs => b.probe_seconds)
            WHERE b.name = may_run.name
            RETURNING b.generation, b.probe, b.probe_until INTO generation, probe, retry_at;
            is_allowed := true;
        END IF;
    END IF;
    RETURN NEXT;
END $$;

-- Results since the last report, under the generation they started in (a probe's under its uuid). Returns the
-- state, NULL without such a breaker; a report of another generation changes nothing.
CREATE OR REPLACE FUNCTION {{schema}}.report(
    name text, generation bigint, successes bigint, failures bigint, probe uuid DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    breaker breakers;
    now timestamptz;
    age double precision;               -- in windows
BEGIN
    SELECT b.* INTO breaker FROM breakers AS b WHERE b.name = report.name FOR NO KEY UPDATE;
    now := clock_timestamp();
    IF NOT FOUND OR breaker.generation <> report.generation OR breaker.state = 'open' THEN
        RETURN breaker.state;
    END IF;
    IF breaker.state = 'half_open' THEN
        IF report.probe IS DISTINCT FROM breaker.probe THEN
            RETURN breaker.state;
        END IF;
        breaker.state := CASE WHEN report.failures = 0 AND report.successes > 0 THEN 'closed' ELSE 'open' END;
    ELSE
        age := extract(epoch FROM now - breaker.window_at) / breaker.window_seconds;
        IF age >= 1 OR age < 0 THEN
            breaker.last_successes := CASE WHEN age BETWEEN 1 AND 2 THEN breaker.successes ELSE 0 END;
            breaker.last_failures := CASE WHEN age BETWEEN 1 AND 2 THEN breaker.failures ELSE 0 END;
            breaker.window_at := CASE WHEN age BETWEEN 1 AND 2
                THEN breaker.window_at + make_interval(secs => breaker.window_seconds) ELSE now END;
            breaker.successes := 0;
            breaker.failures := 0;
        END IF;
        breaker.successes := breaker.successes + report.successes;
        breaker.failures := breaker.failures + report.failures;
        IF breaker.failures + breaker.last_failures + breaker.successes + breaker.last_successes < breaker.min_calls
           OR breaker.failures + breaker.last_failures < breaker.failure_ratio * (
               breaker.failures + breaker.last_failures + breaker.successes + breaker.last_successes)
        THEN
            UPDATE breakers AS b SET
                window_at = breaker.window_at, successes = breaker.successes, failures = breaker.failures,
                last_successes = breaker.last_successes, last_failures = breaker.last_failures
            WHERE b.name = report.name;
            RETURN 'closed';
        END IF;
        breaker.state := 'open';
    END IF;
    UPDATE breakers AS b SET
        state = breaker.state, generation = b.generation + 1, successes = 0, failures = 0, last_successes = 0,
        last_failures = 0, window_at = now, probe = NULL, probe_until = NULL,
        opens = CASE breaker.state WHEN 'open' THEN b.opens + 1 ELSE 0 END,
        opened_at = CASE breaker.state WHEN 'open' THEN now END,
        retry_at = CASE breaker.state WHEN 'open' THEN
            now + make_interval(secs => least(b.max_open_seconds, b.open_seconds * power(2, least(b.opens, 20)))) END
    WHERE b.name = report.name;
    RETURN breaker.state;
END $$;
