"""No connection is left, or none that may write: who has one keeps it, who wants one says so once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg

import pgqueue
from tests.outages.conftest import NewNode
from tests.outages.support import BACK, Crew, Node, check_no_attempt_is_burnt, either
from tests.process.support import Queue
from tests.support import wait_until

_CONNECTIONS = 20
_UNREACHABLE = 75


@contextlib.contextmanager
def all_taken(node: Node) -> Iterator[None]:
    """Take every connection that is left for ordinary roles."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                stack.enter_context(psycopg.connect(node.app_dsn, autocommit=True))
        yield


@contextlib.contextmanager
def robbed_of(crew: Crew, node: Node, *sessions: str) -> Iterator[None]:
    """End some of the workers' sessions, and take their connections before they can come back."""
    for one in crew.workers:
        one.signal(signal.SIGSTOP)
    names = [f"pgqueue worker {session}" for session in sessions]
    with psycopg.connect(node.admin_dsn, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = ANY (%s)",
            (names,),
        )
    with all_taken(node):
        for one in crew.workers:
            one.signal(signal.SIGCONT)
        yield


def test_a_worker_that_finds_no_free_connection_says_so_and_ends_with_the_code_for_unreachable(
    new_node: NewNode, tmp_path: Path
) -> None:
    node = new_node({"max_connections": _CONNECTIONS})
    crew = Crew(node.app_dsn, tmp_path)

    with all_taken(node), crew.start(1, is_up=False) as (started,):
        assert started.wait() == _UNREACHABLE

    assert "connection slots" in started.text()
    assert len(started.text().splitlines()) == 1


def test_running_jobs_keep_their_leases_while_no_connection_is_free(
    new_node: NewNode, tmp_path: Path
) -> None:
    node = new_node({"max_connections": _CONNECTIONS})
    crew = Crew(node.app_dsn, tmp_path)
    with closing(Queue(node.admin_dsn)) as queue, crew.start(1, "--lease-seconds", "3") as (started,):
        running = queue.insert("work", '{"seconds": 7}')
        crew.wait_for_start(running)

        # The places of some of their sessions go to others, for longer than a lease.
        with robbed_of(crew, node, "claim", "listen"):
            crew.wait_until_lost()
            waiting = queue.insert("work")
            queue.wait_for_state(running, "succeeded")
            assert crew.starts_of(waiting) == []
        queue.wait_for_state(waiting, "succeeded")
        started.wait_for(BACK)

        assert crew.outages_said() == [(1, 1)], crew.said()
        assert crew.complaints() == []
        check_no_attempt_is_burnt(queue)
        assert started.stop() == 0


def test_a_worker_that_cannot_renew_leases_claims_nothing_until_it_can(
    new_node: NewNode, tmp_path: Path
) -> None:
    node = new_node({"max_connections": _CONNECTIONS})
    crew = Crew(node.app_dsn, tmp_path)
    with closing(Queue(node.admin_dsn)) as queue, crew.start(1, "--lease-seconds", "2") as (started,):
        queue.wait_for_state(queue.insert("work"), "succeeded")

        with robbed_of(crew, node, "lease"):
            crew.wait_until_lost()
            ready = queue.insert("work")
            due = queue.one(
                "INSERT INTO pgqueue.jobs (task, run_at) VALUES ('work', now() + interval '1 s') RETURNING id"
            )
            # Everything else goes on meanwhile.
            queue.wait_for_state(due, "ready")
            assert queue.state(ready) == "ready"
        for job in (ready, due):
            queue.wait_for_state(job, "succeeded")

        assert crew.outages_said() == [(1, 1)], crew.said()
        assert crew.complaints() == []
        check_no_attempt_is_burnt(queue)
        assert started.stop() == 0


@contextlib.contextmanager
def setting(node: Node, name: str, value: str) -> Iterator[None]:
    """Change a setting of the server, for everybody who has not set it himself."""
    options = "-c default_transaction_read_only=off"
    with psycopg.connect(node.admin_dsn, autocommit=True, options=options) as admin:
        admin.execute(f"ALTER SYSTEM SET {name} = {value}")
        admin.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            admin.execute(f"ALTER SYSTEM RESET {name}")
            admin.execute("SELECT pg_reload_conf()")


def test_a_database_that_turns_read_only_is_lost_once_until_it_takes_writes_again(
    new_node: NewNode, tmp_path: Path
) -> None:
    node = new_node({"log_connections": "on"})
    crew = Crew(node.app_dsn, tmp_path)
    with closing(Queue(node.admin_dsn)) as queue, crew.start(1) as (started,):
        queue.wait_for_state(queue.insert("work"), "succeeded")

        with setting(node, "default_transaction_read_only", "on"):
            crew.wait_until_lost()
            # It lets them in, and refuses them there; they try again and again.
            tries = "application_name=pgqueue worker finish"
            count = node.says(tries)
            wait_until(lambda: node.says(tries) > count + 2)
        crew.wait_for_start(queue.insert("work"))
        started.wait_for(BACK)

        assert crew.outages_said() == [(1, 1)], crew.said()
        assert crew.complaints() == []
        assert started.stop() == 0


def test_of_several_hosts_everybody_goes_to_the_one_that_takes_writes(
    new_node: NewNode, tmp_path: Path
) -> None:
    """Producers, locks, and handlers, whether they enqueue or their transaction ends their job."""
    reader, writer = new_node({"default_transaction_read_only": "on"}), new_node()
    dsn = either(reader, writer, target_session_attrs=None)
    with closing(Queue(writer.admin_dsn)) as queue:
        with pgqueue.App(dsn) as app:
            jobs = [app.enqueue("work").job_id, asyncio.run(enqueue_async(app))]
            with app.lock("report"), pgqueue.App(writer.app_dsn) as there:
                assert not there.lock("report").acquire()
        jobs += [queue.insert("transact"), queue.insert("enqueue_another")]
        crew = Crew(dsn, tmp_path)
        with crew.start(1):
            for job in jobs:
                queue.wait_for_state(job, "succeeded")
            wait_until(lambda: queue.count("finished_jobs", "task = 'work'") == 3)


async def enqueue_async(app: pgqueue.App) -> int:
    try:
        return (await app.aenqueue("work")).job_id
    finally:
        await app.aclose()


def test_a_kept_connection_to_a_server_that_takes_writes_no_more_is_not_lent_again(
    new_node: NewNode,
) -> None:
    first, second = new_node(), new_node()
    with (
        pgqueue.App(either(first, second, target_session_attrs=None)) as app,
        closing(Queue(second.admin_dsn)) as queue,
    ):
        app.enqueue("work")
        with psycopg.connect(first.admin_dsn, autocommit=True) as admin:
            admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            admin.execute("SELECT pg_reload_conf()")
            wait_until(lambda: admin.execute("SHOW default_transaction_read_only").fetchone() == ("on",))
        wait_until(lambda: not takes_writes(app))

        job = app.enqueue("work")

        assert queue.one("SELECT state FROM pgqueue.jobs WHERE id = %s", job.job_id) == "ready"


def takes_writes(app: pgqueue.App) -> bool:
    """Enqueue, and say whether the server that answered would have it."""
    try:
        app.enqueue("work")
    except psycopg.errors.ReadOnlySqlTransaction:
        return False
    return True
