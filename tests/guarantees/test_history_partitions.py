"""The history's days are made ahead by anybody, dropped without stopping anybody, and missed by nobody."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from tests.guarantees.support import at_once
from tests.sql.support import Session
from tests.support import wait_until


@pytest.fixture
def session(dsn, open_session) -> Session:
    """A database whose days were made just now: the template's may be those of before midnight."""
    session = open_session(dsn)
    for day in days(session):
        session.rows(f"DROP TABLE pgqueue.{day}")
    session.call("make_partitions")
    return session


def days(session: Session) -> list[str]:
    return [
        row[0]
        for row in session.rows(
            "SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = 'pgqueue.finished_jobs'::regclass ORDER BY 1"
        )
    ]


def today(session: Session):
    return session.one("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")


def finish(session: Session, at: str = "clock_timestamp()") -> None:
    session.rows(
        "INSERT INTO pgqueue.finished_jobs (id, finished_at, run_at, created_at, attempt, priority, crashes, "
        f"state, queue, task, args) VALUES (1, {at}, now(), now(), 1, 0, 0, 'succeeded', 'q', 't', '{{}}')"
    )


def test_a_new_schema_has_today_and_a_week(session):
    first = today(session)

    assert days(session) == [f"finished_jobs_{first + timedelta(days=n):%Y%m%d}" for n in range(8)]


def test_a_day_is_a_day_of_utc_whatever_the_session_thinks(session):
    session.rows("SET timezone = 'Pacific/Kiritimati'")  # 14 hours ahead
    session.call("make_partitions", days=0, first_day="2031-01-01")

    finish(session, "'2031-01-01 00:00:00Z'")
    finish(session, "'2031-01-01 23:59:59.999Z'")

    assert session.one("SELECT count(*) FROM pgqueue.finished_jobs_20310101") == 2


def test_a_day_is_the_same_day_however_the_session_writes_dates(session):
    session.rows("SET timezone = 'Asia/Kolkata'")
    session.rows("SET datestyle = 'SQL, DMY'")
    session.call("make_partitions", days=0, first_day="01/02/2031")

    finish(session, "'01/02/2031 00:00:00 UTC'")
    finish(session, "'01/02/2031 23:59:59.999 UTC'")

    assert session.one("SELECT count(*) FROM pgqueue.finished_jobs_20310201") == 2


def test_a_job_can_be_cancelled_and_reaped_though_nobody_has_made_a_day_for_weeks(session):
    waiting, running = session.enqueue(), session.enqueue(priority=0)
    session.rows("UPDATE pgqueue.jobs SET priority = 1 WHERE id = %s", waiting)
    (attempt,) = session.claim(max_jobs=1)
    session.cancel(running)
    session.expire(attempt)
    for day in days(session):
        session.rows(f"DROP TABLE pgqueue.{day}")

    assert session.cancel(waiting) == {waiting: "cancelled"}
    assert [(row.job_id, row.state) for row in session.call("reap")] == [(running, "cancelled")]


def test_no_retention_drops_the_day_that_is_being_written(session):
    (day, *_) = days(session)

    assert session.call("drop_partition", name=day, retention=timedelta(days=-100)) == [(False,)]


def test_days_made_by_many_at_once_are_made_once(session, dsn, open_session):
    makers = [open_session(dsn) for _ in range(8)]

    def make(maker: Session) -> int:
        while True:
            try:
                return maker.call("make_partitions", days=12)[0][0]
            except psycopg.errors.LockNotAvailable:  # it waits for 2 s and no longer: another time will do
                continue

    made = at_once(*(lambda m=maker: make(m) for maker in makers))

    assert sorted(made) == [0] * 7 + [5]
    assert len(days(session)) == 13


def test_making_a_day_stops_no_completion_behind_a_long_report(session, dsn, open_session):
    report = open_session(dsn, autocommit=False)
    report.rows("SELECT count(*) FROM pgqueue.finished_jobs")
    session.rows("SET lock_timeout = '60s'")

    made = session.call("make_partitions", days=8)
    finish(session)

    assert made == [(1,)]


def test_a_day_beyond_the_retention_is_named_and_can_be_dropped_while_jobs_complete(
    session, dsn, open_session
):
    old = today(session) - timedelta(days=30)
    session.call("make_partitions", days=0, first_day=old)
    writer = open_session(dsn, autocommit=False)
    finish(writer)

    (expired,) = session.call("expired_partitions", retention=timedelta(days=7))
    finish(session)
    writer.connection.commit()
    session.rows(f"ALTER TABLE pgqueue.finished_jobs DETACH PARTITION pgqueue.{expired.name} CONCURRENTLY")
    detached = session.call("expired_partitions", retention=timedelta(days=7))
    session.rows(f"DROP TABLE pgqueue.{expired.name}")

    assert expired == (f"finished_jobs_{old:%Y%m%d}", True, False)
    assert detached == [(expired.name, False, False)]
    assert len(days(session)) == 8


def test_a_detach_that_was_interrupted_stops_no_completion_and_is_told_apart(session, dsn, open_session):
    session.call("make_partitions", days=0, first_day=today(session) - timedelta(days=30))
    (expired,) = session.call("expired_partitions", retention=timedelta(days=7))
    report = open_session(dsn, autocommit=False)
    report.rows("SELECT count(*) FROM pgqueue.finished_jobs")
    detach = f"ALTER TABLE pgqueue.finished_jobs DETACH PARTITION pgqueue.{expired.name}"
    detacher = open_session(dsn)
    with ThreadPoolExecutor(1) as pool:
        detached = pool.submit(detacher.rows, f"{detach} CONCURRENTLY")
        wait_until(
            lambda: session.call("expired_partitions", retention=timedelta(days=7))[0].is_half_detached
        )
        detacher.connection.cancel()
        with pytest.raises(psycopg.errors.QueryCanceled):
            detached.result()

    finish(session)
    half = session.call("expired_partitions", retention=timedelta(days=7))
    report.connection.rollback()
    session.rows(f"{detach} FINALIZE")

    assert half == [(expired.name, True, True)]
    assert session.call("expired_partitions", retention=timedelta(days=7)) == [(expired.name, False, False)]


def test_nothing_within_the_retention_is_named(session):
    session.call("make_partitions", days=0, first_day=today(session) - timedelta(days=6))

    assert session.call("expired_partitions", retention=timedelta(days=7)) == []
