"""When a schedule ticks, through changes of clocks and leap years, and what becomes of missed ticks."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgqueue.errors import ConfigurationError
from pgqueue.model import schedule
from pgqueue.model.schedule import (
    ALIASES,
    GRACE,
    Cron,
    Plan,
    ScheduleRegistry,
    define,
    far_job_maker,
    job_maker,
    plan,
)
from pgqueue.model.task import define as define_task

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


def ticks(cron: str, timezone: str, start: str, count: int) -> list[str]:
    """Give the first ticks after a local time, as the clocks there show them."""
    known = Cron(cron, timezone)
    after = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(timezone))
    return [f"{known.local(tick):%m-%dT%H:%M%z}" for tick in islice(known.after(after), count)]


# Changes of clocks.


@pytest.mark.parametrize(
    ("timezone", "start", "expected"),
    [
        (BERLIN, "2026-03-28 12:00", ["03-29T03:00+0200", "03-30T02:30+0200"]),
        (BERLIN, "2027-03-27 12:00", ["03-28T03:00+0200", "03-29T02:30+0200"]),
        (NEW_YORK, "2026-03-07 12:00", ["03-08T03:00-0400", "03-09T02:30-0400"]),
        (NEW_YORK, "2027-03-13 12:00", ["03-14T03:00-0400", "03-15T02:30-0400"]),
    ],
)
def test_a_local_time_that_clocks_leave_out_comes_once_when_they_have_been_changed(timezone, start, expected):
    assert ticks("30 2 * * *", timezone, start, 2) == expected
    assert ticks("0 30 2 * * *", timezone, start, 2) == expected
    assert ticks("15,45 0,30 2 * * *", timezone, start, 2)[0] == expected[0]


@pytest.mark.parametrize(
    ("cron", "timezone", "start", "expected"),
    [
        ("30 2 * * *", BERLIN, "2026-10-24 12:00", ["10-25T02:30+0200", "10-26T02:30+0100"]),
        ("30 2 * * *", BERLIN, "2027-10-30 12:00", ["10-31T02:30+0200", "11-01T02:30+0100"]),
        ("30 1 * * *", NEW_YORK, "2026-10-31 12:00", ["11-01T01:30-0400", "11-02T01:30-0500"]),
        ("30 1 * * *", NEW_YORK, "2027-11-06 12:00", ["11-07T01:30-0400", "11-08T01:30-0500"]),
        ("0 30 2 * * *", BERLIN, "2026-10-24 12:00", ["10-25T02:30+0200", "10-26T02:30+0100"]),
        ("0 0-4/2 * * *", BERLIN, "2026-10-25 00:00", ["10-25T02:00+0200", "10-25T04:00+0100"]),
        ("30 1-3 * * *", BERLIN, "2026-10-25 01:30", ["10-25T02:30+0200", "10-25T03:30+0100"]),
    ],
)
def test_a_local_time_that_clocks_show_twice_comes_the_first_time_only(cron, timezone, start, expected):
    assert ticks(cron, timezone, start, 2) == expected


@pytest.mark.parametrize(
    ("cron", "timezone", "start", "expected"),
    [
        (
            "0 * * * *",
            BERLIN,
            "2026-03-29 00:30",
            ["03-29T01:00+0100", "03-29T03:00+0200", "03-29T04:00+0200"],
        ),
        (
            "0 * * * *",
            BERLIN,
            "2026-10-25 01:30",
            ["10-25T02:00+0200", "10-25T02:00+0100", "10-25T03:00+0100"],
        ),
        (
            "*/30 * * * *",
            NEW_YORK,
            "2026-11-01 00:59",
            ["11-01T01:00-0400", "11-01T01:30-0400", "11-01T01:00-0500", "11-01T01:30-0500"],
        ),
        ("*/30 * * * *", NEW_YORK, "2026-03-08 01:30", ["03-08T03:00-0400", "03-08T03:30-0400"]),
        ("0 30 * * * *", BERLIN, "2026-10-25 02:00", ["10-25T02:30+0200", "10-25T02:30+0100"]),
        # Clocks that go back half an hour.
        ("0 */2 * * *", LORD_HOWE, "2026-04-05 00:00", ["04-05T02:00+1030", "04-05T04:00+1030"]),
    ],
)
def test_intervals_go_by_the_time_that_really_passes(cron, timezone, start, expected):
    assert ticks(cron, timezone, start, len(expected)) == expected


CHANGES = [
    (BERLIN, "2026-03-29T01:00Z"),
    (BERLIN, "2026-10-25T01:00Z"),
    (NEW_YORK, "2026-03-08T07:00Z"),
    (NEW_YORK, "2026-11-01T06:00Z"),
    (LORD_HOWE, "2026-04-04T15:00Z"),
    (LORD_HOWE, "2026-10-03T15:30Z"),
    ("America/Santiago", "2026-09-06T04:00Z"),  # midnight is left out
    ("America/Havana", "2026-11-01T05:00Z"),  # midnight is shown twice
    ("Africa/Casablanca", "2026-02-15T02:00Z"),
    ("Asia/Jakarta", "2026-01-01T00:00Z"),  # never changed
]


def by_hand(
    minutes: set[int], hours: set[int], *, is_local: bool, timezone: str, first: datetime
) -> list[datetime]:
    """Give the ticks of the four days after `first`, minute by minute and without any cleverness."""
    zone, found = ZoneInfo(timezone), []
    shown = set()
    before = first.astimezone(zone).replace(tzinfo=None)
    for number in range(1, 3 * 24 * 60):
        instant = first + number * MINUTE
        now = instant.astimezone(zone).replace(tzinfo=None)
        # What the clocks show at this instant, and what they leave out to get there.
        passed = [before + step * MINUTE for step in range(1, max(1, (now - before) // MINUTE))]
        matches = [t for t in [*passed, now] if t.minute in minutes and t.hour in hours]
        if (not is_local and now in matches) or (is_local and set(matches) - shown):
            found.append(instant)
        shown.update(matches)
        before = now
    return found


@pytest.mark.parametrize(("timezone", "change"), CHANGES)
@pytest.mark.parametrize(
    ("minute", "minutes", "hour", "hours"),
    [
        ("30", {30}, "*", set(range(24))),
        ("*/15", {0, 15, 30, 45}, "*", set(range(24))),
        ("0", {0}, "*/2", set(range(0, 24, 2))),
        ("*", set(range(60)), "1-2", {1, 2}),
        ("30", {30}, "2", {2}),
        ("0,10,50", {0, 10, 50}, "0-3", {0, 1, 2, 3}),
        ("45", {45}, "23", {23}),
        ("0-59", set(range(60)), "0-23", set(range(24))),
    ],
)
def test_around_a_change_of_clocks_each_tick_comes_as_often_as_it_should_from_wherever_one_looks(
    timezone, change, minute, minutes, hour, hours
):
    first = datetime.fromisoformat(change) - DAY
    is_local = not minute.startswith("*") and not hour.startswith("*")
    expected = by_hand(minutes, hours, is_local=is_local, timezone=timezone, first=first)
    cron = Cron(f"{minute} {hour} * * *", timezone)
    last = first + 3 * DAY - MINUTE

    found = list(takewhile(lambda tick: tick <= last, cron.after(first)))

    assert found == expected
    # Whoever computes anew from any instant, as a worker does after an outage, finds the same.
    for number in range(-180, 181, 13):
        instant = first + DAY + number * MINUTE + number % 3 * timedelta(seconds=1)
        after = next(tick for tick in expected if tick > instant)
        assert next(cron.after(instant)) == after, instant


def test_the_offset_is_that_of_the_day_asked_for():
    assert ticks("0 12 * 7 *", BERLIN, "2026-02-01 00:00", 1) == ["07-01T12:00+0200"]


# Expressions.


def test_february_29th_comes_when_there_is_one():
    found = islice(Cron("0 12 29 2 *").after(datetime(2026, 1, 1, tzinfo=UTC)), 2)

    assert [f"{tick:%Y-%m-%d}" for tick in found] == ["2028-02-29", "2032-02-29"]


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 0 13 * fri", ["02-06", "02-13", "02-20"]),  # either day will do
        ("0 0 */10 * fri", ["05-01", "07-31", "08-21"]),  # unless one begins with a star
        ("0 0 L * *", ["02-28", "03-31", "04-30"]),
        ("0 0 * * 1#2", ["02-09", "03-09", "04-13"]),
        ("0 0 1 jan-MAR *", ["03-01", "01-01", "02-01"]),
        ("0 0 * * 7", ["02-08", "02-15", "02-22"]),
    ],
)
def test_days_are_chosen_as_in_debians_cron(cron, expected):
    found = islice(Cron(cron).after(datetime(2026, 2, 1, tzinfo=UTC)), 3)

    assert [f"{tick:%m-%d}" for tick in found] == expected


def test_six_fields_begin_with_the_second():
    found = islice(Cron("*/20 * * * * *").after(datetime(2026, 1, 1, tzinfo=UTC)), 3)

    assert [f"{tick:%H:%M:%S}" for tick in found] == ["00:00:20", "00:00:40", "00:01:00"]


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_means_its_five_fields(alias):
    start = datetime(2026, 2, 3, 4, 5, tzinfo=UTC)

    assert Cron(alias.upper(), BERLIN).next_after(start) == Cron(ALIASES[alias], BERLIN).next_after(start)


@pytest.mark.parametrize(
    ("cron", "message"),
    [
        ("61 * * * *", "'61' for the minute, which takes 0-59"),
        ("0 24 * * *", "'24' for the hour"),
        ("* 60 * * * *", "'60' for the minute"),
        ("0 0 32 * *", "'32' for the day-of-month"),
        ("0 22-2 * * *", "'22-2' for the hour"),
        ("R R * * *", "'R' for the minute"),
        ("* * *", r"cron '\* \* \*' has 3 fields; write five, minute hour day month weekday, or six"),
        ("* * * * * * *", "has 7 fields"),
        ("0 2 30 2 *", "never comes: there is no such day"),
        ("0 0 31 4,6 *", "never comes"),
        ("* * */20 * 1L", "never comes"),
        ("@reboot", "cron '@reboot' is unknown; there are @hourly, @daily"),
        ("", "cron must be a text that is not empty"),
        ("* " * 200, "cron"),
        (None, "cron must be a text"),
        ("9" * 240 + " * * * *", "for the minute"),
    ],
)
def test_what_cannot_be_read_or_never_comes_is_refused_with_the_reason(cron, message):
    with pytest.raises(ConfigurationError, match=message):
        Cron(cron)


@given(st.text(alphabet="0123456789*/-,#LWR?@ aMONdaily²\n\0", max_size=30))
@example("1#2/2 * * * *")
@example("* * L/2 * *")
@example("* * * * 5L/2")
@example("* * 1,L * MON#5")
@settings(max_examples=500, deadline=None)
def test_any_text_is_an_expression_or_is_refused(text):
    try:
        cron = Cron(text)
    except ConfigurationError:
        return

    assert cron.next_after(datetime(2026, 1, 1, tzinfo=UTC)) > datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("timezone", "message"),
    [
        ("Berlin", "did you mean 'Europe/Berlin'"),
        ("new york", "did you mean 'America/New_York'"),
        ("Europe/Belin", "did you mean 'Europe/Berlin'"),
        ("Nowhere", "there is no time zone 'Nowhere'; write it like Europe/Berlin"),
        ("right/UTC", "there is no time zone"),
        ("localtime", "there is no time zone"),
        ("../../etc/passwd", "there is no time zone"),
        ("", "timezone must be a text that is not empty"),
        (3, "timezone must be a text"),
    ],
)
def test_a_time_zone_that_does_not_exist_is_refused_and_the_one_meant_is_named(timezone, message):
    with pytest.raises(ConfigurationError, match=message):
        Cron("* * * * *", timezone)


def test_without_the_package_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'pgqueue-jobs\[cron\]'"):
        Cron("* * * * *")
    assert not schedule.has_cron()


# What becomes of missed ticks.

NOW = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
EVERY_MINUTE = Cron("* * * * *")


@pytest.mark.parametrize(
    ("catch_up", "fired", "skipped"), [("latest", 1, 180), ("all", 100, 81), ("skip", 0, 181)]
)
def test_three_hours_of_downtime_are_accounted_for_by_each_policy(catch_up, fired, skipped):
    due = datetime(2026, 6, 1, 9, tzinfo=UTC)

    planned = plan(EVERY_MINUTE, catch_up, 100, due, NOW)

    assert (len(planned.ticks), planned.skipped) == (fired, skipped)
    assert planned.ticks[-1:] == ([] if catch_up == "skip" else [NOW.replace(second=0)])
    assert planned.next_tick == datetime(2026, 6, 1, 12, 1, tzinfo=UTC)
    assert planned.is_counted


@given(
    st.sampled_from(["* * * * *", "*/20 * * * * *", "30 2 * * *", "0 */5 * * *", "7 3 1,15 * mon"]),
    st.sampled_from([BERLIN, NEW_YORK, "UTC"]),
    st.sampled_from(["latest", "all", "skip"]),
    st.integers(1, 50),
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),  # noqa: DTZ001
    st.timedeltas(timedelta(0), timedelta(hours=5)),
)
@settings(max_examples=150, deadline=None)
def test_fired_and_skipped_are_all_that_was_due_and_the_next_tick_follows(
    cron, timezone, catch_up, limit, start, downtime
):
    known = Cron(cron, timezone)
    first = known.next_after(start.replace(tzinfo=UTC))
    now = first + downtime

    planned = plan(known, catch_up, limit, first, now)

    due = [first, *takewhile(lambda tick: tick <= now, known.after(first))]
    assert len(planned.ticks) + planned.skipped == len(due)
    assert planned.ticks == due[len(due) - len(planned.ticks) :]
    assert planned.next_tick == known.next_after(now)
    wanted = {"latest": 1, "all": min(limit, len(due)), "skip": int(now - due[-1] <= GRACE)}
    assert len(planned.ticks) == wanted[catch_up]


def test_a_tick_found_within_the_grace_was_not_missed():
    due = datetime(2026, 6, 1, 12, tzinfo=UTC)

    assert plan(EVERY_MINUTE, "skip", 1, due, due + GRACE).ticks == [due]
    assert plan(EVERY_MINUTE, "skip", 1, due, due + GRACE + timedelta(seconds=1)).ticks == []


def test_a_new_entry_counts_from_now():
    assert plan(EVERY_MINUTE, "all", 100, None, NOW) == Plan([], 0, NOW.replace(minute=1, second=0))


@pytest.fixture
def _counts_less(monkeypatch):
    monkeypatch.setattr(schedule, "MAX_COUNTED", 5000)


@pytest.mark.usefixtures("_counts_less")
@pytest.mark.parametrize(("catch_up", "fired"), [("latest", 1), ("all", 1000), ("skip", 1)])
def test_more_ticks_than_can_be_counted_are_said_to_be_more_and_the_latest_ones_fire(catch_up, fired):
    planned = plan(Cron("* * * * * *"), catch_up, 1000, NOW - DAY, NOW)

    assert (len(planned.ticks), planned.skipped, planned.is_counted) == (fired, 5000 - fired, False)
    assert planned.ticks == [NOW - n * timedelta(seconds=1) for n in reversed(range(fired))]
    assert planned.next_tick == NOW + timedelta(seconds=1)


@pytest.mark.usefixtures("_counts_less")
def test_ticks_that_come_in_bursts_are_found_too_when_there_are_too_many():
    planned = plan(Cron("* * * * * mon"), "all", 1000, NOW - 7 * DAY, NOW + 3 * DAY)

    assert len(planned.ticks) == 1000
    assert planned.ticks[-1] == datetime(2026, 6, 1, 23, 59, 59, tzinfo=UTC)
    assert not planned.is_counted


# Declaring.


def send(user_id: int, at: datetime | None = None) -> None: ...


SEND = job_maker(define_task(send, queue="mail", unique_key="send:{user_id}"))


def test_a_definition_is_complete_and_its_arguments_are_encoded():
    made = define(" @daily ", "send", SEND, args={"user_id": 7, "at": datetime(2026, 1, 1, tzinfo=UTC)})

    assert made.registration() == {
        "name": "send",
        "cron": "@daily",
        "timezone": "UTC",
        "task": "send",
        "args": '{"user_id": 7, "at": "2026-01-01T00:00:00+00:00"}',
        "queue": None,
        "priority": None,
        "catch_up": "latest",
        "catch_up_limit": 100,
    }


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"cron": "* * 31 2 *"}, "schedule 'send': cron '.*' never comes"),
        ({"timezone": "Berlin"}, "schedule 'send': there is no time zone 'Berlin'"),
        ({"args": {}}, "schedule 'send': task 'send': misses the argument 'user_id'"),
        ({"args": {"user_id": "x"}}, "schedule 'send': task 'send': args.user_id"),
        ({"args": {"user_id": 1, "user": 1}}, "takes no argument 'user'"),
        ({"args": [1]}, "args is a list, not a dict by name"),
        ({"queue": ""}, "queue must be a text that is not empty"),
        ({"priority": -1}, "priority must be"),
        ({"catch_up": "none"}, "catch_up must be one of latest, all, skip, not 'none'"),
        ({"catch_up_limit": 0}, "catch_up_limit must be between 1 and 1000, not 0"),
        ({"catch_up_limit": True}, "catch_up_limit must be"),
        ({"name": ""}, "the schedule's name must be a text that is not empty"),
        ({"name": "x" * 256}, "the schedule's name"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_declared(said, message):
    with pytest.raises(ConfigurationError, match=message):
        define(**{"cron": "@daily", "task": "send", "make_job": SEND, "args": {"user_id": 7}, **said})


def test_without_the_code_arguments_are_checked_by_their_names():
    schema = define_task(send).signature.schema()

    assert (
        define("@daily", "send", far_job_maker("send", schema), args={"user_id": 1}).args == '{"user_id": 1}'
    )
    assert define("@daily", "far", far_job_maker("far", None), args={"x": 1}).args == '{"x": 1}'
    with pytest.raises(ConfigurationError, match="misses the argument 'user_id'"):
        define("@daily", "send", far_job_maker("send", schema))
    with pytest.raises(ConfigurationError, match=r"takes no argument 'user' \(it takes: user_id, at\)"):
        define("@daily", "send", far_job_maker("send", schema), args={"user_id": 1, "user": 1})


def test_two_schedules_cannot_have_one_name():
    registry = ScheduleRegistry()
    registry.add(define("@daily", "send", SEND, args={"user_id": 1}))

    with pytest.raises(ConfigurationError, match=r"'send' is declared twice, .* name=\.\.\."):
        registry.add(define("@hourly", "send", SEND, args={"user_id": 2}))
    registry.add(define("@hourly", "send", SEND, name="another", args={"user_id": 2}))

    assert [entry["name"] for entry in registry.registrations()] == ["another", "send"]
