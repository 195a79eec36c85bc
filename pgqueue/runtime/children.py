"""The parent's side of its children: starting them, talking to them, noticing their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol, cast

from pgqueue.model.outcome import Ending, Outcome
from pgqueue.runtime.application import load_application
from pgqueue.runtime.board import Board
from pgqueue.runtime.child import ChildArguments
from pgqueue.runtime.execution import Ended, Engine
from pgqueue.runtime.log import LogFormat
from pgqueue.runtime.memory import OomKills
from pgqueue.runtime.wire import Decoder, frame
from pgqueue.sql.attempts import ClaimedRow

# Places on a board beyond the slots: attempts whose outcome is being written keep theirs.
_SPARE_PLACES = 4096
# Encoding and decoding hold several copies of a frame, so a claim of large arguments goes in several.
_FRAME_CHARACTERS = 1_000_000
# How often to look whether somebody moved a child to another control group.
_LOOK_SECONDS = 1.0

# An attempt as the wire describes it.
Sent = tuple[Any, ...]
_SENT = (
    "job_id",
    "attempt",
    "task",
    "args",
    "timeout_seconds",
    "max_attempts",
    "crashes",
    "idempotency_key",
    "headers",
)
to_wire: Callable[[ClaimedRow], Sent] = itemgetter(*map(ClaimedRow._fields.index, _SENT))

_NOT_RUN = (Ending.RELEASED, Ending.UNKNOWN_TASK)


class Listener(Protocol):
    """Who hears what a child has to say. Called on the parent's loop."""

    def child_ready(self, child: Child) -> None: ...
    def child_failed(self, child: Child, message: str, details: str) -> None: ...
    def attempts_ended(
        self, pool: int, serials: list[int], seconds: list[float], others: list[Ended]
    ) -> None: ...
    def progress_made(self, progress: list[tuple[int, dict[str, Any]]]) -> None: ...


class Child:
    """Something that runs attempts: what a process and the engine inside the parent have in common."""

    def __init__(self, number: int, slots: Sequence[int], listener: Listener) -> None:
        self.number = number
        # Its share of each pool's slots.
        self.slots = slots
        self.is_ready = False
        # The serials of the attempts sent there and not ended yet, and how many of each pool they are.
        self.held: set[int] = set()
        self.loads = [0] * len(slots)
        self.hello: Mapping[str, Any] = {}
        self.jobs_run = 0
        # To be replaced: what runs there finishes, nothing more starts.
        self.is_retired = False
        self.started_at = time.monotonic()
        self._listener = listener

    pid: int | None = None

    def free(self, pool: int) -> int:
        """Count the free slots of a pool; below zero is what was sent ahead."""
        return self.slots[pool] - self.loads[pool]

    def run(self, pool: int, first_serial: int, attempts: list[Sent], queue: str, token: str) -> None:
        """Send attempts of one claim there; their serials count up from the first."""
        self.held.update(range(first_serial, first_serial + len(attempts)))
        self.loads[pool] += len(attempts)
        self._start(pool, first_serial, attempts, queue, token)

    def _start(self, pool: int, first_serial: int, attempts: list[Sent], queue: str, token: str) -> None:
        raise NotImplementedError

    def _report(self, pool: int, serials: list[int], seconds: list[float], others: list[Ended]) -> None:
        self.held.difference_update(serials, [serial for serial, _, _ in others])
        self.loads[pool] -= len(serials) + len(others)
        self.jobs_run += len(serials) + sum(outcome.ending not in _NOT_RUN for _, _, outcome in others)
        self._listener.attempts_ended(pool, serials, seconds, others)

    def cancel(self, serials: list[int]) -> None:
        raise NotImplementedError

    def lose(self, serials: list[int]) -> None:
        raise NotImplementedError

    def tell_dsn(self, dsn: str) -> None:
        """Tell it which database we found, for what its handlers enqueue."""
        raise NotImplementedError

    def stop(self) -> None:
        """Have it start nothing more and give back what it has not started."""
        raise NotImplementedError

    def kill(self) -> bool:
        """End it now; False if that cannot be done."""
        raise NotImplementedError

    def exit_reason(self) -> str | None:
        """Say how it ended, or None while it lives."""
        raise NotImplementedError

    def running(self) -> set[int]:
        """Give the serials whose handlers run at this instant (or ran when it died)."""
        raise NotImplementedError

    def ended(self) -> set[int]:
        """Give the serials whose handlers have ended, though their outcome has not left the child."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Nowhere(Child):
    """The place of an attempt that no child has: it only waits for its end or its turn."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(-1, (), listener)

    def cancel(self, serials: list[int]) -> None:
        """Nothing runs here that could stop; what waits is given back soon, and then cancelled."""

    def lose(self, serials: list[int]) -> None:
        """Nothing runs here that could be told."""

    def kill(self) -> bool:
        return True


class ChildProcess(Child, asyncio.Protocol):
    """A child in a process of its own."""

    def __init__(
        self,
        number: int,
        slots: Sequence[int],
        listener: Listener,
        *,
        app: str,
        environment: Mapping[str, str],
        log_format: LogFormat,
        log_level: str,
        worker_id: str,
    ) -> None:
        super().__init__(number, slots, listener)
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._board = Board.create(sum(slots) + _SPARE_PLACES)
        ours, theirs = socket.socketpair()
        arguments = ChildArguments(
            app=app,
            socket=theirs.fileno(),
            board=self._board.descriptor,
            places=self._board.places,
            slots=list(slots),
            parent=os.getpid(),
            log_format=log_format,
            log_level=log_level,
            worker_id=worker_id,
        )
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pgqueue.runtime.child", arguments.to_text()],
                    pass_fds=(theirs.fileno(), self._board.descriptor),
                    stdin=subprocess.DEVNULL,
                    env=dict(environment),
                )
            except BaseException:
                ours.close()
                self._board.close()
                raise
        self.pid = self._process.pid
        self._oom_kills = OomKills(self.pid)
        self._next_look_at = self.started_at + _LOOK_SECONDS
        self._was_killed = False
        ours.setblocking(False)
        self._socket = ours
        # To read what is left when the transport has closed the other one: a write to a dead child does that.
        self._rest = ours.dup()

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            match message[0]:
                case "done":
                    _, pool, serials, seconds, others = message
                    in_full = [(serial, took, Outcome.from_wire(parts)) for serial, took, *parts in others]
                    self._report(pool, serials, seconds, in_full)
                case "progress":
                    self._listener.progress_made(message[1])
                case "hello":
                    self.hello = message[1]
                    self.is_ready = True
                    self._listener.child_ready(self)
                case "failed":
                    self._listener.child_failed(self, message[1], message[2])

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.is_ready = False
        self._transport = None

    def _send(self, message: list[Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def _start(self, pool: int, first_serial: int, attempts: list[Sent], queue: str, token: str) -> None:
        first = size = 0
        for following, attempt in enumerate(attempts, 1):
            size += len(attempt[3])
            if size > _FRAME_CHARACTERS or following == len(attempts):
                sent = attempts[first:following]
                self._send(["run", pool, first_serial + first, sent, queue, token, time.monotonic()])
                first, size = following, 0

    def cancel(self, serials: list[int]) -> None:
        self._send(["cancel", serials])

    def lose(self, serials: list[int]) -> None:
        # On the board, too: a loop that stands still hears nothing.
        self._board.revoke(serials)
        self._send(["lost", serials])

    def tell_dsn(self, dsn: str) -> None:
        self._send(["dsn", dsn])

    def stop(self) -> None:
        self._send(["stop"])

    def kill(self) -> bool:
        self.is_ready = False
        self._was_killed = True
        self._process.kill()
        return True

    def exit_reason(self) -> str | None:
        status = self._process.poll()
        if status is None:
            if (now := time.monotonic()) >= self._next_look_at:
                self._next_look_at = now + _LOOK_SECONDS
                self._oom_kills.look()
            return None
        self._read_the_rest()
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:
                name = "unknown"
            is_mystery = -status == signal.SIGKILL and not self._was_killed
            question = "; memory limit?" if is_mystery and self._oom_kills.may_have_risen() else ""
            return f"was killed by signal {-status} ({name}){question}"
        return f"exited with status {status}"

    def _read_the_rest(self) -> None:
        """Hear what it wrote before it died; all of that is in the socket already.

        Not the end of the stream: a process that a handler forked may hold the other side open for long.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        with contextlib.suppress(OSError):
            while received := self._rest.recv(1 << 20, socket.MSG_DONTWAIT):
                self.data_received(received)
        self._rest.close()
        if self._transport is not None:
            self._transport.abort()

    def running(self) -> set[int]:
        return self._board.running()

    def ended(self) -> set[int]:
        return self._board.ended()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._read_the_rest()
        self._board.close()


class LocalChild(Child):
    """Handlers inside the parent: `--processes 0`, for debugging and for embedding a worker."""

    def __init__(self, number: int, slots: Sequence[int], listener: Listener, *, app: str) -> None:
        super().__init__(number, slots, listener)
        application = load_application(app)
        self._board = Board.create(sum(slots) + _SPARE_PLACES)
        self._engines = [
            Engine(
                application.registry,
                count,
                partial(self._report, pool),
                lambda progress: listener.progress_made(list(progress.items())),
                self._board,
                application.schema,
            )
            for pool, count in enumerate(slots)
        ]
        self.hello = application.describe()
        self.pid = os.getpid()

    def announce(self) -> None:
        self.is_ready = True
        self._listener.child_ready(self)

    def _start(self, pool: int, first_serial: int, attempts: list[Sent], queue: str, token: str) -> None:
        self._engines[pool].submit(first_serial, attempts, queue, token)

    def cancel(self, serials: list[int]) -> None:
        for engine in self._engines:
            engine.cancel(serials)

    def lose(self, serials: list[int]) -> None:
        for engine in self._engines:
            engine.lose(serials)

    def tell_dsn(self, dsn: str) -> None:
        if dsn:
            os.environ["PGQUEUE_DSN"] = dsn

    def stop(self) -> None:
        for engine in self._engines:
            engine.stop()

    def kill(self) -> bool:
        return False

    def exit_reason(self) -> str | None:
        return None

    def running(self) -> set[int]:
        return self._board.running()

    def ended(self) -> set[int]:
        return self._board.ended()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
