-- The end of an attempt. Every writer here says under which token it acts; what comes back is what was
-- still ours, and for the rest nothing was written.

-- Succeed: move the jobs we still hold to finished_jobs (or delete them, in a queue that keeps no
-- history). Gives back the ids that were ours. reasons say why a result was not kept. Waits for row
-- locks, in order of id. 23514 means that today's partition is missing: make_partitions(0), then again.
--
-- One pass, unlike the other writers: each row is found by its id and no ctid is carried from one statement to the
-- next, so a row that a heartbeat moved meanwhile is followed to its new place and asked again for its token.
-- IS TRUE keeps the planner from making a join of it, which might start from the wrong end. (Locking first and then
-- deleting by ctid costs 2.5 of 11 us a job.)
CREATE OR REPLACE FUNCTION {{schema}}.complete(
    job_ids bigint[], tokens uuid[], results jsonb[] DEFAULT NULL, reasons text[] DEFAULT NULL
) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off
SET enable_hashjoin = on
AS $$
DECLARE
    ids bigint[];
    keys text[];
    limited_queues text[];
BEGIN
    WITH done AS (
        DELETE FROM jobs AS j
        WHERE j.id = ANY (complete.job_ids)
          AND ((j.id, j.claim_token) IN (
              SELECT u.id, u.token FROM unnest(complete.job_ids, complete.tokens) AS u (id, token)
          )) IS TRUE
        RETURNING j.id, j.run_at, j.created_at, j.started_at, j.claim_token, j.worker_id, j.attempt, j.priority,
                  j.crashes, j.queue, j.task, j.concurrency_key, j.unique_key, j.idempotency_key, j.args, j.headers,
                  j.errors
    ), said AS (
        SELECT DISTINCT ON (u.id, u.token) u.id, u.token, u.result, u.reason
        FROM unnest(complete.job_ids, complete.tokens, complete.results, complete.reasons)
            AS u (id, token, result, reason)
        WHERE complete.results IS NOT NULL OR complete.reasons IS NOT NULL
        ORDER BY u.id, u.token
    ), kept AS (
        INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, claim_token, worker_id, attempt,
                                   priority, crashes, state, queue, task, concurrency_key, unique_key,
                                   idempotency_key, reason, args, headers, errors, result)
        SELECT d.id, clock_timestamp(), d.run_at, d.created_at, d.started_at, d.claim_token, d.worker_id, d.attempt,
               d.priority, d.crashes, 'succeeded', d.queue, d.task, d.concurrency_key, d.unique_key,
               d.idempotency_key, s.reason, d.args, d.headers, d.errors, s.result
        FROM done AS d
        LEFT JOIN said AS s ON s.id = d.id AND s.token = d.claim_token
        WHERE d.queue <> ALL (ARRAY(SELECT q.name FROM queues AS q WHERE q.retention_seconds = 0))
    )
    SELECT array_agg(d.id), array_agg(d.concurrency_key) FILTER (WHERE d.concurrency_key IS NOT NULL),
           array_agg(d.queue) FILTER (WHERE d.queue = ANY (
               ARRAY(SELECT q.name FROM queues AS q WHERE q.max_running IS NOT NULL)
           ))
    INTO ids, keys, limited_queues
    FROM done AS d;
    IF limited_queues IS NOT NULL THEN
        PERFORM ring(limited_queues);       -- one more may run there
    END IF;
    IF keys IS NOT NULL THEN
        PERFORM unblock(keys);
    END IF;
    RETURN QUERY SELECT u.id FROM unnest(ids) AS u (id);
END $$;

-- Lock the attempts we still hold, in order of id; nth is their place in the arrays. Inner part of
-- fail_many, release and crash, which decide and hand the rows to settle.
CREATE OR REPLACE FUNCTION {{schema}}.hold(job_ids bigint[], tokens uuid[])
RETURNS TABLE (
    nth integer, place tid, id bigint, attempt integer, max_attempts integer, crashes integer, concurrency_key text,
    idempotency_key text, task text, queue text, is_cancel_requested boolean
)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    SELECT g.nth::integer, j.place, j.id, j.attempt::integer, j.max_attempts::integer, j.crashes, j.concurrency_key::text,
           j.idempotency_key::text, j.task::text, j.queue::text, j.is_cancel_requested
    FROM (
        SELECT u.id, u.token, u.nth FROM unnest(hold.job_ids, hold.tokens) WITH ORDINALITY AS u (id, token, nth)
        ORDER BY u.id
    ) AS g
    CROSS JOIN LATERAL (
        SELECT j.ctid AS place, j.id, j.attempt, j.max_attempts, j.crashes::integer AS crashes, j.concurrency_key,
               j.idempotency_key, j.task, j.queue, j.cancel_requested_at IS NOT NULL AS is_cancel_requested
        FROM jobs AS j
        WHERE j.id = g.id AND j.claim_token = g.token AND j.state = 'running'
        FOR NO KEY UPDATE
    ) AS j;
END $$;

-- Bring locked rows to where they go next: scheduled, ready, dead, cancelled; then wake who waits for
-- their keys, or for one less to run in their queue. Inner part of fail_many, release, crash, reap and cancel.
CREATE OR REPLACE FUNCTION {{schema}}.settle(verdicts {{schema}}.verdict[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    queues text[];
    keys text[];
BEGIN
    IF settle.verdicts IS NULL THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM unnest(settle.verdicts) AS v WHERE v.state = 'cancelled') THEN
        -- After a week without a worker there is none for today.
        PERFORM make_partitions(0);
    END IF;
    WITH verdict AS MATERIALIZED (
        SELECT v.place, v.state, v.run_at, v.reason, v.attempt, v.crashes FROM unnest(settle.verdicts) AS v
    ), again AS (
        UPDATE jobs AS j SET
            state = v.state, run_at = coalesce(v.run_at, j.run_at), attempt = v.attempt, crashes = v.crashes,
            errors = append_error(j.errors, j.attempt, j.worker_id, v.reason),
            claim_token = NULL, worker_id = NULL, heartbeat_at = NULL, lease_seconds = NULL, deadline_at = NULL,
            started_at = NULL, concurrency_slot = NULL, cancel_requested_at = NULL
        FROM verdict AS v
        WHERE j.ctid = v.place AND v.state IN ('scheduled', 'ready')
    ), gone AS (
        DELETE FROM jobs AS j
        USING verdict AS v
        WHERE j.ctid = v.place AND v.state IN ('dead', 'cancelled')
        RETURNING j.id, j.run_at, j.created_at, j.started_at, j.claim_token, j.worker_id, v.attempt, j.max_attempts,
                  j.timeout_seconds, j.priority, v.crashes, j.concurrency_limit, j.queue, j.task, j.concurrency_key,
                  j.unique_key, j.idempotency_key, j.rate_key, j.args, j.headers, v.state, v.reason,
                  append_error(j.errors, j.attempt, j.worker_id, v.reason) AS errors
    ), dead AS (
        INSERT INTO dead_jobs (id, run_at, created_at, started_at, claim_token, worker_id, attempt, max_attempts,
                               timeout_seconds, priority, crashes, concurrency_limit, queue, task, concurrency_key,
                               unique_key, idempotency_key, rate_key, reason, args, headers, errors)
        SELECT g.id, g.run_at, g.created_at, g.started_at, g.claim_token, g.worker_id, g.attempt, g.max_attempts,
               g.timeout_seconds, g.priority, g.crashes, g.concurrency_limit, g.queue, g.task, g.concurrency_key,
               g.unique_key, g.idempotency_key, g.rate_key, coalesce(g.reason, 'unknown'), g.args, g.headers, g.errors
        FROM gone AS g
        WHERE g.state = 'dead'
    )
    INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, claim_token, worker_id, attempt, priority,
                               crashes, state, queue, task, concurrency_key, unique_key, idempotency_key, reason, args,
                               headers, errors)
    SELECT g.id, clock_timestamp(), g.run_at, g.created_at, g.started_at, g.claim_token, g.worker_id, g.attempt, g.priority,
           g.crashes, 'cancelled', g.queue, g.task, g.concurrency_key, g.unique_key, g.idempotency_key, g.reason, g.args,
           g.headers, g.errors
    FROM gone AS g
    WHERE g.state = 'cancelled'
      AND g.queue <> ALL (ARRAY(SELECT q.name FROM queues AS q WHERE q.retention_seconds = 0));

    SELECT array_agg(v.queue) FILTER (WHERE v.state = 'ready' OR v.queue = ANY (
               ARRAY(SELECT q.name FROM queues AS q WHERE q.max_running IS NOT NULL)
           )),
           array_agg(v.concurrency_key) FILTER (WHERE v.concurrency_key IS NOT NULL)
    INTO queues, keys
    FROM unnest(settle.verdicts) AS v;
    IF queues IS NOT NULL THEN
        PERFORM ring(queues);
    END IF;
    IF keys IS NOT NULL THEN
        PERFORM unblock(keys);
    END IF;
END $$;

-- The last 50 errors, each at most 8000 characters.
CREATE OR REPLACE FUNCTION {{schema}}.append_error(errors jsonb, attempt integer, worker_id uuid, error text)
RETURNS jsonb
LANGUAGE sql STABLE
RETURN CASE WHEN append_error.error IS NULL THEN append_error.errors ELSE
    CASE WHEN jsonb_array_length(append_error.errors) >= 50 THEN append_error.errors - 0
         ELSE coalesce(append_error.errors, '[]'::jsonb) END
    || jsonb_build_object('attempt', append_error.attempt, 'at', clock_timestamp(),
                          'worker_id', append_error.worker_id, 'error', left(append_error.error, 8000))
END;

-- Fail attempts we still hold. Each goes to scheduled after its retry_seconds by the database's clock (NULL =
-- full jitter; 0 = ready at once), to dead when is_dead or its attempts are used up (crashes do not
-- count), to cancelled when is_cancelled or somebody had asked for that. Gives the new state of each job that
-- was ours. is_unsure: the attempt was stopped from outside, so its effect may have happened (see once.sql).
CREATE OR REPLACE FUNCTION {{schema}}.fail_many(
    job_ids bigint[], tokens uuid[], errors text[], retry_seconds double precision[] DEFAULT NULL,
    is_dead boolean[] DEFAULT NULL, is_cancelled boolean[] DEFAULT NULL,
    base_seconds double precision DEFAULT 1, max_seconds double precision DEFAULT 600, is_unsure boolean[] DEFAULT NULL
) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    verdicts verdict[];
    keys text[];
    key_jobs bigint[];
    key_tokens uuid[];
    key_is_unsure boolean[];
BEGIN
    SELECT array_agg(ROW(
        h.place, h.id, s.state,
        CASE s.state
            WHEN 'ready' THEN clock_timestamp()
            WHEN 'scheduled' THEN clock_timestamp() + coalesce(
                make_interval(secs => fail_many.retry_seconds[h.nth]),
                full_jitter(h.attempt - h.crashes, fail_many.base_seconds, fail_many.max_seconds)
            )
        END,
        coalesce(fail_many.errors[h.nth], 'failed'), h.attempt, h.crashes, h.concurrency_key, h.task, h.queue
    )::verdict),
        array_agg(h.idempotency_key) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(h.id) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(fail_many.tokens[h.nth]) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(fail_many.is_unsure[h.nth]) FILTER (WHERE h.idempotency_key IS NOT NULL)
    INTO verdicts, keys, key_jobs, key_tokens, key_is_unsure
    FROM hold(fail_many.job_ids, fail_many.tokens) AS h
    CROSS JOIN LATERAL (
        SELECT CASE WHEN h.is_cancel_requested OR fail_many.is_cancelled[h.nth] THEN 'cancelled'
                    WHEN fail_many.is_dead[h.nth] OR h.attempt - h.crashes >= h.max_attempts THEN 'dead'
                    WHEN fail_many.retry_seconds[h.nth] <= 0 THEN 'ready'
                    ELSE 'scheduled' END AS state
    ) AS s;
    PERFORM settle(verdicts);
    IF keys IS NOT NULL THEN
        PERFORM leave_once(keys, key_jobs, key_tokens, key_is_unsure);
    END IF;
    RETURN QUERY SELECT v.job_id, v.state FROM unnest(verdicts) AS v;
END $$;

-- One job of fail_many. NULL: the attempt was not ours any more, nothing was written.
CREATE OR REPLACE FUNCTION {{schema}}.fail(
    job_id bigint, token uuid, error text, retry_seconds double precision DEFAULT NULL, is_dead boolean DEFAULT false,
    is_cancelled boolean DEFAULT false, base_seconds double precision DEFAULT 1, max_seconds double precision DEFAULT 600
) RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT f.state
    FROM fail_many(ARRAY[fail.job_id], ARRAY[fail.token], ARRAY[fail.error], ARRAY[fail.retry_seconds],
                   ARRAY[fail.is_dead], ARRAY[fail.is_cancelled], fail.base_seconds, fail.max_seconds) AS f
$$;

-- Give jobs back without having failed: at shutdown, on snooze, when a neighbour took the child down. Each
-- is ready at once, or scheduled after its delay_seconds by the database's clock. burn false gives the
-- attempt back. A NULL reason leaves no trace in its history. is_unsure as in fail_many.
CREATE OR REPLACE FUNCTION {{schema}}.release(
    job_ids bigint[], tokens uuid[], burn boolean DEFAULT false, reason text DEFAULT NULL,
    delay_seconds double precision[] DEFAULT NULL, is_unsure boolean DEFAULT false
) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    verdicts verdict[];
    keys text[];
    key_jobs bigint[];
    key_tokens uuid[];
    key_is_unsure boolean[];
BEGIN
    SELECT array_agg(ROW(
        h.place, h.id, s.state,
        CASE s.state WHEN 'scheduled' THEN clock_timestamp() + make_interval(secs => release.delay_seconds[h.nth]) END,
        release.reason, h.attempt - CASE WHEN release.burn THEN 0 ELSE 1 END, h.crashes,
        h.concurrency_key, h.task, h.queue
    )::verdict),
        array_agg(h.idempotency_key) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(h.id) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(release.tokens[h.nth]) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(release.is_unsure) FILTER (WHERE h.idempotency_key IS NOT NULL)
    INTO verdicts, keys, key_jobs, key_tokens, key_is_unsure
    FROM hold(release.job_ids, release.tokens) AS h
    CROSS JOIN LATERAL (
        SELECT CASE WHEN h.is_cancel_requested THEN 'cancelled'
                    WHEN release.burn AND h.attempt - h.crashes >= h.max_attempts THEN 'dead'
                    WHEN release.delay_seconds[h.nth] > 0 THEN 'scheduled'
                    ELSE 'ready' END AS state
    ) AS s;
    PERFORM settle(verdicts);
    IF keys IS NOT NULL THEN
        PERFORM leave_once(keys, key_jobs, key_tokens, key_is_unsure);
    END IF;
    RETURN QUERY SELECT v.job_id, v.state FROM unnest(verdicts) AS v;
END $$;

-- Say that the process that ran these attempts died. That counts in crashes, not against the attempts, so
-- that innocents do not pay for a neighbour: the first time a job is ready at once, after that it waits with
-- full jitter, and max_crashes of them make it dead. Gives the new state of each job that was ours.
CREATE OR REPLACE FUNCTION {{schema}}.crash(
    job_ids bigint[], tokens uuid[], reason text, base_seconds double precision DEFAULT 1,
    max_seconds double precision DEFAULT 60, max_crashes integer DEFAULT 3
) RETURNS TABLE (job_id bigint, state text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    verdicts verdict[];
    keys text[];
    key_jobs bigint[];
    key_tokens uuid[];
    key_is_unsure boolean[];
BEGIN
    SELECT array_agg(ROW(
        h.place, h.id, s.state,
        CASE s.state WHEN 'scheduled' THEN
            clock_timestamp() + full_jitter(h.crashes, crash.base_seconds, crash.max_seconds) END,
        coalesce(crash.reason, 'the process died'), h.attempt, h.crashes + 1, h.concurrency_key, h.task, h.queue
    )::verdict),
        array_agg(h.idempotency_key) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(h.id) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(crash.tokens[h.nth]) FILTER (WHERE h.idempotency_key IS NOT NULL),
        array_agg(true) FILTER (WHERE h.idempotency_key IS NOT NULL)
    INTO verdicts, keys, key_jobs, key_tokens, key_is_unsure
    FROM hold(crash.job_ids, crash.tokens) AS h
    CROSS JOIN LATERAL (
        SELECT CASE WHEN h.is_cancel_requested THEN 'cancelled'
                    WHEN h.crashes + 1 >= crash.max_crashes THEN 'dead'
                    WHEN h.attempt - h.crashes - 1 >= h.max_attempts THEN 'dead'
                    WHEN h.crashes = 0 THEN 'ready'
                    ELSE 'scheduled' END AS state
    ) AS s;
    PERFORM settle(verdicts);
    IF keys IS NOT NULL THEN
        PERFORM leave_once(keys, key_jobs, key_tokens, key_is_unsure);
    END IF;
    RETURN QUERY SELECT v.job_id, v.state FROM unnest(verdicts) AS v;
END $$;

-- Take back jobs whose lease ran out. A job past its deadline failed (timed out) and waits with full jitter;
-- any other one crashed, with what follows as in crash: the first time it is ready at once.
-- The deadline's grace lets the owner kill and report first. Takes each job once, however many reap.
CREATE OR REPLACE FUNCTION {{schema}}.reap(
    max_jobs integer DEFAULT 500, base_seconds double precision DEFAULT 1, max_seconds double precision DEFAULT 60,
    max_crashes integer DEFAULT 3, deadline_grace_seconds double precision DEFAULT 5
) RETURNS TABLE (job_id bigint, state text, reason text, task text, queue text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    verdicts verdict[];
BEGIN
    SELECT array_agg(ROW(
        h.place, h.id, s.state,
        CASE s.state WHEN 'scheduled' THEN
            clock_timestamp() + full_jitter(
                CASE WHEN h.is_overdue THEN h.attempt - h.crashes ELSE h.crashes - 1 END, reap.base_seconds,
                reap.max_seconds
            ) END,
        CASE WHEN h.is_overdue THEN 'timed out' ELSE 'lease expired: the worker crashed or was cut off' END,
        h.attempt, h.crashes, h.concurrency_key, h.task, h.queue
    )::verdict) INTO verdicts
    FROM (
        SELECT j.id, j.ctid AS place, j.attempt, j.max_attempts, j.concurrency_key, j.cancel_requested_at, j.task,
               j.queue, coalesce(j.deadline_at <= clock_timestamp(), false) AS is_overdue,
               j.crashes + CASE WHEN j.deadline_at <= clock_timestamp() THEN 0 ELSE 1 END AS crashes
        FROM jobs AS j
        WHERE j.state = 'running'
          AND (j.heartbeat_at + make_interval(secs => j.lease_seconds) < clock_timestamp()
               OR j.deadline_at + make_interval(secs => reap.deadline_grace_seconds) < clock_timestamp())
        ORDER BY j.id
        LIMIT reap.max_jobs
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS h
    CROSS JOIN LATERAL (
        SELECT CASE WHEN h.cancel_requested_at IS NOT NULL THEN 'cancelled'
                    WHEN h.crashes >= reap.max_crashes AND NOT h.is_overdue THEN 'dead'
                    WHEN h.attempt - h.crashes >= h.max_attempts THEN 'dead'
                    WHEN h.crashes = 1 AND NOT h.is_overdue THEN 'ready'
                    ELSE 'scheduled' END AS state
    ) AS s;
    PERFORM settle(verdicts);
    RETURN QUERY SELECT v.job_id, v.state, v.reason, v.task, v.queue FROM unnest(verdicts) AS v;
END $$;
