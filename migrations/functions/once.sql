-- Once: a key stands for an effect, its row in processed_jobs for what became of it.
--
-- In a transaction of its own the effect, the row and the job's end are one: begin_once, the effect,
-- finish_once, COMMIT. Whoever dies on the way leaves nothing. For an effect outside the database
-- begin_once is committed first, and complete_once says that it happened; a row that nobody owns any
-- more means that the outcome is unknown.
--
-- The owner of a row IN_PROGRESS is the attempt of its job_id and claim_token (a claim gives all its jobs the
-- same token). NULL: its process is known to be gone. A token of an attempt that does not run any more: it may only be cut off, and still at work.

-- The number of the advisory lock that a transaction holds on a key from its beginning to its end.
CREATE OR REPLACE FUNCTION {{schema}}.once_lock(idempotency_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN hashtextextended('{{schema}}.once:' || once_lock.idempotency_key, 0);

-- End the session that holds a key for an attempt which is not running any more: a frozen worker would
-- keep the key for ever. Nothing of it can be committed, its token has gone; a COMMIT under way is left alone.
CREATE OR REPLACE FUNCTION {{schema}}.end_lost_holder(lock_number bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    RETURN coalesce(bool_or(pg_terminate_backend(h.pid)), false)
    FROM (
        SELECT a.pid, regexp_match(a.application_name, '^pgqueue job (\d{1,18}) ([0-9a-f]{8})$') AS name
        FROM pg_locks AS l
        JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND a.datname = current_database()
          AND l.database = a.datid AND ((l.classid::bigint << 32) | l.objid::bigint) = end_lost_holder.lock_number
          AND a.query !~* '^\s*commit' AND a.pid <> pg_backend_pid()
    ) AS h
    WHERE h.name IS NOT NULL
      AND NOT EXISTS (
          SELECT FROM jobs AS j
          WHERE j.id = h.name[1]::bigint AND j.state = 'running' AND left(j.claim_token::text, 8) = h.name[2]
      );
EXCEPTION WHEN insufficient_privilege THEN
    RETURN false;
END $$;

-- Begin the effect of a key, for a job's attempt or, without a job, for whoever calls. verdict:
--   started   it is ours, go on
--   takeover  it is ours now: an earlier owner began and is gone, what became of it is unknown
--   unknown   the same, but may_take_over is false; nothing was changed
--   done      it has happened; response is what it answered
--   busy      somebody is at it; or was cut off, and may not be taken over before retry_seconds
--   lost      the attempt is not running any more under this token
-- began names the transaction, for finish_once to see that it is still the same one.
CREATE OR REPLACE FUNCTION {{schema}}.begin_once(
    key text, job_name text, token uuid, job_id bigint DEFAULT NULL, may_take_over boolean DEFAULT true,
    takeover_seconds double precision DEFAULT 600
) RETURNS TABLE (verdict text, response jsonb, retry_seconds double precision, began xid8)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    entry processed_jobs;
    age_seconds double precision;
    is_owned boolean;
BEGIN
    IF begin_once.job_id IS NOT NULL THEN
        IF NOT EXISTS (
            SELECT FROM jobs AS j
            WHERE j.id = begin_once.job_id AND j.claim_token = begin_once.token AND j.state = 'running'
        ) THEN
            verdict := 'lost';
            RETURN NEXT;
            RETURN;
        END IF;
        -- Who looks at pg_stat_activity sees whose transaction this is, and so does end_lost_holder.
        PERFORM set_config('application_name',
            format('pgqueue job %s %s', begin_once.job_id, left(begin_once.token::text, 8)), true);
    END IF;
    IF NOT pg_try_advisory_xact_lock(once_lock(begin_once.key)) THEN
        PERFORM end_lost_holder(once_lock(begin_once.key));
        verdict := 'busy';
        RETURN NEXT;
        RETURN;
    END IF;
    began := pg_current_xact_id();
    INSERT INTO processed_jobs (idempotency_key, job_name, status, job_id, claim_token)
    VALUES (begin_once.key, begin_once.job_name, 'IN_PROGRESS', begin_once.job_id, begin_once.token)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        verdict := 'started';
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT p.* INTO entry FROM processed_jobs AS p
    WHERE p.idempotency_key = begin_once.key
    FOR NO KEY UPDATE;
    age_seconds := extract(epoch FROM clock_timestamp() - entry.updated_at);
    is_owned := EXISTS (
        SELECT FROM jobs AS j
        WHERE j.id = entry.job_id AND j.claim_token = entry.claim_token AND j.state = 'running'
    );
    verdict := CASE
        WHEN entry.status IS NULL THEN 'busy'                               -- forgotten just now
        WHEN entry.status = 'COMPLETED' THEN 'done'
        WHEN entry.claim_token = begin_once.token AND entry.job_id IS NOT DISTINCT FROM begin_once.job_id
            THEN 'started'                                                  -- asked again, the answer got lost
        WHEN is_owned OR entry.claim_token IS NOT NULL AND age_seconds < begin_once.takeover_seconds THEN 'busy'
        WHEN NOT begin_once.may_take_over THEN 'unknown'
        ELSE 'takeover'
    END;
    IF verdict = 'done' THEN
        response := entry.response_payload;
    ELSIF verdict = 'busy' AND NOT is_owned THEN
        retry_seconds := greatest(begin_once.takeover_seconds - age_seconds, 0);
    ELSIF verdict = 'takeover' THEN
        UPDATE processed_jobs AS p SET
            job_name = begin_once.job_name, job_id = begin_once.job_id, claim_token = begin_once.token,
            updated_at = clock_timestamp()
        WHERE p.idempotency_key = begin_once.key;
    END IF;
    RETURN NEXT;
END $$;

-- The effect of a key has happened, and with it, if there is one, the job has succeeded: in the same
-- transaction as the effect. 'done', or 'lost': roll everything back, it is somebody else's by now.
-- Raises PQ001 in another transaction than the one named by began: the effect ended it, and undid itself or
-- was committed too early.
CREATE OR REPLACE FUNCTION {{schema}}.finish_once(
    key text, token uuid, job_id bigint DEFAULT NULL, response jsonb DEFAULT NULL, reason text DEFAULT NULL,
    began xid8 DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
BEGIN
    -- From here on the job's row is locked, so that nobody could take it back from a client that froze before
    -- its COMMIT.
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true);
    -- Job rows before keys, as everywhere.
    PERFORM FROM jobs AS j WHERE j.id = finish_once.job_id FOR NO KEY UPDATE;
    IF finish_once.began <> pg_current_xact_id() THEN
        RAISE EXCEPTION 'the transaction that began key "%" was ended before the effect was recorded', finish_once.key
        USING ERRCODE = 'PQ001';
    END IF;
    UPDATE processed_jobs AS p SET
        status = 'COMPLETED', response_payload = finish_once.response, updated_at = clock_timestamp()
    WHERE p.idempotency_key = finish_once.key AND p.claim_token = finish_once.token AND p.status = 'IN_PROGRESS'
      AND p.job_id IS NOT DISTINCT FROM finish_once.job_id;
    IF NOT FOUND OR finish_once.job_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM complete(ARRAY[finish_once.job_id], ARRAY[finish_once.token], ARRAY[finish_once.response],
                             ARRAY[finish_once.reason])
    ) THEN
        RETURN 'lost';
    END IF;
    RETURN 'done';
END $$;

-- complete, for attempts whose effect was begun by begin_once and committed: their keys are done as well. Also
-- where the job is not ours any more: as long as nobody took the key over, what happened is on record for
-- whoever comes next.
CREATE OR REPLACE FUNCTION {{schema}}.complete_once(
    job_ids bigint[], tokens uuid[], keys text[], results jsonb[] DEFAULT NULL, reasons text[] DEFAULT NULL
) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    ids bigint[] := ARRAY(SELECT c.id FROM complete(complete_once.job_ids, complete_once.tokens, complete_once.results,
                                                    complete_once.reasons) AS c (id));
BEGIN
    WITH ours AS MATERIALIZED (
        SELECT p.idempotency_key, u.result
        FROM (
            SELECT k.key, k.job_id, k.token, k.result
            FROM unnest(complete_once.keys, complete_once.job_ids, complete_once.tokens, complete_once.results)
                AS k (key, job_id, token, result)
            ORDER BY k.key
        ) AS u
        CROSS JOIN LATERAL (
            SELECT p.idempotency_key FROM processed_jobs AS p
            WHERE p.idempotency_key = u.key AND p.job_id = u.job_id AND p.claim_token = u.token
              AND p.status = 'IN_PROGRESS'
            FOR NO KEY UPDATE
        ) AS p
    )
    UPDATE processed_jobs AS p SET
        status = 'COMPLETED', response_payload = o.result, updated_at = clock_timestamp()
    FROM ours AS o
    WHERE p.idempotency_key = o.idempotency_key AND p.status = 'IN_PROGRESS';
    RETURN QUERY SELECT u.id FROM unnest(ids) AS u (id);
END $$;

-- An attempt ended without having finished what it began: forget that it began, or, where it was stopped from
-- outside (is_unsure), remember that its owner is gone. Inner part of fail_many, release and crash.
CREATE OR REPLACE FUNCTION {{schema}}.leave_once(keys text[], job_ids bigint[], tokens uuid[], is_unsure boolean[])
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
BEGIN
    WITH began AS MATERIALIZED (
        SELECT p.idempotency_key, u.is_unsure
        FROM (
            SELECT k.key, k.job_id, k.token, coalesce(k.is_unsure, false) AS is_unsure
            FROM unnest(leave_once.keys, leave_once.job_ids, leave_once.tokens, leave_once.is_unsure)
                AS k (key, job_id, token, is_unsure)
            WHERE k.key IS NOT NULL
            ORDER BY k.key
        ) AS u
        CROSS JOIN LATERAL (
            SELECT p.idempotency_key FROM processed_jobs AS p
            WHERE p.idempotency_key = u.key AND p.job_id = u.job_id AND p.claim_token = u.token
              AND p.status = 'IN_PROGRESS'
            FOR UPDATE
        ) AS p
    ), forgotten AS (
        DELETE FROM processed_jobs AS p
        USING began AS b
        WHERE p.idempotency_key = b.idempotency_key AND NOT b.is_unsure
    )
    UPDATE processed_jobs AS p SET claim_token = NULL, updated_at = clock_timestamp()
    FROM began AS b
    WHERE p.idempotency_key = b.idempotency_key AND b.is_unsure;
END $$;

-- Forget keys older than that, some at a time, but for those of jobs that may still come again; of one whose
-- outcome is unknown the dead letter may. Gives how many went.
CREATE OR REPLACE FUNCTION {{schema}}.prune_processed(older_than_seconds double precision, max_keys integer DEFAULT 1000)
RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    pruned integer;
BEGIN
    WITH old AS MATERIALIZED (
        SELECT p.idempotency_key FROM processed_jobs AS p
        WHERE p.created_at < clock_timestamp() - make_interval(secs => prune_processed.older_than_seconds)
          AND p.updated_at < clock_timestamp() - make_interval(secs => prune_processed.older_than_seconds)
          AND NOT EXISTS (SELECT FROM jobs AS j WHERE j.id = p.job_id)
          AND (p.status = 'COMPLETED' OR NOT EXISTS (SELECT FROM dead_jobs AS d WHERE d.id = p.job_id))
        ORDER BY p.created_at
        LIMIT prune_processed.max_keys
        FOR UPDATE SKIP LOCKED
    )
    DELETE FROM processed_jobs AS p USING old AS o WHERE p.idempotency_key = o.idempotency_key;
    GET DIAGNOSTICS pruned = ROW_COUNT;
    RETURN pruned;
END $$;
