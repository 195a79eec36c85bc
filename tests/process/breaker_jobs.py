"""An application whose jobs call something over loopback, behind a circuit breaker."""

from __future__ import annotations

import asyncio
import os
import socket

import pgqueue

app = pgqueue.App()

payments = app.breaker(
    "payments-api",
    min_calls=10,
    window_seconds=2,
    open_seconds=float(os.environ.get("OPEN_SECONDS", "0.5")),
    max_open_seconds=1,
    probe_seconds=float(os.environ.get("PROBE_SECONDS", "15")),
)


@app.task(breaker=payments)
def charge(port: int) -> None:
    """Call the dependency: an answer of one byte, or an error."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        if connection.recv(1) != b"+":
            raise ConnectionError("no answer")


@app.task(breaker=payments)
async def charge_slowly(port: int) -> None:
    """Call it, and take longer than a probe may be silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(2.5)
    answer = await reader.read(1)
    writer.close()
    if answer != b"+":
        raise ConnectionError("no answer")


@app.task(breaker=payments)
def refuse() -> None:
    raise pgqueue.Unrecoverable("no such account")


@app.task(breaker=payments)
async def snooze() -> None:
    raise pgqueue.Snooze(3600)


@app.task
def other() -> None:
    """Depend on nothing."""
