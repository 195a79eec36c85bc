-- Concurrency keys: their locks, and who wakes the jobs that wait for one.
--
-- The functions of this schema take their locks in one order:
--   1. job rows, in order of id (claim, heartbeat, reap and promote skip rows that are taken);
--   2. advisory locks of concurrency keys, in order of their number;
--   3. blocked rows to be made ready: skipped when taken, so nobody waits here.
-- claim and sweep only try; except that a claim in a queue with max_running first waits for the
-- other claims of that queue, before it holds anything.
--
-- A writer locks its rows in one statement and changes them by ctid in the next. In one statement
-- the new place of a row that a heartbeat moved meanwhile is invisible, and the change would
-- quietly miss it. (complete takes no ctid along: it deletes by id.)

-- Functions with a RETURN body, as here, are bound to their names when they are created and can be
-- inlined; all others SET search_path, with pg_temp last, or a temporary table could stand in for ours.

-- The number of a key's advisory lock. 64 bits: a collision delays a claim, nothing more.
CREATE OR REPLACE FUNCTION {{schema}}.key_lock(concurrency_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN hashtextextended('{{schema}}.key:' || key_lock.concurrency_key, 0);

-- Full jitter: anywhere between zero and min(max, base * 2^attempt). Zero is a value. The exponent is
-- capped before the arithmetic: 2^5000 is an error, not a large number.
CREATE OR REPLACE FUNCTION {{schema}}.full_jitter(
    attempt integer, base_seconds double precision, max_seconds double precision
) RETURNS interval
LANGUAGE sql VOLATILE STRICT
RETURN make_interval(secs => random() * least(
    full_jitter.max_seconds,
    full_jitter.base_seconds * power(2::double precision, least(greatest(full_jitter.attempt, 0), 30))
));

-- The rank-th free slot of a key, given those that are taken: at most so many of those below it are.
CREATE OR REPLACE FUNCTION {{schema}}.free_slot(taken smallint[], rank integer) RETURNS integer
LANGUAGE sql IMMUTABLE
RETURN (
    SELECT s.slot FROM generate_series(1, cardinality(free_slot.taken) + free_slot.rank) AS s (slot)
    WHERE s.slot <> ALL (free_slot.taken)
    ORDER BY s.slot OFFSET free_slot.rank - 1 LIMIT 1
);

-- Make ready what may run now that these keys have changed: where a key has a free slot, the best
-- waiting job of each queue. One is enough: claim, led to the key by it, fills every free slot
-- from ready and blocked alike. Each queue, because nobody may be working on one of them.
-- Waits for the keys' locks in order of their number, then looks with a new snapshot: what a
-- claim parked before it let go of the lock is seen.
CREATE OR REPLACE FUNCTION {{schema}}.unblock(keys text[], must_wait boolean DEFAULT true) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    held text[];
    places tid[];
    missed integer;
    tries integer := 0;
    woken text[] := '{}';
    queues text[];
    now timestamptz;
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT DISTINCT k.key FROM unnest(unblock.keys) AS k (key) WHERE k.key IS NOT NULL
    ), ordered AS MATERIALIZED (
        SELECT a.key, key_lock(a.key) AS number FROM asked AS a ORDER BY 2, 1
    )
    SELECT array_agg(o.key) INTO held
    FROM ordered AS o
    WHERE CASE WHEN unblock.must_wait THEN pg_advisory_xact_lock(o.number) IS NOT NULL
               ELSE pg_try_advisory_xact_lock(o.number) END;
    IF held IS NULL THEN
        RETURN 0;
    END IF;

    LOOP
        -- Not when the statement began: a job that came, and was parked, while it waited for the lock is due too.
        now := clock_timestamp();
        WITH RECURSIVE spot AS (       -- each queue in which a key has waiting jobs
            SELECT k.key, (
                SELECT w.queue FROM jobs AS w
                WHERE w.concurrency_key = k.key AND w.state IN ('ready', 'blocked')
                ORDER BY w.queue LIMIT 1
            ) AS queue
            FROM unnest(held) AS k (key)
            UNION ALL
            SELECT s.key, (
                SELECT w.queue FROM jobs AS w
                WHERE w.concurrency_key = s.key AND w.state IN ('ready', 'blocked') AND w.queue > s.queue
                ORDER BY w.queue LIMIT 1
            )
            FROM spot AS s
            WHERE s.queue IS NOT NULL
        ), idle AS MATERIALIZED (      -- a slot is free and the best waiting job is not ready
            SELECT s.key, s.queue
            FROM spot AS s
            CROSS JOIN LATERAL (
                SELECT j.state, j.concurrency_limit FROM jobs AS j
                WHERE j.concurrency_key = s.key AND j.queue = s.queue AND j.state IN ('ready', 'blocked')
                  AND j.run_at <= now
                ORDER BY j.priority, j.run_at, j.id
                LIMIT 1
            ) AS w
            WHERE s.queue IS NOT NULL
              AND w.state = 'blocked'
              AND (
                SELECT count(*) FROM jobs AS r
                WHERE r.concurrency_key = s.key AND r.concurrency_slot IS NOT NULL
              ) < w.concurrency_limit
        )
        -- The first one that can be locked. Any will do: claim takes the best, whoever led it there.
        SELECT array_agg(f.place) FILTER (WHERE f.state = 'blocked'), count(*) FILTER (WHERE f.place IS NULL)
        INTO places, missed
        FROM idle AS i
        LEFT JOIN LATERAL (
            SELECT j.ctid AS place, j.state FROM jobs AS j
            WHERE j.concurrency_key = i.key AND j.queue = i.queue AND j.state IN ('ready', 'blocked')
              AND j.run_at <= now
            ORDER BY j.priority, j.run_at, j.id
            LIMIT 1
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS f ON true;
        IF places IS NOT NULL THEN
            WITH made AS (
                UPDATE jobs AS j SET state = 'ready' WHERE j.ctid = ANY (places) RETURNING j.queue
            )
            SELECT array_agg(m.queue) INTO queues FROM made AS m;
            woken := woken || queues;
        END IF;
        -- Every waiting job of the key was locked. By a claim that saw it ready: SKIP LOCKED takes the row
        -- before it sees that it is blocked by now, and keeps it to its end, a few milliseconds. Or by a cancel,
        -- which waits for this key, so that queueing for its rows would be a deadlock. So try for a while.
        EXIT WHEN missed = 0 OR NOT unblock.must_wait OR tries >= 50;
        tries := tries + 1;
        PERFORM pg_sleep(0.001);
    END LOOP;
    IF cardinality(woken) > 0 THEN
        PERFORM ring(woken);
    END IF;
    RETURN cardinality(woken);
END $$;

-- Mend what nobody else will: blocked jobs whose key has a free slot and no ready job (a row
-- deleted by hand, a row that was locked by a stranger at the wrong moment, a completion
-- under REPEATABLE READ). Looks at up to max_keys keys after the given one; last_key is NULL
-- when the round is complete. Never waits.
CREATE OR REPLACE FUNCTION {{schema}}.sweep(after_key text DEFAULT '', max_keys integer DEFAULT 1000)
RETURNS TABLE (unblocked integer, last_key text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off
AS $$
DECLARE
    suspects text[];
    seen bigint;
    last text;
BEGIN
    WITH RECURSIVE blocked_key AS (
        SELECT (
            SELECT CASE WHEN b.state = 'blocked' THEN b.concurrency_key END FROM jobs AS b
            WHERE b.state = 'blocked'
              AND CASE WHEN b.state = 'blocked' THEN b.concurrency_key END > coalesce(sweep.after_key, '')
            ORDER BY CASE WHEN b.state = 'blocked' THEN b.concurrency_key END LIMIT 1
        ) AS key, 1 AS nth
        UNION ALL
        SELECT (
            SELECT CASE WHEN b.state = 'blocked' THEN b.concurrency_key END FROM jobs AS b
            WHERE b.state = 'blocked' AND CASE WHEN b.state = 'blocked' THEN b.concurrency_key END > k.key
            ORDER BY CASE WHEN b.state = 'blocked' THEN b.concurrency_key END LIMIT 1
        ), k.nth + 1
        FROM blocked_key AS k
        WHERE k.key IS NOT NULL AND k.nth < sweep.max_keys
    )
    SELECT count(*), max(k.key),
           array_agg(k.key) FILTER (WHERE (
               SELECT count(*) FROM jobs AS r
               WHERE r.concurrency_key = k.key AND r.concurrency_slot IS NOT NULL
           ) < (
               SELECT max(w.concurrency_limit) FROM (
                   SELECT j.concurrency_limit FROM jobs AS j
                   WHERE j.concurrency_key = k.key AND j.state IN ('ready', 'blocked')
                   ORDER BY j.queue, j.priority, j.run_at, j.id LIMIT 10
               ) AS w
           ))
    INTO seen, last, suspects
    FROM blocked_key AS k
    WHERE k.key IS NOT NULL;
    RETURN QUERY
    SELECT CASE WHEN suspects IS NULL THEN 0 ELSE unblock(suspects, false) END,
           CASE WHEN seen >= sweep.max_keys THEN last END;
END $$;
