"""A child process: the user's code, and a socket to the parent. `python -m pgqueue.runtime.child`.

A fresh interpreter, so that it shares no lock, no connection and no descriptor with the parent
but the socket and the board. It dies with its parent, whatever its handlers are doing.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

from pgqueue.database import passwords
from pgqueue.errors import PgqueueError
from pgqueue.runtime.application import ApplicationError, load_application
from pgqueue.runtime.board import Board
from pgqueue.runtime.execution import Ended, Engine
from pgqueue.runtime.log import Log, LogFormat, configure, hide, identify
from pgqueue.runtime.wire import Decoder, frame

_PR_SET_PDEATHSIG = 1
_LOG = Log("pgqueue.child")


@dataclass(frozen=True, slots=True)
class ChildArguments:
    """What the parent tells a child on its command line: nothing secret."""

    app: str
    socket: int
    board: int
    places: int
    slots: list[int]
    parent: int
    log_format: LogFormat
    log_level: str
    worker_id: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ChildArguments:
        return cls(**json.loads(text))


class _Link(asyncio.Protocol):
    """The child's end of the socket."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        # One for each pool of slots, so that none takes another's.
        self.engines: list[Engine] = []
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            match message[0]:
                case "run":
                    _, pool, *what = message
                    self.engines[pool].submit(*what)
                case "cancel":
                    for engine in self.engines:
                        engine.cancel(message[1])
                case "lost":
                    for engine in self.engines:
                        engine.lose(message[1])
                case "stop":
                    for engine in self.engines:
                        engine.stop()
                case "dsn" if message[1]:
                    os.environ["PGQUEUE_DSN"] = message[1]
                    hide(*passwords(message[1]))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        # The parent is gone, and with it our leases: whatever runs here now, somebody else will run.
        os._exit(1)

    def send(self, message: list[Any]) -> None:
        if self.transport is not None:
            self.transport.write(frame(message))


def main() -> None:
    arguments = ChildArguments.from_text(sys.argv[1])
    _die_with_parent(arguments.parent)
    _leave_signals_to_parent()
    for descriptor in (arguments.socket, arguments.board):
        os.set_inheritable(descriptor, False)
    identify(arguments.worker_id)
    configure(arguments.log_format, arguments.log_level)
    channel = socket.socket(fileno=arguments.socket)
    try:
        app = load_application(arguments.app)
        hello = app.describe()
    except PgqueueError as error:
        details = error.details if isinstance(error, ApplicationError) else ""
        channel.sendall(frame(["failed", str(error), details]))
        sys.exit(1)
    channel.sendall(frame(["hello", hello]))
    board = Board(arguments.board, arguments.places)
    run_loop(_serve(channel, arguments, app, board))


def run_loop(main_coroutine: Any) -> Any:
    """Run on uvloop where it is installed.

    Whoever calls sys.exit in a task or a callback of a handler ends that only: asyncio would throw it out
    of the loop, and every neighbour with it. A Ctrl-C that nobody handles ends the loop as ever.

    Does not wait for tasks that handlers leave behind, as `asyncio.run` would, for ever if one of
    them is deaf: the process ends after this.
    """
    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    main_task = loop.create_task(main_coroutine)
    while True:
        try:
            return loop.run_until_complete(main_task)
        except (SystemExit, KeyboardInterrupt) as error:
            if main_task.done() or (isinstance(error, KeyboardInterrupt) and _is_interrupted_by_ctrl_c()):
                raise
            # A task that is waited for has kept it, and whoever waits gets it.
            _LOG.warning("a task or callback of a handler tried to end the process", error=repr(error))


def _is_interrupted_by_ctrl_c() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def _serve(channel: socket.socket, arguments: ChildArguments, app: Any, board: Board) -> None:
    link = _Link()

    def report(pool: int, serials: list[int], seconds: list[float], others: list[Ended]) -> None:
        in_full = [[serial, took, *outcome.to_wire()] for serial, took, outcome in others]
        link.send(["done", pool, serials, seconds, in_full])

    def report_progress(progress: dict[int, dict[str, Any]]) -> None:
        link.send(["progress", list(progress.items())])

    link.engines = [
        Engine(app.registry, slots, partial(report, pool), report_progress, board, app.schema)
        for pool, slots in enumerate(arguments.slots)
    ]
    channel.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=channel)
    await asyncio.Event().wait()


def _leave_signals_to_parent() -> None:
    """Do nothing on a terminal's Ctrl-C or a supervisor's group signal: the parent decides what they mean.

    Handled, not ignored: programs that handlers start would inherit that, and could not be terminated.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)

    def restore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill us when the parent dies; elsewhere the closed socket tells us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
