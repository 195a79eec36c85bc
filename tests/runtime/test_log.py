"""Log lines: one an event, readable by people or by programs, never more than one line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pgqueue.runtime.log import LineHandler, Log, LogFormat, current_attempt


@contextmanager
def logged(log_format: LogFormat, level: int = logging.INFO) -> Iterator[io.StringIO]:
    stream, handler, root = io.StringIO(), LineHandler(log_format), logging.getLogger()
    handler.setStream(stream)
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def test_fields_are_keys_and_values_on_one_line() -> None:
    with logged("key-value") as stream:
        Log("pgqueue.test", worker="w1").info(
            "job succeeded", job_id=7, task="mail", seconds=0.25, note='two\nlines "q"'
        )

    line = stream.getvalue()
    assert line.count("\n") == 1
    assert (
        'info    job succeeded worker=w1 job_id=7 task=mail seconds=0.25 note="two\\nlines \\"q\\""' in line
    )


def test_json_lines_hold_the_same() -> None:
    with logged("json") as stream:
        Log("pgqueue.test").warning("claim lost", job_id=7, text="é\n")

    line = json.loads(stream.getvalue())
    assert (line["level"], line["event"], line["job_id"], line["text"]) == ("warning", "claim lost", 7, "é\n")


@pytest.mark.parametrize("log_format", ["key-value", "json"])
def test_many_lines_at_once_look_like_single_ones(log_format: LogFormat) -> None:
    log, fields = Log("pgqueue.test", worker="w1"), {"job_id": 7, "task": "mail", "seconds": 0.5}

    def without_time(text: str) -> Any:
        return {**json.loads(text), "at": ""} if log_format == "json" else text.split(" ", 1)[1]

    with logged(log_format) as one:
        log.info("job succeeded", **fields)
    with logged(log_format) as many:
        log.many(logging.INFO, "job succeeded", [fields, fields])

    first, second = many.getvalue().splitlines(keepends=True)
    assert without_time(first) == without_time(second) == without_time(one.getvalue())


def test_a_quiet_log_does_not_even_look_at_its_lines() -> None:
    def explode() -> Iterator[dict[str, Any]]:
        raise AssertionError
        yield {}

    with logged("key-value", logging.WARNING):
        Log("pgqueue.test").many(logging.INFO, "job succeeded", explode())


@pytest.mark.parametrize("log_format", ["key-value", "json"])
def test_nothing_that_somebody_named_ends_a_line_or_reaches_a_terminal(log_format: LogFormat) -> None:
    hostile = "mail\x1b[2J \x9b2J \x7f \x85 \u2028 \u202e \r\n2026 info job succeeded"
    with logged(log_format) as stream:
        Log("pgqueue.test").warning("job failed", task=hostile, name="naïve 名前")
        logging.getLogger("shop").warning("sent to %s", hostile)

    lines = stream.getvalue().splitlines(keepends=True)
    assert len(lines) == 2
    assert all(line.removesuffix("\n").isprintable() for line in lines)
    assert "naïve 名前" in lines[0]
    if log_format == "json":
        assert json.loads(lines[0])["task"] == hostile


@pytest.mark.parametrize("log_format", ["key-value", "json"])
def test_a_log_that_cannot_be_written_stops_nobody(log_format: LogFormat) -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError("no space left on device")

    with logged(log_format):
        handler = logging.getLogger().handlers[-1]
        assert isinstance(handler, LineHandler)
        handler.setStream(Full())

        Log("pgqueue.test").info("job succeeded")
        Log("pgqueue.test").many(logging.INFO, "job succeeded", [{"job_id": 7}])


def test_an_applications_own_lines_carry_the_job_they_were_written_in() -> None:
    token = current_attempt.set((7, 2, "mail"))
    try:
        handler = LineHandler("key-value")
        good, bad = (
            handler.format(logging.LogRecord("shop", logging.WARNING, "", 0, text, ("somebody",), None))
            for text in ("sent to %s", "sent to %d")
        )
    finally:
        current_attempt.reset(token)

    assert "sent to somebody job_id=7 attempt=2 task=mail" in good
    assert "cannot be formatted" in bad
