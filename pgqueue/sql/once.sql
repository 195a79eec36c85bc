-- Effects that happen once, by their key.

-- name: begin
-- Begin the effect of a key; see the function for the verdicts.
SELECT verdict, response::text, retry_seconds, began::text
FROM {{schema}}.begin_once(
    %(key)s::text, %(job_name)s::text, %(token)s::uuid, %(job_id)s::bigint, %(may_take_over)s::boolean,
    %(takeover_seconds)s::double precision
);

-- name: finish
-- The effect has happened: `done`, or `lost` and to be rolled back.
SELECT {{schema}}.finish_once(
    %(key)s::text, %(token)s::uuid, %(job_id)s::bigint, %(response)s::jsonb, %(reason)s::text, %(began)s::xid8
);

-- name: settled
-- Which of these attempts have made their key done: the answer to "did that COMMIT land?"
SELECT asked.job_id
FROM unnest(%(job_ids)s::bigint[], %(tokens)s::uuid[], %(keys)s::text[]) AS asked (job_id, token, key)
JOIN {{schema}}.processed_jobs AS processed ON processed.idempotency_key = asked.key
WHERE processed.job_id = asked.job_id
  AND processed.claim_token = asked.token
  AND processed.status = 'COMPLETED';

-- name: show
-- What became of a key.
SELECT idempotency_key, job_name, status, response_payload::text, job_id, claim_token::text, created_at, updated_at,
    clock_timestamp()
FROM {{schema}}.processed_jobs
WHERE idempotency_key = %(key)s::text;

-- name: forget
-- Forget a key, unless somebody is at it just now.
WITH alone AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock({{schema}}.once_lock(%(key)s::text)) AS is_mine
), gone AS (
    DELETE FROM {{schema}}.processed_jobs AS processed
    USING alone
    WHERE alone.is_mine
      AND processed.idempotency_key = %(key)s::text
      AND (processed.status = 'COMPLETED' OR NOT EXISTS (
          SELECT FROM {{schema}}.jobs AS job
          WHERE job.id = processed.job_id
            AND job.claim_token = processed.claim_token
            AND job.state = 'running'
      ))
    RETURNING processed.status
)
SELECT gone.status, {{schema}}.audit('processed.forget', %(key)s::text, NULL, jsonb_build_object('status', gone.status))
FROM gone;

-- name: prune
-- Forget some of the keys that are older than that.
SELECT {{schema}}.prune_processed(%(older_than_seconds)s::double precision);
