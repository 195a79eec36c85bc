"""Waking up: a session that listens, and the two advisory keys that say who sleeps.

An insert rings only when it might be overlooked: while a worker holds the queue's BELL. Of the
idle workers of a queue one has DUTY and watches, the others just listen. Polling stays the
guarantee; the bell only makes it quick. `coordination` in the database's own files tells why no
wake-up is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from pgqueue.database import AsyncConnection, Error, arun
from pgqueue.runtime.link import DatabaseBusy, DatabaseLost, Link, Outage, T
from pgqueue.sql import Statement, presence

# A frozen worker must not keep the bell: every insert would ring for nobody. Queries reset this,
# notifications do not, hence the ping with every idle poll.
_FROZEN_SECONDS = 10.0
_PING_SECONDS = 3.0

# Seconds between claims of a queue that has just run empty, before its worker goes to sleep.
GLOW = (0.001, 0.002, 0.002, 0.003, 0.004, 0.005, 0.005, 0.005)
# And while an insert is in flight: from here, growing by half, to there.
_WATCH_SECONDS = 0.008
_LONGEST_WATCH_SECONDS = 0.05


class Watch:
    """Where this worker stands with one queue."""

    __slots__ = ("channel", "is_asleep", "on_duty", "queue", "step")

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.channel = ""
        self.on_duty = False
        self.is_asleep = False
        self.step = 0

    def forget(self) -> None:
        """Take note that the session is gone, and with it whatever it held."""
        self.on_duty = self.is_asleep = False

    def pause_seconds(self) -> float:
        """Give the time to the next claim, while on duty and awake."""
        if self.step < len(GLOW):
            return GLOW[self.step]
        return min(_LONGEST_WATCH_SECONDS, _WATCH_SECONDS * 1.5 ** (self.step - len(GLOW)))


class Bell(Link):
    """The listening session of a worker. Used by one task only."""

    def __init__(
        self,
        dsn: str,
        schema: str,
        outage: Outage,
        queues: Sequence[str],
        wake: asyncio.Event,
        poll_seconds: float,
    ) -> None:
        patience = max(_FROZEN_SECONDS, 3 * poll_seconds)
        super().__init__(dsn, schema, "listen", outage, {"idle_session_timeout": f"{patience:.0f}s"})
        self._next_ping_at = 0.0
        self.watches = {queue: Watch(queue) for queue in queues}
        self._rung: set[str] = set()
        self._wake = wake
        self._descriptor: int | None = None

    async def prepare(self, connection: AsyncConnection[Any]) -> None:
        """Listen first; whoever connects claims next. The other order would miss what came between."""
        channels = await arun(connection, presence.bell_channels(list(self.watches)), self._schema)
        connection.add_notify_handler(lambda notify: self._note_ring(notify.channel))
        for watch in self.watches.values():
            watch.forget()
            watch.channel = channels[watch.queue]
            await arun(connection, presence.listen(watch.channel), self._schema)

    @property
    def is_on_duty(self) -> bool:
        return any(watch.on_duty for watch in self.watches.values())

    def _note_ring(self, channel: str) -> None:
        # A ring can come along with the answer to a statement: then the socket will not tell of it.
        self._rung.add(channel)
        self._wake.set()

    async def run(self, statement: Statement[T]) -> T:
        try:
            answer = await super().run(statement)
        except DatabaseBusy:
            # A session lock that was taken just before would stay, and nobody would know.
            await self.close()
            raise
        self._next_ping_at = time.monotonic() + _PING_SECONDS
        return answer

    async def rest(self, watch: Watch) -> str:
        """After an empty claim: take the watch, go to sleep, or learn that another one watches."""
        answer = await self.run(
            presence.rest(watch.queue, on_duty=watch.on_duty, may_sleep=watch.step >= len(GLOW))
        )
        watch.on_duty = answer != "off"
        watch.is_asleep = answer == "asleep"
        return answer

    async def rise(self, watch: Watch, *, leaves_duty: bool = False, rings: bool = False) -> None:
        """Be awake again; with `leaves_duty` another idle worker may take over."""
        was_asleep, leaves = watch.is_asleep, leaves_duty and watch.on_duty
        if not (was_asleep or leaves):
            return
        watch.is_asleep = False
        if leaves:
            watch.on_duty = False
        await self.run(
            presence.rise(watch.queue, was_asleep=was_asleep, leaves_duty=leaves, rings=leaves and rings)
        )

    def watch_socket(self) -> None:
        """Have the loop set the wake event when anything arrives; undo before running a statement."""
        if self.connection is not None and not self.connection.closed:
            self._descriptor = self.connection.fileno()
            asyncio.get_running_loop().add_reader(self._descriptor, self._wake.set)

    def unwatch_socket(self) -> None:
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = None

    async def take_rings(self) -> list[Watch]:
        """Read what has arrived and give the watches that were rung for.

        Raises:
            DatabaseLost: the session is gone.
        """
        connection = self.connection
        if connection is None or connection.closed:
            raise DatabaseLost
        try:
            connection.pgconn.consume_input()
            while (notify := connection.pgconn.notifies()) is not None:
                self._rung.add(notify.relname.decode())
        except Error as error:
            await self._lose(error, self._heard_at)
            raise DatabaseLost from error
        rung, self._rung = self._rung, set()
        return [watch for watch in self.watches.values() if watch.channel in rung]

    async def ping(self) -> None:
        """Show the server that this session is not frozen, if nothing else did lately."""
        if time.monotonic() >= self._next_ping_at:
            await self.run(presence.ping())

    async def close(self) -> None:
        self.unwatch_socket()
        for watch in self.watches.values():
            watch.forget()
        await super().close()
