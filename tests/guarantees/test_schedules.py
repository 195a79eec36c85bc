"""Every tick fires at most once, and is fired or counted as skipped, whoever computes it and when."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.guarantees.support import at_once
from tests.sql.support import Session
from tests.support import wait_until

MINUTE = timedelta(minutes=1)


@pytest.fixture
def due(session: Session) -> datetime:
    """A schedule `s` of every minute, and its tick that is due."""
    tick = session.one("SELECT date_trunc('minute', clock_timestamp()) - interval '10 min'")
    session.rows(
        "INSERT INTO pgqueue.schedules (name, cron, task, args, next_tick) "
        "VALUES ('s', '* * * * *', 'report', '{\"n\": 1}', %s)",
        tick,
    )
    return tick


def fire(session: Session, expected: datetime, **parameters: Any) -> str:
    ask = {
        "name": "s",
        "cron": "* * * * *",
        "timezone": "UTC",
        "expected": expected,
        "ticks": [expected],
        "skipped": 0,
        "next_tick": expected + MINUTE,
        **parameters,
    }
    return session.one("SELECT pgqueue.fire(%s, %s, %s, %s, %s::timestamptz[], %s, %s)", *ask.values())


def jobs(session: Session) -> list[Any]:
    return session.rows("SELECT * FROM pgqueue.jobs ORDER BY id")


def entry(session: Session) -> Any:
    return session.row("SELECT * FROM pgqueue.schedules")


def test_what_is_due_comes_with_the_databases_time(session, due):
    session.rows(
        "INSERT INTO pgqueue.schedules (name, cron, task, next_tick, is_paused) VALUES "
        "('later', 'c', 't', clock_timestamp() + interval '1 min', false), "
        "('paused', 'c', 't', clock_timestamp(), true), ('never', 'c', 't', NULL, false)"
    )

    (found,) = session.call("due_schedules")

    assert (found.name, found.cron, found.timezone, found.next_tick) == ("s", "* * * * *", "UTC", due)
    assert (found.catch_up, found.catch_up_limit) == ("latest", 100)
    assert abs(found.database_now - session.one("SELECT clock_timestamp()")) < timedelta(seconds=10)


def test_a_tick_becomes_a_job_that_says_where_it_comes_from(session, due):
    assert fire(session, due) == "fired"

    (job,) = jobs(session)
    assert (job.task, job.args, job.queue, job.state) == ("report", {"n": 1}, "default", "ready")
    assert job.headers["schedule"] == "s"
    assert datetime.fromisoformat(job.headers["tick"]) == due
    assert session.rows("SELECT * FROM pgqueue.schedule_runs") == [("s", due, job.id)]
    assert (entry(session).next_tick, entry(session).last_tick) == (due + MINUTE, due)
    assert (entry(session).fired, entry(session).skipped) == (1, 0)


def test_a_tick_gets_its_tasks_definition_unless_the_schedule_says_otherwise(session, due):
    session.call("register_tasks", definitions='[{"name": "report", "queue": "q", "priority": 4}]')
    fire(session, due)
    session.rows("UPDATE pgqueue.schedules SET queue = 'mine', priority = 0")

    fire(session, due + MINUTE)

    assert [(job.queue, job.priority) for job in jobs(session)] == [("q", 4), ("mine", 0)]


def test_several_ticks_and_skipped_ones_are_all_accounted_for(session, due):
    ticks = [due + number * MINUTE for number in range(3)]

    fire(session, due, ticks=ticks, skipped=4, next_tick=due + 7 * MINUTE)

    assert len(jobs(session)) == 3
    assert (entry(session).fired, entry(session).skipped) == (3, 4)


def test_skipping_all_of_them_moves_on_without_a_job(session, due):
    assert fire(session, due, ticks=[], skipped=1) == "fired"

    assert jobs(session) == []
    assert (entry(session).skipped, entry(session).next_tick) == (1, due + MINUTE)


def test_the_last_tick_of_all_is_the_last(session, due):
    fire(session, due, next_tick=None)

    assert entry(session).next_tick is None
    assert session.call("due_schedules") == []


def test_of_many_who_fire_the_same_tick_one_does(session, due, open_session):
    firers = [open_session() for _ in range(12)]

    for number in range(8):
        answers = at_once(*(partial(fire, firer, due + number * MINUTE) for firer in firers))
        assert sorted(answers) == ["fired"] + ["lost"] * 11

    assert len(jobs(session)) == 8


def test_a_firer_that_dies_before_its_commit_leaves_the_tick_due(session, due, open_session):
    dying = open_session(autocommit=False)
    fire(dying, due)

    dying.connection.close()

    assert wait_until(lambda: fire(session, due) == "fired")
    assert len(jobs(session)) == 1


def test_a_frozen_firer_stops_nobody(session, due, open_session):
    frozen = open_session(autocommit=False)
    fire(frozen, due)
    session.rows("SET statement_timeout = '2s'")

    assert fire(session, due) == "lost"


def test_a_tick_that_was_fired_is_never_fired_again_whatever_is_set_by_hand(session, due):
    fire(session, due)
    session.rows("UPDATE pgqueue.schedules SET next_tick = %s", due)

    assert fire(session, due) == "fired"
    assert len(jobs(session)) == 1
    assert entry(session).fired == 1


@pytest.mark.parametrize(
    "change",
    [
        "cron = 'other'",
        "timezone = 'Asia/Jakarta'",
        "is_paused = true",
        "next_tick = next_tick + interval '1 h'",
    ],
)
def test_an_entry_edited_meanwhile_is_not_fired_by_the_old_plan(session, due, change):
    session.rows(f"UPDATE pgqueue.schedules SET {change}")

    assert fire(session, due) == "lost"
    assert jobs(session) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticks": [timedelta(days=1)], "next_tick": timedelta(days=2)},
        {"ticks": [-MINUTE]},
        {"ticks": [MINUTE]},
        {"next_tick": timedelta(0)},
        {"skipped": -1},
        {"ticks": [timedelta(seconds=number) for number in range(6)]},
    ],
    ids=[
        "in the future",
        "before its time",
        "beyond the next",
        "no step ahead",
        "negative",
        "beyond the limit",
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(session, due, wrong):
    session.rows("UPDATE pgqueue.schedules SET catch_up_limit = 5")
    ask = {
        name: [due + step for step in value]
        if isinstance(value, list)
        else due + value
        if isinstance(value, timedelta)
        else value
        for name, value in wrong.items()
    }

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="do not fit the database time"):
        fire(session, due, **ask)

    assert jobs(session) == []
    assert entry(session).next_tick == due


def test_a_task_that_is_still_live_takes_the_tick_as_its_own(session, due):
    session.call("register_tasks", definitions='[{"name": "report", "unique_key": "only one"}]')

    fire(session, due)
    fire(session, due + MINUTE)

    (job,) = jobs(session)
    assert session.rows("SELECT job_id FROM pgqueue.schedule_runs") == [(job.id,), (job.id,)]
