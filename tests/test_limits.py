"""What an operator asks for is what the database says afterwards."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from pgqueue import limits
from pgqueue.errors import ConfigurationError, RateLimitNotFound


@pytest.fixture
def conn(connect, fast_dsn) -> psycopg.Connection:
    return connect(fast_dsn)


def settings(conn):
    return conn.execute(
        "SELECT name, is_paused, paused_until, max_running, reason FROM pgqueue.queues ORDER BY name"
    ).fetchall()


def test_queues_are_paused_and_resumed_by_name(conn):
    paused = limits.pause_queues(conn, ["b", "a", "b"], reason="deploy")
    while_paused = settings(conn)

    resumed = limits.resume_queues(conn, ["a"], max_running=3)

    assert (paused, resumed) == (["a", "b"], ["a"])
    assert while_paused == [("a", True, None, None, "deploy"), ("b", True, None, None, "deploy")]
    assert settings(conn) == [("a", False, None, 3, None), ("b", True, None, None, "deploy")]


def test_all_means_what_is_known_and_what_is_paused(conn):
    conn.execute("INSERT INTO pgqueue.jobs (task, queue) VALUES ('t', 'mail')")

    assert limits.pause_queues(conn) == ["mail"]
    assert limits.resume_queues(conn) == ["mail"]
    assert limits.resume_queues(conn) == []


def test_all_can_be_resumed_that_were_paused_for_a_reason(conn):
    limits.pause_queues(conn, ["mail"], seconds=28_800, reason="provider is down")
    conn.execute("INSERT INTO pgqueue.jobs (task, queue) VALUES ('t', 'web')")

    paused = limits.pause_queues(conn, reason="runaway")
    told = limits.list_pauses(conn)
    resumed = limits.resume_queues(conn, reason="runaway")

    assert (paused, resumed) == (["web"], ["web"])
    assert [(one.queue, one.reason) for one in told] == [("mail", "provider is down"), ("web", "runaway")]
    assert 28_700 < (told[0].until - told[0].seen_at).total_seconds() <= 28_800
    assert [one.queue for one in limits.list_pauses(conn)] == ["mail"]


def test_a_pause_ends_after_so_long_or_at_an_instant(conn):
    until = datetime(2030, 1, 31, 12, tzinfo=UTC)

    limits.pause_queues(conn, ["at"], until=until)
    limits.pause_queues(conn, ["for"], seconds=90)

    (_, _, at, _, _), (_, _, after, _, _) = settings(conn)
    assert at == until
    left = conn.execute("SELECT extract(epoch FROM %s - clock_timestamp())::float8", [after]).fetchone()[0]
    assert 85 < left <= 90


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"seconds": 5, "until": datetime(2030, 1, 1, tzinfo=UTC)}, "a length or an end, not both"),
        ({"until": datetime(2030, 1, 1)}, "2030-01-01T00:00:00 has no time zone"),  # noqa: DTZ001
        ({"until": "2030-01-01"}, "until must be a datetime"),
        ({"until": datetime(3000, 1, 1, tzinfo=UTC)}, "until must lie between the years 2000 and 3000"),
        ({"queues": [""]}, "queue must be a text"),
        ({"until": datetime(2020, 1, 1, tzinfo=UTC)}, "until 2020-01-01 00:00:00 UTC would be over already"),
        ({"queues": "mail"}, "queues must be a list of names, not 'mail'"),
        ({"queues": b"mail"}, "queues must be a list of names"),
        ({"queues": 5}, "queues must be a list of names, not 5"),
        ({"seconds": -5}, "seconds must be above 0 and at most 3,200,000,000, not -5"),
        ({"seconds": 0}, "seconds must be"),
        ({"seconds": float("nan")}, "seconds must be"),
        ({"seconds": 1e300}, "seconds must be"),
        ({"seconds": "90"}, "seconds must be"),
        ({"seconds": True}, "seconds must be"),
        ({"reason": "a\0b"}, "reason contains a NUL"),
        ({"reason": 5}, "reason must be a text"),
    ],
)
def test_a_pause_that_makes_no_sense_is_refused(conn, said, message):
    with pytest.raises(ConfigurationError, match=message):
        limits.pause_queues(conn, **said)

    assert settings(conn) == []


def test_names_that_come_one_by_one_are_all_heard(conn):
    assert limits.pause_queues(conn, (name for name in "ab")) == ["a", "b"]
    assert limits.resume_queues(conn, iter(["a"])) == ["a"]


@pytest.mark.parametrize("max_running", [-1, 10**12, 1.5, True, "1"])
def test_a_ceiling_that_makes_no_sense_is_refused(conn, max_running):
    limits.pause_queues(conn, ["mail"])
    before = settings(conn)

    with pytest.raises(ConfigurationError, match="max_running must be a whole number between 0 and"):
        limits.limit_queue(conn, "mail", max_running)
    with pytest.raises(ConfigurationError, match="max_running must be a whole number between 0 and"):
        limits.resume_queues(conn, ["mail"], max_running=max_running)

    assert settings(conn) == before


def test_what_else_makes_no_sense_is_refused(conn):
    with pytest.raises(ConfigurationError, match="queues must be a list of names"):
        limits.resume_queues(conn, "mail")
    with pytest.raises(ConfigurationError, match="reason contains a NUL"):
        limits.limit_queue(conn, "mail", 1, reason="a\0b")
    with pytest.raises(ConfigurationError, match="name contains a NUL"):
        limits.remove_limit(conn, "a\0b")

    assert settings(conn) == []


def test_a_ceiling_is_set_and_lifted(conn):
    limits.limit_queue(conn, "mail", 0, reason="broken")
    stopped = settings(conn)

    limits.limit_queue(conn, "mail", None)

    assert stopped == [("mail", False, None, 0, "broken")]
    assert settings(conn) == [("mail", False, None, None, None)]


# Rate limits.


def names(conn, **which):
    return [one.name for one in limits.list_limits(conn, **which)]


def test_a_rate_limit_is_made_changed_and_removed(conn):
    limits.set_limit(conn, "task:send", "5/min")
    limits.set_limit(conn, "task:send", "100/s", burst=20)
    (one,) = limits.list_limits(conn)

    freed = limits.remove_limit(conn, "task:send")

    assert (one.name, one.tokens_per_second, one.burst, one.is_declared) == ("task:send", 100, 20, False)
    assert (freed, names(conn)) == (0, [])


def test_no_rate_lets_everything_pass(conn):
    assert limits.set_limit(conn, "task:send", None) == limits.UNLIMITED


def test_a_pattern_counts_for_its_keys_which_are_listed_if_they_are_asked_for(conn):
    limits.set_limit(conn, "api:*", "1/h")
    limits.set_limit(conn, "queue:mail", "1/h")
    for customer in "aab":
        conn.execute("INSERT INTO pgqueue.jobs (task, rate_key) VALUES ('t', %s)", [f"api:{customer}"])
    for _ in range(2):
        conn.execute("SELECT pgqueue.claim('default', gen_random_uuid(), 10)")

    pattern, queue = limits.list_limits(conn)

    assert (pattern.name, pattern.keys, pattern.taken, pattern.waiting) == ("api:*", 2, 2, 1)
    assert pattern.next_at > pattern.seen_at
    assert (queue.name, queue.keys, queue.taken, queue.waiting, queue.next_at) == (
        "queue:mail",
        0,
        0,
        0,
        None,
    )
    assert names(conn, with_keys=True) == ["api:*", "api:a", "api:b", "queue:mail"]
    assert limits.limit_names(conn) == ["api:*", "queue:mail"]


@pytest.mark.parametrize(("name", "rate"), [("queue:*", "5/s"), ("task:send", "fast"), ("", "5/s")])
def test_a_limit_that_makes_no_sense_is_refused(conn, name, rate):
    with pytest.raises(ConfigurationError):
        limits.set_limit(conn, name, rate)

    assert names(conn) == []


def test_a_limit_that_is_not_there_is_named_with_the_one_that_was_meant(conn):
    limits.set_limit(conn, "task:send", "5/s")

    with pytest.raises(RateLimitNotFound, match=r"no rate limit 'task:sent'; did you mean 'task:send'\?"):
        limits.remove_limit(conn, "task:sent")
