"""Schedules made at run time: checked like those of the code, and in the caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pgqueue import App, schedules
from pgqueue.database import Connection, connect
from pgqueue.errors import ConfigurationError, ScheduleConflict, UnknownSchedule, UnknownTask

TASKS = [
    {
        "name": "report",
        "queue": "slow",
        "args_schema": {
            "properties": {"account": {}},
            "required": ["account"],
            "additionalProperties": False,
        },
    }
]


@pytest.fixture
def conn(fast_dsn: str) -> Iterator[Connection]:
    with connect(fast_dsn) as opened:
        opened.execute("SELECT pgqueue.register_tasks(%s)", [json.dumps(TASKS)])
        yield opened


def add(conn, name="acme", cron="0 8 * * *", **said):
    return schedules.add(conn, name, cron, "report", {"account": "acme"}, **said)


def declare(conn, name="ours"):
    """An entry of the code of a live worker."""
    entry = {"name": name, "cron": "@daily", "timezone": "UTC", "task": "report", "args": "{}"}
    entry |= {"catch_up": "latest", "catch_up_limit": 100}
    conn.execute("SELECT pgqueue.register_schedules(%s, 'shop:app', true)", [json.dumps([entry])])


def get(conn, name="acme"):
    return schedules.list_schedules(conn, [name])[0]


def test_what_is_added_is_there_with_its_next_tick(conn):
    next_tick = add(conn, timezone="Asia/Jakarta", queue="q", priority=3, catch_up="all", catch_up_limit=7)

    entry = get(conn)
    assert (entry.cron, entry.timezone, entry.task, entry.args) == (
        "0 8 * * *",
        "Asia/Jakarta",
        "report",
        '{"account": "acme"}',
    )
    assert (entry.queue, entry.priority, entry.catch_up, entry.catch_up_limit) == ("q", 3, "all", 7)
    assert (entry.source, entry.app, entry.is_declared, entry.is_task_known) == ("runtime", None, True, True)
    assert entry.next_tick == next_tick
    assert next_tick.astimezone(UTC).hour == 1
    assert timedelta(0) < next_tick - entry.now <= timedelta(days=1)


def test_it_exists_if_and_only_if_the_callers_transaction_commits(conn, fast_dsn):
    with connect(fast_dsn, autocommit=False) as own:
        add(own)
        own.rollback()
        add(own, "other")

    assert schedules.schedule_names(conn) == ["other"]


def test_a_task_at_hand_checks_its_arguments_and_gives_its_name(conn):
    app = App()

    @app.task
    def send(user_id: int, at: datetime | None = None) -> None: ...

    schedules.add(conn, "a", "@daily", send, {"user_id": 7, "at": datetime(2026, 1, 1, tzinfo=UTC)})
    schedules.add(conn, "b", "@daily", send.definition, {"user_id": 8})

    assert get(conn, "a").args == '{"at": "2026-01-01T00:00:00+00:00", "user_id": 7}'
    assert (get(conn, "b").task, get(conn, "b").is_task_known) == ("send", False)
    with pytest.raises(ConfigurationError, match=r"schedule 'c': task 'send': args\.user_id"):
        schedules.add(conn, "c", "@daily", send, {"user_id": "x"})


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"cron": "0 0 30 2 *"}, ConfigurationError, "schedule 'acme': cron '0 0 30 2 .*' never comes"),
        ({"timezone": "Berlin"}, ConfigurationError, "did you mean 'Europe/Berlin'"),
        ({"task": "reprot"}, UnknownTask, "no task 'reprot'; did you mean 'report'"),
        ({"args": {}}, ConfigurationError, "misses the argument 'account'"),
        ({"args": {"account": 1, "x": 1}}, ConfigurationError, "takes no argument 'x'"),
        ({"args": {"account": float("nan")}}, ConfigurationError, "args.account: nan is not JSON"),
        ({"catch_up": "some"}, ConfigurationError, "catch_up must be one of"),
        ({"name": ""}, ConfigurationError, "the schedule's name"),
    ],
)
def test_what_makes_no_sense_is_refused(conn, said, error, message):
    asked = {"name": "acme", "cron": "@daily", "task": "report", "args": {"account": "a"}, **said}

    with pytest.raises(error, match=message):
        schedules.add(conn, **asked)

    assert schedules.schedule_names(conn) == []


def test_a_task_that_nobody_knows_can_be_asked_for_all_the_same(conn):
    schedules.add(conn, "a", "@daily", "far", {"x": 1}, must_be_known=False)

    assert not get(conn, "a").is_task_known


def test_a_name_is_taken_once(conn):
    add(conn)
    declare(conn)

    with pytest.raises(ScheduleConflict, match="'acme' is there already; replace it"):
        add(conn)
    with pytest.raises(ScheduleConflict, match="'ours' is declared in the code of shop:app"):
        add(conn, "ours", replace=True)


def test_replacing_keeps_counters_and_pause_and_counts_a_new_expression_from_now(conn):
    add(conn)
    schedules.pause(conn, ["acme"])
    conn.execute("UPDATE pgqueue.schedules SET fired = 7, next_tick = next_tick - interval '1 day'")
    before = get(conn)

    assert add(conn, queue="q", replace=True) == before.next_tick
    after = add(conn, cron="0 9 * * *", replace=True)

    entry = get(conn)
    assert (entry.fired, entry.is_paused, entry.cron) == (7, True, "0 9 * * *")
    assert entry.next_tick == after > before.now


def test_a_pause_lasts_until_it_is_ended_and_is_not_made_up_for(conn):
    add(conn, cron="* * * * *")
    schedules.pause(conn, ["acme"])
    conn.execute("UPDATE pgqueue.schedules SET next_tick = next_tick - interval '1 day'")
    paused = get(conn)

    resumed = schedules.resume(conn, ["acme"])

    entry = get(conn)
    assert (paused.is_paused, entry.is_paused) == (True, False)
    assert resumed == [("acme", entry.next_tick)]
    assert paused.now < entry.next_tick <= entry.now + timedelta(minutes=1)
    # What is not paused is left alone.
    assert schedules.resume(conn, ["acme"]) == resumed


def test_all_of_the_names_must_exist_or_nothing_is_done(conn):
    add(conn)

    for act in (schedules.pause, schedules.resume, schedules.remove, schedules.list_schedules):
        with pytest.raises(UnknownSchedule, match="no schedule 'acne'; did you mean 'acme'"):
            act(conn, ["acme", "acne"])
    with pytest.raises(UnknownSchedule):
        schedules.run_now(conn, "acne")

    assert not get(conn).is_paused


@pytest.mark.parametrize(
    "call", [schedules.list_schedules, schedules.remove, schedules.pause, schedules.resume]
)
def test_one_name_is_not_taken_for_the_list_of_its_letters(conn, call):
    add(conn, "a")

    with pytest.raises(ConfigurationError, match="names must be a list of names, not 'a'"):
        call(conn, "a")

    assert not get(conn, "a").is_paused


def test_names_that_come_one_by_one_are_all_heard(conn):
    add(conn, "a")

    schedules.pause(conn, iter(["a"]))
    paused = get(conn, "a").is_paused
    resumed = schedules.resume(conn, iter(["a"]))
    schedules.remove(conn, iter(["a"]))

    assert (paused, [name for name, _ in resumed]) == (True, ["a"])
    assert schedules.schedule_names(conn) == []


def test_one_of_the_code_can_be_paused_but_not_removed_while_a_worker_has_it(conn):
    add(conn)
    declare(conn)
    schedules.pause(conn, ["ours"])

    with pytest.raises(ScheduleConflict, match="declared in the code of shop:app and would come back"):
        schedules.remove(conn, ["acme", "ours"])
    assert schedules.schedule_names(conn) == ["acme", "ours"]

    conn.execute("UPDATE pgqueue.schedules SET seen_at = seen_at - interval '6 min' WHERE source = 'code'")
    schedules.remove(conn, ["acme", "ours"])
    assert schedules.schedule_names(conn) == []


def test_running_one_now_adds_its_job_and_leaves_its_ticks(conn):
    add(conn)
    schedules.pause(conn, ["acme"])
    before = get(conn)

    job_id = schedules.run_now(conn, "acme")

    job = conn.execute(
        "SELECT task, args, queue, headers FROM pgqueue.jobs WHERE id = %s", [job_id]
    ).fetchone()
    assert job[:3] == ("report", {"account": "acme"}, "slow")
    assert job[3]["schedule"] == "acme"
    assert abs(datetime.fromisoformat(job[3]["tick"]) - before.now) < timedelta(minutes=1)
    after = get(conn)
    assert (after.next_tick, after.last_tick, after.fired, after.skipped) == (before.next_tick, None, 0, 0)


def test_a_plain_insert_is_a_schedule_too(conn):
    conn.execute("INSERT INTO pgqueue.schedules (name, cron, task) VALUES ('sql', '@hourly', 'report')")

    entry = get(conn, "sql")
    assert (entry.timezone, entry.catch_up, entry.next_tick, entry.source) == (
        "UTC",
        "latest",
        None,
        "runtime",
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"cron": ""},
        {"task": ""},
        {"queue": "x" * 101},
        {"priority": -1},
        {"args": "[]"},
        {"catch_up": "some"},
        {"catch_up_limit": 1001},
        {"next_tick": "infinity"},
        {"next_tick": "0044-03-15 BC"},
        {"source": "code"},
        {"args": json.dumps({"x": "y" * 1_048_576})},
    ],
)
def test_what_a_job_would_refuse_a_plain_insert_refuses(conn, columns):
    from psycopg.errors import CheckViolation

    given = {"name": "sql", "cron": "@daily", "task": "report", **columns}
    text = f"INSERT INTO pgqueue.schedules ({', '.join(given)}) VALUES ({', '.join(['%s'] * len(given))})"

    with pytest.raises(CheckViolation):
        conn.execute(text, list(given.values()))
