"""What the database refuses, as errors that say what to do.

Everything the Python door checks is checked there again, for callers in other languages; a known
refusal has the same name on both sides.
"""

from __future__ import annotations

import re

from pgqueue.errors import (
    ArgumentsTooLarge,
    DuplicateJob,
    InvalidJob,
    PgqueueError,
    SchemaMismatch,
    SchemaMissing,
)
from pgqueue.model.job import MAX_ARGS_BYTES, MAX_HEADERS_BYTES, NewJob
from pgqueue.shell import write_command

_REFUSALS = {
    "jobs_headers_fit": f"its headers are more than the {MAX_HEADERS_BYTES:,} bytes a job carries",
    "jobs_names_fit": "a queue has 1 to 100 bytes, a task's name 1 to 250, each key 1 to 255",
    "jobs_numbers_fit": (
        "priority is at least 0, max_attempts 1 to 100,000, timeout_seconds 0 to 604,800, "
        "concurrency_limit 1 to 10,000"
    ),
    "jobs_run_at_is_sane": "run_at must lie between the years 2000 and 3000",
    "jobs_documents_fit": "args and headers are JSON objects",
}
# A NUL, half of a surrogate pair or bad JSON in a text; a number or instant too large for its column;
# a document nested too deeply.
_REFUSED_VALUES = {"22021", "22023", "22P02", "22P05", "22003", "22007", "22008", "54000", "54001"}
_MISSING = {"3F000", "42P01"}
# No such function, no such column.
_OTHER_SCHEMA = {"42883", "42703"}


def refusal(
    sqlstate: str | None,
    constraint: str | None,
    message: str,
    detail: str,
    *,
    schema: str,
    job: NewJob | None = None,
) -> PgqueueError | None:
    """Give the exception for what the server said about an enqueue, or None if it has no name here."""
    task = job.task if job is not None else _part(r"of task (.*?) (?:are|needs)", message)
    of_task = f"task {task!r}: " if task else ""
    match constraint:
        case "jobs_unique_key":
            return DuplicateJob(_part(r"\(unique_key\)=\((.*)\)", detail))
        case "jobs_args_fit":
            size = _part(r"are (\d+) bytes", message)
            return ArgumentsTooLarge(task, int(size) if size else None, MAX_ARGS_BYTES)
        case str(name) if name in _REFUSALS:
            return InvalidJob(of_task + _REFUSALS[name])
    if sqlstate in _MISSING:
        return SchemaMissing(schema)
    if sqlstate in _OTHER_SCHEMA:
        return SchemaMismatch(
            f"schema {schema!r} is not the one this pgqueue works with ({message}); "
            f"run: {write_command('migrate', schema=schema)}"
        )
    if sqlstate in _REFUSED_VALUES:
        return InvalidJob(of_task + message)
    return None


def _part(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.DOTALL)
    return found[1] if found else ""
