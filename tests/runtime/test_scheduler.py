"""A worker's scheduler: it costs next to nothing, and no entry keeps it from the others."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pgqueue.model.schedule import define, far_job_maker
from pgqueue.runtime import scheduler
from pgqueue.runtime.link import Link, Outage
from pgqueue.runtime.log import Log
from pgqueue.runtime.scheduler import Scheduler
from pgqueue.sql import Statement, load

NAMES = {text: name for name, text in load("schedules").items()}


class CountingLink(Link):
    """A link that counts what is asked."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, "pgqueue", "finish", Outage(Log("test")), {"lock_timeout": "1s"})
        self.asked: Counter[str] = Counter()
        self.looked_at: list[float] = []

    async def run(self, statement: Statement[Any]) -> Any:
        name = NAMES[statement.text]
        if name == "look":
            self.looked_at.append(time.monotonic())
        try:
            return await super().run(statement)
        finally:
            # Not before: whoever waits for this then cancels, and would do so while it connects.
            self.asked[name] += 1


@pytest.fixture
def db(fast_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(fast_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pgqueue.test")


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None, Any]]:
    """Give what was logged: event, schedule and reason."""
    return [
        (record.message, fields.get("schedule"), fields.get("reason"))
        for record in caplog.records
        if (fields := getattr(record, "pgqueue_fields", None)) is not None
    ]


def with_scheduler(
    dsn: str,
    until: Callable[[CountingLink], bool],
    definitions: list[dict[str, Any]] | None = None,
    app: str = "shop",
) -> CountingLink:
    """Run a scheduler until something is so; gives its link."""

    async def body() -> CountingLink:
        link = CountingLink(dsn)
        made = Scheduler(
            link=link,
            app=app,
            definitions=definitions or [],
            keep_seconds=86_400,
            is_maintainer=lambda: True,
            log=Log("pgqueue.test"),
        )
        running = asyncio.create_task(made.run())
        try:
            await _wait(running, link)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await link.close()
        return link

    async def _wait(running: asyncio.Task[None], link: CountingLink) -> None:
        async with asyncio.timeout(60):
            while not until(link):
                assert not running.done()
                await asyncio.sleep(0.02)

    return asyncio.run(body())


def insert(db: psycopg.Connection[Any], name: str, cron: str = "* * * * *", **columns: Any) -> None:
    given = {"name": name, "cron": cron, "task": "t", **columns}
    db.execute(
        f"INSERT INTO pgqueue.schedules ({', '.join(given)}) VALUES ({', '.join(['%s'] * len(given))})",
        list(given.values()),
    )


def one(db: psycopg.Connection[Any], text: str, *parameters: Any) -> Any:
    row = db.execute(text, parameters).fetchone()
    return row and row[0]


def overdue(db: psycopg.Connection[Any], name: str, cron: str = "@yearly", **columns: Any) -> None:
    insert(db, name, cron, next_tick=one(db, "SELECT clock_timestamp() - interval '1 h'"), **columns)


# What it costs.


def test_without_any_schedule_one_look_in_ten_seconds_is_all_that_is_asked(fast_dsn):
    link = with_scheduler(fast_dsn, lambda link: link.asked["look"] >= 2)

    assert link.asked.keys() == {"look"}
    # However busy the machine is: never sooner.
    assert link.looked_at[1] - link.looked_at[0] >= 10


def test_with_schedules_that_are_not_due_it_looks_every_few_seconds(fast_dsn, db):
    for number in range(50):
        insert(db, f"s{number}", "@yearly", next_tick=one(db, "SELECT clock_timestamp() + interval '1 d'"))

    link = with_scheduler(fast_dsn, lambda link: link.asked["look"] >= 2)

    assert link.asked.keys() == {"look"}
    assert link.looked_at[1] - link.looked_at[0] >= 4


def test_a_tick_that_comes_sooner_than_the_next_look_is_not_late(fast_dsn, db, monkeypatch):
    monkeypatch.setattr(scheduler, "_LOOK_SECONDS", 600)
    insert(
        db,
        "s",
        "* * * * * *",
        next_tick=one(db, "SELECT date_trunc('second', clock_timestamp()) + interval '2 s'"),
    )

    with_scheduler(fast_dsn, lambda _link: one(db, "SELECT count(*) >= 3 FROM pgqueue.schedule_runs"))

    lag = one(
        db,
        "SELECT max(extract(epoch FROM created_at - (headers ->> 'tick')::timestamptz)) FROM pgqueue.jobs",
    )
    assert 0 <= lag < 30


# What is wrong with one entry.


def test_entries_that_cannot_be_fired_keep_no_other_from_it_and_say_why_once(
    fast_dsn, db, caplog, monkeypatch
):
    monkeypatch.setattr(scheduler, "_LOOK_SECONDS", 60)
    monkeypatch.setattr(scheduler, "_FIRST_PUT_OFF_SECONDS", 60)
    db.execute("""SELECT pgqueue.register_tasks('[{"name": "keyed", "unique_key": "{missing}"}]')""")
    for number in range(120):
        overdue(db, f"bad{number}", cron="no cron at all")
    overdue(db, "zone", timezone="Nowhere")
    overdue(db, "never", cron="0 0 30 2 *")
    overdue(db, "keyed", task="keyed")
    overdue(db, "s")

    with_scheduler(fast_dsn, lambda _link: {"s", "zone"} <= {each[1] for each in events(caplog)})

    said = {
        schedule: reason for event, schedule, reason in events(caplog) if event.startswith("schedule not")
    }
    assert len(said) == len([each for each in events(caplog) if each[1] in said]) == 123
    assert "has 4 fields" in said["bad7"]
    assert "no time zone 'Nowhere'" in said["zone"]
    assert "never comes" in said["never"]
    assert "unique_key of task keyed needs the argument missing" in said["keyed"]
    assert one(db, "SELECT count(*) FROM pgqueue.jobs") == 1


def test_an_entry_that_waits_for_a_lock_is_put_off(fast_dsn, db, caplog):
    db.execute("""SELECT pgqueue.register_tasks('[{"name": "u", "unique_key": "k"}]')""")
    overdue(db, "waits", task="u")
    overdue(db, "s")
    with psycopg.connect(fast_dsn) as holder:
        holder.execute("SELECT pgqueue.enqueue('u')")

        with_scheduler(
            fast_dsn, lambda _link: one(db, "SELECT sum(fired) = 1 FROM pgqueue.schedules WHERE name = 's'")
        )
        assert [each[1] for each in events(caplog) if each[0].startswith("schedule not")] == ["waits"]

    with_scheduler(fast_dsn, lambda _link: one(db, "SELECT sum(fired) = 2 FROM pgqueue.schedules"))


def test_what_was_missed_is_logged(fast_dsn, db, caplog):
    overdue(db, "s", catch_up="skip")

    with_scheduler(fast_dsn, lambda _link: bool(events(caplog)))

    (skipped,) = caplog.records
    assert skipped.message == "missed ticks skipped"
    assert skipped.pgqueue_fields["schedule"] == "s"
    assert skipped.pgqueue_fields["ticks"] == 1


def test_a_worker_that_cannot_read_expressions_says_so_once_and_fires_nothing(
    fast_dsn, db, caplog, monkeypatch
):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    monkeypatch.setattr(scheduler, "_LOOK_SECONDS", 600)
    monkeypatch.setattr(scheduler, "_LOOK_SECONDS_WITHOUT_ANY", 600)
    quiet = with_scheduler(fast_dsn, lambda link: link.asked["look"] == 1)
    overdue(db, "s")

    said_at: list[float] = []

    def said_a_while_ago(_link: CountingLink) -> bool:
        if not said_at and events(caplog):
            said_at.append(time.monotonic())
        return bool(said_at) and time.monotonic() - said_at[0] > 0.5

    link = with_scheduler(fast_dsn, said_a_while_ago)

    (said,) = events(caplog)
    assert said[0].endswith("it lacks a package: pip install 'pgqueue-jobs[cron]'")
    assert quiet.asked == link.asked == {"look": 1}
    assert one(db, "SELECT fired + skipped FROM pgqueue.schedules") == 0


def test_a_database_that_does_not_know_schedules_is_asked_again_and_again(fast_dsn, db, caplog, monkeypatch):
    monkeypatch.setattr(scheduler, "_LOOK_SECONDS_WITHOUT_ANY", 0.1)
    db.execute("ALTER TABLE pgqueue.schedules RENAME TO elsewhere")
    try:
        with_scheduler(fast_dsn, lambda link: link.asked["look"] >= 3)
    finally:
        db.execute("ALTER TABLE pgqueue.elsewhere RENAME TO schedules")

    ((event, _, reason),) = events(caplog)
    assert event == "cannot look at the schedules, trying again"
    assert "does not exist" in reason


# What the application declares.


def declared(cron: str = "@daily", name: str = "mine") -> dict[str, Any]:
    return json.loads(json.dumps(define(cron, "t", far_job_maker("t", None), name=name).registration()))


def test_what_the_code_declares_is_there_before_the_first_look(fast_dsn, db, caplog):
    with_scheduler(
        fast_dsn, lambda _link: one(db, "SELECT next_tick IS NOT NULL FROM pgqueue.schedules"), [declared()]
    )

    assert db.execute("SELECT name, source, app FROM pgqueue.schedules").fetchall() == [
        ("mine", "code", "shop:app")
    ]
    assert ("schedule declared", "mine", None) in events(caplog)


def test_a_name_that_is_taken_is_said_once_and_nothing_is_changed(fast_dsn, db, caplog, monkeypatch):
    monkeypatch.setattr(scheduler, "_REGISTER_SECONDS", 0.0)
    monkeypatch.setattr(scheduler, "_LOOK_SECONDS", 0.05)
    insert(db, "mine", "@yearly")

    with_scheduler(fast_dsn, lambda link: link.asked["register"] >= 3, [declared()])

    assert [each for each in events(caplog) if each[0] == "schedule not declared"] == [
        ("schedule not declared", "mine", "one made at run time has its name and stays")
    ]
    assert one(db, "SELECT cron FROM pgqueue.schedules") == "@yearly"


def test_old_ticks_are_forgotten_in_the_background(fast_dsn, db, monkeypatch):
    monkeypatch.setattr(scheduler, "_PRUNE_SECONDS", 0.0)
    insert(db, "s", "@yearly")
    db.execute(
        "INSERT INTO pgqueue.schedule_runs (schedule, tick, job_id) "
        "SELECT 'removed', clock_timestamp() - interval '2 d' - n * interval '1 s', n "
        "FROM generate_series(1, 9) AS n"
    )

    with_scheduler(fast_dsn, lambda _link: one(db, "SELECT count(*) = 0 FROM pgqueue.schedule_runs"))
