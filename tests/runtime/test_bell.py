"""The listening session: who hears a ring, how often at most, and who looks after everybody."""

from __future__ import annotations

import asyncio
import time
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
        await bell.rest(bell.watches["a"])
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

        await bell.look_after_session()

        assert await bell.run(show) >= 120

    with_bell(fast_dsn, 60.0, test)


def ring(dsn: str, payload: str = "") -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SELECT pg_notify(pgqueue.bell_channel('a'), %s)", [payload])


async def hears(bell: Bell, wake: asyncio.Event, seconds: float) -> bool:
    """Say whether the worker would wake within that time."""
    bell.watch_socket()
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        return False
    finally:
        bell.unwatch_socket()
        wake.clear()
    return True


def test_of_the_idle_only_who_watches_hears_an_insert_and_everybody_hears_that_there_is_more(
    fast_dsn: str,
) -> None:
    async def test(bell: Bell, wake: asyncio.Event) -> None:
        ring(fast_dsn)
        ring(fast_dsn, "more")
        assert await hears(bell, wake, 60)
        assert await bell.take_rings() == [bell.watches["a"]]

        ring(fast_dsn)
        await bell.rest(bell.watches["b"])
        assert not wake.is_set()

        await bell.rest(bell.watches["a"])
        ring(fast_dsn)
        assert await hears(bell, wake, 60)

    with_bell(fast_dsn, 1.0, test)


def test_a_storm_of_rings_for_nothing_is_heeded_a_few_times_a_second_and_a_find_ends_that(
    fast_dsn: str,
) -> None:
    async def test(bell: Bell, wake: asyncio.Event) -> None:
        watch = bell.watches["a"]
        await bell.rest(watch)
        began_at, heeded = time.monotonic(), 0
        while (seconds := time.monotonic() - began_at) < 2 or (heeded < 3 and seconds < 60):
            await asyncio.to_thread(ring, fast_dsn)
            if await hears(bell, wake, 0.01):
                heeded += len(await bell.take_rings())
        # 0.01 s after the first, twice that after the next, then 4 a second.
        assert 3 <= heeded <= 8 + 4 * (time.monotonic() - began_at)

        watch.note_found()
        watch.deaf_until = 0.0
        await asyncio.to_thread(ring, fast_dsn)
        assert await hears(bell, wake, 60)
        assert await bell.take_rings() == [watch]
        assert watch.step == 0

    with_bell(fast_dsn, 1.0, test)


def test_a_ring_that_has_to_wait_is_heeded_when_its_time_has_come(fast_dsn: str) -> None:
    async def test(bell: Bell, wake: asyncio.Event) -> None:
        watch = bell.watches["a"]
        await bell.rest(watch)
        for _ in range(8):
            watch.is_rung = True
            watch.deaf_until = 0.0
            watch.heed(time.monotonic())
        await asyncio.to_thread(ring, fast_dsn)

        assert await hears(bell, wake, 60)
        assert await bell.take_rings() == [watch]

    with_bell(fast_dsn, 1.0, test)


def test_three_workers_look_after_everybody_and_who_stands_by_takes_a_place_that_is_left(
    fast_dsn: str,
) -> None:
    async def body() -> None:
        bells = [
            Bell(fast_dsn, "pgqueue", Outage(Log("test")), ["a"], asyncio.Event(), 0.05) for _ in range(5)
        ]
        for bell in bells:
            await bell.connect()
            await bell.look_after_session()
        assert [bell.is_maintainer for bell in bells] == [True, True, True, False, False]
        assert [bell.reaps.is_set() for bell in bells] == [True, True, True, True, False]

        await bells[1].close()

        async with asyncio.timeout(120):
            while not (bells[3].is_maintainer and bells[4].reaps.is_set()):
                for bell in bells[3:]:
                    await bell.connect()
                    await bell.look_after_session()
                await asyncio.sleep(0.05)
        assert not bells[1].reaps.is_set()
        assert not bells[4].is_maintainer
        for bell in bells:
            await bell.close()

    asyncio.run(body())


def test_idle_workers_that_need_not_watch_look_the_more_seldom_the_more_there_are(fast_dsn: str) -> None:
    async def test(bell: Bell, _wake: asyncio.Event) -> None:
        looks_a_second = {}
        for workers in (2, 10, 100, 1000):
            bell.workers = workers
            looks_a_second[workers] = workers / bell.poll_seconds

        assert all(looks < 4 for workers, looks in looks_a_second.items() if workers <= 100)
        assert bell.poll_seconds == 30
        await bell.rest(bell.watches["a"])
        assert bell.poll_seconds == 1

    with_bell(fast_dsn, 1.0, test)
