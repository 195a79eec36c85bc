-- Looking at a job afterwards.

-- name: look_up
-- Where a job stands and how it ended. One statement and so one snapshot: a job that ends meanwhile is
-- seen in its old place or in its new one, never in neither. A live job is found before the history's
-- partitions are opened.
SELECT found.state, found.task, found.reason, found.result
FROM (
    SELECT job.state, job.task, NULL::text AS reason, NULL::text AS result
    FROM {{schema}}.jobs AS job
    WHERE job.id = %(job_id)s::bigint
    UNION ALL
    SELECT finished.state, finished.task, finished.reason, finished.result::text
    FROM {{schema}}.finished_jobs AS finished
    WHERE finished.id = %(job_id)s::bigint
    UNION ALL
    SELECT 'dead', dead.task, dead.reason, NULL::text
    FROM {{schema}}.dead_jobs AS dead
    WHERE dead.id = %(job_id)s::bigint
) AS found
LIMIT 1;
