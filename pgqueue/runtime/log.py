"""The worker's log: one line an event, `key=value` or JSON, to standard error.

A handler's own log lines carry their job's id, task and attempt. The lines that say how jobs ended
are written many at a time: at tens of thousands a second a record for each would cost more than
the jobs do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal

LogFormat = Literal["key-value", "json"]

# (job id, attempt, task) of the handler running in this context.
current_attempt: ContextVar[tuple[int, int, str] | None] = ContextVar("pgqueue_attempt", default=None)

# Controls, line ends and writing directions of Unicode.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_PLAIN = re.compile(r"[\w.,:/@+\-\[\]%]+")


class Log:
    """Writes events of one component; extra fields are keyword arguments."""

    def __init__(self, name: str, **fields: Any) -> None:
        self._logger = logging.getLogger(name)
        self._fields = fields

    def bind(self, **fields: Any) -> Log:
        return Log(self._logger.name, **{**self._fields, **fields})

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def is_enabled(self, level: int) -> bool:
        return self._logger.isEnabledFor(level)

    def many(self, level: int, event: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write one line for each mapping, all at once."""
        if not self._logger.isEnabledFor(level):
            return
        handler = _installed()
        if handler is None:
            for fields in lines:
                self._write(level, event, dict(fields))
            return
        now = _now()
        name = logging.getLevelName(level).lower()
        handler.write("".join(handler.line(now, name, event, {**self._fields, **fields}) for fields in lines))

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"pgqueue_fields": {**self._fields, **fields}})


class LineHandler(logging.StreamHandler[Any]):
    """Formats records as `key=value` or JSON lines."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__(sys.stderr)
        self.line = _json_line if log_format == "json" else _key_value_line
        self.setFormatter(_Formatter(self))
        self.terminator = ""

    def write(self, text: str) -> None:
        """Write lines. A log that is full or cut off must not stop the work it tells of."""
        with contextlib.suppress(OSError, ValueError):
            self.acquire()
            try:
                self.stream.write(text)
                self.flush()
            finally:
                self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, handler: LineHandler) -> None:
        super().__init__()
        self._handler = handler

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "pgqueue_fields", ()))
        if not fields and not record.name.startswith("pgqueue."):
            fields["logger"] = record.name
        if (attempt := current_attempt.get()) is not None:
            fields = {"job_id": attempt[0], "attempt": attempt[1], "task": attempt[2], **fields}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001  a handler's own log line must not fail its job
            message = f"{record.msg} (cannot be formatted: {type(error).__name__})"
        return self._handler.line(_stamp(record.created), record.levelname.lower(), message, fields)


def configure(log_format: LogFormat, level: str) -> None:
    """Send this process's log to standard error in the given form."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, LineHandler)]:
        root.removeHandler(old)
    root.addHandler(LineHandler(log_format))
    root.setLevel(logging.WARNING)
    logging.getLogger("pgqueue").setLevel(level.upper())
    # An application's own loggers speak at the same level, the libraries below it only to warn.
    root.setLevel(max(logging.getLevelName(level.upper()), logging.INFO))
    for noisy in ("psycopg", "asyncio", "alembic", "sqlalchemy"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _installed() -> LineHandler | None:
    return next((h for h in logging.getLogger().handlers if isinstance(h, LineHandler)), None)


def _now() -> str:
    return _stamp(time.time())  # noqa: TID251  a log line tells this machine's time


def _stamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _json_line(stamp: str, level: str, event: str, fields: Mapping[str, Any]) -> str:
    line = {"at": stamp, "level": level, "event": event, **fields}
    return _quoted(line) + "\n"


def _key_value_line(stamp: str, level: str, event: str, fields: Mapping[str, Any]) -> str:
    pairs = "".join(f" {key}={_value(value)}" for key, value in fields.items() if value is not None)
    return f"{stamp} {level:<7} {_one_line(event)}{pairs}\n"


def _value(value: Any) -> str:
    if type(value) is int:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return _text(str(value))


@lru_cache(maxsize=1024)  # queue and task names come again and again
def _text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else _quoted(text)


def _one_line(text: str) -> str:
    return _quoted(text) if _HIDDEN.search(text) else text


def _quoted(value: Any) -> str:
    # JSON leaves characters alone that end a line for some readers, or that a terminal obeys.
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
