"""`pgqueue log`: who did what to the queue."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from pgqueue.cli import output
from pgqueue.cli.options import DURATION, database_options, json_option, open_database

if TYPE_CHECKING:
    from pgqueue.audit import Entry


@click.command(short_help="See who paused, cancelled, redrove or changed what, and when.")
@click.argument("subject", metavar="[NAME]", required=False)
@click.option(
    "--action",
    metavar="ACTION",
    help="Only this: queue.pause, jobs.cancel; or a kind: queue, jobs, limit, schedule, breaker.",
)
@click.option("--since", type=DURATION, metavar="TIME", help="Only what was done so lately: 30m, 2h, 7d.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many."
)
@json_option
@database_options
def command(
    subject: str | None,
    action: str | None,
    since: float | None,
    limit: int,
    as_json: bool,
    dsn: str | None,
    schema: str,
) -> None:
    """See what people and programs did to the queue, the latest first.

    With NAME, only to the queue, rate limit, schedule or circuit breaker of this name. WHO is the
    person or program behind it and, in brackets, the database role that was logged in. This program
    says its account and machine, or what PGQUEUE_ACTOR holds; others say
    SET LOCAL pgqueue.actor = '...'. The database writes the entries itself, for every client, and
    keeps them for 90 days.

    \b
    Example:
      pgqueue log --since 2h
      pgqueue log mail --action queue.pause
    """
    from pgqueue import audit

    with open_database(dsn, schema) as connection:
        entries = audit.read_log(
            connection, action=action, subject=subject, within_seconds=since, limit=limit, schema=schema
        )
    is_filtered = any(each is not None for each in (subject, action, since))
    if as_json:
        output.document(entries)
        return
    columns = [
        output.Column("at"),
        output.Column("when", is_number=True),
        output.Column("who", may_shrink=True),
        output.Column("what", may_shrink=True),
    ]
    rows = [
        (
            f"{entry.at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}",
            output.ago(entry.at, entry.seen_at),
            who(entry),
            what(entry),
        )
        for entry in entries
    ]
    output.table(columns, rows, empty="no entry matches" if is_filtered else "nothing was done")


def who(entry: Entry) -> str:
    return f"{entry.actor} ({entry.role})" if entry.actor else entry.role


def what(entry: Entry) -> str:
    """Say in one line what was done."""
    details: dict[str, Any] = json.loads(entry.details)
    said = _done(entry, details)
    if details.get("is_from_code"):
        said += ", as the code of a worker says"
    reason = details.get("reason")
    return f"{said}: {output.headline(reason)}" if reason else said


def _done(entry: Entry, details: dict[str, Any]) -> str:
    name, jobs = entry.subject, _jobs(entry.jobs or 0, details.get("job_ids", []))
    match entry.action:
        case "queue.pause":
            until = details.get("until")
            return f"paused queue {name}" + (f" until {_clock(until)}" if until else "")
        case "queue.resume":
            return f"resumed queue {name}"
        case "queue.limit" if details.get("max_running") is None:
            return f"removed the limit of queue {name}, which was {details.get('before'):,}"
        case "queue.limit":
            return (
                f"limited queue {name} to {output.counted(details['max_running'], 'running job')}"
                + _before(details.get("before"))
            )
        case "queue.retention":
            return f"changed how long queue {name} keeps its history" + _before(details.get("before"))
        case "queue.reset":
            return f"removed the settings of queue {name}"
        case "limit.set":
            return f"set rate limit {name} to {_rate(details)}" + _before(
                _rate(details["before"]) if "before" in details else None
            )
        case "limit.remove":
            return f"removed rate limit {name}"
        case "schedule.add" | "schedule.change":
            verb = "added" if entry.action == "schedule.add" else "changed"
            return f"{verb} schedule {name}: {details['cron']} {details['timezone']}, task {details['task']}"
        case "schedule.run":
            return f"ran schedule {name} by hand as {jobs}"
        case "breaker.open":
            seconds = details.get("seconds")
            return f"opened breaker {name}" + (
                f" for {output.duration(seconds)}" if seconds is not None else ""
            )
        case "breaker.set":
            settings = ", ".join(f"{key}={json.dumps(value)}" for key, value in details["settings"].items())
            return f"set breaker {name}: {settings}"
        case "jobs.cancel":
            asked = details.get("asked_to_stop")
            return f"cancelled {jobs}" + (f", {asked:,} of them running and asked to stop" if asked else "")
        case "jobs.redrive":
            return f"put back dead {jobs}"
        case "jobs.purge":
            return f"deleted dead {jobs}"
        case "jobs.retry":
            return f"let {jobs} run at once"
        case "processed.forget":
            return f"forgot idempotency key {name}, which was {details.get('status')}"
        case action:
            kind, _, verb = action.partition(".")
            done = {"pause": "paused", "resume": "resumed", "remove": "removed", "close": "closed"}.get(
                verb, verb
            )
            return f"{done} {kind} {name}"


def _jobs(count: int, job_ids: list[int]) -> str:
    if count <= 1 and job_ids:
        return f"job {job_ids[0]}"
    few = ", ".join(map(str, job_ids[:3]))
    return output.counted(count, "job") + (f" ({few}{', ...' if count > 3 else ''})" if few else "")


def _rate(details: dict[str, Any]) -> str:
    from pgqueue.limits import UNLIMITED
    from pgqueue.model.limits import rate_text

    if details["tokens_per_second"] == UNLIMITED.tokens_per_second:
        return "none"
    return f"{rate_text(details['tokens_per_second'])} (burst {details['burst']:,})"


def _before(value: object) -> str:
    return "" if value is None else f", was {value}"


def _clock(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
