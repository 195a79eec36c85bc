-- Rate limits: what workers declare and ask, what people see and set. The functions carry the guarantees.

-- name: declare
-- Take over what a worker's code says of its limits; an operator's stay as they are.
SELECT {{schema}}.rate_declare(%(definitions)s::jsonb);

-- name: mend
-- Put right what a clock that was set back left, and forget what patterns made and nobody uses.
SELECT {{schema}}.rate_mend();

-- name: next_start
-- For an idle worker of these queues: whether there is anything but the bell to wake it, and in how many
-- seconds that is: a token of a rate limit that jobs wait for, the end of a pause.
SELECT
    EXISTS (SELECT FROM {{schema}}.rate_limits) OR pause.ends_at IS NOT NULL,
    extract(epoch FROM least(
        {{schema}}.rate_next_at(ARRAY(
            SELECT asked.queue
            FROM unnest(%(queues)s::text[]) AS asked (queue)
            WHERE asked.queue <> ALL (pause.queues)
        )),
        pause.ends_at
    ) - clock_timestamp())::double precision
FROM (
    SELECT coalesce(array_agg(queue.name), '{}') AS queues, min(queue.paused_until) AS ends_at
    FROM {{schema}}.queues AS queue
    WHERE queue.name = ANY (%(queues)s::text[])
      AND queue.is_paused
      AND coalesce(queue.paused_until > clock_timestamp(), true)
) AS pause;

-- name: list_limits
-- The limits, with how many jobs wait in the line of each, counted up to the cap. A pattern stands for all the
-- keys that it has made; these are listed too if they are asked for.
WITH line AS (
    SELECT
        entry.name,
        entry.tokens_per_second,
        entry.burst,
        entry.taken,
        CASE WHEN entry.next_at IS NOT NULL AND left(entry.name, 6) <> 'queue:' THEN (
            SELECT count(*)
            FROM (
                SELECT
                FROM {{schema}}.jobs AS job
                WHERE job.rate_key = entry.name
                  AND job.state = 'scheduled'
                  AND job.rate_parked_at IS NOT NULL
                LIMIT %(cap)s::integer
            ) AS waiting
        ) ELSE 0 END AS waiting,
        entry.next_at,
        entry.pattern,
        entry.is_declared
    FROM {{schema}}.rate_limits AS entry
),
made AS (
    SELECT
        line.pattern,
        count(*) AS keys,
        sum(line.taken)::bigint AS taken,
        sum(line.waiting)::bigint AS waiting,
        min(line.next_at) AS next_at
    FROM line
    WHERE line.pattern IS NOT NULL
    GROUP BY line.pattern
)
SELECT
    line.name,
    line.tokens_per_second,
    line.burst,
    coalesce(made.keys, 0),
    line.taken + coalesce(made.taken, 0),
    line.waiting + coalesce(made.waiting, 0),
    least(line.next_at, made.next_at),
    line.pattern,
    line.is_declared,
    clock_timestamp()
FROM line
LEFT JOIN made ON made.pattern = line.name
WHERE line.pattern IS NULL OR %(with_keys)s::boolean
ORDER BY coalesce(line.pattern, line.name), line.pattern IS NOT NULL, line.name
LIMIT %(limit)s::integer;

-- name: set_limit
-- Make or change a limit by hand; from now on no declaration in code changes it.
SELECT {{schema}}.rate_set(%(name)s::text, %(tokens_per_second)s::double precision, %(burst)s::integer);

-- name: remove_limit
-- Remove a limit and free its line; gives how many jobs had waited, NULL if there is none of this name.
SELECT {{schema}}.rate_remove(%(name)s::text);

-- name: limit_names
-- For the Tab key.
SELECT entry.name
FROM {{schema}}.rate_limits AS entry
WHERE entry.pattern IS NULL
ORDER BY entry.name
LIMIT 1000;
