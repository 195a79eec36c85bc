"""The numbers of the whole queue, as they are read from a real database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pgqueue.runtime import gauges as module
from pgqueue.runtime.gauges import MAX_NAMES, Gauges, Snapshot
from pgqueue.runtime.link import Outage
from pgqueue.runtime.log import Log
from pgqueue.sql.gauges import Deaths
from tests.support import wait_until

LOG = Log("test")
COLUMNS = (
    "queue, task, priority, max_attempts, timeout_seconds, concurrency_limit, is_unique_until_start, state"
)


class Database:
    def __init__(self, dsn: str, connection: psycopg.Connection) -> None:
        self.dsn = dsn
        self.run = connection.execute

    def insert(self, queue: str, jobs: int, state: str = "ready", **columns: Any) -> None:
        names = "".join(f", {name}" for name in columns)
        values = ", %s" * len(columns)
        self.run(
            f"INSERT INTO pgqueue.jobs ({COLUMNS}{names}) "
            f"SELECT %s, 'send', 0, 5, 300, 1, false, %s{values} FROM generate_series(1, %s)",
            [queue, state, *columns.values(), jobs],
        )

    def bury(self, queue: str, jobs: int, age: str = "0 s") -> None:
        self.run(
            "INSERT INTO pgqueue.dead_jobs (id, died_at, run_at, created_at, attempt, max_attempts, "
            "timeout_seconds, priority, crashes, concurrency_limit, queue, task, reason, args) "
            "SELECT nextval('pgqueue.jobs_id_seq'), clock_timestamp() - %s::interval, now(), now(), 1, 1, "
            "1, 0, 0, 1, %s, 'send', 'failed', '{}' FROM generate_series(1, %s)",
            [age, queue, jobs],
        )

    def read(self, times: int = 1) -> Snapshot:
        """Let gauges read so often; gives what they know then."""

        async def read() -> Snapshot | None:
            gauges = Gauges(self.dsn, "pgqueue", Outage(LOG), LOG)
            for _ in range(times):
                await gauges._turn()
            await gauges._link.close()
            return gauges.latest

        snapshot = asyncio.run(read())
        assert snapshot is not None
        return snapshot


@pytest.fixture
def database(fast_dsn: str) -> Iterator[Database]:
    with psycopg.connect(fast_dsn, autocommit=True) as connection:
        yield Database(fast_dsn, connection)


def test_each_queue_is_told_by_state_and_by_age(database):
    now = database.run("SELECT clock_timestamp()").fetchone()[0]
    database.insert("mail", 3, run_at=now)
    database.insert("mail", 1, run_at=database.run("SELECT now() - interval '90 s'").fetchone()[0])
    database.insert(
        "mail", 2, "scheduled", run_at=database.run("SELECT now() + interval '1 h'").fetchone()[0]
    )
    database.insert("mail", 1, "blocked", concurrency_key="k")
    database.run("SELECT pgqueue.enqueue('send', queue => 'slow', timeout_seconds => 100)")
    database.run("SELECT FROM pgqueue.claim('slow', gen_random_uuid(), 1, 100)")
    database.run(
        "UPDATE pgqueue.jobs SET started_at = started_at - interval '50 s', "
        "heartbeat_at = heartbeat_at - interval '50 s' WHERE queue = 'slow'"
    )

    queues = database.read().queues

    assert queues["mail"].jobs == {"ready": 4, "scheduled": 2, "blocked": 1, "running": 0, "dead": 0}
    assert 90 <= queues["mail"].oldest_ready_seconds < 200
    assert queues["slow"].jobs["running"] == 1
    assert 50 <= queues["slow"].oldest_running_seconds < 90
    assert 0.5 <= queues["slow"].timeout_ratio < 0.9
    assert 0.5 <= queues["slow"].lease_ratio < 1


def test_a_queue_that_is_only_named_is_told_too(database):
    database.run("INSERT INTO pgqueue.tasks (name, queue) VALUES ('send', 'of a task')")
    database.run("INSERT INTO pgqueue.queues (name, is_paused) VALUES ('paused', true)")
    database.run(
        "INSERT INTO pgqueue.queues (name, is_paused, paused_until) "
        "VALUES ('was paused', true, clock_timestamp() - interval '1 s')"
    )
    database.run(
        "INSERT INTO pgqueue.workers (id, host, pid, version, queues, slots, seen_at) VALUES "
        "(gen_random_uuid(), 'a', 1, '1', '{served,paused}', 1, clock_timestamp()), "
        "(gen_random_uuid(), 'b', 1, '1', '{served}', 1, clock_timestamp() - interval '2 min')"
    )

    snapshot = database.read()

    assert {name: (one.is_paused, one.workers) for name, one in snapshot.queues.items()} == {
        "of a task": (False, 0),
        "paused": (True, 1),
        "was paused": (False, 0),
        "served": (False, 1),
    }
    assert snapshot.overview.workers == 1


def test_deaths_are_told_by_queue_however_many_dead_letters_others_keep(database):
    database.bury("old", module._DEAD_BUDGET + 1, age="3 days")
    database.bury("payments", 200)
    database.run("ANALYZE pgqueue.dead_jobs")

    snapshot = database.read()

    queues = snapshot.queues
    assert (queues["payments"].recent_deaths, queues["old"].recent_deaths) == (200, 0)
    assert snapshot.estimated == {"dead"}
    assert queues["payments"].jobs["dead"] == pytest.approx(200, rel=0.1)
    assert queues["old"].jobs["dead"] == pytest.approx(module._DEAD_BUDGET + 1, rel=0.1)


def test_dead_letters_are_counted_exactly_while_there_are_few(database):
    database.bury("old", 501, age="3 days")
    database.bury("payments", 200, age="2 days")
    database.run("ANALYZE pgqueue.dead_jobs")

    snapshot = database.read()

    assert snapshot.estimated == set()
    assert {name: one.jobs["dead"] for name, one in snapshot.queues.items()} == {"old": 501, "payments": 200}
    assert {one.recent_deaths for one in snapshot.queues.values()} == {0}


def test_a_death_stays_told_while_thousands_die_in_another_queue(database, monkeypatch):
    monkeypatch.setattr(module, "_DEATHS_BUDGET", 50)

    async def read() -> list[Snapshot | None]:
        gauges = Gauges(database.dsn, "pgqueue", Outage(LOG), LOG)
        snapshots = []
        for queue, jobs in (("payments", 3), ("storm", 60), ("storm", 60), ("payments", 1)):
            database.bury(queue, jobs)
            await gauges._turn()
            snapshots.append(gauges.latest)
        database.run("DELETE FROM pgqueue.dead_jobs WHERE queue = 'payments'")
        await gauges._turn()
        snapshots.append(gauges.latest)
        await gauges._link.close()
        return snapshots

    told = [snapshot.queues["payments"].recent_deaths for snapshot in asyncio.run(read()) if snapshot]

    assert told[:3] == [3, 3, 3]
    assert told[3] == told[4]
    assert told[3] in (3, 4)  # one met a second time counts once, and those in a slice cut short may


def test_a_death_is_forgotten_after_ten_minutes():
    deaths = module._Deaths()

    told = [
        deaths.add(found, read_at=0.0)
        for found in (
            [Deaths(1000, 999, "mail", 2), Deaths(1000, 1000, "mail", 1)],
            [Deaths(1000, 999, "mail", 1), Deaths(1000, 1000, "mail", 4)],
            [Deaths(1058, None, None, 0)],
            [Deaths(1059, None, None, 0)],
            [Deaths(1060, None, None, 0)],
        )
    ]

    assert told == [{"mail": 3}, {"mail": 6}, {"mail": 6}, {"mail": 4}, {}]


def test_all_running_jobs_are_looked_at(database):
    now = database.run("SELECT clock_timestamp()").fetchone()[0]
    held = {"started_at": now, "claim_token": uuid4(), "worker_id": uuid4(), "lease_seconds": 60}
    database.insert("big", 700, "running", heartbeat_at=now, **held)
    database.insert("other", 3, "running", heartbeat_at=now - timedelta(hours=2), **held)

    snapshot = database.read()

    assert snapshot.queues["big"].jobs["running"] == 700
    assert snapshot.queues["other"].jobs["running"] == 3
    assert snapshot.queues["other"].lease_ratio > 100
    assert snapshot.estimated == set()


def test_more_running_jobs_than_are_looked_at_are_told_to_be_estimates(database, monkeypatch):
    monkeypatch.setattr(module, "_RUNNING_BUDGET", 5)
    now = database.run("SELECT clock_timestamp()").fetchone()[0]
    held = {"started_at": now, "claim_token": uuid4(), "worker_id": uuid4(), "lease_seconds": 60}
    database.insert("big", 20, "running", heartbeat_at=now, **held)
    database.run("ANALYZE pgqueue.jobs")

    snapshot = database.read()

    assert snapshot.estimated == {"running"}
    assert snapshot.queues["big"].jobs["running"] == 20


def test_a_queue_with_jobs_has_its_workers_and_its_pause_among_any_number_of_named_ones(database):
    database.run(
        "INSERT INTO pgqueue.queues (name) SELECT 'a' || i FROM generate_series(1, %s) AS i", [MAX_NAMES + 10]
    )
    database.run("INSERT INTO pgqueue.queues (name, is_paused) VALUES ('z paused', true)")
    database.run(
        "INSERT INTO pgqueue.workers (id, host, pid, version, queues, slots, seen_at) VALUES "
        "(gen_random_uuid(), 'a', 1, '1', '{z served}', 1, clock_timestamp())"
    )
    database.insert("z served", 1)
    database.insert("z paused", 1)

    queues = database.read().queues

    assert (queues["z served"].is_paused, queues["z served"].workers) == (False, 1)
    assert (queues["z paused"].is_paused, queues["z paused"].workers) == (True, 0)


def test_what_is_late_open_or_waited_for_is_told(database):
    database.run(
        "INSERT INTO pgqueue.schedules (name, cron, task, next_tick, is_paused) VALUES "
        "('late', '* * * * *', 't', clock_timestamp() - interval '5 min', false), "
        "('in time', '* * * * *', 't', clock_timestamp() + interval '5 min', false), "
        "('paused', '* * * * *', 't', clock_timestamp() - interval '5 days', true), "
        "('bad', 'nonsense', 't', NULL, false), ('bad and paused', 'nonsense', 't', NULL, true)"
    )
    database.run(
        "INSERT INTO pgqueue.schedules (name, cron, task, next_tick, source, app, seen_at) "
        "SELECT name, '* * * * *', 't', next_tick, 'code', 'a', clock_timestamp() - interval '9 days' "
        "FROM (VALUES ('gone', clock_timestamp() - interval '9 days'), ('gone before', NULL)) "
        "AS old (name, next_tick)"
    )
    database.run("INSERT INTO pgqueue.breakers (name, state) VALUES ('bank', 'open'), ('post', 'closed')")
    database.run(
        "INSERT INTO pgqueue.rate_limits (name, tokens_per_second, next_at, pattern) VALUES "
        "('api:*', 1, NULL, NULL), ('api:1', 1, now(), 'api:*'), ('api:2', 1, now(), 'api:*'), "
        "('task:t', 1, NULL, NULL)"
    )
    for limit, seconds in (("api:1", 30), ("api:2", 60)):
        waited = database.run("SELECT clock_timestamp() - %s * interval '1 s'", [seconds]).fetchone()[0]
        database.insert("mail", 1, "scheduled", rate_key=limit, rate_parked_at=waited)

    snapshot = database.read()

    assert snapshot.overview.late_schedules == 1
    assert 300 <= snapshot.overview.late_seconds < 400
    assert snapshot.overview.unplanned_schedules == 1
    assert snapshot.breakers == [("bank", "open"), ("post", "closed")]
    (pattern, waited), single = snapshot.rate_limits
    assert pattern == "api:*"
    assert 60 <= waited < 120
    assert single == ("task:t", 0)
    assert snapshot.overview.enqueued >= 2
    assert {one.table for one in snapshot.tables} >= {"jobs", "dead_jobs", "finished_jobs"}


def test_who_holds_an_old_snapshot_is_told(database, connect):
    holder = connect(database.dsn, autocommit=False)
    holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    holder.execute("SELECT 1")

    held = database.read().overview.oldest_snapshot_seconds
    holder.rollback()

    assert held > 0
    assert database.read().overview.oldest_snapshot_seconds == 0


def test_past_the_budget_numbers_are_estimates_and_shallow_queues_stay_exact(database):
    database.insert("deep", 15_000)
    database.insert("deeper", 30_000)
    database.insert("shallow", 7)
    database.insert(
        "later", 9_000, "scheduled", run_at=database.run("SELECT now() + interval '1 h'").fetchone()[0]
    )
    database.run("ANALYZE pgqueue.jobs")

    for times in (1, 2, 3):
        snapshot = database.read(times)

        jobs = {name: one.jobs for name, one in snapshot.queues.items()}
        assert snapshot.estimated == {"ready", "scheduled"}
        assert jobs["shallow"]["ready"] == 7
        assert jobs["deep"]["ready"] == pytest.approx(15_000, rel=0.3)
        assert jobs["deeper"]["ready"] == pytest.approx(30_000, rel=0.3)
        assert jobs["later"]["scheduled"] == pytest.approx(9_000, rel=0.1)
        assert jobs["deep"]["scheduled"] == 0


def test_once_the_rush_is_over_numbers_are_exact_again(database):
    database.insert("rush", 6_000)
    database.insert("calm", 3)

    async def read() -> list[Snapshot | None]:
        gauges = Gauges(database.dsn, "pgqueue", Outage(LOG), LOG)
        snapshots = []
        for _ in range(3):
            await gauges._turn()
            snapshots.append(gauges.latest)
            database.run(
                "DELETE FROM pgqueue.jobs WHERE queue = 'rush' "
                "AND id > (SELECT min(id) + 19 FROM pgqueue.jobs)"
            )
        await gauges._link.close()
        return snapshots

    rush, between, over = asyncio.run(read())

    assert rush is not None
    assert between is not None
    assert over is not None
    assert rush.estimated == {"ready"}
    assert between.queues["rush"].jobs["ready"] == 20
    assert over.estimated == set()
    assert (over.queues["rush"].jobs["ready"], over.queues["calm"].jobs["ready"]) == (20, 3)


def test_queues_beyond_the_bound_are_told_as_one(database):
    database.run(
        "INSERT INTO pgqueue.tasks (name, queue) SELECT 't' || i, 'idle' || i FROM generate_series(1, 5) AS i"
    )
    database.run(
        f"INSERT INTO pgqueue.jobs ({COLUMNS}) SELECT 'q' || i, 'send', 0, 5, 300, 1, false, 'ready' "
        "FROM generate_series(1, %s) AS i",
        [MAX_NAMES + 40],
    )

    queues = database.read().queues

    assert len(queues) == MAX_NAMES + 1
    assert sum(one.jobs["ready"] for one in queues.values()) == MAX_NAMES + 40
    assert queues["other"].jobs["ready"] == 40


def test_queues_told_as_one_are_paused_if_all_that_waits_there_is(database):
    database.run(
        "INSERT INTO pgqueue.queues (name, is_paused) SELECT 'q' || i, true FROM generate_series(1, %s) AS i",
        [MAX_NAMES + 40],
    )
    database.run(
        f"INSERT INTO pgqueue.jobs ({COLUMNS}) SELECT 'q' || i, 'send', 0, 5, 300, 1, false, 'ready' "
        "FROM generate_series(1, %s) AS i",
        [MAX_NAMES + 40],
    )
    database.insert("unserved", 1)

    queues = database.read().queues

    assert queues["other"].jobs["ready"] == 41
    assert queues["other"].is_paused
    assert not queues["unserved"].is_paused


@pytest.mark.parametrize("many", [False, True])
def test_a_look_costs_the_same_however_long_the_queues_are(database, many):
    """Its rows are bounded: the index of the ready jobs is read for thousands of rows, not for all."""
    database.run(
        f"INSERT INTO pgqueue.jobs ({COLUMNS}) "
        "SELECT 'q' || i %% 50, 't' || i %% 70, 0, 5, 300, 1, false, 'ready' "
        "FROM generate_series(1, %s) AS i",
        [60_000 if many else 4_000],
    )
    database.run("VACUUM (ANALYZE) pgqueue.jobs")
    read = (
        "SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = 'pgqueue' AND relname = 'jobs'"
    )
    before = database.run(read).fetchone()[0]

    database.read()

    rows = wait_until(lambda: int(database.run(read).fetchone()[0] - before))
    assert rows < 3 * module._READY_BUDGET


def test_of_two_readers_with_a_place_one_reads_and_the_other_follows(database):
    async def read() -> tuple[list[bool], bool]:
        place = asyncio.Event()
        place.set()
        first, second = (Gauges(database.dsn, "pgqueue", Outage(LOG), LOG, place=place) for _ in range(2))
        await first._turn()
        await second._turn()
        before = [first.is_reading, second.is_reading]
        assert second.latest is None
        await first._link.close()
        end = time.monotonic() + 60
        while not second.is_reading and time.monotonic() < end:  # the server ends a session in its own time
            await second._turn()
        follows = second.is_reading and second.latest is not None
        await second._link.close()
        return before, follows

    assert asyncio.run(read()) == ([True, False], True)


def test_numbers_that_cannot_be_read_any_more_are_not_told(database):
    async def read() -> tuple[Snapshot | None, Snapshot | None]:
        gauges = Gauges(database.dsn, "pgqueue", Outage(LOG), LOG)
        await gauges._turn()
        known = gauges.latest
        database.run("ALTER TABLE pgqueue.breakers RENAME TO gone")
        try:
            await gauges._turn()
        finally:
            database.run("ALTER TABLE pgqueue.gone RENAME TO breakers")
        await gauges._link.close()
        return known, gauges.latest

    known, unknown = asyncio.run(read())

    assert known is not None
    assert unknown is None
