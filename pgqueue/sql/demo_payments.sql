-- The payments of the demo, in a schema of its own. Only the jobs of queue `demo_payments`, its keys and its
-- breaker are touched.

-- name: clear
-- Take away what an earlier run left: its jobs, its dead letters, its keys, its breaker.
WITH jobs AS (
    DELETE FROM {{schema}}.jobs AS job
    WHERE job.queue = 'demo_payments'
      AND job.task = ANY (%(tasks)s::text[])
), dead AS (
    DELETE FROM {{schema}}.dead_jobs AS job
    WHERE job.queue = 'demo_payments'
      AND job.task = ANY (%(tasks)s::text[])
), keys AS (
    DELETE FROM {{schema}}.processed_jobs AS processed
    WHERE processed.job_name = ANY (%(tasks)s::text[])
)
DELETE FROM {{schema}}.breakers AS breaker
WHERE breaker.name = %(breaker)s::text;

-- name: find_stranger
-- A task of somebody else's in the queue that the demo wants for itself.
SELECT job.task
FROM {{schema}}.jobs AS job
WHERE job.queue = 'demo_payments'
  AND job.task <> ALL (%(tasks)s::text[])
LIMIT 1;

-- name: open_accounts
-- No constraint would find a transfer that happened twice: the check at the end has to.
CREATE SCHEMA IF NOT EXISTS pgqueue_demo;
DROP TABLE IF EXISTS pgqueue_demo.accounts, pgqueue_demo.transfers;
CREATE TABLE pgqueue_demo.accounts (id integer PRIMARY KEY, cents bigint NOT NULL CHECK (cents >= 0));
CREATE TABLE pgqueue_demo.transfers (
    transfer integer NOT NULL,
    source integer NOT NULL,
    target integer NOT NULL,
    cents bigint NOT NULL,
    job_id bigint NOT NULL,
    attempt integer NOT NULL
);

-- name: fill_accounts
INSERT INTO pgqueue_demo.accounts (id, cents)
SELECT account.id, %(cents)s::bigint
FROM generate_series(1, %(accounts)s::integer) AS account (id);

-- name: lock_accounts
-- In order, so that two transfers between the same accounts do not wait for each other.
SELECT account.id
FROM pgqueue_demo.accounts AS account
WHERE account.id = ANY (%(ids)s::integer[])
ORDER BY account.id
FOR NO KEY UPDATE;

-- name: move
WITH moved AS (
    UPDATE pgqueue_demo.accounts AS account
    SET cents = account.cents + CASE account.id WHEN %(source)s::integer THEN -%(cents)s::bigint ELSE %(cents)s::bigint END
    WHERE account.id IN (%(source)s::integer, %(target)s::integer)
)
INSERT INTO pgqueue_demo.transfers (transfer, source, target, cents, job_id, attempt)
VALUES (
    %(transfer)s::integer, %(source)s::integer, %(target)s::integer, %(cents)s::bigint, %(job_id)s::bigint,
    %(attempt)s::integer
);

-- name: insert_job
-- As any program in any language can.
INSERT INTO {{schema}}.jobs (task, args) VALUES ('demo.transfer', %(args)s::jsonb);

-- name: count_remaining
SELECT count(*)
FROM {{schema}}.jobs AS job
WHERE job.queue = 'demo_payments';

-- name: balances
SELECT id, cents
FROM pgqueue_demo.accounts;

-- name: transfers
SELECT transfer, source, target, cents
FROM pgqueue_demo.transfers;

-- name: outcomes
-- How many jobs of this run ended how, and how many of those ran more than once.
SELECT job.task, job.state, count(*), count(*) FILTER (WHERE job.attempt > 1 OR job.errors IS NOT NULL)
FROM (
    SELECT finished.task, finished.state, finished.attempt, finished.errors
    FROM {{schema}}.finished_jobs AS finished
    WHERE finished.queue = 'demo_payments'
      AND finished.id >= %(since)s::bigint
    UNION ALL
    SELECT dead.task, 'dead', dead.attempt, dead.errors
    FROM {{schema}}.dead_jobs AS dead
    WHERE dead.queue = 'demo_payments'
    UNION ALL
    SELECT live.task, live.state, live.attempt, live.errors
    FROM {{schema}}.jobs AS live
    WHERE live.queue = 'demo_payments'
) AS job
GROUP BY job.task, job.state
ORDER BY job.task, job.state;

-- name: next_job_id
-- A number below that of every job to come.
SELECT nextval(pg_get_serial_sequence('{{schema}}.jobs', 'id'));

-- name: breaker
SELECT breaker.state, breaker.generation
FROM {{schema}}.breakers AS breaker
WHERE breaker.name = %(breaker)s::text;
