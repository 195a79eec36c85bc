"""A job gets what it leaves out from its task's definition, whoever inserts it and how."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest

from tests.sql.support import OpenSession, Session

WELCOME = {
    "name": "welcome",
    "queue": "mail",
    "priority": 3,
    "max_attempts": 7,
    "timeout_seconds": 45,
    "concurrency_key": "account:{account}",
    "concurrency_limit": 2,
    "unique_key": "welcome:{account}:{kind}",
    "idempotency_key": "w{account}",
    "rate_key": "tenant {tenant}",
    "args_schema": {"properties": {"kind": {"default": "first"}, "tenant": {"default": 1}}},
}


def register(session: Session, *definitions: dict[str, Any]) -> int:
    return session.call("register_tasks", definitions=json.dumps(definitions))[0][0]


def insert(session: Session, task: str, args: Any = None, **columns: Any) -> Any:
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", %({name})s" for name in columns)
    (row,) = session.connection.execute(
        f"INSERT INTO pgqueue.jobs (task, args{names}) VALUES (%(task)s, %(args)s{values}) RETURNING *",
        {"task": task, "args": json.dumps(args or {}), **columns},
    ).fetchall()
    return row


def decided(job: Any) -> tuple[Any, ...]:
    return (
        job.queue,
        job.priority,
        job.max_attempts,
        job.timeout_seconds,
        job.concurrency_limit,
        job.concurrency_key,
        job.unique_key,
        job.idempotency_key,
        job.rate_key,
        job.state,
    )


# What is filled in.


def test_a_plain_insert_of_a_task_nobody_registered_gets_the_defaults(session):
    job = insert(session, "t")

    assert decided(job) == ("default", 0, 5, 300, 1, None, None, None, None, "ready")


def test_a_plain_insert_gets_its_tasks_definition(session):
    register(session, WELCOME)

    job = insert(session, "welcome", {"account": 7})

    keys = ("account:7", "welcome:7:first", "w7", "tenant 1")
    assert decided(job) == ("mail", 3, 7, 45, 2, *keys, "ready")


def test_enqueue_and_enqueue_many_get_the_same(session):
    register(session, WELCOME)
    inserted = insert(session, "welcome", {"account": 1})

    single = session.job(session.enqueue("welcome", {"account": 1, "kind": "second"}))
    ((many, _),) = session.enqueue_many({"task": "welcome", "args": {"account": 1, "kind": "third"}})

    plain = [
        column.replace("second", "first") if isinstance(column, str) else column for column in decided(single)
    ]
    assert tuple(plain) == decided(inserted)
    assert session.job(many).unique_key == "welcome:1:third"
    assert decided(session.job(many))[:6] == decided(inserted)[:6]


def test_a_batch_without_unique_keys_gets_the_same_too(session):
    register(session, {**WELCOME, "unique_key": None})
    inserted = insert(session, "welcome", {"account": 1})

    ((many, _),) = session.enqueue_many({"task": "welcome", "args": {"account": 1}})

    assert decided(session.job(many)) == decided(inserted)


def test_what_the_caller_gives_goes_first(session):
    register(session, WELCOME)
    given = {
        "queue": "q",
        "priority": 0,
        "max_attempts": 1,
        "timeout_seconds": 0,
        "concurrency_key": "c",
        "concurrency_limit": 9,
        "unique_key": "u",
        "idempotency_key": "i",
    }

    inserted = insert(session, "welcome", {"account": 7}, rate_key="r", **given)
    session.cancel(inserted.id)
    enqueued = session.job(session.enqueue("welcome", {"account": 7}, **given))

    assert decided(inserted) == ("q", 0, 1, 0, 9, "c", "u", "i", "r", "ready")
    assert decided(enqueued) == ("q", 0, 1, 0, 9, "c", "u", "i", "tenant 1", "ready")


EVERYTHING_PLAIN = {
    "queue": "q",
    "priority": 0,
    "max_attempts": 1,
    "timeout_seconds": 1,
    "concurrency_limit": 1,
    "state": "ready",
}


def test_an_insert_that_gives_every_plain_column_gets_its_tasks_keys_all_the_same(session):
    register(session, WELCOME)

    job = insert(session, "welcome", {"account": 7}, **EVERYTHING_PLAIN)

    assert decided(job) == ("q", 0, 1, 1, 1, "account:7", "welcome:7:first", "w7", "tenant 1", "ready")


def test_an_insert_that_says_how_long_its_key_counts_too_is_taken_as_it_is(session):
    register(session, WELCOME)

    job = insert(session, "welcome", is_unique_until_start=False, **EVERYTHING_PLAIN)

    assert (job.concurrency_key, job.unique_key, job.rate_key) == (None, None, None)


def test_the_state_follows_from_run_at(session):
    in_an_hour = session.one("SELECT clock_timestamp() + interval '1 hour'")

    later, now = insert(session, "t", run_at=in_an_hour), insert(session, "t")

    assert (later.state, now.state) == ("scheduled", "ready")


def test_a_job_that_claims_to_be_ready_is_still_never_run_early(session):
    in_an_hour = session.one("SELECT clock_timestamp() + interval '1 hour'")
    insert(session, "t", run_at=in_an_hour, state="ready")

    assert session.claim() == []


def test_copy_is_completed_as_well(session):
    register(session, WELCOME)

    with session.connection.cursor().copy("COPY pgqueue.jobs (task, args) FROM STDIN") as copy:
        copy.write('welcome\t{"account": 1}\nother\t{}\n')

    assert session.rows("SELECT task, queue FROM pgqueue.jobs ORDER BY id") == [
        ("welcome", "mail"),
        ("other", "default"),
    ]


def test_a_role_that_may_only_insert_gets_the_definitions_and_rings(session, open_session):
    register(session, WELCOME)
    sleeper = open_session()
    sleeper.rows('LISTEN "pgqueue.mail"')
    sleeper.call("rest", queue="mail", on_duty=False)
    session.rows(
        "DROP ROLE IF EXISTS pgqueue_test_producer; CREATE ROLE pgqueue_test_producer; "
        "GRANT USAGE ON SCHEMA pgqueue TO pgqueue_test_producer; "
        "GRANT INSERT ON pgqueue.jobs TO pgqueue_test_producer"
    )

    try:
        session.rows("SET ROLE pgqueue_test_producer")
        session.rows("INSERT INTO pgqueue.jobs (task, args) VALUES ('welcome', '{\"account\": 7}')")
    finally:
        session.rows("RESET ROLE; DROP OWNED BY pgqueue_test_producer; DROP ROLE pgqueue_test_producer")

    rung = [notice.channel for notice in sleeper.connection.notifies(timeout=60, stop_after=1)]
    assert rung == ["pgqueue.mail"]
    assert session.one("SELECT queue FROM pgqueue.jobs") == "mail"


# Templates.


@pytest.mark.parametrize(
    ("template", "args", "key"),
    [
        ("{a}", {"a": "x"}, "x"),
        ("{a}-{b}", {"a": -1, "b": True}, "-1-true"),
        ("{a}{a}", {"a": 12345678901234567890123}, "12345678901234567890123" * 2),
        ("no places", {}, "no places"),
        ("{a}", {"a": "{b}", "b": "stolen"}, "{b}"),
        ("{a} {", {"a": "ü"}, "ü {"),
        ("{c}", {}, "from the default"),
        ("{d}", {}, "0"),
        ("{é}", {"é": 1}, "1"),
    ],
)
def test_a_key_is_filled_from_the_arguments(session, template, args, key):
    schema = {"properties": {"c": {"default": "from the default"}, "d": {"default": 0}}}
    register(session, {"name": "t", "concurrency_key": template, "args_schema": schema})

    job = insert(session, "t", args)

    assert job.concurrency_key == key


@pytest.mark.parametrize("kind", ["concurrency_key", "unique_key", "idempotency_key", "rate_key"])
@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({}, "which is missing"),
        ({"a": None}, "to be a string, an integer or a boolean, not null"),
        ({"a": 1.5}, "not 1.5"),
        ({"a": [1]}, "not \\[1\\]"),
        ({"a": {"b": 1}}, 'not {"b": 1}'),
    ],
)
def test_a_key_that_is_not_certain_is_refused_at_every_door(session, kind, args, complaint):
    register(session, {"name": "t", kind: "k:{a}"})

    doors = [
        lambda: insert(session, "t", args),
        lambda: session.enqueue("t", args),
        lambda: session.enqueue_many({"task": "t", "args": args}),
    ]

    for enter in doors:
        with pytest.raises(
            psycopg.errors.InvalidParameterValue,
            match=f"the {kind} of task t needs the argument a.*{complaint}",
        ):
            enter()
    assert session.one("SELECT count(*) FROM pgqueue.jobs") == 0


def test_a_key_that_comes_out_too_long_or_empty_is_refused(session):
    register(session, {"name": "t", "unique_key": "{a}"})

    for value in ("", "x" * 256):
        with pytest.raises(psycopg.errors.CheckViolation, match="jobs_names_fit"):
            session.enqueue("t", {"a": value})


# Registering.


def test_registering_writes_what_changed_and_nothing_else(session):
    before = register(session, WELCOME, {"name": "other"})
    stamps = "SELECT name, xmin::text FROM pgqueue.tasks ORDER BY name"
    written = dict(session.rows(stamps))

    again = register(session, {"name": "other"}, WELCOME)
    changed = register(session, {**WELCOME, "queue": "elsewhere"}, {"name": "other"})

    assert (before, again, changed) == (2, 0, 1)
    assert dict(session.rows(stamps))["welcome"] != written["welcome"]
    assert session.one("SELECT queue FROM pgqueue.tasks WHERE name = 'welcome'") == "elsewhere"


def test_registering_again_after_a_minute_says_that_the_task_is_still_there(session):
    register(session, WELCOME)
    session.rows("UPDATE pgqueue.tasks SET seen_at = seen_at - interval '2 min'")

    again = register(session, WELCOME)

    assert again == 1
    assert session.one("SELECT seen_at > clock_timestamp() - interval '1 min' FROM pgqueue.tasks")


def test_what_a_new_definition_leaves_out_is_the_default_again(session):
    register(session, WELCOME)

    register(session, {"name": "welcome"})

    assert decided(insert(session, "welcome")) == ("default", 0, 5, 300, 1, None, None, None, None, "ready")


@pytest.mark.parametrize(
    "wrong",
    [{"queue": ""}, {"max_attempts": 0}, {"timeout_seconds": -1}, {"priority": -1}, {"name": "x" * 256}],
)
def test_a_definition_that_no_job_could_have_is_refused(session, wrong):
    with pytest.raises(psycopg.errors.CheckViolation):
        register(session, {"name": "t", **wrong})


def test_two_workers_that_register_the_same_tasks_do_not_deadlock(open_session: OpenSession):
    names = [f"t{number}" for number in range(200)]
    failures = []

    def register_often(session: Session, order: list[str]) -> None:
        try:
            for round_ in range(10):
                register(session, *({"name": name, "priority": round_} for name in order))
        except psycopg.Error as error:
            failures.append(error)

    threads = [
        threading.Thread(target=register_often, args=(open_session(), order))
        for order in (names, names[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert failures == []
