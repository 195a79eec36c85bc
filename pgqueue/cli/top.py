"""`pgqueue top`: a live view of queues, workers and running jobs."""

from __future__ import annotations

import contextlib
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli import output, queues, workers
from pgqueue.cli.options import DURATION, database_options, open_database

if TYPE_CHECKING:
    from pgqueue.admin import BreakerSummary, Flow, QueueSummary, RunningJob, WorkerSummary
    from pgqueue.database import Connection

# Counting further would cost more than a screen is worth, every two seconds.
COUNT_CAP = 1000
MOST_RUNNING = 200
SHORTEST_SECONDS = 0.1

RUNNING = (
    output.Column("job", is_number=True),
    output.Column("running", is_number=True),
    output.Column("deadline", is_number=True),
    output.Column("queue", may_shrink=True),
    output.Column("task", may_shrink=True),
    output.Column("attempt", is_number=True),
    output.Column("worker", may_shrink=True),
    output.Column("note", may_shrink=True),
)


@dataclass(frozen=True, slots=True)
class View:
    """What is seen at one moment."""

    flow: Flow
    queues: Sequence[QueueSummary]
    workers: Sequence[WorkerSummary]
    running: Sequence[RunningJob]
    breakers: Sequence[BreakerSummary]


@click.command(short_help="Watch queues, workers and running jobs.")
@click.option(
    "--every",
    "seconds",
    type=DURATION,
    default="2s",
    show_default=True,
    metavar="TIME",
    help="Look anew so often.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    metavar="N",
    help="Look so often, then end. Not on a terminal: 1 if not said.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document; with --count one for each look, a line each.",
)
@database_options
def command(seconds: float, count: int | None, as_json: bool, dsn: str | None, schema: str) -> None:
    """Watch queues, workers and running jobs; what has waited or run longest is at the top.

    On a terminal it fills the screen until you press q; space looks at once. It outlives an outage of the
    database. Elsewhere it prints what it sees once, or --count times. IN and OUT are jobs a second
    that came and that ended. Counting stops at 1,000.

    \b
    Example:
      pgqueue top
      pgqueue top --every 10s --count 6 > what-happened.txt
    """
    seconds = max(seconds, SHORTEST_SECONDS)
    if not as_json and sys.stdin.isatty() and sys.stdout.isatty():
        _watch(seconds, count, dsn, schema)
        return
    before: View | None = None
    with open_database(dsn, schema) as connection:
        for number in range(count or 1):
            if number:
                time.sleep(seconds)
                if not as_json:
                    click.echo()
            view = _look(connection, schema)
            if as_json:
                output.document(view, on_one_line=count is not None)
            else:
                click.echo("\n".join(_lines(view, before, None, None)))
            before = view


def _look(connection: Connection[Any], schema: str) -> View:
    from pgqueue import admin

    found = admin.list_queues(connection, COUNT_CAP, schema)
    return View(
        admin.flow(connection, schema),
        sorted(found, key=lambda queue: (-(queue.oldest_ready_seconds or 0.0), -queue.running, queue.queue)),
        admin.list_workers(connection, schema),
        admin.list_running(connection, MOST_RUNNING, schema),
        [breaker for breaker in admin.list_breakers(connection, schema) if breaker.state != "closed"],
    )


# What is shown.


def _lines(view: View, before: View | None, width: int | None, height: int | None) -> list[str]:
    """Give the screen; without a height all there is."""
    tables = (
        output.table_lines(queues.COLUMNS, map(queues.row, view.queues), width),
        output.table_lines(workers.COLUMNS, map(workers.row, view.workers), width),
        output.table_lines(RUNNING, [_running(job) for job in view.running], width),
    )
    lines = [_head(view, before)]
    if view.breakers:
        names = ", ".join(f"{breaker.name} {breaker.state.replace('_', ' ')}" for breaker in view.breakers)
        lines.append(output.plain(f"breakers: {names}"))
    shares = _shares(
        [len(table) for table in tables], None if height is None else height - len(lines) - len(tables)
    )
    for table, share, empty in zip(tables, shares, ("no queues", "no workers", "nothing runs"), strict=True):
        lines.append("")
        if not table:
            lines.append(empty)
        elif len(table) <= share:
            lines += table
        else:
            lines += [*table[: max(share - 1, 1)], f"... {len(table) - max(share - 1, 1):,} more"]
    if width is not None:
        lines = [output.shorten(line, width) for line in lines]
    return lines if height is None else lines[:height]


def _shares(lengths: Sequence[int], room: int | None) -> list[int]:
    """Share the room out: whoever needs less than a fair part leaves the rest to the others."""
    if room is None:
        return list(lengths)
    wanted = [max(length, 1) for length in lengths]
    shares = dict.fromkeys(range(len(wanted)), 0)
    for left, place in zip(
        range(len(wanted), 0, -1), sorted(shares, key=lambda each: wanted[each]), strict=True
    ):
        shares[place] = min(wanted[place], max(room, 0) // left)
        room -= shares[place]
    return [shares[place] for place in range(len(wanted))]


def _head(view: View, before: View | None) -> str:
    live = [worker for worker in view.workers if not worker.is_silent]
    running = sum(worker.running for worker in live)
    slots = sum(worker.slots for worker in live)
    said = [
        f"{view.flow.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC",
        f"{output.counted(len(live), 'worker')}, {running:,} of {output.counted(slots, 'slot')} taken",
    ]
    if before is not None:
        seconds = max((view.flow.at - before.flow.at).total_seconds(), 0.001)
        said.append(
            f"in {max(view.flow.came - before.flow.came, 0) / seconds:,.0f}/s, "
            f"out {max(view.flow.went - before.flow.went, 0) / seconds:,.0f}/s"
        )
    return "   ".join(said)


def _running(job: RunningJob) -> list[output.Cell]:
    if job.lease_expires_at < job.seen_at:
        note = f"lease ended {output.ago(job.lease_expires_at, job.seen_at)}"
    elif job.cancel_requested_at is not None:
        note = f"asked to stop {output.ago(job.cancel_requested_at, job.seen_at)}"
    elif job.deadline_at is not None and job.deadline_at < job.seen_at:
        note = "overdue"
    else:
        note = ""
    return [
        job.id,
        output.elapsed(job.started_at, job.seen_at),
        None if job.deadline_at is None else output.ago(job.deadline_at, job.seen_at),
        job.queue,
        job.task,
        f"{job.attempt}/{job.max_attempts}",
        f"{job.worker_host} ({job.worker_pid})" if job.worker_host else None,
        note,
    ]


# The screen.


def _watch(seconds: float, count: int | None, dsn: str | None, schema: str) -> None:
    with _screen():
        try:
            _refresh(seconds, count, dsn, schema)
        except KeyboardInterrupt:
            return


def _refresh(seconds: float, count: int | None, dsn: str | None, schema: str) -> None:
    from pgqueue.database import Error, is_infrastructure, redact
    from pgqueue.errors import DatabaseUnreachable

    before: View | None = None
    view: View | None = None
    away_since: float | None = None
    looks = 0
    while count is None or looks < count:
        try:
            with open_database(dsn, schema) as connection:
                while count is None or looks < count:
                    before, view = view, _look(connection, schema)
                    away_since = None
                    looks += 1
                    _draw(view, before, None)
                    if _is_over(seconds):
                        return
        except (Error, DatabaseUnreachable) as error:
            # Whoever has seen nothing yet is better off with the error itself.
            if view is None or not is_infrastructure(error):
                raise
            away_since = time.monotonic() if away_since is None else away_since
            reason = redact(str(error)).partition("\n")[0]
            since = output.duration(time.monotonic() - away_since)
            _draw(view, before, f"the database has been away for {since}, trying again: {reason}")
            if _is_over(seconds):
                return


def _draw(view: View, before: View | None, trouble: str | None) -> None:
    size = shutil.get_terminal_size()
    first = [] if trouble is None else [output.shorten(output.plain(trouble), size.columns)]
    lines = [*first, *_lines(view, before, size.columns, size.lines - len(first))]
    frame = "\r\n".join(f"{line}\x1b[K" for line in lines)
    sys.stdout.write(f"\x1b[H{frame}\x1b[J")
    sys.stdout.flush()


def _is_over(seconds: float) -> bool:
    """Wait that long, or for a key; say whether it is the one that ends the view."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            readable, _, _ = select.select([sys.stdin], [], [], left)
        except InterruptedError:
            continue
        if not readable:
            return False
        key = sys.stdin.read(1)
        if key in ("q", "Q", "\x03", "\x04", ""):
            return True
        if key in (" ", "\r", "\n"):
            return False
    return False


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Take the terminal's other screen, without echo and cursor, and give all of it back in the end."""
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    was = termios.tcgetattr(keyboard)
    handler = signal.signal(signal.SIGTERM, _end)
    try:
        tty.setcbreak(keyboard)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        yield
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, was)
        signal.signal(signal.SIGTERM, handler)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
