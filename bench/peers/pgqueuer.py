"""pgqueuer, with asyncpg; at its best with a pool and larger batches."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, PgQueuer, Queries

from bench.peers import adapter


async def setup() -> None:
    connection = await asyncpg.connect()
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


class Producer:
    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def one(self, job: adapter.Job) -> None:
        await self._queries.enqueue("counted", json.dumps(job).encode())

    async def many(self, jobs: list[adapter.Job]) -> None:
        payloads: list[bytes | None] = [json.dumps(job).encode() for job in jobs]
        await self._queries.enqueue(["counted"] * len(jobs), payloads, [0] * len(jobs))


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    connection = await asyncpg.connect()
    yield Producer(Queries(AsyncpgDriver(connection)))
    await connection.close()


async def work(setting: str, handle: adapter.Handle) -> None:
    if setting == "best":
        queue = PgQueuer.from_asyncpg_pool(await asyncpg.create_pool(min_size=4, max_size=8))
    else:
        queue = PgQueuer.from_asyncpg_connection(await asyncpg.connect())

    @queue.entrypoint("counted")
    async def counted(job: Any) -> None:
        handle(**json.loads(job.payload))

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, queue.shutdown.set)
    await queue.run(**({"batch_size": 100} if setting == "best" else {}))


if __name__ == "__main__":
    if "best" in sys.argv:
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    adapter.main(sys.modules[__name__])
