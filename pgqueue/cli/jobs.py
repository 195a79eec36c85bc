"""`pgqueue jobs`: look at jobs wherever they are, cancel them, let them run now."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli import output
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
    from pgqueue.admin import JobDetails, JobSummary, LiveFilter, Outcome
    from pgqueue.database import Connection

LIVE = ("scheduled", "ready", "blocked", "running")
STATES = (*LIVE, "succeeded", "cancelled", "dead")
# Enough to tell one job from another; --json and `show` have all of it.
SHOWN_CHARS = 200


@click.group(short_help="List, show, explain, cancel and retry jobs.")
def command() -> None:
    """Look at jobs, cancel them, let them run now.

    \b
    Example:
      pgqueue jobs list --state dead --queue mail
      pgqueue jobs show 42
      pgqueue jobs why 42
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

    WHEN is when a job came into its state; for a scheduled one, when it becomes due, or what it waits
    for instead of a time: its rate limit or its breaker.

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
        print_details(job, schema)


@command.command()
@click.argument("job_id", metavar="ID", type=JOB_ID)
@json_option
@database_options
def why(job_id: int, as_json: bool, dsn: str | None, schema: str) -> None:
    """Say why a job does not run, or what became of it, and what to do next.

    Its first line is the decisive cause: a pause and who made it, a busy key and who holds it, a rate
    limit, a breaker, no worker, a locked row, the error it died of. What would hold it up after that
    follows. With --json each cause has a `code` that stays the same.

    \b
    Example:
      pgqueue jobs why 42
    """
    from pgqueue import diagnosis

    with open_database(dsn, schema) as connection:
        answer = diagnosis.why(connection, job_id, schema)
    if as_json:
        output.document(answer)
        return
    first, *rest = answer.causes
    said = first.sentence
    # Of one that waits the state is worth a word; of another the sentence says it.
    if answer.state in ("scheduled", "ready", "blocked") or not said.startswith("it "):
        said = f"is {answer.state}: {said}"
    click.echo(output.plain(f"job {answer.job_id} ({answer.task}) {said.removeprefix('it ')}"))
    output.commands(first.next)
    for cause in rest:
        click.echo(f"\nalso: {output.plain(cause.sentence)}")
        output.commands(cause.next)


@command.command()
@click.argument("job_ids", metavar="[ID]...", type=JOB_ID, nargs=-1)
@click.option(
    "--state",
    "states",
    type=click.Choice([*LIVE, "live"]),
    multiple=True,
    metavar="STATE",
    help=f"Only in this state: {', '.join(LIVE)}. May be repeated.",
)
@click.option("--queue", "-q", shell_complete=complete_queue, help="Only in this queue.")
@click.option("--task", "-t", shell_complete=complete_task, help="Only of this task.")
@click.option(
    "--older-than", type=DURATION, metavar="TIME", help="Only what was enqueued longer ago: 30m, 2h, 7d."
)
@click.option("--reason", default="cancelled by hand", show_default=True, help="Kept with the job.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say how many it would be.")
@json_option
@database_options
def cancel(
    job_ids: Sequence[int],
    states: Sequence[str],
    queue: str | None,
    task: str | None,
    older_than: float | None,
    reason: str,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """Cancel jobs: a waiting one ends now, a running one is asked to stop.

    The given ones, or those that match every filter; then it says how many first, and asks, or wants
    --yes where nobody can be asked. What is enqueued during the run is left alone. A running job
    hears it within seconds and never runs again, whether it stops or not. Ends with 1 if one of
    them could not be cancelled.

    \b
    Example:
      pgqueue jobs cancel 42 43 --reason "wrong customer"
      pgqueue jobs cancel --task send_welcome --state ready --state scheduled
      pgqueue jobs cancel --queue mail --older-than 1h --dry-run
    """
    from pgqueue import admin

    filters = (states or None, queue, task, older_than)
    is_filtered = any(each is not None for each in filters)
    if job_ids and is_filtered:
        raise click.UsageError("either ids or filters: ids name the jobs already")
    if not job_ids and not is_filtered:
        raise click.UsageError("which jobs? give ids, or filters: --task, --queue, --state, --older-than")
    with open_database(dsn, schema) as connection:
        if job_ids:
            if dry_run:
                raise click.UsageError("--dry-run counts what filters match")
            print_outcomes(admin.cancel(connection, job_ids, reason, schema), as_json)
            return
        which = admin.LiveFilter(
            states=LIVE if not states or "live" in states else states,
            queue=queue,
            task=task,
            older_than_seconds=older_than,
        )
        _cancel_matching(connection, which, reason, schema, yes=yes, dry_run=dry_run, as_json=as_json)


def _cancel_matching(
    connection: Connection[Any],
    which: LiveFilter,
    reason: str,
    schema: str,
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from pgqueue import admin

    counts, until = admin.count_live(connection, which, schema)
    total = sum(counts.values())
    told = ", ".join(f"{counts[state]:,} {state}" for state in LIVE if state in counts)
    matching = output.counted(total, "job") + (f" ({told})" if told else "")
    if dry_run:
        if as_json:
            output.document({"matching": total, "states": counts})
        else:
            click.echo(f"{matching} would be cancelled")
        return
    if total and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"{matching} match; to cancel them without being asked, add --yes")
        if not click.confirm(f"Cancel {matching}?", err=True):
            output.say("nothing was cancelled")
            click.get_current_context().exit(1)
    outcomes: list[Outcome] = []
    try:
        with output.progress("cancelling", total) as advance:
            for batch in admin.cancel_matching(connection, which, until, reason, schema):
                outcomes += batch
                advance(len(batch))
    except BaseException:
        output.say(f"stopped after {len(outcomes):,} of {total:,}; the others go on as before")
        raise
    ended = Counter(each.outcome for each in outcomes)
    if as_json:
        output.document({"matching": total, "outcomes": ended})
    else:
        output.say(f"cancelled {output.counted(ended.pop('cancelled', 0), 'job')}")
        if asked := ended.pop("requested", 0):
            output.say(f"asked {output.counted(asked, 'running job')} to stop")
        if rest := ended.total():
            output.say(f"{output.counted(rest, 'job')} ended meanwhile")


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
            job.waits_for.replace("_", " ") if job.waits_for else output.ago(job.since_at, job.seen_at),
            job.queue,
            job.task,
            f"{job.attempt}/{job.max_attempts}" if job.max_attempts else job.attempt,
            *([output.headline(job.reason or "")] if has_reasons else []),
            output.shorten(job.args, SHOWN_CHARS),
        )
        for job in jobs
    ]
    output.table(columns, rows, empty="no jobs")


def print_details(job: JobDetails, schema: str) -> None:
    """Print one job for a person: first where it is and why, then what is known."""
    now = job.seen_at
    click.echo(output.plain(f"job {job.id} {_where(job, schema)}") + "\n")
    output.fields(
        [
            ("task", job.task),
            ("queue", _queue(job)),
            ("priority", job.priority),
            ("attempts", f"{job.attempt} of {job.max_attempts}" if job.max_attempts else job.attempt),
            ("crashes", job.crashes or None),
            ("timeout", _timeout(job.timeout_seconds)),
            ("created", output.instant(job.created_at, now)),
            ("due", _due(job)),
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


def _where(job: JobDetails, schema: str) -> str:
    now = job.seen_at
    ended = output.ago(job.ended_at or now, now)
    reason = f": {output.headline(job.reason)}" if job.reason else ""
    match job.state:
        case "scheduled" if job.rate_parked_at is not None:
            return f"waits for its rate limit {job.rate_key!r}"
        case "scheduled" if job.parked_by_breaker is not None:
            see = write_command("breakers", schema=schema)
            return f"waits for its circuit breaker {job.parked_by_breaker!r}; see: {see}"
        case "scheduled" if job.run_at > now:
            return f"is scheduled and runs {output.ago(job.run_at, now)}"
        case "scheduled":
            return "is scheduled and due now"
        case "ready" if job.queue_is_paused:
            until = job.queue_paused_until
            ends = f" for another {output.elapsed(now, until)}" if until else ""
            why = f": {output.headline(job.queue_reason)}" if job.queue_reason else ""
            return f"is ready, but the queue {job.queue!r} is paused{ends}{why}"
        case "ready" if job.queue_max_running == 0:
            why = f": {output.headline(job.queue_reason)}" if job.queue_reason else ""
            return f"is ready, but the queue {job.queue!r} may start nothing{why}"
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


def _due(job: JobDetails) -> str | None:
    # What is parked has a run_at too, at which somebody looks at it again.
    if job.rate_parked_at is not None:
        return "rate limit"
    if job.parked_by_breaker is not None:
        return "breaker"
    return output.instant(job.run_at, job.seen_at)


def _queue(job: JobDetails) -> str:
    notes = ["paused"] if job.queue_is_paused else []
    if job.queue_max_running is not None:
        notes.append(f"at most {job.queue_max_running:,} of its jobs run at a time")
    return job.queue + (f" ({', '.join(notes)})" if notes else "")


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
