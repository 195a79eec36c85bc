"""Telling systemd how we are: its notify protocol, without its library."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

# What systemd tells this process and nobody else: a child that inherited it would speak for us.
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

_STATUS_SECONDS = 5.0


class Notifier:
    """The socket that NOTIFY_SOCKET names; without one, nothing is said."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # An @ stands for the zero byte of an address that is no file.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_seconds = _watchdog_seconds(environment) if address else None
        self._status = ""

    def say(self, *lines: str) -> None:
        """Send lines such as READY=1. Whoever does not listen does not hold us up."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)

    async def report(self, status: Callable[[], str], is_well: Callable[[], bool]) -> None:
        """Say the status when it has changed, and feed the watchdog while all is well, until cancelled.

        It runs on the loop it vouches for: a loop that stands still says nothing.
        """
        if not self._address:
            return
        watchdog = self._watchdog_seconds
        while True:
            lines = []
            if (said := status()) != self._status:
                self._status = said
                lines.append(f"STATUS={said}")
            if watchdog is not None and is_well():
                lines.append("WATCHDOG=1")
            if lines:
                self.say(*lines)
            await asyncio.sleep(_STATUS_SECONDS if watchdog is None else watchdog / 2)


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # it watches another
    try:
        return int(environment["WATCHDOG_USEC"]) / 1e6 or None
    except (KeyError, ValueError):
        return None
