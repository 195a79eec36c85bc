"""`pgqueue breakers`: what is open since when, and the switch that a person has."""

from __future__ import annotations

import pytest


@pytest.fixture
def breakers(queue):
    queue.connection.execute(
        "SELECT pgqueue.register_tasks("
        """'[{"name": "charge", "breaker": "payments-api"}, """
        """{"name": "refund", "breaker": "payments-api"}]')"""
    )
    queue.connection.execute(
        """SELECT pgqueue.breaker_declare('[{"name": "payments-api", "min_calls": 10}, {"name": "mail"}]')"""
    )
    return queue


def report(queue, successes, failures):
    return queue.one(
        "SELECT pgqueue.report('payments-api', generation, %s, %s) FROM pgqueue.breakers "
        "WHERE name = 'payments-api'",
        successes,
        failures,
    )


def test_the_list_says_how_much_fails_and_what_depends_on_it(pgqueue, breakers):
    report(breakers, 30, 10)

    ended = pgqueue("breakers")

    assert " ".join(ended.out.split()[:9]) == (
        "BREAKER STATE SINCE FAILED PROBE OPENS GENERATION PARKED TASKS"
    )
    assert ended.rows == ["mail closed - - - 0 1 0", "payments-api closed - 10/40 - 0 1 0 charge, refund"]


def test_of_an_open_one_the_list_says_since_when_until_when_and_how_many_jobs_wait(pgqueue, breakers):
    report(breakers, 0, 10)
    job = breakers.enqueue(task="charge")
    ((_, token),) = breakers.claim()
    breakers.connection.execute(
        "SELECT pgqueue.breaker_park(ARRAY[%s]::bigint[], ARRAY[%s]::uuid[], 'payments-api')", [job, token]
    )
    breakers.connection.execute(
        "UPDATE pgqueue.breakers SET opened_at = opened_at - interval '12 min', "
        "retry_at = retry_at + interval '4 min 30 s' WHERE name = 'payments-api'"
    )

    ended, shown = pgqueue("breakers", "list"), pgqueue("jobs", "show", job)
    retried = pgqueue("jobs", "retry", job)

    assert ended.rows[1] == "payments-api open 12 min ago - in 5 min 1 2 1 charge, refund"
    assert shown.out.startswith(
        f"job {job} waits for its circuit breaker 'payments-api'; see: pgqueue breakers\n"
    )
    assert retried.code == 1
    assert "it waits for its circuit breaker; see: pgqueue breakers" in retried.out


def test_counts_that_are_too_old_to_matter_are_not_shown(pgqueue, breakers):
    report(breakers, 30, 10)
    breakers.connection.execute("UPDATE pgqueue.breakers SET window_at = window_at - interval '11 s'")
    one_window = pgqueue("breakers").rows[1]
    breakers.connection.execute("UPDATE pgqueue.breakers SET window_at = window_at - interval '10 s'")

    two_windows = pgqueue("breakers").rows[1]

    assert (one_window.split()[3], two_windows.split()[3]) == ("10/40", "-")


def test_the_document_has_the_settings_and_whose_they_are(pgqueue, breakers):
    pgqueue("breakers", "set", "mail", "--min-calls", "3")

    mail, payments = pgqueue("breakers", "--json").json

    assert (mail["name"], mail["min_calls"], mail["pinned"]) == ("mail", 3, ["max_failures", "min_calls"])
    assert (payments["tasks"], payments["retry_at"], payments["pinned"]) == (["charge", "refund"], None, [])


def test_no_breakers_is_said_on_stderr(pgqueue):
    ended = pgqueue("breakers")

    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "no breakers: no task that a worker knows names one\n"


def test_one_is_opened_until_it_is_closed(pgqueue, breakers):
    opened = pgqueue("breakers", "open", "mail")
    listed = pgqueue("breakers").rows[0]
    closed = pgqueue("breakers", "close", "mail")

    assert (opened.code, opened.err) == (0, "mail is open until: pgqueue breakers close mail\n")
    assert listed == "mail open 0 s ago - by hand 1 2 0"
    assert (closed.code, closed.err) == (0, "mail is closed\n")
    assert pgqueue("breakers").rows[0] == "mail closed - - - 0 3 0"


def test_one_is_opened_for_a_time(pgqueue, breakers):
    opened = pgqueue("breakers", "open", "mail", "--for", "15m")

    assert opened.err == "mail is open for 15 min\n"
    assert pgqueue("breakers").rows[0] == "mail open 0 s ago - in 15 min 1 2 0"


@pytest.mark.parametrize("arguments", [["open"], ["close"], ["set", "--min-calls", "3"]])
def test_a_name_that_is_not_there_is_said_with_the_one_that_was_meant(pgqueue, breakers, arguments):
    ended = pgqueue("breakers", *arguments, "payment-api")

    assert ended.code == 1
    assert ended.err == "pgqueue: no breaker 'payment-api'; did you mean 'payments-api'?\n"


def test_settings_are_changed_and_shown(pgqueue, breakers):
    ended = pgqueue("breakers", "set", "mail", "--failure-ratio", "0.8", "--open-seconds", "2m")

    assert [" ".join(line.split()) for line in ended.out.splitlines()] == [
        "failure_ratio 0.8 (set by hand)",
        "min_calls 20",
        "window_seconds 10",
        "open_seconds 120 (set by hand)",
        "max_open_seconds 600",
        "probe_seconds 15",
    ]


def test_a_ratio_counts_again_after_a_number_of_failures_did(pgqueue, breakers):
    number = pgqueue("breakers", "set", "mail", "--max-failures", "5")
    ratio = pgqueue("breakers", "set", "mail", "--failure-ratio", "0.5")

    assert "max_failures" in number.out
    assert "max_failures" not in ratio.out


def test_what_was_set_by_hand_is_left_to_code_again(pgqueue, breakers):
    pgqueue("breakers", "set", "mail", "--open-seconds", "2m")

    ended = pgqueue("breakers", "set", "mail", "--from-code")

    assert "set by hand" not in ended.out
    assert "120" in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give settings, or --from-code"),
        (["--from-code", "--min-calls", "3"], "give settings, or --from-code"),
        (["--failure-ratio", "2"], "breaker 'mail': failure_ratio must be a number above 0 and at most 1"),
        (["--max-failures", "5", "--min-calls", "5"], "max_failures counts without regard to the ratio"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changes(pgqueue, breakers, arguments, message):
    before = pgqueue("breakers", "--json").json[0]

    ended = pgqueue("breakers", "set", "mail", *arguments)

    assert ended.code == 2
    assert message in ended.err
    assert pgqueue("breakers", "--json").json[0]["pinned"] == before["pinned"]


def test_the_command_that_closes_it_is_written_for_a_shell(pgqueue, queue):
    queue.connection.execute("INSERT INTO pgqueue.breakers (name) VALUES ('bank; touch x')")

    opened = pgqueue("breakers", "open", "bank; touch x")

    assert opened.err == "bank; touch x is open until: pgqueue breakers close 'bank; touch x'\n"
