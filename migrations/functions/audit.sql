-- Who paused, cancelled, redrove, changed a limit, and when. Settings are watched by triggers, so that a
-- plain UPDATE is written down like a call; what is done to jobs is written down by the function or the statement
-- that does it. In its transaction: there is no entry of what was rolled back. Not seen is a DELETE by hand of dead
-- jobs or of keys; and an operator, who may write entries, may write false ones.

-- Write one entry. The role is the one that logged in, whatever it has become since; who is behind it says so by
-- SET LOCAL pgqueue.actor = '...'. SECURITY DEFINER: whoever may act needs no right to write here, and gets none.
CREATE OR REPLACE FUNCTION {{schema}}.audit(action text, subject text, jobs bigint, details jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    INSERT INTO audit_log (action, subject, jobs, role, actor, application, address, session_pid, details)
    VALUES (
        audit.action, audit.subject, audit.jobs, session_user,
        left(nullif(current_setting('pgqueue.actor', true), ''), 255),
        nullif(current_setting('application_name'), ''), inet_client_addr(), pg_backend_pid(),
        jsonb_strip_nulls(audit.details)
    );
END $$;

-- The same for jobs, of which the first few are named.
CREATE OR REPLACE FUNCTION {{schema}}.audit_jobs(
    action text, job_ids bigint[], details jsonb DEFAULT '{}'
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    IF cardinality(audit_jobs.job_ids) > 0 THEN
        PERFORM audit(
            audit_jobs.action, NULL, cardinality(audit_jobs.job_ids),
            audit_jobs.details || jsonb_build_object('job_ids', ARRAY(
                SELECT u.id FROM unnest(audit_jobs.job_ids) AS u (id) ORDER BY u.id LIMIT 20
            ))
        );
    END IF;
END $$;

CREATE OR REPLACE FUNCTION {{schema}}.audit_queue() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    was queues;
BEGIN
    IF TG_OP = 'DELETE' THEN
        PERFORM audit('queue.reset', OLD.name, NULL, '{}');
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' THEN
        was := OLD;
    ELSE
        was.is_paused := false;
    END IF;
    -- A limit's reason is the same column; it makes no new pause.
    IF NEW.is_paused AND (
        (was.is_paused, was.paused_until) IS DISTINCT FROM (NEW.is_paused, NEW.paused_until)
        OR was.reason IS DISTINCT FROM NEW.reason AND was.max_running IS NOT DISTINCT FROM NEW.max_running
    ) THEN
        PERFORM audit('queue.pause', NEW.name, NULL,
                      jsonb_build_object('until', NEW.paused_until, 'reason', NEW.reason));
    ELSIF was.is_paused AND NOT NEW.is_paused THEN
        PERFORM audit('queue.resume', NEW.name, NULL, '{}');
    END IF;
    IF was.max_running IS DISTINCT FROM NEW.max_running THEN
        PERFORM audit('queue.limit', NEW.name, NULL, jsonb_build_object(
            'max_running', NEW.max_running, 'before', was.max_running,
            'reason', CASE WHEN NEW.max_running IS NOT NULL THEN NEW.reason END
        ));
    END IF;
    IF was.retention_seconds IS DISTINCT FROM NEW.retention_seconds THEN
        PERFORM audit('queue.retention', NEW.name, NULL, jsonb_build_object(
            'retention_seconds', NEW.retention_seconds, 'before', was.retention_seconds
        ));
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER queues_audit AFTER INSERT OR UPDATE OR DELETE ON {{schema}}.queues
FOR EACH ROW
EXECUTE FUNCTION {{schema}}.audit_queue();

-- Of what a pattern makes for keys there is no entry, and a claim, which pays here, does not come by: it changes
-- neither the rate nor the burst.
CREATE OR REPLACE FUNCTION {{schema}}.audit_limit() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    before jsonb;
BEGIN
    IF TG_OP = 'DELETE' THEN
        PERFORM audit('limit.remove', OLD.name, NULL, '{}');
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' THEN
        IF (OLD.tokens_per_second, OLD.burst, OLD.is_declared, OLD.pattern)
           IS NOT DISTINCT FROM (NEW.tokens_per_second, NEW.burst, NEW.is_declared, NEW.pattern) THEN
            RETURN NULL;
        END IF;
        before := jsonb_build_object('tokens_per_second', OLD.tokens_per_second, 'burst', OLD.burst);
    END IF;
    PERFORM audit('limit.set', NEW.name, NULL, jsonb_build_object(
        'tokens_per_second', NEW.tokens_per_second, 'burst', NEW.burst,
        'is_from_code', nullif(NEW.is_declared, false), 'before', before
    ));
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER rate_limits_audit_new AFTER INSERT ON {{schema}}.rate_limits
FOR EACH ROW WHEN (NEW.pattern IS NULL)
EXECUTE FUNCTION {{schema}}.audit_limit();

CREATE OR REPLACE TRIGGER rate_limits_audit_change AFTER UPDATE OF tokens_per_second, burst, is_declared ON {{schema}}.rate_limits
FOR EACH ROW WHEN (NEW.pattern IS NULL)
EXECUTE FUNCTION {{schema}}.audit_limit();

CREATE OR REPLACE TRIGGER rate_limits_audit_gone AFTER DELETE ON {{schema}}.rate_limits
FOR EACH ROW WHEN (OLD.pattern IS NULL)
EXECUTE FUNCTION {{schema}}.audit_limit();

-- Firing does not come by: it changes none of these columns.
CREATE OR REPLACE FUNCTION {{schema}}.audit_schedule() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        PERFORM audit('schedule.remove', OLD.name, NULL,
                      jsonb_build_object('cron', OLD.cron, 'timezone', OLD.timezone, 'task', OLD.task));
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' AND OLD.is_paused <> NEW.is_paused THEN
        PERFORM audit(CASE WHEN NEW.is_paused THEN 'schedule.pause' ELSE 'schedule.resume' END, NEW.name, NULL, '{}');
    END IF;
    IF TG_OP = 'INSERT' THEN
        PERFORM audit('schedule.add', NEW.name, NULL, jsonb_build_object(
            'cron', NEW.cron, 'timezone', NEW.timezone, 'task', NEW.task,
            'is_from_code', nullif(NEW.source = 'code', false)
        ));
    ELSIF (OLD.cron, OLD.timezone, OLD.task, OLD.args, OLD.queue, OLD.priority, OLD.catch_up, OLD.catch_up_limit)
          IS DISTINCT FROM
          (NEW.cron, NEW.timezone, NEW.task, NEW.args, NEW.queue, NEW.priority, NEW.catch_up, NEW.catch_up_limit) THEN
        PERFORM audit('schedule.change', NEW.name, NULL, jsonb_build_object(
            'cron', NEW.cron, 'timezone', NEW.timezone, 'task', NEW.task,
            'is_from_code', nullif(NEW.source = 'code', false),
            'before', jsonb_build_object('cron', OLD.cron, 'timezone', OLD.timezone, 'task', OLD.task)
        ));
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER schedules_audit AFTER INSERT OR DELETE
OR UPDATE OF cron, timezone, task, args, queue, priority, catch_up, catch_up_limit, is_paused ON {{schema}}.schedules
FOR EACH ROW
EXECUTE FUNCTION {{schema}}.audit_schedule();

-- Settings only: that it opened and closed by itself is no one's doing, and by hand is written down where that is done.
CREATE OR REPLACE FUNCTION {{schema}}.audit_breaker() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    settings text[] := ARRAY['failure_ratio', 'min_calls', 'max_failures', 'window_seconds', 'open_seconds',
                             'max_open_seconds', 'probe_seconds', 'pinned'];
    changed jsonb;
BEGIN
    SELECT jsonb_object_agg(n.key, n.value) INTO changed
    FROM jsonb_each(to_jsonb(NEW)) AS n
    WHERE n.key = ANY (settings) AND n.value IS DISTINCT FROM to_jsonb(OLD) -> n.key;
    IF changed IS NOT NULL THEN
        PERFORM audit('breaker.set', NEW.name, NULL, jsonb_build_object('settings', changed));
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER breakers_audit AFTER UPDATE OF failure_ratio, min_calls, max_failures, window_seconds,
    open_seconds, max_open_seconds, probe_seconds, pinned ON {{schema}}.breakers
FOR EACH ROW
EXECUTE FUNCTION {{schema}}.audit_breaker();

-- Forget entries older than that, and never what is younger than 30 days: a worker may call this, and must not be
-- able to hide what its account has done.
CREATE OR REPLACE FUNCTION {{schema}}.prune_audit_log(older_than_seconds double precision, max_entries integer DEFAULT 1000)
RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
DECLARE
    pruned integer;
BEGIN
    WITH old AS MATERIALIZED (
        SELECT a.id FROM audit_log AS a
        WHERE a.at < clock_timestamp() - make_interval(secs => greatest(prune_audit_log.older_than_seconds, 30 * 86400))
        ORDER BY a.at LIMIT prune_audit_log.max_entries FOR UPDATE SKIP LOCKED
    )
    DELETE FROM audit_log AS a USING old AS o WHERE a.id = o.id;
    GET DIAGNOSTICS pruned = ROW_COUNT;
    RETURN pruned;
END $$;
