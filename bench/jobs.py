"""The application under measurement: handlers that do nothing, or as good as nothing."""

from __future__ import annotations

import asyncio
import functools
import time

import pgqueue
from bench.recorder import Recorder
from bench.work import work as do_work

app = pgqueue.App()

recorder = functools.cache(Recorder)


@app.task
async def nothing(i: int) -> None:
    """Do nothing, in the event loop."""


@app.task
def nothing_sync(i: int) -> None:
    """Do nothing, in a thread."""


@app.task
async def work(i: int, steps: int) -> None:  # noqa: ARG001  called as the others are
    """Use this processor, in Python."""
    do_work(steps)


@app.task
def work_sync(i: int, steps: int) -> None:  # noqa: ARG001  called as the others are
    """Do the same in a thread."""
    do_work(steps)


@app.task
async def counted(i: int, sent: float | None = None) -> None:
    """Leave behind that it ran."""
    recorder().hit(i, sent)


@app.task(timeout_seconds=None)
async def stuck(i: int, seconds: float = 3600.0) -> None:
    """Leave behind that it ran, and stay."""
    recorder().hit(i, time.monotonic())
    await asyncio.sleep(seconds)
