"""No wake-up is lost: who makes a job ready rings, unless the sleeping worker cannot have overlooked it."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import psycopg
import pytest

from tests.guarantees.support import at_once
from tests.sql.support import OpenSession, Session
from tests.support import wait_until

INSERT = "INSERT INTO pgqueue.jobs (task) VALUES ('t')"


class Sleeper:
    """What a worker does between its last empty claim and its sleep, on the session that listens."""

    def __init__(self, session: Session, queue: str = "default") -> None:
        self.session, self.queue = session, queue
        channel = session.one("SELECT pgqueue.bell_channel(%s)", queue)
        session.connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel)))

    def rest(self, **parameters) -> str:
        return self.session.call("rest", **{"queue": self.queue, "on_duty": False, **parameters})[0][0]

    def rise(self, *, was_asleep=True, leaves_duty=False, rings=False) -> None:
        self.session.call(
            "rise", queue=self.queue, was_asleep=was_asleep, leaves_duty=leaves_duty, rings=rings
        )

    def hears(self, seconds: float = 0.0) -> bool:
        """Say whether it was rung; what was sent before our last statement is here already."""
        self.session.one("SELECT 1")
        return bool(list(self.session.connection.notifies(timeout=seconds, stop_after=1)))


@pytest.fixture
def sleeper(open_session: OpenSession) -> Sleeper:
    return Sleeper(open_session())


@pytest.fixture
def inserter(open_session: OpenSession) -> Session:
    return open_session(autocommit=False)


# A worker that goes to sleep while somebody inserts.


def test_an_insert_in_flight_keeps_the_worker_awake(sleeper, inserter, session):
    inserter.rows(INSERT)

    while_in_flight = sleeper.rest()
    inserter.connection.commit()

    assert while_in_flight == "watch"
    assert len(session.claim()) == 1
    assert sleeper.rest(on_duty=True) == "asleep"


def test_an_insert_after_the_worker_fell_asleep_rings(sleeper, inserter):
    assert sleeper.rest() == "asleep"
    inserter.rows(INSERT)
    before_the_commit = sleeper.hears()

    inserter.connection.commit()

    assert not before_the_commit
    assert sleeper.hears(60)


def test_an_insert_under_an_old_snapshot_rings(sleeper, inserter):
    inserter.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    inserter.rows("SELECT count(*) FROM pgqueue.jobs")
    assert sleeper.rest() == "asleep"

    inserter.rows(INSERT)
    inserter.connection.commit()

    assert sleeper.hears(60)


@pytest.mark.parametrize("ends", ["stays open", "rolls back"])
def test_a_commit_rings_although_another_insert_that_would_have_rung(sleeper, inserter, session, ends):
    """...stays open, or rolls back: no insert relies on another one's bell."""
    assert sleeper.rest() == "asleep"
    inserter.rows(INSERT)

    session.rows(INSERT)
    if ends == "rolls back":
        inserter.connection.rollback()

    assert sleeper.hears(60)


def test_a_second_insert_rings_after_the_first_was_rolled_back_to_a_savepoint(sleeper, inserter):
    inserter.rows("SAVEPOINT s")
    inserter.rows(INSERT)
    inserter.rows("ROLLBACK TO s")
    assert sleeper.rest() == "asleep"

    inserter.rows(INSERT)
    inserter.connection.commit()

    assert sleeper.hears(60)


def test_one_statement_rings_in_every_queue_it_fills(open_session, session):
    queues = ["a", "b", "ü" * 50, "x" * 100]
    sleepers = [Sleeper(open_session(), queue) for queue in queues]
    assert [sleeper.rest() for sleeper in sleepers] == ["asleep"] * 4

    session.rows("INSERT INTO pgqueue.jobs (task, queue) SELECT 't', unnest(%s::text[])", queues)

    assert all(sleeper.hears(60) for sleeper in sleepers)


def test_copy_rings_too(sleeper, session):
    assert sleeper.rest() == "asleep"

    with session.connection.cursor().copy("COPY pgqueue.jobs (task) FROM STDIN") as copy:
        copy.write("t\n")

    assert sleeper.hears(60)


def test_nobody_is_rung_for_nothing(sleeper, session):
    session.enqueue(unique_key="u")
    session.claim()
    assert sleeper.rest() == "asleep"

    session.enqueue(delay_seconds=60)
    session.enqueue(queue="other")
    session.enqueue(unique_key="u")

    assert not sleeper.hears(0.2)


def test_no_insert_rings_while_nobody_sleeps(sleeper, session):
    session.enqueue()
    assert not sleeper.hears(0.2)

    assert sleeper.rest() == "asleep"
    sleeper.rise()
    session.enqueue()

    assert not sleeper.hears(0.2)


def test_a_session_that_prepares_transactions_can_be_quiet(sleeper, session):
    assert sleeper.rest() == "asleep"
    session.rows("SET pgqueue.is_quiet = on")

    session.enqueue()
    quiet = sleeper.hears(0.2)
    session.call("ring", queues=["default"])

    assert not quiet
    assert sleeper.hears(60)


# Who is on duty.


def test_of_the_idle_workers_one_is_on_watch_and_hands_it_on(open_session):
    first, second = Sleeper(open_session()), Sleeper(open_session())

    assert (first.rest(), second.rest()) == ("asleep", "off")
    first.rise(leaves_duty=True, rings=True)

    assert second.hears(60)
    assert second.rest() == "asleep"


def test_a_worker_that_wants_short_polls_only_takes_the_watch(sleeper, session):
    assert sleeper.rest(may_sleep=False) == "watch"

    session.enqueue()

    assert not sleeper.hears(0.2)


def test_the_watch_of_a_worker_that_died_is_free(open_session, session):
    first, second = Sleeper(open_session()), Sleeper(open_session())
    assert (first.rest(), second.rest()) == ("asleep", "off")

    session.rows("SELECT pg_terminate_backend(%s)", first.session.connection.info.backend_pid)

    assert wait_until(lambda: second.rest() == "asleep")


# Jobs that become ready by an update.


def running(session, **parameters):
    session.enqueue(**parameters)
    return session.claim()


def make_due(session):
    session.enqueue(delay_seconds=60)
    return session.make_due


def release(session):
    attempts = running(session)
    return lambda: session.release(*attempts)


def retry_at_once(session):
    attempts = running(session)
    return lambda: session.fail(*attempts, retry_seconds=[0])


def crash(session):
    attempts = running(session)
    return lambda: session.crash(*attempts)


def redrive(session):
    attempts = running(session)
    session.fail(*attempts, is_dead=[True])
    return lambda: session.redrive(attempts[0].job_id)


def replace(session):
    session.enqueue(unique_key="u", delay_seconds=60)
    return lambda: session.enqueue(unique_key="u", on_conflict="replace")


def free_a_slot(session):
    attempts = running(session, concurrency_key="k")
    session.enqueue(concurrency_key="k")
    session.claim()
    return lambda: session.complete(*attempts)


def cancel_the_one_in_front(session):
    attempts = running(session, concurrency_key="k")
    ready, _ = session.enqueue(concurrency_key="k"), session.enqueue(concurrency_key="k")
    session.claim()
    session.complete(*attempts)
    return lambda: session.cancel(ready)


def sweep(session):
    job_id = session.enqueue(concurrency_key="k")
    session.rows("UPDATE pgqueue.jobs SET state = 'blocked' WHERE id = %s", job_id)
    return lambda: session.call("sweep")


def remove_a_rate_limit(session):
    session.rows("INSERT INTO pgqueue.rate_limits (name, tokens_per_second) VALUES ('task:t', 0.001)")
    for _ in range(2):
        session.enqueue()
    session.claim()
    session.claim()
    return lambda: session.call("rate_dissolve", name="task:t")


@pytest.mark.parametrize(
    "prepare",
    [
        make_due,
        release,
        retry_at_once,
        crash,
        redrive,
        replace,
        free_a_slot,
        cancel_the_one_in_front,
        sweep,
        remove_a_rate_limit,
    ],
)
def test_whoever_makes_a_job_ready_rings(sleeper, session, prepare):
    act = prepare(session)
    assert session.one("SELECT count(*) FROM pgqueue.jobs WHERE state = 'ready'") <= 1
    assert sleeper.rest() == "asleep"
    quiet = sleeper.hears()

    act()

    assert not quiet
    assert sleeper.hears(60)
    assert session.one("SELECT count(*) FROM pgqueue.jobs WHERE state = 'ready'") == 1


# Room in a queue with a ceiling.


def succeed(session, attempt):
    session.complete(attempt)


def retry_later(session, attempt):
    session.fail(attempt, retry_seconds=[60])


def die(session, attempt):
    session.fail(attempt, is_dead=[True])


def snooze(session, attempt):
    session.release(attempt, delay_seconds=[60])


def stop_when_cancelled(session, attempt):
    session.cancel(attempt.job_id)
    session.fail(attempt)


def lose_the_lease_once_more(session, attempt):
    session.rows("UPDATE pgqueue.jobs SET crashes = 1 WHERE id = %s", attempt.job_id)
    session.expire(attempt)
    session.call("reap")


ENDS = [succeed, retry_later, die, snooze, stop_when_cancelled, lose_the_lease_once_more]


@pytest.mark.parametrize("end", ENDS)
def test_whoever_makes_room_in_a_queue_with_a_ceiling_rings(sleeper, session, end):
    session.call("limit_queue", name="default", max_running=1)
    (attempt,) = running(session)
    session.enqueue()
    assert session.claim() == []
    assert sleeper.rest() == "asleep"

    end(session, attempt)

    assert sleeper.hears(60)
    assert len(session.claim()) == 1


@pytest.mark.parametrize("end", ENDS)
def test_an_end_that_makes_no_room_for_anybody_rings_for_nobody(sleeper, session, end):
    session.call("limit_queue", name="another", max_running=1)
    (attempt,) = running(session)
    assert sleeper.rest() == "asleep"

    end(session, attempt)

    assert not sleeper.hears(0.2)


@pytest.mark.parametrize(
    "call",
    [
        ("resume_queues", {"names": ["default"]}),
        ("resume_queues", {}),
        ("limit_queue", {"name": "default", "max_running": 5}),
        ("limit_queue", {"name": "default", "max_running": None}),
        ("pause_queues", {"names": ["default"], "seconds": 1}),
    ],
    ids=str,
)
def test_whoever_changes_what_a_queue_may_start_rings(sleeper, session, call):
    session.call("pause_queues", names=["default"])
    session.call("limit_queue", name="default", max_running=0)
    assert sleeper.rest() == "asleep"
    function, parameters = call

    session.call(function, **parameters)

    assert sleeper.hears(60)


# All of it at once.

IDLE_POLL_SECONDS = 600.0  # a wake-up that is lost shows: nothing else comes for so long
PATIENCE_SECONDS = 60.0
ROUNDS = 30
GLOW_SECONDS = (0.001, 0.002, 0.002, 0.003, 0.004, 0.005, 0.005, 0.005)


def serve(claimer: Session, sleeper: Sleeper, stop: threading.Event, claimed: set[int]) -> None:
    """Claim and sleep as a worker does."""
    claimer.rows("SET synchronous_commit = off")
    on_duty = is_asleep = False
    empty_claims = 0
    while not stop.is_set():
        attempts = claimer.claim(max_jobs=10)
        if attempts:
            claimed.update(attempt.job_id for attempt in attempts)
            claimer.complete(*attempts)
            empty_claims = 0
        elif is_asleep or (not on_duty and empty_claims > len(GLOW_SECONDS)):
            is_rung = list(sleeper.session.connection.notifies(timeout=IDLE_POLL_SECONDS, stop_after=1))
            if is_asleep and is_rung:
                sleeper.rise()
                is_asleep = False
            empty_claims = 0 if is_rung else len(GLOW_SECONDS)
        elif empty_claims < len(GLOW_SECONDS) and on_duty:
            stop.wait(GLOW_SECONDS[empty_claims])
            empty_claims += 1
        else:
            answer = sleeper.rest(on_duty=on_duty, may_sleep=empty_claims >= len(GLOW_SECONDS))
            on_duty, is_asleep = answer != "off", answer == "asleep"
            if answer == "off":
                empty_claims = len(GLOW_SECONDS) + 1
            elif answer == "watch":
                stop.wait(min(0.05, 0.008 * 1.5 ** max(0, empty_claims - len(GLOW_SECONDS))))
                empty_claims += 1


def insert_in_every_way(session: Session, committed: set[int], rng: random.Random) -> None:
    def insert(count: int = 1) -> list[int]:
        text = "INSERT INTO pgqueue.jobs (task) SELECT 't' FROM generate_series(1, %s) RETURNING id"
        return [row[0] for row in session.rows(text, count)]

    for _ in range(rng.randrange(1, 4)):
        time.sleep(rng.uniform(0, 0.1))
        way = rng.choice(["alone", "alone", "long", "old snapshot", "rollback", "savepoint", "bulk"])
        with session.connection.transaction(force_rollback=way == "rollback"):
            if way == "old snapshot":
                session.rows("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                session.rows("SELECT count(*) FROM pgqueue.queues")
                time.sleep(rng.uniform(0, 0.1))
            if way == "savepoint":
                with session.connection.transaction(force_rollback=True):
                    insert()
                time.sleep(rng.uniform(0, 0.05))
            ids = insert(20 if way == "bulk" else 1)
            if way in {"long", "rollback"}:
                time.sleep(rng.uniform(0, 0.1))
        if way != "rollback":
            committed.update(ids)


def test_no_wake_up_is_lost_among_all_kinds_of_inserts(session, open_session):
    """In rounds, each of which ends in silence: no later insert makes up for a bell that did not ring."""
    stop_serving = threading.Event()
    claimed: set[int] = set()
    committed: set[int] = set()
    workers = [
        threading.Thread(
            target=serve, args=(open_session(), Sleeper(open_session()), stop_serving, claimed), daemon=True
        )
        for _ in range(3)
    ]
    inserters = [(open_session(), random.Random(seed)) for seed in range(4)]

    for thread in workers:
        thread.start()
    try:
        for nth in range(ROUNDS):
            at_once(*(partial(insert_in_every_way, own, committed, rng) for own, rng in inserters))
            wait_until(lambda: committed <= claimed, PATIENCE_SECONDS, f"claimed in round {nth}")
    finally:
        stop_serving.set()
        session.rows("SELECT pg_notify(pgqueue.bell_channel('default'), '')")
        for thread in workers:
            thread.join(PATIENCE_SECONDS)

    assert len(committed) > 50
