"""The program `pgqueue`: one lazy root, one place where an error becomes a line and an exit code.

Commands are imported when they are called, and import what they need when they run, so that
`pgqueue --help` answers at once. Whatever goes wrong is one line on stderr that starts with
`pgqueue:`; what a command found goes to stdout.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module

import click

from pgqueue import __version__
from pgqueue.cli import streams
from pgqueue.errors import PgqueueError

# In the order a newcomer meets them.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("demo", "migrate", "worker"),
    "Jobs": ("enqueue", "jobs", "dlq", "processed"),
    "Operation": ("queues", "limits", "schedules", "breakers", "workers", "locks", "roles", "db"),
    "On call": ("doctor", "top", "log"),
    "Monitoring": ("health", "exporter", "assets"),
}

DATABASE_UNREACHABLE = 75
INTERRUPTED = 130


class LazyGroup(click.Group):
    """The root: knows its commands by name, imports `pgqueue.cli.NAME` to get `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return [name for section in SECTIONS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"pgqueue.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if not ctx.resilient_parsing and args[0] not in names and not args[0].startswith("-"):
            near = get_close_matches(args[0], names, n=1)
            ctx.fail(f"no command {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for section, names in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(formatter.width))
                        for name in names
                        if (command := self.get_command(ctx, name)) is not None
                    ]
                )


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, "-V", "--version", prog_name="pgqueue", message="%(prog)s %(version)s")
@click.option("--dsn", metavar="DSN", help="The database, for any command; also behind its name.")
@click.option("--schema", metavar="NAME", help="The schema, for any command; also behind its name.")
def root(dsn: str | None, schema: str | None) -> None:
    """Run and look after a job queue that lives in PostgreSQL.

    The database is the one of --dsn, else PGQUEUE_DSN, else DATABASE_URL, else what libpq's own
    environment names (PGHOST, PGSERVICE, ...), else a server of pgqueue's own, started for you.
    Results go to stdout, everything else to stderr; --json gives one document for a program to read.

    \b
    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unready, 74 done but its output got lost,
    75 database unreachable.
    Completion: eval "$(_PGQUEUE_COMPLETE=bash_source pgqueue)"   (or zsh_source, fish_source)

    \b
    Example:
      pgqueue demo
      pgqueue worker --app shop.jobs:app
      pgqueue enqueue send_welcome '{"user_id": 7}'
      pgqueue jobs list --state dead
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code; never raises, never shows a password."""
    if argv is None:
        streams.prepare()
        _hide_password()
    try:
        result = root.main(args=argv, prog_name="pgqueue", standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except BaseException as error:  # noqa: BLE001  the rim: every way out ends in a line and a code
        code = _report(error)
    finally:
        dsn = sys.modules.get("pgqueue.dsn")
        if dsn is not None:
            dsn.release_embedded()
    lost = streams.let_go()
    return _report(lost) if lost is not None and code == 0 else code


def _report(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        cause = error.__cause__ or error.__context__ or error
        if isinstance(cause, KeyboardInterrupt):
            return INTERRUPTED
        return _fail("nothing was done: no answer was given", 1)
    if isinstance(error, streams.OutputFailed):
        # Nobody reads any more, and wants to hear why either.
        is_told = error.exit_code == streams.OUTPUT_LOST
        return _fail(str(error), error.exit_code) if is_told else error.exit_code
    if isinstance(error, click.UsageError):
        return _fail_usage(error)
    if isinstance(error, click.ClickException):
        return _fail(error.format_message(), error.exit_code)
    if os.environ.get("PGQUEUE_DEBUG"):
        _say(_redact("".join(traceback.format_exception(error))))
    if isinstance(error, PgqueueError):
        return _fail(_redact(str(error)), error.exit_code)
    if isinstance(error, ImportError) and re.search(r"pq wrapper|psycopg '\w+' implementation", str(error)):
        return _fail("the database driver finds no libpq; run: pip install 'psycopg[binary]'", 1)
    code = _driver_failure(error)
    if code is not None:
        return code
    hint = "" if os.environ.get("PGQUEUE_DEBUG") else " (run with PGQUEUE_DEBUG=1 for the traceback)"
    return _fail(f"unexpected {type(error).__name__}: {_redact(str(error))}{hint}", 1)


def _driver_failure(error: BaseException) -> int | None:
    if "pgqueue.database" not in sys.modules:  # then it is none of the driver's
        return None
    from pgqueue.database import Error, errors, is_infrastructure

    if not isinstance(error, Error):
        return None
    reason = error.diag.message_primary or str(error).partition("\n")[0]
    is_passing = isinstance(error, errors.OperationalError) or is_infrastructure(error)
    return _fail(_redact(reason), DATABASE_UNREACHABLE if is_passing else 1)


def _fail_usage(error: click.UsageError) -> int:
    command = error.ctx.command_path if error.ctx else "pgqueue"
    message = error.format_message()
    if message.startswith("Usage: "):  # a group without a command: the message is its help
        _say(message)
        return error.exit_code
    message = message[:1].lower() + message[1:].rstrip(".")
    return _fail(f"{message} (see: {command} --help)", error.exit_code)


def _fail(message: str, code: int) -> int:
    from pgqueue.cli.output import plain

    _say("pgqueue: " + (plain(" ".join(message.split())) or "failed"))
    return code


def _say(text: str) -> None:
    # Stderr may be closed or cut off; the exit code still says how it ended.
    with suppress(OSError):
        click.echo(text, err=True)


def _redact(text: str) -> str:
    try:
        from pgqueue.database import redact
    except ImportError:  # no driver has seen a DSN yet
        return text
    return redact(text)


# A password on the command line.


def _hide_password() -> None:
    """Take a --dsn with a password off our command line, where `ps` shows it to everyone.

    The same program starts again in the same process, with the DSN in PGQUEUE_DSN: what it is
    started with holds no --dsn any more, so this happens once.
    """
    arguments = sys.argv[1:]
    kept, dsns = _split_off_dsns(arguments)
    before = sys.orig_argv[: len(sys.orig_argv) - len(arguments)]
    if not any(map(_has_password, dsns)) or sys.orig_argv[len(before) :] != arguments:
        return
    os.environ["PGQUEUE_DSN"] = dsns[-1]
    os.execv(sys.executable, [*before, *kept])  # noqa: S606  our own program, our own arguments


def _split_off_dsns(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    dsns: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            kept += [argument, *rest]
        elif argument == "--dsn":
            dsns += [value for value in [next(rest, None)] if value is not None]
        elif argument.startswith("--dsn="):
            dsns.append(argument.removeprefix("--dsn="))
        else:
            kept.append(argument)
    return kept, dsns


def _has_password(dsn: str) -> bool:
    # Rather once too often: `password=` of any spelling, or `user:something@` behind the scheme.
    without_scheme = re.sub(r"^[A-Za-z0-9+]+:/*", "", dsn)
    return re.search(r"password|:.*@", without_scheme, re.IGNORECASE | re.DOTALL) is not None
