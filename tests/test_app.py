import asyncio
import json
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta

import psycopg
import pytest

import pgqueue
from pgqueue import App, JobContext
from pgqueue.errors import (
    ConfigurationError,
    DatabaseUnreachable,
    InvalidArguments,
    InvalidJob,
    JobNotFound,
    ResultNotReady,
)
from pgqueue.migrate import upgrade
from pgqueue.model.job import JobState


@pytest.fixture
def app(fast_dsn):
    with App(fast_dsn) as app:
        yield app


@pytest.fixture
def db(connect, fast_dsn):
    return connect(fast_dsn)


def jobs(db):
    return db.execute("SELECT task, args FROM pgqueue.jobs ORDER BY id").fetchall()


# Declaring.


def test_a_task_can_still_be_called(app):
    @app.task
    def add(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    @app.task(queue="later")
    async def double(number: int) -> int:
        return number * 2

    assert (add(1), add(1, b=5), asyncio.run(double(4))) == (3, 6, 8)
    assert (add.__name__, add.__doc__, add.name, add.definition.queue) == ("add", "Add.", "add", "default")
    assert double.definition.queue == "later"


def test_two_tasks_cannot_have_one_name(app):
    @app.task
    def send(): ...

    with pytest.raises(ConfigurationError, match="task 'send' is declared twice"):

        @app.task(name="send")
        def other(): ...


def test_a_mistake_in_a_declaration_is_found_where_it_stands(app):
    with pytest.raises(
        ConfigurationError, match=r"unique_key: '\{user\}' names 'user', which is no argument"
    ):

        @app.task(unique_key="{user}")
        def send(user_id): ...

    assert len(app.registry) == 0


def test_an_app_does_not_connect_before_it_is_used():
    app = App("host=127.0.0.1 port=1")

    @app.task
    def send(): ...

    assert send.job().task == "send"
    with pytest.raises(DatabaseUnreachable):
        send.enqueue()


def test_the_description_is_json_and_has_every_task(app):
    @app.task(queue="b")
    def second(at: date = date(2024, 1, 1)): ...

    @app.task(queue="a")
    def first(job: JobContext): ...

    described = json.loads(json.dumps(app.describe()))

    assert [(task["name"], task["queue"]) for task in described["tasks"]] == [("first", "a"), ("second", "b")]


# Where the queue is.


def test_the_dsn_comes_from_the_environment_when_none_is_given(monkeypatch, fast_dsn, db):
    monkeypatch.setenv("PGQUEUE_DSN", fast_dsn)

    with App() as app:
        app.enqueue("send")

    assert jobs(db) == [("send", {})]


def test_the_schema_comes_from_the_argument_then_the_environment_then_is_pgqueue(monkeypatch, dsn, connect):
    upgrade(dsn, schema="other")
    assert App(dsn).schema == "pgqueue"
    monkeypatch.setenv("PGQUEUE_SCHEMA", "other")
    assert App(dsn, schema="mine").schema == "mine"

    with App(dsn) as app:
        handle = app.enqueue("send")
        assert handle.state() is JobState.READY

    assert connect(dsn).execute("SELECT task FROM other.jobs").fetchall() == [("send",)]


@pytest.mark.parametrize("schema", ["My Schema", "a;b", "é", "x" * 49, "1a"])
def test_a_schema_that_is_no_plain_name_is_refused(schema):
    with pytest.raises(ConfigurationError, match="is not a schema's name"):
        App(schema=schema)


# Asking for jobs.


def test_a_call_becomes_a_job(app, db):
    @app.task
    def send(user_id: int, at: datetime | None = None): ...

    handles = [send.enqueue(7), send.enqueue(user_id=8, at=datetime(2024, 1, 1, tzinfo=UTC)), send.delay(9)]

    assert jobs(db) == [
        ("send", {"user_id": 7}),
        ("send", {"user_id": 8, "at": "2024-01-01T00:00:00+00:00"}),
        ("send", {"user_id": 9}),
    ]
    assert [handle.outcome for handle in handles] == ["inserted"] * 3


def test_an_async_call_becomes_a_job(app, db):
    @app.task
    async def send(user_id: int) -> str: ...

    async def main():
        async with app:
            handle = await send.aenqueue(7)
            later = await send.using(delay_seconds=60).aenqueue(8)
            many = await app.aenqueue_many(send.job(number) for number in range(3))
            by_name = await app.aenqueue("send", {"user_id": 9}, priority=4)
            states = [await one.astate() for one in (handle, later, by_name)]
            with pytest.raises(ResultNotReady):
                await handle.aresult(0)
            return states, [one.outcome for one in many]

    assert asyncio.run(main()) == ([JobState.READY, JobState.SCHEDULED, JobState.READY], ["inserted"] * 3)
    assert len(jobs(db)) == 6


def test_what_is_said_about_one_job_does_not_stick_to_its_task(app, db):
    @app.task(queue="mail", priority=5)
    def send(user_id: int): ...

    urgent = send.using(priority=0, headers={"trace": "t"})
    urgent.using(delay_seconds=60, timeout_seconds=None).enqueue(1)
    urgent.enqueue(2)
    send.enqueue(3)

    assert db.execute(
        "SELECT priority, queue, state, timeout_seconds, headers FROM pgqueue.jobs ORDER BY id"
    ).fetchall() == [
        (0, "mail", "scheduled", 0.0, {"trace": "t"}),
        (0, "mail", "ready", 300.0, {"trace": "t"}),
        (5, "mail", "ready", 300.0, None),
    ]


def test_a_job_in_the_callers_transaction_exists_when_and_only_when_that_commits(app, db, fast_dsn):
    @app.task
    def send(user_id: int): ...

    with psycopg.connect(fast_dsn) as conn:
        send.using(conn=conn).enqueue(1)
        app.enqueue("send", {"user_id": 2}, conn=conn)
        app.enqueue_many([send.job(3)], conn=conn)
        conn.rollback()
        send.using(conn=conn).using(priority=1).enqueue(4)
        before = jobs(db)

    assert before == []
    assert jobs(db) == [("send", {"user_id": 4})]


def test_an_async_job_in_a_rolled_back_transaction_was_never_there(app, db, fast_dsn):
    @app.task
    async def send(user_id: int): ...

    async def main():
        async with await psycopg.AsyncConnection.connect(fast_dsn) as conn:
            await send.using(conn=conn).aenqueue(1)
            await app.aenqueue("send", {"user_id": 2}, conn=conn)
            await app.aenqueue_many([send.job(3)], conn=conn)
            await conn.rollback()
            await send.using(conn=conn).aenqueue(4)

    asyncio.run(main())

    assert jobs(db) == [("send", {"user_id": 4})]


def test_a_naive_time_is_refused_because_it_names_no_instant(app, db):
    @app.task
    def send(): ...

    with pytest.raises(InvalidJob, match="has no time zone, so it names no instant"):
        send.using(run_at=datetime(2030, 1, 1) + timedelta(hours=1)).enqueue()  # noqa: DTZ001

    assert jobs(db) == []


def test_a_bad_call_is_refused_before_anything_is_sent():
    app = App("host=127.0.0.1 port=1")

    @app.task
    def send(user_id: int): ...

    with pytest.raises(InvalidArguments, match="task 'send': misses the argument 'user_id'"):
        send.enqueue()
    with pytest.raises(InvalidArguments, match="task 'send': takes no argument 'user'"):
        app.enqueue("send", {"user": 7})


def test_a_task_known_here_is_checked_and_completed_also_by_name(app, db):
    @app.task(queue="mail")
    def send(at: datetime): ...

    app.enqueue("send", {"at": "2024-01-01T00:00:00Z"}, max_attempts=1)

    assert db.execute("SELECT args, queue, max_attempts FROM pgqueue.jobs").fetchone() == (
        {"at": "2024-01-01T00:00:00+00:00"},
        "mail",
        1,
    )


def test_a_task_that_is_elsewhere_is_completed_by_its_definition_in_the_database(app, db):
    db.execute('SELECT pgqueue.register_tasks(\'[{"name": "far", "queue": "away", "priority": 9}]\')')

    app.enqueue("far", {"a": 1})
    app.enqueue("nowhere", priority=1)

    assert db.execute("SELECT task, queue, priority FROM pgqueue.jobs ORDER BY id").fetchall() == [
        ("far", "away", 9),
        ("nowhere", "default", 1),
    ]


def test_many_jobs_give_a_handle_each(app, db):
    @app.task(unique_key="{user_id}")
    def send(user_id: int): ...

    handles = app.enqueue_many(send.job(user_id) for user_id in (1, 2, 1))

    assert [handle.outcome for handle in handles] == ["inserted", "inserted", "skipped"]
    assert handles[0].job_id == handles[2].job_id
    assert len(jobs(db)) == 2


# Looking at jobs.


CLAIM = "SELECT job_id, token FROM pgqueue.claim('default', gen_random_uuid(), 1)"


def test_a_result_comes_by_the_annotation_of_the_task_also_from_an_id(app, db):
    @app.task
    def find(user_id: int) -> tuple[date, int]: ...

    handle = find.enqueue(7)
    text, _ = find.definition.signature.encode_result((date(2024, 1, 1), 3))
    claimed = db.execute(CLAIM).fetchone()
    db.execute("SELECT pgqueue.complete(ARRAY[%s], ARRAY[%s], ARRAY[%s::jsonb])", [*claimed, text])

    assert handle.result() == app.job(handle.job_id).result(0) == (date(2024, 1, 1), 3)
    assert asyncio.run(_aresult(app, handle.job_id)) == (date(2024, 1, 1), 3)
    assert app.job(handle.job_id).outcome is None


async def _aresult(app, job_id):
    async with app:
        return await app.job(job_id).aresult()


def test_a_handle_on_a_job_that_is_not_there_says_so_when_it_is_used(app):
    handle = app.job(404)

    with pytest.raises(JobNotFound):
        handle.state()
    with pytest.raises(JobNotFound):
        handle.result(0)


# The package.


def test_every_public_name_is_there():
    assert {name for name in pgqueue.__all__ if not hasattr(pgqueue, name)} == set()
    assert set(pgqueue.__all__) <= set(dir(pgqueue))
    with pytest.raises(AttributeError, match="module 'pgqueue' has no attribute 'nothing'"):
        _ = pgqueue.nothing


def test_importing_the_package_does_not_load_the_driver():
    script = "import sys, pgqueue; from pgqueue import JobContext, errors; print('psycopg' in sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert loaded == "False\n"


def test_a_worker_is_told_which_tasks_end_their_jobs_themselves():
    app = App()

    @app.task(transactional=True)
    def charge(order_id: int, tx: psycopg.Connection) -> None: ...

    @app.task
    def call(url: str) -> None: ...

    assert app.describe()["transactional"] == ["charge"]


# Schedules.


def registrations(app):
    return {entry["name"]: entry for entry in json.loads(json.dumps(app.describe()))["schedules"]}


def test_a_schedule_stands_above_or_below_its_task_or_is_given_later():
    app = App()

    @app.schedule("@hourly", args={"day": date(2026, 1, 31)})
    @app.schedule("0 8 * * *", name="morning", timezone="Asia/Jakarta", queue="q", priority=1)
    @app.task(queue="slow")
    def above(day: date = date(2026, 1, 1)) -> int:
        return day.year

    @app.task
    @app.schedule("@daily")
    async def below() -> None: ...

    assert app.schedule("*/5 * * * *", name="third", catch_up="all", catch_up_limit=7)(below) is below

    found = registrations(app)
    assert {name: (entry["cron"], entry["task"]) for name, entry in found.items()} == {
        "above": ("@hourly", "above"),
        "below": ("@daily", "below"),
        "morning": ("0 8 * * *", "above"),
        "third": ("*/5 * * * *", "below"),
    }
    assert found["above"]["args"] == '{"day": "2026-01-31"}'
    assert (found["morning"]["queue"], found["morning"]["priority"]) == ("q", 1)
    assert (found["above"]["queue"], found["above"]["priority"]) == (None, None)
    assert (found["third"]["catch_up"], found["third"]["catch_up_limit"]) == ("all", 7)
    # It is still the task that it was.
    assert above(date(2024, 1, 1)) == 2024
    assert above.job().queue == "slow"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"cron": "0 0 30 2 *"}, "never comes"),
        ({"timezone": "Berlin"}, "did you mean 'Europe/Berlin'"),
        ({"args": {"user": 1}}, "schedule 'send': task 'send': takes no argument 'user'"),
        ({"args": {"user_id": "x"}}, "schedule 'send': task 'send': args.user_id"),
        ({}, "misses the argument 'user_id'"),
        ({"args": {"user_id": 1}, "priority": -1}, "priority must be"),
        ({"args": {"user_id": 1}, "catch_up": "none"}, "catch_up must be one of"),
    ],
)
def test_a_mistake_in_a_schedule_is_found_where_it_stands(said, message):
    app = App()

    @app.task
    def send(user_id: int): ...

    with pytest.raises(ConfigurationError, match=message):
        app.schedule(said.pop("cron", "@daily"), **said)(send)

    assert len(app.schedules) == 0


def test_two_schedules_of_a_task_need_two_names():
    app = App()

    with pytest.raises(ConfigurationError, match=r"schedule 'send' is declared twice, .* name=\.\.\."):

        @app.schedule("@daily")
        @app.schedule("@hourly")
        @app.task
        def send(): ...


def test_a_schedule_of_what_is_no_task_of_this_app_is_refused():
    app = App()

    @App().task
    def elsewhere(): ...

    @app.task
    def send(): ...

    for other in (elsewhere, send.using(priority=3)):
        with pytest.raises(ConfigurationError, match="takes a task of this App as it was declared"):
            app.schedule("@daily")(other)


def test_a_schedule_of_a_function_that_never_becomes_a_task_is_found_when_a_worker_starts():
    app = App()

    @app.schedule("@daily")
    def forgotten(): ...

    with pytest.raises(ConfigurationError, match=r"'.*forgotten', which is no task; put @app.task\(\)"):
        app.describe()


# Circuit breakers.


def test_a_breaker_is_a_name_that_tasks_take_and_its_settings_are_described():
    app = App()
    payments = app.breaker("payments-api", min_calls=5)

    @app.task(breaker=payments)
    def charge(): ...

    described = json.loads(json.dumps(app.describe()))

    assert described["tasks"][0]["breaker"] == "payments-api"
    (declared,) = described["breakers"]
    assert (declared["name"], declared["min_calls"], declared["open_seconds"]) == ("payments-api", 5, 30.0)


def test_a_breaker_that_makes_no_sense_or_is_there_already_is_refused():
    app = App()
    app.breaker("mail")

    with pytest.raises(ConfigurationError, match="breaker 'mail' is declared twice"):
        app.breaker("mail", min_calls=3)
    with pytest.raises(ConfigurationError, match="breaker 'pay': min_calls must be a whole number"):
        app.breaker("pay", min_calls=0)


# Rate limits.


def test_rate_limits_are_described_with_the_tasks_that_have_none():
    app = App()
    app.rate_limit("queue:mail", "600/min", burst=20)

    @app.task(rate_limit="5/s")
    def slow(): ...

    @app.task(rate_key="api:{customer}", rate_limit="2/s")
    def call(customer: int): ...

    described = json.loads(json.dumps(app.describe()))

    assert described["rate_limits"] == [
        {"name": "api:*", "tokens_per_second": 2, "burst": 1},
        {"name": "queue:mail", "tokens_per_second": 10, "burst": 20},
        {"name": "task:slow", "tokens_per_second": 5, "burst": 1},
        {"name": "task:call", "tokens_per_second": None, "burst": None},
    ]


def test_a_rate_limit_that_makes_no_sense_or_is_there_already_is_refused():
    app = App()
    app.rate_limit("queue:mail", "5/s")

    with pytest.raises(ConfigurationError, match="rate limit 'queue:mail' is declared twice"):
        app.rate_limit("queue:mail", "6/s")
    with pytest.raises(ConfigurationError, match="rate limit 'queue:web': a rate is a number of starts"):
        app.rate_limit("queue:web", "fast")
