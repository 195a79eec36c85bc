"""`pgqueue dlq`: the dead letters, and what a person does with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli import output
from pgqueue.cli.jobs import print_details, print_outcomes
from pgqueue.cli.options import (
    DURATION,
    JOB_ID,
    complete_queue,
    complete_task,
    database_options,
    json_option,
    open_database,
)
from pgqueue.shell import write_command

if TYPE_CHECKING:
    from pgqueue.admin import DeadFilter, Outcome

Command = TypeVar("Command", bound=Callable[..., Any])

# Slower, a job waits for months; faster, the rate is none.
SLOWEST, FASTEST = 0.0001, 1_000_000


class Rate(click.FloatRange):
    """Jobs a second; what is not a number lies in every range of click's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        rate: float = super().convert(value, param, ctx)
        if math.isnan(rate):
            self.fail(f"{value!r} is not a rate", param, ctx)
        return rate


def _filter_options(command: Command) -> Command:
    for option in (
        click.option(
            "--older-than", type=DURATION, metavar="TIME", help="Only what died longer ago: 30m, 2h, 7d."
        ),
        click.option("--reason", metavar="TEXT", help="Only where the reason contains this text."),
        click.option("--task", "-t", shell_complete=complete_task, help="Only this task."),
        click.option("--queue", "-q", shell_complete=complete_queue, help="Only this queue."),
    ):
        command = option(command)
    return command


@click.group(short_help="List, show, redrive and purge dead jobs.")
def command() -> None:
    """Look at dead jobs, put them back, delete them.

    A job is dead when it used up its attempts or failed in a way that no retry mends. It is kept
    with its arguments and all its errors until somebody decides.

    \b
    Example:
      pgqueue dlq list --queue mail
      pgqueue dlq redrive --queue mail --reason "connection refused" --rate 10
    """


@command.command("list")
@_filter_options
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many."
)
@json_option
@database_options
def list_(
    queue: str | None,
    task: str | None,
    reason: str | None,
    older_than: float | None,
    limit: int,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """List dead jobs, the latest first.

    \b
    Example:
      pgqueue dlq list
      pgqueue dlq list --task send_welcome --reason timeout --json
    """
    from pgqueue import admin

    which = admin.DeadFilter(queue=queue, task=task, reason=reason, older_than_seconds=older_than)
    with open_database(dsn, schema) as connection:
        jobs = admin.list_dead(connection, which, limit + 1, schema)
    if as_json:
        output.document(jobs[:limit])
        return
    columns = [
        output.Column("id", is_number=True),
        output.Column("died", is_number=True),
        output.Column("queue", may_shrink=True),
        output.Column("task", may_shrink=True),
        output.Column("attempt", is_number=True),
        output.Column("reason", may_shrink=True),
    ]
    rows: list[list[output.Cell]] = [
        [
            job.id,
            output.ago(job.died_at, job.seen_at),
            job.queue,
            job.task,
            f"{job.attempt}/{job.max_attempts}",
            output.headline(job.reason),
        ]
        for job in jobs[:limit]
    ]
    output.table(columns, rows, empty="no dead jobs")
    if len(jobs) > limit:
        output.say("there are more: use a filter, or a higher --limit")


@command.command()
@click.argument("job_id", metavar="ID", type=JOB_ID)
@json_option
@database_options
def show(job_id: int, as_json: bool, dsn: str | None, schema: str) -> None:
    """Show everything that is kept about one dead job.

    \b
    Example:
      pgqueue dlq show 42
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        job = admin.show_job(connection, job_id, schema)
    if job.state != "dead":
        raise click.ClickException(
            f"job {job_id} is not dead but {job.state}; "
            f"see: {write_command('jobs show', job_id, schema=schema)}"
        )
    if as_json:
        output.document(job)
        return
    print_details(job, schema)
    output.say(f"\nput it back with: {write_command('dlq redrive', job_id, schema=schema)}")


@command.command()
@click.argument("job_ids", metavar="[ID]...", type=JOB_ID, nargs=-1)
@_filter_options
@click.option("--all", "is_all", is_flag=True, help="Every dead job.")
@click.option("--rate", type=Rate(SLOWEST, FASTEST), metavar="N", help="At most N jobs a second.")
@click.option(
    "--attempts",
    "extra_attempts",
    type=click.IntRange(1, 100_000),
    default=5,
    show_default=True,
    help="So many more attempts for each.",
)
@click.option("--dry-run", is_flag=True, help="Only say how many it would be.")
@json_option
@database_options
def redrive(
    job_ids: Sequence[int],
    queue: str | None,
    task: str | None,
    reason: str | None,
    older_than: float | None,
    is_all: bool,
    rate: float | None,
    extra_attempts: int,
    dry_run: bool,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Put dead jobs back to work.

    The given ones, those that match every filter, or --all. They keep their ids and their history and
    are ready at once. One whose unique key a live job holds meanwhile stays dead, and is reported.
    What dies during the run is not tried again. Ends with 1 if one could not be put back.

    \b
    Example:
      pgqueue dlq redrive 42 43
      pgqueue dlq redrive --task send_welcome --older-than 1h --dry-run
      pgqueue dlq redrive --all --rate 20
    """
    from pgqueue import admin

    which = _which(job_ids, queue, task, reason, older_than, is_all)
    outcomes: list[Outcome] = []
    with open_database(dsn, schema) as connection:
        total, until = admin.count_dead(connection, which, schema)
        if dry_run:
            _print_count(total, "would be put back", as_json)
            return
        try:
            with output.progress("putting back", total) as advance:
                for batch in admin.redrive(
                    connection, which, until, per_second=rate, extra_attempts=extra_attempts, schema=schema
                ):
                    outcomes += batch
                    advance(len(batch))
        except BaseException:
            output.say(f"stopped after {len(outcomes):,} of {total:,}; the others are still dead")
            raise
    if as_json:
        print_outcomes(outcomes, as_json)
        return
    counts = Counter(each.outcome.replace("_", " ") for each in outcomes)
    told = [f"put back {output.counted(counts.pop('ready', 0), 'job')}"]
    output.say("; ".join(told + [f"{count:,} {outcome}" for outcome, count in counts.items()]))
    # A thousand lines that say "ready" would hide the three that do not.
    shown = outcomes if job_ids else [each for each in outcomes if not each.is_done]
    if shown:
        print_outcomes(shown, as_json)


@command.command()
@click.argument("job_ids", metavar="[ID]...", type=JOB_ID, nargs=-1)
@_filter_options
@click.option("--all", "is_all", is_flag=True, help="Every dead job.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say how many it would be.")
@json_option
@database_options
def purge(
    job_ids: Sequence[int],
    queue: str | None,
    task: str | None,
    reason: str | None,
    older_than: float | None,
    is_all: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Delete dead jobs for good.

    The given ones, those that match every filter, or --all. Says how many and asks before it deletes,
    unless --yes is given. Ends with 1 if one of the given ids was not there.

    \b
    Example:
      pgqueue dlq purge --older-than 30d --dry-run
      pgqueue dlq purge --task old_report --yes
    """
    from pgqueue import admin

    which = _which(job_ids, queue, task, reason, older_than, is_all)
    purged: list[int] = []
    with open_database(dsn, schema) as connection:
        total, until = admin.count_dead(connection, which, schema)
        if dry_run:
            _print_count(total, "would be deleted", as_json)
            return
        if total and not yes:
            question = f"Delete {output.counted(total, 'dead job')} for good?"
            if not click.confirm(question, err=True):
                output.say("nothing was deleted")
                click.get_current_context().exit(1)
        try:
            with output.progress("deleting", total) as advance:
                for batch in admin.purge_dead(connection, which, until, schema):
                    purged += batch
                    advance(len(batch))
        except BaseException:
            output.say(f"stopped after {len(purged):,} of {total:,}; the others are still there")
            raise
    missing = sorted(set(job_ids) - set(purged))
    if as_json:
        output.document({"deleted": len(purged), "missing": missing})
    else:
        output.say(f"deleted {output.counted(len(purged), 'dead job')}")
        if missing:
            output.say(f"not among these dead jobs: {', '.join(map(str, missing))}")
    if missing:
        click.get_current_context().exit(1)


def _which(
    job_ids: Sequence[int],
    queue: str | None,
    task: str | None,
    reason: str | None,
    older_than: float | None,
    is_all: bool,
) -> DeadFilter:
    from pgqueue.admin import DeadFilter

    filters = (queue, task, reason, older_than)
    is_narrowed = bool(job_ids) or any(each is not None for each in filters)
    if is_all and is_narrowed:
        raise click.UsageError("--all means every dead job; leave it out, or leave out the ids and filters")
    if not is_all and not is_narrowed:
        raise click.UsageError("which dead jobs? give ids, a filter, or --all")
    return DeadFilter(
        job_ids=job_ids or None, queue=queue, task=task, reason=reason, older_than_seconds=older_than
    )


def _print_count(total: int, what: str, as_json: bool) -> None:
    if as_json:
        output.document({"matching": total})
    else:
        click.echo(f"{output.counted(total, 'dead job')} {what}")
