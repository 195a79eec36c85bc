"""Connections whose other side is there and never answers."""

from __future__ import annotations

from pathlib import Path

from pgqueue.runtime.link import PATIENCE_SECONDS
from tests.faults.proxy import Proxy
from tests.process.support import Queue, through, worker
from tests.support import wait_until

SESSIONS = (
    "SELECT pid FROM pg_stat_activity "
    "WHERE application_name LIKE 'pgqueue worker%%' AND datname = current_database()"
)


def test_a_worker_whose_connections_all_fall_silent_is_soon_out_of_patience_and_gets_new_ones(
    queue: Queue, proxy: Proxy, tmp_path: Path
) -> None:
    with worker(through(proxy, queue), tmp_path) as started:
        queue.wait_for_state(queue.insert("double", '{"number": 1}'), "succeeded")

        wait_until(lambda: len(queue.all(SESSIONS)) == 4, message="claim, finish, listen, lease are up")
        assert proxy.strand() == 4
        # Neither keepalives nor a timeout of the server's end this wait: only our own patience does, once.
        soon = PATIENCE_SECONDS + 5
        queue.wait_for_state(queue.insert("double", '{"number": 2}'), "succeeded", seconds=soon)

        assert started.lines("database is back")
        started.process.kill()


def test_a_worker_whose_new_connections_fall_silent_before_they_are_of_use_tries_again(
    queue: Queue, proxy: Proxy, tmp_path: Path
) -> None:
    with worker(through(proxy, queue), tmp_path) as started:
        wait_until(lambda: len(queue.all(SESSIONS)) == 4, message="claim, finish, listen, lease are up")

        proxy.strand_new()
        proxy.cut()
        # Those that are in use. Who holds nothing looks so seldom for its lease's connection that all three
        # at once would be chance.
        wait_until(lambda: proxy.stranded >= 2, 20, "claim and finish have connected, and nobody answers")
        proxy.heal()
        queue.wait_for_state(queue.insert("double", '{"number": 2}'), "succeeded", seconds=30)

        started.process.kill()
