-- The registered tasks, and what a job gets from the definition of its own.

-- The definition of a task with the defaults filled in, whether it is registered or not.
CREATE OR REPLACE FUNCTION {{schema}}.definition(task text) RETURNS {{schema}}.tasks
LANGUAGE plpgsql STABLE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    found tasks;
BEGIN
    SELECT t.* INTO found FROM tasks AS t WHERE t.name = definition.task;
    found.name := definition.task;
    found.queue := coalesce(found.queue, 'default');
    found.priority := coalesce(found.priority, 0);
    found.max_attempts := coalesce(found.max_attempts, 5);
    found.timeout_seconds := coalesce(found.timeout_seconds, 300);
    found.concurrency_limit := coalesce(found.concurrency_limit, 1);
    found.is_unique_until_start := coalesce(found.is_unique_until_start, false);
    RETURN found;
END $$;

-- A key from its template: each {argument} becomes the text of that argument, or of its default. Only
-- strings, integers and booleans: of anything else the text is not certain, and neither is the key.
-- What was put in is not looked at again, so that an argument cannot name another one.
CREATE OR REPLACE FUNCTION {{schema}}.fill_key(
    template text, args jsonb, args_schema jsonb, task text, kind text
) RETURNS text
LANGUAGE plpgsql IMMUTABLE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    rest text := fill_key.template;
    filled text := '';
    place text[];
    value jsonb;
BEGIN
    LOOP
        place := regexp_match(rest, '^([^{]*)\{([^{}]+)\}(.*)$');
        IF place IS NULL THEN
            RETURN filled || rest;
        END IF;
        value := coalesce(fill_key.args -> place[2],
                          fill_key.args_schema #> ARRAY['properties', place[2], 'default']);
        IF value IS NULL THEN
            RAISE EXCEPTION 'the % of task % needs the argument %, which is missing',
                fill_key.kind, fill_key.task, place[2] USING ERRCODE = 'invalid_parameter_value';
        ELSIF jsonb_typeof(value) NOT IN ('string', 'boolean')
              AND NOT (jsonb_typeof(value) = 'number' AND value #>> '{}' ~ '^-?\d+$') THEN
            RAISE EXCEPTION 'the % of task % needs the argument % to be a string, an integer or a boolean, not %',
                fill_key.kind, fill_key.task, place[2], left(value::text, 40)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        filled := filled || place[1] || (value #>> '{}');
        rest := place[3];
    END LOOP;
END $$;

-- What the caller left NULL comes from the task's definition. What an array of jobs gets at once is
-- written out in enqueue_many.
CREATE OR REPLACE FUNCTION {{schema}}.fill_job(job {{schema}}.jobs) RETURNS {{schema}}.jobs
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    filled jobs := fill_job.job;
    task tasks := definition(filled.task);
BEGIN
    filled.queue := coalesce(filled.queue, task.queue);
    filled.priority := coalesce(filled.priority, task.priority);
    filled.max_attempts := coalesce(filled.max_attempts, task.max_attempts);
    filled.timeout_seconds := coalesce(filled.timeout_seconds, task.timeout_seconds);
    filled.concurrency_limit := coalesce(filled.concurrency_limit, task.concurrency_limit);
    filled.is_unique_until_start := coalesce(filled.is_unique_until_start, task.is_unique_until_start);
    filled.state := coalesce(
        filled.state, CASE WHEN filled.run_at > clock_timestamp() THEN 'scheduled' ELSE 'ready' END
    );
    IF num_nonnulls(task.concurrency_key, task.unique_key, task.idempotency_key, task.rate_key) > 0 THEN
        filled.concurrency_key := coalesce(filled.concurrency_key,
            fill_key(task.concurrency_key, filled.args, task.args_schema, task.name, 'concurrency_key'));
        filled.unique_key := coalesce(filled.unique_key,
            fill_key(task.unique_key, filled.args, task.args_schema, task.name, 'unique_key'));
        filled.idempotency_key := coalesce(filled.idempotency_key,
            fill_key(task.idempotency_key, filled.args, task.args_schema, task.name, 'idempotency_key'));
        filled.rate_key := coalesce(filled.rate_key,
            fill_key(task.rate_key, filled.args, task.args_schema, task.name, 'rate_key'));
    END IF;
    RETURN filled;
END $$;

-- SECURITY DEFINER: a role that may only INSERT into jobs gets the definitions too.
CREATE OR REPLACE FUNCTION {{schema}}.fill_inserted_job() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    RETURN fill_job(NEW);
END $$;

-- Our own functions give every column, and the keys, and never pay for the call. Nobody else gives both of these, so
-- whoever gives all the others still gets the keys. The server reads the condition anew in every statement, hence no
-- list of all columns.
CREATE OR REPLACE TRIGGER jobs_fill BEFORE INSERT ON {{schema}}.jobs
FOR EACH ROW
WHEN (NEW.is_unique_until_start IS NULL OR NEW.state IS NULL)
EXECUTE FUNCTION {{schema}}.fill_inserted_job();

-- Upsert definitions from a JSON array of objects with the columns of tasks as members; a missing or
-- null member means the default. Gives the number of rows written: what did not change and was seen
-- within a minute is left alone. In order of name, so that two workers do not deadlock.
CREATE OR REPLACE FUNCTION {{schema}}.register_tasks(definitions jsonb) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    written integer;
BEGIN
    INSERT INTO tasks AS t (name, queue, priority, max_attempts, timeout_seconds, concurrency_key, concurrency_limit,
                            unique_key, is_unique_until_start, idempotency_key, rate_key, breaker, args_schema)
    SELECT d.name, d.queue, d.priority, d.max_attempts, d.timeout_seconds, d.concurrency_key, d.concurrency_limit,
           d.unique_key, d.is_unique_until_start, d.idempotency_key, d.rate_key, d.breaker, d.args_schema
    FROM jsonb_to_recordset(register_tasks.definitions) AS d (
        name text, queue text, priority smallint, max_attempts integer, timeout_seconds real, concurrency_key text,
        concurrency_limit smallint, unique_key text, is_unique_until_start boolean, idempotency_key text, rate_key text,
        breaker text, args_schema jsonb
    )
    ORDER BY d.name
    ON CONFLICT (name) DO UPDATE SET
        queue = excluded.queue, priority = excluded.priority, max_attempts = excluded.max_attempts,
        timeout_seconds = excluded.timeout_seconds, concurrency_key = excluded.concurrency_key,
        concurrency_limit = excluded.concurrency_limit, unique_key = excluded.unique_key,
        is_unique_until_start = excluded.is_unique_until_start,
        idempotency_key = excluded.idempotency_key, rate_key = excluded.rate_key, breaker = excluded.breaker,
        args_schema = excluded.args_schema, seen_at = excluded.seen_at
    WHERE t.seen_at < excluded.seen_at - interval '1 minute'
       OR (t.queue, t.priority, t.max_attempts, t.timeout_seconds, t.concurrency_key, t.concurrency_limit,
           t.unique_key, t.is_unique_until_start, t.idempotency_key, t.rate_key, t.breaker, t.args_schema)
          IS DISTINCT FROM
          (excluded.queue, excluded.priority, excluded.max_attempts, excluded.timeout_seconds,
           excluded.concurrency_key, excluded.concurrency_limit, excluded.unique_key, excluded.is_unique_until_start,
           excluded.idempotency_key, excluded.rate_key, excluded.breaker, excluded.args_schema);
    GET DIAGNOSTICS written = ROW_COUNT;
    RETURN written;
END $$;
