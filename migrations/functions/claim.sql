-- Claim: the heart.

-- Take up to max_jobs (at most 2000) due jobs of a queue, best first, under a new claim_token. The token is the
-- call's (one for each row costs 2 of 12 us): what identifies an attempt is the pair of job id and token.
--
-- Guarantee: never more running jobs of a concurrency_key than the claimed job's concurrency_limit, and of a
-- queue than its max_running, whichever queues, workers and batch sizes are at work; never more starts than a
-- rate limit allows. A job that is unique until its start gives its key up here.
-- after_*: start behind this place in the order (the last row with is_scanned of the call before)
-- instead of at the head, past the dead index entries that a held snapshot keeps there. Jobs
-- that became ready behind that place are met at the caller's next call without after_*. up_to_priority:
-- take none of a worse priority, whose dead entries would come next.
-- Documents and run_at come as text: one row that a client cannot decode must not take a batch down.
CREATE OR REPLACE FUNCTION {{schema}}.claim(
    queue text,
    worker_id uuid,
    max_jobs integer,
    lease_seconds double precision DEFAULT 10,
    after_priority integer DEFAULT NULL,
    after_run_at timestamptz DEFAULT NULL,
    after_id bigint DEFAULT NULL,
    up_to_priority integer DEFAULT NULL
) RETURNS TABLE (
    job_id bigint, token uuid, attempt integer, task text, args text, key text, priority smallint, run_at text,
    is_scanned boolean, timeout_seconds real, max_attempts integer, crashes smallint, idempotency_key text,
    headers text, age_seconds double precision
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan SET datestyle = 'ISO'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    new_token uuid := gen_random_uuid();
    room integer := least(claim.max_jobs, 2000);
    wanted integer;
    granted integer;
    room_before integer;
    width integer;
    last_priority integer := coalesce(claim.after_priority, -1);
    last_run_at timestamptz := coalesce(claim.after_run_at, '-infinity');
    last_id bigint := coalesce(claim.after_id, 0);
    last_of_all smallint := coalesce(claim.up_to_priority, 32767);
    is_paused boolean;
    max_running integer;
    has_rates boolean;
    scanned integer;
    taken integer;
    parked integer;
    free tid[];
    keyed tid[];
    keys text[];
    limits integer[];
    locked text[];
    locked_limits integer[];
    running integer[];
    is_cut boolean;
    places tid[];
    was_ready boolean[];
    slots integer[];
    chosen tid[];
    chosen_was_ready boolean[];
    chosen_slots integer[];
    admitted tid[];
    spent text[];
    parked_by_rate integer;
    is_refused boolean;
    now timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION '{{schema}}.claim must run in READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction';
    END IF;
    IF (claim.lease_seconds > 0 AND claim.lease_seconds <= 86400) IS NOT TRUE THEN
        RAISE EXCEPTION 'lease_seconds is %, not above 0 and at most 86400', claim.lease_seconds
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT q.is_paused AND coalesce(q.paused_until > clock_timestamp(), true), q.max_running,
           EXISTS (SELECT FROM rate_limits)
    INTO is_paused, max_running, has_rates
    FROM (SELECT) AS one
    LEFT JOIN queues AS q ON q.name = claim.queue;
    IF is_paused OR room < 1 THEN
        RETURN;
    END IF;
    IF max_running IS NOT NULL THEN
        -- One claim of such a queue at a time. The next statement's snapshot is younger than the lock, and
        -- others can only make the number smaller. The settings again, for we may have waited.
        PERFORM pg_advisory_xact_lock(hashtextextended('{{schema}}.queue:' || claim.queue, 0));
        SELECT q.is_paused AND coalesce(q.paused_until > clock_timestamp(), true),
               least(room, q.max_running - r.running)
        INTO is_paused, room
        FROM (SELECT count(*) AS running FROM jobs AS j WHERE j.state = 'running' AND j.queue = claim.queue) AS r
        LEFT JOIN queues AS q ON q.name = claim.queue;
        IF is_paused OR room < 1 THEN
            RETURN;
        END IF;
    END IF;
    IF has_rates THEN
        wanted := room;
        granted := rate_enter(claim.queue, wanted);
        room := coalesce(granted, room);
        IF room > 0 THEN
            -- Whose turn has come in the line before a limit goes first: behind a busy queue it would wait for ever.
            SELECT array_agg(d.place), array_agg(false), array_agg(d.slot), array_agg(d.name)
            INTO places, was_ready, slots, spent
            FROM rate_deal(claim.queue, room) AS d;
            room := room - coalesce(cardinality(places), 0);
        END IF;
    END IF;
    width := room;

    -- Usually one round. Another one only when candidates were parked and room is left: then wider, so
    -- that a crowd of one key at the head costs others little. Before the first, round 0 takes those of the lines: they
    -- must run when a round looks which slots of their keys are free.
    FOR round IN 0 .. 4 LOOP
        CONTINUE WHEN round = 0 AND places IS NULL;
        IF round > 0 THEN
            room_before := room;
            parked := 0;
            -- Bounded candidates in index order, locked.
            WITH candidate AS MATERIALIZED (
                SELECT j.ctid AS place, j.id, j.concurrency_key, j.concurrency_limit, j.priority, j.run_at
                FROM jobs AS j
                WHERE j.queue = claim.queue AND j.state = 'ready' AND j.run_at <= statement_timestamp()
                  AND (j.priority, j.run_at, j.id) > (last_priority::smallint, last_run_at, last_id)
                  AND j.priority <= last_of_all
                ORDER BY j.priority, j.run_at, j.id
                LIMIT width
                FOR NO KEY UPDATE SKIP LOCKED
            ), last AS (
                SELECT c.priority, c.run_at, c.id FROM candidate AS c
                ORDER BY c.priority DESC, c.run_at DESC, c.id DESC LIMIT 1
            )
            SELECT count(*),
                   array_agg(c.place) FILTER (WHERE c.concurrency_key IS NULL),
                   array_agg(c.place) FILTER (WHERE c.concurrency_key IS NOT NULL),
                   array_agg(c.concurrency_key::text) FILTER (WHERE c.concurrency_key IS NOT NULL),
                   array_agg(c.concurrency_limit::integer) FILTER (WHERE c.concurrency_key IS NOT NULL),
                   (SELECT l.priority FROM last AS l), (SELECT l.run_at FROM last AS l), (SELECT l.id FROM last AS l)
            INTO scanned, free, keyed, keys, limits, last_priority, last_run_at, last_id
            FROM candidate AS c;

            -- Jobs without a key: ours, no further question but that of their rate.
            is_cut := coalesce(cardinality(free) > room, false);
            IF free IS NOT NULL AND has_rates THEN
                SELECT a.places, spent || a.starts, a.parked INTO free, spent, parked
                FROM rate_admit(free, room, spent) AS a;
            END IF;
            IF free IS NOT NULL THEN
                free := free[1:room];
                now := clock_timestamp();
                -- The places are in the order of the claim, so the rows come in it too.
                RETURN QUERY
                UPDATE jobs AS j SET
                    state = 'running', attempt = j.attempt + 1, claim_token = new_token,
                    worker_id = claim.worker_id, lease_seconds = claim.lease_seconds, heartbeat_at = now,
                    started_at = now,
                    deadline_at = now + make_interval(secs => nullif(j.timeout_seconds, 0)),
                    unique_key = CASE WHEN NOT j.is_unique_until_start THEN j.unique_key END
                FROM unnest(free) AS f (place)
                WHERE j.ctid = f.place
                RETURNING j.id, new_token, j.attempt::integer, j.task::text, j.args::text, NULL::text,
                          j.priority::smallint,
                          j.run_at::text, true, j.timeout_seconds::real, j.max_attempts::integer, j.crashes::smallint,
                          j.idempotency_key::text, j.headers::text,
                          date_part('epoch', now - j.created_at);
                GET DIAGNOSTICS taken = ROW_COUNT;
                room := room - taken;
            END IF;

            -- Try the lock of each key once, best first; at most 200 a round, for the server's lock table.
            locked := NULL;
            IF keyed IS NOT NULL THEN
                WITH wanted AS MATERIALIZED (
                    SELECT c.key, max(c.allowed) AS allowed
                    FROM unnest(keys, limits) WITH ORDINALITY AS c (key, allowed, nth)
                    GROUP BY c.key ORDER BY min(c.nth) LIMIT 200
                )
                SELECT array_agg(w.key), array_agg(w.allowed) INTO locked, locked_limits
                FROM wanted AS w
                WHERE pg_try_advisory_xact_lock(key_lock(w.key));
            END IF;
            IF locked IS NOT NULL THEN
                chosen := NULL;
                is_refused := false;
                IF has_rates THEN
                    parked_by_rate := rate_join(keyed, locked);
                    parked := parked + parked_by_rate;
                    is_refused := parked_by_rate > 0;
                END IF;
                -- A new statement, hence a snapshot taken after the locks. Fill each key's free slots with its
                -- best waiting jobs of this queue, ready or blocked.
                IF room > 0 THEN
                    WITH held AS MATERIALIZED (
                        SELECT k.key, k.allowed, r.running, r.slots
                        FROM unnest(locked, locked_limits) AS k (key, allowed)
                        CROSS JOIN LATERAL (
                            SELECT count(*)::integer AS running, coalesce(array_agg(r.concurrency_slot), '{}') AS slots
                            FROM jobs AS r
                            WHERE r.concurrency_key = k.key AND r.concurrency_slot IS NOT NULL
                        ) AS r
                        WHERE r.running < k.allowed
                    ), waiting AS MATERIALIZED (
                        SELECT h.running, h.slots, w.id, w.priority, w.run_at, w.concurrency_limit, w.rank
                        FROM held AS h
                        CROSS JOIN LATERAL (
                            SELECT u.id, u.priority, u.run_at, u.concurrency_limit,
                                   row_number() OVER (ORDER BY u.priority, u.run_at, u.id)::integer AS rank
                            FROM (
                                SELECT j.id, j.priority, j.run_at, j.concurrency_limit
                                FROM jobs AS j
                                WHERE j.concurrency_key = h.key AND j.queue = claim.queue
                                  AND j.state IN ('ready', 'blocked') AND j.run_at <= statement_timestamp()
                                ORDER BY j.priority, j.run_at, j.id
                                LIMIT least(room, h.allowed - h.running)
                            ) AS u
                        ) AS w
                    ), chosen AS MATERIALIZED (
                        SELECT w.id, w.running, w.slots, w.rank
                        FROM waiting AS w
                        WHERE w.running + w.rank <= w.concurrency_limit
                        ORDER BY w.priority, w.run_at, w.id
                        LIMIT room
                    )
                    SELECT array_agg(o.place), array_agg(o.was_ready), array_agg(free_slot(c.slots, c.rank))
                    INTO chosen, chosen_was_ready, chosen_slots
                    FROM chosen AS c
                    CROSS JOIN LATERAL (
                        SELECT j.ctid AS place, j.state = 'ready' AS was_ready FROM jobs AS j
                        WHERE j.id = c.id AND j.state IN ('ready', 'blocked')
                        FOR NO KEY UPDATE SKIP LOCKED
                    ) AS o;
                END IF;
                IF has_rates AND chosen IS NOT NULL THEN
                    SELECT a.places, spent || a.starts, a.parked INTO admitted, spent, parked_by_rate
                    FROM rate_admit(chosen, room, spent) AS a;
                    parked := parked + parked_by_rate;
                    is_refused := is_refused OR coalesce(cardinality(admitted), 0) < cardinality(chosen);
                    SELECT array_agg(c.place), array_agg(c.was_ready), array_agg(c.slot)
                    INTO chosen, chosen_was_ready, chosen_slots
                    FROM unnest(chosen, chosen_was_ready, chosen_slots) AS c (place, was_ready, slot)
                    WHERE c.place = ANY (admitted);
                END IF;
                room := room - coalesce(cardinality(chosen), 0);
                places := chosen;
                was_ready := chosen_was_ready;
                slots := chosen_slots;
            END IF;
        END IF;

        IF places IS NOT NULL THEN
            RETURN QUERY
            WITH taken AS (
                UPDATE jobs AS j SET
                    state = 'running', attempt = j.attempt + 1, claim_token = new_token,
                    worker_id = claim.worker_id, lease_seconds = claim.lease_seconds, concurrency_slot = p.slot,
                    unique_key = CASE WHEN NOT j.is_unique_until_start THEN j.unique_key END,
                    -- In the line it was put off for an hour, as a safety net; given back it is due at once.
                    rate_parked_at = NULL, run_at = least(j.run_at, clock_timestamp()),
                    heartbeat_at = clock_timestamp(), started_at = clock_timestamp(),
                    deadline_at = clock_timestamp() + make_interval(secs => nullif(j.timeout_seconds, 0))
                FROM unnest(places, was_ready, slots) AS p (place, was_ready, slot)
                WHERE j.ctid = p.place
                RETURNING j.id, j.claim_token, j.attempt, j.task, j.args, j.concurrency_key, j.priority, j.run_at,
                          p.was_ready AND NOT is_cut
                              AND (j.priority, j.run_at, j.id) <= (last_priority::smallint, last_run_at, last_id)
                              AS is_scanned,
                          j.timeout_seconds, j.max_attempts, j.crashes, j.idempotency_key, j.headers, j.created_at
            )
            SELECT t.id, t.claim_token, t.attempt::integer, t.task::text, t.args::text, t.concurrency_key::text,
                   t.priority::smallint, t.run_at::text, t.is_scanned, t.timeout_seconds::real, t.max_attempts::integer,
                   t.crashes::smallint, t.idempotency_key::text, t.headers::text,
                   date_part('epoch', clock_timestamp() - t.created_at)
            FROM taken AS t
            ORDER BY t.priority, t.run_at, t.id;
            places := NULL;
            was_ready := NULL;
            slots := NULL;
        END IF;

        CONTINUE WHEN round = 0;
        IF locked IS NOT NULL THEN
            -- Park the candidates whose key is full now, while we hold its lock: they leave the claim path
            -- until a slot is free. Those we took have moved, so their old place matches nothing.
            SELECT array_agg((
                SELECT count(*)::integer FROM jobs AS r
                WHERE r.concurrency_key = k.key AND r.concurrency_slot IS NOT NULL
            ) ORDER BY k.nth) INTO running
            FROM unnest(locked) WITH ORDINALITY AS k (key, nth);
            UPDATE jobs AS j SET state = 'blocked'
            WHERE j.ctid = ANY (keyed)
              AND running[array_position(locked, j.concurrency_key)] >= j.concurrency_limit;
            GET DIAGNOSTICS taken = ROW_COUNT;
            parked := parked + taken;

            IF room < 1 OR is_refused THEN
                -- Our limit or a rate's, not the key's, may have ended the filling: leave a ready job as a
                -- guide for the next claimer. The locks are ours, so this waits for nobody.
                PERFORM unblock(array_agg(k.key), false)
                FROM unnest(locked, locked_limits, running) AS k (key, allowed, running)
                WHERE k.running < k.allowed
                HAVING count(*) > 0;
            END IF;
        END IF;
        -- With rates in play leave as soon as something was taken: while a call goes on parking, tokens overflow.
        EXIT WHEN room < 1 OR parked = 0 OR scanned < width OR (has_rates AND room < room_before);
        width := greatest(room, CASE WHEN has_rates THEN 200 ELSE 500 END);
    END LOOP;
    -- Last, so that no start is later than its payment.
    IF spent IS NOT NULL THEN
        PERFORM rate_pay(spent);
    END IF;
    IF granted IS NOT NULL THEN
        PERFORM rate_leave(claim.queue, wanted, granted, granted - room);
    END IF;
END $$;
