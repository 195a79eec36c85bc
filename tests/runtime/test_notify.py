"""When the watchdog is fed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from pgqueue.runtime.notify import Notifier


def heard(folder: Path, *, is_well: bool, **environment: str) -> list[str]:
    """Give what is said within a few periods of the watchdog."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(folder / "notify"))
        listener.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": str(folder / "notify"), **environment})

        async def report() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await notifier.report(lambda: "fine", lambda: is_well)

        asyncio.run(report())
        lines: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                lines += listener.recv(4096).decode().splitlines()
        return lines


@pytest.mark.parametrize(
    ("is_well", "environment", "is_fed"),
    [
        (True, {"WATCHDOG_USEC": "20000"}, True),
        (True, {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}, True),
        (True, {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}, False),
        (False, {"WATCHDOG_USEC": "20000"}, False),
        (True, {}, False),
    ],
)
def test_the_watchdog_is_fed_if_it_is_ours_and_all_is_well(
    tmp_path_factory: pytest.TempPathFactory, is_well: bool, environment: dict[str, str], is_fed: bool
) -> None:
    lines = heard(tmp_path_factory.mktemp("n"), is_well=is_well, **environment)

    assert lines.count("STATUS=fine") == 1
    assert (lines.count("WATCHDOG=1") >= 2) == is_fed
    assert is_fed or "WATCHDOG=1" not in lines
