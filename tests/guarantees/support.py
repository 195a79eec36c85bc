"""Many clients at once, and what must never be seen meanwhile."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

from tests.sql.support import OpenSession, Session
from tests.support import wait_until

# Blocked jobs that nobody would wake: their key has a free slot, and their queue no ready job of it.
STUCK = """
SELECT count(*)
FROM (
    SELECT DISTINCT ON (b.concurrency_key, b.queue) b.concurrency_key, b.queue, b.concurrency_limit
    FROM pgqueue.jobs AS b
    WHERE b.state = 'blocked'
    ORDER BY b.concurrency_key, b.queue, b.priority, b.run_at, b.id
) AS b
WHERE b.concurrency_limit > (
    SELECT count(*) FROM pgqueue.jobs AS r WHERE r.concurrency_key = b.concurrency_key AND r.state = 'running'
)
AND NOT EXISTS (
    SELECT FROM pgqueue.jobs AS r
    WHERE r.concurrency_key = b.concurrency_key AND r.queue = b.queue AND r.state = 'ready'
)
"""

OVER_LIMIT = """
SELECT count(*)
FROM (
    SELECT FROM pgqueue.jobs AS j
    WHERE j.state = 'running' AND j.concurrency_key IS NOT NULL
    GROUP BY j.concurrency_key
    HAVING count(*) > max(j.concurrency_limit)
) AS over
"""


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, all at once, and give what they return; their errors are raised."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        start.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def waits_for_a_lock(watcher: Session, session: Session) -> bool:
    return watcher.one(
        "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s",
        session.connection.info.backend_pid,
    )


FIFTY_TRIES = "tries >= 50"


@contextlib.contextmanager
def patient_unblock(session: Session, tries: int = 2_000) -> Iterator[None]:
    """Let unblock try for seconds, not for 50 ms: on a busy machine a claim may hold a row for longer.

    What it gives up is for the sweep, which does not run here.
    """
    definition: str = session.one("SELECT pg_get_functiondef('pgqueue.unblock'::regproc)")
    assert FIFTY_TRIES in definition
    session.connection.execute(definition.replace(FIFTY_TRIES, f"tries >= {tries}"))
    try:
        yield
    finally:
        session.connection.execute(definition)


class Crowd:
    """Clients that each do one thing over and over until they are stopped, and count what happens to them.

    A client whose backend was killed comes back. Errors of the database are counted under their code.
    """

    def __init__(self, open_session: OpenSession) -> None:
        self._open = open_session
        self._counts: list[Counter[str]] = []  # one a client: two would lose each other's
        self._threads: list[tuple[threading.Thread, threading.Event]] = []

    def add(self, step: Callable[[Session, Counter[str]], None], count: int = 1) -> threading.Event:
        """Add clients; the event stops them."""
        stop = threading.Event()
        for _ in range(count):
            mine: Counter[str] = Counter()
            self._counts.append(mine)
            thread = threading.Thread(target=self._run, args=(step, stop, mine), daemon=True)
            self._threads.append((thread, stop))
            thread.start()
        return stop

    @property
    def seen(self) -> Counter[str]:
        """What they have counted so far, all together."""
        seen: Counter[str] = Counter()
        for mine in self._counts:
            seen.update(mine.copy())
        return seen

    def work(self, seconds: float, until_seen: Iterable[str]) -> None:
        """Let them go on for so long at least, and until each of these has been seen."""
        end, names = time.monotonic() + seconds, list(until_seen)

        def is_done() -> bool:
            seen = self.seen
            return time.monotonic() > end and all(seen[name] > 0 for name in names)

        wait_until(is_done, seconds + 240, f"{names} are seen")

    def stop(self) -> None:
        for _, stop in self._threads:
            stop.set()
        for thread, _ in self._threads:
            thread.join()

    def _run(
        self, step: Callable[[Session, Counter[str]], None], stop: threading.Event, mine: Counter[str]
    ) -> None:
        session = None
        while not stop.is_set():
            try:
                if session is None or session.connection.closed:
                    session = self._open(application_name="crowd")
                    session.rows("SET synchronous_commit = off")
                step(session, mine)
            except psycopg.Error as error:
                mine[f"error {error.sqlstate or type(error).__name__}"] += 1
                if session is not None and session.connection.broken:
                    session.connection.close()


def work_for_a_moment(most_seconds: float = 0.004) -> None:
    """Stand for the handler of a job."""
    time.sleep(random.random() * most_seconds)


def most_in_any(seconds: float, instants: list[float]) -> int:
    """Give the largest number of instants that lie within so many seconds."""
    ordered = sorted(instants)
    most = first = 0
    for place, instant in enumerate(ordered):
        while instant - ordered[first] >= seconds:
            first += 1
        most = max(most, place - first + 1)
    return most
