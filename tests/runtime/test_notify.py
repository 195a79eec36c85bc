"""When the watchdog is fed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from pgqueue.runtime.notify import Notifier


def heard(folder: Path, *, is_well: bool, feedings: int = 0, **environment: str) -> list[str]:
    """Give what is said within a few periods of the watchdog, or until it was fed so often."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(folder / "notify"))
        listener.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": str(folder / "notify"), **environment})

        lines: list[str] = []

        async def report() -> None:
            speaking = asyncio.create_task(notifier.report(lambda: "fine", lambda: is_well))
            ends_at = time.monotonic() + (60 if feedings else 0.3)
            while "STATUS=fine" not in lines or (
                time.monotonic() < ends_at and not 0 < feedings <= lines.count("WATCHDOG=1")
            ):
                await asyncio.sleep(0.01)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        lines.extend(listener.recv(4096).decode().splitlines())
            speaking.cancel()

        asyncio.run(report())
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
    folder = tmp_path_factory.mktemp("n")

    lines = heard(folder, is_well=is_well, feedings=2 if is_fed else 0, **environment)

    assert lines.count("STATUS=fine") == 1
    fed = lines.count("WATCHDOG=1")
    assert fed >= 2 if is_fed else fed == 0
