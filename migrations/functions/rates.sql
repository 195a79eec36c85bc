-- Rate limits: GCRA, paid in the transaction of the claim, by the database's clock. Over-limit jobs wait in a
-- line that no claim scans; the limit's row says when its next token comes. Names: 'queue:Q', 'task:T',
-- jobs.rate_key; or a pattern, 'api:*': each key that it meets gets a row of its own.
--
-- A claim looks first (rate_look locks the limit's row and tells how many may start), and pays last (rate_pay),
-- when the starts have been written down. So by started_at no stretch of time sees more than the burst and what
-- the rate gives in it. Paid where it looked, the limit of 100/s with burst 10 was seen to give 112 in a second.
--
-- A slot reserved in the future, when a job is found over the limit, was tried and is worse: it promises
-- that workers are free then, that nothing is cancelled and that the rate stays (293 starts in one second
-- at a limit of 100/s after workers were busy for 2 s; half the rate after half was cancelled).

-- The pattern that a name without a limit of its own meets: the longest.
CREATE OR REPLACE FUNCTION {{schema}}.rate_pattern(name text) RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT p.name FROM rate_limits AS p
    WHERE p.pattern IS NULL AND right(p.name, 1) = '*' AND left(p.name, 6) <> 'queue:'
      AND starts_with(rate_pattern.name, left(p.name, -1))
    ORDER BY length(p.name) DESC LIMIT 1
$$;

-- Make the rows of names that meet a pattern and have none yet. Never waits: one that another claim is just
-- making is not there for us, nor is a pattern that somebody is changing or removing. Whoever does that waits for us,
-- and sees what we have made.
CREATE OR REPLACE FUNCTION {{schema}}.rate_make(names text[]) RETURNS void
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    INSERT INTO rate_limits (name, tokens_per_second, burst, pattern)
    SELECT n.name, p.tokens_per_second, p.burst, p.name
    FROM (
        SELECT m.name, m.pattern
        FROM (
            SELECT DISTINCT u.name, rate_pattern(u.name) AS pattern FROM unnest(rate_make.names) AS u (name)
            WHERE NOT EXISTS (SELECT FROM rate_limits AS r WHERE r.name = u.name)
            OFFSET 0
        ) AS m
        WHERE m.pattern IS NOT NULL AND pg_try_advisory_xact_lock(hashtextextended('{{schema}}.rate:' || m.name, 0))
        OFFSET 0
    ) AS n
    CROSS JOIN LATERAL (
        SELECT r.name, r.tokens_per_second, r.burst FROM rate_limits AS r
        WHERE r.name = n.pattern
        FOR KEY SHARE SKIP LOCKED
    ) AS p
    ON CONFLICT DO NOTHING
$$;

-- The tokens that a bucket holds now.
CREATE OR REPLACE FUNCTION {{schema}}.rate_tokens(
    tokens_per_second double precision, burst integer, tat timestamptz
) RETURNS integer
LANGUAGE sql VOLATILE
RETURN greatest(0, floor(
    rate_tokens.burst + 1e-6 - rate_tokens.tokens_per_second * least(
        greatest(extract(epoch FROM rate_tokens.tat - clock_timestamp())::double precision, 0),
        rate_tokens.burst / rate_tokens.tokens_per_second
    )
)::integer);

-- When a bucket has its next token.
CREATE OR REPLACE FUNCTION {{schema}}.rate_token_at(
    tokens_per_second double precision, burst integer, tat timestamptz
) RETURNS timestamptz
LANGUAGE sql VOLATILE
RETURN greatest(clock_timestamp(), least(
    rate_token_at.tat - make_interval(secs => (rate_token_at.burst - 1) / rate_token_at.tokens_per_second),
    clock_timestamp() + make_interval(secs => 1 / rate_token_at.tokens_per_second)
));

-- Lock the rows of these limits and tell how many of the wanted may start now, besides what was spent in this
-- call. No such limit: all. granted NULL: another claimer holds the row, leave these jobs alone (never waits: a
-- limiter must not queue up the claims of other tasks). 0 while a line exists: newcomers join it (rate_park), they
-- never overtake. Exact: the lock is held to COMMIT, so a claim that rolls back pays nothing; look, park, deal and
-- pay all happen under it.
CREATE OR REPLACE FUNCTION {{schema}}.rate_look(names text[], wants integer[], spent text[] DEFAULT '{}')
RETURNS TABLE (name text, granted integer)
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    WITH asked AS MATERIALIZED (
        SELECT a.name, a.want FROM unnest(rate_look.names, rate_look.wants) AS a (name, want)
    ), held AS MATERIALIZED (
        SELECT r.name, r.tokens_per_second, r.burst, r.tat, r.next_at, a.want
        FROM asked AS a
        JOIN rate_limits AS r ON r.name = a.name
        FOR NO KEY UPDATE OF r SKIP LOCKED
    ), verdict AS MATERIALIZED (        -- the clock is read after the lock
        SELECT h.name, CASE WHEN h.next_at IS NULL THEN greatest(0, least(
                   h.want,
                   rate_tokens(h.tokens_per_second, h.burst, h.tat)
                   - (SELECT count(*)::integer FROM unnest(rate_look.spent) AS s (name) WHERE s.name = h.name)
               )) ELSE 0 END AS granted
        FROM held AS h
    )
    SELECT a.name,
           CASE WHEN v.name IS NOT NULL THEN v.granted
                WHEN NOT EXISTS (SELECT FROM rate_limits AS r WHERE r.name = a.name) AND rate_pattern(a.name) IS NULL
                    THEN a.want END
    FROM asked AS a
    LEFT JOIN verdict AS v ON v.name = a.name
$$;

-- Pay for starts, a limit's name for each, whose rows this transaction has locked; after the starts.
CREATE OR REPLACE FUNCTION {{schema}}.rate_pay(starts text[]) RETURNS void
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    WITH due AS MATERIALIZED (
        SELECT s.name, count(*) AS count FROM unnest(rate_pay.starts) AS s (name) GROUP BY s.name
    ), paid AS MATERIALIZED (
        SELECT r.name, d.count, r.tokens_per_second, r.burst, r.next_at,
               greatest(clock_timestamp(), least(
                   r.tat, clock_timestamp() + make_interval(secs => r.burst / r.tokens_per_second)
               )) + make_interval(secs => d.count / r.tokens_per_second) AS tat
        FROM due AS d
        JOIN rate_limits AS r ON r.name = d.name
    )
    UPDATE rate_limits AS r SET
        tat = p.tat, taken = r.taken + p.count,
        next_at = CASE WHEN p.next_at IS NOT NULL
            THEN greatest(p.next_at, rate_token_at(p.tokens_per_second, p.burst, p.tat)) END
    FROM paid AS p
    WHERE r.name = p.name
$$;

-- Put over-limit jobs, whose rows the caller has locked, in line: names[i] is the limit of job_ids[i]. One write
-- per job; run_at is only a safety net (promote makes it ready, the claim looks again). Only for limits of which
-- rate_look granted a number in this transaction (= holds the lock): parked without it, a job is stranded when
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
    UPDATE rate_limits AS r SET next_at = rate_token_at(r.tokens_per_second, r.burst, r.tat)
    FROM (SELECT DISTINCT n.name FROM unnest(rate_park.names) AS n (name)) AS p
    WHERE r.name = p.name AND r.next_at IS NULL
$$;

-- Of candidates that the caller has locked, best first: the places of those that may start now, at most `room`, and
-- what is to be paid for them; the others of a limit that said no are put in line and counted. Those whose limit
-- another claimer holds are neither. Jobs without a limit always may.
CREATE OR REPLACE FUNCTION {{schema}}.rate_admit(candidates tid[], room integer, spent text[])
RETURNS TABLE (places tid[], starts text[], parked integer)
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
    has_patterns boolean := EXISTS (
        SELECT FROM rate_limits AS p
        WHERE p.pattern IS NULL AND right(p.name, 1) = '*' AND left(p.name, 6) <> 'queue:'
    );
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
    WHERE EXISTS (SELECT FROM rate_limits AS r WHERE r.name = w.name)
       OR has_patterns AND rate_pattern(w.name) IS NOT NULL;
    IF names IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    IF has_patterns THEN
        PERFORM rate_make(names);
    END IF;
    SELECT array_agg(t.granted ORDER BY n.nth) INTO grants
    FROM unnest(names) WITH ORDINALITY AS n (name, nth)
    JOIN rate_look(names, wants, rate_admit.spent) AS t ON t.name = n.name;
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
    )
    SELECT (SELECT array_agg(g.place ORDER BY g.nth) FROM going AS g),
           (SELECT array_agg(g.name) FROM going AS g WHERE g.name IS NOT NULL),
           (SELECT array_agg(o.id ORDER BY o.nth) FROM over AS o),
           (SELECT array_agg(o.name ORDER BY o.nth) FROM over AS o)
    INTO places, starts, over_ids, over_names;
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

-- Up to `want` jobs of the queue whose turn has come, best priority first, then oldest: locked, with the name of the
-- limit that each has to pay, and with a free slot of their concurrency key; the caller marks them running in this
-- transaction. A job whose key is full is blocked instead, and pays when it is ready again. Looks only at due lines
-- in which this queue has jobs: another queue's are its own workers' to serve.
CREATE OR REPLACE FUNCTION {{schema}}.rate_deal(queue text, want integer)
RETURNS TABLE (place tid, slot integer, name text)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    lines text[];
    grants integer[];
    ids bigint[];
    owners text[];
    keys text[];
    locked text[];
    places tid[];
    slots integer[];
    full_places tid[];
    used text[];
BEGIN
    WITH due AS MATERIALIZED (
        SELECT r.name, r.tokens_per_second, r.burst, r.tat, r.next_at
        FROM rate_limits AS r
        WHERE r.next_at <= statement_timestamp() AND left(r.name, 6) <> 'queue:'
          AND (
              EXISTS (
                  SELECT FROM jobs AS j
                  WHERE j.rate_key = r.name AND j.queue = rate_deal.queue AND j.state = 'scheduled'
                    AND j.rate_parked_at IS NOT NULL
              )
              OR NOT EXISTS (
                  SELECT FROM jobs AS j
                  WHERE j.rate_key = r.name AND j.state = 'scheduled' AND j.rate_parked_at IS NOT NULL
              )
          )
        ORDER BY r.next_at LIMIT least(greatest(rate_deal.want, 1), 100) FOR NO KEY UPDATE SKIP LOCKED
    )
    SELECT array_agg(d.name ORDER BY d.next_at),
           array_agg(least(rate_tokens(d.tokens_per_second, d.burst, d.tat), rate_deal.want) ORDER BY d.next_at)
    INTO lines, grants
    FROM due AS d;
    IF lines IS NULL THEN
        RETURN;
    END IF;
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
    -- The line's next turn, if its tokens are not all used: 50 ms when its waiters here are just locked or wait for
    -- their keys' locks; NULL when it is empty. All used: rate_pay will tell; none there: the next token.
    UPDATE rate_limits AS r SET next_at = CASE
        WHEN l.granted = 0 THEN rate_token_at(r.tokens_per_second, r.burst, r.tat)
        WHEN l.has_waiters THEN clock_timestamp() + interval '50 ms'
    END
    FROM (
        SELECT l.name, l.granted, EXISTS (
                   SELECT FROM jobs AS j
                   WHERE j.rate_key = l.name AND j.queue = rate_deal.queue AND j.state = 'scheduled'
                     AND j.rate_parked_at IS NOT NULL AND j.ctid <> ALL (coalesce(places, '{}'))
               ) AS has_waiters, EXISTS (
                   SELECT FROM jobs AS j
                   WHERE j.rate_key = l.name AND j.state = 'scheduled' AND j.rate_parked_at IS NOT NULL
                     AND j.ctid <> ALL (coalesce(places, '{}'))
               ) AS has_others
        FROM unnest(lines, grants) AS l (name, granted)
        WHERE l.granted = 0 OR (
            cardinality(ids) < rate_deal.want IS NOT FALSE
            AND l.granted > (SELECT count(*) FROM unnest(used) AS u (name) WHERE u.name = l.name)
        )
    ) AS l
    WHERE r.name = l.name AND (l.granted = 0 OR l.has_waiters OR NOT l.has_others);
    RETURN QUERY SELECT d.place, d.slot, d.name FROM unnest(places, slots, used) AS d (place, slot, name);
END $$;

-- The limit of a whole queue: how many of the wanted may start, looked up before looking for jobs, so that none of
-- them is written for waiting. Waits for other claims of this queue (and of nobody else). NULL: it has none.
CREATE OR REPLACE FUNCTION {{schema}}.rate_enter(queue text, want integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    entry rate_limits;
BEGIN
    SELECT r.* INTO entry FROM rate_limits AS r WHERE r.name = 'queue:' || rate_enter.queue FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    RETURN least(rate_enter.want, rate_tokens(entry.tokens_per_second, entry.burst, entry.tat));
END $$;

-- Pay for what was started, and say when the next token comes if it was the limit that ended the claim.
CREATE OR REPLACE FUNCTION {{schema}}.rate_leave(queue text, wanted integer, granted integer, used integer) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    own text := 'queue:' || rate_leave.queue;
BEGIN
    IF rate_leave.used > 0 THEN
        PERFORM rate_pay(array_fill(own, ARRAY[rate_leave.used]));
    END IF;
    UPDATE rate_limits AS r SET next_at = n.next_at
    FROM (
        SELECT CASE WHEN rate_leave.used = rate_leave.granted AND rate_leave.granted < rate_leave.wanted
            THEN rate_token_at(r.tokens_per_second, r.burst, r.tat) END AS next_at
        FROM rate_limits AS r WHERE r.name = own
    ) AS n
    WHERE r.name = own AND r.next_at IS DISTINCT FROM n.next_at;
END $$;

-- Free the line of a limit that is removed, or of one that somebody has deleted: call until it returns 0.
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

-- Remove a limit, with all that a pattern has made, and free the lines. NULL: there is none of this name; else how
-- many jobs had waited.
CREATE OR REPLACE FUNCTION {{schema}}.rate_remove(name text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    line text;
    freed bigint;
    total bigint := 0;
BEGIN
    PERFORM FROM rate_limits AS r WHERE r.name = rate_remove.name FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    FOR line IN
        SELECT r.name FROM rate_limits AS r
        WHERE r.name = rate_remove.name OR r.pattern = rate_remove.name
        ORDER BY r.pattern NULLS FIRST, r.name
    LOOP
        LOOP
            freed := rate_dissolve(line);
            EXIT WHEN freed = 0;
            total := total + freed;
        END LOOP;
    END LOOP;
    RETURN total;
END $$;

-- For a worker of these queues (NULL: all): until when it may sleep before a token comes (NULL: no token is waited
-- for). It comes a little late on purpose, at most a quarter of a burst: then it can take several at once.
CREATE OR REPLACE FUNCTION {{schema}}.rate_next_at(queues text[] DEFAULT NULL) RETURNS timestamptz
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
    SELECT min(n.next_at + make_interval(secs => least(0.02, (n.burst - 1) / n.tokens_per_second / 4)))
    FROM (
        (
            SELECT r.next_at, r.burst, r.tokens_per_second FROM rate_limits AS r
            WHERE r.next_at IS NOT NULL AND left(r.name, 6) = 'queue:'
              AND (rate_next_at.queues IS NULL OR substr(r.name, 7) = ANY (rate_next_at.queues))
        )
        UNION ALL
        (
            SELECT r.next_at, r.burst, r.tokens_per_second FROM rate_limits AS r
            WHERE r.next_at IS NOT NULL AND left(r.name, 6) <> 'queue:'
              AND (rate_next_at.queues IS NULL OR EXISTS (
                  SELECT FROM unnest(rate_next_at.queues) AS q (queue)
                  CROSS JOIN LATERAL (
                      SELECT FROM jobs AS j
                      WHERE j.rate_key = r.name AND j.queue = q.queue AND j.state = 'scheduled'
                        AND j.rate_parked_at IS NOT NULL
                      LIMIT 1
                  ) AS j
              ))
            ORDER BY r.next_at LIMIT 1
        )
    ) AS n
$$;

-- Another rate holds at once: what is in the bucket stays in it, and the line is looked at again. What a pattern
-- has made follows it.
CREATE OR REPLACE FUNCTION {{schema}}.rate_change() RETURNS trigger
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    now timestamptz := clock_timestamp();
BEGIN
    NEW.tat := now + greatest(OLD.tat - now, interval '0') * (OLD.tokens_per_second / NEW.tokens_per_second);
    NEW.next_at := CASE WHEN OLD.next_at IS NOT NULL THEN now END;
    -- Against a claim that is making rows from it: see rate_make.
    PERFORM FROM rate_limits AS r WHERE r.name = NEW.name AND right(r.name, 1) = '*' FOR UPDATE;
    UPDATE rate_limits AS r SET tokens_per_second = NEW.tokens_per_second, burst = NEW.burst
    WHERE r.pattern = NEW.name;
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER rate_limits_change BEFORE UPDATE OF tokens_per_second, burst ON {{schema}}.rate_limits
FOR EACH ROW
WHEN ((OLD.tokens_per_second, OLD.burst) IS DISTINCT FROM (NEW.tokens_per_second, NEW.burst))
EXECUTE FUNCTION {{schema}}.rate_change();

-- Make or change a limit by hand: from now on it is an operator's, and no declaration in code changes it.
CREATE OR REPLACE FUNCTION {{schema}}.rate_set(name text, tokens_per_second double precision, burst integer DEFAULT 1)
RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    -- A claim may be making this row from a pattern.
    PERFORM pg_advisory_xact_lock(hashtextextended('{{schema}}.rate:' || rate_set.name, 0));
    INSERT INTO rate_limits AS r (name, tokens_per_second, burst)
    VALUES (rate_set.name, rate_set.tokens_per_second, rate_set.burst)
    ON CONFLICT (name) DO UPDATE SET
        tokens_per_second = excluded.tokens_per_second, burst = excluded.burst, is_declared = false, pattern = NULL;
END $$;

-- What a worker's code says of its limits: a JSON array of objects with name, tokens_per_second and burst;
-- without a rate, that it has none of this name any more. What an operator made is left alone.
CREATE OR REPLACE FUNCTION {{schema}}.rate_declare(definitions jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('{{schema}}.rates', 0));
    INSERT INTO rate_limits AS r (name, tokens_per_second, burst, is_declared)
    SELECT d.name, d.tokens_per_second, d.burst, true
    FROM jsonb_to_recordset(rate_declare.definitions) AS d (name text, tokens_per_second double precision, burst integer)
    WHERE d.tokens_per_second IS NOT NULL
    ORDER BY d.name
    ON CONFLICT (name) DO UPDATE SET
        tokens_per_second = excluded.tokens_per_second, burst = excluded.burst, is_declared = true, pattern = NULL
    WHERE (r.is_declared OR r.pattern IS NOT NULL)
      AND (r.tokens_per_second, r.burst, r.is_declared)
          IS DISTINCT FROM (excluded.tokens_per_second, excluded.burst, excluded.is_declared);
    PERFORM rate_remove(g.name)
    FROM (
        SELECT r.name FROM rate_limits AS r
        WHERE r.is_declared AND r.name IN (
            SELECT d.name
            FROM jsonb_to_recordset(rate_declare.definitions) AS d (name text, tokens_per_second double precision)
            WHERE d.tokens_per_second IS NULL
        )
        ORDER BY r.name
        OFFSET 0
    ) AS g;
END $$;

-- Now and then: bring back to earth what a clock that was set back has left far ahead, and forget the rows that
-- patterns made and nobody has used for a day: their buckets are full, a new one is as good. Gives how many those were.
CREATE OR REPLACE FUNCTION {{schema}}.rate_mend(max_rows integer DEFAULT 1000) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
    UPDATE rate_limits AS r SET
        tat = clock_timestamp() + make_interval(secs => r.burst / r.tokens_per_second),
        next_at = CASE WHEN r.next_at IS NOT NULL THEN clock_timestamp() END
    WHERE r.name IN (
        SELECT f.name FROM rate_limits AS f
        WHERE f.tat > clock_timestamp() + make_interval(secs => f.burst / f.tokens_per_second + 1)
        ORDER BY f.name LIMIT rate_mend.max_rows FOR NO KEY UPDATE SKIP LOCKED
    );
    WITH idle AS MATERIALIZED (
        SELECT r.name FROM rate_limits AS r
        WHERE r.pattern IS NOT NULL AND r.next_at IS NULL AND r.tat < clock_timestamp() - interval '1 day'
        ORDER BY r.name LIMIT rate_mend.max_rows FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM rate_limits AS r USING idle AS i WHERE r.name = i.name RETURNING r.name
    )
    SELECT count(*) FROM gone
$$;
