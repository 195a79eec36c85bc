"""A producer: asks for jobs in every way there is, and writes down what it was answered.

`python -m tests.faults.producer NUMBER SEED JOBS_PER_SECOND`; the DSN and the folder come in the
environment. It never repeats a request: what was asked for once must not be there twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

import pgqueue
from pgqueue.model.job import NewJob
from tests.faults.jobs import app, was_refused
from tests.faults.journal import Journal

QUEUES = ("default", "more")
SINGLE_KEYS = [f"k{number}" for number in range(6)]
SHARED_KEYS = [f"s{number}" for number in range(3)]
SHARED_LIMIT = 3
CROSSED_KEYS = ("left", "right")
ORDERS = 30

# (weight, task, arguments but for the mark, options)
_Choice = tuple[
    float, str, Callable[[random.Random], dict[str, Any]], Callable[[random.Random], dict[str, Any]]
]


def _nothing(_: random.Random) -> dict[str, Any]:
    return {}


def _shared(rng: random.Random) -> dict[str, Any]:
    return {"concurrency_key": f"shared:{rng.choice(SHARED_KEYS)}", "concurrency_limit": SHARED_LIMIT}


def _crossed(rng: random.Random) -> dict[str, Any]:
    first, second = rng.sample(CROSSED_KEYS, 2)
    return {"first": first, "second": second}


MENU: tuple[_Choice, ...] = (
    (26, "touch", _nothing, _nothing),
    (10, "touch_async", _nothing, _nothing),
    (6, "touch", _nothing, lambda rng: {"delay_seconds": rng.uniform(0.1, 3.0)}),
    (4, "touch", _nothing, lambda rng: {"priority": rng.randrange(1, 4)}),
    (6, "sleep", lambda rng: {"seconds": rng.uniform(0.02, 0.5)}, _nothing),
    (1, "work_long", lambda rng: {"seconds": rng.uniform(0.5, 4.0)}, _nothing),
    (16, "count", lambda rng: {"key": rng.choice(SINGLE_KEYS)}, _nothing),
    (10, "share", lambda rng: {"key": rng.choice(SHARED_KEYS)}, _shared),
    (4, "refresh", lambda rng: {"name": f"n{rng.randrange(8)}"}, _nothing),
    (3, "refresh", lambda rng: {"name": f"n{rng.randrange(8)}"}, lambda _: {"on_conflict": "replace"}),
    (6, "pay", _nothing, _nothing),
    (3, "pay_async", _nothing, _nothing),
    (3, "charge", lambda rng: {"order": rng.randrange(ORDERS)}, _nothing),
    (2, "enqueue_others", _nothing, _nothing),
    (4, "fail_at_first", lambda rng: {"times": rng.randrange(1, 4)}, _nothing),
    (2, "fail_always", _nothing, _nothing),
    (1, "give_up", _nothing, _nothing),
    (3, "snooze_at_first", _nothing, _nothing),
    (1, "carry", lambda rng: {"load": "x" * rng.randrange(1_000, 200_000)}, _nothing),
    (1, "embrace", _crossed, _nothing),
    (1, "exit_python", _nothing, _nothing),
    # Each of these costs a process, and to start another one takes most of a second.
    (0.15, "hang_at_first", _nothing, _nothing),
    (0.1, "refuse_to_stop", _nothing, _nothing),
    (0.15, "die_at_first", _nothing, _nothing),
    (0.1, "die", _nothing, _nothing),
    (0.7, "hold_the_gil", lambda rng: {"microseconds": rng.randrange(100_000, 1_200_000)}, _nothing),
    (0.7, "block_the_loop", lambda rng: {"seconds": rng.uniform(0.05, 0.6)}, _nothing),
)
# What no handler can take: arguments that do not fit, a number that no decoder takes, nesting without
# end, a task that nobody knows. Only SQL lets them in.
HOSTILE: tuple[tuple[str, str], ...] = (
    ("touch", '{"mark": "%s", "unknown": 1}'),
    ("touch", '{"mark": "%s", "number": 1e5000}'),
    ("touch", '{"mark": "%s", "deep": ' + "[" * 3000 + "]" * 3000 + "}"),
    ("nobody_knows_this", '{"mark": "%s"}'),
)


class Producer:
    """Asks at a steady pace until told to stop; survives whatever the database does."""

    def __init__(self, number: int, seed: int, jobs_per_second: float) -> None:
        folder = Path(os.environ["FAULTS_FOLDER"])
        earlier_lives = len(list(folder.glob(f"producer-{number}-*.journal")))
        self._rng = random.Random(f"{seed}:{number}:{earlier_lives}")
        self._journal = Journal(folder, f"producer-{number}")
        self._pause = 1 / jobs_per_second
        self._connection: psycopg.Connection[Any] | None = None
        self._is_stopping = False
        # One of each, and then as it comes.
        self._first = [] if earlier_lives else self._rng.sample(MENU, len(MENU))

    def stop(self) -> None:
        self._is_stopping = True

    def run(self) -> None:
        rng = self._rng
        ways = (self._insert, self._call, self._enqueue, self._enqueue_many, self._insert_hostile)
        due_at = time.monotonic()
        while not self._is_stopping:
            way = rng.choices(ways, (20, 15, 40, 6, 0.7))[0]
            jobs = 1 if way != self._enqueue_many else rng.randrange(2, 16)
            chosen = [self._choose() for _ in range(jobs)]
            marks = [self._journal.mark() for _ in chosen]
            self._journal.intend(*marks)
            try:
                ids = way(chosen, marks)
            except (pgqueue.DatabaseUnreachable, pgqueue.InvalidJob):
                self._journal.refuse(*marks)
                time.sleep(rng.uniform(0.05, 0.3))
            except psycopg.Error as error:
                if was_refused(error):
                    self._journal.refuse(*marks)
                if self._connection is not None and self._connection.broken:
                    self._connection = None
                time.sleep(rng.uniform(0.05, 0.3))
            else:
                self._journal.acknowledge(marks, ids)
            due_at = max(due_at + self._pause * jobs, time.monotonic() - 1.0)
            while not self._is_stopping and (left := due_at - time.monotonic()) > 0:
                time.sleep(min(left, 0.2))

    def _choose(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        weights = [choice[0] for choice in MENU]
        _, task, args, options = self._first.pop() if self._first else self._rng.choices(MENU, weights)[0]
        return task, args(self._rng), {"queue": self._rng.choice(QUEUES), **options(self._rng)}

    # The ways to ask for a job. Each gives the ids it was answered.

    def _own(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            try:
                self._connection = psycopg.connect(
                    os.environ["PGQUEUE_DSN"],
                    autocommit=True,
                    connect_timeout=3,
                    application_name="producer",
                )
            except psycopg.Error as error:
                raise pgqueue.DatabaseUnreachable(str(error)) from None
        return self._connection

    def _insert(self, chosen: list[Any], marks: list[str]) -> list[int]:
        """As any program in any language: the columns it knows, the rest from the task's definition."""
        ((task, args, options),) = chosen
        if task == "refresh":  # a plain INSERT of a unique key that is taken is an error, not an answer
            return self._call(chosen, marks)
        delay = options.pop("delay_seconds", None)
        if delay is not None:
            return self._call([(task, args, {**options, "delay_seconds": delay})], marks)
        columns = ["task", "args", *options]
        row = self._own().execute(
            f"INSERT INTO pgqueue.jobs ({', '.join(columns)}) "
            f"VALUES ({', '.join(['%s'] * len(columns))}) RETURNING id",
            [task, json.dumps({"mark": marks[0], **args}), *options.values()],
        )
        return [row.fetchone()[0]]  # type: ignore[index]

    def _insert_hostile(self, _: list[Any], marks: list[str]) -> list[int]:
        task, args = self._rng.choice(HOSTILE)
        row = self._own().execute(
            "INSERT INTO pgqueue.jobs (task, args, queue) VALUES (%s, %s, %s) RETURNING id",
            [task, args % marks[0], QUEUES[0]],
        )
        return [row.fetchone()[0]]  # type: ignore[index]

    def _call(self, chosen: list[Any], marks: list[str]) -> list[int]:
        ((task, args, options),) = chosen
        names = "".join(f", {name} => %s" for name in options)
        row = self._own().execute(
            f"SELECT pgqueue.enqueue(%s, %s::jsonb{names})",
            [task, json.dumps({"mark": marks[0], **args}), *options.values()],
        )
        return [row.fetchone()[0]]  # type: ignore[index]

    def _enqueue(self, chosen: list[Any], marks: list[str]) -> list[int]:
        ((task, args, options),) = chosen
        return [app.enqueue(task, {"mark": marks[0], **args}, **options).job_id]

    def _enqueue_many(self, chosen: list[Any], marks: list[str]) -> list[int]:
        jobs: list[NewJob] = [
            app.new_job(task, {"mark": mark, **args}, **options)
            for (task, args, options), mark in zip(chosen, marks, strict=True)
        ]
        return [handle.job_id for handle in app.enqueue_many(jobs)]


def main() -> None:
    producer = Producer(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    signal.signal(signal.SIGTERM, lambda *_: producer.stop())
    print(json.dumps({"event": "producer started"}), flush=True)
    producer.run()


if __name__ == "__main__":
    main()
