"""`pgqueue jobs`: look at jobs wherever they are, cancel them, let them run now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli import output
from pgqueue.cli.options import (
    JOB_ID,
    complete_queue,
    complete_task,
    database_options,
    json_option,
    open_database,
)

if TYPE_CHECKING:
    from pgqueue.admin import JobDetails, JobSummary, Outcome

LIVE = ("scheduled", "ready", "blocked", "running")
STATES = (*LIVE, "succeeded", "cancelled", "dead")
# Enough to tell one job from another; --json and `show` have all of it.
SHOWN_CHARS = 200


@click.group(short_help="List, show, cancel and retry jobs.")
def command() -> None:
    """Look at jobs, cancel them, let them run now.

    \b
    Example:
      pgqueue jobs list --state dead --queue mail
      pgqueue jobs show 42
    """


@command.command("list")
@click.option(
    "--state",
    "states",
    type=click.Choice([*STATES, "live"]),
    multiple=True,
    metavar="STATE",
    help=f"Only this state: {', '.join(STATES)}; or live for the first four. May be repeated.",
)
@click.option("--queue", "-q", shell_complete=complete_queue, help="Only this queue.")
@click.option("--task", "-t", shell_complete=complete_task, help="Only this task.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many."
)
@click.option(
    "--after", type=JOB_ID, metavar="ID", help="Continue below this id, the last one of the page before."
)
@json_option
@database_options
def list_(
    states: Sequence[str],
    queue: str | None,
    task: str | None,
    limit: int,
    after: int | None,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """List jobs, live and ended, the newest first.

    WHEN is when a job came into its state; for a scheduled one, when it becomes due.

    \b
    Example:
      pgqueue jobs list
      pgqueue jobs list --state running --state blocked --queue mail --json
    """
    from pgqueue import admin
    from pgqueue.model.job import JobState

    wanted = [JobState(each) for state in states or STATES for each in (LIVE if state == "live" else [state])]
    with open_database(dsn, schema) as connection:
        jobs = admin.list_jobs(
            connection,
            states=wanted,
            queue=queue,
            task=task,
            below_id=after,
            limit=limit + 1,
            max_chars=None if as_json else SHOWN_CHARS + 1,
            schema=schema,
        )
    page, has_more = jobs[:limit], len(jobs) > limit
    if as_json:
        output.document({"jobs": page, "after": page[-1].id if has_more else None})
        return
    _print_jobs(page)
    if has_more:
        output.say(f"there are more: --after {page[-1].id}")


@command.command()
@click.argument("job_id", metavar="ID", type=JOB_ID)
@json_option
@database_options
def show(job_id: int, as_json: bool, dsn: str | None, schema: str) -> None:
    """Show everything that is kept about one job.

    Where it is and why, its arguments, its result or progress, and each failed attempt.

    \b
    Example:
      pgqueue jobs show 42
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        job = admin.show_job(connection, job_id, schema)
    if as_json:
        output.document(job)
    else:
        print_details(job)


@command.command()
@click.argument("job_ids", metavar="ID...", type=JOB_ID, nargs=-1, required=True)
@click.option("--reason", default="cancelled by hand", show_default=True, help="Kept with the job.")
@json_option
@database_options
def cancel(job_ids: Sequence[int], reason: str, as_json: bool, dsn: str | None, schema: str) -> None:
    """Cancel jobs: a waiting one ends now, a running one is asked to stop.

    A running job hears it within seconds and never runs again, whether it stops or not.
    Ends with 1 if one of them could not be cancelled.

    \b
    Example:
      pgqueue jobs cancel 42 43 --reason "wrong customer"
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        outcomes = admin.cancel(connection, job_ids, reason, schema)
    print_outcomes(outcomes, as_json)


@command.command()
@click.argument("job_ids", metavar="ID...", type=JOB_ID, nargs=-1, required=True)
@json_option
@database_options
def retry(job_ids: Sequence[int], as_json: bool, dsn: str | None, schema: str) -> None:
    """Let jobs run now: scheduled ones at once, dead ones once more.

    A dead job comes back with five more attempts and its history. Ends with 1 if one of them
    could not be retried.

    \b
    Example:
      pgqueue jobs retry 42 43
    """
    from pgqueue import admin

    with open_database(dsn, schema) as connection:
        outcomes = admin.retry(connection, job_ids, schema=schema)
    print_outcomes(outcomes, as_json)


def print_outcomes(outcomes: Sequence[Outcome], as_json: bool) -> None:
    """Print what became of each job; end with 1 unless all was done."""
    if as_json:
        output.document(outcomes)
    else:
        columns = [
            output.Column("id", is_number=True),
            output.Column("outcome"),
            output.Column("why", may_shrink=True),
        ]
        output.table(columns, [(o.job_id, o.outcome, o.reason or "") for o in outcomes], empty="no jobs")
    if not all(each.is_done for each in outcomes):
        click.get_current_context().exit(1)


def _print_jobs(jobs: Sequence[JobSummary]) -> None:
    has_reasons = any(job.reason for job in jobs)
    columns = [
        output.Column("id", is_number=True),
        output.Column("state"),
        output.Column("when", is_number=True),
        output.Column("queue", may_shrink=True),
        output.Column("task", may_shrink=True),
        output.Column("attempt", is_number=True),
        *([output.Column("reason", may_shrink=True)] if has_reasons else []),
        output.Column("args", may_shrink=True),
    ]
    rows = [
        (
            job.id,
            job.state,
            output.ago(job.since_at, job.seen_at),
            job.queue,
            job.task,
            f"{job.attempt}/{job.max_attempts}" if job.max_attempts else job.attempt,
            *([output.headline(job.reason or "")] if has_reasons else []),
            output.shorten(job.args, SHOWN_CHARS),
        )
        for job in jobs
    ]
    output.table(columns, rows, empty="no jobs")


def print_details(job: JobDetails) -> None:
    """Print one job for a person: first where it is and why, then what is known."""
    now = job.seen_at
    click.echo(output.plain(f"job {job.id} {_where(job)}") + "\n")
    output.fields(
        [
            ("task", job.task),
            ("queue", job.queue + (" (paused)" if job.queue_is_paused else "")),
            ("priority", job.priority),
            ("attempts", f"{job.attempt} of {job.max_attempts}" if job.max_attempts else job.attempt),
            ("crashes", job.crashes or None),
            ("timeout", _timeout(job.timeout_seconds)),
            ("created", output.instant(job.created_at, now)),
            ("due", output.instant(job.run_at, now)),
            ("started", output.instant(job.started_at, now)),
            ("ended", output.instant(job.ended_at, now)),
            ("deadline", output.instant(job.deadline_at, now)),
            ("heartbeat", output.instant(job.heartbeat_at, now)),
            ("lease ends", output.instant(job.lease_expires_at, now)),
            ("cancel asked", output.instant(job.cancel_requested_at, now)),
            ("worker", _worker(job)),
            ("concurrency key", _concurrency(job)),
            ("unique key", job.unique_key),
            ("idempotency key", job.idempotency_key),
            ("rate key", job.rate_key),
        ]
    )
    if job.reason and not job.errors:
        output.heading("reason")
        output.block(job.reason)
    for title, text in (
        ("args", job.args),
        ("headers", job.headers),
        ("progress", job.progress),
        ("result", job.result),
    ):
        if text is not None:
            output.heading(title)
            output.block(output.pretty(text))
    if job.errors:
        output.heading("errors")
        _print_errors(job.errors, now)


def _where(job: JobDetails) -> str:
    now = job.seen_at
    ended = output.ago(job.ended_at or now, now)
    reason = f": {output.headline(job.reason)}" if job.reason else ""
    match job.state:
        case "scheduled" if job.rate_parked_at is not None:
            return f"waits for its rate limit {job.rate_key!r}"
        case "scheduled" if job.run_at > now:
            return f"is scheduled and runs {output.ago(job.run_at, now)}"
        case "scheduled":
            return "is scheduled and due now"
        case "ready" if job.queue_is_paused:
            return f"is ready, but the queue {job.queue!r} is paused"
        case "ready":
            return f"is ready and has waited {output.elapsed(job.run_at, now)} for a worker"
        case "blocked":
            held = ", ".join(map(str, job.concurrency_holders)) or "nobody any more"
            return f"is blocked: its concurrency key {job.concurrency_key!r} is held by {held}"
        case "running":
            asked = job.cancel_requested_at
            return f"has been running for {output.elapsed(job.started_at or now, now)} on {_worker(job)}" + (
                f" and was asked to stop {output.ago(asked, now)}" if asked else ""
            )
        case "succeeded":
            return f"succeeded {ended}" + (f"; its result was not kept{reason}" if reason else "")
        case "cancelled":
            return f"was cancelled {ended}{reason}"
        case _:
            return f"died {ended}{reason}"


def _worker(job: JobDetails) -> str | None:
    if job.worker_id is None:
        return None
    return f"{job.worker_host} (pid {job.worker_pid})" if job.worker_host else str(job.worker_id)


def _concurrency(job: JobDetails) -> str | None:
    if job.concurrency_key is None or job.concurrency_limit is None:
        return job.concurrency_key
    return f"{job.concurrency_key} (at most {job.concurrency_limit} at a time)"


def _timeout(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds:g} s" if seconds else "none"


def _print_errors(text: str, now: datetime) -> None:
    try:
        errors: list[dict[str, Any]] = json.loads(text)
        for error in errors:
            at = output.instant(datetime.fromisoformat(error["at"]), now)
            click.echo(output.plain(f"  attempt {error['attempt']}, {at}"))
            output.block(str(error["error"]), indent="    ")
    except (ValueError, TypeError, LookupError):  # written by somebody else: shown as it is
        output.block(output.pretty(text))
