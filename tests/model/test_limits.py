import pytest

from pgqueue.errors import ConfigurationError
from pgqueue.model.keys import KeyTemplate
from pgqueue.model.limits import (
    RateLimit,
    RateLimits,
    checked_name,
    declaration,
    name_for,
    rate_limit,
    rate_text,
)


@pytest.mark.parametrize(
    ("text", "per_second"),
    [
        ("100/s", 100),
        ("5/min", 5 / 60),
        ("5/m", 5 / 60),
        ("1000/h", 1000 / 3600),
        ("86400/d", 1),
        ("10/30s", 1 / 3),
        ("1/2.5s", 0.4),
        (" 0.5 / S ", 0.5),
        ("1000000/s", 1_000_000),
    ],
)
def test_a_rate_is_a_number_of_starts_and_a_time(text, per_second):
    assert rate_limit(text).tokens_per_second == pytest.approx(per_second)


@pytest.mark.parametrize(
    "text", ["", "100", "100/", "/s", "-1/s", "1e3/s", "5/year", "5/s/s", None, 5, "1/0s"]
)
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="a rate"):
        rate_limit(text)


@pytest.mark.parametrize("text", ["0/s", "1000001/s", "2000/0.001s"])
def test_a_rate_of_nothing_or_beyond_what_can_be_counted_is_refused(text):
    with pytest.raises(ValueError, match="above 0 and at most 1,000,000/s"):
        rate_limit(text)


@pytest.mark.parametrize(("text", "burst"), [("100/s", 10), ("5/s", 1), ("1/h", 1), ("1000000/s", 100_000)])
def test_a_tenth_of_a_seconds_worth_may_start_at_once_unless_it_is_said(text, burst):
    assert rate_limit(text).burst == burst
    assert rate_limit(text, 7).burst == 7


@pytest.mark.parametrize("burst", [0, -1, 100_001, 1.5, True, "10"])
def test_a_burst_that_makes_no_sense_is_refused(burst):
    with pytest.raises(ValueError, match="burst must be a whole number between 1 and 100,000"):
        rate_limit("1/s", burst)


@pytest.mark.parametrize("text", ["100/s", "5/min", "1000/h", "7/d", "1/d", "1500/s"])
def test_a_rate_is_written_as_it_was_read(text):
    assert rate_text(rate_limit(text).tokens_per_second) == text


def test_a_rate_that_no_unit_makes_whole_is_written_as_a_number():
    assert rate_text(0.123) == "0.123/s"
    assert rate_text(1 / 8_640_000) == "1/100d"


@pytest.mark.parametrize("text", ["1/100d", "7/11d", "1/30000d", "999999.7/s", "1/7d"])
def test_a_rate_of_any_size_is_written_so_that_it_can_be_read(text):
    rate = rate_limit(text).tokens_per_second

    assert rate_limit(rate_text(rate)).tokens_per_second == pytest.approx(rate, rel=1e-5)
    assert str(RateLimit(0.5, 3)) == "30/min with burst 3"


# Whom it is for.


@pytest.mark.parametrize("name", ["queue:mail", "task:send", "api:acme", "api:*", "task:mail.*", "*"])
def test_a_limit_is_for_a_queue_a_task_a_key_or_keys_with_one_beginning(name):
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["queue:", "queue:*", "queue:mail*"])
def test_the_limit_of_a_queue_names_that_queue(name):
    with pytest.raises(ValueError, match="names no queue"):
        checked_name(name)


def test_a_name_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="has 256 bytes"):
        checked_name("k" * 256)


@pytest.mark.parametrize(
    ("rate_key", "name"),
    [(None, "task:send"), ("smtp", "smtp"), ("api:{customer}", "api:*"), ("a:{x}:{y}", "a:*")],
)
def test_a_tasks_limit_is_for_the_task_or_for_each_of_its_keys(rate_key, name):
    assert name_for("send", rate_key and KeyTemplate(rate_key)) == name


def test_keys_that_begin_with_an_argument_have_nothing_in_common():
    with pytest.raises(ValueError, match=r"'\{customer\}:api' begins with an argument; put a word before it"):
        name_for("send", KeyTemplate("{customer}:api"))


# What an application declares.


def test_the_declarations_say_which_tasks_have_no_limit_of_their_own():
    limits = RateLimits()
    limits.add("task:send", RateLimit(5, 1))
    limits.add("queue:mail", RateLimit(100, 10))

    assert limits.declarations(["send", "resize"]) == [
        {"name": "queue:mail", "tokens_per_second": 100, "burst": 10},
        {"name": "task:send", "tokens_per_second": 5, "burst": 1},
        declaration("task:resize", None),
    ]


def test_two_limits_of_one_name_have_to_agree():
    limits = RateLimits()
    limits.add("api:*", RateLimit(5, 1))

    limits.add("api:*", RateLimit(5, 1))
    with pytest.raises(
        ConfigurationError, match=r"declared twice, as 5/s with burst 1 and as 6/s with burst 1"
    ):
        limits.add("api:*", RateLimit(6, 1))
