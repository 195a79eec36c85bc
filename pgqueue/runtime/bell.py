"""Waking up, and who looks after everybody: a session that listens, and the advisory keys it holds.

An insert rings only when it might be overlooked: while a worker holds the queue's BELL. Of the
idle workers of a queue one has DUTY and watches, the others just listen. Polling stays the
guarantee; the bell only makes it quick. `bell.sql` tells why no wake-up is lost.

A few of all workers hold a place of MAINTENANCE: what any worker can do for everybody, so many do,
one being enough. So a hundred idle workers cost little more than three. One more on each of a few hosts
stands by: it only looks for jobs that nobody renews, so that whoever takes all three away takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from pgqueue.database import AsyncConnection, Error, arun
from pgqueue.runtime.link import PATIENCE_SECONDS, DatabaseBusy, DatabaseLost, Link, Outage, T
from pgqueue.sql import Statement, presence

# A frozen worker must not keep the bell: every insert would ring for nobody. Queries reset this,
# notifications do not, hence the ping. Who holds nothing may be silent for longer.
_FROZEN_SECONDS = 10.0
_PING_SECONDS = 3.0
_PATIENCE = 4

# A server of its own gets so long to be there again before the jobs go on without it; and to answer, since
# they wait meanwhile.
_COME_BACK_SECONDS = 1.0
_APART_PATIENCE_SECONDS = 5.0

# More than one, so that a frozen or dead one is missed by nobody.
MAINTAINERS = 3

# Idle workers that need not watch look so much more seldom for each other one there is, so that all
# together look about as often however many they are; and never more seldom than this.
_SELDOM_PER_WORKER = 0.25
_MOST_SELDOM_SECONDS = 30.0

# Rings after which nothing was found are heeded more and more seldom: anybody may NOTIFY.
_FIRST_DEAF_SECONDS = 0.01
_LONGEST_DEAF_SECONDS = 0.25
# What a worker rings that hands its watch on: all who are idle should look. An insert calls only who watches.
_MORE = "more"

# Seconds between claims of a queue that has just run empty, before its worker goes to sleep.
GLOW = (0.001, 0.002, 0.003)
# And while an insert is in flight: from here, growing by half, to there.
_WATCH_SECONDS = 0.008
_LONGEST_WATCH_SECONDS = 0.05


class Watch:
    """Where this worker stands with one queue."""

    __slots__ = ("channel", "deaf_until", "is_asleep", "is_rung", "on_duty", "queue", "step", "vain_rings")

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.channel = ""
        self.on_duty = False
        self.is_asleep = False
        self.step = 0
        self.is_rung = False
        # How many rings in a row led to nothing; and until when (monotonic) the next one has to wait.
        self.vain_rings = 0
        self.deaf_until = 0.0

    def forget(self) -> None:
        """Take note that the session is gone, and with it whatever it held."""
        self.on_duty = self.is_asleep = False

    def note_found(self) -> None:
        """Take note that a claim found something."""
        self.step = self.vain_rings = 0

    def heed(self, now: float) -> bool:
        """Say whether to look now because somebody rang."""
        if not self.is_rung or now < self.deaf_until:
            return False
        self.is_rung = False
        self.deaf_until = now + min(_FIRST_DEAF_SECONDS * 2.0**self.vain_rings, _LONGEST_DEAF_SECONDS)
        # Who rings in vain does not get the short polls either.
        self.step = len(GLOW) if self.vain_rings else 0
        self.vain_rings = min(self.vain_rings + 1, 30)
        return True

    def pause_seconds(self) -> float:
        """Give the time to the next claim, while on duty and awake."""
        if self.step < len(GLOW):
            return GLOW[self.step]
        return min(_LONGEST_WATCH_SECONDS, _WATCH_SECONDS * 1.5 ** (self.step - len(GLOW)))


class Bell(Link):
    """The listening session of a worker. Used by one task only."""

    has_session = True
    # How long to wait for an answer.
    answer_seconds = PATIENCE_SECONDS

    def __init__(
        self,
        dsn: str,
        schema: str,
        outage: Outage,
        queues: Sequence[str],
        wake: asyncio.Event,
        poll_seconds: float,
    ) -> None:
        super().__init__(dsn, schema, "listen", outage, patience_seconds=self.answer_seconds)
        self._poll_seconds = poll_seconds
        self._next_ping_at = 0.0
        self._patience: float | None = None
        self.watches = {queue: Watch(queue) for queue in queues}
        self._by_channel: dict[str, Watch] = {}
        self._wake = wake
        # How many workers there are for our queues, with ourselves.
        self.workers = 1
        # How often a session was opened.
        self.sessions = 0
        # Set while this session holds a place of maintenance; and while it holds that or stands by.
        self.place = asyncio.Event()
        self.reaps = asyncio.Event()
        self._descriptor: int | None = None

    async def attend(self) -> None:
        """Listen, before a claim: what is inserted between the two rings.

        Raises:
            DatabaseLost: not now; a pause has been made.
        """
        await self.connect()

    async def prepare(self, connection: AsyncConnection[Any]) -> None:
        """Listen first; whoever connects claims next. The other order would miss what came between."""
        self._forget()
        self.sessions += 1
        channels = await arun(connection, presence.bell_channels(list(self.watches)), self._schema)
        connection.add_notify_handler(lambda notify: self._note_ring(notify.channel, notify.payload))
        self._by_channel = {channels[watch.queue]: watch for watch in self.watches.values()}
        for channel in self._by_channel:
            await arun(connection, presence.listen(channel), self._schema)

    @property
    def is_on_duty(self) -> bool:
        return any(watch.on_duty for watch in self.watches.values())

    @property
    def is_maintainer(self) -> bool:
        return self.place.is_set()

    @property
    def poll_seconds(self) -> float:
        """The time to the next look of a worker that is idle: seldom if another one watches."""
        if self.is_on_duty:
            return self._poll_seconds
        return min(
            self._poll_seconds * (1 + _SELDOM_PER_WORKER * self.workers),
            max(self._poll_seconds, _MOST_SELDOM_SECONDS),
        )

    def _note_ring(self, channel: str, payload: str) -> None:
        # A ring can come along with the answer to a statement: then the socket will not tell of it.
        watch = self._by_channel.get(channel)
        if watch is None or not (watch.on_duty or payload == _MORE):
            return
        deaf_seconds = watch.deaf_until - time.monotonic()
        if deaf_seconds <= 0:
            self._wake.set()
        elif not watch.is_rung:
            self._loop.call_later(deaf_seconds, self._wake.set)
        watch.is_rung = True

    async def run(self, statement: Statement[T]) -> T:
        try:
            answer = await super().run(statement)
        except DatabaseBusy:
            # A session lock that was taken just before would stay, and nobody would know.
            await self.close()
            raise
        return answer

    async def rest(self, watch: Watch) -> str:
        """After an empty claim: take the watch, go to sleep, or learn that another one watches."""
        answer = await self.run(
            presence.rest(watch.queue, on_duty=watch.on_duty, may_sleep=watch.step >= len(GLOW))
        )
        if not watch.on_duty and answer != "off":
            self._next_ping_at = 0.0  # whoever watches must not be silent for long
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
        """Have the loop set the wake event when somebody rings; undo before running a statement."""
        if self.connection is not None and not self.connection.closed:
            self._descriptor = self.connection.fileno()
            self._loop.add_reader(self._descriptor, self._read)

    def unwatch_socket(self) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None

    def _read(self) -> None:
        try:
            self._take_in()
        except Error:
            self._wake.set()  # whoever takes the rings will hear of it

    def _take_in(self) -> None:
        connection = self.connection
        if connection is None or connection.closed:
            raise DatabaseLost
        connection.pgconn.consume_input()
        while (notify := connection.pgconn.notifies()) is not None:
            self._note_ring(notify.relname.decode(), notify.extra.decode(errors="replace"))

    async def take_rings(self) -> list[Watch]:
        """Read what has arrived and give the watches to look at because somebody rang.

        Raises:
            DatabaseLost: the session is gone.
        """
        try:
            self._take_in()
        except Error as error:
            await self._lose(error, self._heard_at)
            raise DatabaseLost from error
        now = time.monotonic()
        return [watch for watch in self.watches.values() if watch.heed(now)]

    async def look_after_session(self) -> None:
        """Show the server now and then that this session is not frozen, and try to get a place."""
        if time.monotonic() < self._next_ping_at:
            return
        if self.is_maintainer:
            await self.run(presence.ping())
        else:
            await self._seek_place()
        holds = self.reaps.is_set() or self.is_on_duty
        seconds = _PING_SECONDS if holds else max(_PING_SECONDS, self.poll_seconds)
        self._next_ping_at = time.monotonic() + seconds
        patience = max(_FROZEN_SECONDS, _PATIENCE * max(seconds, self._poll_seconds))
        if patience != self._patience:
            await self.run(presence.end_if_idle(patience))
            self._patience = patience

    async def _seek_place(self) -> None:
        host, stands_by = socket.gethostname(), self.reaps.is_set()
        taken = await self.run(presence.take_maintenance(MAINTAINERS, host, stands_by=stands_by))
        if taken is None:
            return
        self.reaps.set()
        if taken:
            self.place.set()
            if stands_by:
                await self.run(presence.leave_standby(host))

    async def close(self) -> None:
        self.unwatch_socket()
        self._forget()
        await super().close()

    def _forget(self) -> None:
        """Take note that the session is gone, and with it whatever it held."""
        self.place.clear()
        self.reaps.clear()
        self._patience = None
        self._next_ping_at = 0.0
        for watch in self.watches.values():
            watch.forget()


class BellApart(Bell):
    """On a server that is reached another way than the database, past a proxy say.

    While it is away its worker polls, and looks after everybody's jobs as do all workers without a session.
    """

    answer_seconds = _APART_PATIENCE_SECONDS
    _coming_back: asyncio.Task[None] | None = None

    async def attend(self) -> None:
        if self.connection is None and (self._coming_back is None or self._coming_back.done()):
            self._coming_back = asyncio.create_task(self._come_back())
            # Mostly it is there. If not, it has had its time: the jobs do not wait for it.
            await asyncio.wait({self._coming_back}, timeout=_COME_BACK_SECONDS)

    async def _come_back(self) -> None:
        while self.connection is None:
            with contextlib.suppress(DatabaseLost):
                await self.connect()
        # What was inserted before it listened did not ring.
        self._wake.set()

    async def rest(self, watch: Watch) -> str:
        if self.connection is not None:
            return await super().rest(watch)
        watch.step = len(GLOW)
        return "off"

    async def take_rings(self) -> list[Watch]:
        return [] if self.connection is None else await super().take_rings()

    async def look_after_session(self) -> None:
        if self.connection is None:
            # It cannot hold a place, so it does what there is to do.
            self.place.set()
            self.reaps.set()
        else:
            await super().look_after_session()

    @property
    def poll_seconds(self) -> float:
        return self._poll_seconds if self.connection is None else super().poll_seconds

    async def close(self) -> None:
        if self._coming_back is not None and self._coming_back is not asyncio.current_task():
            self._coming_back.cancel()
        await super().close()


class NoBell(BellApart):
    """For a worker that only polls: behind a proxy that pools transactions a session keeps nothing."""

    has_session = False

    async def attend(self) -> None:
        """There is nobody to come back."""
