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
    """The blocking client, which is what most programs have; this one has nothing else to do meanwhile."""

    def __init__(self, client: pgqueue.Client) -> None:
        self._client = client

    async def one(self, job: adapter.Job) -> None:
        self._client.enqueue(counted.job(**job))

    async def many(self, jobs: list[adapter.Job]) -> None:
        self._client.enqueue_many([counted.job(**job) for job in jobs])


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    client = pgqueue.Client()
    yield Producer(client)
    client.close()


if __name__ == "__main__":
    adapter.main(sys.modules[__name__])
