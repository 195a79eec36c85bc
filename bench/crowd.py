"""An application of ten thousand tasks."""

from __future__ import annotations

import pgqueue
from bench.jobs import recorder

TASKS = 10_000

app = pgqueue.App()


async def _counted(i: int) -> None:
    recorder().hit(i)


for number in range(TASKS):
    app.task(name=f"task_{number}")(_counted)
