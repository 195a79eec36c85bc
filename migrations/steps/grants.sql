-- Exactly what each role needs: whatever else it was given in this schema is taken back first.
REVOKE ALL ON SCHEMA {{schema}} FROM {{schema}}_producer, {{schema}}_worker, {{schema}}_viewer, {{schema}}_operator;
REVOKE ALL ON ALL TABLES IN SCHEMA {{schema}}
    FROM {{schema}}_producer, {{schema}}_worker, {{schema}}_viewer, {{schema}}_operator;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {{schema}}
    FROM {{schema}}_producer, {{schema}}_worker, {{schema}}_viewer, {{schema}}_operator;
GRANT USAGE ON SCHEMA {{schema}} TO {{schema}}_producer, {{schema}}_worker, {{schema}}_viewer, {{schema}}_operator;

-- Producer: asks for jobs and sees nothing, not even its own. RETURNING id would need the right to read ids:
-- the functions and new_jobs give them. What state a job is in, who holds it and what became of it is not for it to say.
-- Worker and operator ask for jobs too: a handler, and a person at the command line.
GRANT INSERT (
    task, args, queue, run_at, priority, max_attempts, timeout_seconds, concurrency_key, concurrency_limit, unique_key,
    is_unique_until_start, idempotency_key, headers
) ON {{schema}}.jobs TO {{schema}}_producer, {{schema}}_worker, {{schema}}_operator;
GRANT SELECT (id), INSERT (
    task, args, queue, priority, max_attempts, timeout_seconds, concurrency_key, concurrency_limit,
    is_unique_until_start, idempotency_key, headers
) ON {{schema}}.new_jobs TO {{schema}}_producer, {{schema}}_worker, {{schema}}_operator;
GRANT EXECUTE ON FUNCTION {{schema}}.enqueue, {{schema}}.enqueue_one, {{schema}}.enqueue_many
    TO {{schema}}_producer, {{schema}}_worker, {{schema}}_operator;

-- Viewer: reads everything, arguments and results too, and changes nothing. Worker and operator read as well.
-- For `pgqueue locks` to show the sessions of other roles: GRANT pg_read_all_stats TO {{schema}}_viewer.
GRANT SELECT ON ALL TABLES IN SCHEMA {{schema}} TO {{schema}}_viewer, {{schema}}_worker, {{schema}}_operator;
GRANT EXECUTE ON FUNCTION {{schema}}.ready_depth, {{schema}}.known_queues, {{schema}}.is_declared
    TO {{schema}}_viewer, {{schema}}_worker, {{schema}}_operator;

-- Worker: everything that moves a job it moves by our functions, which look at its token; of a job's row it can
-- write the progress, nothing else.
GRANT UPDATE (progress) ON {{schema}}.jobs TO {{schema}}_worker;
GRANT UPDATE (probe_until) ON {{schema}}.breakers TO {{schema}}_worker;
GRANT INSERT, UPDATE (seen_at), DELETE ON {{schema}}.workers TO {{schema}}_worker;
-- begin_once runs as its caller: it ends frozen sessions, and that is a right the owner of the tables may lack.
GRANT INSERT (idempotency_key, job_name, status, job_id, claim_token), UPDATE (job_name, job_id, claim_token, updated_at)
    ON {{schema}}.processed_jobs TO {{schema}}_worker;
GRANT EXECUTE ON FUNCTION
    {{schema}}.claim, {{schema}}.heartbeat, {{schema}}.complete, {{schema}}.fail, {{schema}}.fail_many,
    {{schema}}.release, {{schema}}.crash, {{schema}}.reap, {{schema}}.promote, {{schema}}.sweep,
    {{schema}}.once_lock, {{schema}}.end_lost_holder, {{schema}}.begin_once, {{schema}}.finish_once,
    {{schema}}.complete_once, {{schema}}.prune_processed,
    {{schema}}.make_partitions, {{schema}}.expired_partitions, {{schema}}.drop_partition,
    {{schema}}.may_run, {{schema}}.report, {{schema}}.breaker_park, {{schema}}.breaker_park_ready,
    {{schema}}.breaker_unpark, {{schema}}.breaker_call, {{schema}}.breaker_declare,
    {{schema}}.rate_declare, {{schema}}.rate_mend, {{schema}}.rate_next_at,
    {{schema}}.register_tasks, {{schema}}.register_schedules, {{schema}}.due_schedules, {{schema}}.fire,
    {{schema}}.prune_schedule_runs,
    {{schema}}.bell_channel, {{schema}}.rest, {{schema}}.rise, {{schema}}.ring,
    {{schema}}.prune_audit_log
    TO {{schema}}_worker;

-- Operator: what the admin commands do. Of a job's row it can write when it is due, nothing else.
GRANT UPDATE (state, run_at) ON {{schema}}.jobs TO {{schema}}_operator;
-- FOR UPDATE asks for the right to write some column.
GRANT UPDATE (died_at), DELETE ON {{schema}}.dead_jobs TO {{schema}}_operator;
GRANT DELETE ON {{schema}}.processed_jobs TO {{schema}}_operator;
GRANT INSERT, UPDATE, DELETE ON {{schema}}.schedules TO {{schema}}_operator;
GRANT UPDATE (pinned) ON {{schema}}.breakers TO {{schema}}_operator;
GRANT EXECUTE ON FUNCTION
    {{schema}}.cancel, {{schema}}.redrive, {{schema}}.pause_queues, {{schema}}.resume_queues, {{schema}}.limit_queue,
    {{schema}}.breaker_open, {{schema}}.breaker_close, {{schema}}.breaker_set,
    {{schema}}.rate_set, {{schema}}.rate_remove, {{schema}}.enqueue_tick, {{schema}}.once_lock,
    {{schema}}.make_partitions,
    {{schema}}.bell_channel, {{schema}}.ring, {{schema}}.audit, {{schema}}.audit_jobs
    TO {{schema}}_operator;
