-- Heartbeat: what prolongs a lease.

-- Renew leases and say for each job where it stands: renewed, cancel (renewed, but stop), overdue
-- (renewed, but past its deadline: stop), busy (its row is locked just now: ask again), lost (another's
-- or gone: stop, write nothing). Never waits. Were the lease to end before the grace that the owner leaves
-- a handler past its deadline, it would run twice; who does not stop it loses it when reap's grace is over.
CREATE OR REPLACE FUNCTION {{schema}}.heartbeat(job_ids bigint[], tokens uuid[])
RETURNS TABLE (job_id bigint, verdict text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    places tid[];
    ids bigint[];
    verdicts text[];
BEGIN
    SELECT array_agg(h.place) INTO places
    FROM (
        SELECT j.place
        FROM (SELECT u.id, u.token FROM unnest(heartbeat.job_ids, heartbeat.tokens) AS u (id, token) ORDER BY u.id) AS g
        CROSS JOIN LATERAL (
            SELECT j.ctid AS place FROM jobs AS j
            WHERE j.id = g.id AND j.claim_token = g.token AND j.state = 'running'
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS j
    ) AS h;
    WITH renewed AS (
        UPDATE jobs AS j SET heartbeat_at = clock_timestamp()
        WHERE j.ctid = ANY (places)
        RETURNING j.id, CASE WHEN j.deadline_at <= clock_timestamp() THEN 'overdue'
                             WHEN j.cancel_requested_at IS NULL THEN 'renewed'
                             ELSE 'cancel' END AS said
    )
    SELECT array_agg(r.id), array_agg(r.said) INTO ids, verdicts FROM renewed AS r;
    RETURN QUERY SELECT v.id, v.said FROM unnest(ids, verdicts) AS v (id, said);
    IF coalesce(cardinality(ids), 0) < cardinality(heartbeat.job_ids) THEN
        RETURN QUERY
        SELECT g.id, CASE WHEN s.id IS NULL THEN 'lost' ELSE 'busy' END
        FROM unnest(heartbeat.job_ids, heartbeat.tokens) AS g (id, token)
        LEFT JOIN LATERAL (
            SELECT j.id FROM jobs AS j
            WHERE j.id = g.id AND j.claim_token = g.token AND j.state = 'running'
            OFFSET 0
        ) AS s ON true
        WHERE g.id <> ALL (coalesce(ids, '{}'));
    END IF;
END $$;
