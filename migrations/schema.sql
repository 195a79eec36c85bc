CREATE SCHEMA pgqueue;

CREATE DOMAIN pgqueue.array_document AS jsonb
	CONSTRAINT jobs_documents_fit CHECK ((jsonb_typeof(VALUE) = 'array'::text));

CREATE DOMAIN pgqueue.attempt_count AS integer
	CONSTRAINT jobs_numbers_fit CHECK ((VALUE >= 0));

CREATE DOMAIN pgqueue.attempt_limit AS integer
	CONSTRAINT jobs_numbers_fit CHECK (((VALUE >= 1) AND (VALUE <= 100000)));

CREATE DOMAIN pgqueue.due_time AS timestamp with time zone
	CONSTRAINT jobs_run_at_is_sane CHECK (((VALUE >= '2000-01-01 00:00:00+00'::timestamp with time zone) AND (VALUE < '3000-01-01 00:00:00+00'::timestamp with time zone)));

CREATE DOMAIN pgqueue.headers_up_to_64_kib AS jsonb
	CONSTRAINT jobs_documents_fit CHECK ((jsonb_typeof(VALUE) = 'object'::text))
	CONSTRAINT jobs_headers_fit CHECK ((octet_length((VALUE)::text) <= 65536));

CREATE DOMAIN pgqueue.limit_name AS text
	CONSTRAINT jobs_names_fit CHECK ((((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 255)) AND ("left"(VALUE, 6) <> 'queue:'::text)));

CREATE DOMAIN pgqueue.object_document AS jsonb
	CONSTRAINT jobs_documents_fit CHECK ((jsonb_typeof(VALUE) = 'object'::text));

CREATE DOMAIN pgqueue.progress_up_to_64_kib AS jsonb
	CONSTRAINT jobs_headers_fit CHECK ((octet_length((VALUE)::text) <= 65536));

CREATE DOMAIN pgqueue.queue_name AS text
	CONSTRAINT jobs_names_fit CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 100)));

CREATE DOMAIN pgqueue.short_name AS text
	CONSTRAINT jobs_names_fit CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 255)));

CREATE DOMAIN pgqueue.slot_limit AS smallint
	CONSTRAINT jobs_numbers_fit CHECK (((VALUE >= 1) AND (VALUE <= 10000)));

CREATE DOMAIN pgqueue.small_count AS smallint
	CONSTRAINT jobs_numbers_fit CHECK ((VALUE >= 0));

CREATE DOMAIN pgqueue.task_name AS text
	CONSTRAINT jobs_names_fit CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 250)));

CREATE DOMAIN pgqueue.time_limit AS real
	CONSTRAINT jobs_numbers_fit CHECK (((VALUE >= (0)::double precision) AND (VALUE <= (604800)::double precision)));

CREATE TYPE pgqueue.verdict AS (
	place tid,
	job_id bigint,
	state text,
	run_at timestamp with time zone,
	reason text,
	attempt integer,
	crashes integer,
	concurrency_key text,
	task text,
	queue text
);

CREATE TABLE pgqueue.alembic_version (
    version_num character varying(32) NOT NULL
);

CREATE TABLE pgqueue.audit_log (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    action text NOT NULL,
    subject text,
    jobs bigint,
    role text NOT NULL,
    actor text,
    application text,
    address inet,
    session_pid integer NOT NULL,
    details jsonb DEFAULT '{}'::jsonb NOT NULL
);

ALTER TABLE pgqueue.audit_log ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pgqueue.audit_log_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE pgqueue.breakers (
    name text NOT NULL,
    state text DEFAULT 'closed'::text NOT NULL,
    generation bigint DEFAULT 1 NOT NULL,
    failure_ratio double precision DEFAULT 0.5 NOT NULL,
    min_calls integer DEFAULT 20 NOT NULL,
    max_failures integer,
    window_seconds double precision DEFAULT 10 NOT NULL,
    open_seconds double precision DEFAULT 30 NOT NULL,
    max_open_seconds double precision DEFAULT 600 NOT NULL,
    probe_seconds double precision DEFAULT 15 NOT NULL,
    pinned text[] DEFAULT '{}'::text[] NOT NULL,
    window_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    successes bigint DEFAULT 0 NOT NULL,
    failures bigint DEFAULT 0 NOT NULL,
    last_successes bigint DEFAULT 0 NOT NULL,
    last_failures bigint DEFAULT 0 NOT NULL,
    opens integer DEFAULT 0 NOT NULL,
    opened_at timestamp with time zone,
    retry_at timestamp with time zone,
    probe uuid,
    probe_until timestamp with time zone,
    parked_until timestamp with time zone,
    CONSTRAINT breakers_name_fits CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 255))),
    CONSTRAINT breakers_numbers_fit CHECK (((failure_ratio > (0)::double precision) AND (failure_ratio <= (1)::double precision) AND (min_calls > 0) AND (max_failures > 0) AND (window_seconds > (0)::double precision) AND (window_seconds <= (86400)::double precision) AND (open_seconds > (0)::double precision) AND (open_seconds <= (604800)::double precision) AND (max_open_seconds > (0)::double precision) AND (max_open_seconds <= (604800)::double precision) AND (probe_seconds > (0)::double precision) AND (probe_seconds <= (86400)::double precision))),
    CONSTRAINT breakers_state_is_known CHECK ((state = ANY (ARRAY['closed'::text, 'open'::text, 'half_open'::text])))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');

CREATE TABLE pgqueue.dead_jobs (
    id bigint NOT NULL,
    died_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    run_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
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

CREATE TABLE pgqueue.definitions (
    object text NOT NULL,
    shape text NOT NULL,
    checksum text NOT NULL,
    version text NOT NULL
);

CREATE TABLE pgqueue.finished_jobs (
    id bigint NOT NULL,
    finished_at timestamp with time zone NOT NULL,
    run_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    started_at timestamp with time zone,
    claim_token uuid,
    worker_id uuid,
    attempt integer NOT NULL,
    priority smallint NOT NULL,
    crashes smallint NOT NULL,
    state text NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    concurrency_key text,
    unique_key text,
    idempotency_key text,
    reason text,
    args jsonb NOT NULL,
    headers jsonb,
    errors jsonb,
    result jsonb,
    CONSTRAINT finished_jobs_state_is_final CHECK ((state = ANY (ARRAY['succeeded'::text, 'cancelled'::text])))
)
PARTITION BY RANGE (finished_at);

CREATE TABLE pgqueue.jobs (
    id bigint NOT NULL,
    run_at pgqueue.due_time DEFAULT clock_timestamp() NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    max_attempts pgqueue.attempt_limit NOT NULL,
    timeout_seconds pgqueue.time_limit NOT NULL,
    priority pgqueue.small_count NOT NULL,
    crashes pgqueue.small_count DEFAULT 0 NOT NULL,
    concurrency_limit pgqueue.slot_limit NOT NULL,
    is_unique_until_start boolean NOT NULL,
    queue pgqueue.queue_name NOT NULL,
    task pgqueue.task_name NOT NULL,
    args pgqueue.object_document DEFAULT '{}'::jsonb NOT NULL,
    state text NOT NULL,
    attempt pgqueue.attempt_count DEFAULT 0 NOT NULL,
    started_at timestamp with time zone,
    heartbeat_at timestamp with time zone,
    deadline_at timestamp with time zone,
    cancel_requested_at timestamp with time zone,
    rate_parked_at timestamp with time zone,
    claim_token uuid,
    worker_id uuid,
    lease_seconds real,
    concurrency_slot smallint,
    concurrency_key pgqueue.short_name,
    unique_key pgqueue.short_name,
    idempotency_key pgqueue.short_name,
    rate_key pgqueue.limit_name,
    headers pgqueue.headers_up_to_64_kib,
    errors pgqueue.array_document,
    progress pgqueue.progress_up_to_64_kib,
    CONSTRAINT jobs_state_is_sound CHECK (
CASE
    WHEN (state = 'running'::text) THEN ((num_nulls(claim_token, worker_id, heartbeat_at, lease_seconds, started_at) = 0) AND (lease_seconds > (0)::double precision) AND (lease_seconds <= (86400)::double precision) AND (rate_parked_at IS NULL) AND ((concurrency_key IS NULL) = (concurrency_slot IS NULL)) AND COALESCE(((concurrency_slot >= 1) AND (concurrency_slot <= (concurrency_limit)::smallint)), true))
    ELSE ((num_nonnulls(claim_token, worker_id, heartbeat_at, lease_seconds, deadline_at, concurrency_slot, cancel_requested_at) = 0) AND
    CASE state
        WHEN 'ready'::text THEN (rate_parked_at IS NULL)
        WHEN 'scheduled'::text THEN ((rate_parked_at IS NULL) OR (rate_key IS NOT NULL))
        WHEN 'blocked'::text THEN ((concurrency_key IS NOT NULL) AND (rate_parked_at IS NULL))
        ELSE false
    END)
END)
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_insert_scale_factor='0.2', autovacuum_analyze_scale_factor='0.05', autovacuum_analyze_threshold='1000', autovacuum_vacuum_cost_delay='0');

ALTER TABLE pgqueue.jobs ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pgqueue.jobs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE pgqueue.processed_jobs (
    idempotency_key character varying(255) NOT NULL,
    job_name text NOT NULL,
    status text NOT NULL,
    response_payload jsonb,
    job_id bigint,
    claim_token uuid,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT processed_jobs_status_is_known CHECK ((status = ANY (ARRAY['IN_PROGRESS'::text, 'COMPLETED'::text])))
)
WITH (fillfactor='80');

CREATE TABLE pgqueue.queues (
    name text NOT NULL,
    is_paused boolean DEFAULT false NOT NULL,
    paused_until timestamp with time zone,
    max_running integer,
    retention_seconds integer,
    reason text,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT queues_max_running_fits CHECK ((max_running >= 0)),
    CONSTRAINT queues_name_fits CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 100))),
    CONSTRAINT queues_pause_has_an_end CHECK (((paused_until IS NULL) OR (is_paused AND (paused_until >= '2000-01-01 00:00:00+00'::timestamp with time zone) AND (paused_until < '3000-01-01 00:00:00+00'::timestamp with time zone)))),
    CONSTRAINT queues_retention_fits CHECK ((retention_seconds >= 0))
);

CREATE TABLE pgqueue.rate_limits (
    name text NOT NULL,
    pattern text,
    is_declared boolean DEFAULT false NOT NULL,
    tokens_per_second double precision NOT NULL,
    burst integer DEFAULT 1 NOT NULL,
    tat timestamp with time zone DEFAULT '2000-01-01 00:00:00+00'::timestamp with time zone NOT NULL,
    next_at timestamp with time zone,
    taken bigint DEFAULT 0 NOT NULL,
    CONSTRAINT rate_limits_burst_fits CHECK (((burst >= 1) AND (burst <= 100000))),
    CONSTRAINT rate_limits_can_be_waited_for CHECK ((((burst)::double precision / tokens_per_second) <= ('3000000000'::numeric)::double precision)),
    CONSTRAINT rate_limits_name_fits CHECK (((octet_length(name) >= 1) AND (octet_length(name) <= 255))),
    CONSTRAINT rate_limits_rate_fits CHECK (((tokens_per_second > (0)::double precision) AND (tokens_per_second <= (1000000)::double precision)))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');

CREATE TABLE pgqueue.schedule_runs (
    schedule text NOT NULL,
    tick timestamp with time zone NOT NULL,
    job_id bigint NOT NULL
);

CREATE TABLE pgqueue.schedules (
    name text NOT NULL,
    cron text NOT NULL,
    timezone text DEFAULT 'UTC'::text NOT NULL,
    task text NOT NULL,
    args jsonb DEFAULT '{}'::jsonb NOT NULL,
    queue text,
    priority smallint,
    catch_up text DEFAULT 'latest'::text NOT NULL,
    catch_up_limit integer DEFAULT 100 NOT NULL,
    next_tick timestamp with time zone,
    last_tick timestamp with time zone,
    fired bigint DEFAULT 0 NOT NULL,
    skipped bigint DEFAULT 0 NOT NULL,
    is_paused boolean DEFAULT false NOT NULL,
    source text DEFAULT 'runtime'::text NOT NULL,
    app text,
    seen_at timestamp with time zone,
    CONSTRAINT schedules_args_fit CHECK (((jsonb_typeof(args) = 'object'::text) AND (octet_length((args)::text) <= 1048576))),
    CONSTRAINT schedules_catch_up_is_known CHECK ((catch_up = ANY (ARRAY['latest'::text, 'all'::text, 'skip'::text]))),
    CONSTRAINT schedules_catch_up_limit_fits CHECK (((catch_up_limit >= 1) AND (catch_up_limit <= 1000))),
    CONSTRAINT schedules_code_is_seen CHECK (((source = 'code'::text) = (num_nonnulls(app, seen_at) = 2))),
    CONSTRAINT schedules_next_tick_is_sane CHECK (((next_tick >= '2000-01-01 00:00:00+00'::timestamp with time zone) AND (next_tick < '3000-01-01 00:00:00+00'::timestamp with time zone))),
    CONSTRAINT schedules_priority_fits CHECK ((priority >= 0)),
    CONSTRAINT schedules_source_is_known CHECK ((source = ANY (ARRAY['code'::text, 'runtime'::text]))),
    CONSTRAINT schedules_texts_fit CHECK ((((octet_length(name) >= 1) AND (octet_length(name) <= 255)) AND ((octet_length(cron) >= 1) AND (octet_length(cron) <= 255)) AND ((octet_length(timezone) >= 1) AND (octet_length(timezone) <= 255)) AND ((octet_length(task) >= 1) AND (octet_length(task) <= 250)) AND ((octet_length(queue) >= 1) AND (octet_length(queue) <= 100))))
)
WITH (fillfactor='50');

CREATE TABLE pgqueue.tasks (
    name text NOT NULL,
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
    seen_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT tasks_names_fit CHECK ((((octet_length(name) >= 1) AND (octet_length(name) <= 250)) AND ((octet_length(queue) >= 1) AND (octet_length(queue) <= 100)) AND ((octet_length(concurrency_key) >= 1) AND (octet_length(concurrency_key) <= 255)) AND ((octet_length(unique_key) >= 1) AND (octet_length(unique_key) <= 255)) AND ((octet_length(idempotency_key) >= 1) AND (octet_length(idempotency_key) <= 255)) AND ((octet_length(rate_key) >= 1) AND (octet_length(rate_key) <= 255)) AND ((octet_length(breaker) >= 1) AND (octet_length(breaker) <= 255)))),
    CONSTRAINT tasks_numbers_fit CHECK (((priority >= 0) AND ((max_attempts >= 1) AND (max_attempts <= 100000)) AND ((timeout_seconds >= (0)::double precision) AND (timeout_seconds <= (604800)::double precision)) AND ((concurrency_limit >= 1) AND (concurrency_limit <= 10000))))
)
WITH (fillfactor='50');

CREATE TABLE pgqueue.workers (
    id uuid NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    queues text[] NOT NULL,
    slots integer NOT NULL,
    started_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    seen_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
)
WITH (fillfactor='50');

ALTER TABLE ONLY pgqueue.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);

ALTER TABLE ONLY pgqueue.audit_log
    ADD CONSTRAINT audit_log_pkey PRIMARY KEY (id);

ALTER TABLE ONLY pgqueue.breakers
    ADD CONSTRAINT breakers_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.dead_jobs
    ADD CONSTRAINT dead_jobs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY pgqueue.definitions
    ADD CONSTRAINT definitions_pkey PRIMARY KEY (object);

ALTER TABLE ONLY pgqueue.jobs
    ADD CONSTRAINT jobs_pkey PRIMARY KEY (id) WITH (fillfactor='40');

ALTER TABLE ONLY pgqueue.processed_jobs
    ADD CONSTRAINT processed_jobs_pkey PRIMARY KEY (idempotency_key);

ALTER TABLE ONLY pgqueue.queues
    ADD CONSTRAINT queues_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.rate_limits
    ADD CONSTRAINT rate_limits_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.schedule_runs
    ADD CONSTRAINT schedule_runs_pkey PRIMARY KEY (schedule, tick);

ALTER TABLE ONLY pgqueue.schedules
    ADD CONSTRAINT schedules_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.tasks
    ADD CONSTRAINT tasks_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (id);

CREATE INDEX audit_log_at ON pgqueue.audit_log USING btree (at);

CREATE INDEX audit_log_subject ON pgqueue.audit_log USING btree (subject, action, id);

CREATE INDEX dead_jobs_died_at ON pgqueue.dead_jobs USING btree (died_at);

CREATE INDEX finished_jobs_id ON ONLY pgqueue.finished_jobs USING btree (id);

CREATE INDEX jobs_blocked ON pgqueue.jobs USING btree ((
CASE
    WHEN (state = 'blocked'::text) THEN (concurrency_key)::text
    ELSE NULL::text
END)) WHERE (state = 'blocked'::text);

CREATE INDEX jobs_due ON pgqueue.jobs USING btree (run_at, id) WHERE (state = 'scheduled'::text);

CREATE INDEX jobs_rate_line ON pgqueue.jobs USING btree (rate_key, queue, priority, id) WHERE ((state = 'scheduled'::text) AND (rate_parked_at IS NOT NULL));

CREATE INDEX jobs_ready ON pgqueue.jobs USING btree (queue, priority, run_at, id) WHERE (state = 'ready'::text);

CREATE INDEX jobs_running ON pgqueue.jobs USING btree (id) WHERE (state = 'running'::text);

CREATE UNIQUE INDEX jobs_running_slot ON pgqueue.jobs USING btree (concurrency_key, concurrency_slot) WHERE (concurrency_slot IS NOT NULL);

CREATE UNIQUE INDEX jobs_unique_key ON pgqueue.jobs USING btree (unique_key) WHERE (unique_key IS NOT NULL);

CREATE INDEX jobs_waiting ON pgqueue.jobs USING btree (concurrency_key, queue, priority, run_at, id) WHERE ((state = ANY (ARRAY['ready'::text, 'blocked'::text])) AND (concurrency_key IS NOT NULL));

CREATE INDEX processed_jobs_created_at ON pgqueue.processed_jobs USING btree (created_at);

CREATE INDEX rate_limits_made ON pgqueue.rate_limits USING btree (pattern) WHERE (pattern IS NOT NULL);

CREATE INDEX rate_limits_next_at ON pgqueue.rate_limits USING btree (next_at) WHERE (next_at IS NOT NULL);

CREATE INDEX rate_limits_patterns ON pgqueue.rate_limits USING btree (name) WHERE ((pattern IS NULL) AND ("right"(name, 1) = '*'::text) AND ("left"(name, 6) <> 'queue:'::text));

CREATE INDEX schedules_next_tick ON pgqueue.schedules USING btree (next_tick) WHERE (NOT is_paused);
