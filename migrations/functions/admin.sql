-- What people and maintenance do to jobs.

-- Cancel: a waiting job ends now, a running one is asked to stop (its next heartbeat says cancel, and
-- it never runs again). Waits for row locks, in order of id. Ids not returned were not live. Call it by
-- itself or last in a transaction: until its end, completions of these jobs and keys wait for it.
CREATE OR REPLACE FUNCTION {{schema}}.cancel(job_ids bigint[], reason text DEFAULT 'cancelled')
RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    running tid[];
    running_ids bigint[];
    verdicts verdict[];
BEGIN
    -- Only a ready job may be the one that the blocked ones of its key rely on.
    SELECT array_agg(h.place) FILTER (WHERE h.state = 'running'),
           array_agg(h.id) FILTER (WHERE h.state = 'running'),
           array_agg(ROW(
               h.place, h.id, 'cancelled', NULL, coalesce(cancel.reason, 'cancelled'), h.attempt, h.crashes,
               CASE WHEN h.state = 'ready' THEN h.concurrency_key END, h.task, h.queue
           )::verdict) FILTER (WHERE h.state <> 'running')
    INTO running, running_ids, verdicts
    FROM (
        SELECT j.id, j.place, j.state, j.attempt, j.crashes, j.concurrency_key, j.task, j.queue
        FROM (SELECT DISTINCT u.id FROM unnest(cancel.job_ids) AS u (id) ORDER BY u.id) AS g
        CROSS JOIN LATERAL (
            SELECT j.ctid AS place, j.id, j.state, j.attempt, j.crashes::integer AS crashes, j.concurrency_key, j.task,
                   j.queue
            FROM jobs AS j
            WHERE j.id = g.id
            FOR NO KEY UPDATE
        ) AS j
    ) AS h;
    UPDATE jobs AS j SET cancel_requested_at = coalesce(j.cancel_requested_at, clock_timestamp())
    WHERE j.ctid = ANY (running);
    PERFORM settle(verdicts);
    PERFORM audit_jobs(
        'jobs.cancel', ARRAY(SELECT v.job_id FROM unnest(verdicts) AS v) || coalesce(running_ids, '{}'),
        jsonb_build_object('reason', cancel.reason, 'asked_to_stop', nullif(cardinality(running_ids), 0))
    );
    RETURN QUERY SELECT r.id, 'requested' FROM unnest(running_ids) AS r (id);
    RETURN QUERY SELECT v.job_id, 'cancelled' FROM unnest(verdicts) AS v;
END $$;

-- Make due jobs ready, and ring for them. Safe to run at once in every worker.
CREATE OR REPLACE FUNCTION {{schema}}.promote(max_jobs integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    places tid[];
    queues text[];
BEGIN
    SELECT array_agg(d.place) INTO places
    FROM (
        SELECT j.ctid AS place FROM jobs AS j
        WHERE j.state = 'scheduled' AND j.run_at <= statement_timestamp()
        ORDER BY j.run_at, j.id
        LIMIT promote.max_jobs
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS d;
    IF places IS NULL THEN
        RETURN 0;
    END IF;
    WITH due AS (
        UPDATE jobs AS j SET state = 'ready', rate_parked_at = NULL WHERE j.ctid = ANY (places) RETURNING j.queue
    )
    SELECT array_agg(d.queue) INTO queues FROM due AS d;
    PERFORM ring(queues);
    RETURN cardinality(queues);
END $$;

-- Put dead jobs back, ready at once, history kept, with extra_attempts more attempts and a clean crash
-- count. A unique_key that a live job holds by now is a row's outcome, not an error of the call.
CREATE OR REPLACE FUNCTION {{schema}}.redrive(job_ids bigint[], extra_attempts integer DEFAULT 5)
RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off
AS $$
DECLARE
    ids bigint[];
    back bigint[];
BEGIN
    SELECT array_agg(h.id) INTO ids
    FROM (
        SELECT d.id FROM dead_jobs AS d WHERE d.id = ANY (redrive.job_ids) ORDER BY d.id FOR UPDATE
    ) AS h;
    WITH returned AS (
        INSERT INTO jobs AS j (id, run_at, created_at, attempt, max_attempts, timeout_seconds, priority, crashes,
                               concurrency_limit, is_unique_until_start, state, queue, task, concurrency_key, unique_key,
                               idempotency_key, rate_key, args, headers, errors)
        OVERRIDING SYSTEM VALUE
        SELECT d.id, clock_timestamp(), d.created_at, d.attempt, least(d.attempt + redrive.extra_attempts, 100000),
               d.timeout_seconds, d.priority, 0, d.concurrency_limit, false, 'ready', d.queue, d.task, d.concurrency_key,
               d.unique_key, d.idempotency_key, d.rate_key, d.args, d.headers, d.errors
        FROM dead_jobs AS d
        WHERE d.id = ANY (ids)
        ORDER BY d.unique_key, d.id
        ON CONFLICT DO NOTHING
        RETURNING j.id
    )
    SELECT array_agg(r.id) INTO back FROM returned AS r;
    DELETE FROM dead_jobs AS d WHERE d.id = ANY (back);
    PERFORM audit_jobs('jobs.redrive', back, jsonb_build_object('extra_attempts', redrive.extra_attempts));
    RETURN QUERY
    SELECT g.id, CASE WHEN g.id = ANY (back) THEN 'ready'
                      WHEN g.id = ANY (ids) THEN 'unique_key_taken'
                      ELSE 'not_found' END
    FROM (SELECT DISTINCT u.id FROM unnest(redrive.job_ids) AS u (id)) AS g
    ORDER BY g.id;
END $$;

-- Every queue that anybody knows: it has jobs, settings, a task or a worker.
CREATE OR REPLACE FUNCTION {{schema}}.known_queues() RETURNS SETOF text
LANGUAGE sql STABLE
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT j.queue FROM jobs AS j
    UNION SELECT coalesce(t.queue, 'default') FROM tasks AS t
    UNION SELECT q.name FROM queues AS q
    UNION SELECT u.queue FROM workers AS w CROSS JOIN LATERAL unnest(w.queues) AS u (queue)
    ORDER BY 1
$$;

-- Start nothing more in these queues, until that instant, for so long by our clock, or until somebody resumes; what
-- runs, runs on. An end that does not lie ahead by our clock is refused. NULL: all that are known, but a pause that is
-- in force keeps its end and its reason. Rings, so that whoever sleeps learns when it ends. Gives the queues that it
-- paused.
CREATE OR REPLACE FUNCTION {{schema}}.pause_queues(
    names text[] DEFAULT NULL, reason text DEFAULT NULL, seconds double precision DEFAULT NULL,
    until timestamptz DEFAULT NULL
) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    chosen text[] := ARRAY(
        SELECT DISTINCT n.name
        FROM unnest(coalesce(pause_queues.names, ARRAY(SELECT k.name FROM known_queues() AS k (name)))) AS n (name)
        ORDER BY 1
    );
    ends_at timestamptz := coalesce(
        pause_queues.until, clock_timestamp() + make_interval(secs => pause_queues.seconds)
    );
    paused text[];
BEGIN
    IF ends_at <= clock_timestamp() THEN
        RAISE EXCEPTION 'a pause % would be over already; it is % UTC by the clock of the database',
            coalesce('until ' || to_char(pause_queues.until AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'),
                     'of ' || pause_queues.seconds || ' s'),
            to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH held AS (
        INSERT INTO queues AS q (name, is_paused, paused_until, reason)
        SELECT c.name, true, ends_at, pause_queues.reason
        FROM unnest(chosen) AS c (name) ORDER BY 1
        ON CONFLICT (name) DO UPDATE SET
            is_paused = true, paused_until = excluded.paused_until, reason = excluded.reason,
            updated_at = clock_timestamp()
        WHERE pause_queues.names IS NOT NULL OR NOT q.is_paused OR q.paused_until <= clock_timestamp()
        RETURNING q.name
    )
    SELECT array_agg(h.name) INTO paused FROM held AS h;
    PERFORM ring(paused);
    RETURN QUERY SELECT p.name FROM unnest(paused) AS p (name);
END $$;

-- Go on in these queues (NULL: all whose pause is in force), with a reason only in those that are paused for it ('':
-- without one), and wake their workers. With at most so many running at a time if that is said; of all of them only
-- those get the limit that have none. Gives the queues.
CREATE OR REPLACE FUNCTION {{schema}}.resume_queues(
    names text[] DEFAULT NULL, max_running integer DEFAULT NULL, reason text DEFAULT NULL
) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    paused text[] := ARRAY(
        SELECT q.name FROM queues AS q
        WHERE q.is_paused AND (q.paused_until > clock_timestamp()) IS NOT FALSE
          AND (resume_queues.reason IS NULL OR coalesce(q.reason, '') = resume_queues.reason)
    );
    chosen text[] := ARRAY(
        SELECT DISTINCT n.name FROM unnest(coalesce(resume_queues.names, paused)) AS n (name)
        WHERE resume_queues.reason IS NULL OR n.name = ANY (paused)
        ORDER BY 1
    );
    resumed text[];
BEGIN
    WITH freed AS (
        INSERT INTO queues AS q (name, max_running)
        SELECT c.name, resume_queues.max_running FROM unnest(chosen) AS c (name) ORDER BY 1
        ON CONFLICT (name) DO UPDATE SET
            is_paused = false, paused_until = NULL, reason = NULL,
            max_running = CASE WHEN resume_queues.names IS NULL THEN coalesce(q.max_running, excluded.max_running)
                               ELSE coalesce(excluded.max_running, q.max_running) END,
            updated_at = clock_timestamp()
        -- Again, on the newest row: it may have been paused for another reason meanwhile.
        WHERE resume_queues.reason IS NULL OR coalesce(q.reason, '') = resume_queues.reason
        RETURNING q.name
    )
    SELECT array_agg(f.name) INTO resumed FROM freed AS f;
    PERFORM ring(resumed);
    RETURN QUERY SELECT r.name FROM unnest(resumed) AS r (name);
END $$;

-- Let at most so many jobs of a queue run at a time, over all workers; 0: none is started, NULL: no limit. What runs
-- beyond it, runs on.
CREATE OR REPLACE FUNCTION {{schema}}.limit_queue(name text, max_running integer, reason text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO queues AS q (name, max_running, reason)
    VALUES (limit_queue.name, limit_queue.max_running, limit_queue.reason)
    ON CONFLICT (name) DO UPDATE SET
        max_running = excluded.max_running,
        reason = coalesce(excluded.reason, CASE WHEN q.is_paused OR excluded.max_running IS NOT NULL THEN q.reason END),
        updated_at = clock_timestamp();
    PERFORM ring(ARRAY[limit_queue.name]);
END $$;
