"""`pgqueue enqueue`: add a job, or a file of them, from a shell; refused before anything is written."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from pgqueue.cli import output
from pgqueue.cli.options import (
    AT_EXAMPLE,
    DURATION,
    INSTANT,
    Command,
    complete_queue,
    complete_task,
    database_options,
    json_option,
    open_database,
)

if TYPE_CHECKING:
    from pgqueue.app import App
    from pgqueue.database import Connection
    from pgqueue.model.job import NewJob
    from pgqueue.model.options import JobOptions

# Far more than the largest job with all its white space; what is longer is not read to its end.
MAX_TEXT_BYTES = 16 * 1_048_576

MakeJob = Callable[[str, dict[str, Any], "JobOptions"], "NewJob"]


def known_task_options(command: Command) -> Command:
    """Add --app and --force: what the task and its arguments are checked against, and that they are not."""
    app = click.option(
        "--app",
        envvar="PGQUEUE_APP",
        metavar="MODULE:NAME",
        help="Check the arguments against this application's tasks. "
        "Also [tool.pgqueue] app in pyproject.toml.",
    )
    return app(click.option("--force", is_flag=True, help="Also for a task that nobody knows.")(command))


@click.command(short_help="Add a job, or a file of them.")
@click.argument("task", required=False, shell_complete=complete_task)
@click.argument("args", metavar="[JSON|-]", required=False)
@click.option(
    "--lines", type=click.File("rb"), metavar="FILE|-", help="Add a job for each line of JSON, all or none."
)
@click.option("--at", type=INSTANT, metavar="TIME", help=f"Not before this instant: {AT_EXAMPLE}.")
@click.option(
    "--in", "delay", type=DURATION, metavar="TIME", help="Not before so long from now: 90, 5m, 2h, 1d."
)
@click.option("--queue", "-q", shell_complete=complete_queue, metavar="NAME")
@click.option("--priority", type=int, metavar="N", help="0 goes first.")
@click.option("--max-attempts", type=int, metavar="N")
@click.option("--timeout-seconds", type=DURATION, metavar="TIME", help="For each attempt; 0 means no limit.")
@click.option("--unique-key", metavar="KEY", help="No second live job with this key.")
@click.option(
    "--on-conflict",
    type=click.Choice(["skip", "replace", "reject", "debounce"]),
    help="If a live job has the key: keep that one, give it these arguments, fail, or also put it off again.",
)
@click.option(
    "--max-delay",
    type=DURATION,
    metavar="TIME",
    help="With debounce: put off at most so long; 10 times --in.",
)
@click.option(
    "--unique-until",
    type=click.Choice(["end", "start"]),
    help="The key counts until the job has ended, or only until it starts.",
)
@click.option(
    "--concurrency-key", metavar="KEY", help="Jobs with this key run one at a time, or as the task says."
)
@click.option("--idempotency-key", metavar="KEY", help="Handed to the handler, the same in every attempt.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Kept with the job; may be repeated."
)
@known_task_options
@json_option
@database_options
def command(
    task: str | None,
    args: str | None,
    lines: BinaryIO | None,
    at: datetime | None,
    delay: float | None,
    queue: str | None,
    priority: int | None,
    max_attempts: int | None,
    timeout_seconds: float | None,
    unique_key: str | None,
    on_conflict: str | None,
    max_delay: float | None,
    unique_until: str | None,
    concurrency_key: str | None,
    idempotency_key: str | None,
    headers: Sequence[str],
    app: str | None,
    force: bool,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Add a job and print its id.

    JSON is an object with the task's arguments, {} if left out; - reads it from stdin. What is not said
    comes from the task's definition. With an application the arguments are checked against the
    handler's signature; without one, the task must be one that a worker has registered.

    With --lines each line is an object: {"task": ..., "args": {...}} and any of queue, priority,
    run_at, delay_seconds, max_attempts, timeout_seconds, unique_key, unique_until, on_conflict,
    max_delay_seconds, concurrency_key, concurrency_limit, idempotency_key, headers. The
    options are what a line leaves out. One bad line, and nothing is added.

    \b
    Example:
      pgqueue enqueue send_welcome '{"user_id": 7}' --in 5m
      pgqueue enqueue nightly_report --at 2026-01-31T03:00:00Z --unique-key report
      jq -c '{task: "send_welcome", args: {user_id: .id}}' users.json | pgqueue enqueue --lines -
    """
    from pgqueue.errors import InvalidJob
    from pgqueue.model.options import JobOptions

    said: dict[str, Any] = {
        "run_at": at,
        "delay_seconds": delay,
        "queue": queue,
        "priority": priority,
        "max_attempts": max_attempts,
        "timeout_seconds": timeout_seconds,
        "unique_key": unique_key,
        "on_conflict": on_conflict,
        "max_delay_seconds": max_delay,
        "unique_until": unique_until,
        "concurrency_key": concurrency_key,
        "idempotency_key": idempotency_key,
        "headers": _headers(headers),
    }
    try:
        options = JobOptions(**{name: value for name, value in said.items() if value is not None})
    except InvalidJob as error:
        raise click.UsageError(str(error)) from None
    if lines is None and task is None:
        raise click.UsageError("which task? give its name, or --lines")
    if lines is not None and task is not None:
        raise click.UsageError("with --lines, each line names its task")

    application = application_of(app)
    with open_database(dsn, schema) as connection:
        make = _maker(application, connection, schema, force)
        if lines is not None:
            _enqueue_lines(lines, make, options, connection, schema, as_json)
        elif task is not None:
            _enqueue_one(task, read_args(task, args), make, options, connection, schema, as_json)


def _enqueue_one(
    task: str,
    args: dict[str, Any],
    make: MakeJob,
    options: JobOptions,
    connection: Connection[Any],
    schema: str,
    as_json: bool,
) -> None:
    from pgqueue.client import Client

    enqueued = Client(schema=schema).enqueue(make(task, args, options), connection)
    if as_json:
        output.document(enqueued._asdict())
        return
    click.echo(enqueued.job_id)
    if enqueued.outcome == "skipped":
        output.say(f"job {enqueued.job_id} has this unique key already and stands for it")
    elif enqueued.outcome == "replaced":
        output.say(f"job {enqueued.job_id} had this unique key and took these arguments")


def _enqueue_lines(
    lines: BinaryIO,
    make: MakeJob,
    options: JobOptions,
    connection: Connection[Any],
    schema: str,
    as_json: bool,
) -> None:
    from pgqueue.client import Client
    from pgqueue.errors import InvalidJob

    reading = _Reading(lines, make, options)
    try:
        enqueued = Client(schema=schema).enqueue_many(reading.jobs(), connection)
    except InvalidJob as error:
        raise InvalidJob(f"{reading.place}: {error} (nothing was enqueued)") from error
    counts = Counter(each.outcome for each in enqueued)
    if as_json:
        output.document({"job_ids": [each.job_id for each in enqueued], "outcomes": counts})
        return
    if enqueued:
        click.echo("\n".join(str(each.job_id) for each in enqueued))
    told = [f"enqueued {output.counted(counts.pop('inserted', 0), 'job')}"]
    output.say("; ".join(told + [f"{count:,} {outcome}" for outcome, count in counts.items()]))


class _Reading:
    """Lines on their way to jobs; knows where it is when something goes wrong."""

    def __init__(self, lines: BinaryIO, make: MakeJob, options: JobOptions) -> None:
        self._lines = lines
        self._make = make
        self._options = options
        self._number = 0
        self._is_reading = False

    def jobs(self) -> Iterator[NewJob]:
        while line := self._lines.readline(MAX_TEXT_BYTES + 1):
            self._number += 1
            self._is_reading = True
            job = self._job(line)
            self._is_reading = False
            if job is not None:
                yield job

    @property
    def place(self) -> str:
        """Say where an error came up; what the database refuses is only known to be in what was read."""
        return f"line {self._number:,}" if self._is_reading else f"in the first {self._number:,} lines"

    def _job(self, line: bytes) -> NewJob | None:
        from pgqueue.errors import InvalidJob

        if len(line) > MAX_TEXT_BYTES:
            raise InvalidJob(f"longer than {MAX_TEXT_BYTES:,} bytes")
        if not line.strip():
            return None
        try:
            members = _object(_decoded(line))
        except ValueError as error:
            raise InvalidJob(str(error)) from None
        task, args = members.pop("task", None), members.pop("args", None)
        if not isinstance(task, str):
            raise InvalidJob(
                'no "task"' if task is None else f'"task" must be a text, not {json.dumps(task)[:60]}'
            )
        if args is not None and not isinstance(args, dict):
            raise InvalidJob(f"task {task!r}: the arguments must be an object, not {json.dumps(args)[:60]}")
        return self._make(task, args or {}, self._merged(members))

    def _merged(self, members: dict[str, Any]) -> JobOptions:
        from pgqueue.errors import InvalidJob
        from pgqueue.model.options import JobOption

        names = JobOption.__annotations__
        for name in members:
            if name not in names:
                near = get_close_matches(name, ["task", "args", *names], n=1)
                raise InvalidJob(
                    f"no member {name!r} is known" + (f"; did you mean {near[0]!r}?" if near else "")
                )
        said = {name: value for name, value in members.items() if value is not None}
        if not said:
            return self._options
        if isinstance(said.get("run_at"), str):
            try:
                said["run_at"] = datetime.fromisoformat(said["run_at"])
            except ValueError:
                raise InvalidJob(f"run_at {said['run_at']!r} is not a time such as {AT_EXAMPLE}") from None
        return self._options.merged(cast("Any", said))


# Which tasks there are.


def application_of(name: str | None) -> App | None:
    """Give the application that was named, here or in pyproject.toml, if any was."""
    from pgqueue.cli.application import configured_application

    found = configured_application(name)
    if found is None:
        return None
    from pgqueue.runtime.application import load_application

    return load_application(found)


def _maker(app: App | None, connection: Connection[Any], schema: str, force: bool) -> MakeJob:
    """Give what makes jobs: checked against the application, or the names that the database knows."""
    from pgqueue import admin
    from pgqueue.database import errors
    from pgqueue.errors import InvalidJob, UnknownTask
    from pgqueue.model.task import unregistered_job

    registered: set[str] | None = None if app is None and not force else set()

    def make(task: str, args: dict[str, Any], options: JobOptions) -> NewJob:
        nonlocal registered, force
        definition = None if app is None else app.registry.get(task)
        if definition is not None:
            return definition.new_job((), args, options)
        if not force:
            if registered is None:
                try:
                    registered = set(admin.task_names(connection, schema))
                except errors.InsufficientPrivilege:
                    output.say("this account may not read which tasks there are: the name is not checked")
                    force = True
            if registered is not None and task not in registered:
                known = registered if app is None else {each.name for each in app.registry}
                raise InvalidJob(f"{UnknownTask(task, known)} (with --force it is enqueued all the same)")
        return unregistered_job(task, args, options)

    return make


# Reading JSON more strictly than Python does: no NaN, no name twice, nothing but an object.


def read_args(task: str, text: str | None) -> dict[str, Any]:
    from pgqueue.errors import InvalidArguments

    if text is None:
        return {}
    data = _stdin(task) if text == "-" else None
    try:
        return _object(text if data is None else _decoded(data))
    except ValueError as error:
        raise InvalidArguments(task, f"the arguments are {error}") from None


def _stdin(task: str) -> bytes:
    from pgqueue.errors import ArgumentsTooLarge
    from pgqueue.model.job import MAX_ARGS_BYTES

    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ArgumentsTooLarge(task, None, MAX_ARGS_BYTES)
    return data


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1:,}") from None


def _object(text: str) -> dict[str, Any]:
    text = text.rstrip()
    try:
        value = json.loads(text, object_pairs_hook=_members, parse_int=_integer, parse_constant=_constant)
    except json.JSONDecodeError as error:
        place = (
            f"column {error.colno:,}" if "\n" not in text else f"line {error.lineno:,} column {error.colno:,}"
        )
        raise ValueError(f"not JSON: {error.msg} at {place}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object but {json.dumps(value)[:60]}")  # noqa: TRY004  one kind of refusal
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"ambiguous: the name {twice!r} is there twice")
    return members


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"not readable: an integer of {len(digits):,} digits") from None


def _constant(constant: str) -> Any:
    raise ValueError(f"not JSON, which has no {constant}")


# Reading options.


def _headers(given: Sequence[str]) -> dict[str, str] | None:
    headers: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE", param_hint="--header")
        headers[name] = value
    return headers or None
