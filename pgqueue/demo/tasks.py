"""The application of `pgqueue demo`: read a file of Python, write down what is in it.

An ordinary one, run by an ordinary worker: `pgqueue worker --app pgqueue.demo.tasks:app`. A job runs
at least once, so a handler that runs again must do no harm: here it writes the same row once more.
"""

from __future__ import annotations

import ast
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

from pgqueue import App, JobContext, Unrecoverable
from pgqueue.database import Connection, connect, run
from pgqueue.dsn import resolve
from pgqueue.sql import demo as statements

app = App()
_local = threading.local()


@app.task(name="demo.catalogue", queue="demo", timeout_seconds=60, store_result=False)
def catalogue(job: JobContext, path: str) -> None:
    """Write a file's size, lines, checksum and top-level definitions into the catalogue.

    Raises:
        Unrecoverable: it does not parse, and will not the next time either.
    """
    connection = _connection()
    run(connection, statements.start(job.job_id, job.attempt, os.getpid(), path))
    source = Path(path).read_bytes()
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        run(connection, statements.end(job.job_id, job.attempt))
        raise Unrecoverable(reason(error)) from None
    row = statements.CatalogueRow(
        path=path,
        bytes=len(source),
        lines=source.count(b"\n") + (not source.endswith(b"\n") and source != b""),
        sha256=hashlib.sha256(source).hexdigest(),
        definitions=[
            statement.name
            for statement in module.body
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ],
    )
    run(connection, statements.store(job.job_id, job.attempt, row))


@app.task(name="demo.pick_up", queue="demo", store_result=False)
def pick_up(job: JobContext) -> None:
    """Write down the instant, to tell how long the job was on its way."""
    run(_connection(), statements.pick_up(job.job_id))


def reason(error: SyntaxError | ValueError) -> str:
    """Say for a person why a file does not parse."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {error.msg}"
    return error.msg if isinstance(error, SyntaxError) else str(error)


def _connection() -> Connection[Any]:
    """Give this thread's connection."""
    connection: Connection[Any] | None = getattr(_local, "connection", None)
    if connection is None or connection.closed:
        # Our commits need not wait for the disk: the one that ends the job comes later in the same
        # log, and that one does.
        connection = _local.connection = connect(
            resolve(None, os.environ).dsn,
            application_name="pgqueue demo",
            settings={"synchronous_commit": "off"},
        )
    return connection
