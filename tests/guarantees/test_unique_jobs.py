"""However many ask at once, and in whatever way, a unique key has one live job, and nobody gets an error.

Except who asked to be refused: with `reject` exactly one is not.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from pgqueue.client import Client
from pgqueue.errors import DuplicateJob
from pgqueue.model.job import NewJob, OnConflict
from tests.guarantees.support import Crowd, at_once, work_for_a_moment
from tests.sql.support import OpenSession, Session
from tests.support import wait_until

PRODUCERS, KEYS = 50, 6
MODES: list[OnConflict] = ["skip", "replace", "reject", "debounce"]
REFUSED = "refused"

RAW = (
    "INSERT INTO pgqueue.jobs (task, args, unique_key) VALUES ('t', %s, %s) "
    "ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL DO NOTHING RETURNING id"
)

# Asks once; gives the job's id, if it hears of one, and the outcome as far as it is told.
Ask = Callable[[Session, Client, OnConflict, str, int], tuple[int | None, str | None]]


def by_function(session: Session, _client: Client, mode: OnConflict, key: str, number: int):
    return session.enqueue(
        args={"n": number}, unique_key=key, on_conflict=mode, delay_seconds=delay_of(mode)
    ), None


def by_function_for_many(session: Session, _client: Client, mode: OnConflict, key: str, number: int):
    ((job_id, outcome),) = session.enqueue_many(
        {
            "task": "t",
            "args": {"n": number},
            "unique_key": key,
            "on_conflict": mode,
            "delay_seconds": delay_of(mode),
        }
    )
    return job_id, outcome


def by_client(_session: Session, client: Client, mode: OnConflict, key: str, number: int):
    return client.enqueue(
        NewJob(
            task="t",
            args=json.dumps({"n": number}),
            unique_key=key,
            on_conflict=mode,
            delay_seconds=delay_of(mode),
        )
    )


def by_insert(session: Session, _client: Client, mode: OnConflict, key: str, number: int):
    if mode == "reject":
        text = RAW.partition(" ON CONFLICT")[0] + " RETURNING id"
        return session.one(text, json.dumps({"n": number}), key), "inserted"
    job_id = session.one(RAW, json.dumps({"n": number}), key)
    return job_id, "skipped" if job_id is None else "inserted"


WAYS: list[Ask] = [by_function, by_function_for_many, by_client, by_insert]


def delay_of(mode: OnConflict) -> float | None:
    return 0.005 if mode == "debounce" else None


def ask(way: Ask, session: Session, client: Client, mode: OnConflict, key: str, number: int):
    try:
        return way(session, client, mode, key, number)
    except (DuplicateJob, psycopg.errors.UniqueViolation):
        assert mode == "reject"
        return None, REFUSED


@pytest.mark.parametrize("mode", MODES)
def test_fifty_producers_at_once_make_one_live_job_of_each_key(
    session: Session, open_session: OpenSession, fast_dsn: str, mode: OnConflict
) -> None:
    keys = [f"u{number}" for number in range(KEYS)]
    client = Client(fast_dsn, max_connections=PRODUCERS)
    barrier = threading.Barrier(PRODUCERS)

    def produce(number: int, own: Session):
        answers = []
        for key in keys:
            barrier.wait(240)
            answers.append(ask(WAYS[number % len(WAYS)], own, client, mode, key, number))
        return answers

    sessions = [open_session() for _ in range(PRODUCERS)]
    answers = at_once(*(lambda n=n, s=s: produce(n, s) for n, s in enumerate(sessions)))
    client.close()

    live = dict(session.rows("SELECT unique_key, id FROM pgqueue.jobs"))
    assert set(live) == set(keys)
    assert session.one("SELECT count(*) FROM pgqueue.jobs") == KEYS
    for place, key in enumerate(keys):
        heard = [each[place] for each in answers]
        assert {job_id for job_id, _ in heard if job_id is not None} == {live[key]}
        outcomes = Counter(outcome for _, outcome in heard)
        silent = outcomes.pop(None, 0)  # the function gives the id alone
        assert outcomes["inserted"] <= 1
        if mode == "reject":
            assert outcomes["inserted"] + silent == 1
            assert outcomes[REFUSED] == PRODUCERS - 1
        else:
            assert outcomes["inserted"] + silent >= 1
            assert set(outcomes) <= {"inserted", "skipped" if mode == "skip" else "replaced", "skipped"}


@pytest.mark.parametrize("until", ["end", "start"])
@pytest.mark.parametrize("mode", MODES)
def test_producers_and_workers_at_once_never_see_an_error_or_two_waiting_jobs(
    session: Session, open_session: OpenSession, mode: OnConflict, until: str
) -> None:
    producers, workers, watchers = Crowd(open_session), Crowd(open_session), Crowd(open_session)

    def produce(producer: Session, seen: Counter[str]) -> None:
        parameters = {"on_conflict": mode, "unique_until": until, "delay_seconds": delay_of(mode)}
        key = f"u{random.randrange(3)}"
        try:
            seen[producer.call("enqueue_one", task="t", unique_key=key, **parameters)[0].outcome] += 1
        except psycopg.errors.UniqueViolation:
            if mode != "reject":
                raise
            seen[REFUSED] += 1

    def work(worker: Session, seen: Counter[str]) -> None:
        worker.call("promote")
        attempts = worker.claim(max_jobs=2)
        work_for_a_moment()
        for attempt in attempts:
            getattr(worker, random.choice(["complete", "complete", "release"]))(attempt)
            seen["ended"] += 1

    def watch(watcher: Session, seen: Counter[str]) -> None:
        seen["looks"] += 1
        if until == "end":
            live = "SELECT count(*) > 3 FROM pgqueue.jobs"
        else:  # one that was given back has lost its key, and is none of them
            live = "SELECT count(*) > 3 FROM pgqueue.jobs WHERE unique_key IS NOT NULL"
        seen["too many"] += watcher.one(live)
        seen["runs with its key"] += watcher.one(
            "SELECT count(*) FROM pgqueue.jobs WHERE state = 'running' AND unique_key IS NOT NULL"
        )

    producers.add(produce, 12)
    workers.add(work, 3)
    watchers.add(watch)
    wait_until(lambda: session.one("SELECT count(*) FROM pgqueue.finished_jobs") > 200, 240)
    watchers.work(0, until_seen=("looks", *(["runs with its key"] if until == "end" else [])))
    producers.stop()
    wait_until(lambda: session.one("SELECT count(*) FROM pgqueue.jobs") == 0, 120)
    workers.stop()
    watchers.stop()

    seen = producers.seen + workers.seen + watchers.seen
    assert {name for name in seen if name.startswith("error")} == set()
    assert seen["too many"] == 0
    assert until == "end" or seen["runs with its key"] == 0
    # Each that was inserted has ended, once.
    assert session.one("SELECT count(DISTINCT id) FROM pgqueue.finished_jobs") == seen["inserted"]
