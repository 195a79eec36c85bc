-- Circuit breakers. One row per dependency. Every change of state is a new generation: reports of an older one
-- are ignored. Counts are sent per batch or per second, never per job.
--
-- Jobs of a breaker that is not closed are parked: scheduled, all of them for the one instant parked_until, which
-- is an hour away and so a safety net. That is one write for each however long it stays open, and the index of
-- scheduled jobs finds them by that instant. Given back with a delay each, 100,000 of them came round every
-- open_seconds, three writes each time.
--
-- Nothing is stranded: who parks holds the breaker's row FOR SHARE and sees that it is not closed, and every
-- change of state waits for that. So whoever brings jobs back after the change sees all that were parked
-- before, and afterwards nobody parks. Job rows are locked before the breaker's, and nobody who holds a
-- breaker's row waits for a job's.

-- May a job that depends on this start? No row, or closed: yes, with the generation to report under.
-- Open and due, or the probe gone silent: exactly one caller in the cluster gets a probe and may run ONE job.
-- retry_at NULL: open until somebody closes it.
CREATE OR REPLACE FUNCTION {{schema}}.may_run(name text)
RETURNS TABLE (is_allowed boolean, generation bigint, probe uuid, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
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
-- state, NULL without such a breaker; a report of another generation changes nothing. A probe of which there is
-- neither success nor failure to tell came to nothing: another one may go in a second.
-- Opens when the last one to two windows have max_failures or, if that is NULL, min_calls and failure_ratio.
CREATE OR REPLACE FUNCTION {{schema}}.report(
    name text, generation bigint, successes bigint, failures bigint, probe uuid DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
SET lock_timeout = '200ms'      -- who reports has a claim to make; the counts keep until the next time
AS $$
DECLARE
    breaker breakers;
    now timestamptz;
    age double precision;               -- in windows
    calls bigint;
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
        calls := breaker.successes + breaker.last_successes + breaker.failures + breaker.last_failures;
        IF NOT coalesce(
            breaker.failures + breaker.last_failures >= breaker.max_failures,
            calls >= breaker.min_calls AND breaker.failures + breaker.last_failures >= breaker.failure_ratio * calls
        ) THEN
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
        opens = CASE WHEN breaker.state = 'closed' THEN 0
                     WHEN report.successes + report.failures = 0 THEN b.opens ELSE b.opens + 1 END,
        opened_at = CASE breaker.state WHEN 'open' THEN coalesce(b.opened_at, now) END,
        retry_at = CASE WHEN breaker.state = 'open' THEN now + make_interval(secs =>
            CASE WHEN report.successes + report.failures = 0 THEN 1
                 ELSE greatest(b.open_seconds, least(
                     b.max_open_seconds, b.open_seconds * power(2, least(b.opens, 20))
                 )) END) END
    WHERE b.name = report.name;
    RETURN breaker.state;
END $$;

-- The instant that jobs of a breaker are parked for; NULL while it is closed: then they must not be. It stays
-- open until the caller's transaction ends.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_parking(name text) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    parking timestamptz;
BEGIN
    -- A new instant only when the old one has come: then whoever was parked for it is due by itself. Before the
    -- lock that is shared, because two who share it could not both have more.
    UPDATE breakers AS b SET parked_until = clock_timestamp() + interval '1 hour'
    WHERE b.name = breaker_parking.name AND b.state <> 'closed'
      AND coalesce(b.parked_until <= clock_timestamp(), true);
    SELECT b.parked_until INTO parking FROM breakers AS b
    WHERE b.name = breaker_parking.name AND b.state <> 'closed'
    FOR SHARE;
    RETURN parking;
END $$;

-- Give claimed jobs back, as release does, because their breaker is not closed: they are parked. If it is closed
-- by now they are ready.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_park(job_ids bigint[], tokens uuid[], name text)
RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    verdicts verdict[];
    parking timestamptz;
BEGIN
    SELECT array_agg(ROW(
        h.place, h.id, CASE WHEN h.is_cancel_requested THEN 'cancelled' END, NULL, NULL, h.attempt - 1, h.crashes,
        h.concurrency_key, h.task, h.queue
    )::verdict) INTO verdicts
    FROM hold(breaker_park.job_ids, breaker_park.tokens) AS h;
    parking := breaker_parking(breaker_park.name);
    verdicts := ARRAY(
        SELECT ROW(
            v.place, v.job_id, coalesce(v.state, CASE WHEN parking IS NULL THEN 'ready' ELSE 'scheduled' END),
            parking, v.reason, v.attempt, v.crashes, v.concurrency_key, v.task, v.queue
        )::verdict
        FROM unnest(verdicts) AS v
    );
    PERFORM settle(verdicts);
    RETURN QUERY SELECT v.job_id, v.state FROM unnest(verdicts) AS v;
END $$;

-- Park a crowd without claiming it first: of the first max_jobs ready jobs of the queue those of these tasks, and
-- what is blocked behind them. Gives how many that were. So a crowd at the head costs the others a moment.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_park_ready(
    name text, queue text, tasks text[], max_jobs integer DEFAULT 1000
) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    verdicts verdict[];
    parking timestamptz;
BEGIN
    WITH head AS MATERIALIZED (         -- without locks: the others among them are anybody's
        SELECT j.id, j.task, j.concurrency_key FROM jobs AS j
        WHERE j.queue = breaker_park_ready.queue AND j.state = 'ready' AND j.run_at <= statement_timestamp()
        ORDER BY j.priority, j.run_at, j.id
        LIMIT breaker_park_ready.max_jobs
    ), ours AS MATERIALIZED (
        SELECT h.id, h.concurrency_key FROM head AS h WHERE h.task = ANY (breaker_park_ready.tasks)
    ), behind AS MATERIALIZED (         -- woken one by one, they would be claimed and parked one by one
        SELECT w.id
        FROM (SELECT DISTINCT o.concurrency_key FROM ours AS o WHERE o.concurrency_key IS NOT NULL) AS k
        CROSS JOIN LATERAL (
            SELECT j.id FROM jobs AS j
            WHERE j.concurrency_key = k.concurrency_key AND j.queue = breaker_park_ready.queue
              AND j.state IN ('ready', 'blocked') AND j.task = ANY (breaker_park_ready.tasks)
            ORDER BY j.priority, j.run_at, j.id
            LIMIT breaker_park_ready.max_jobs
        ) AS w
        LIMIT breaker_park_ready.max_jobs
    )
    SELECT array_agg(ROW(
        w.place, w.id, 'scheduled', NULL, NULL, w.attempt, w.crashes,
        CASE WHEN w.state = 'ready' THEN w.concurrency_key END, w.task, w.queue
    )::verdict) INTO verdicts
    FROM (SELECT o.id FROM ours AS o UNION SELECT b.id FROM behind AS b) AS u
    CROSS JOIN LATERAL (
        SELECT j.ctid AS place, j.id, j.state, j.attempt, j.crashes::integer AS crashes, j.concurrency_key, j.task,
               j.queue
        FROM jobs AS j
        WHERE j.id = u.id AND j.state IN ('ready', 'blocked')
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS w;
    IF verdicts IS NULL THEN
        RETURN 0;
    END IF;
    parking := breaker_parking(breaker_park_ready.name);
    IF parking IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM settle(ARRAY(
        SELECT ROW(v.place, v.job_id, v.state, parking, v.reason, v.attempt, v.crashes, v.concurrency_key, v.task,
                   v.queue)::verdict
        FROM unnest(verdicts) AS v
    ));
    RETURN cardinality(verdicts);
END $$;

-- Bring up to max_jobs parked jobs of a closed breaker back, in the places that their age gives them; gives how many
-- came. With none left parked_until is NULL again: nobody need look any more.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_unpark(name text, max_jobs integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET lock_timeout = '200ms'
AS $$
DECLARE
    parking timestamptz;
    places tid[];
BEGIN
    SELECT b.parked_until INTO parking FROM breakers AS b
    WHERE b.name = breaker_unpark.name AND b.state = 'closed';
    places := ARRAY(
        SELECT j.ctid FROM jobs AS j
        WHERE j.state = 'scheduled' AND j.run_at = parking
        ORDER BY j.run_at, j.id
        LIMIT breaker_unpark.max_jobs
        FOR NO KEY UPDATE SKIP LOCKED
    );
    PERFORM breaker_wake(places);
    IF cardinality(places) = 0 THEN
        UPDATE breakers AS b SET parked_until = NULL
        WHERE b.name = breaker_unpark.name AND b.state = 'closed' AND b.parked_until = parking
          AND NOT EXISTS (SELECT FROM jobs AS j WHERE j.state = 'scheduled' AND j.run_at = b.parked_until);
    END IF;
    RETURN cardinality(places);
END $$;

-- When it is time for a probe, bring one parked job of these queues back; whoever claims it asks may_run. Any of them:
-- always the same one would use up its attempts, and if it fails by itself keep the breaker open for ever. Of those
-- around, one that has many attempts left.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_call(name text, queues text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    parking timestamptz;
    first bigint;
    last bigint;
    place tid;
BEGIN
    SELECT b.parked_until INTO parking FROM breakers AS b
    WHERE b.name = breaker_call.name
      AND CASE b.state WHEN 'open' THEN b.retry_at WHEN 'half_open' THEN b.probe_until END <= clock_timestamp();
    SELECT j.id INTO first FROM jobs AS j
    WHERE j.state = 'scheduled' AND j.run_at = parking
    ORDER BY j.run_at, j.id LIMIT 1;
    SELECT j.id INTO last FROM jobs AS j
    WHERE j.state = 'scheduled' AND j.run_at = parking
    ORDER BY j.run_at DESC, j.id DESC LIMIT 1;
    FOREACH first IN ARRAY ARRAY[first + floor(random() * (last - first + 1))::bigint, first] LOOP
        SELECT c.place INTO place
        FROM (
            SELECT j.ctid AS place, j.max_attempts + j.crashes - j.attempt AS attempts_left FROM jobs AS j
            WHERE j.state = 'scheduled' AND j.run_at = parking AND j.id >= first
              AND j.queue = ANY (breaker_call.queues)
            ORDER BY j.run_at, j.id
            LIMIT 20
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS c
        ORDER BY c.attempts_left DESC
        LIMIT 1;
        EXIT WHEN place IS NOT NULL;
    END LOOP;
    PERFORM breaker_wake(ARRAY[place]);
    RETURN place IS NOT NULL;
END $$;

-- Make locked parked jobs ready. Inner part of breaker_unpark and breaker_call.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_wake(places tid[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    queues text[];
BEGIN
    WITH woken AS (
        UPDATE jobs AS j SET state = 'ready', run_at = j.created_at
        WHERE j.ctid = ANY (breaker_wake.places)
        RETURNING j.queue
    )
    SELECT array_agg(w.queue) INTO queues FROM woken AS w;
    IF queues IS NOT NULL THEN
        PERFORM ring(queues);
    END IF;
END $$;

-- Open it by hand, whatever it counted, for so long or (NULL) until somebody closes it. False: no such breaker.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_open(name text, seconds double precision DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    UPDATE breakers AS b SET
        state = 'open', generation = b.generation + 1, successes = 0, failures = 0, last_successes = 0,
        last_failures = 0, window_at = clock_timestamp(), probe = NULL, probe_until = NULL,
        opens = greatest(b.opens, 1), opened_at = coalesce(b.opened_at, clock_timestamp()),
        retry_at = clock_timestamp() + make_interval(secs => breaker_open.seconds)
    WHERE b.name = breaker_open.name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM audit('breaker.open', breaker_open.name, NULL, jsonb_build_object('seconds', breaker_open.seconds));
    RETURN true;
END $$;

-- Close it by hand, and forget what it counted. False: no such breaker.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_close(name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    UPDATE breakers AS b SET
        state = 'closed', generation = b.generation + 1, successes = 0, failures = 0, last_successes = 0,
        last_failures = 0, window_at = clock_timestamp(), probe = NULL, probe_until = NULL, opens = 0,
        opened_at = NULL, retry_at = NULL
    WHERE b.name = breaker_close.name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM audit('breaker.close', breaker_close.name, NULL, '{}');
    RETURN true;
END $$;

-- Change settings: those that are members of the object. Pinned, they are an operator's, and no declaration in
-- code changes them any more. False: no such breaker.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_set(name text, settings jsonb, must_pin boolean DEFAULT true)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    breaker breakers;
    wanted breakers;
    changes jsonb := '{}';
BEGIN
    SELECT b.* INTO breaker FROM breakers AS b WHERE b.name = breaker_set.name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT coalesce(jsonb_object_agg(s.key, s.value), '{}') INTO changes
    FROM jsonb_each(breaker_set.settings) AS s
    WHERE s.key IN ('failure_ratio', 'min_calls', 'max_failures', 'window_seconds', 'open_seconds',
                    'max_open_seconds', 'probe_seconds')
      AND (breaker_set.must_pin OR s.key <> ALL (breaker.pinned));
    wanted := jsonb_populate_record(breaker, changes);
    IF breaker_set.must_pin THEN
        wanted.pinned := ARRAY(
            SELECT p.setting FROM unnest(breaker.pinned) AS p (setting)
            UNION SELECT k.key FROM jsonb_object_keys(changes) AS k (key)
            ORDER BY 1
        );
    END IF;
    IF wanted IS DISTINCT FROM breaker THEN
        UPDATE breakers AS b SET
            failure_ratio = wanted.failure_ratio, min_calls = wanted.min_calls, max_failures = wanted.max_failures,
            window_seconds = wanted.window_seconds, open_seconds = wanted.open_seconds,
            max_open_seconds = wanted.max_open_seconds, probe_seconds = wanted.probe_seconds, pinned = wanted.pinned
        WHERE b.name = breaker.name;
    END IF;
    RETURN true;
END $$;

-- What a worker's code says of its breakers: a JSON array of objects with a name and, if it says so, the settings.
-- A new name gets the defaults. In order of name, so that two workers do not deadlock.
CREATE OR REPLACE FUNCTION {{schema}}.breaker_declare(definitions jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    INSERT INTO breakers AS b (name)
    SELECT DISTINCT d.value ->> 'name' FROM jsonb_array_elements(breaker_declare.definitions) AS d (value) ORDER BY 1
    ON CONFLICT DO NOTHING;
    PERFORM breaker_set(d.name, d.settings, false)
    FROM (
        SELECT e.value ->> 'name' AS name, e.value - 'name' AS settings
        FROM jsonb_array_elements(breaker_declare.definitions) AS e (value)
        WHERE e.value - 'name' <> '{}'
        ORDER BY 1
        OFFSET 0
    ) AS d;
END $$;
