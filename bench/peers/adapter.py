"""What every Python product's adapter does alike: `setup`, `enqueue`, `flow` and `worker`.

It runs in the product's own environment, hence only the standard library here. An adapter has `setup()`,
`producer()`, which gives something with `one(job)` and `many(jobs)`, and `work(setting, handle)`. A job is
`{"i": number}`, with `sent` where its start counts. PostgreSQL is where libpq's variables say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from bench.recorder import FOLDER, Recorder, seen

Job = dict[str, Any]
Handle = Callable[..., None]


class Producer(Protocol):
    async def one(self, job: Job) -> None: ...
    async def many(self, jobs: list[Job]) -> None: ...


class Adapter(Protocol):
    def setup(self) -> Awaitable[None]: ...
    def producer(self) -> AbstractAsyncContextManager[Producer]: ...
    def work(self, setting: str, handle: Handle) -> Awaitable[None]: ...


def main(adapter: Any) -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup")
    enqueue = commands.add_parser("enqueue")
    enqueue.add_argument("--jobs", type=int, required=True)
    enqueue.add_argument("--batch", type=int, default=1)
    enqueue.add_argument("--pause", type=float, help="seconds between two jobs, whose starts count then")
    enqueue.add_argument("--warm", action="store_true", help="one job more, before the clock starts")
    flow = commands.add_parser("flow")
    flow.add_argument("--seconds", type=float, required=True)
    flow.add_argument("--batch", type=int, default=100)
    flow.add_argument("--ahead", type=int, default=5000, help="jobs that wait at most")
    worker = commands.add_parser("worker")
    worker.add_argument("--setting", required=True)
    wanted = vars(parser.parse_args())
    command = wanted.pop("command")
    if command == "setup":
        asyncio.run(adapter.setup())
    elif command == "worker":
        asyncio.run(adapter.work(wanted["setting"], Recorder().hit))
    else:
        asyncio.run(_produce(adapter, _enqueue if command == "enqueue" else _flow, wanted))


async def _produce(adapter: Any, produce: Callable[..., Awaitable[int]], wanted: dict[str, Any]) -> None:
    async with adapter.producer() as producer:
        if wanted.pop("warm", False):
            await producer.one({"i": 0})
        began_at = time.monotonic()
        jobs = await produce(producer, **wanted)
        seconds = time.monotonic() - began_at
    print(json.dumps({"jobs": jobs, "seconds": seconds}), flush=True)


async def _enqueue(producer: Producer, jobs: int, batch: int, pause: float | None) -> int:
    began_at = time.monotonic()
    if batch > 1:
        for first in range(0, jobs, batch):
            await producer.many([{"i": i} for i in range(first, min(jobs, first + batch))])
        return jobs
    for i in range(jobs):
        if pause is None:
            await producer.one({"i": i})
        else:
            await asyncio.sleep(max(0.0, began_at + i * pause - time.monotonic()))
            await producer.one({"i": i, "sent": time.monotonic()})
    return jobs


async def _flow(producer: Producer, seconds: float, batch: int, ahead: int) -> int:
    """Keep jobs waiting, but not many; of each batch the first one's start counts."""
    folder = Path(os.environ[FOLDER])
    end, sent, before = time.monotonic() + seconds, 0, seen(folder).calls
    while (now := time.monotonic()) < end:
        if sent - (seen(folder).calls - before) > ahead:
            await asyncio.sleep(0.002)
            continue
        if batch == 1:
            await producer.one({"i": sent, "sent": now} if sent % 20 == 0 else {"i": sent})
        else:
            jobs: list[Job] = [{"i": sent + nth} for nth in range(batch)]
            jobs[0]["sent"] = now
            await producer.many(jobs)
        sent += batch
    return sent
