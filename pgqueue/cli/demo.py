"""`pgqueue demo`: see it work, on one's own machine, in half a minute."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgqueue.cli import output
from pgqueue.cli.options import database_options, json_option

if TYPE_CHECKING:
    from pgqueue.demo.payments.course import Report as PaymentsReport
    from pgqueue.demo.report import Report

MOST_DIFFERENCES = 20
LONGEST_REASON = 70
WHAT_NEXT = """
What next:
  pgqueue dlq list -q demo               the dead jobs and why; the files are in table pgqueue_demo.files
  pgqueue worker --app shop.jobs:app     run the jobs of an application of yours
  pgqueue --help                         everything else"""


@click.group(short_help="See it work: enqueue, crash, recover, check.", invoke_without_command=True)
@click.option(
    "--files",
    "max_files",
    type=click.IntRange(min=100),
    metavar="N",
    help="Only the first N files, for a shorter demo; at least 100.",
)
@json_option
@database_options
@click.pass_context
def command(
    ctx: click.Context, max_files: int | None, as_json: bool, dsn: str | None, schema: str
) -> int | None:
    """Catalogue Python's standard library with a queue, kill a process half-way, check the result.

    Each source file is a job that writes its size, lines, checksum and top-level definitions into
    table pgqueue_demo.files. The jobs come by plain SQL, from Python and from a shell. A worker with
    two child processes runs them; one child is killed half-way, at work. Some files are no Python:
    their jobs end as dead letters. In the end every file is read again and compared.

    Nothing but queue `demo` and schema `pgqueue_demo` is touched; both stay until the next demo, to
    be looked at. The exit code is 0 if everything is as it should be, else 1.

    \b
    Example:
      pgqueue demo
      pgqueue demo payments
      pgqueue demo --json | jq .jobs_per_second
    """
    if ctx.invoked_subcommand is not None:
        return None
    from pgqueue.demo.course import Narrator, perform
    from pgqueue.dsn import resolve

    resolved = resolve(dsn, os.environ, schema=schema)
    report = perform(resolved.dsn, schema, Narrator(output.say, output.progress), max_files)
    if as_json:
        output.document(report)
    else:
        _print(report)
    if report.differences:
        output.say(f"pgqueue: {output.counted(len(report.differences), 'thing')} not as it should be")
        return 1
    output.say(WHAT_NEXT)
    return 0


@command.command()
@click.option(
    "--transfers",
    "count",
    type=click.IntRange(min=200, max=100_000),
    default=2_000,
    show_default=True,
    metavar="N",
)
@json_option
@database_options
def payments(count: int, as_json: bool, dsn: str | None, schema: str) -> int:
    """Move money once, although it is asked for twice and everything that can die dies.

    Four producers ask for each of N transfers between 100 accounts twice. Two workers carry them out:
    a transactional task moves the money, another one tells a bank on this machine, behind a circuit
    breaker. Children and a whole worker are killed at random; the bank is away for a while. In the
    end every account is compared to the cent, and the bank's books with ours.

    Nothing but queue `demo_payments` and schema `pgqueue_demo` is touched. The exit code is 0 if
    everything is as it should be, else 1.

    \b
    Example:
      pgqueue demo payments
    """
    from pgqueue.demo.course import Narrator
    from pgqueue.demo.payments.course import perform
    from pgqueue.dsn import resolve

    resolved = resolve(dsn, os.environ, schema=schema)
    report = perform(resolved.dsn, schema, Narrator(output.say, output.progress), count)
    if as_json:
        output.document(report)
    else:
        _print_payments(report)
    if report.differences:
        output.say(f"pgqueue: {output.counted(len(report.differences), 'thing')} not as it should be")
        return 1
    return 0


def _print_payments(report: PaymentsReport) -> None:
    output.heading("The money")
    output.fields(
        [
            ("asked for", f"{report.asked:,} transfers"),
            ("made", f"{report.transfers:,}, {report.cents_moved / 100:,.2f} in all"),
            ("repeated", f"{report.repeated:,}, which did nothing"),
        ]
    )
    output.heading("What went wrong meanwhile")
    killed = (
        f"{output.counted(report.killed_children, 'child process')}, {report.killed_workers} whole worker"
    )
    output.fields(
        [
            ("killed", killed.replace("processs", "processes")),
            ("ran again", f"{report.ran_again:,} jobs"),
            (
                "the bank",
                f"away for {report.bank_away_seconds:g} s, and was called {report.bank_refused:,} times then",
            ),
            ("breaker", f"changed {report.breaker_changes} times between open, half-open and closed"),
            ("bank's books", f"{report.settled:,} transfers; told {report.bank_repeated:,} of them twice"),
            ("all in all", f"{report.total_seconds:.1f} s"),
        ]
    )
    output.heading("Checked")
    if not report.differences:
        output.block(
            f"Each transfer once, each of {report.accounts} accounts right to the cent, "
            "the bank's books as ours, no job left."
        )
        return
    _print_differences(report.differences)


def _print(report: Report) -> None:
    ways = report.ways
    enqueued = (
        f"{report.jobs:,} jobs: {ways.get('sql', 0):,} by SQL, "
        f"{ways.get('enqueue_many', 0):,} in Python, {ways.get('cli', 0):,} by a shell"
    )
    pick_up = None
    if report.pick_up_p50_ms is not None:
        pick_up = (
            f"p50 {report.pick_up_p50_ms:.1f} ms, p95 {report.pick_up_p95_ms:.1f} ms from insert to handler, "
            f"{report.pick_ups} single jobs in an idle queue"
        )
    output.heading(f"The standard library of Python {report.python}")
    output.fields(
        [
            ("files", f"{report.files:,}"),
            ("bytes", f"{report.bytes:,}"),
            ("lines", f"{report.lines:,}"),
            ("definitions", f"{report.definitions:,} at top level"),
        ]
    )
    output.heading("The queue")
    output.fields(
        [
            ("enqueued", enqueued),
            ("succeeded", f"{report.succeeded:,}"),
            ("dead", f"{len(report.dead):,}"),
            ("ran again", f"{report.ran_again:,}, because their process was killed"),
            ("speed", f"{report.jobs_per_second:,.0f} jobs/s over {report.work_seconds:.1f} s"),
            ("pick-up", pick_up),
            ("all in all", f"{report.total_seconds:.1f} s"),
        ]
    )
    if report.dead:
        output.heading("Dead, and why")
        output.fields(
            sorted((_short(dead.path), output.shorten(dead.reason, LONGEST_REASON)) for dead in report.dead)
        )
    output.heading("Checked against the files")
    if not report.differences:
        output.block(
            "Every file once, every value right, every broken file dead for its reason, no job left."
        )
        return
    _print_differences(report.differences)


def _print_differences(differences: list[str]) -> None:
    for difference in differences[:MOST_DIFFERENCES]:
        output.block(difference)
    if len(differences) > MOST_DIFFERENCES:
        output.block(f"… and {len(differences) - MOST_DIFFERENCES:,} more")


def _short(path: str) -> str:
    root = Path(sysconfig.get_path("stdlib"))
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else Path(path).name
