"""The server stops, crashes, is killed, and comes back: everybody works on as if nothing had been."""

from __future__ import annotations

import time
from contextlib import closing

from tests.outages.support import (
    IN_CI,
    POLL_SECONDS,
    Crew,
    Node,
    Producer,
    check_no_attempt_is_burnt,
    check_nobody_is_deaf,
    check_nothing_is_lost,
)
from tests.process.support import Queue
from tests.support import wait_until

# Longer than the lease in either case: the leases of everything that runs then have run out.
AWAY_SECONDS, LEASE_SECONDS = (20.0, 10.0) if IN_CI else (3.0, 2.0)


def test_workers_ride_through_a_restart_of_any_kind(node: Node, crew: Crew) -> None:
    kinds = {"fast": node.stop, "immediate": node.stop_at_once, "kill -9": node.kill}
    with crew.start(2, "--poll-seconds", str(POLL_SECONDS), "-c", "4"):
        for outages, (kind, end) in enumerate(kinds.items(), 1):
            with Producer(node.app_dsn) as producer:
                wait_until(lambda producer=producer: len(producer.acknowledged) > 100)

                end()
                crew.wait_until_lost(outages)
                node.restart()
                count = len(producer.acknowledged)
                wait_until(lambda producer=producer, count=count: len(producer.acknowledged) > count + 50)

            with closing(Queue(node.admin_dsn)) as queue:
                check_nothing_is_lost(queue, producer)
                check_nobody_is_deaf(queue, crew)
                check_no_attempt_is_burnt(queue)
            assert crew.outages_said() == [(outages, outages)] * 2, f"{kind}\n{crew.said()}"
            # Claims are committed asynchronously: a crash may undo the last ones, and others claim anew.
            allowed = {"claim lost"} if outages > 1 else set()
            assert {line["event"] for line in crew.complaints()} <= allowed, kind
        assert [one.stop() for one in crew.workers] == [0, 0]


def test_four_workers_survive_a_killed_server_that_stays_away_for_longer_than_their_leases(
    node: Node, crew: Crew
) -> None:
    options = ("-c", "4", "--lease-seconds", str(LEASE_SECONDS))
    with crew.start(4, *options), Producer(node.app_dsn) as producer:
        with closing(Queue(node.admin_dsn)) as queue:
            long = [queue.insert("work", '{"seconds": 1.5}', queue=f"solo-{number}") for number in range(4)]
        for job in long:
            crew.wait_for_start(job)

        node.kill()
        crew.wait_until_lost()
        over_at = time.monotonic() + AWAY_SECONDS
        wait_until(lambda: time.monotonic() > over_at, AWAY_SECONDS + 1)
        node.restart()
        back_at = time.monotonic()
        with closing(Queue(node.admin_dsn)) as queue:
            fresh = [queue.insert("work", queue=f"solo-{number}") for number in range(4)]
            took = [crew.wait_for_start(job) - back_at for job in fresh]
            print(f"away {AWAY_SECONDS:g} s; working again after", ", ".join(f"{one:.2f} s" for one in took))
            producer.stop()
            check_nothing_is_lost(queue, producer)
            check_no_attempt_is_burnt(queue)

        assert max(took) < 20
        assert crew.outages_said() == [(1, 1)] * 4, crew.said()
        assert {line["event"] for line in crew.complaints()} <= {"claim lost"}
        assert [one.stop() for one in crew.workers] == [0] * 4
