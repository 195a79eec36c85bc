"""Nothing is lost, doubled, stuck or over its limit while everything happens at once and backends die.

No sweep runs: every wake-up has to come from the writers themselves.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest

from tests.guarantees.support import OVER_LIMIT, STUCK, Crowd, work_for_a_moment
from tests.sql.support import Session
from tests.support import wait_until

QUEUES, LEASE_SECONDS, SECONDS = ["a", "b"], 0.5, 6
LIMITS = {f"k{number}": (1, 1, 2, 3, 10)[number % 5] for number in range(15)}


class Chaos:
    """What each client does; accidents happen until `is_calm`."""

    def __init__(self) -> None:
        self.is_calm = threading.Event()

    def has_accident(self, chance: float) -> bool:
        return not self.is_calm.is_set() and random.random() < chance

    def work(self, session: Session, seen: Counter[str]) -> None:
        attempts = session.claim(
            random.choice(QUEUES), random.choice((1, 3, 10)), lease_seconds=LEASE_SECONDS
        )
        seen["claimed"] += len(attempts)
        if not attempts:
            work_for_a_moment()
        if self.has_accident(0.05):  # the worker dies: nobody reports these
            return
        work_for_a_moment()
        if self.has_accident(0.03):  # frozen beyond its lease, then goes on as if nothing had happened
            time.sleep(LEASE_SECONDS * 1.3)
        random.shuffle(attempts)
        cut = random.randrange(len(attempts) + 1)
        if cut:
            seen["completed"] += len(session.complete(*attempts[:cut]))
        for attempt in attempts[cut:]:
            end = random.choice(["fail", "fail", "release", "crash", "complete"])
            options = {"fail": {"base_seconds": 0.02}, "crash": {"base_seconds": 0.02, "max_crashes": 10}}
            getattr(session, end)(attempt, **options.get(end, {}))

    def maintain(self, session: Session, seen: Counter[str]) -> None:
        seen["reaped"] += len(
            session.call("reap", max_jobs=100, base_seconds=0.02, max_seconds=0.2, max_crashes=10)
        )
        session.call("promote")
        time.sleep(0.03)

    def cancel_and_redrive(self, session: Session, seen: Counter[str]) -> None:
        ids = [row[0] for row in session.rows("SELECT id FROM pgqueue.jobs ORDER BY random() LIMIT 2")]
        seen["cancelled"] += len(session.cancel(*ids))
        dead = [row[0] for row in session.rows("SELECT id FROM pgqueue.dead_jobs LIMIT 20")]
        seen["redriven"] += list(session.redrive(*dead).values()).count("ready")
        time.sleep(0.05)

    def produce(self, session: Session, seen: Counter[str]) -> None:
        if session.one("SELECT count(*) FROM pgqueue.jobs") < 300:
            keys = [random.choice([None, *LIMITS, *list(LIMITS)[:3]]) for _ in range(random.randrange(1, 40))]
            outcomes = session.enqueue_many(
                *(
                    {
                        "task": "t",
                        "queue": random.choice(QUEUES),
                        "priority": random.randrange(3),
                        "max_attempts": 3,
                        "concurrency_key": key,
                        "concurrency_limit": LIMITS.get(key, 1),
                    }
                    for key in keys
                )
            )
            seen["enqueued"] += len(outcomes)
        key = random.choice(list(LIMITS))
        ((_, outcome),) = session.enqueue_many(
            {
                "task": "t",
                "queue": random.choice(QUEUES),
                "concurrency_key": key,
                "concurrency_limit": LIMITS[key],
                "unique_key": f"u{random.randrange(20)}",
                "on_conflict": "replace",
                "delay_seconds": random.choice((0, 0, 0.2)),
            }
        )
        seen["enqueued"] += outcome == "inserted"
        time.sleep(0.01)

    def kill(self, session: Session, seen: Counter[str]) -> None:
        time.sleep(random.uniform(0.1, 0.4))
        seen["killed"] += len(
            session.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'crowd' AND pid <> pg_backend_pid() "
                "AND query ~ 'claim|complete|fail|release|crash|reap|cancel' ORDER BY random() LIMIT 2"
            )
        )

    def watch(self, session: Session, seen: Counter[str]) -> None:
        seen["looks"] += 1
        seen["stuck"] += session.one(STUCK)
        seen["over the limit"] += session.one(OVER_LIMIT)
        time.sleep(0.1)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("patient_unblock")
def test_nothing_is_lost_doubled_stuck_or_over_its_limit(session, open_session):
    chaos, load, service = Chaos(), Crowd(open_session), Crowd(open_session)
    for step in (chaos.produce, chaos.cancel_and_redrive, chaos.kill):
        load.add(step)
    service.add(chaos.work, 4)
    service.add(chaos.maintain)
    service.add(chaos.watch)

    try:
        load.work(SECONDS, until_seen=("enqueued", "cancelled", "redriven", "killed"))
        service.work(0, until_seen=("completed", "reaped", "looks"))
        load.stop()
        chaos.is_calm.set()
        wait_until(
            lambda: session.one("SELECT count(*) FROM pgqueue.jobs") == 0, 240, "everything is drained"
        )
    finally:
        load.stop()
        service.stop()

    seen = load.seen + service.seen
    ended = [
        row[0]
        for table in ("finished", "dead")
        for row in session.rows(f"SELECT id FROM pgqueue.{table}_jobs")
    ]
    assert (seen["stuck"], seen["over the limit"]) == (0, 0)
    assert session.call("sweep") == [(0, None)]
    assert len(ended) == len(set(ended))
    # An enqueue whose backend was killed after its commit is in the tables and not in our count: never
    # the other way round.
    assert len(ended) >= seen["enqueued"]
    # Those who were killed see 57P01 (of PgBouncer 08P01), or the end of the connection.
    of_the_killed = {"error 57P01", "error 08P01", "error OperationalError"}
    assert {name for name in seen if name.startswith("error")} <= of_the_killed
