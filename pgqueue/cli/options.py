"""Options that several commands share, and the connection they lead to."""

from __future__ import annotations

import getpass
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from pgqueue.database import Connection

    FloatType = click.ParamType[float]
    IntType = click.ParamType[int]
    TimeType = click.ParamType[datetime]
else:  # click became generic lately
    FloatType = IntType = TimeType = click.ParamType

Command = TypeVar("Command", bound=Callable[..., Any])

COMPLETION_SECONDS = 1.5
AT_EXAMPLE = "2026-01-31T14:00:00+07:00"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
# The longest that the worker's settings allow, too; further off the database has no instants.
_LONGEST_SECONDS = 3.2e9
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")


class Duration(FloatType):
    """Seconds, or a number with a unit: 90, 30s, 5m, 2h, 1d, 1w."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = _DURATION.fullmatch(str(value).strip().lower())
        if not found:
            self.fail(f"{value!r} is not a length of time; write 90, 30s, 5m, 2h or 1d", param, ctx)
        seconds = float(found[1]) * _UNITS[found[2]]
        if seconds > _LONGEST_SECONDS:
            self.fail(f"{value!r} is longer than a hundred years", param, ctx)
        return seconds


class Instant(TimeType):
    """An instant with its time zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            at = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time such as {AT_EXAMPLE}", param, ctx)
        if at.utcoffset() is None:
            self.fail(f"{value!r} has no time zone; append Z or an offset such as +07:00", param, ctx)
        return at


class JobId(IntType):
    """The number of a job."""

    name = "job id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not re.fullmatch(r"[0-9]{1,19}", value) or not 0 < int(value) < 2**63:
            self.fail(f"{value!r} is not a job id", param, ctx)
        return int(value)


DURATION = Duration()
INSTANT = Instant()
JOB_ID = JobId()


def database_options(command: Command) -> Command:
    """Give a command --dsn and --schema (parameters `dsn: str | None`, `schema: str`)."""
    dsn = click.option(
        "--dsn",
        metavar="DSN",
        callback=_inherited,
        help="The database: a postgresql:// URL or key=value pairs. A password is better off in PGQUEUE_DSN.",
    )
    schema = click.option(
        "--schema",
        envvar="PGQUEUE_SCHEMA",
        default="pgqueue",
        show_default=True,
        show_envvar=True,
        metavar="NAME",
        callback=_checked_schema,
        help="The schema of the queue's tables.",
    )
    return dsn(schema(command))


def log_format_option(command: Command) -> Command:
    """Give a command that writes a log --log-format (parameter `log_format: str`)."""
    return click.option(
        "--log-format",
        type=click.Choice(["key-value", "json"]),
        default="key-value",
        show_default=True,
        envvar="PGQUEUE_LOG_FORMAT",
    )(command)


def json_option(command: Command) -> Command:
    """Give a command --json (parameter `as_json: bool`)."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


@contextmanager
def open_database(dsn: str | None, schema: str) -> Iterator[Connection[Any]]:
    """Connect to the database that these options mean, in autocommit; say so if its schema is no good."""
    import logging  # slow to come, and only the driver needs it

    from pgqueue import database, migrate
    from pgqueue.dsn import resolve

    # What it warns of is what an interrupt or an error of ours brought with it, and that is told already.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    resolved = resolve(dsn, os.environ, schema=schema)
    with (
        database.connect(resolved.dsn, application_name="pgqueue cli") as connection,
        database.acting(os.environ.get("PGQUEUE_ACTOR") or _who_we_are()),
    ):
        try:
            yield connection
        except (
            database.errors.UndefinedTable,
            database.errors.UndefinedColumn,
            database.errors.UndefinedFunction,
            database.errors.InvalidSchemaName,
        ):
            migrate.check(resolved.dsn, schema)
            raise


def _who_we_are() -> str:
    """Give the account and the machine; of `sudo` the person behind it."""
    try:
        account = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # an id that no account has, as containers give
        account = f"uid {os.getuid()}"
    return f"{account}@{socket.gethostname()}"


def _checked_schema(context: click.Context, parameter: click.Parameter, value: str) -> str:
    from pgqueue.sql import SCHEMA_NAME

    schema = str(_inherited(context, parameter, value))
    if not SCHEMA_NAME.fullmatch(schema):
        raise click.BadParameter(f"not a plain schema name: {schema!r}")
    return schema


def _inherited(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Take what was given before the command's name, as in `pgqueue --dsn ... jobs list`."""
    name = parameter.name or ""
    given: str | None = context.find_root().params.get(name)
    is_said_here = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    return value if given is None or is_said_here else given


# The Tab key: what the database knows, if it answers at once; otherwise nothing, silently.


def complete_task(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _complete(context, "admin.task_names", incomplete)


def complete_queue(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _complete(context, "admin.queue_names", incomplete)


def complete_limit(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _complete(context, "limits.limit_names", incomplete)


def complete_schedule(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _complete(context, "schedules.schedule_names", incomplete)


def complete_breaker(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return _complete(context, "admin.breaker_names", incomplete)


def _complete(context: click.Context, question: str, incomplete: str) -> list[str]:
    names: list[str] = []

    def ask() -> None:
        # A shell that shows a traceback at the Tab key is worse than one that completes nothing.
        with suppress(Exception):
            names.extend(_names(context, question))

    # Whatever hangs, the resolver, the network or a lock, is left behind when the program ends.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(COMPLETION_SECONDS)
    return [name for name in names if name.startswith(incomplete)]


def _names(context: click.Context, question: str) -> list[str]:
    from pgqueue import database
    from pgqueue.dsn import configured

    # Not resolve(): a Tab must not start a server.
    found = configured(context.params.get("dsn"), os.environ)
    if found is None:
        return []
    module, _, function = question.partition(".")
    ask: Callable[..., list[str]] = getattr(import_module(f"pgqueue.{module}"), function)
    with database.connect(found.dsn, application_name="pgqueue completion") as connection:
        return ask(connection, context.params.get("schema") or "pgqueue")
