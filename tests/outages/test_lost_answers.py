"""The answer to a commit gets lost on its way: what was committed counts, once, and is known to count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgqueue
from tests.faults.proxy import Proxy
from tests.outages.support import LOST, Crew, Node
from tests.process.support import Queue


class _Overheard:
    """One side of a connection, read through somebody who listens."""

    def __init__(self, source: asyncio.StreamReader, listen: Any) -> None:
        self._source = source
        self._listen = listen

    async def read(self, count: int) -> bytes:
        chunk = await self._source.read(count)
        await self._listen(chunk)
        return chunk


class ForgetfulProxy(Proxy):
    """A way to the server that loses, or keeps back, the answer to the next question that has a word."""

    def __init__(self, server: Callable[[], str]) -> None:
        self._word = b""
        self._keeps_until: Callable[[], bool] | None = None
        self._asking: set[Any] = set()
        super().__init__(server)

    def lose_answer_to(self, word: str) -> None:
        self._word = word.encode()

    def keep_answer_to(self, word: str, until: Callable[[], bool]) -> None:
        self._keeps_until = until
        self._word = word.encode()

    async def _pump(self, pair: Any, source: Any, sink: Any, *, is_answer: bool) -> None:
        async def listen(chunk: bytes) -> None:
            if not is_answer and self._word and self._word in chunk:
                self._word = b""
                self._asking.add(pair)
            elif is_answer and chunk and pair in self._asking:
                # What is not in a transaction of its client's is answered when it has been committed.
                self._asking.discard(pair)
                if self._keeps_until is not None:
                    while not await asyncio.to_thread(self._keeps_until):
                        await asyncio.sleep(0.01)
                    return
                self.answers_lost += 1
                raise ConnectionAbortedError

        await super()._pump(pair, _Overheard(source, listen), sink, is_answer=is_answer)


@pytest.fixture
def proxy(node: Node) -> Iterator[ForgetfulProxy]:
    made = ForgetfulProxy(lambda: node.socket)
    yield made
    made.close()


@pytest.fixture
def dsn(node: Node, proxy: ForgetfulProxy) -> str:
    return make_conninfo(node.app_dsn, host="127.0.0.1", port=proxy.port)


@pytest.mark.parametrize(
    ("task", "function", "event", "state", "attempts"),
    [
        ("work", "complete", "job succeeded", "succeeded", 1),
        ("fail_first", "fail_many", "job failed, will retry", "succeeded", 2),
        ("fail", "fail_many", "job dead", "dead", 1),
        ("snooze_first", "release", "job snoozed", "succeeded", 1),
    ],
)
def test_an_outcome_whose_answer_got_lost_counts_once_and_is_not_taken_for_a_lost_claim(
    task: str,
    function: str,
    event: str,
    state: str,
    attempts: int,
    node: Node,
    proxy: ForgetfulProxy,
    dsn: str,
    tmp_path: Path,
) -> None:
    crew = Crew(dsn, tmp_path)
    with closing(Queue(node.admin_dsn)) as queue, crew.start(1) as (started,):
        proxy.lose_answer_to(f"pgqueue.{function}")
        job = queue.insert(task)

        queue.wait_for_state(job, state)
        (line,) = started.wait_for(event)[:1]

        assert proxy.answers_lost == 1
        assert line["job_id"] == job
        assert started.lines("claim lost") == []
        assert len(started.lines(LOST)) == 1
        assert len(crew.starts_of(job)) == (1 if task in ("work", "fail") else 2)
        table = "dead_jobs" if state == "dead" else "finished_jobs"
        assert queue.all(f"SELECT attempt, crashes FROM pgqueue.{table}") == [(attempts, 0)]
        assert started.stop() == 0
        (ended,) = started.lines("worker ended")
        assert ended["lost"] == 0
        snoozed = 1 if task == "snooze_first" else 0
        assert ended["claimed"] == ended["succeeded"] + ended["failed"] + ended["dead"] + snoozed


def test_an_end_that_is_heard_of_after_the_next_claim_of_its_job_is_no_lost_claim(
    node: Node, proxy: ForgetfulProxy, dsn: str, tmp_path: Path
) -> None:
    crew = Crew(dsn, tmp_path)
    with closing(Queue(node.admin_dsn)) as queue, crew.start(1) as (started,):
        # The second attempt has begun when the worker gets to know that the first one's end is written.
        proxy.keep_answer_to("pgqueue.fail_many", lambda: len(crew.effects()) == 2)
        job = queue.insert("fail_first_and_try_again_at_once")

        queue.wait_for_state(job, "succeeded")
        (line,) = started.wait_for("job failed, will retry")

        assert line["attempt"] == 1
        assert started.lines("claim lost") == []
        assert started.stop() == 0
        (ended,) = started.lines("worker ended")
        assert [ended[what] for what in ("claimed", "failed", "succeeded", "lost")] == [2, 1, 1, 0]


def test_an_enqueue_whose_answer_got_lost_is_there_once_and_asking_again_by_its_key_finds_it(
    node: Node, proxy: ForgetfulProxy, dsn: str
) -> None:
    with closing(Queue(node.admin_dsn)) as queue, pgqueue.App(dsn) as app:

        @app.task(unique_key="report:{day}")
        def report(day: str) -> None:
            """Is never run here."""

        proxy.lose_answer_to("pgqueue.enqueue")
        with pytest.raises(psycopg.OperationalError) as caught:
            report.enqueue(day="monday")
        again = report.enqueue(day="monday")

        assert proxy.answers_lost == 1
        assert "may have been enqueued" in caught.value.__notes__[0]
        assert again.outcome == "skipped"
        monday = queue.all("SELECT id FROM pgqueue.jobs WHERE unique_key = 'report:monday'")
        assert monday == [(again.job_id,)]
