import json
import re
from datetime import UTC, datetime

import psycopg
import pytest

from pgqueue.errors import ConfigurationError, InvalidArguments, InvalidJob, UnknownTask
from pgqueue.model.job import NewJob
from pgqueue.model.options import JobOptions
from pgqueue.model.retry import Exponential, Fixed
from pgqueue.model.task import TaskRegistry, define, unregistered_job


async def look_up_async(order_id: int, tenant: str, note: str | None) -> None: ...


def charge(order_id: int, tenant: str = "acme", note: str | None = None) -> None: ...


# Declaring.


def test_a_task_without_options_has_the_defaults():
    task = define(charge)

    assert (task.name, task.queue, task.priority, task.max_attempts, task.timeout_seconds) == (
        "charge",
        "default",
        0,
        5,
        300.0,
    )
    assert (task.retry, task.concurrency_limit, task.on_conflict, task.stores_result) == (
        Exponential(),
        1,
        "skip",
        True,
    )


@pytest.mark.parametrize("no_limit", [None, 0])
def test_no_time_limit_has_to_be_asked_for_and_is_zero_for_the_database(no_limit):
    assert define(charge, timeout_seconds=no_limit).timeout_seconds == 0.0


def test_zero_is_honoured_where_it_makes_sense():
    task = define(charge, priority=0, retry=0, timeout_seconds=0)

    assert (task.priority, task.retry, task.timeout_seconds) == (0, Fixed(0), 0.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": ""}, "the task's name must be a text"),
        ({"name": "n" * 256}, "the task's name has 256 bytes, at most 250 fit"),
        ({"name": "a\0"}, "the task's name contains a NUL"),
        ({"queue": "q" * 101}, "task 'charge': queue has 101 bytes, at most 100 fit"),
        ({"queue": None}, "task 'charge': queue must be a text"),
        ({"priority": -1}, "task 'charge': priority must be a whole number between 0 and 32,767"),
        ({"max_attempts": 0}, "task 'charge': max_attempts must be a whole number between 1 and"),
        ({"max_attempts": 2.5}, "task 'charge': max_attempts must be"),
        ({"timeout_seconds": -1}, "task 'charge': timeout_seconds must be between 0 and 604,800"),
        ({"timeout_seconds": float("nan")}, "task 'charge': timeout_seconds must be"),
        ({"concurrency_limit": 0}, "task 'charge': concurrency_limit must be"),
        ({"retry": -1}, "task 'charge': seconds must be between 0 and"),
        ({"retry": "slowly"}, "task 'charge': retry is a number of seconds"),
        ({"unrecoverable": [int]}, "task 'charge': unrecoverable lists exception classes, <class 'int'>"),
        ({"unrecoverable": [ValueError()]}, "task 'charge': unrecoverable lists exception classes"),
        ({"on_conflict": "ignore"}, "task 'charge': on_conflict must be one of skip, replace, reject"),
        ({"unique_until": "never"}, "task 'charge': unique_until must be one of end, start"),
        ({"rate_limit": "fast"}, "task 'charge': a rate is a number of starts and a time"),
        ({"rate_limit": "5/s", "rate_burst": 0}, "task 'charge': burst must be a whole number"),
        ({"rate_burst": 5}, "task 'charge': rate_burst goes with rate_limit"),
        (
            {"rate_key": "{tenant}", "rate_limit": "5/s"},
            "task 'charge': rate_limit is for the keys that begin",
        ),
        ({"store_result": "yes"}, "task 'charge': store_result must be True or False"),
        ({"transactional": 1}, "task 'charge': transactional must be True or False"),
        ({"unique_key": "{order}"}, "task 'charge': unique_key: '{order}' names 'order', which is no arg"),
        ({"concurrency_key": "a{"}, "task 'charge': concurrency_key: 'a{' is not a key template"),
        ({"idempotency_key": ""}, "task 'charge': idempotency_key: a key template must be a text"),
        ({"rate_key": "{x}"}, "task 'charge': rate_key: '{x}' names 'x'"),
        ({"breaker": ""}, "task 'charge': breaker must be a text"),
        ({"transactional": True}, "declare one parameter as tx: psycopg.Connection"),
        ({"idempotent": 1}, "task 'charge': idempotent must be True or False"),
        ({"takeover_seconds": -1}, "task 'charge': takeover_seconds must be between 0 and one year"),
        ({"reconcile": lambda: None}, "reconcile takes the arguments that the handler takes: order_id"),
        ({"reconcile": look_up_async}, "reconcile and the handler are both async, or neither is"),
        ({"reconcile": "look_up"}, "a handler is a function"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_where_it_stands(options, reason):
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        define(charge, **options)


def test_a_transactional_handler_is_given_one_connection_of_its_own_kind():
    def sync(order_id: int, tx: psycopg.Connection) -> None: ...

    async def asynchronous(order_id: int, tx: psycopg.AsyncConnection) -> None: ...

    async def without(order_id: int) -> None: ...

    assert define(sync, transactional=True).is_transactional
    assert define(asynchronous, transactional=True).is_transactional
    with pytest.raises(ConfigurationError, match="'tx' is a connection, which only a transactional handler"):
        define(sync)
    with pytest.raises(ConfigurationError, match=r"tx: psycopg\.AsyncConnection"):
        define(without, transactional=True)


def test_a_transactional_task_has_nothing_to_reconcile():
    def sync(order_id: int, tx: psycopg.Connection) -> None: ...

    with pytest.raises(ConfigurationError, match="leaves nothing to reconcile"):
        define(sync, transactional=True, reconcile=charge)


def test_an_effect_that_was_cut_off_is_begun_again_only_by_a_task_that_says_how():
    def sync(order_id: int, tx: psycopg.Connection) -> None: ...

    assert not define(charge).may_take_over
    assert define(charge, idempotent=True).may_take_over
    assert define(charge, reconcile=charge).may_take_over
    assert define(sync, transactional=True).may_take_over


def test_one_exception_class_will_do_for_a_list():
    assert define(charge, unrecoverable=KeyError).unrecoverable == (KeyError,)


# Asking for a job.


def test_a_job_of_a_known_task_is_complete_so_that_the_database_fills_nothing_in():
    task = define(charge, queue="money", priority=3, max_attempts=2, timeout_seconds=None)

    assert task.new_job((7,)) == NewJob(
        task="charge",
        args='{"order_id": 7}',
        is_complete=True,
        queue="money",
        priority=3,
        max_attempts=2,
        timeout_seconds=0.0,
        concurrency_limit=1,
    )


def test_what_is_said_about_one_job_goes_before_its_task():
    task = define(charge, queue="money", priority=3, timeout_seconds=9, unique_key="{order_id}")
    at = datetime(2024, 1, 1, tzinfo=UTC)
    said = {
        "queue": "slow",
        "priority": 0,
        "max_attempts": 1,
        "timeout_seconds": 0.0,
        "run_at": at,
        "unique_key": "mine",
        "on_conflict": "reject",
        "concurrency_key": "c",
        "concurrency_limit": 4,
        "idempotency_key": "i",
        "headers": {"trace": "t"},
    }

    job = task.new_job((7,), {}, JobOptions(**said))

    assert {name: getattr(job, name) for name in said} == said


def test_keys_are_made_from_the_arguments_and_the_defaults_of_those_not_given():
    task = define(
        charge,
        unique_key="u:{tenant}:{order_id}",
        concurrency_key="c:{tenant}",
        idempotency_key="charge:{order_id}",
    )

    default, given = task.new_job((7,)), task.new_job((7, "umbrella"))

    assert (default.unique_key, default.concurrency_key, default.idempotency_key) == (
        "u:acme:7",
        "c:acme",
        "charge:7",
    )
    assert given.unique_key == "u:umbrella:7"


def test_how_long_a_key_counts_is_said_with_the_task_or_the_job():
    task = define(charge, unique_key="{order_id}", unique_until="start")

    assert task.registration()["is_unique_until_start"]
    assert task.new_job((7,)).unique_until == "start"
    assert task.new_job((7,), options=JobOptions(unique_until="end")).unique_until == "end"


def test_debounce_needs_a_delay():
    task = define(charge, unique_key="{order_id}", on_conflict="debounce")

    job = task.new_job((7,), options=JobOptions(delay_seconds=5, max_delay_seconds=30))

    assert (job.on_conflict, job.delay_seconds, job.max_delay_seconds) == ("debounce", 5, 30)
    for refused in (
        lambda: task.new_job((7,)),
        lambda: unregistered_job("elsewhere", {}, JobOptions(on_conflict="debounce", unique_key="u")),
    ):
        with pytest.raises(InvalidJob, match="on_conflict 'debounce' puts a job off: say delay_seconds"):
            refused()


def test_a_rate_limit_is_for_the_task_or_for_each_of_its_keys():
    whole, each = (
        define(charge, rate_limit="100/s"),
        define(charge, rate_key="t:{tenant}", rate_limit="5/min"),
    )

    assert (whole.rate_limit_name, str(whole.rate_limit)) == ("task:charge", "100/s with burst 10")
    assert (each.rate_limit_name, str(each.rate_limit)) == ("t:*", "5/min with burst 1")


def test_a_key_that_cannot_be_made_is_refused_at_the_door():
    task = define(charge, unique_key="{note}")

    with pytest.raises(
        InvalidJob, match=r"task 'charge': unique_key: the key '\{note\}' needs a string, an int"
    ):
        task.new_job((7,))


def test_arguments_are_checked_against_the_signature():
    with pytest.raises(InvalidArguments, match=r"args\.order_id: expected an int, got 'x'"):
        define(charge).new_job(("x",))


def test_the_delay_is_left_to_the_databases_clock():
    job = define(charge).new_job((7,), {}, JobOptions(delay_seconds=0))

    assert (job.delay_seconds, job.run_at) == (0, None)


def test_a_job_of_a_task_that_is_elsewhere_leaves_the_rest_to_the_database():
    job = unregistered_job("elsewhere", {"a": [1]}, JobOptions(timeout_seconds=None, priority=0))

    assert job == NewJob(task="elsewhere", args='{"a": [1]}', timeout_seconds=0.0, priority=0)


@pytest.mark.parametrize("name", ["", "a\0", "n" * 256, None])
def test_a_name_that_no_task_can_have_is_refused(name):
    with pytest.raises(InvalidJob, match="the task's name"):
        unregistered_job(name, {})


# The registry.


def test_a_registered_definition_has_what_the_database_needs_as_json():
    task = define(charge, queue="money", unique_key="{order_id}", rate_key="api", breaker="stripe")

    registration = json.loads(json.dumps(task.registration()))

    assert registration.pop("args_schema")["properties"]["tenant"] == {"type": "string", "default": "acme"}
    assert registration == {
        "name": "charge",
        "queue": "money",
        "priority": 0,
        "max_attempts": 5,
        "timeout_seconds": 300.0,
        "concurrency_key": None,
        "concurrency_limit": 1,
        "unique_key": "{order_id}",
        "is_unique_until_start": False,
        "idempotency_key": None,
        "rate_key": "api",
        "breaker": "stripe",
    }


def test_two_tasks_cannot_have_one_name():
    registry = TaskRegistry()
    registry.add(define(charge))

    with pytest.raises(
        ConfigurationError, match=r"task 'charge' is declared twice, as .*charge and as .*lambda"
    ):
        registry.add(define(lambda: None, name="charge"))


def test_an_unknown_task_is_named_with_those_there_are():
    registry = TaskRegistry()
    registry.add(define(charge))

    with pytest.raises(UnknownTask, match=r"no task 'chrage'; did you mean 'charge'\?"):
        registry["chrage"]
    assert registry.get("chrage") is None
    assert registry["charge"] is next(iter(registry))
