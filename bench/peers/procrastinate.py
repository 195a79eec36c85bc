"""procrastinate, with psycopg 3."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import procrastinate

from bench.peers import adapter

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"worker": {}, "pool": {}},
    "best": {"worker": {"concurrency": 16}, "pool": {"min_size": 8, "max_size": 18}},
}


def _app(handle: adapter.Handle | None = None, **pool: Any) -> tuple[procrastinate.App, Any]:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(**pool))

    @app.task(name="counted")
    async def counted(i: int, sent: float | None = None) -> None:
        if handle is not None:
            handle(i, sent)

    return app, counted


async def setup() -> None:
    app, _ = _app()
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


class Producer:
    def __init__(self, task: Any) -> None:
        self._task = task

    async def one(self, job: adapter.Job) -> None:
        await self._task.defer_async(**job)

    async def many(self, jobs: list[adapter.Job]) -> None:
        await self._task.batch_defer_async(*jobs)


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    app, task = _app()
    async with app.open_async():
        yield Producer(task)


async def work(setting: str, handle: adapter.Handle) -> None:
    app, _ = _app(handle, **SETTINGS[setting]["pool"])
    async with app.open_async():
        await app.run_worker_async(**SETTINGS[setting]["worker"])


if __name__ == "__main__":
    adapter.main(sys.modules[__name__])
