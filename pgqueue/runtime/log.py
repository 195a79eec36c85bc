"""The worker's log: one line an event, `key=value` or JSON, to standard error.

Every line names its worker, and a handler's own lines carry their job's id, task and attempt. The
lines that say how jobs ended are written many at a time: at tens of thousands a second a record for
each would cost more than the jobs do.

What must not be read by whoever reads logs: no line of ours quotes a job's arguments, passwords that
this process knows are hidden in every line, a handler's too, and PGQUEUE_LOG_REDACT names a function
of the user's through which every line goes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, cast

from pgqueue.database import passwords, redact
from pgqueue.errors import ConfigurationError

LogFormat = Literal["key-value", "json"]

# (job id, attempt, task) of the handler running in this context.
current_attempt: ContextVar[tuple[int, int, str] | None] = ContextVar("pgqueue_attempt", default=None)

# Controls, line ends and writing directions of Unicode.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_PLAIN = re.compile(r"[\w.,:/@+\-\[\]%]+")

# Takes a line's fields, its event among them, and gives those to write.
Redaction = Callable[[dict[str, Any]], Mapping[str, Any]]
_MAY_BE_SECRET = re.compile(r"://|password", re.IGNORECASE)
# Shorter texts and numbers stand for themselves in too many places.
_LEAST_TELLING = 4
_LONGEST_ARGUMENTS = 65_536

# What this process is, for every line it writes; and what none of them may show.
_HARMLESS = ("worker", "job_id", "attempt", "task")
_identity: dict[str, Any] = {}
_secrets: list[str] = []


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
        known = {**_identity, **self._fields}
        handler.write("".join(handler.line(now, name, event, {**known, **fields}) for fields in lines))

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"pgqueue_fields": {**self._fields, **fields}})


class LineHandler(logging.StreamHandler[Any]):
    """Formats records as `key=value` or JSON lines."""

    def __init__(self, log_format: LogFormat, redaction: Redaction | None = None) -> None:
        super().__init__(sys.stderr)
        self._render = _json_line if log_format == "json" else _key_value_line
        self._redaction = redaction
        self.setFormatter(_Formatter(self))
        self.terminator = ""

    def line(self, stamp: str, level: str, event: str, fields: Mapping[str, Any]) -> str:
        """Give a line as it may be read by anybody."""
        if self._redaction is not None:
            try:
                shown = dict(self._redaction({"event": event, **fields}))
                event = str(shown.pop("event", ""))
                fields = shown
            except Exception as error:  # noqa: BLE001  what cannot be redacted is not shown
                fields = {name: fields[name] for name in _HARMLESS if name in fields}
                event = f"a line was held back: its redaction failed ({type(error).__name__})"
        text = self._render(stamp, level, event, fields)
        for secret in _secrets:
            if secret in text:
                text = text.replace(secret, "***")
        return redact(text) if _MAY_BE_SECRET.search(text) else text

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
        fields = {**_identity, **fields}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001  a handler's own log line must not fail its job
            message = f"{record.msg} (cannot be formatted: {type(error).__name__})"
        return self._handler.line(_stamp(record.created), record.levelname.lower(), message, fields)


def configure(log_format: LogFormat, level: str) -> None:
    """Send this process's log to standard error in the given form.

    Raises:
        ConfigurationError: PGQUEUE_LOG_REDACT names no function.
    """
    redaction = _load_redaction(os.environ.get("PGQUEUE_LOG_REDACT"))
    hide(os.environ.get("PGPASSWORD"))
    for name in ("PGQUEUE_DSN", "PGQUEUE_LISTEN_DSN", "DATABASE_URL"):
        hide(*passwords(os.environ.get(name, "")))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, LineHandler)]:
        root.removeHandler(old)
    root.addHandler(LineHandler(log_format, redaction))
    root.setLevel(logging.WARNING)
    logging.getLogger("pgqueue").setLevel(level.upper())
    # An application's own loggers speak at the same level, the libraries below it only to warn.
    root.setLevel(max(logging.getLevelName(level.upper()), logging.INFO))
    for noisy in ("psycopg", "asyncio", "alembic", "sqlalchemy"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def identify(worker: str) -> None:
    """Have every line of this process say whose it is: the worker's id, in short."""
    if worker:
        _identity["worker"] = worker[:8]


def hide(*secrets: str | None) -> None:
    """Show `***` for these in every line from now on, as they stand and as JSON writes them."""
    for secret in secrets:
        if secret and len(secret) >= _LEAST_TELLING:
            for text in (secret, json.dumps(secret, ensure_ascii=False)[1:-1]):
                if text not in _secrets:
                    _secrets.append(text)


def without_arguments(text: str, args: str) -> str:
    """Hide in an error's text what it quotes of its job's arguments: those are for who may read jobs."""
    if not text or args == "{}":
        return text
    kind, _, _ = text.partition(":")
    if len(args) > _LONGEST_ARGUMENTS:
        return f"{kind}: ***"
    try:
        values = sorted(set(_values(json.loads(args))), key=len, reverse=True)
    except (ValueError, RecursionError):
        return f"{kind}: ***"
    for value in values:
        if len(value) > 60:
            # It may have been cut.
            text, found, _ = text.partition(value[:40])
            text += "***" if found else ""
        elif value.isdigit():
            text = re.sub(rf"(?<!\d){value}(?!\d)", "***", text)
        else:
            text = text.replace(value, "***")
    return text


def _values(value: Any) -> Iterator[str]:
    """Give the texts and numbers of a document that tell something."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner)
    elif isinstance(value, str):
        yield from (part for line in value.splitlines() if len(part := line.strip()) >= _LEAST_TELLING)
    elif (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and len(text := str(value).lstrip("-")) >= _LEAST_TELLING
    ):
        yield text


def _load_redaction(name: str | None) -> Redaction | None:
    if not name:
        return None
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for the application: what lies where the worker was started is found
    try:
        found: Any = getattr(import_module(module), attribute or "redact")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"PGQUEUE_LOG_REDACT={name!r} cannot be loaded: {error}") from None
    if not callable(found):
        raise ConfigurationError(f"PGQUEUE_LOG_REDACT={name!r} is no function")
    return cast("Redaction", found)


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
