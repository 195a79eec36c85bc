"""pgqueue, measured as the others are; its worker is the command that everybody runs."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pgqueue
from bench.jobs import counted
from bench.peers import adapter
from pgqueue import migrate


async def setup() -> None:
    migrate.upgrade(os.environ["PGQUEUE_DSN"])


class Producer:
    def __init__(self, client: pgqueue.AsyncClient) -> None:
        self._client = client

    async def one(self, job: adapter.Job) -> None:
        await self._client.enqueue(counted.job(**job))

    async def many(self, jobs: list[adapter.Job]) -> None:
        await self._client.enqueue_many([counted.job(**job) for job in jobs])


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    client = pgqueue.AsyncClient()
    yield Producer(client)
    await client.aclose()


if __name__ == "__main__":
    adapter.main(sys.modules[__name__])
