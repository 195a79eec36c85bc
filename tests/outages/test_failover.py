"""Two servers with synchronous replication: what was acknowledged survives the loss of either's word."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.outages.conftest import NewNode
from tests.outages.support import (
    LOST,
    POLL_SECONDS,
    Crew,
    Node,
    Producer,
    check_nobody_is_deaf,
    check_nothing_is_lost,
    either,
)
from tests.process.support import Queue
from tests.support import wait_until


@pytest.fixture
def nodes(new_node: NewNode) -> tuple[Node, Node]:
    """A primary, and a standby that it waits for at every commit."""
    primary = new_node({"synchronous_standby_names": "standby"})
    follow = {"primary_conninfo": f"{primary.admin_dsn} application_name=standby", "log_connections": "on"}
    standby = new_node(follow, is_standby=True)
    with closing(Queue(primary.admin_dsn)) as queue:
        wait_until(lambda: queue.one("SELECT sync_state FROM pg_stat_replication") == "sync")
    return primary, standby


def promote(node: Node) -> None:
    with psycopg.connect(node.admin_dsn, autocommit=True) as admin:
        assert admin.execute("SELECT pg_promote()").fetchone() == (True,)


def test_no_acknowledged_enqueue_or_completion_is_lost_in_a_failover(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    primary, standby = nodes
    dsn = either(primary, standby)
    crew = Crew(dsn, tmp_path)
    with crew.start(2, "--poll-seconds", str(POLL_SECONDS), "-c", "4"):
        with Producer(dsn) as producer:
            wait_until(lambda: len(producer.acknowledged) > 100)

            primary.kill()
            crew.wait_until_lost()
            promote(standby)
            count = len(producer.acknowledged)
            wait_until(lambda: len(producer.acknowledged) > count + 50, 20)

        with closing(Queue(standby.admin_dsn)) as queue:
            check_nothing_is_lost(queue, producer)
            said = [line["job_id"] for one in crew.workers for line in one.lines("job succeeded")]
            kept = {job_id for (job_id,) in queue.all("SELECT id FROM pgqueue.finished_jobs")}
            assert len(said) == len(set(said))
            assert set(said) <= kept
            # What was claimed in the last moment may be claimed again: never at the cost of an attempt.
            assert queue.count("finished_jobs", "attempt - crashes <> 1") == 0
            assert crew.outages_said() == [(1, 1)] * 2, crew.said()
            assert not primary.is_up
            check_nobody_is_deaf(queue, crew)
        assert [one.stop() for one in crew.workers] == [0, 0]


def test_a_worker_led_to_a_standby_says_so_once_and_works_when_that_is_promoted(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    primary, standby = nodes
    with closing(Queue(primary.admin_dsn)) as queue:
        job = queue.insert("work")
    crew = Crew(standby.app_dsn, tmp_path)
    with crew.start(1, is_up=False) as (started,):
        # It cannot register, let alone claim; it tries again and again.
        (line,) = started.wait_for(LOST)
        wait_until(lambda: standby.says("application_name=pgqueue worker finish") > 4)
        primary.kill()
        promote(standby)
        crew.wait_for_start(job, 15)

        assert "read-only" in line["error"]
        assert crew.outages_said() == [(1, 1)], crew.said()
        assert crew.complaints() == []
        assert started.stop() == 0
