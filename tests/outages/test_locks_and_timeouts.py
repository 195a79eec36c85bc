"""A migration's lock, a role's hasty settings, a slow server: waited out, at no attempt's cost."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing

import psycopg

from tests.outages.support import IN_CI, Crew, Node, check_no_attempt_is_burnt
from tests.process.support import Queue
from tests.support import wait_until

# After a lock that lasted for more than about half a lease the reaper waits for a whole one.
LEASE_SECONDS, LOCK_SECONDS = (20.0, 3.0) if IN_CI else (8.0, 1.5)

LEFT_BEHIND = """
INSERT INTO pgqueue.jobs
    (task, state, attempt, lease_seconds, claim_token, worker_id, started_at, heartbeat_at)
VALUES
    ('work', 'running', 1, 1, gen_random_uuid(), gen_random_uuid(), now(), now() - interval '1 min')
"""
DUE = """
INSERT INTO pgqueue.jobs (task, state, run_at)
VALUES ('work', 'scheduled', clock_timestamp() - interval '1 s')
RETURNING id
"""
# Statements on the worker's behalf are as slow as the one row of this table says.
SLOWNESS = """
CREATE TABLE slowness (seconds float);
INSERT INTO slowness VALUES (0);
CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS
    $$BEGIN PERFORM pg_sleep(seconds) FROM public.slowness; RETURN NEW; END$$;
CREATE TRIGGER dawdle BEFORE UPDATE ON pgqueue.jobs FOR EACH ROW
    WHEN (OLD.state = 'ready' AND NEW.state = 'running') EXECUTE FUNCTION dawdle();
CREATE TRIGGER dawdle BEFORE INSERT ON pgqueue.finished_jobs FOR EACH ROW EXECUTE FUNCTION dawdle();
"""


def test_workers_wait_for_a_table_that_a_migration_has_locked(node: Node, crew: Crew) -> None:
    options = ("-c", "8", "--lease-seconds", str(LEASE_SECONDS))
    with closing(Queue(node.admin_dsn)) as queue, crew.start(1, *options) as (started,):
        queue.connection.execute(LEFT_BEHIND)
        # From now on it has watched for long enough to take back what others leave.
        started.wait_for("job taken back")
        jobs = [queue.insert("work", '{"seconds": 0.5}') for _ in range(8)]
        for job in jobs:
            crew.wait_for_start(job)

        with psycopg.connect(node.admin_dsn) as migration:
            migration.execute("LOCK TABLE pgqueue.jobs IN ACCESS EXCLUSIVE MODE")
            over_at = time.monotonic() + LOCK_SECONDS
            wait_until(lambda: time.monotonic() > over_at, LOCK_SECONDS + 1)
            (due,) = migration.execute(DUE).fetchone() or (0,)
            migration.execute(LEFT_BEHIND)
        freed_at = time.monotonic()
        crew.wait_for_start(due)
        for job in jobs:
            queue.wait_for_state(job, "succeeded")
        went_on = time.monotonic() - freed_at
        started.wait_for("job taken back", 2)
        reaped = time.monotonic() - freed_at
        wait_until(lambda: queue.count("jobs") == 0)

        print(f"locked for {LOCK_SECONDS:g} s; all went on after {went_on:.2f} s, reaped {reaped:.2f} s")
        assert went_on < 20
        assert reaped < LEASE_SECONDS
        assert crew.outages_said() == [(0, 0)], crew.said()
        said = Counter((line["event"], line.get("chore"), line.get("job_id")) for line in crew.complaints())
        assert max(said.values()) == 1, crew.said()
        assert queue.count("finished_jobs", "attempt - crashes <> 1 OR crashes > 1") == 0
        assert queue.count("finished_jobs", "crashes = 1") == 2
        assert started.stop() == 0


def test_settings_made_for_the_role_do_not_reach_the_workers_sessions(node: Node, crew: Crew) -> None:
    with closing(Queue(node.admin_dsn)) as queue:
        settings = {
            "statement_timeout": "1ms",
            "lock_timeout": "1ms",
            "idle_session_timeout": "200ms",
            "idle_in_transaction_session_timeout": "1ms",
            "default_transaction_isolation": "serializable",
        }
        if queue.connection.info.server_version >= 170_000:
            settings["transaction_timeout"] = "1ms"
        for name, value in settings.items():
            queue.connection.execute(f"ALTER ROLE app SET {name} = '{value}'")  # type: ignore[arg-type]

        with crew.start(1) as (started,):
            for job in [queue.insert("work", '{"seconds": 0.01}') for _ in range(300)]:
                queue.wait_for_state(job, "succeeded")

            assert crew.complaints() == []
            assert crew.outages_said() == [(0, 0)], crew.said()
            check_no_attempt_is_burnt(queue)
            assert started.stop() == 0


def test_statements_that_a_slow_server_gives_up_are_asked_again_and_cost_no_attempt(
    node: Node, crew: Crew
) -> None:
    slow = "FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND application_name = %s"
    with closing(Queue(node.admin_dsn)) as queue:
        queue.connection.execute(SLOWNESS)  # type: ignore[arg-type]
        with crew.start(1) as (started,):
            jobs = [queue.insert("work", '{"seconds": 3}') for _ in range(2)]
            for job in jobs:
                crew.wait_for_start(job)
            queue.connection.execute("UPDATE slowness SET seconds = 60")
            waiting = queue.insert("work")

            # As the server does when statement_timeout is over, only sooner.
            for session in ("pgqueue worker claim", "pgqueue worker finish") * 3:
                wait_until(lambda session=session: queue.one(f"SELECT count(*) {slow}", session))
                queue.all(f"SELECT pg_cancel_backend(pid) {slow}", session)
            queue.connection.execute("UPDATE slowness SET seconds = 0")
            queue.all(f"SELECT pg_cancel_backend(pid) {slow.partition(' AND')[0]}")
            for job in (*jobs, waiting):
                queue.wait_for_state(job, "succeeded")

            assert crew.outages_said() == [(0, 0)], crew.said()
            assert len(started.lines("claim put off")) == 1
            assert {line["event"] for line in crew.complaints()} == {"claim put off", "outcome put off"}
            assert len(crew.effects()) == 3
            check_no_attempt_is_burnt(queue)
            assert started.stop() == 0
