import contextlib
import json
from datetime import UTC, datetime

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqueue import database
from pgqueue.errors import ArgumentsTooLarge, DuplicateJob, InvalidJob, SchemaMissing
from pgqueue.model.encoding import dumps, plain
from pgqueue.model.job import NewJob
from pgqueue.model.keys import KeyTemplate
from pgqueue.model.task import define
from pgqueue.sql.enqueue import BATCH_CHARACTERS, BATCH_JOBS, enqueue, enqueue_many, find_holder
from pgqueue.sql.refusals import refusal

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
# Floats are left out: PostgreSQL writes 1e16 with all its zeros.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
per_database = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def db(connect, fast_dsn):
    return connect(fast_dsn)


def complete(**options):
    said = {"queue": "q", "priority": 0, "max_attempts": 5, "timeout_seconds": 300.0, "concurrency_limit": 1}
    return NewJob(task="demo", **{**said, **options})


# Batches.


@pytest.mark.parametrize(
    ("jobs", "sizes"), [(0, []), (1, [1]), (1000, [1000]), (1001, [1000, 1]), (2500, [1000, 1000, 500])]
)
def test_a_batch_has_at_most_a_thousand_jobs(jobs, sizes):
    statements = enqueue_many(complete() for _ in range(jobs))

    assert [len(json.loads(statement.params["jobs"])) for statement in statements] == sizes


def test_a_batch_ends_earlier_when_its_jobs_are_large():
    large = complete(args=json.dumps({"text": "x" * (BATCH_CHARACTERS // 3)}))

    sizes = [len(json.loads(statement.params["jobs"])) for statement in enqueue_many([large] * 5)]

    assert sizes == [2, 2, 1]


def test_a_generator_is_read_only_as_far_as_the_next_batch_needs():
    read = []

    def jobs():
        for number in range(10_000):
            read.append(number)
            yield complete()

    next(enqueue_many(jobs()))

    assert len(read) == BATCH_JOBS + 1


def test_a_job_in_a_batch_says_what_it_says_alone(db):
    job = complete(
        args='{"é": ["\\"", {}]}',
        run_at=datetime(2030, 1, 1, tzinfo=UTC),
        concurrency_key='"k"',
        unique_key="u\\",
        idempotency_key="i",
        headers={"h": "é"},
    )
    columns = """task, args, queue, run_at, priority, max_attempts, timeout_seconds, concurrency_key,
                 concurrency_limit, idempotency_key, headers, state"""

    database.run(
        db, enqueue(complete(**{name: getattr(job, name) for name in NAMES if name != "unique_key"}))
    )
    database.run(db, next(enqueue_many([job])))

    alone, batched = db.execute(f"SELECT {columns} FROM pgqueue.jobs ORDER BY id").fetchall()
    assert alone == batched
    assert database.run(db, find_holder("u\\")) == 2


@pytest.mark.parametrize(
    "own", [{}, {"concurrency_key": "k", "idempotency_key": "i", "headers": {"h": "é"}}, {"priority": 7}]
)
def test_a_job_about_which_all_is_said_is_the_same_row_however_it_gets_there(db, own):
    jobs = [complete(args=f'{{"i": {number}}}', **own) for number in range(3)]
    through_functions = [database.run(db, enqueue(jobs[0])), *database.run(db, next(enqueue_many(jobs[1:])))]
    db.execute("CREATE TEMPORARY TABLE expected AS SELECT * FROM pgqueue.jobs")
    db.execute("TRUNCATE pgqueue.jobs RESTART IDENTITY")

    jobs = [job._replace(is_complete=True) for job in jobs]
    enqueued = [database.run(db, enqueue(jobs[0])), *database.run(db, next(enqueue_many(jobs[1:])))]

    assert enqueued == through_functions
    same = db.execute(
        """
        SELECT to_jsonb(made) - '{run_at,created_at}'::text[]
                = to_jsonb(expected) - '{run_at,created_at}'::text[],
            made.run_at - made.created_at < interval '1 second'
        FROM pgqueue.jobs AS made JOIN expected USING (id)
        """
    ).fetchall()
    assert same == [(True, True)] * 3


def test_a_batch_of_complete_jobs_that_differ_in_more_than_their_arguments_keeps_its_order(db):
    jobs = [complete(is_complete=True, args=f'{{"i": {i}}}', priority=i % 2) for i in range(10)]

    enqueued = database.run(db, next(enqueue_many(jobs)))

    found = db.execute("SELECT id, priority, (args -> 'i')::integer FROM pgqueue.jobs ORDER BY id").fetchall()
    assert found == [(one.job_id, i % 2, i) for i, one in enumerate(enqueued)]


def test_only_the_database_completes_the_job_of_a_task_with_a_rate_key():
    plain, limited = define(lambda i: i, name="a"), define(lambda i: i, name="b", rate_key="{i}")

    assert plain.new_job((1,)).is_complete
    assert not limited.new_job((1,)).is_complete


NAMES = ("args", "run_at", "concurrency_key", "unique_key", "idempotency_key", "headers")


def test_every_statement_stays_in_its_schema():
    statements = [
        enqueue(complete()),
        enqueue(NewJob(task="x")),
        next(enqueue_many([complete()])),
        find_holder("k"),
    ]

    for statement in statements:
        text = statement.in_schema("other").decode()
        assert "other." in text
        assert "pgqueue" not in text
        assert "{{" not in text


# The same on both sides of the door.


@per_database
@given(value=JSON)
def test_the_size_counted_at_the_door_is_the_size_the_database_counts(db, value):
    text = dumps(plain({"value": value}))

    counted, same = db.execute(
        "SELECT octet_length(%(text)s::jsonb::text), %(text)s::jsonb::text::jsonb = %(text)s::jsonb",
        {"text": text},
    ).fetchone()

    assert (len(text.encode()), True) == (counted, same)


@per_database
@given(
    template=st.sampled_from(["{a}", "x:{a}:{b}", "{b}{a}{b}", "é{a}"]),
    a=TEXT.filter(lambda text: 0 < len(text.encode()) < 60) | st.integers(-(10**20), 10**20) | st.booleans(),
    b=st.integers() | st.none(),
)
def test_a_key_made_in_python_is_the_key_the_database_makes(db, template, a, b):
    def handler(a, b="default"): ...

    task = define(handler, unique_key=template)
    given_args = {"a": a} if b is None else {"a": a, "b": b}

    job = task.new_job((), given_args)

    made = db.execute(
        "SELECT pgqueue.fill_key(%s, %s::jsonb, %s::jsonb, 'handler', 'unique_key')",
        [template, job.args, json.dumps(task.signature.schema())],
    ).fetchone()[0]
    assert job.unique_key == made


@pytest.mark.parametrize("value", [None, 1.5, 1e16, [1], {"a": 1}])
def test_what_python_puts_into_no_key_the_database_does_not_either(db, value):
    template = KeyTemplate("{a}")
    with pytest.raises(ValueError, match="needs a string, an integer or a boolean"):
        template.render({"a": value}, {})

    made = None
    with contextlib.suppress(psycopg.errors.InvalidParameterValue):
        made = db.execute(
            "SELECT pgqueue.fill_key('{a}', %s::jsonb, '{}', 't', 'unique_key')", [dumps({"a": value})]
        ).fetchone()[0]

    # jsonb keeps no difference between 1e16 and the integer.
    assert made == ("10000000000000000" if value == 1e16 else None)


def test_a_registered_definition_gives_a_plain_insert_what_a_python_call_has(db):
    def charge(order_id: int, tenant: str = "acme"): ...

    task = define(
        charge,
        queue="money",
        priority=2,
        max_attempts=9,
        timeout_seconds=None,
        concurrency_key="c:{tenant}",
        concurrency_limit=3,
        unique_key="u:{tenant}:{order_id}",
        idempotency_key="charge:{order_id}",
    )
    db.execute("SELECT pgqueue.register_tasks(%s)", [json.dumps([task.registration()])])
    columns = """queue, priority, max_attempts, timeout_seconds, concurrency_key, concurrency_limit,
                 unique_key, idempotency_key, state"""

    db.execute("INSERT INTO pgqueue.jobs (task, args) VALUES ('charge', '{\"order_id\": 7}')")
    inserted = db.execute(f"DELETE FROM pgqueue.jobs RETURNING {columns}").fetchone()
    database.run(db, enqueue(task.new_job((7,))))
    called = db.execute(f"DELETE FROM pgqueue.jobs RETURNING {columns}").fetchone()

    assert inserted == called
    assert called == ("money", 2, 9, 0.0, "c:acme", 3, "u:acme:7", "charge:7", "ready")


# Refusals by name.


def test_a_refusal_has_its_parts():
    large = refusal(
        "23514", "jobs_args_fit", "the args of task a b are 1048577 bytes as text, …", "", schema="pgqueue"
    )
    double = refusal(
        "23505",
        "jobs_unique_key",
        "duplicate key",
        "Key (unique_key)=(a)=(b) already exists.",
        schema="pgqueue",
    )
    missing = refusal("3F000", None, 'schema "other" does not exist', "", schema="other")

    assert isinstance(large, ArgumentsTooLarge)
    assert (large.task, large.size_bytes) == ("a b", 1_048_577)
    assert isinstance(double, DuplicateJob)
    assert double.unique_key == "a)=(b"
    assert isinstance(missing, SchemaMissing)
    assert missing.schema == "other"


@pytest.mark.parametrize(
    ("sqlstate", "constraint"),
    [("40P01", None), ("57014", None), ("23505", "mine"), ("23503", None), (None, None)],
)
def test_what_is_not_ours_has_no_name_here(sqlstate, constraint):
    assert refusal(sqlstate, constraint, "message", "", schema="pgqueue") is None


def test_a_refusal_names_the_task_it_knows():
    job = complete()

    assert str(refusal("22P05", None, "no", "", schema="s", job=job)) == "task 'demo': no"
    assert isinstance(refusal("23514", "jobs_names_fit", "no", "", schema="s"), InvalidJob)
