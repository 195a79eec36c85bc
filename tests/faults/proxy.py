"""A way to the server that can be cut, silenced, slowed, and made to lose answers.

Runs in a thread of its own. What it does to connections needs no privilege, unlike dropping
packets; from the worker's side a silent proxy is a peer that is there and never answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_CHUNK_BYTES = 65_536
# What a client asks for first is to be let in: whether to encrypt, then for whom. An answer lost there is
# just a failed connect.
_GREETINGS = 2
# Whose connections can be stranded: handlers and producers are as patient as their authors made them.
_WORKER = b"application_name\0pgqueue worker"


class _Pair:
    """One client's connection and ours to the server for it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.is_workers = False
        self.is_stranded = False
        self.asked = 0

    def abort(self) -> None:
        for writer in (self.client, self.server):
            connection: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Listens on a TCP port and leads to the server: to its Unix socket, or to its host and port."""

    def __init__(self, server: Callable[[], str | tuple[str, int]]) -> None:
        self._server = server
        self._pairs: set[_Pair] = set()
        self._delay_seconds = 0.0
        self._seconds_per_byte = 0.0
        self._silences_answers_only = False
        self._refuses = False
        self._answers_to_lose = 0
        self._strands_new = False
        self.answers_lost = 0
        self._loop = asyncio.new_event_loop()
        self._open: asyncio.Event
        self._listener: asyncio.Server
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.port: int = self._call(self._start())

    # What can be done to it; from any thread.

    def cut(self) -> int:
        """Reset every connection; gives how many."""
        return self._call(self._cut())

    def silence(self, *, answers_only: bool = False) -> None:
        """Forward nothing, or none of the server's answers, until `heal`: what was sent arrives then."""
        self._silences_answers_only = answers_only
        self._call(self._set_open(is_open=False))

    def strand(self) -> int:
        """Let workers' connections be silent for ever; new ones work. Gives how many."""
        return self._call(self._strand())

    def strand_new(self) -> None:
        """Until `heal`, let connections of workers be silent for ever as soon as they are let in."""
        self._strands_new = True

    def delay(self, seconds: float) -> None:
        self._delay_seconds = seconds

    def slow_down(self, bytes_per_second: float) -> None:
        """Let every connection carry no more than that, each way."""
        self._seconds_per_byte = 1 / bytes_per_second

    def refuse(self) -> None:
        """Take no new connections until `heal`."""
        self._refuses = True

    def lose_answers(self, count: int) -> None:
        """Cut the connection instead of passing the server's next answers on."""
        self._answers_to_lose = count

    def heal(self) -> None:
        self._delay_seconds = self._seconds_per_byte = 0.0
        self._refuses = self._strands_new = False
        self._answers_to_lose = 0
        self._call(self._set_open(is_open=True))

    def close(self) -> None:
        self.heal()
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    @property
    def stranded(self) -> int:
        """How many connections are silent for ever."""
        return sum(pair.is_stranded for pair in list(self._pairs))

    # On its loop.

    def _call(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _start(self) -> int:
        self._open = asyncio.Event()
        self._open.set()
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._listener.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._listener.close()
        await self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=5)

    async def _cut(self) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            pair.abort()
        return len(pairs)

    async def _strand(self) -> int:
        pairs = [pair for pair in self._pairs if pair.is_workers]
        for pair in pairs:
            pair.is_stranded = True
        return len(pairs)

    async def _set_open(self, *, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refuses:
                raise ConnectionRefusedError
            address = self._server()
            if isinstance(address, str):
                server_reader, server_writer = await asyncio.open_unix_connection(address)
            else:
                server_reader, server_writer = await asyncio.open_connection(*address)
        except (OSError, AssertionError):
            writer.transport.abort()
            return
        pair = _Pair(writer, server_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(pair, reader, server_writer, is_answer=False),
                self._pump(pair, server_reader, writer, is_answer=True),
            )
        except (OSError, EOFError):
            pass
        finally:
            self._pairs.discard(pair)
            pair.abort()

    async def _pump(
        self, pair: _Pair, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        while chunk := await source.read(_CHUNK_BYTES):
            if is_answer or not self._silences_answers_only:
                await self._open.wait()
            if not is_answer:
                pair.asked += 1
                if pair.asked <= _GREETINGS:
                    pair.is_workers |= _WORKER in chunk
                elif self._strands_new and pair.is_workers:
                    pair.is_stranded = True
            if pair.is_stranded:
                continue
            if pause := self._delay_seconds + len(chunk) * self._seconds_per_byte:
                await asyncio.sleep(pause)
            if is_answer and self._answers_to_lose > 0 and pair.asked > _GREETINGS:
                self._answers_to_lose -= 1
                self.answers_lost += 1
                raise ConnectionAbortedError
            sink.write(chunk)
            await sink.drain()
        raise EOFError
