import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import warnings

import pytest

from pgqueue.client import AsyncClient, Client
from pgqueue.connections import AsyncConnections, Connections
from pgqueue.errors import ConfigurationError, DatabaseUnreachable
from pgqueue.model.job import NewJob
from tests.support import wait_until

JOB = NewJob(
    task="demo", queue="default", priority=0, max_attempts=5, timeout_seconds=300.0, concurrency_limit=1
)


@pytest.fixture
def db(connect, fast_dsn):
    return connect(fast_dsn)


def count(db):
    return db.execute("SELECT count(*) FROM pgqueue.jobs").fetchone()[0]


def connections_of(db):
    return db.execute(
        """SELECT count(*) FROM pg_stat_activity
           WHERE datname = current_database() AND application_name = 'pgqueue'"""
    ).fetchone()[0]


def run_script(text, dsn):
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", text],
        env={**os.environ, "PGQUEUE_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


# Lending.


def test_a_connection_is_used_again(fast_dsn):
    connections = Connections(fast_dsn, "pgqueue", 2)

    with connections.lend() as one:
        first = one.info.backend_pid
    with connections.lend() as two:
        second = two.info.backend_pid

    assert first == second
    connections.close()


def test_two_who_want_one_at_once_get_two(fast_dsn):
    connections = Connections(fast_dsn, "pgqueue", 2)

    with connections.lend() as one, connections.lend() as two:
        assert one.info.backend_pid != two.info.backend_pid

    connections.close()


def test_who_finds_all_in_use_waits_and_is_told_in_the_end(fast_dsn):
    connections = Connections(fast_dsn, "pgqueue", 1, wait_seconds=0.05)

    with connections.lend(), pytest.raises(DatabaseUnreachable, match=r"free for 0\.05 s: all 1 of this"):
        connections.lend().__enter__()

    with connections.lend() as again:
        assert not again.closed
    connections.close()


def test_who_finds_all_in_use_waits_and_is_told_in_the_end_async(fast_dsn):
    connections = AsyncConnections(fast_dsn, "pgqueue", 1, wait_seconds=0.05)

    async def main():
        async with connections.lend():
            with pytest.raises(DatabaseUnreachable, match=r"free for 0\.05 s: all 1 of this"):
                await connections.lend().__aenter__()
        async with connections.lend() as again:
            assert not again.closed
        connections.close()

    asyncio.run(main())


def test_a_connection_left_in_a_transaction_is_not_lent_again(fast_dsn):
    connections = Connections(fast_dsn, "pgqueue", 1)

    with connections.lend() as one:
        first = one.info.backend_pid
        one.execute("BEGIN")
    with connections.lend() as two:
        second, status = two.info.backend_pid, two.info.transaction_status.name

    assert (first != second, status) == (True, "IDLE")
    connections.close()


def test_connections_that_nobody_wants_any_more_are_closed(fast_dsn, db):
    connections = Connections(fast_dsn, "pgqueue", 3, keep_seconds=0.0)

    with connections.lend(), connections.lend(), connections.lend():
        most = connections_of(db)

    assert most == 3
    wait_until(lambda: connections_of(db) == 1)
    connections.close()
    wait_until(lambda: connections_of(db) == 0)


def test_a_failed_connect_leaves_room_for_the_next_try():
    connections = Connections("host=127.0.0.1 port=1", "pgqueue", 1, wait_seconds=0.05)

    for _ in range(3):
        with pytest.raises(DatabaseUnreachable, match="cannot connect"):
            connections.lend().__enter__()


def test_a_dsn_that_cannot_be_read_is_said():
    with pytest.raises(ConfigurationError, match="the DSN cannot be read"):
        Connections("not a dsn", "pgqueue", 1).lend().__enter__()


# Threads, loops, processes.


def test_threads_share_a_few_connections(fast_dsn, db):
    client = Client(fast_dsn, max_connections=3)
    threads = [threading.Thread(target=lambda: [client.enqueue(JOB) for _ in range(25)]) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert count(db) == 200
    assert 1 <= connections_of(db) <= 3
    client.close()


def test_tasks_share_a_few_connections(fast_dsn, db):
    client = AsyncClient(fast_dsn, max_connections=3)

    async def main():
        await asyncio.gather(*[client.enqueue(JOB) for _ in range(100)])
        most = connections_of(db)
        await client.aclose()
        return most

    assert 1 <= asyncio.run(main()) <= 3
    assert count(db) == 100


def test_each_event_loop_has_connections_of_its_own_and_they_end_after_it(fast_dsn, db):
    client = AsyncClient(fast_dsn)

    async def enqueue_ten():
        await asyncio.gather(*[client.enqueue(JOB) for _ in range(10)])

    async def enqueue_ten_and_close():
        await enqueue_ten()
        await client.aclose()

    asyncio.run(enqueue_ten())
    left = connections_of(db)
    threads = [threading.Thread(target=lambda: asyncio.run(enqueue_ten_and_close())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert left > 0
    assert count(db) == 40
    wait_until(lambda: connections_of(db) == 0)


def test_after_a_fork_parent_and_child_use_connections_of_their_own(fast_dsn, db):
    client = Client(fast_dsn)
    client.enqueue(JOB)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the case in question
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            for _ in range(20):
                client.enqueue(JOB)
            client.close()
            status = 0
        os._exit(status)
    for _ in range(20):
        client.enqueue(JOB)
    _, status = os.waitpid(child, 0)
    client.enqueue(JOB)

    assert os.waitstatus_to_exitcode(status) == 0
    assert count(db) == 42
    client.close()


def test_a_forked_child_that_ends_says_no_goodbye_in_its_parents_name(fast_dsn, db):
    script = """
import os, pgqueue
app = pgqueue.App()
app.enqueue("before")
with app.client._connections.lend() as conn:
    backend = conn.info.backend_pid
child = os.fork()
if child:
    os.waitpid(child, 0)
    app.enqueue("after")
    with app.client._connections.lend() as conn:
        print("same" if conn.info.backend_pid == backend else "another")
"""

    ended = run_script(script, fast_dsn)

    assert (ended.stdout, ended.stderr, ended.returncode) == ("same\n", "", 0)
    assert count(db) == 2


@pytest.mark.parametrize(
    "script",
    [
        "import pgqueue; app = pgqueue.App(); app.enqueue('demo')",
        """
import asyncio, pgqueue
app = pgqueue.App()
async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # a slow machine has nothing to say either
    await asyncio.gather(*[app.aenqueue('demo') for _ in range(10)])
for _ in range(20):
    asyncio.run(main())
""",
    ],
    ids=["sync", "async"],
)
def test_a_program_that_closes_nothing_ends_quietly(fast_dsn, script):
    ended = run_script(script, fast_dsn)

    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)
