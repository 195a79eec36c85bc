"""Messages between parent and child: JSON lists with a length in front, over one socket pair.

Parent to child:  ["run", pool, first serial, [[job_id, attempt, task, args, seconds, max_attempts, crashes,
                   idempotency_key, headers], …], queue, token, sent_at]    attempts of one claim, in a row
                  ["cancel", [serial, …]]    stop these, somebody asked for it
                  ["lost", [serial, …]]      stop these, they are not ours any more
                  ["dsn", text]              the database found, for what handlers enqueue
                  ["stop"]                   start nothing more, give back what has not started
Child to parent:  ["hello", {…}]             what the application defines
                  ["failed", text]           the application could not be loaded
                  ["done", pool, [serial, …], [seconds, …],    succeeded, with nothing to say of it
                   [[serial, seconds, ending, text, seconds, note, is_unsure], …]]    all others
                  ["progress", [[serial, {…}], …]]

`sent_at` is the parent's time.monotonic(), which runs alike in all processes of a machine.

A serial is the parent's number of one dispatched attempt: a job can come back to the same worker
while an older attempt of it still runs, so the job's id would not do.
"""

from __future__ import annotations

import json
import struct
from typing import Any

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]


# What orjson could not write it would not read as it is, either: this before a message says so. To any
# other reader of JSON it is a blank.
_WRITTEN_PLAINLY = b" "


def dumps(value: Any) -> bytes:
    """Write JSON.

    Raises:
        TypeError: there is something in it that is no JSON.
        ValueError: there is a text in it that no reader would take, or a number too long.
    """
    if orjson:
        try:
            return orjson.dumps(value)
        except TypeError:
            # It takes no integer beyond 64 bits.
            pass
    return _WRITTEN_PLAINLY + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def loads(text: bytes) -> Any:
    return orjson.loads(text) if orjson and not text.startswith(_WRITTEN_PLAINLY) else json.loads(text)


_LENGTH = struct.Struct("!I")


def frame(message: list[Any]) -> bytes:
    """Encode one message with its length in front."""
    body = dumps(message)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[list[Any]]:
        """Take what arrived and give the messages that are complete by now."""
        buffer = self._buffer
        buffer += received
        messages: list[list[Any]] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(loads(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        if start:
            del buffer[:start]
        return messages
