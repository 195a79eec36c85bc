"""`pgqueue limits`: rates are written as people say them, and what is set stays."""

from __future__ import annotations

import pytest


def test_a_limit_is_set_listed_and_removed(pgqueue, queue):
    done = pgqueue("limits", "set", "task:send", "5/h", "--burst", 2, "--force")
    for _ in range(4):
        queue.enqueue()
    for _ in range(2):
        queue.claim()

    listed = pgqueue("limits", "list")
    removed = pgqueue("limits", "remove", "task:send")

    assert (done.code, done.out, done.err) == (0, "", "task:send: 5/h with burst 2\n")
    assert listed.out.splitlines()[0].split() == [
        *("NAME", "RATE", "BURST", "KEYS", "WAITING", "NEXT", "STARTED", "FROM")
    ]
    assert listed.rows == ["task:send 5/h 2 - 2 in 12 min 2 operator"]
    assert removed.err == "removed task:send; 2 jobs waited for it\n"


def test_the_keys_of_a_pattern_are_listed_if_they_are_asked_for(pgqueue, queue):
    pgqueue("limits", "set", "api:*", "100/s")
    for customer in "ab":
        queue.connection.execute(
            "INSERT INTO pgqueue.jobs (task, rate_key) VALUES ('t', %s)", [f"api:{customer}"]
        )
    queue.claim()

    told, with_keys = pgqueue("limits", "list"), pgqueue("limits", "list", "--keys", "--json")

    assert told.rows == ["api:* 100/s 10 2 0 - 2 operator"]
    assert [(one["name"], one["pattern"]) for one in with_keys.json] == [
        ("api:*", None),
        ("api:a", "api:*"),
        ("api:b", "api:*"),
    ]


def test_a_limit_can_be_lifted_whatever_the_code_says(pgqueue, queue):
    declared = '[{"name": "task:send", "tokens_per_second": 1, "burst": 1}]'
    queue.connection.execute("SELECT pgqueue.rate_declare(%s)", [declared])
    from_code = pgqueue("limits", "list").rows

    lifted = pgqueue("limits", "set", "task:send", "none")
    queue.connection.execute("SELECT pgqueue.rate_declare(%s)", [declared])

    assert from_code == ["task:send 1/s 1 - 0 - 0 code"]
    assert lifted.err == "task:send: everything passes\n"
    assert pgqueue("limits", "list").rows == ["task:send none - - 0 - 0 operator"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("task:send_welcom", "no task 'send_welcom'; did you mean 'send_welcome'?"),
        ("task:mail", "no task 'mail'; known: send_welcome"),
        ("queue:mial", "no queue 'mial'; did you mean 'mail'?"),
    ],
)
def test_a_task_or_queue_that_nobody_knows_is_refused_but_by_force(pgqueue, queue, name, said):
    queue.connection.execute("INSERT INTO pgqueue.tasks (name, queue) VALUES ('send_welcome', 'mail')")

    refused = pgqueue("limits", "set", name, "100/s")
    before = queue.one("SELECT count(*) FROM pgqueue.rate_limits")
    forced = pgqueue("limits", "set", name, "100/s", "--force")
    again = pgqueue("limits", "set", name, "50/s")

    assert (refused.code, refused.out) == (1, "")
    assert refused.err == f"pgqueue: {said} (with --force it is limited all the same)\n"
    assert (before, forced.code, again.code) == (0, 0, 0)


@pytest.mark.parametrize("name", ["task:send_welcome", "queue:mail", "task:*", "api:acme", "api:*", "mail"])
def test_what_is_registered_and_any_key_or_pattern_can_be_limited(pgqueue, queue, name):
    queue.connection.execute("INSERT INTO pgqueue.tasks (name, queue) VALUES ('send_welcome', 'mail')")

    ended = pgqueue("limits", "set", name, "100/s")

    assert ended.code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["set", "task:send", "fast"], "a rate is a number of starts and a time, as 100/s, 5/min or 10/30s"),
        (["set", "queue:*", "5/s"], "names no queue"),
        (["set", "task:send", "none", "--burst", "5"], "--burst goes with a rate"),
        (["set", "task:send", "5/s", "--burst", "0"], "burst must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(pgqueue, arguments, said):
    ended = pgqueue("limits", *arguments)

    assert ended.code == 2
    assert said in ended.err


def test_a_limit_that_is_not_there_cannot_be_removed(pgqueue):
    ended = pgqueue("limits", "remove", "task:send")

    assert (ended.code, ended.err) == (1, "pgqueue: no rate limit 'task:send'; there is none\n")


def test_no_limits_is_said_on_stderr(pgqueue):
    ended = pgqueue("limits", "list")

    assert (ended.code, ended.out, ended.err) == (0, "", "no rate limits\n")
