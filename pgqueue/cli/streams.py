"""The three streams of the program: always there, and it is known when the output got lost.

A stream that the caller closed leads to /dev/null. Otherwise the next file or connection that is
opened takes its number, and what is written to the stream goes there.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

OUTPUT_LOST = 74
BROKEN_PIPE = 141


class OutputFailed(OSError):
    """The output could not be written; what the command has done stays done."""

    def __init__(self, error: OSError) -> None:
        # No errno: click takes a broken pipe for a failure.
        super().__init__(f"the output could not be written: {error.strerror}; what was done stays done")
        self.exit_code = BROKEN_PIPE if error.errno == errno.EPIPE else OUTPUT_LOST


class _Output(io.FileIO):
    def write(self, text: Any, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputFailed(error) from error


def prepare() -> None:
    """Open what is closed, for us and for what we start, and tell apart an output that fails."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  for good
    output = sys.stdout
    if isinstance(output, io.TextIOWrapper) and output.fileno() == 1:
        output.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(1, "wb", closefd=False)),
            encoding=output.encoding,
            errors=output.errors,
            line_buffering=output.line_buffering,
            write_through=output.write_through,
        )


def let_go() -> OutputFailed | None:
    """Write out what is left; what cannot be written must not trouble the last flush of all."""
    failed = None
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            failed = error if isinstance(error, OutputFailed) else failed
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failed
