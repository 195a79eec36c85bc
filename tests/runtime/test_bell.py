"""The listening session: every ring is heard, and the server's patience outlasts its silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg

from pgqueue.runtime.bell import Bell
from pgqueue.runtime.link import Outage
from pgqueue.runtime.log import Log
from pgqueue.sql import Statement, first_value
from tests.support import wait_until


def with_bell(dsn: str, poll_seconds: float, test: Callable[[Bell, asyncio.Event], Awaitable[None]]) -> None:
    async def body() -> None:
        wake = asyncio.Event()
        bell = Bell(dsn, "pgqueue", Outage(Log("test")), ["a", "b"], wake, poll_seconds)
        await bell.connect()
        try:
            await test(bell, wake)
        finally:
            await bell.close()

    asyncio.run(body())


def test_a_ring_that_comes_along_with_an_answer_wakes(fast_dsn: str) -> None:
    async def test(bell: Bell, wake: asyncio.Event) -> None:
        with psycopg.connect(fast_dsn, autocommit=True) as conn:
            conn.execute("SELECT pg_notify(pgqueue.bell_channel('a'), '')")

            def is_delivered() -> bool:
                # The session's backend has told it, and waits for its next command.
                return conn.execute(
                    "SELECT wait_event = 'ClientRead' AND pg_notification_queue_usage() = 0 "
                    "FROM pg_stat_activity WHERE datname = current_database() "
                    "AND application_name = 'pgqueue worker listen'"
                ).fetchone() == (True,)

            await asyncio.to_thread(wait_until, is_delivered)
        await bell.rest(bell.watches["b"])

        assert wake.is_set()
        assert await bell.take_rings() == [bell.watches["a"]]

    with_bell(fast_dsn, 1.0, test)


def test_the_server_waits_longer_for_a_word_than_a_worker_sleeps(fast_dsn: str) -> None:
    async def test(bell: Bell, _wake: asyncio.Event) -> None:
        show = Statement(
            "SELECT extract(epoch FROM current_setting('idle_session_timeout')::interval)", {}, first_value
        )

        assert await bell.run(show) >= 120

    with_bell(fast_dsn, 60.0, test)
