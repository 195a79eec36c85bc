"""Behind a real PgBouncer that pools transactions: it all works, and nothing of ours stays in a session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import database
from pgqueue.errors import ConfigurationError
from pgqueue.migrate import check, upgrade
from pgqueue.sql import Statement, rows
from tests.pooler import Pooler, start_pooler
from tests.process.support import Queue, worker
from tests.process.test_metrics import port_of, scrape
from tests.security.support import ENDS
from tests.support import make_database, run_pgqueue, wait_until

POLLING = "a proxy that pools transactions: no wake-ups, polling"
# What a session keeps of whoever used it before.
TRACES = Statement(
    "SELECT current_setting('statement_timeout'), current_setting('lock_timeout'), "
    "current_setting('default_transaction_isolation'), (SELECT count(*) FROM pg_prepared_statements), "
    "(SELECT count(*) FROM pg_listening_channels())",
    {},
    rows,
)
CLEAN = ("0", "0", "read committed", 0, 0)


@pytest.fixture(scope="module")
def pooler(postgres: Any) -> Iterator[Pooler]:
    with start_pooler(postgres.dsn) as started:
        yield started


@pytest.fixture
def pooled_dsn(dsn: str, pooler: Pooler) -> str:
    return pooler.lead(dsn)


@pytest.fixture
def queue(dsn: str) -> Iterator[Queue]:
    made = Queue(dsn)
    yield made
    made.close()


def check_nothing_is_left(queue: Queue, pooled_dsn: str) -> None:
    """Look at every session that the proxy keeps for this database."""
    name = psycopg.conninfo.conninfo_to_dict(pooled_dsn)["dbname"]
    # Those of a worker that has just ended go with its sessions, a moment later.
    wait_until(
        lambda: (
            not queue.one(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        ),
        message="no advisory lock is left",
    )
    sessions = queue.one("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", name)
    holders = [psycopg.connect(pooled_dsn, prepare_threshold=None) for _ in range(sessions)]
    try:
        found = {holder.execute(TRACES.text).fetchone() for holder in holders}
    finally:
        for holder in holders:
            holder.close()
    assert found == {CLEAN}


# The door to the database.


def test_a_proxy_is_told_from_a_server(dsn, pooled_dsn, monkeypatch):
    assert database.pools_transactions(pooled_dsn)
    assert not database.pools_transactions(dsn)

    monkeypatch.setenv("PGQUEUE_POOLER", "session")
    assert not database.pools_transactions(pooled_dsn)
    monkeypatch.setenv("PGQUEUE_POOLER", "transaction")
    assert database.pools_transactions(dsn)
    monkeypatch.setenv("PGQUEUE_POOLER", "often")
    with pytest.raises(ConfigurationError, match="PGQUEUE_POOLER is 'often'"):
        database.pools_transactions(dsn)


def test_settings_hold_for_our_statements_and_for_nobody_elses(queue, pooled_dsn):
    queue.connection.execute(
        f"ALTER DATABASE {queue.connection.info.dbname} SET default_transaction_isolation = 'serializable'"
    )
    show = Statement(
        "SELECT current_setting('statement_timeout'), current_setting('transaction_isolation'), "
        "%(text)s::text",
        {"text": "it's 100% \\ 'ours'"},
        rows,
    )
    ours = database.connect(pooled_dsn, settings={"statement_timeout": "7s", "idle_session_timeout": "0"})
    other = psycopg.connect(pooled_dsn, autocommit=True, prepare_threshold=None)

    for _ in range(10):
        assert database.run(ours, show) == [("7s", "read committed", "it's 100% \\ 'ours'")]
        assert other.execute("SHOW statement_timeout").fetchone() == ("0",)
        assert other.execute("SHOW transaction_isolation").fetchone() == ("serializable",)
    with ours.transaction():
        assert ours.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
    ours.close()
    other.close()


def test_a_statement_that_fails_or_takes_too_long_leaves_the_connection_usable(pooled_dsn):
    async def on_async() -> list[Any]:
        conn = await database.aconnect(pooled_dsn, settings={"statement_timeout": "50ms"})
        try:
            with pytest.raises(psycopg.errors.QueryCanceled):
                await database.arun(conn, Statement("SELECT pg_sleep(5)", {}, rows))
            return await database.arun(conn, Statement("SELECT %(n)s::int", {"n": 1}, rows))
        finally:
            await conn.close()

    with database.connect(pooled_dsn) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            database.run(conn, Statement("SELECT 1 / %(n)s::int", {"n": 0}, rows))
        assert database.run(conn, Statement("SELECT %(n)s::int", {"n": 1}, rows)) == [(1,)]
    assert asyncio.run(on_async()) == [(1,)]


def test_clients_in_threads_and_loops_share_few_sessions(dsn, queue, pooled_dsn):
    app = pgqueue.App(dsn=pooled_dsn)

    @app.task(unique_key="one")
    def once() -> None: ...

    @app.task
    def often(number: int) -> None: ...

    async def in_a_loop() -> None:
        await asyncio.gather(*(often.aenqueue(number) for number in range(30)))

    for number in range(30):
        often.enqueue(number)
        once.enqueue()
    asyncio.run(in_a_loop())
    app.enqueue_many(often.job(number) for number in range(1000))

    assert queue.count("jobs") == 1061
    check_nothing_is_left(queue, pooled_dsn)


def test_the_schema_is_made_and_asked_for_through_the_proxy(postgres, pooler):
    with make_database(postgres.dsn) as dsn:
        applied = upgrade(pooler.lead(dsn))
        check(pooler.lead(dsn))
        listed = run_pgqueue("jobs", "list", dsn=pooler.lead(dsn))

    assert applied
    assert listed.returncode == 0, listed.stderr


# The worker.


def test_a_worker_runs_everything_by_polling_and_leaves_nothing_behind(queue, pooled_dsn, tmp_path: Path):
    queue.connection.execute("SELECT pgqueue.make_partitions(0, current_date - 30)")

    with worker(pooled_dsn, tmp_path, "--poll-seconds", "0.2", app="tests.security.jobs:app") as started:
        jobs = {task: [queue.insert(task) for _ in range(5)] for task in ENDS}
        for task, state in ENDS.items():
            for job in jobs[task]:
                queue.wait_for_state(job, state, 30)
        wait_until(lambda: queue.count("finished_jobs", "task = 'tick'"), 10, "the schedule fired")
        started.wait_for("history dropped")
        code = started.stop()

    assert code == 0
    assert len(started.lines(POLLING)) == 1
    complaints = [
        line for line in started.lines() if line["level"] == "error" and line["event"] != "job dead"
    ]
    assert complaints == []
    check_nothing_is_left(queue, pooled_dsn)


def test_with_a_way_past_the_proxy_a_worker_is_woken_at_once(queue, dsn, pooled_dsn, tmp_path: Path):
    with worker(
        pooled_dsn, tmp_path, "--poll-seconds", "60", "--listen-dsn", dsn, app="tests.security.jobs:app"
    ) as started:
        wait_until(
            lambda: queue.one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") > 0, 10, "asleep"
        )
        waited = []
        for _ in range(5):
            time.sleep(0.3)  # it goes to sleep again
            began_at = time.monotonic()
            queue.wait_for_state(queue.insert("plain"), "succeeded")
            waited.append(time.monotonic() - began_at)

    assert started.lines(POLLING) == []
    assert min(waited) < 5.0
    assert max(waited) < 20.0


def test_who_reads_the_numbers_holds_that_place_past_the_proxy(queue, dsn, pooled_dsn, tmp_path: Path):
    options = ("--listen-dsn", dsn, "--metrics-port", "0")

    with worker(pooled_dsn, tmp_path, *options, app="tests.security.jobs:app") as started:
        port = port_of(started)
        wait_until(lambda: scrape(port).get("pgqueue_workers_alive") == 1, 20, "it reads")
        code = started.stop()

    assert code == 0
    check_nothing_is_left(queue, pooled_dsn)


def test_a_way_past_the_proxy_that_leads_to_one_is_refused(pooled_dsn):
    ended = run_pgqueue(
        "worker", "--app", "tests.security.jobs:app", "--listen-dsn", pooled_dsn, dsn=pooled_dsn
    )

    assert ended.returncode == 2
    assert "--listen-dsn leads to" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_worker_outlives_a_restart_of_the_proxy(postgres, dsn, queue, tmp_path: Path):
    with (
        start_pooler(postgres.dsn) as own,
        worker(own.lead(dsn), tmp_path, "--poll-seconds", "0.2", app="tests.security.jobs:app") as started,
    ):
        queue.wait_for_state(queue.insert("plain"), "succeeded")
        own.restart()
        job = queue.insert("plain")
        queue.wait_for_state(job, "succeeded", 30)
        code = started.stop()

    assert code == 0
    assert queue.one("SELECT attempt FROM pgqueue.finished_jobs WHERE id = %s", job) == 1


# Locks of the application's.


def test_a_named_lock_needs_a_session_and_says_so(dsn, pooled_dsn, monkeypatch):
    app = pgqueue.App(dsn=pooled_dsn)

    async def take() -> None:
        await app.alock("report").acquire()

    with pytest.raises(ConfigurationError, match="PGQUEUE_LISTEN_DSN"):
        app.lock("report").acquire()
    with pytest.raises(ConfigurationError, match="PGQUEUE_LISTEN_DSN"):
        asyncio.run(take())
    with psycopg.connect(pooled_dsn, prepare_threshold=None) as conn, app.lock("report", conn=conn) as held:
        assert held.is_held
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", dsn)
    with app.lock("report"), pytest.raises(pgqueue.LockBusy):
        app.lock("report", wait_seconds=0).__enter__()
