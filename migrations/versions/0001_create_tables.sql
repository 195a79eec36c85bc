-- The queue's tables. Functions, triggers and views are not here: they are re-created from
-- functions/*.sql whenever their text changed.

-- What a column of jobs may hold is said by its type, what its columns mean together by a CHECK: a domain is asked
-- when a value is written into the column, a CHECK at every claim and heartbeat, and the server reads the text of
-- each CHECK anew in every statement (130 of 350 us of an INSERT, 170 us of each claim). Several domains share a
-- constraint's name: that is what a client sees.
CREATE DOMAIN {{schema}}.queue_name AS text
    CONSTRAINT jobs_names_fit CHECK (octet_length(VALUE) BETWEEN 1 AND 100);
CREATE DOMAIN {{schema}}.task_name AS text      -- its limit is named 'task:T'
    CONSTRAINT jobs_names_fit CHECK (octet_length(VALUE) BETWEEN 1 AND 250);
CREATE DOMAIN {{schema}}.short_name AS text
    CONSTRAINT jobs_names_fit CHECK (octet_length(VALUE) BETWEEN 1 AND 255);
CREATE DOMAIN {{schema}}.limit_name AS text     -- the limits of whole queues are named 'queue:Q'
    CONSTRAINT jobs_names_fit CHECK (octet_length(VALUE) BETWEEN 1 AND 255 AND left(VALUE, 6) <> 'queue:');
CREATE DOMAIN {{schema}}.small_count AS smallint CONSTRAINT jobs_numbers_fit CHECK (VALUE >= 0);
CREATE DOMAIN {{schema}}.attempt_count AS integer CONSTRAINT jobs_numbers_fit CHECK (VALUE >= 0);
CREATE DOMAIN {{schema}}.attempt_limit AS integer CONSTRAINT jobs_numbers_fit CHECK (VALUE BETWEEN 1 AND 100000);
CREATE DOMAIN {{schema}}.slot_limit AS smallint CONSTRAINT jobs_numbers_fit CHECK (VALUE BETWEEN 1 AND 10000);
CREATE DOMAIN {{schema}}.time_limit AS real CONSTRAINT jobs_numbers_fit CHECK (VALUE BETWEEN 0 AND 604800);
CREATE DOMAIN {{schema}}.due_time AS timestamptz
    CONSTRAINT jobs_run_at_is_sane CHECK (VALUE >= '2000-01-01Z' AND VALUE < '3000-01-01Z');
CREATE DOMAIN {{schema}}.object_document AS jsonb CONSTRAINT jobs_documents_fit CHECK (jsonb_typeof(VALUE) = 'object');
CREATE DOMAIN {{schema}}.headers_up_to_64_kib AS jsonb
    CONSTRAINT jobs_documents_fit CHECK (jsonb_typeof(VALUE) = 'object')
    CONSTRAINT jobs_headers_fit CHECK (octet_length(VALUE::text) <= 65536);
CREATE DOMAIN {{schema}}.progress_up_to_64_kib AS jsonb CONSTRAINT jobs_headers_fit CHECK (octet_length(VALUE::text) <= 65536);
CREATE DOMAIN {{schema}}.array_document AS jsonb CONSTRAINT jobs_documents_fit CHECK (jsonb_typeof(VALUE) = 'array');

-- What every row has comes first, fixed widths before texts; what a claim writes stands together, so that its log
-- record holds little else.
--
-- queue, priority, max_attempts, timeout_seconds, concurrency_limit, is_unique_until_start and state have
-- no default on purpose: a row without state or is_unique_until_start is completed by a trigger from the definition
-- of its task, its keys too, so that a plain INSERT (task, args) means the same as a call from Python.
CREATE TABLE {{schema}}.jobs (
    -- Half empty leaves: the claim's new entry for the same id finds room beside the old one.
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY WITH (fillfactor = 40),
    run_at {{schema}}.due_time NOT NULL DEFAULT clock_timestamp(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    max_attempts {{schema}}.attempt_limit NOT NULL,
    timeout_seconds {{schema}}.time_limit NOT NULL,      -- 0 = no limit
    priority {{schema}}.small_count NOT NULL,            -- 0 goes first
    crashes {{schema}}.small_count NOT NULL DEFAULT 0,
    concurrency_limit {{schema}}.slot_limit NOT NULL,
    is_unique_until_start boolean NOT NULL,     -- it gives its unique_key up when it is claimed
    queue {{schema}}.queue_name NOT NULL,
    task {{schema}}.task_name NOT NULL,
    args {{schema}}.object_document NOT NULL DEFAULT '{}',
    state text NOT NULL,
    attempt {{schema}}.attempt_count NOT NULL DEFAULT 0,
    started_at timestamptz,
    heartbeat_at timestamptz,
    deadline_at timestamptz,
    cancel_requested_at timestamptz,
    rate_parked_at timestamptz,         -- scheduled only because it waits for a token of its rate limit
    claim_token uuid,
    worker_id uuid,
    lease_seconds real,
    concurrency_slot smallint,
    concurrency_key {{schema}}.short_name,
    unique_key {{schema}}.short_name,
    idempotency_key {{schema}}.short_name,
    rate_key {{schema}}.limit_name,
    headers {{schema}}.headers_up_to_64_kib,
    errors {{schema}}.array_document,
    progress {{schema}}.progress_up_to_64_kib,
    -- A running job has an owner, a fence and a lease; nobody else has any of them.
    CONSTRAINT jobs_state_is_sound CHECK (
        CASE WHEN state = 'running' THEN
            num_nulls(claim_token, worker_id, heartbeat_at, lease_seconds, started_at) = 0
            AND lease_seconds > 0 AND lease_seconds <= 86400
            AND rate_parked_at IS NULL
            AND (concurrency_key IS NULL) = (concurrency_slot IS NULL)
            AND coalesce(concurrency_slot BETWEEN 1 AND concurrency_limit, true)
        ELSE
            num_nonnulls(claim_token, worker_id, heartbeat_at, lease_seconds, deadline_at,
                         concurrency_slot, cancel_requested_at) = 0
            AND CASE state
                WHEN 'ready' THEN rate_parked_at IS NULL
                WHEN 'scheduled' THEN rate_parked_at IS NULL OR rate_key IS NOT NULL
                WHEN 'blocked' THEN concurrency_key IS NOT NULL AND rate_parked_at IS NULL
                ELSE false
            END
        END
    )
) WITH (
    -- Room for a heartbeat to stay on its page (HOT); vacuum by number, not by share:
    -- the table is small and turns over completely many times an hour.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX jobs_ready ON {{schema}}.jobs (queue, priority, run_at, id) WHERE state = 'ready';
CREATE INDEX jobs_due ON {{schema}}.jobs (run_at, id) WHERE state = 'scheduled';
CREATE INDEX jobs_running ON {{schema}}.jobs (id) WHERE state = 'running';
-- The last judge of a concurrency limit. The CHECK makes "has a slot" and "runs with a key" one thing;
-- asked for this way, no plan can mistake jobs_running for it.
CREATE UNIQUE INDEX jobs_running_slot ON {{schema}}.jobs (concurrency_key, concurrency_slot)
    WHERE concurrency_slot IS NOT NULL;
-- The waiting jobs of one key in one queue, best first, ready or blocked.
CREATE INDEX jobs_waiting ON {{schema}}.jobs (concurrency_key, queue, priority, run_at, id)
    WHERE state IN ('ready', 'blocked') AND concurrency_key IS NOT NULL;
-- For sweep only. An expression, so that only this index can serve its order.
CREATE INDEX jobs_blocked ON {{schema}}.jobs ((CASE WHEN state = 'blocked' THEN concurrency_key END))
    WHERE state = 'blocked';
CREATE UNIQUE INDEX jobs_unique_key ON {{schema}}.jobs (unique_key) WHERE unique_key IS NOT NULL;
-- The line before a rate limit.
CREATE INDEX jobs_rate_line ON {{schema}}.jobs (rate_key, queue, priority, id)
    WHERE state = 'scheduled' AND rate_parked_at IS NOT NULL;

-- Succeeded and cancelled jobs, one partition per UTC day. No default partition: with one, a day could
-- only be dropped under a lock that stops every completion. Whoever meets a missing day makes it.
CREATE TABLE {{schema}}.finished_jobs (
    id bigint NOT NULL,
    finished_at timestamptz NOT NULL,
    run_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz,
    claim_token uuid,                   -- answers "did my COMMIT land?"
    worker_id uuid,
    attempt integer NOT NULL,
    priority smallint NOT NULL,
    crashes smallint NOT NULL,
    state text NOT NULL CONSTRAINT finished_jobs_state_is_final CHECK (state IN ('succeeded', 'cancelled')),
    queue text NOT NULL,
    task text NOT NULL,
    concurrency_key text,
    unique_key text,
    idempotency_key text,
    reason text,                        -- why it was cancelled, or why its result was not kept
    args jsonb NOT NULL,
    headers jsonb,
    errors jsonb,
    result jsonb
) PARTITION BY RANGE (finished_at);
CREATE INDEX finished_jobs_id ON {{schema}}.finished_jobs (id);

-- The dead letters: everything a redrive needs.
CREATE TABLE {{schema}}.dead_jobs (
    id bigint PRIMARY KEY,
    died_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    run_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    started_at timestamptz,
    claim_token uuid,
    worker_id uuid,
    attempt integer NOT NULL,
    max_attempts integer NOT NULL,
    timeout_seconds real NOT NULL,
    priority smallint NOT NULL,
    crashes smallint NOT NULL,
    concurrency_limit smallint NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    concurrency_key text,
    unique_key text,
    idempotency_key text,
    rate_key text,
    reason text NOT NULL,
    args jsonb NOT NULL,
    headers jsonb,
    errors jsonb
);
CREATE INDEX dead_jobs_died_at ON {{schema}}.dead_jobs (died_at);

-- Idempotency: what was done already, and what it answered. The owner of what is IN_PROGRESS is the attempt
-- of that job_id and claim_token; NULL: it is known to be gone, and what became of it is not. No job_id: no job did it.
CREATE TABLE {{schema}}.processed_jobs (
    idempotency_key varchar(255) PRIMARY KEY,
    job_name text NOT NULL,
    status text NOT NULL CONSTRAINT processed_jobs_status_is_known CHECK (status IN ('IN_PROGRESS', 'COMPLETED')),
    response_payload jsonb,
    job_id bigint,
    claim_token uuid,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 80);
CREATE INDEX processed_jobs_created_at ON {{schema}}.processed_jobs (created_at);

-- A row only for a queue with settings. retention_seconds: NULL = the workers' default, 0 = keep no history.
CREATE TABLE {{schema}}.queues (
    name text PRIMARY KEY CONSTRAINT queues_name_fits CHECK (octet_length(name) BETWEEN 1 AND 100),
    is_paused boolean NOT NULL DEFAULT false,
    paused_until timestamptz,           -- then the pause is over by itself; NULL: until somebody resumes
    max_running integer CONSTRAINT queues_max_running_fits CHECK (max_running >= 0),
    retention_seconds integer CONSTRAINT queues_retention_fits CHECK (retention_seconds >= 0),
    reason text,                        -- why it is paused or limited, for people
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT queues_pause_has_an_end CHECK (
        paused_until IS NULL OR (is_paused AND paused_until >= '2000-01-01Z' AND paused_until < '3000-01-01Z')
    )
);

-- The registered definitions, upserted when a worker starts. NULL = the default. The keys are templates:
-- text with {argument} places.
CREATE TABLE {{schema}}.tasks (
    name text PRIMARY KEY,
    queue text,
    priority smallint,
    max_attempts integer,
    timeout_seconds real,
    concurrency_key text,
    concurrency_limit smallint,
    unique_key text,
    is_unique_until_start boolean,
    idempotency_key text,
    rate_key text,
    breaker text,
    args_schema jsonb,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT tasks_names_fit CHECK (
        octet_length(name) BETWEEN 1 AND 250
        AND octet_length(queue) BETWEEN 1 AND 100
        AND octet_length(concurrency_key) BETWEEN 1 AND 255
        AND octet_length(unique_key) BETWEEN 1 AND 255
        AND octet_length(idempotency_key) BETWEEN 1 AND 255
        AND octet_length(rate_key) BETWEEN 1 AND 255
        AND octet_length(breaker) BETWEEN 1 AND 255
    ),
    CONSTRAINT tasks_numbers_fit CHECK (
        priority >= 0
        AND max_attempts BETWEEN 1 AND 100000
        AND timeout_seconds BETWEEN 0 AND 604800
        AND concurrency_limit BETWEEN 1 AND 10000
    )
) WITH (fillfactor = 50);

-- Who is there, for people. No decision depends on it.
CREATE TABLE {{schema}}.workers (
    id uuid PRIMARY KEY,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    queues text[] NOT NULL,
    slots integer NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);

-- Names: 'queue:Q', 'task:T', a rate_key; or with a * at the end a pattern, from which each key that it
-- meets, and that has no limit of its own, gets a row at its first use.
CREATE TABLE {{schema}}.rate_limits (
    name text PRIMARY KEY CONSTRAINT rate_limits_name_fits CHECK (octet_length(name) BETWEEN 1 AND 255),
    pattern text,                                       -- the pattern that made this row
    is_declared boolean NOT NULL DEFAULT false,         -- by code, which may change it; else by an operator
    tokens_per_second double precision NOT NULL
        CONSTRAINT rate_limits_rate_fits CHECK (tokens_per_second > 0 AND tokens_per_second <= 1000000),
    burst integer NOT NULL DEFAULT 1 CONSTRAINT rate_limits_burst_fits CHECK (burst BETWEEN 1 AND 100000),
    -- An empty bucket is full again within a century: what comes after that cannot be computed.
    CONSTRAINT rate_limits_can_be_waited_for CHECK (burst / tokens_per_second <= 3e9),
    tat timestamptz NOT NULL DEFAULT '2000-01-01Z',     -- theoretical arrival time of the next token used
    next_at timestamptz,                                -- NULL: nobody waits in line
    taken bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX rate_limits_next_at ON {{schema}}.rate_limits (next_at) WHERE next_at IS NOT NULL;
CREATE INDEX rate_limits_patterns ON {{schema}}.rate_limits (name)
    WHERE pattern IS NULL AND right(name, 1) = '*' AND left(name, 6) <> 'queue:';
CREATE INDEX rate_limits_made ON {{schema}}.rate_limits (pattern) WHERE pattern IS NOT NULL;

-- queue and priority NULL: the task's own. next_tick NULL: to be computed, from now on, by the next worker
-- that looks; so a plain INSERT is enough, and so is `is_paused = false, next_tick = NULL` to go on.
CREATE TABLE {{schema}}.schedules (
    name text PRIMARY KEY,
    cron text NOT NULL,
    timezone text NOT NULL DEFAULT 'UTC',
    task text NOT NULL,
    args jsonb NOT NULL DEFAULT '{}',
    queue text,
    priority smallint CONSTRAINT schedules_priority_fits CHECK (priority >= 0),
    catch_up text NOT NULL DEFAULT 'latest'
        CONSTRAINT schedules_catch_up_is_known CHECK (catch_up IN ('latest', 'all', 'skip')),
    catch_up_limit integer NOT NULL DEFAULT 100
        CONSTRAINT schedules_catch_up_limit_fits CHECK (catch_up_limit BETWEEN 1 AND 1000),
    next_tick timestamptz
        CONSTRAINT schedules_next_tick_is_sane CHECK (next_tick >= '2000-01-01Z' AND next_tick < '3000-01-01Z'),
    last_tick timestamptz,
    fired bigint NOT NULL DEFAULT 0,
    skipped bigint NOT NULL DEFAULT 0,
    is_paused boolean NOT NULL DEFAULT false,
    source text NOT NULL DEFAULT 'runtime'
        CONSTRAINT schedules_source_is_known CHECK (source IN ('code', 'runtime')),
    app text,                           -- whose code declares it
    seen_at timestamptz,                -- when a live worker last said so
    CONSTRAINT schedules_code_is_seen CHECK ((source = 'code') = (num_nonnulls(app, seen_at) = 2)),
    -- What a job would refuse is refused here, not at three in the morning.
    CONSTRAINT schedules_texts_fit CHECK (
        octet_length(name) BETWEEN 1 AND 255
        AND octet_length(cron) BETWEEN 1 AND 255
        AND octet_length(timezone) BETWEEN 1 AND 255
        AND octet_length(task) BETWEEN 1 AND 250
        AND octet_length(queue) BETWEEN 1 AND 100
    ),
    CONSTRAINT schedules_args_fit CHECK (jsonb_typeof(args) = 'object' AND octet_length(args::text) <= 1048576)
) WITH (fillfactor = 50);
CREATE INDEX schedules_next_tick ON {{schema}}.schedules (next_tick) WHERE NOT is_paused;

-- The judge of last resort that a tick fires once, and the history that people see.
CREATE TABLE {{schema}}.schedule_runs (
    schedule text NOT NULL,
    tick timestamptz NOT NULL,
    job_id bigint NOT NULL,
    PRIMARY KEY (schedule, tick)
);

-- One row per dependency. Every change of state is a new generation.
CREATE TABLE {{schema}}.breakers (
    name text PRIMARY KEY CONSTRAINT breakers_name_fits CHECK (octet_length(name) BETWEEN 1 AND 255),
    state text NOT NULL DEFAULT 'closed'
        CONSTRAINT breakers_state_is_known CHECK (state IN ('closed', 'open', 'half_open')),
    generation bigint NOT NULL DEFAULT 1,
    failure_ratio double precision NOT NULL DEFAULT 0.5,
    min_calls integer NOT NULL DEFAULT 20,
    max_failures integer,                               -- if given, it opens at so many, whatever the ratio
    window_seconds double precision NOT NULL DEFAULT 10,
    open_seconds double precision NOT NULL DEFAULT 30,
    max_open_seconds double precision NOT NULL DEFAULT 600,
    probe_seconds double precision NOT NULL DEFAULT 15, -- a probe that its worker does not renew is given up
    pinned text[] NOT NULL DEFAULT '{}',                -- settings that an operator made: code leaves them alone
    window_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    successes bigint NOT NULL DEFAULT 0,                -- this window
    failures bigint NOT NULL DEFAULT 0,
    last_successes bigint NOT NULL DEFAULT 0,           -- the window before
    last_failures bigint NOT NULL DEFAULT 0,
    opens integer NOT NULL DEFAULT 0,                   -- in a row: backs off
    opened_at timestamptz,                              -- since when it is not closed
    retry_at timestamptz,                               -- open with NULL: until somebody closes it
    probe uuid,
    probe_until timestamptz,
    parked_until timestamptz,                           -- run_at of the jobs that wait for it; NULL: nobody does
    CONSTRAINT breakers_numbers_fit CHECK (
        failure_ratio > 0 AND failure_ratio <= 1
        AND min_calls > 0
        AND max_failures > 0
        AND window_seconds > 0 AND window_seconds <= 86400
        AND open_seconds > 0 AND open_seconds <= 604800
        AND max_open_seconds > 0 AND max_open_seconds <= 604800
        AND probe_seconds > 0 AND probe_seconds <= 86400
    )
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Where a locked job goes next; what fail_many, release, crash, reap and cancel hand to settle.
CREATE TYPE {{schema}}.verdict AS (
    place tid,
    job_id bigint,
    state text,
    run_at timestamptz,
    reason text,
    attempt integer,
    crashes integer,
    concurrency_key text,
    task text,
    queue text
);

-- Who did what to the queue, for people; see functions/audit.sql. Only added to, until it is old.
CREATE TABLE {{schema}}.audit_log (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    action text NOT NULL,               -- 'queue.pause', 'jobs.cancel'
    subject text,                       -- the name of the queue, limit, schedule or breaker
    jobs bigint,                        -- how many
    role text NOT NULL,                 -- that logged in
    actor text,                         -- the person or service behind it, as it says itself
    application text,
    address inet,
    session_pid integer NOT NULL,
    details jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_log_at ON {{schema}}.audit_log (at);
CREATE INDEX audit_log_subject ON {{schema}}.audit_log (subject, action, id);

-- What functions/*.sql has put into this schema: how to name each thing in a DROP, what no CREATE OR
-- REPLACE can change of it, its whole text, and the version of pgqueue that wrote it.
CREATE TABLE {{schema}}.definitions (
    object text PRIMARY KEY,
    shape text NOT NULL,
    checksum text NOT NULL,
    version text NOT NULL
);
