-- Rate limits: GCRA, paid at the moment of the claim, by the database's clock. Over-limit jobs wait in a
-- line that no claim scans; the limit's row says when its next token comes. Names: 'queue:Q', 'task:T', or
-- jobs.rate_key.
--
-- A slot reserved in the future, when a job is found over the limit, was tried and is worse: it promises
-- that workers are free then, that nothing is cancelled and that the rate stays (293 starts in one second
-- at a limit of 100/s after workers were busy for 2 s; half the rate after half was cancelled).

-- Take up to `wants` tokens now, of many limits in one statement. No such limit: all, and next_at NULL. granted
-- NULL: another claimer holds the row, leave these jobs alone and come back in 2 ms (never waits: a limiter must
-- not queue up the claims of other tasks). 0 while a line exists: newcomers join it (rate_park), they never
-- overtake. Exact: the row lock is held to COMMIT, so a claim that rolls back pays nothing; take, park and deal
-- all happen under it. A tat too far ahead (clock stepped back, rate raised) heals itself.
CREATE OR REPLACE FUNCTION {{schema}}.rate_take(names text[], wants integer[], is_from_line boolean DEFAULT false)
RETURNS TABLE (name text, granted integer, next_at timestamptz)
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    WITH asked AS MATERIALIZED (
        SELECT a.name, a.want FROM unnest(rate_take.names, rate_take.wants) AS a (name, want)
    ), held AS MATERIALIZED (
        SELECT r.name, r.tokens_per_second, r.burst, r.tat, r.next_at, a.want
        FROM asked AS a
        JOIN rate_limits AS r ON r.name = a.name
        FOR NO KEY UPDATE OF r SKIP LOCKED
    ), clock AS MATERIALIZED (          -- read after the lock
        SELECT h.name, h.burst, h.tat, h.next_at, h.want, 1 / h.tokens_per_second AS each, clock_timestamp() AS now
        FROM held AS h
    ), state AS MATERIALIZED (          -- seconds by which tat is ahead of now
        SELECT c.name, c.burst, c.next_at, c.want, c.each, c.now,
               least(greatest(extract(epoch FROM c.tat - c.now)::double precision, 0), c.burst * c.each) AS ahead
        FROM clock AS c
    ), verdict AS MATERIALIZED (
        SELECT s.name, s.burst, s.each, s.now, s.ahead,
               CASE WHEN s.next_at IS NOT NULL AND NOT rate_take.is_from_line THEN 0
                    ELSE greatest(0, least(s.want, floor(s.burst - s.ahead / s.each + 1e-6)::integer)) END AS granted
        FROM state AS s
    ), paid AS (
        UPDATE rate_limits AS r SET
            tat = v.now + make_interval(secs => v.ahead + v.granted * v.each), taken = r.taken + v.granted
        FROM verdict AS v
        WHERE r.name = v.name AND v.granted > 0
    )
    SELECT a.name,
           CASE WHEN v.name IS NOT NULL THEN v.granted
                WHEN NOT EXISTS (SELECT FROM rate_limits AS r WHERE r.name = a.name) THEN a.want END,
           CASE WHEN v.name IS NOT NULL
                    THEN v.now + make_interval(secs => greatest(0, v.ahead + (v.granted - v.burst + 1) * v.each))
                WHEN EXISTS (SELECT FROM rate_limits AS r WHERE r.name = a.name)
                    THEN clock_timestamp() + interval '2 ms' END
    FROM asked AS a
    LEFT JOIN verdict AS v ON v.name = a.name
$$;

-- Only in the transaction that took them: tokens that found no job.
CREATE OR REPLACE FUNCTION {{schema}}.rate_give_back(names text[], counts integer[]) RETURNS void
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    UPDATE rate_limits AS r SET
        tat = r.tat - make_interval(secs => b.count / r.tokens_per_second), taken = r.taken - b.count
    FROM unnest(rate_give_back.names, rate_give_back.counts) AS b (name, count)
    WHERE r.name = b.name AND b.count > 0
$$;

-- Put over-limit jobs, whose rows the caller has locked, in line: names[i] is the limit of job_ids[i]. One write
-- per job; run_at is only a safety net (promote makes it ready, the claim looks again). Only for limits of which
-- rate_take granted a number in this transaction (= holds the lock): parked without it, a job is stranded when
-- the dealer just now finds the line empty.
CREATE OR REPLACE FUNCTION {{schema}}.rate_park(job_ids bigint[], names text[]) RETURNS void
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    UPDATE jobs AS j SET
        state = 'scheduled', rate_key = p.name, rate_parked_at = clock_timestamp(),
        run_at = clock_timestamp() + interval '1 hour'
    FROM unnest(rate_park.job_ids, rate_park.names) AS p (id, name)
    WHERE j.id = p.id AND j.state IN ('ready', 'blocked');
    UPDATE rate_limits AS r SET next_at = r.tat - make_interval(secs => (r.burst - 1) / r.tokens_per_second)
    FROM (SELECT DISTINCT n.name FROM unnest(rate_park.names) AS n (name)) AS p
    WHERE r.name = p.name AND r.next_at IS NULL
$$;

-- Of candidates that the caller has locked, best first: the places of those that may start now, at most `room`, paid;
-- the others of a limit that said no are put in line and counted. Those whose limit another claimer holds are
-- neither. Jobs without a limit always may.
CREATE OR REPLACE FUNCTION {{schema}}.rate_admit(candidates tid[], room integer)
RETURNS TABLE (places tid[], parked integer)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    ids bigint[];
    owners text[];
    names text[];
    wants integer[];
    grants integer[];
    over_ids bigint[];
    over_names text[];
    spare_names text[];
    spare integer[];
BEGIN
    places := rate_admit.candidates[1:rate_admit.room];
    parked := 0;
    SELECT array_agg(j.id ORDER BY c.nth), array_agg(coalesce(j.rate_key, 'task:' || j.task) ORDER BY c.nth)
    INTO ids, owners
    FROM unnest(rate_admit.candidates) WITH ORDINALITY AS c (place, nth)
    CROSS JOIN LATERAL (SELECT j.id, j.rate_key, j.task FROM jobs AS j WHERE j.ctid = c.place) AS j;
    SELECT array_agg(w.name), array_agg(w.want) INTO names, wants
    FROM (
        SELECT o.name, least(count(*), rate_admit.room)::integer AS want FROM unnest(owners) AS o (name) GROUP BY o.name
    ) AS w
    WHERE EXISTS (SELECT FROM rate_limits AS r WHERE r.name = w.name);
    IF names IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT array_agg(t.granted ORDER BY n.nth) INTO grants
    FROM unnest(names) WITH ORDINALITY AS n (name, nth)
    JOIN rate_take(names, wants) AS t ON t.name = n.name;
    WITH ranked AS MATERIALIZED (
        SELECT c.nth, c.place, c.id, l.name, l.want, l.granted,
               row_number() OVER (PARTITION BY c.name ORDER BY c.nth) AS rank
        FROM unnest(rate_admit.candidates, ids, owners) WITH ORDINALITY AS c (place, id, name, nth)
        LEFT JOIN unnest(names, wants, grants) AS l (name, want, granted) ON l.name = c.name
    ), going AS MATERIALIZED (
        SELECT r.nth, r.place, r.name FROM ranked AS r
        WHERE r.name IS NULL OR r.rank <= r.granted
        ORDER BY r.nth LIMIT rate_admit.room
    ), over AS MATERIALIZED (
        SELECT r.nth, r.id, r.name FROM ranked AS r WHERE r.rank > r.granted AND r.granted < r.want
    ), unused AS MATERIALIZED (
        SELECT l.name, l.granted - (SELECT count(*)::integer FROM going AS g WHERE g.name = l.name) AS count
        FROM unnest(names, grants) AS l (name, granted)
    )
    SELECT (SELECT array_agg(g.place ORDER BY g.nth) FROM going AS g),
           (SELECT array_agg(o.id ORDER BY o.nth) FROM over AS o),
           (SELECT array_agg(o.name ORDER BY o.nth) FROM over AS o),
           (SELECT array_agg(u.name) FROM unused AS u WHERE u.count > 0),
           (SELECT array_agg(u.count) FROM unused AS u WHERE u.count > 0)
    INTO places, over_ids, over_names, spare_names, spare;
    PERFORM rate_give_back(spare_names, spare);
    IF over_ids IS NOT NULL THEN
        PERFORM rate_park(over_ids, over_names);
        parked := cardinality(over_ids);
    END IF;
    RETURN NEXT;
END $$;

-- Of ready candidates that the caller has locked, with a concurrency key among those whose locks it holds: put in line
-- whoever meets one, and count them. Only the jobs that fill a key's slots go through rate_admit, a few a call:
-- without this a crowd at the head would be cleared no faster.
CREATE OR REPLACE FUNCTION {{schema}}.rate_join(candidates tid[], keys text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    ids bigint[];
    owners text[];
    lines text[];
BEGIN
    SELECT array_agg(j.id), array_agg(coalesce(j.rate_key, 'task:' || j.task)) INTO ids, owners
    FROM unnest(rate_join.candidates) AS c (place)
    CROSS JOIN LATERAL (
        SELECT j.id, j.rate_key, j.task, j.concurrency_key FROM jobs AS j WHERE j.ctid = c.place
    ) AS j
    WHERE j.concurrency_key = ANY (rate_join.keys);
    lines := ARRAY(
        SELECT r.name FROM rate_limits AS r
        WHERE r.name = ANY (owners) AND r.next_at IS NOT NULL
        FOR NO KEY UPDATE SKIP LOCKED
    );
    IF cardinality(lines) = 0 THEN
        RETURN 0;
    END IF;
    SELECT array_agg(c.id), array_agg(c.name) INTO ids, owners
    FROM unnest(ids, owners) AS c (id, name)
    WHERE c.name = ANY (lines);
    PERFORM rate_park(ids, owners);
    RETURN cardinality(ids);
END $$;

-- Up to `want` jobs of the queue whose turn has come, best priority first, then oldest: locked, paid, and with a
-- free slot of their concurrency key; the caller marks them running in this transaction. A job whose key is full is
-- blocked instead, and pays when it is ready again. Looks at due lines only.
CREATE OR REPLACE FUNCTION {{schema}}.rate_deal(queue text, want integer) RETURNS TABLE (place tid, slot integer)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    lines text[];
    grants integer[];
    nexts timestamptz[];
    ids bigint[];
    owners text[];
    keys text[];
    locked text[];
    places tid[];
    slots integer[];
    full_places tid[];
    used text[];
BEGIN
    lines := ARRAY(
        SELECT r.name FROM rate_limits AS r WHERE r.next_at <= statement_timestamp() AND left(r.name, 6) <> 'queue:'
        ORDER BY r.next_at LIMIT least(greatest(rate_deal.want, 1), 100) FOR NO KEY UPDATE SKIP LOCKED
    );
    IF cardinality(lines) = 0 THEN
        RETURN;
    END IF;
    SELECT array_agg(t.granted ORDER BY o.nth), array_agg(t.next_at ORDER BY o.nth) INTO grants, nexts
    FROM unnest(lines) WITH ORDINALITY AS o (name, nth)
    JOIN rate_take(lines, array_fill(rate_deal.want, ARRAY[cardinality(lines)]), true) AS t ON t.name = o.name;
    SELECT array_agg(d.id), array_agg(d.name), array_agg(d.concurrency_key) FILTER (WHERE d.concurrency_key IS NOT NULL)
    INTO ids, owners, keys
    FROM (
        SELECT w.id, w.concurrency_key, l.name
        FROM unnest(lines, grants) WITH ORDINALITY AS l (name, granted, nth)
        CROSS JOIN LATERAL (
            SELECT j.id, j.concurrency_key FROM jobs AS j
            WHERE j.rate_key = l.name AND j.queue = rate_deal.queue AND j.state = 'scheduled'
              AND j.rate_parked_at IS NOT NULL
            ORDER BY j.priority, j.id LIMIT l.granted FOR NO KEY UPDATE SKIP LOCKED
        ) AS w
        LIMIT rate_deal.want
    ) AS d;
    SELECT array_agg(k.key) INTO locked
    FROM (SELECT DISTINCT u.key FROM unnest(keys) AS u (key) OFFSET 0) AS k
    WHERE pg_try_advisory_xact_lock(key_lock(k.key));
    -- A new statement again: the snapshot is younger than the locks of the keys.
    WITH dealt AS MATERIALIZED (
        SELECT d.name, d.nth, j.place, j.concurrency_key, j.concurrency_limit, coalesce(r.running, 0) AS running, r.slots,
               row_number() OVER (PARTITION BY j.concurrency_key ORDER BY d.nth)::integer AS rank
        FROM unnest(ids, owners) WITH ORDINALITY AS d (id, name, nth)
        CROSS JOIN LATERAL (
            SELECT j.ctid AS place, j.concurrency_key, j.concurrency_limit FROM jobs AS j WHERE j.id = d.id OFFSET 0
        ) AS j
        LEFT JOIN LATERAL (
            SELECT count(*)::integer AS running, coalesce(array_agg(r.concurrency_slot), '{}') AS slots
            FROM jobs AS r
            WHERE r.concurrency_key = j.concurrency_key AND r.concurrency_slot IS NOT NULL
        ) AS r ON j.concurrency_key IS NOT NULL
        WHERE j.concurrency_key IS NULL OR j.concurrency_key = ANY (locked)
    ), judged AS MATERIALIZED (
        SELECT d.name, d.nth, d.place, d.concurrency_key,
               d.concurrency_key IS NULL OR d.running + d.rank <= d.concurrency_limit AS has_room,
               CASE WHEN d.concurrency_key IS NOT NULL THEN free_slot(d.slots, d.rank) END AS slot
        FROM dealt AS d
    )
    SELECT array_agg(j.place ORDER BY j.nth) FILTER (WHERE j.has_room),
           array_agg(j.slot ORDER BY j.nth) FILTER (WHERE j.has_room),
           array_agg(j.name ORDER BY j.nth) FILTER (WHERE j.has_room),
           array_agg(j.place) FILTER (WHERE NOT j.has_room)
    INTO places, slots, used, full_places
    FROM judged AS j;
    UPDATE jobs AS j SET state = 'blocked', rate_parked_at = NULL, run_at = clock_timestamp()
    WHERE j.ctid = ANY (full_places);
    -- Back go the tokens that found no job; the line's next turn: its next token, or 50 ms when its waiters are of
    -- another queue or just locked, or NULL when it is empty.
    UPDATE rate_limits AS r SET
        tat = r.tat - make_interval(secs => (l.granted - l.used) / r.tokens_per_second),
        taken = r.taken - (l.granted - l.used),
        next_at = CASE
            WHEN l.used = l.granted THEN greatest(l.next_at, clock_timestamp())
            WHEN l.is_cut THEN clock_timestamp()
            WHEN EXISTS (
                SELECT FROM jobs AS j
                WHERE j.rate_key = r.name AND j.state = 'scheduled' AND j.rate_parked_at IS NOT NULL
                  AND j.ctid <> ALL (coalesce(places, '{}'))
            ) THEN clock_timestamp() + interval '50 ms'
        END
    FROM (
        SELECT l.name, l.granted, l.next_at, cardinality(ids) >= rate_deal.want AS is_cut,
               (SELECT count(*)::integer FROM unnest(used) AS u (name) WHERE u.name = l.name) AS used
        FROM unnest(lines, grants, nexts) AS l (name, granted, next_at)
    ) AS l
    WHERE r.name = l.name;
    RETURN QUERY SELECT d.place, d.slot FROM unnest(places, slots) AS d (place, slot);
END $$;

-- The limit of a whole queue: pay for up to `want` starts before looking for jobs, so that none of them is written
-- for waiting. Waits for other claims of this queue (and of nobody else) to have paid.
CREATE OR REPLACE FUNCTION {{schema}}.rate_enter(queue text, want integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    PERFORM FROM rate_limits AS r WHERE r.name = 'queue:' || rate_enter.queue FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN rate_enter.want;
    END IF;
    RETURN (
        SELECT t.granted FROM rate_take(ARRAY['queue:' || rate_enter.queue], ARRAY[rate_enter.want], true) AS t
    );
END $$;

-- Give back what found no job, and say when the next token comes if it was the limit that ended the claim.
CREATE OR REPLACE FUNCTION {{schema}}.rate_leave(queue text, wanted integer, granted integer, used integer) RETURNS void
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
    UPDATE rate_limits AS r SET
        tat = r.tat - make_interval(secs => (rate_leave.granted - rate_leave.used) / r.tokens_per_second),
        taken = r.taken - (rate_leave.granted - rate_leave.used),
        next_at = CASE WHEN rate_leave.used = rate_leave.granted AND rate_leave.granted < rate_leave.wanted
            THEN r.tat - make_interval(secs => (r.burst - 1) / r.tokens_per_second) END
    WHERE r.name = 'queue:' || rate_leave.queue
$$;

-- Remove a limit, or mend a line whose limit somebody deleted: call until it returns 0.
CREATE OR REPLACE FUNCTION {{schema}}.rate_dissolve(name text, max_jobs integer DEFAULT 1000) RETURNS bigint
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
    DELETE FROM rate_limits AS r WHERE r.name = rate_dissolve.name;
    WITH line AS (
        SELECT j.id FROM jobs AS j
        WHERE j.rate_key = rate_dissolve.name AND j.state = 'scheduled' AND j.rate_parked_at IS NOT NULL
        ORDER BY j.priority, j.id LIMIT rate_dissolve.max_jobs FOR NO KEY UPDATE SKIP LOCKED
    ), freed AS (
        UPDATE jobs AS j SET state = 'ready', run_at = clock_timestamp(), rate_parked_at = NULL
        FROM line WHERE j.id = line.id
        RETURNING j.queue
    ), rung AS (
        SELECT ring(array_agg(f.queue)) FROM freed AS f
    )
    SELECT count(*) FROM freed, rung
$$;

-- For a worker of these queues: until when it may sleep before a token comes (NULL: no token is waited for).
CREATE OR REPLACE FUNCTION {{schema}}.rate_next_at(queues text[] DEFAULT '{}') RETURNS timestamptz
LANGUAGE sql STABLE
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT min(r.next_at) FROM rate_limits AS r
    WHERE r.next_at IS NOT NULL
      AND (left(r.name, 6) <> 'queue:' OR substr(r.name, 7) = ANY (rate_next_at.queues))
$$;
