"""`pgqueue schedules`: what runs by the clock is seen at a glance, and changed by name."""

from __future__ import annotations

import json
import sys
from datetime import datetime

import pytest

from tests.cli.test_enqueue import application

__all__ = ["application"]


@pytest.fixture(autouse=True)
def _registered(queue):
    queue.connection.execute("""SELECT pgqueue.register_tasks('[{"name": "send"}, {"name": "resize"}]')""")


@pytest.fixture
def declared(queue):
    """An entry of the code of a live worker."""
    entry = {
        "name": "nightly",
        "cron": "0 3 * * *",
        "timezone": "Europe/Berlin",
        "task": "send",
        "args": "{}",
    }
    entry |= {"catch_up": "latest", "catch_up_limit": 100}
    queue.connection.execute("SELECT pgqueue.register_schedules(%s, 'shop:app', true)", [json.dumps([entry])])
    return "nightly"


def set_(queue, name, assignments):
    queue.connection.execute(f"UPDATE pgqueue.schedules SET {assignments} WHERE name = %s", [name])


# Looking.


def test_the_list_shows_what_is_due_next_and_how_it_went(pgqueue, queue, declared):
    pgqueue("schedules", "add", "beat", "*/5 * * * *", "resize")
    set_(queue, "beat", "next_tick = clock_timestamp() + interval '181 s', fired = 1234, skipped = 5")
    set_(queue, declared, "last_tick = clock_timestamp() - interval '2 h', next_tick = NULL")

    ended = pgqueue("schedules", "list")

    assert ended.out.split("\n")[0].split() == [
        *("NAME", "CRON", "TIMEZONE", "TASK", "NEXT", "LAST", "FIRED", "SKIPPED", "FROM", "NOTE")
    ]
    assert ended.rows == [
        "beat */5 * * * * UTC resize in 3 min - 1,234 5 run time",
        "nightly 0 3 * * * Europe/Berlin send - 2 h ago 0 0 shop:app",
    ]


def test_the_notes_say_why_an_entry_does_not_fire(pgqueue, queue, declared):
    for name in ("dead", "lost", "late", "off"):
        pgqueue("schedules", "add", name, "@daily", "send")
    set_(queue, "dead", "cron = '0 0 30 2 *'")
    set_(queue, "lost", "task = 'gone'")
    set_(queue, "late", "next_tick = clock_timestamp() - interval '1 h'")
    set_(queue, "off", "is_paused = true")
    set_(queue, declared, "seen_at = clock_timestamp() - interval '12 min'")

    rows = pgqueue("schedules", "list").rows

    notes = [
        "cron '0 0 30 2 *' never comes: there is no such day",
        "due, and no worker fires it",
        "no worker knows task 'gone'",
        "no worker has it in its code since 12 min",
        "paused",
    ]
    assert all(row.endswith(note) for row, note in zip(rows, notes, strict=True)), rows


def test_the_list_is_json_too(pgqueue, declared):
    (entry,) = pgqueue("schedules", "list", "--json").json

    assert (entry["name"], entry["args"], entry["source"], entry["is_declared"]) == (
        "nightly",
        {},
        "code",
        True,
    )


def test_no_schedules_is_said_on_stderr(pgqueue):
    ended = pgqueue("schedules", "list")

    assert (ended.code, ended.out, ended.err) == (0, "", "no schedules\n")


def test_the_next_ticks_are_those_of_all_that_fire_in_order(pgqueue, queue, declared):
    pgqueue("schedules", "add", "hourly", "@hourly", "send")
    pgqueue("schedules", "add", "off", "* * * * *", "send")
    pgqueue("schedules", "pause", "off")

    ended = pgqueue("schedules", "next", 30, "--json").json

    assert len(ended) == 30
    assert {each["schedule"] for each in ended} == {"hourly", "nightly"}
    assert [each["tick"] for each in ended] == sorted(each["tick"] for each in ended)
    for each in ended:
        assert datetime.fromisoformat(each["tick"]) == datetime.fromisoformat(each["local"])
        if each["schedule"] == "nightly":
            assert datetime.fromisoformat(each["local"]).hour == 3


def test_the_next_ticks_of_one_are_shown_although_it_is_paused(pgqueue, declared):
    pgqueue("schedules", "pause", declared)

    ended = pgqueue("schedules", "next", 2, declared)

    assert ended.err == "nightly is paused: these ticks would not fire\n"
    assert [row.split()[:1] for row in ended.rows] == [["nightly"], ["nightly"]]


def test_the_next_ticks_are_shown_beside_schedules_that_cannot_be_read(pgqueue, queue, declared):
    queue.connection.execute(
        "INSERT INTO pgqueue.schedules (name, cron, timezone, task) VALUES "
        "('bad', 'nonsense', 'UTC', 'send'), ('martian', '@daily', 'Mars', 'send')"
    )

    every = pgqueue("schedules", "next", 3)
    document = pgqueue("schedules", "next", 3, "--json")
    only = pgqueue("schedules", "next", 3, "bad")

    assert [row.split()[0] for row in every.rows] == [declared] * 3
    assert [each["schedule"] for each in document.json] == [declared] * 3
    for ended in (every, document):
        bad, martian = ended.err.splitlines()
        assert bad.startswith("bad never fires: cron 'nonsense' has 1 field")
        assert martian.startswith("martian never fires: ")
        assert "'Mars'" in martian
    assert (only.code, only.out) == (2, "")
    assert only.err.startswith("bad never fires: cron 'nonsense' has 1 field")
    assert only.err.count("\n") == 1


def test_a_change_of_clocks_is_noted(pgqueue):
    ended = pgqueue("schedules", "next", 14, "--cron", "0 0 12 1 * *", "--timezone", "Europe/Berlin")

    notes = {row[row.index("clocks") :] for row in ended.rows if "clocks" in row}
    assert notes == {"clocks went back 1 h", "clocks went forward 1 h"}
    summer = [row for row in ended.rows if "CEST" in row]
    assert all("12:00:00 CEST" in row and "10:00:00" in row for row in summer)


def test_the_local_time_and_the_instant_are_both_shown(pgqueue):
    (tick,) = pgqueue(
        *("schedules", "next", 1, "--cron", "0 12 1 7 *", "--timezone", "America/New_York", "--json")
    ).json

    assert tick["tick"].endswith("-07-01T16:00:00Z")
    assert tick["local"].endswith("-07-01T12:00:00-04:00")


# Changing.


def test_what_is_added_says_when_it_runs(pgqueue, queue):
    ended = pgqueue(
        *("schedules", "add", "acme", "0 8 * * mon-fri", "send", '{"account": "acme"}'),
        *("--timezone", "Europe/Berlin", "--catch-up", "all", "--catch-up-limit", 7, "-q", "slow"),
        *("--priority", 3),
    )
    told = pgqueue("schedules", "add", "b", "@daily", "send", "-", "--json", stdin='{"x": 1}').json

    assert (ended.code, ended.out) == (0, "")
    assert ended.err.startswith("added acme; next at 20")
    row = queue.connection.execute(
        "SELECT cron, timezone, args, catch_up, catch_up_limit, queue, priority FROM pgqueue.schedules "
        "WHERE name = 'acme'"
    ).fetchone()
    assert row == ("0 8 * * mon-fri", "Europe/Berlin", {"account": "acme"}, "all", 7, "slow", 3)
    assert (told["name"], told["next_tick"][-9:]) == ("b", "00:00:00Z")


def test_an_application_checks_the_arguments(pgqueue, queue, application):
    ended = pgqueue("schedules", "add", "a", "@daily", "send_welcome", '{"user": 7}', "--app", application)
    good = pgqueue("schedules", "add", "a", "@daily", "send_welcome", '{"user_id": 7}', "--app", application)

    assert (ended.code, good.code) == (2, 0)
    assert "takes no argument 'user' (it takes: user_id, text)" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["add", "a", "61 * * * *", "send"], 2, "'61' for the minute, which takes 0-59"),
        (["add", "a", "@daily", "send", "--timezone", "Berlin"], 2, "did you mean 'Europe/Berlin'?"),
        (["add", "a", "@daily", "sned"], 1, "no task 'sned'; did you mean 'send'?"),
        (["add", "a", "@daily", "send", "{x}"], 1, "the arguments are not JSON"),
        (["add", "a", "@daily", "send", "--catch-up", "some"], 2, "'some' is not one of"),
        (
            ["add", "a", "@daily", "send", "--catch-up-limit", "0"],
            2,
            "catch_up_limit must be between 1 and 1000",
        ),
        (["add", "nightly", "@daily", "send", "--replace"], 1, "is declared in the code of shop:app"),
        (["remove", "nightly"], 1, "take it out there, or pause it: pgqueue schedules pause nightly"),
        (["pause", "nighlty"], 1, "no schedule 'nighlty'; did you mean 'nightly'?"),
        (["run-now", "foo"], 1, "no schedule 'foo'; known: "),
        (["next", "3", "nope"], 1, "no schedule 'nope'"),
        (["next", "0"], 2, "0 is not in the range"),
        (["next", "2", "nightly", "--cron", "@daily"], 2, "either --cron or the names"),
    ],
)
@pytest.mark.usefixtures("declared")
def test_what_cannot_be_done_is_one_line(pgqueue, arguments, code, message):
    ended = pgqueue("schedules", *arguments)

    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_a_task_that_nobody_knows_needs_force(pgqueue, queue):
    assert pgqueue("schedules", "add", "a", "@daily", "far", "--force").code == 0
    assert queue.one("SELECT task FROM pgqueue.schedules") == "far"


def test_one_that_was_added_can_be_replaced_and_removed(pgqueue, queue):
    pgqueue("schedules", "add", "a", "@daily", "send")

    again = pgqueue("schedules", "add", "a", "@hourly", "send")
    replaced = pgqueue("schedules", "add", "a", "@hourly", "send", "--replace")
    cron = queue.one("SELECT cron FROM pgqueue.schedules")
    removed = pgqueue("schedules", "remove", "a")

    assert (again.code, replaced.code, cron) == (1, 0, "@hourly")
    assert removed.err == "removed a\n"
    assert queue.one("SELECT count(*) FROM pgqueue.schedules") == 0


def test_pausing_and_resuming_say_what_they_did(pgqueue, queue, declared):
    paused = pgqueue("schedules", "pause", declared)
    is_paused = queue.one("SELECT is_paused FROM pgqueue.schedules")
    resumed = pgqueue("schedules", "resume", declared)

    assert (paused.err, is_paused) == ("paused nightly\n", True)
    assert resumed.err.startswith("resumed nightly; next at 20")
    assert queue.one("SELECT is_paused FROM pgqueue.schedules") is False


def test_running_one_now_prints_the_jobs_id(pgqueue, queue, declared):
    job_id = int(pgqueue("schedules", "run-now", declared).out)
    told = pgqueue("schedules", "run-now", declared, "--json").json

    assert queue.one("SELECT headers ->> 'schedule' FROM pgqueue.jobs WHERE id = %s", job_id) == "nightly"
    assert told == {"job_id": job_id + 1}


def test_without_the_package_commands_say_what_to_install_and_the_rest_works(pgqueue, declared, monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)

    added = pgqueue("schedules", "add", "a", "@daily", "send")
    listed = pgqueue("schedules", "list")
    ticks = pgqueue("schedules", "next", 1)

    assert (added.code, listed.code, ticks.code) == (2, 0, 2)
    assert ticks.err.startswith("pgqueue: schedules need the package cronsim: ")
    assert "pip install 'pgqueue-jobs[cron]'" in added.err
    assert pgqueue("schedules", "pause", declared).code == 0
    assert pgqueue("schedules", "run-now", declared).code == 0
