"""An application with many tasks in many queues."""

from __future__ import annotations

import os

import pgqueue

QUEUES = int(os.environ.get("PGQUEUE_BENCH_QUEUES", "200"))
TASKS = int(os.environ.get("PGQUEUE_BENCH_TASKS", "300"))

app = pgqueue.App()


def _add(number: int) -> None:
    @app.task(name=f"task_{number}", queue=f"queue_{number % QUEUES}")
    async def nothing() -> None: ...


for each in range(TASKS):
    _add(each)
