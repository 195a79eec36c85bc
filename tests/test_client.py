import asyncio
import contextlib
import threading
from datetime import UTC, datetime, timedelta, timezone

import psycopg
import pytest
from psycopg.rows import dict_row

from pgqueue.client import AsyncClient, Client, result_of
from pgqueue.errors import (
    ArgumentsTooLarge,
    DatabaseUnreachable,
    DuplicateJob,
    InvalidJob,
    JobCancelled,
    JobDead,
    JobNotFound,
    ResultNotReady,
    ResultUnavailable,
    SchemaMismatch,
    SchemaMissing,
)
from pgqueue.model.job import MAX_ARGS_BYTES, JobState, NewJob
from pgqueue.model.task import define
from pgqueue.sql.results import Standing
from tests.support import wait_until

COMPLETE = {
    "queue": "default",
    "priority": 0,
    "max_attempts": 5,
    "timeout_seconds": 300.0,
    "concurrency_limit": 1,
}


def new_job(args="{}", **options):
    return NewJob(task="demo", args=args, **{**COMPLETE, **options})


class Sync:
    """A client and connections of one kind, so that a promise is tested on both."""

    def __init__(self, dsn, **options):
        self.dsn = dsn
        self.client = Client(dsn, **options)

    def do(self, answer):
        return answer

    def connect(self, **options):
        return psycopg.connect(self.dsn, **options)

    def close(self):
        self.client.close()


class Async:
    """The async twin, in an event loop of its own."""

    def __init__(self, dsn, **options):
        self.dsn = dsn
        self.runner = asyncio.Runner()
        self.client = AsyncClient(dsn, **options)

    def do(self, answer):
        return self.runner.run(self._awaited(answer))

    async def _awaited(self, answer):
        return await answer

    def connect(self, **options):
        return self.do(psycopg.AsyncConnection.connect(self.dsn, **options))

    def close(self):
        self.do(self.client.aclose())
        self.runner.close()


@pytest.fixture(params=[Sync, Async])
def make_side(request):
    with contextlib.ExitStack() as stack:

        def make(dsn, **options):
            side = request.param(dsn, **options)
            stack.callback(side.close)
            return side

        yield make


@pytest.fixture
def side(make_side, fast_dsn):
    return make_side(fast_dsn)


@pytest.fixture
def db(connect, fast_dsn):
    return connect(fast_dsn)


def count(db):
    return db.execute("SELECT count(*) FROM pgqueue.jobs").fetchone()[0]


# One job.


def test_a_job_is_committed_when_enqueue_returns(side, db):
    at = datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=9)))
    job = new_job(
        '{"a": 1}',
        queue="mail",
        priority=3,
        max_attempts=2,
        timeout_seconds=0.0,
        run_at=at,
        concurrency_key="c",
        concurrency_limit=4,
        idempotency_key="i",
        headers={"trace": "é"},
    )

    enqueued = side.do(side.client.enqueue(job))

    assert enqueued.outcome == "inserted"
    assert db.execute(
        """SELECT id, task, args, queue, priority, max_attempts, timeout_seconds, run_at, concurrency_key,
                  concurrency_limit, idempotency_key, headers, state FROM pgqueue.jobs"""
    ).fetchone() == (
        *(enqueued.job_id, "demo", {"a": 1}, "mail", 3, 2, 0, at, "c", 4, "i", {"trace": "é"}, "scheduled"),
    )


def test_a_delay_counts_from_the_databases_now(side, db):
    side.do(side.client.enqueue(new_job(delay_seconds=60)))

    assert db.execute(
        """SELECT run_at - created_at = interval '1 minute', created_at <= clock_timestamp(), state
           FROM pgqueue.jobs"""
    ).fetchone() == (True, True, "scheduled")


def test_a_delay_of_zero_is_at_once(side, db):
    side.do(side.client.enqueue(new_job(delay_seconds=0)))

    assert db.execute("SELECT state FROM pgqueue.jobs").fetchone() == ("ready",)


def test_text_that_looks_like_an_escape_comes_back_byte_for_byte(side, db):
    task = define(lambda path: None, name="demo")
    values = {"path": ["C:\\u0000\\temp", "\\\\u0000", 'quote " and \x7f \u2028 \U0001f600']}

    side.do(side.client.enqueue(task.new_job((), values)))

    stored = db.execute("SELECT args::text FROM pgqueue.jobs").fetchone()[0]
    assert task.signature.decode(stored) == values


# In the caller's transaction.


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_job_of_a_rolled_back_transaction_was_never_there(side, db, how):
    conn = side.connect()

    if how == "one":
        side.do(side.client.enqueue(new_job(), conn))
    else:
        side.do(side.client.enqueue_many([new_job()] * 3, conn))
    side.do(conn.rollback())

    assert count(db) == 0
    side.do(conn.close())


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_job_exists_when_and_only_when_the_callers_transaction_commits(side, db, how):
    conn = side.connect()
    side.do(conn.execute("CREATE TEMPORARY TABLE orders ()"))

    if how == "one":
        side.do(side.client.enqueue(new_job(), conn))
    else:
        side.do(side.client.enqueue_many([new_job()], conn))
    before, status = count(db), conn.info.transaction_status.name
    side.do(conn.commit())

    assert (before, status, count(db)) == (0, "INTRANS", 1)
    side.do(conn.close())


def test_on_an_autocommit_connection_a_job_is_there_at_once(side, db):
    conn = side.connect(autocommit=True, row_factory=dict_row)

    side.do(side.client.enqueue(new_job(), conn))
    side.do(side.client.enqueue_many([new_job()], conn))

    assert (count(db), conn.info.transaction_status.name) == (2, "IDLE")
    side.do(conn.close())


def test_bulk_that_is_refused_leaves_the_callers_transaction_usable(side, db):
    conn = side.connect()
    side.do(side.client.enqueue(new_job(), conn))

    with pytest.raises(InvalidJob, match="concurrency_limit 1 to 10,000"):
        side.do(side.client.enqueue_many([new_job(), new_job(concurrency_limit=0)], conn))
    side.do(conn.commit())

    assert count(db) == 1
    side.do(conn.close())


def test_bulk_on_an_autocommit_connection_is_all_or_nothing(side, db):
    conn = side.connect(autocommit=True)
    jobs = [*[new_job()] * 1500, new_job(priority=-1)]

    with pytest.raises(InvalidJob):
        side.do(side.client.enqueue_many(jobs, conn))

    assert (count(db), conn.info.transaction_status.name) == (0, "IDLE")
    side.do(conn.close())


@pytest.mark.parametrize("how", ["enqueue", "enqueue_many"])
def test_a_connection_of_another_kind_is_refused_with_what_to_pass(side, fast_dsn, how):
    other = Async(fast_dsn) if isinstance(side, Sync) else Sync(fast_dsn)
    conn = other.connect()
    jobs = new_job() if how == "enqueue" else [new_job()]

    with pytest.raises(TypeError, match="the sync methods take a Connection"):
        side.do(getattr(side.client, how)(jobs, conn))
    with pytest.raises(TypeError, match=r"not a builtins.str; with SQLAlchemy on psycopg, pass"):
        side.do(getattr(side.client, how)(jobs, "postgresql://"))

    other.do(conn.close())
    other.close()


# Many jobs.


def test_a_hundred_thousand_jobs_come_from_a_generator_in_one_transaction(side, db):
    made = []

    def jobs():
        for number in range(100_000):
            made.append(number)
            yield new_job(f'{{"n": {number}}}')

    enqueued = side.do(side.client.enqueue_many(jobs()))

    assert len(made) == len(enqueued) == count(db) == 100_000
    assert {one.outcome for one in enqueued} == {"inserted"}
    assert db.execute("SELECT count(DISTINCT xmin::text) FROM pgqueue.jobs").fetchone() == (1,)
    assert db.execute("SELECT array_agg(id ORDER BY (args->'n')::int) FROM pgqueue.jobs").fetchone()[0] == [
        one.job_id for one in enqueued
    ]


def test_a_generator_that_fails_midway_enqueues_nothing_and_the_place_is_named(side, db):
    def jobs():
        for number in range(3000):
            if number == 2500:
                raise InvalidJob("no good")
            yield new_job()

    with pytest.raises(InvalidJob, match="no good") as caught:
        side.do(side.client.enqueue_many(jobs()))

    assert count(db) == 0
    assert caught.value.__notes__ == ["at job 2,500 of enqueue_many, counted from 0; none was enqueued"]


def test_an_error_of_the_callers_own_in_a_generator_comes_out_as_it_is(side, db):
    def jobs():
        yield from [new_job()] * 1500
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        side.do(side.client.enqueue_many(jobs()))

    assert count(db) == 0
    assert side.do(side.client.enqueue_many([new_job()]))[0].outcome == "inserted"


def test_what_is_no_job_is_refused_before_anything_is_sent(side, db):
    with pytest.raises(TypeError, match=r"enqueue_many takes jobs as task\.job"):
        side.do(side.client.enqueue_many([new_job(), {"task": "demo"}]))

    assert count(db) == 0


def test_no_jobs_are_no_work_and_no_connection(make_side):
    side = make_side("host=127.0.0.1 port=1")

    assert side.do(side.client.enqueue_many(iter(()))) == []


def test_jobs_with_large_arguments_go_in_smaller_batches(side, db):
    text = "x" * (MAX_ARGS_BYTES - len('{"text": ""}'))

    enqueued = side.do(side.client.enqueue_many(new_job(f'{{"text": "{text}"}}') for _ in range(12)))

    assert len(enqueued) == count(db) == 12


def test_jobs_of_several_shapes_may_go_together(side, db):
    jobs = [
        new_job(unique_key="a"),
        NewJob(task="elsewhere"),
        new_job(unique_key="a"),
        new_job(delay_seconds=60, headers={"h": 1}),
        new_job('{"n": 2}', unique_key="a", on_conflict="replace"),
    ]

    enqueued = side.do(side.client.enqueue_many(jobs))

    assert [one.outcome for one in enqueued] == ["inserted", "inserted", "skipped", "inserted", "replaced"]
    assert enqueued[0].job_id == enqueued[2].job_id == enqueued[4].job_id
    assert db.execute("SELECT args FROM pgqueue.jobs WHERE unique_key = 'a'").fetchone() == ({"n": 2},)


# Refusals of the database, by their names.


def test_arguments_of_one_mebibyte_work_and_one_byte_more_is_refused_with_size_and_cap(side, db):
    text = "x" * (MAX_ARGS_BYTES - len('{"text": ""}'))

    side.do(side.client.enqueue(new_job(f'{{"text": "{text}"}}')))
    with pytest.raises(ArgumentsTooLarge) as caught:
        side.do(side.client.enqueue(new_job(f'{{"text": "{text}x"}}')))

    assert (caught.value.task, caught.value.size_bytes, caught.value.max_bytes) == (
        "demo",
        1_048_577,
        1_048_576,
    )
    assert isinstance(caught.value.__cause__, psycopg.errors.CheckViolation)
    assert db.execute("SELECT octet_length(args::text) FROM pgqueue.jobs").fetchall() == [(1_048_576,)]


@pytest.mark.parametrize("how", ["one", "many"])
@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (new_job(queue="q" * 101), "a queue has 1 to 100 bytes"),
        (new_job(queue=""), "a queue has 1 to 100 bytes"),
        (new_job(unique_key="k" * 256), "a task's name 1 to 250, each key 1 to 255"),
        (new_job(max_attempts=0), "max_attempts 1 to 100,000"),
        (new_job(priority=-1), "priority is at least 0"),
        (new_job(priority=40_000), "out of range"),
        (new_job(timeout_seconds=1e9), "timeout_seconds 0 to 604,800"),
        (new_job(run_at=datetime(1990, 1, 1, tzinfo=UTC)), "between the years 2000 and 3000"),
        (new_job(delay_seconds=1e12), "between the years 2000 and 3000"),
        (new_job("[1]"), "args and headers are JSON objects"),
        (new_job('{"a": "\\u0000"}'), "unsupported Unicode escape"),
        (new_job('{"a": "\\ud800"}'), "invalid input syntax for type json"),
        (new_job('{"a": NaN}'), "invalid input syntax for type json"),
        (new_job('{"a": "\0"}'), "(?i)NUL|invalid input syntax"),
        (new_job(headers={"a": "x" * 70_000}), "more than the 65,536 bytes"),
        (new_job('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"), "stack depth limit exceeded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_the_database_refuses_is_an_invalid_job_too(side, db, job, reason, how):
    with pytest.raises(InvalidJob, match=reason) as caught:
        side.do(side.client.enqueue(job) if how == "one" else side.client.enqueue_many([new_job(), job]))

    assert isinstance(caught.value.__cause__, psycopg.Error)
    assert count(db) == 0
    assert side.do(side.client.enqueue(new_job())).outcome == "inserted"


def test_a_key_that_the_database_cannot_make_is_refused_with_its_words(side, db):
    db.execute('SELECT pgqueue.register_tasks(\'[{"name": "elsewhere", "unique_key": "{id}"}]\')')

    with pytest.raises(InvalidJob, match="unique_key of task elsewhere needs the argument id"):
        side.do(side.client.enqueue(NewJob(task="elsewhere")))


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_rejected_duplicate_names_the_job_that_holds_the_key(side, db, how):
    first = side.do(side.client.enqueue(new_job(unique_key="u (1)=")))
    double = new_job(unique_key="u (1)=", on_conflict="reject")

    with pytest.raises(DuplicateJob, match=r"already holds the unique key 'u \(1\)='") as caught:
        side.do(
            side.client.enqueue(double) if how == "one" else side.client.enqueue_many([new_job(), double])
        )

    assert (caught.value.unique_key, caught.value.job_id) == ("u (1)=", first.job_id)
    assert count(db) == 1


def test_a_rejected_duplicate_in_the_callers_transaction_has_its_name_too(side):
    conn = side.connect()
    side.do(side.client.enqueue(new_job(unique_key="u"), conn))

    with pytest.raises(DuplicateJob, match="a live job already holds the unique key 'u'"):
        side.do(side.client.enqueue(new_job(unique_key="u", on_conflict="reject"), conn))

    side.do(conn.close())


def test_the_outcome_says_whether_a_live_job_stands_for_the_request(side, db):
    first = side.do(side.client.enqueue(new_job(unique_key="u")))

    skipped = side.do(side.client.enqueue(new_job('{"n": 1}', unique_key="u")))
    replaced = side.do(side.client.enqueue(new_job('{"n": 2}', unique_key="u", on_conflict="replace")))

    assert (first.outcome, skipped, replaced) == (
        "inserted",
        (first.job_id, "skipped"),
        (first.job_id, "replaced"),
    )
    assert db.execute("SELECT args FROM pgqueue.jobs").fetchall() == [({"n": 2},)]


def test_a_key_that_only_the_database_knows_gives_its_outcome_too(side, db):
    db.execute('SELECT pgqueue.register_tasks(\'[{"name": "elsewhere", "unique_key": "{id}"}]\')')
    job = NewJob(task="elsewhere", args='{"id": 7}')

    first, second = side.do(side.client.enqueue(job)), side.do(side.client.enqueue(job))

    assert (first.outcome, second) == ("inserted", (first.job_id, "skipped"))


@pytest.mark.parametrize("how", ["one", "many", "look"])
def test_a_database_without_the_schema_says_what_to_run(make_side, empty_dsn, how):
    side = make_side(empty_dsn, schema="other")
    calls = {
        "one": lambda: side.client.enqueue(new_job()),
        "many": lambda: side.client.enqueue_many([new_job()]),
        "look": lambda: side.client.look_up(1),
    }

    with pytest.raises(SchemaMissing, match="no schema 'other'; run: pgqueue migrate --schema other"):
        side.do(calls[how]())


def test_a_schema_of_another_version_is_not_taken_for_a_missing_one(make_side, empty_dsn, connect):
    connect(empty_dsn).execute("CREATE SCHEMA other")
    side = make_side(empty_dsn, schema="other")

    with pytest.raises(
        SchemaMismatch, match="schema 'other' is not the one this pgqueue works with"
    ) as caught:
        side.do(side.client.enqueue(new_job()))

    assert not isinstance(caught.value, SchemaMissing)


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_table_of_another_version_is_said_to_be_one(make_side, dsn_of_another_version, how):
    side = make_side(dsn_of_another_version)
    job = new_job(is_complete=True)
    calls = {"one": lambda: side.client.enqueue(job), "many": lambda: side.client.enqueue_many([job])}

    with pytest.raises(SchemaMismatch, match=r"not the one this pgqueue works with.*run: pgqueue migrate"):
        side.do(calls[how]())


@pytest.fixture
def dsn_of_another_version(empty_dsn, connect):
    connect(empty_dsn).execute(
        "CREATE SCHEMA pgqueue; CREATE TABLE pgqueue.jobs (id bigint, task text); "
        "CREATE VIEW pgqueue.new_jobs AS SELECT id, task FROM pgqueue.jobs"
    )
    return empty_dsn


def test_errors_without_a_name_here_come_as_the_driver_raised_them(side):
    conn = side.connect(options="-c default_transaction_read_only=on")

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        side.do(side.client.enqueue(new_job(), conn))

    side.do(conn.close())


# Connections.


def test_a_server_that_is_not_there_is_said_without_the_password(make_side):
    side = make_side("postgresql://app:secret@127.0.0.1:1/shop")

    with pytest.raises(DatabaseUnreachable, match=r"127\.0\.0\.1:1/shop") as caught:
        side.do(side.client.enqueue(new_job()))

    assert "secret" not in str(caught.value)


def end_connections(db):
    db.execute(
        """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
           WHERE datname = current_database() AND application_name = 'pgqueue'"""
    )


def test_pooled_connections_that_died_meanwhile_are_replaced_before_anything_is_sent(side, db):
    side.do(side.client.enqueue(new_job()))

    for expected in (2, 3):
        end_connections(db)
        side.do(side.client.enqueue(new_job()))
        assert count(db) == expected


def test_an_enqueue_whose_answer_got_lost_is_not_repeated(side, db):
    db.execute(
        """CREATE SEQUENCE IF NOT EXISTS tries;
           CREATE OR REPLACE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN PERFORM nextval('public.tries'), pg_sleep(60); RETURN NEW; END $$;
           CREATE TRIGGER dawdle BEFORE INSERT ON pgqueue.jobs
               FOR EACH ROW EXECUTE FUNCTION public.dawdle()"""
    )
    ender = threading.Thread(
        target=lambda: wait_until(
            lambda: db.execute(
                """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event = 'PgSleep'"""
            ).fetchone()
        )
    )
    ender.start()

    with pytest.raises(psycopg.OperationalError) as caught:
        side.do(side.client.enqueue(new_job()))

    ender.join()
    tries = db.execute("SELECT last_value FROM public.tries").fetchone()[0]
    db.execute(
        "DROP TRIGGER dawdle ON pgqueue.jobs; DROP FUNCTION public.dawdle(); DROP SEQUENCE public.tries"
    )
    assert tries == 1
    assert "the job may have been enqueued, or not" in caught.value.__notes__[0]


def test_a_client_works_again_after_it_was_closed(make_side, fast_dsn, db):
    side = make_side(fast_dsn)
    side.do(side.client.enqueue(new_job()))

    side.do(side.client.close() if isinstance(side, Sync) else side.client.aclose())
    side.do(side.client.enqueue(new_job()))

    assert count(db) == 2


# Looking at jobs.


CLAIM = "SELECT job_id, token FROM pgqueue.claim('default', gen_random_uuid(), 1)"


def test_a_job_can_be_followed_through_its_states(side, db):
    job_id = side.do(side.client.enqueue(new_job(delay_seconds=60))).job_id

    states = [side.do(side.client.look_up(job_id)).state]
    db.execute("UPDATE pgqueue.jobs SET run_at = clock_timestamp(), state = 'ready'")
    states.append(side.do(side.client.look_up(job_id)).state)
    claimed = db.execute(CLAIM).fetchone()
    states.append(side.do(side.client.look_up(job_id)).state)
    db.execute("SELECT pgqueue.complete(ARRAY[%s], ARRAY[%s], ARRAY['[1]'::jsonb])", claimed)
    end = side.do(side.client.look_up(job_id))

    assert states == [JobState.SCHEDULED, JobState.READY, JobState.RUNNING]
    assert end == Standing(JobState.SUCCEEDED, "demo", None, "[1]")


def test_dead_and_cancelled_jobs_say_why(side, db):
    dead = side.do(side.client.enqueue(new_job(max_attempts=1))).job_id
    claimed = db.execute(CLAIM).fetchone()
    db.execute("SELECT pgqueue.fail(%s, %s, 'ValueError: no')", claimed)
    cancelled = side.do(side.client.enqueue(new_job())).job_id
    db.execute("SELECT pgqueue.cancel(ARRAY[%s], 'not needed')", [cancelled])

    looks = [side.do(side.client.look_up(job_id)) for job_id in (dead, cancelled)]

    assert [(look.state.value, look.reason) for look in looks] == [
        ("dead", "ValueError: no"),
        ("cancelled", "not needed"),
    ]


def test_a_job_that_never_was_is_not_found(side):
    with pytest.raises(JobNotFound, match="no job 404"):
        side.do(side.client.look_up(404))


def test_waiting_ends_when_the_job_does(side, db):
    job_id = side.do(side.client.enqueue(new_job())).job_id
    claimed = db.execute(CLAIM).fetchone()
    worker = threading.Timer(
        0.2, db.execute, ["SELECT pgqueue.complete(ARRAY[%s], ARRAY[%s], ARRAY['7'::jsonb])", claimed]
    )
    worker.start()

    standing = side.do(side.client.wait(job_id, 20))

    worker.join()
    assert (standing.state, standing.result) == (JobState.SUCCEEDED, "7")


@pytest.mark.parametrize("patience", [0, 0.05])
def test_waiting_ends_with_the_callers_patience_and_says_where_the_job_stands(side, patience):
    job_id = side.do(side.client.enqueue(new_job())).job_id

    with pytest.raises(ResultNotReady, match=f"job {job_id} is still ready after {patience} s") as caught:
        side.do(side.client.wait(job_id, patience))

    assert (caught.value.state, caught.value.timeout_seconds) == ("ready", patience)


@pytest.mark.parametrize("patience", [-1, float("nan")])
def test_a_patience_that_makes_no_sense_is_refused(side, patience):
    with pytest.raises(ValueError, match="timeout_seconds must be at least 0, or None"):
        side.do(side.client.wait(1, patience))


def test_looking_survives_a_connection_that_breaks(side, db):
    job_id = side.do(side.client.enqueue(new_job())).job_id

    end_connections(db)

    assert side.do(side.client.look_up(job_id)).state is JobState.READY


def test_looking_is_repeated_when_the_connection_breaks_under_it(side, db, connect, fast_dsn):
    job_id = side.do(side.client.enqueue(new_job())).job_id
    blocker = connect(fast_dsn, autocommit=False)
    blocker.execute("LOCK TABLE pgqueue.jobs IN ACCESS EXCLUSIVE MODE")

    def break_it():
        wait_until(
            lambda: db.execute(
                """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event_type = 'Lock'"""
            ).fetchone()
        )
        blocker.rollback()

    breaker = threading.Thread(target=break_it)
    breaker.start()

    state = side.do(side.client.look_up(job_id)).state

    breaker.join()
    assert state is JobState.READY


def demo_task(returns, **options):
    def handler(): ...

    handler.__annotations__ = {"return": returns}
    return define(handler, name="demo", **options)


def standing(state="succeeded", reason=None, result=None):
    return Standing(JobState(state), "demo", reason, result)


@pytest.mark.parametrize(
    ("stands", "task", "result"),
    [
        (standing(result="[1, 2]"), None, [1, 2]),
        (standing(result="[1, 2]"), demo_task(tuple[int, int]), (1, 2)),
        (standing(result="null"), None, None),
        (standing(), None, None),
        (standing(), demo_task(None), None),
    ],
)
def test_a_result_comes_by_its_tasks_return_annotation(stands, task, result):
    assert result_of(7, stands, task) == result


@pytest.mark.parametrize(
    ("stands", "task", "error", "reason"),
    [
        (standing("dead", "boom"), None, JobDead, "job 7 is dead: boom"),
        (standing("cancelled", "not needed"), None, JobCancelled, "job 7 was cancelled: not needed"),
        (standing("cancelled"), None, JobCancelled, "job 7 was cancelled"),
        (standing(reason="result: nan is not JSON"), None, ResultUnavailable, "not kept: result: nan"),
        (
            standing(),
            demo_task(int, store_result=False),
            ResultUnavailable,
            "declared with store_result=False",
        ),
        (standing(result='"x"'), demo_task(int), ResultUnavailable, "result: expected an int, got 'x'"),
    ],
)
def test_a_job_without_a_result_says_why(stands, task, error, reason):
    with pytest.raises(error, match=reason):
        result_of(7, stands, task)
