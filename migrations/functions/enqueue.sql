-- Enqueue: the door.

-- The size of a document as *text* counts, because that is what claim sends: {"x": 1e131071} is 14 bytes
-- in and 131 kB out. A trigger with WHEN, not a CHECK: a CHECK is computed again at every claim and
-- heartbeat. And no domain, as for headers and progress, which could not say the size and the task.
CREATE OR REPLACE FUNCTION {{schema}}.refuse_large_args() RETURNS trigger
LANGUAGE plpgsql
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'the args of task % are % bytes as text, a job carries at most 1048576',
        NEW.task, octet_length(NEW.args::text)
        USING ERRCODE = 'check_violation', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
              CONSTRAINT = 'jobs_args_fit';
END $$;

CREATE OR REPLACE TRIGGER jobs_args_fit AFTER INSERT OR UPDATE OF args ON {{schema}}.jobs
FOR EACH ROW
WHEN (octet_length(NEW.args::text) > 1048576)
EXECUTE FUNCTION {{schema}}.refuse_large_args();

-- Add one job; gives the id of the job that now stands for the request, and what that took: inserted, skipped (a live
-- job with that unique_key stands as it was) or replaced (it took our arguments). left_key is the concurrency key that
-- the replaced job left: whose waiting jobs are to be woken, by the caller if wakes is false.
CREATE OR REPLACE FUNCTION {{schema}}.enqueue_one(
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
    delay_seconds double precision DEFAULT NULL,
    unique_until text DEFAULT NULL,
    max_delay_seconds double precision DEFAULT NULL,
    wakes boolean DEFAULT true
) RETURNS TABLE (job_id bigint, outcome text, left_key text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    job jobs;
    old record;
    latest_seconds double precision := coalesce(enqueue_one.max_delay_seconds, 10 * enqueue_one.delay_seconds);
BEGIN
    IF enqueue_one.task IS NULL THEN
        RAISE EXCEPTION 'the job has no task' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue_one.on_conflict IN ('skip', 'replace', 'reject', 'debounce') IS NOT TRUE THEN
        RAISE EXCEPTION 'on_conflict is %, not skip, replace, reject or debounce', enqueue_one.on_conflict
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue_one.on_conflict = 'debounce' AND latest_seconds IS NULL THEN
        RAISE EXCEPTION 'on_conflict debounce puts a job off: it needs delay_seconds'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue_one.unique_until NOT IN ('end', 'start') THEN
        RAISE EXCEPTION 'unique_until is %, not end or start', enqueue_one.unique_until
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    job.created_at := clock_timestamp();
    job.run_at := coalesce(
        enqueue_one.run_at, job.created_at + make_interval(secs => enqueue_one.delay_seconds), job.created_at
    );
    job.task := enqueue_one.task;
    job.args := coalesce(enqueue_one.args, '{}');
    job.queue := enqueue_one.queue;
    job.priority := enqueue_one.priority;
    job.max_attempts := enqueue_one.max_attempts;
    job.timeout_seconds := enqueue_one.timeout_seconds;
    job.concurrency_key := enqueue_one.concurrency_key;
    job.concurrency_limit := enqueue_one.concurrency_limit;
    job.unique_key := enqueue_one.unique_key;
    job.is_unique_until_start := enqueue_one.unique_until = 'start';
    job.idempotency_key := enqueue_one.idempotency_key;
    job.headers := enqueue_one.headers;
    job := fill_job(job);
    LOOP
        IF job.unique_key IS NOT NULL AND enqueue_one.on_conflict <> 'reject' THEN
            INSERT INTO jobs (run_at, created_at, max_attempts, timeout_seconds, priority, concurrency_limit,
                              is_unique_until_start, state, queue, task, concurrency_key, unique_key, idempotency_key,
                              rate_key, args, headers)
            VALUES (job.run_at, job.created_at, job.max_attempts, job.timeout_seconds, job.priority,
                    job.concurrency_limit, job.is_unique_until_start, job.state, job.queue, job.task,
                    job.concurrency_key, job.unique_key, job.idempotency_key, job.rate_key, job.args, job.headers)
            ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO NOTHING
            RETURNING id INTO job.id;
        ELSE
            INSERT INTO jobs (run_at, created_at, max_attempts, timeout_seconds, priority, concurrency_limit,
                              is_unique_until_start, state, queue, task, concurrency_key, unique_key, idempotency_key,
                              rate_key, args, headers)
            VALUES (job.run_at, job.created_at, job.max_attempts, job.timeout_seconds, job.priority,
                    job.concurrency_limit, job.is_unique_until_start, job.state, job.queue, job.task,
                    job.concurrency_key, job.unique_key, job.idempotency_key, job.rate_key, job.args, job.headers)
            RETURNING id INTO job.id;
        END IF;
        IF FOUND THEN
            RETURN QUERY SELECT job.id, 'inserted', NULL;
            RETURN;
        END IF;
        IF enqueue_one.on_conflict <> 'skip' THEN
            -- One that runs is left alone, also by our lock: until the caller's transaction ends it could not finish.
            SELECT j.id, j.state, j.created_at, j.concurrency_key, j.queue INTO old
            FROM jobs AS j WHERE j.unique_key = job.unique_key AND j.state <> 'running' FOR NO KEY UPDATE;
            IF FOUND THEN
                IF enqueue_one.on_conflict = 'debounce' THEN
                    job.run_at := least(job.run_at, old.created_at + make_interval(secs => latest_seconds));
                    job.state := CASE WHEN job.run_at > clock_timestamp() THEN 'scheduled' ELSE 'ready' END;
                END IF;
                UPDATE jobs AS j SET
                    run_at = job.run_at, state = job.state, max_attempts = least(j.attempt + job.max_attempts, 100000),
                    timeout_seconds = job.timeout_seconds, priority = job.priority,
                    queue = job.queue, task = job.task,
                    concurrency_key = job.concurrency_key, concurrency_limit = job.concurrency_limit,
                    is_unique_until_start = job.is_unique_until_start,
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
                    left_key := old.concurrency_key;
                    IF enqueue_one.wakes THEN
                        PERFORM unblock(ARRAY[left_key]);
                    END IF;
                END IF;
                RETURN QUERY SELECT old.id, 'replaced', left_key;
                RETURN;
            END IF;
        END IF;
        SELECT j.id INTO old FROM jobs AS j WHERE j.unique_key = job.unique_key;
        IF FOUND THEN
            RETURN QUERY SELECT old.id, 'skipped', NULL;
            RETURN;
        END IF;
        -- The holder of the key finished between the two statements: the key is free again.
    END LOOP;
END $$;

-- Add one job; gives the id of the job that now stands for the request. NULL leaves a choice to the
-- task's definition. timeout_seconds 0 means no limit; delay_seconds counts from the database's now, if no
-- run_at is given. on_conflict says what a live job with the same unique_key means: skip = that job's id,
-- replace = that job takes our arguments unless it runs already, debounce = the same, and it is put off again, but
-- not beyond max_delay_seconds (ten times the delay) after it was made, reject = unique_violation on
-- jobs_unique_key. unique_until end = also while it runs (the default), start = until it is claimed.
-- replace and debounce: call it last in a transaction. Until its end completions of the key that the job left wait,
-- and what waits for such a completion in turn can be a deadlock, which the server ends by an error.
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
    delay_seconds double precision DEFAULT NULL,
    unique_until text DEFAULT NULL,
    max_delay_seconds double precision DEFAULT NULL
) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT o.job_id
    FROM enqueue_one(
        enqueue.task, enqueue.args, enqueue.queue, enqueue.run_at, enqueue.priority, enqueue.max_attempts,
        enqueue.timeout_seconds, enqueue.concurrency_key, enqueue.concurrency_limit, enqueue.unique_key,
        enqueue.on_conflict, enqueue.idempotency_key, enqueue.headers, enqueue.delay_seconds, enqueue.unique_until,
        enqueue.max_delay_seconds
    ) AS o
$$;

-- Add many jobs from one JSON array of objects with enqueue's argument names as members; one row for each
-- element, in the order given. A missing or null member means the same as NULL does to enqueue; one that enqueue
-- does not know is refused. outcome as that of enqueue_one. is_checked: the caller has made sure of the members, and
-- saves a tenth of the time.
CREATE OR REPLACE FUNCTION {{schema}}.enqueue_many(jobs jsonb, is_checked boolean DEFAULT false)
RETURNS TABLE (job_id bigint, outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off
AS $$
DECLARE
    now timestamptz := clock_timestamp();
    unique_tasks text[] := ARRAY(SELECT t.name FROM tasks AS t WHERE t.unique_key IS NOT NULL);
    members text[] := '{task, args, queue, run_at, delay_seconds, max_delay_seconds, priority, max_attempts,
                        timeout_seconds, concurrency_key, concurrency_limit, unique_key, unique_until, on_conflict,
                        idempotency_key, headers}';
    unique_keys text[];
    ids bigint[];
    stranger record;
    is_plain boolean;
BEGIN
    IF jsonb_typeof(enqueue_many.jobs) IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'enqueue_many wants a JSON array' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF enqueue_many.is_checked THEN
        is_plain := NOT jsonb_path_exists(enqueue_many.jobs, '$[*].unique_key ? (@ != null)');
    ELSE
        IF jsonb_path_exists(enqueue_many.jobs, 'strict $[*] ? (@.type() != "object")') THEN
            RAISE EXCEPTION 'enqueue_many wants a JSON array of objects' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        SELECT e.nth - 1 AS place, (SELECT min(k.name) FROM jsonb_object_keys(e.job - members) AS k (name)) AS name
        INTO stranger
        FROM jsonb_array_elements(enqueue_many.jobs) WITH ORDINALITY AS e (job, nth)
        WHERE e.job - members <> '{}' OR e.job ->> 'task' IS NULL
        LIMIT 1;
        IF FOUND AND stranger.name IS NULL THEN
            RAISE EXCEPTION 'job % of enqueue_many has no task', stranger.place
                USING ERRCODE = 'invalid_parameter_value';
        ELSIF FOUND THEN
            RAISE EXCEPTION 'job % of enqueue_many has the member "%", which is none of: %',
                stranger.place, left(stranger.name, 100), array_to_string(members, ', ')
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        is_plain := NOT EXISTS (
            SELECT FROM jsonb_array_elements(enqueue_many.jobs) AS e (job)
            WHERE e.job ?| '{unique_key, unique_until, max_delay_seconds}' OR e.job ->> 'on_conflict' <> 'skip'
        );
    END IF;
    IF is_plain
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
        INSERT INTO jobs AS j (run_at, created_at, max_attempts, timeout_seconds, priority, concurrency_limit,
                               is_unique_until_start, state, queue, task, concurrency_key, idempotency_key, rate_key,
                               args, headers)
        SELECT g.run_at, now, coalesce(g.max_attempts, t.max_attempts), coalesce(g.timeout_seconds, t.timeout_seconds),
               coalesce(g.priority, t.priority), coalesce(g.concurrency_limit, t.concurrency_limit), false,
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
    unique_keys := ARRAY(
        SELECT coalesce(e.job ->> 'unique_key', CASE WHEN t.unique_key IS NOT NULL THEN
                   fill_key(t.unique_key, coalesce(nullif(e.job -> 'args', 'null'), '{}'), t.args_schema, t.name,
                            'unique_key') END)
        FROM jsonb_array_elements(enqueue_many.jobs) WITH ORDINALITY AS e (job, nth)
        LEFT JOIN tasks AS t ON t.name = e.job ->> 'task'
        ORDER BY e.nth
    );
    -- What will be replaced, in order of id, as everybody locks rows.
    ids := ARRAY(
        SELECT (SELECT j.id FROM jobs AS j WHERE j.unique_key = unique_keys[e.nth])
        FROM jsonb_array_elements(enqueue_many.jobs) WITH ORDINALITY AS e (job, nth)
        WHERE e.job ->> 'on_conflict' IN ('replace', 'debounce')
        ORDER BY 1
    );
    PERFORM FROM unnest(ids) AS u (id)
    CROSS JOIN LATERAL (SELECT FROM jobs AS j WHERE j.id = u.id AND j.state <> 'running' FOR NO KEY UPDATE) AS j;
    -- With unique keys: one at a time, in order of unique_key, so that two batches with the same
    -- keys meet in the same order and wait for each other instead of deadlocking.
    RETURN QUERY
    WITH given AS MATERIALIZED (
        SELECT e.job, e.nth, unique_keys[e.nth] AS unique_key
        FROM jsonb_array_elements(enqueue_many.jobs) WITH ORDINALITY AS e (job, nth)
        ORDER BY 3 NULLS LAST, 2
    ), made AS MATERIALIZED (
        SELECT g.nth, enqueue_one(
            task => g.job ->> 'task',
            args => nullif(g.job -> 'args', 'null'),
            queue => g.job ->> 'queue',
            run_at => (g.job ->> 'run_at')::timestamptz,
            priority => (g.job ->> 'priority')::integer,
            max_attempts => (g.job ->> 'max_attempts')::integer,
            timeout_seconds => (g.job ->> 'timeout_seconds')::double precision,
            concurrency_key => g.job ->> 'concurrency_key',
            concurrency_limit => (g.job ->> 'concurrency_limit')::integer,
            unique_key => g.unique_key,
            on_conflict => coalesce(g.job ->> 'on_conflict', 'skip'),
            idempotency_key => g.job ->> 'idempotency_key',
            headers => nullif(g.job -> 'headers', 'null'),
            delay_seconds => (g.job ->> 'delay_seconds')::double precision,
            unique_until => g.job ->> 'unique_until',
            max_delay_seconds => (g.job ->> 'max_delay_seconds')::double precision,
            wakes => false
        ) AS done
        FROM given AS g
    ), woken AS MATERIALIZED (      -- all together: the locks of keys are taken in order of their number
        SELECT unblock(array_agg((m.done).left_key)) FROM made AS m
        WHERE (m.done).left_key IS NOT NULL
        HAVING count(*) > 0
    )
    SELECT (m.done).job_id, (m.done).outcome FROM made AS m LEFT JOIN woken ON true ORDER BY m.nth;
END $$;
