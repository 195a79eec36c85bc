"""What a child process has said is heard, whatever becomes of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pgqueue.runtime.children import Child, ChildProcess
from pgqueue.runtime.execution import Ended
from tests.support import wait_until

LOOPS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {"asyncio": asyncio.run}
try:
    import uvloop
except ImportError:
    pass
else:
    LOOPS["uvloop"] = uvloop.run


class Ear:
    """Hears what a child says."""

    def __init__(self) -> None:
        self.is_ready = asyncio.Event()
        self.ended: list[int] = []

    def child_ready(self, child: Child) -> None:
        self.is_ready.set()

    def child_failed(self, child: Child, message: str, details: str) -> None:
        raise AssertionError(message)

    def attempts_ended(
        self, pool: int, serials: list[int], seconds: list[float], others: list[Ended]
    ) -> None:
        self.ended += [*serials, *(serial for serial, _, _ in others)]

    def progress_made(self, progress: list[tuple[int, dict[str, Any]]]) -> None:
        raise AssertionError("nobody makes progress here")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("is_written_to", [False, True])
def test_what_a_child_reported_before_it_died_is_heard_though_it_was_sent_more(
    loop: str, is_written_to: bool
) -> None:
    def send(child: ChildProcess, serial: int) -> None:
        child.run(0, serial, [(serial, 1, "nothing", "{}", 300.0, 5, 0, None, None)], "default", "token")

    async def live_and_die() -> None:
        ear = Ear()
        child = ChildProcess(
            0,
            [1],
            ear,
            app="tests.process.jobs:app",
            environment=os.environ,
            log_format="key-value",
            log_level="info",
            worker_id="0" * 8,
        )
        try:
            await child.connect()
            await ear.is_ready.wait()
            send(child, 1)
            # Without giving the loop a turn: it is busy with a large claim, say.
            wait_until(lambda: has_something_to_read(child), message="the child reports")
            os.kill(child.pid or 0, signal.SIGKILL)
            wait_until(lambda: child._process.poll() is not None, message="the child is dead")
            if is_written_to:
                send(child, 2)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

            assert "killed by signal 9" in (child.exit_reason() or "")
            assert ear.ended == [1]
        finally:
            child.close()

    LOOPS[loop](live_and_die())


def has_something_to_read(child: ChildProcess) -> bool:
    try:
        return bool(child._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False
