-- Enqueue: the door.

-- The size of a document as *text* counts, because that is what claim sends: {"x": 1e131071} is 14 bytes
-- in and 131 kB out. A trigger with WHEN, not a CHECK: a CHECK is computed again at every claim and
-- heartbeat.
CREATE OR REPLACE FUNCTION {{schema}}.refuse_large_document() RETURNS trigger
LANGUAGE plpgsql
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    size integer := octet_length(NEW.args::text);
BEGIN
    IF size > 1048576 THEN
        RAISE EXCEPTION 'the args of task % are % bytes as text, a job carries at most 1048576', NEW.task, size
            USING ERRCODE = 'check_violation', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                  CONSTRAINT = 'jobs_args_fit';
    END IF;
    RAISE EXCEPTION 'headers and progress of a job of task % are % and % bytes as text, each may have 65536',
        NEW.task, coalesce(octet_length(NEW.headers::text), 0), coalesce(octet_length(NEW.progress::text), 0)
        USING ERRCODE = 'check_violation', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
              CONSTRAINT = 'jobs_headers_fit';
END $$;

CREATE OR REPLACE TRIGGER jobs_documents_fit AFTER INSERT OR UPDATE OF args, headers, progress ON {{schema}}.jobs
FOR EACH ROW
WHEN (octet_length(NEW.args::text) > 1048576
      OR octet_length(NEW.headers::text) > 65536
      OR octet_length(NEW.progress::text) > 65536)
EXECUTE FUNCTION {{schema}}.refuse_large_document();

-- Add one job; gives the id of the job that now stands for the request. NULL leaves a choice to the
-- task's definition. timeout_seconds 0 means no limit; delay_seconds counts from the database's now, if no
-- run_at is given. on_conflict says what a live job with the same unique_key means: skip = that job's id,
-- replace = that job takes our arguments unless it runs already (with a later run_at: debounce), reject =
-- unique_violation on jobs_unique_key.
CREATE OR REPLACE FUNCTION {{schema}}.enqueue(
    task text,
    args jsonb DEFAULT '{}',
    queue text DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    priority integer DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    timeout_seconds double precision DEFAULT NULL,
    concurrency_key text DEFAULT NULL,
    concurrency_limit integer DEFAULT NULL,
    unique_key text DEFAULT NULL,
    on_conflict text DEFAULT 'skip',
    idempotency_key text DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    delay_seconds double precision DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    job jobs;
    old record;
BEGIN
    IF enqueue.on_conflict IN ('skip', 'replace', 'reject') IS NOT TRUE THEN
        RAISE EXCEPTION 'on_conflict is %, not skip, replace or reject', enqueue.on_conflict
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    job.created_at := clock_timestamp();
    job.run_at := coalesce(enqueue.run_at, job.created_at + make_interval(secs => enqueue.delay_seconds), job.created_at);
    job.task := enqueue.task;
    job.args := coalesce(enqueue.args, '{}');
    job.queue := enqueue.queue;
    job.priority := enqueue.priority;
    job.max_attempts := enqueue.max_attempts;
    job.timeout_seconds := enqueue.timeout_seconds;
    job.concurrency_key := enqueue.concurrency_key;
    job.concurrency_limit := enqueue.concurrency_limit;
    job.unique_key := enqueue.unique_key;
    job.idempotency_key := enqueue.idempotency_key;
    job.headers := enqueue.headers;
    job := fill_job(job);
    LOOP
        IF job.unique_key IS NOT NULL AND enqueue.on_conflict <> 'reject' THEN
            INSERT INTO jobs (run_at, created_at, max_attempts, timeout_seconds, priority, concurrency_limit, state,
                              queue, task, concurrency_key, unique_key, idempotency_key, rate_key, args, headers)
            VALUES (job.run_at, job.created_at, job.max_attempts, job.timeout_seconds, job.priority,
                    job.concurrency_limit, job.state, job.queue, job.task, job.concurrency_key, job.unique_key,
                    job.idempotency_key, job.rate_key, job.args, job.headers)
            ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO NOTHING
            RETURNING id INTO job.id;
        ELSE
            INSERT INTO jobs (run_at, created_at, max_attempts, timeout_seconds, priority, concurrency_limit, state,
                              queue, task, concurrency_key, unique_key, idempotency_key, rate_key, args, headers)
            VALUES (job.run_at, job.created_at, job.max_attempts, job.timeout_seconds, job.priority,
                    job.concurrency_limit, job.state, job.queue, job.task, job.concurrency_key, job.unique_key,
                    job.idempotency_key, job.rate_key, job.args, job.headers)
            RETURNING id INTO job.id;
        END IF;
        IF FOUND THEN
            RETURN job.id;
        END IF;
        IF enqueue.on_conflict = 'skip' THEN
            SELECT j.id INTO old FROM jobs AS j WHERE j.unique_key = job.unique_key;
            IF FOUND THEN
                RETURN old.id;
            END IF;
        ELSE
            SELECT j.id, j.state, j.concurrency_key, j.queue INTO old
            FROM jobs AS j WHERE j.unique_key = job.unique_key FOR NO KEY UPDATE;
            IF FOUND THEN
                IF old.state <> 'running' THEN
                    UPDATE jobs AS j SET
                        run_at = job.run_at, state = job.state, max_attempts = least(j.attempt + job.max_attempts, 100000),
                        timeout_seconds = job.timeout_seconds, priority = job.priority,
                        queue = job.queue, task = job.task,
                        concurrency_key = job.concurrency_key, concurrency_limit = job.concurrency_limit,
                        idempotency_key = job.idempotency_key, rate_key = job.rate_key, rate_parked_at = NULL,
                        args = job.args, headers = job.headers
                    WHERE j.id = old.id;
                    IF job.state = 'ready' THEN
                        PERFORM ring(ARRAY[job.queue]);
                    END IF;
                    -- It was the ready job that the blocked ones of its key may rely on. Only then: the key's lock
                    -- is kept to the end of the caller's transaction and holds up completions meanwhile.
                    IF old.state = 'ready' AND old.concurrency_key IS NOT NULL
                       AND (job.state <> 'ready'
                            OR (old.concurrency_key, old.queue) IS DISTINCT FROM (job.concurrency_key, job.queue))
                    THEN
                        PERFORM unblock(ARRAY[old.concurrency_key]);
                    END IF;
                END IF;
                RETURN old.id;
            END IF;
        END IF;
        -- The holder of the key finished between the two statements: the key is free again.
    END LOOP;
END $$;

-- Add many jobs from one JSON array of objects with enqueue's argument names as members; one row for each
-- element, in the order given. A missing or null member means the same as NULL does to enqueue. outcome:
-- inserted, skipped (job_id is the live job with that unique_key) or replaced.
CREATE OR REPLACE FUNCTION {{schema}}.enqueue_many(jobs jsonb) RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off
AS $$
DECLARE
    now timestamptz := clock_timestamp();
    unique_tasks text[] := ARRAY(SELECT t.name FROM tasks AS t WHERE t.unique_key IS NOT NULL);
BEGIN
    IF jsonb_typeof(enqueue_many.jobs) IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'enqueue_many wants a JSON array' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT jsonb_path_exists(enqueue_many.jobs, '$[*].unique_key ? (@ != null)')
       AND (cardinality(unique_tasks) = 0 OR NOT EXISTS (
           SELECT FROM jsonb_array_elements(enqueue_many.jobs) AS e (job) WHERE e.job ->> 'task' = ANY (unique_tasks)
       ))
    THEN
        RETURN QUERY
        WITH given AS MATERIALIZED (
            SELECT g.task, coalesce(g.args, '{}') AS args, g.queue,
                   coalesce(g.run_at, now + make_interval(secs => g.delay_seconds), now) AS run_at, g.priority,
                   g.max_attempts, g.timeout_seconds, g.concurrency_key, g.concurrency_limit, g.idempotency_key,
                   g.headers, g.nth
            FROM ROWS FROM (jsonb_to_recordset(enqueue_many.jobs) AS (
                task text, args jsonb, queue text, run_at timestamptz, delay_seconds double precision,
                priority integer, max_attempts integer, timeout_seconds real, concurrency_key text,
                concurrency_limit integer, idempotency_key text, headers jsonb
            )) WITH ORDINALITY AS g (task, args, queue, run_at, delay_seconds, priority, max_attempts, timeout_seconds,
                                     concurrency_key, concurrency_limit, idempotency_key, headers, nth)
        ), task AS MATERIALIZED (
            SELECT n.task, d.queue, d.priority, d.max_attempts, d.timeout_seconds, d.concurrency_key,
                   d.concurrency_limit, d.idempotency_key, d.rate_key, d.args_schema
            FROM (SELECT DISTINCT g.task FROM given AS g) AS n
            CROSS JOIN LATERAL definition(n.task) AS d
        )
        INSERT INTO jobs AS j (run_at, created_at, max_attempts, timeout_seconds, priority, concurrency_limit, state,
                               queue, task, concurrency_key, idempotency_key, rate_key, args, headers)
        SELECT g.run_at, now, coalesce(g.max_attempts, t.max_attempts), coalesce(g.timeout_seconds, t.timeout_seconds),
               coalesce(g.priority, t.priority), coalesce(g.concurrency_limit, t.concurrency_limit),
               CASE WHEN g.run_at > now THEN 'scheduled' ELSE 'ready' END, coalesce(g.queue, t.queue), g.task,
               coalesce(g.concurrency_key, CASE WHEN t.concurrency_key IS NOT NULL THEN
                   fill_key(t.concurrency_key, g.args, t.args_schema, g.task, 'concurrency_key') END),
               coalesce(g.idempotency_key, CASE WHEN t.idempotency_key IS NOT NULL THEN
                   fill_key(t.idempotency_key, g.args, t.args_schema, g.task, 'idempotency_key') END),
               CASE WHEN t.rate_key IS NOT NULL THEN
                   fill_key(t.rate_key, g.args, t.args_schema, g.task, 'rate_key') END,
               g.args, g.headers
        FROM given AS g
        LEFT JOIN task AS t ON t.task = g.task
        ORDER BY g.nth
        RETURNING j.id, 'inserted'::text;
        RETURN;
    END IF;
    -- With unique keys: one at a time, in order of unique_key, so that two batches with the same
    -- keys meet in the same order and wait for each other instead of deadlocking.
    RETURN QUERY
    WITH given AS MATERIALIZED (
        SELECT e.job, e.nth, coalesce(e.job ->> 'unique_key', CASE WHEN t.unique_key IS NOT NULL THEN
                   fill_key(t.unique_key, coalesce(nullif(e.job -> 'args', 'null'), '{}'), t.args_schema, t.name,
                            'unique_key') END) AS unique_key
        FROM jsonb_array_elements(enqueue_many.jobs) WITH ORDINALITY AS e (job, nth)
        LEFT JOIN tasks AS t ON t.name = e.job ->> 'task'
        ORDER BY 3 NULLS LAST, 2
    ), made AS MATERIALIZED (
        SELECT g.nth, enqueue_one(g.job, g.unique_key) AS done FROM given AS g
    )
    SELECT (m.done).job_id, (m.done).outcome FROM made AS m ORDER BY m.nth;
END $$;

-- Inner part of enqueue_many.
CREATE OR REPLACE FUNCTION {{schema}}.enqueue_one(job jsonb, unique_key text)
RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp SET jit = off
AS $$
DECLARE
    old record;
BEGIN
    SELECT j.id, j.state INTO old FROM jobs AS j WHERE j.unique_key = enqueue_one.unique_key;
    job_id := enqueue(
        task => job ->> 'task',
        args => nullif(job -> 'args', 'null'),
        queue => job ->> 'queue',
        run_at => (job ->> 'run_at')::timestamptz,
        priority => (job ->> 'priority')::integer,
        max_attempts => (job ->> 'max_attempts')::integer,
        timeout_seconds => (job ->> 'timeout_seconds')::double precision,
        concurrency_key => job ->> 'concurrency_key',
        concurrency_limit => (job ->> 'concurrency_limit')::integer,
        unique_key => enqueue_one.unique_key,
        on_conflict => coalesce(job ->> 'on_conflict', 'skip'),
        idempotency_key => job ->> 'idempotency_key',
        headers => nullif(job -> 'headers', 'null'),
        delay_seconds => (job ->> 'delay_seconds')::double precision
    );
    outcome := CASE
        WHEN old.id IS DISTINCT FROM job_id THEN 'inserted'
        WHEN job ->> 'on_conflict' = 'replace' AND old.state <> 'running' THEN 'replaced'
        ELSE 'skipped'
    END;
    RETURN NEXT;
END $$;
