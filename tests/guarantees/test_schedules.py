"""Every tick fires at most once, and is fired or counted as skipped, whoever computes it and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from typing import Any

import psycopg
import pytest

from tests.guarantees.support import at_once
from tests.sql.support import Session
from tests.support import ROOT, wait_until

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


def fire(session: Session, expected: datetime | None, **parameters: Any) -> str:
    ask = {
        "name": "s",
        "cron": "* * * * *",
        "timezone": "UTC",
        "expected": expected,
        "ticks": [expected],
        "skipped": 0,
        "next_tick": expected and expected + MINUTE,
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
        "('later', 'c', 't', clock_timestamp() + interval '1 h', false), "
        "('paused', 'c', 't', clock_timestamp(), true)"
    )

    before = session.one("SELECT clock_timestamp()")
    (found,) = session.call("due_schedules")

    assert (found.name, found.cron, found.timezone, found.next_tick) == ("s", "* * * * *", "UTC", due)
    assert (found.catch_up, found.catch_up_limit) == ("latest", 100)
    assert before <= found.database_now <= session.one("SELECT clock_timestamp()")


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


def test_a_new_entry_gets_its_first_tick_once_and_fires_nothing(session, due):
    session.rows("UPDATE pgqueue.schedules SET next_tick = NULL")
    (new,) = session.call("due_schedules")

    assert new.next_tick is None
    assert fire(session, None, ticks=[], next_tick=due) == "fired"
    assert fire(session, None, ticks=[], next_tick=due) == "lost"
    assert (entry(session).next_tick, entry(session).last_tick, jobs(session)) == (due, None, [])


@pytest.mark.parametrize("wrong", [{"ticks": ["2026-01-01Z"]}, {"ticks": [], "next_tick": None}])
def test_a_new_entry_has_no_tick_to_fire_yet(session, due, wrong):
    session.rows("UPDATE pgqueue.schedules SET next_tick = NULL")

    with pytest.raises(psycopg.errors.InvalidParameterValue, match="do not fit the database time"):
        fire(session, None, **{"next_tick": due, **wrong})


def test_what_a_caller_cannot_deal_with_does_not_stand_before_the_rest(session, due):
    session.rows(
        "INSERT INTO pgqueue.schedules (name, cron, task, next_tick) "
        "SELECT 'bad' || n, 'no cron', 't', %s FROM generate_series(1, 200) AS n",
        due - MINUTE,
    )
    bad = [f"bad{number}" for number in range(1, 201)]

    assert [row.name for row in session.call("due_schedules", except_names=bad)] == ["s"]


def test_a_tick_is_told_in_utc_whatever_the_time_zone_of_the_session(session, due):
    session.rows("SET timezone = 'Asia/Tokyo'")

    fire(session, due)

    assert jobs(session)[0].headers["tick"] == f"{due.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


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
    session.rows("SET statement_timeout = '60s'")

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


# What applications declare.


REPORT = {
    "name": "s",
    "cron": "* * * * *",
    "timezone": "UTC",
    "task": "report",
    "args": '{"n": 1}',
    "queue": None,
    "priority": None,
    "catch_up": "latest",
    "catch_up_limit": 100,
}


def register(session: Session, app: str = "shop:app", *, is_start: bool = True, **changes: Any) -> str:
    rows = session.call(
        "register_schedules", entries=json.dumps([{**REPORT, **changes}]), app=app, is_start=is_start
    )
    return rows[0].outcome


def forget(session: Session, minutes: int = 6) -> None:
    """Let time pass since a worker last stood for the entry."""
    session.rows("UPDATE pgqueue.schedules SET seen_at = seen_at - %s * interval '1 min'", minutes)


def test_a_declared_entry_is_new_once_and_kept_from_then_on(session):
    assert register(session) == "added"
    due = session.one("SELECT date_trunc('minute', clock_timestamp())")
    fire(session, None, ticks=[], next_tick=due)
    session.rows("UPDATE pgqueue.schedules SET is_paused = true")

    assert [register(session), register(session, is_start=False)] == ["kept", "kept"]
    assert (entry(session).next_tick, entry(session).is_paused) == (due, True)
    assert (entry(session).source, entry(session).app, entry(session).args) == ("code", "shop:app", {"n": 1})


def test_a_changed_expression_counts_from_now_and_anything_else_leaves_the_next_tick(session):
    register(session)
    due = session.one("SELECT date_trunc('minute', clock_timestamp()) - interval '1 h'")
    fire(session, None, ticks=[], next_tick=due)
    session.rows("UPDATE pgqueue.schedules SET is_paused = true, fired = 7")

    assert register(session, args="{}", queue="q", catch_up="all") == "changed"
    assert (entry(session).next_tick, entry(session).args, entry(session).queue) == (due, {}, "q")

    assert register(session, cron="0 * * * *") == "changed"
    assert (entry(session).next_tick, entry(session).is_paused, entry(session).fired) == (None, True, 7)


def test_a_worker_that_starts_has_the_last_word_and_two_versions_do_not_undo_each_other(session):
    register(session, cron="0 1 * * *")

    assert register(session, cron="0 2 * * *") == "changed"
    assert register(session, cron="0 1 * * *", is_start=False) == "other"
    assert entry(session).cron == "0 2 * * *"


def test_when_nobody_stands_for_the_other_version_any_more_the_remaining_one_counts(session):
    # A worker of the old version came back last, in the middle of a deployment, and is gone now.
    register(session, cron="0 1 * * *")
    forget(session, minutes=4)
    assert register(session, cron="0 2 * * *", is_start=False) == "other"
    forget(session, minutes=2)

    assert register(session, cron="0 2 * * *", is_start=False) == "changed"
    assert entry(session).cron == "0 2 * * *"


def test_of_two_applications_the_first_one_keeps_a_name_while_it_lives(session):
    register(session)

    assert register(session, app="blog:app", cron="0 2 * * *") == "other"
    forget(session)
    assert register(session, app="blog:app", cron="0 2 * * *") == "changed"


def test_an_entry_made_at_run_time_keeps_its_name(session, due):
    assert register(session, cron="0 2 * * *") == "runtime"
    assert (entry(session).cron, entry(session).source) == ("* * * * *", "runtime")


def test_an_entry_that_no_worker_declares_any_more_does_not_fire_and_goes_on_when_one_does(session):
    register(session)
    due = session.one("SELECT date_trunc('minute', clock_timestamp()) - interval '1 h'")
    fire(session, None, ticks=[], next_tick=due)
    forget(session)
    gone = session.call("due_schedules")

    assert register(session) == "kept"

    assert gone == []
    # As after a downtime: it is still due, and its policy says what becomes of the missed ticks.
    assert [row.next_tick for row in session.call("due_schedules")] == [due]


def test_standing_for_an_entry_is_written_once_in_thirty_seconds_however_many_workers_do(session):
    register(session)
    place = session.one("SELECT ctid::text FROM pgqueue.schedules")

    for _ in range(20):
        register(session)
    assert session.one("SELECT ctid::text FROM pgqueue.schedules") == place

    forget(session, minutes=1)
    register(session, is_start=False)
    assert session.one("SELECT clock_timestamp() - seen_at < interval '1 min' FROM pgqueue.schedules")


def test_workers_that_start_at_once_declare_each_entry_once(open_session):
    workers = [open_session() for _ in range(12)]

    at_once(*(partial(register, worker) for worker in workers))

    assert [row.name for row in workers[0].rows("SELECT name FROM pgqueue.schedules")] == ["s"]


# Forgetting.


def test_old_ticks_are_forgotten_but_never_those_that_could_be_caught_up_with(session, due):
    session.rows("UPDATE pgqueue.schedules SET catch_up_limit = 10")
    session.rows(
        "INSERT INTO pgqueue.schedule_runs (schedule, tick, job_id) "
        "SELECT name, clock_timestamp() - n * interval '1 day', n "
        "FROM generate_series(1, 30) AS n, unnest(ARRAY['s', 'removed']) AS name"
    )
    prune = "SELECT pgqueue.prune_schedule_runs(interval '5 days 1 hour', %s)"

    assert [session.one(prune, 30) for _ in range(3)] == [30, 15, 0]
    assert session.rows("SELECT schedule, count(*) FROM pgqueue.schedule_runs GROUP BY 1 ORDER BY 1") == [
        ("removed", 5),
        ("s", 10),
    ]


# Everything at once.

IN_CI = "CI" in os.environ
SKEW = ROOT / "tests" / "faults" / "skew"


def run_schedulers(dsn: str, processes: int, count: int, seconds: float, crash_share: float) -> Counter[str]:
    """Run so many processes of so many schedulers each, with clocks of their own."""
    running = []
    for number in range(processes):
        skew = [0, 3600, -3600, 86_400][number % 4]
        environment = {
            **os.environ,
            "PGQUEUE_DSN": dsn,
            "PYTHONPATH": f"{SKEW}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "FAULTS_SKEW_SECONDS": str(skew),
        }
        arguments = map(str, (count, seconds, crash_share, number))
        command = [sys.executable, "-m", "tests.guarantees.schedulers", *arguments]
        running.append(
            subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        )
    seen: Counter[str] = Counter()
    for process in running:
        out, _ = process.communicate(timeout=seconds + 240)
        assert process.returncode == 0
        fired, lost, died, *broken = out.split()
        assert broken == []
        seen.update({"fired": int(fired), "lost": int(lost), "died": int(died)})
    return seen


@pytest.mark.timeout(600)
def test_a_hundred_schedulers_with_wrong_clocks_that_die_half_way_fire_each_tick_once(session, fast_dsn):
    first = session.one("SELECT date_trunc('second', clock_timestamp()) + interval '2 s'")
    session.rows(
        "INSERT INTO pgqueue.schedules (name, cron, task, catch_up, next_tick) "
        "VALUES ('s', '* * * * * *', 't', 'all', %s)",
        first,
    )

    seen: Counter[str] = Counter()

    def due_so_far() -> int:
        return (entry(session).next_tick - first) // timedelta(seconds=1)

    for _ in range(5):  # once, unless they had hardly begun when their time was over
        seen += run_schedulers(fast_dsn, 4, 25, 30 if IN_CI else 6, 0.3)
        if seen["died"] and due_so_far() >= 4:
            break

    due = due_so_far()
    fired = [job.headers["tick"] for job in jobs(session)]
    assert fired == [f"{first + n * timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}" for n in range(due)]
    assert (entry(session).fired, entry(session).skipped) == (due, 0)
    assert due >= 4
    assert seen["died"] > 0


@pytest.mark.timeout(1200)  # a hundred schedulers count ticks by the thousand, on whatever cores there are
def test_after_three_hours_without_anybody_what_fired_and_what_was_skipped_is_what_was_due(session, fast_dsn):
    back = session.one("SELECT date_trunc('minute', clock_timestamp()) - interval '3 h'")
    for cron, catch_up in product(("* * * * *", "* * * * * *"), ("latest", "all", "skip")):
        session.rows(
            "INSERT INTO pgqueue.schedules (name, cron, task, catch_up, next_tick) "
            "VALUES (%s, %s, 't', %s, %s)",
            f"{catch_up} {cron}",
            cron,
            catch_up,
            back,
        )

    processes, count = (4, 25) if IN_CI else (2, 4)
    while session.one("SELECT min(next_tick) < clock_timestamp() - interval '1 h' FROM pgqueue.schedules"):
        run_schedulers(fast_dsn, processes, count, 20 if IN_CI else 4, 0.3)

    for found in session.rows("SELECT * FROM pgqueue.schedules"):
        step = timedelta(seconds=1 if found.cron == "* * * * * *" else 60)
        due = (found.next_tick - back) // step
        fired = session.rows(
            "SELECT DISTINCT headers ->> 'tick' FROM pgqueue.jobs WHERE headers ->> 'schedule' = %s",
            found.name,
        )
        assert found.fired + found.skipped == due >= 180, found.name
        assert len(fired) == found.fired, found.name
        assert {"latest": 1, "all": 100, "skip": 0}[found.catch_up] <= found.fired, found.name
    assert session.one("SELECT count(*) FROM pgqueue.jobs") == session.one(
        "SELECT sum(fired) FROM pgqueue.schedules"
    )
