-- What happened to every job, kept by triggers in the very transactions that did it. A claim that a
-- crash of the server undoes takes its line here with it.

CREATE SCHEMA faults;

CREATE TABLE faults.history (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    event text NOT NULL,                -- born, claimed, ended, gone
    job_id bigint NOT NULL,
    task text NOT NULL,
    queue text NOT NULL,
    attempt integer NOT NULL,
    max_attempts integer NOT NULL,
    crashes integer NOT NULL,
    token uuid,
    worker_id uuid,
    concurrency_key text,
    concurrency_limit integer,
    run_at timestamptz NOT NULL,
    lease_left double precision,        -- of an attempt that ended: what its lease still had
    was_overdue boolean,
    note text                           -- of an attempt that ended otherwise than well: what was written about it
);
CREATE INDEX history_job_id ON faults.history (job_id, seq);

-- What handlers leave: by their own connections, in their own transactions.
CREATE TABLE faults.effects (
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    mark text,
    key text,                           -- the counter that the same transaction raised by one
    pid integer NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX effects_job_id ON faults.effects (job_id);

CREATE TABLE faults.counters (key text PRIMARY KEY, value bigint NOT NULL DEFAULT 0);

CREATE FUNCTION faults.remember() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP <> 'INSERT' AND OLD.claim_token IS NOT NULL THEN
        INSERT INTO faults.history (event, job_id, task, queue, attempt, max_attempts, crashes, token, worker_id,
                                    concurrency_key, concurrency_limit, run_at, lease_left, was_overdue, note)
        SELECT 'ended', OLD.id, OLD.task, OLD.queue, OLD.attempt, OLD.max_attempts, OLD.crashes, OLD.claim_token,
               OLD.worker_id, OLD.concurrency_key, OLD.concurrency_limit, OLD.run_at,
               extract(epoch FROM OLD.heartbeat_at + make_interval(secs => OLD.lease_seconds) - clock_timestamp()),
               coalesce(OLD.deadline_at <= clock_timestamp(), false),
               CASE WHEN TG_OP = 'UPDATE' AND NEW.errors IS DISTINCT FROM OLD.errors THEN NEW.errors -> -1 ->> 'error' END;
    END IF;
    IF TG_OP = 'DELETE' THEN
        INSERT INTO faults.history (event, job_id, task, queue, attempt, max_attempts, crashes, token, worker_id,
                                    concurrency_key, concurrency_limit, run_at)
        SELECT 'gone', OLD.id, OLD.task, OLD.queue, OLD.attempt, OLD.max_attempts, OLD.crashes, OLD.claim_token,
               OLD.worker_id, OLD.concurrency_key, OLD.concurrency_limit, OLD.run_at;
    ELSIF TG_OP = 'INSERT' OR NEW.claim_token IS NOT NULL THEN
        INSERT INTO faults.history (event, job_id, task, queue, attempt, max_attempts, crashes, token, worker_id,
                                    concurrency_key, concurrency_limit, run_at)
        SELECT CASE TG_OP WHEN 'INSERT' THEN 'born' ELSE 'claimed' END, NEW.id, NEW.task, NEW.queue, NEW.attempt,
               NEW.max_attempts, NEW.crashes, NEW.claim_token, NEW.worker_id, NEW.concurrency_key,
               NEW.concurrency_limit, NEW.run_at;
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER faults_remember_birth AFTER INSERT ON pgqueue.jobs
FOR EACH ROW EXECUTE FUNCTION faults.remember();

CREATE TRIGGER faults_remember_change AFTER UPDATE ON pgqueue.jobs
FOR EACH ROW WHEN (NEW.claim_token IS DISTINCT FROM OLD.claim_token)
EXECUTE FUNCTION faults.remember();

CREATE TRIGGER faults_remember_end AFTER DELETE ON pgqueue.jobs
FOR EACH ROW EXECUTE FUNCTION faults.remember();

-- Every job, wherever it is now.
CREATE VIEW faults.everywhere AS
SELECT id, 'live' AS place, state, task, queue, attempt, crashes, claim_token, args, headers, unique_key,
       NULL AS reason
FROM pgqueue.jobs
UNION ALL
SELECT id, 'finished', state, task, queue, attempt, crashes, claim_token, args, headers, unique_key, reason
FROM pgqueue.finished_jobs
UNION ALL
SELECT id, 'dead', 'dead', task, queue, attempt, crashes, claim_token, args, headers, unique_key, reason
FROM pgqueue.dead_jobs;
