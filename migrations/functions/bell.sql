-- The bell: waking idle workers without making inserters pay.
--
-- Two advisory keys per queue. BELL: every insert of a ready job takes it shared until its transaction
-- ends ("an insert is in flight"); a worker sleeps only while it holds it exclusively. So an insert
-- that gets the lock is one that the worker cannot overlook, and one that does not get it rings.
-- DUTY: of the idle workers of a queue one stays on watch, the others just LISTEN.
--
-- Why nothing is lost: let a worker get BELL, then poll and find nothing. An insert that got BELL
-- before ended before, and a commit is visible before its locks are freed, so the poll saw it. An
-- insert that failed to get it notifies at commit, and LISTEN is older. There is no third case.

-- A channel name holds 63 bytes, a queue name 100: a longer one would abort the user's INSERT.
CREATE OR REPLACE FUNCTION {{schema}}.bell_channel(queue text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN CASE WHEN octet_length('{{schema}}.' || bell_channel.queue) <= 63 THEN '{{schema}}.' || bell_channel.queue
            ELSE 'pgqueue#' || md5('{{schema}}.' || bell_channel.queue) END;

-- Runs only when a worker sleeps on the queue. Sessions that PREPARE TRANSACTION set pgqueue.is_quiet = on
-- (NOTIFY would make PREPARE fail) and call ring() after COMMIT PREPARED, or accept the idle poll.
-- SECURITY DEFINER: a role that may only INSERT need not be allowed to execute our functions.
CREATE OR REPLACE FUNCTION {{schema}}.ring_for_insert() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    IF NEW.state = 'ready' AND coalesce(current_setting('pgqueue.is_quiet', true), '') <> 'on' THEN
        PERFORM pg_notify(bell_channel(NEW.queue), '');
    END IF;
    RETURN NULL;
END $$;

-- The probe sits in WHEN, not in the function: no PL/pgSQL call and no queued event while nobody sleeps
-- (0.93 of the speed without a trigger; a statement trigger with a transition table has 0.80, NOTIFY for
-- every insert 0.23 at 32 clients). AFTER, so that COPY keeps its multi-insert.
CREATE OR REPLACE TRIGGER jobs_bell AFTER INSERT ON {{schema}}.jobs
FOR EACH ROW
WHEN (NOT pg_try_advisory_xact_lock_shared({{bell_lock}}, hashtext(NEW.queue)))
EXECUTE FUNCTION {{schema}}.ring_for_insert();

-- The same promise for whoever makes jobs ready by UPDATE: call it in the same transaction, before it
-- commits, never from the session that LISTENs (own locks do not conflict).
CREATE OR REPLACE FUNCTION {{schema}}.ring(queues text[]) RETURNS void
LANGUAGE sql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
    SELECT pg_notify(bell_channel(rung.queue), '')
    FROM (SELECT DISTINCT q.queue FROM unnest(ring.queues) AS q (queue) OFFSET 0) AS rung
    WHERE NOT pg_try_advisory_xact_lock_shared({{bell_lock}}, hashtext(rung.queue))
$$;

-- For a worker, on the session that LISTENs, after an empty claim, while not asleep. on_duty: the last
-- answer was not 'off'. may_sleep false: short polls are still wanted, only take duty.
--   asleep  inserts ring from now on: claim ONCE more, then wait for the bell (or the idle poll)
--   watch   we are on duty; polls are wanted, or an insert is in flight: claim again in a few ms, at most 50
--   off     another worker is on duty: just wait
-- Session locks are counted: never call it again while asleep without rise() in between.
CREATE OR REPLACE FUNCTION {{schema}}.rest(queue text, on_duty boolean, may_sleep boolean DEFAULT true) RETURNS text
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    IF NOT rest.on_duty AND NOT pg_try_advisory_lock({{duty_lock}}, hashtext(rest.queue)) THEN
        RETURN 'off';
    END IF;
    IF rest.may_sleep AND pg_try_advisory_lock({{bell_lock}}, hashtext(rest.queue)) THEN
        RETURN 'asleep';
    END IF;
    RETURN 'watch';
END $$;

-- For a worker, on the same session. After the bell: (queue, true, false, false). On duty and no free slot
-- left, or shutting down: (queue, was_asleep, true, true), so that another sleeper takes over at once.
CREATE OR REPLACE FUNCTION {{schema}}.rise(queue text, was_asleep boolean, leaves_duty boolean, rings boolean)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = {{schema}}, pg_temp
AS $$
BEGIN
    IF rise.was_asleep THEN
        PERFORM pg_advisory_unlock({{bell_lock}}, hashtext(rise.queue));
    END IF;
    IF rise.leaves_duty THEN
        PERFORM pg_advisory_unlock({{duty_lock}}, hashtext(rise.queue));
        IF rise.rings THEN
            PERFORM pg_notify(bell_channel(rise.queue), 'more');
        END IF;
    END IF;
END $$;
