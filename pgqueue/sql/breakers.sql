-- Circuit breakers: what workers ask and say of them, and what people do to them. The functions carry the
-- guarantees; here they only get their parameters' types.

-- name: declare
-- Make what code says of its breakers known; settings that an operator made stay.
SELECT {{schema}}.breaker_declare(%(definitions)s::jsonb);

-- name: look
-- Where breakers stand. calls and failures are those that count towards the next report's verdict;
-- seconds is the time until a probe may be asked for, NULL for one that is closed, or open until somebody closes it.
SELECT
    breaker.name,
    breaker.state,
    breaker.generation,
    extract(epoch FROM CASE breaker.state
        WHEN 'open' THEN breaker.retry_at
        WHEN 'half_open' THEN breaker.probe_until
    END - clock_timestamp())::double precision,
    breaker.probe::text,
    breaker.parked_until IS NOT NULL,
    breaker.successes + breaker.failures + breaker.last_successes + breaker.last_failures,
    breaker.failures + breaker.last_failures,
    breaker.min_calls,
    breaker.failure_ratio,
    breaker.max_failures,
    breaker.probe_seconds
FROM {{schema}}.breakers AS breaker
WHERE breaker.name = ANY (%(names)s::text[]);

-- name: ask
-- May a job that depends on this start? Of all who ask when it is time for a probe one gets it. seconds as in look.
SELECT asked.is_allowed, asked.generation, asked.probe::text,
    extract(epoch FROM asked.retry_at - clock_timestamp())::double precision
FROM {{schema}}.may_run(%(name)s::text) AS asked;

-- name: report
-- Results since the last report. The names must be in order: two that report wait for each other otherwise.
SELECT said.name, {{schema}}.report(said.name, said.generation, said.successes, said.failures, said.probe)
FROM unnest(
    %(names)s::text[], %(generations)s::bigint[], %(successes)s::bigint[], %(failures)s::bigint[], %(probes)s::uuid[]
) AS said (name, generation, successes, failures, probe);

-- name: keep_probe
-- Say that a probe still runs; false if it was given up.
UPDATE {{schema}}.breakers AS breaker
SET probe_until = clock_timestamp() + make_interval(secs => breaker.probe_seconds)
WHERE breaker.name = %(name)s::text
  AND breaker.state = 'half_open'
  AND breaker.probe = %(probe)s::uuid
RETURNING true;

-- name: park
-- Give attempts back whose breaker is not closed; gives the new state of each job that was still ours.
SELECT parked.job_id, parked.state
FROM {{schema}}.breaker_park(%(job_ids)s::bigint[], %(tokens)s::uuid[], %(name)s::text) AS parked;

-- name: park_ready
-- Park what waits at the head of a queue without claiming it; gives how many jobs that were.
SELECT {{schema}}.breaker_park_ready(
    %(name)s::text, %(queue)s::text, %(tasks)s::text[], %(max_jobs)s::integer
);

-- name: unpark
-- Bring some parked jobs back if it is closed; gives how many.
SELECT {{schema}}.breaker_unpark(%(name)s::text, %(max_jobs)s::integer);

-- name: call
-- Bring one parked job of these queues back if it is time for a probe.
SELECT {{schema}}.breaker_call(%(name)s::text, %(queues)s::text[]);

-- name: list_breakers
-- All breakers; calls and failures of the last one to two windows; parked is counted up to the cap.
SELECT
    breaker.name,
    breaker.state,
    breaker.generation,
    breaker.opens,
    breaker.opened_at,
    breaker.retry_at,
    breaker.probe_until,
    recent.successes + recent.failures,
    recent.failures,
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM {{schema}}.jobs AS job
            WHERE job.state = 'scheduled'
              AND job.run_at = breaker.parked_until
            LIMIT %(cap)s::integer
        ) AS parked
    ),
    ARRAY(SELECT task.name FROM {{schema}}.tasks AS task WHERE task.breaker = breaker.name ORDER BY task.name),
    breaker.failure_ratio,
    breaker.min_calls,
    breaker.max_failures,
    breaker.window_seconds,
    breaker.open_seconds,
    breaker.max_open_seconds,
    breaker.probe_seconds,
    breaker.pinned,
    clock.now
FROM {{schema}}.breakers AS breaker
CROSS JOIN (SELECT clock_timestamp() AS now) AS clock
CROSS JOIN LATERAL (
    SELECT floor(extract(epoch FROM clock.now - breaker.window_at) / breaker.window_seconds) AS windows
) AS age
CROSS JOIN LATERAL (
    SELECT
        CASE age.windows
            WHEN 0 THEN breaker.successes + breaker.last_successes
            WHEN 1 THEN breaker.successes
            ELSE 0
        END AS successes,
        CASE age.windows
            WHEN 0 THEN breaker.failures + breaker.last_failures
            WHEN 1 THEN breaker.failures
            ELSE 0
        END AS failures
) AS recent
ORDER BY breaker.name;

-- name: open
-- Open one by hand, for so many seconds or until somebody closes it; false if there is none.
SELECT {{schema}}.breaker_open(%(name)s::text, %(seconds)s::double precision);

-- name: close
-- Close one by hand; false if there is none.
SELECT {{schema}}.breaker_close(%(name)s::text);

-- name: change
-- Change settings of one, for good; false if there is none.
SELECT {{schema}}.breaker_set(%(name)s::text, %(settings)s::jsonb);

-- name: unpin
-- Leave all settings of one to code again; nothing if there is none.
UPDATE {{schema}}.breakers AS breaker
SET pinned = '{}'
WHERE breaker.name = %(name)s::text
RETURNING true;
