"""Why a job does not run, or what became of it: every cause that holds, the decisive one first.

A cause is one sentence for a person and the command lines that come next. It is worked out from
what the database knows; nothing is written and nothing is locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqueue.database import Connection, run
from pgqueue.errors import JobNotFound
from pgqueue.model.job import JobState
from pgqueue.model.limits import MAX_TOKENS_PER_SECOND, rate_text
from pgqueue.model.spoken import ago, counted, duration, elapsed, headline, instant
from pgqueue.shell import write_command, write_termination
from pgqueue.sql import inspect
from pgqueue.sql import why as questions
from pgqueue.sql.inspect import JobDetails

# A claim, a heartbeat, a completion have the row for milliseconds.
PASSING_LOCK_SECONDS = 1.0
# Whoever promotes looks every second, whoever reaps too, and the sweep comes every minute.
PROMOTION_SECONDS = 10.0
# A worker says so every thirty seconds, and writes it down every minute.
KNOWN_TASK_SECONDS = 300.0
PUT_OFF_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason, named by `code` for programs; `next` are command lines that lead on."""

    code: str
    sentence: str
    next: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Why:
    """Where a job is and why: the decisive cause first, then what would hold it up next."""

    job_id: int
    state: str
    queue: str
    task: str
    causes: Sequence[Cause]
    seen_at: datetime


def why(connection: Connection[Any], job_id: int, schema: str = "pgqueue") -> Why:
    """Say why a job is where it is.

    Raises:
        JobNotFound: there is none, or its history is no longer kept.
    """
    job = run(connection, inspect.show_job(job_id), schema)
    if job is None:
        raise JobNotFound(job_id)
    causes = list(_Case(connection, job, schema).causes())
    return Why(job.id, job.state, job.queue, job.task, causes, job.seen_at)


class _Case:
    """One job under examination."""

    def __init__(self, connection: Connection[Any], job: JobDetails, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._job = job
        self._now = job.seen_at

    def causes(self) -> Iterator[Cause]:
        match self._job.state:
            case JobState.SUCCEEDED:
                yield self._succeeded()
            case JobState.CANCELLED:
                yield self._cancelled()
            case JobState.DEAD:
                yield self._dead()
            case JobState.RUNNING:
                yield from self._running()
            case _:
                yield from self._waiting()

    # Ended.

    def _succeeded(self) -> Cause:
        job = self._job
        took = f" after {elapsed(job.started_at, job.ended_at)}" if job.started_at and job.ended_at else ""
        kept = f"; its result was not kept: {headline(job.reason)}" if job.reason else ""
        return Cause(
            "succeeded", f"it succeeded {self._ended()}{took}{kept}", [self._command("jobs show", job.id)]
        )

    def _cancelled(self) -> Cause:
        deed = run(self._connection, questions.done_to_job(self._job.id), self._schema)
        reason = f": {headline(self._job.reason)}" if self._job.reason else ""
        return Cause(
            "cancelled",
            f"it was cancelled {self._ended()}{_by(deed)}{reason}",
            [self._command("jobs show", self._job.id)],
        )

    def _dead(self) -> Cause:
        job = self._job
        reason = headline(job.reason or "unknown")
        used = f"attempt {job.attempt} of {job.max_attempts}"
        if job.crashes:
            used += f", after its process died {counted(job.crashes, 'time')}"
        return Cause(
            "dead",
            f"it died {self._ended()} at {used}: {reason}",
            [self._command("dlq show", job.id), self._command("dlq redrive", job.id)],
        )

    def _ended(self) -> str:
        return ago(self._job.ended_at or self._now, self._now)

    # At work.

    def _running(self) -> Iterator[Cause]:
        job, now = self._job, self._now
        where = self._where(job.worker_host, job.worker_pid)
        since = elapsed(job.started_at or now, now)
        lease_ends = job.lease_expires_at
        if lease_ends is not None and lease_ends < now:
            yield Cause(
                "lease_expired",
                f"its worker{where} has not renewed its lease, which ended {ago(lease_ends, now)}, and "
                "nobody has taken the job back yet: a live worker does that within seconds",
                [self._command("workers"), self._worker()],
            )
        elif job.cancel_requested_at is not None:
            deed = run(self._connection, questions.done_to_job(job.id), self._schema)
            yield Cause(
                "cancel_requested",
                f"it runs{where} and was asked to stop {ago(job.cancel_requested_at, now)}{_by(deed)}; its "
                "handler has not stopped yet",
                [self._command("jobs show", job.id)],
            )
        elif job.deadline_at is not None and job.deadline_at < now:
            yield Cause(
                "overdue",
                f"it has run for {since}{where}, longer than its timeout of "
                f"{duration(job.timeout_seconds or 0)}, and is being stopped",
                [self._command("jobs show", job.id), self._command("jobs cancel", job.id)],
            )
        else:
            rest = (
                f"; its deadline is {ago(job.deadline_at, now)}"
                if job.deadline_at
                else "; it has no deadline"
            )
            beat = f", last heartbeat {ago(job.heartbeat_at, now)}" if job.heartbeat_at else ""
            yield Cause(
                "running",
                f"it has been running for {since}{where}{beat}{rest}",
                [self._command("jobs show", job.id), self._command("jobs cancel", job.id)],
            )
        yield from self._row_lock()

    # Waiting.

    def _waiting(self) -> Iterator[Cause]:
        workers = run(self._connection, questions.workers(self._job.queue, self._job.task), self._schema)
        is_for_later = self._job.state == JobState.SCHEDULED or self._job.run_at > self._now
        unknown = list(self._unknown(workers))
        # A worker that does not know the task puts the job off for a few seconds, again and again.
        is_put_off = bool(unknown) and (self._job.run_at - self._now).total_seconds() < PUT_OFF_SECONDS
        causes = [
            *self._server(),
            *self._row_lock(),
            *(unknown if is_put_off else ()),
            *(self._scheduled(workers) if is_for_later else ()),
            *self._paused(),
            *self._nobody(workers),
            *(() if is_put_off else unknown),
        ]
        if not is_for_later:
            causes += [
                *self._key(),
                *self._full(),
                *self._effect(),
                *self._breaker(workers.breaker),
                *self._queue_rate(),
            ]
        yield from causes or self._turn(workers)

    def _server(self) -> Iterator[Cause]:
        server = run(self._connection, questions.server(), self._schema)
        if server.is_standby:
            yield Cause(
                "standby",
                "this server is a standby, which takes no writes: nothing runs until it is promoted or "
                "the DSN names the primary",
                [self._command("doctor")],
            )
        elif server.is_read_only:
            yield Cause(
                "read_only",
                "default_transaction_read_only is on for this database or role, so no worker can claim "
                "anything",
                [self._command("doctor")],
            )

    def _row_lock(self) -> Iterator[Cause]:
        lock = run(self._connection, questions.row_lock(self._job.id), self._schema)
        if lock is None:
            return
        if lock.since is not None and (self._now - lock.since).total_seconds() < PASSING_LOCK_SECONDS:
            return
        since = f" for {elapsed(lock.since, self._now)}" if lock.since else ""
        whose = f"{lock.application or 'a client'} as {lock.role}" + (
            f" at {lock.address}" if lock.address else ""
        )
        yield Cause(
            "row_locked",
            f"its row has been locked{since} by the transaction of pid {lock.pid} ({whose}, "
            f"{lock.state or 'unknown'}), and claims pass by what is locked",
            [write_termination(lock.pid)],
        )

    def _scheduled(self, workers: questions.Workers) -> Iterator[Cause]:
        job, now = self._job, self._now
        run_now = [self._command("jobs retry", job.id)]
        if job.rate_parked_at is not None and job.rate_key is not None:
            yield self._rate(job.rate_key)
        elif job.parked_by_breaker is not None:
            yield from self._breaker(job.parked_by_breaker)
        elif job.run_at <= now:
            late = (now - job.run_at).total_seconds()
            if late >= PROMOTION_SECONDS and workers.live:
                yield Cause(
                    "not_promoted",
                    f"it has been due for {duration(late)} and no live worker has made it ready, which "
                    "takes a second: see whether they are stuck",
                    [self._command("doctor"), *run_now],
                )
            elif workers.live:
                yield Cause("due", "it has just become due and will be ready within a second")
        elif job.attempt > 0 and (error := _last_error(job)) is not None:
            yield Cause(
                "retry",
                f"attempt {job.attempt} of {job.max_attempts} failed, and the next one starts "
                f"{self._at(job.run_at)}: {error}",
                [*run_now, self._command("jobs show", job.id)],
            )
        else:
            yield Cause("not_due", f"it is not due until {self._at(job.run_at)}", run_now)

    def _rate(self, name: str) -> Cause:
        rate = run(self._connection, questions.rate(name, self._job.id), self._schema)
        limits = [self._command("limits list")]
        if rate is None:
            return Cause(
                "rate_limit_gone",
                f"it waits in the line of the rate limit {name!r}, which is gone; it becomes ready "
                f"{self._at(self._job.run_at)} at the latest",
                [
                    self._command("limits set", name, "100/s"),
                    self._command("limits remove", name),
                ],
            )
        before = f" behind {_capped(rate.ahead)}" if rate.ahead else " as the next one"
        token = (
            f", whose next token comes {self._at(rate.next_at)}"
            if rate.next_at and rate.next_at > self._now
            else ""
        )
        return Cause(
            "rate_limited",
            f"it waits{before} for its rate limit {name!r} of {rate_text(rate.tokens_per_second)}{token}",
            [*limits, self._command("limits set", name, _faster(rate))],
        )

    def _queue_rate(self) -> Iterator[Cause]:
        rate = run(self._connection, questions.rate(f"queue:{self._job.queue}", self._job.id), self._schema)
        if rate is not None and rate.next_at is not None and rate.next_at > self._now:
            yield Cause(
                "queue_rate_limited",
                f"the queue {self._job.queue!r} starts {rate_text(rate.tokens_per_second)} at most, "
                f"the next one {self._at(rate.next_at)}",
                [
                    self._command("limits list"),
                    self._command("limits set", rate.name, _faster(rate)),
                ],
            )

    def _breaker(self, name: str | None) -> Iterator[Cause]:
        breaker = None if name is None else run(self._connection, questions.breaker(name), self._schema)
        if breaker is None:
            if name is not None and self._job.parked_by_breaker == name:
                yield Cause(
                    "breaker_closed",
                    f"its circuit breaker {name!r} has just closed, and a worker brings it back",
                )
            return
        since = f" for {elapsed(breaker.opened_at, self._now)}" if breaker.opened_at else ""
        if breaker.state == "half_open":
            until = "until the probe that runs now has succeeded"
        elif breaker.retry_at is None:
            until = "until somebody closes it"
        elif breaker.retry_at > self._now:
            until = f"until a probe may go {self._at(breaker.retry_at)}"
        else:
            until = "until a worker sends a probe, which may go now"
        yield Cause(
            "breaker_open",
            f"its circuit breaker {breaker.name!r} has been open{since}, {until}",
            [self._command("breakers"), self._command("breakers close", breaker.name)],
        )

    def _paused(self) -> Iterator[Cause]:
        job = self._job
        if not job.queue_is_paused:
            return
        until = f" until {self._at(job.queue_paused_until)}" if job.queue_paused_until else ""
        deed = run(self._connection, questions.done_to_queue(job.queue, "queue.pause"), self._schema)
        when = f" {ago(deed.at, self._now)}" if deed else ""
        reason = f": {headline(job.queue_reason)}" if job.queue_reason else ""
        yield Cause(
            "queue_paused",
            f"its queue {job.queue!r} was paused{when}{_by(deed)}{until}{reason}",
            [self._command("queues resume", self._job.queue)],
        )

    def _full(self) -> Iterator[Cause]:
        job = self._job
        if job.queue_max_running is None:
            return
        line = run(self._connection, questions.line(job.id), self._schema)
        if line is None or line.running < job.queue_max_running:
            return
        deed = run(self._connection, questions.done_to_queue(job.queue, "queue.limit"), self._schema)
        reason = f": {headline(job.queue_reason)}" if job.queue_reason else ""
        if job.queue_max_running == 0:
            said = f"its queue {job.queue!r} may start nothing, as set{_by(deed)}{reason}"
        else:
            said = (
                f"its queue {job.queue!r} is at its limit of "
                f"{counted(job.queue_max_running, 'running job')}, as set{_by(deed)}{reason}"
            )
        yield Cause(
            "queue_full",
            said,
            [
                self._command("jobs list", state="running", queue=self._job.queue),
                self._command("queues limit", self._job.queue, "none"),
            ],
        )

    def _nobody(self, workers: questions.Workers) -> Iterator[Cause]:
        if workers.serving:
            return
        if workers.last_seen_at is not None:
            seen = f"; the last one, on {workers.last_host}, was seen {ago(workers.last_seen_at, self._now)}"
        else:
            seen = "; none has been seen for a day"
        others = f" (live workers of other queues: {workers.live})" if workers.live else ""
        yield Cause(
            "no_worker",
            f"no live worker serves the queue {self._job.queue!r}{others}{seen}",
            [self._worker(), self._command("workers")],
        )

    def _unknown(self, workers: questions.Workers) -> Iterator[Cause]:
        seen_at = workers.task_seen_at
        if not workers.serving:
            return
        if seen_at is not None and (self._now - seen_at).total_seconds() < KNOWN_TASK_SECONDS:
            return
        last = f"; one did {ago(seen_at, self._now)}" if seen_at else ", and none ever did"
        yield Cause(
            "unknown_task",
            f"no live worker knows the task {self._job.task!r}{last}: its code is not deployed, or not "
            "imported by the application that the workers run",
            [self._worker(), self._command("jobs cancel", self._job.id)],
        )

    def _key(self) -> Iterator[Cause]:
        job = self._job
        if job.concurrency_key is None:
            return
        holders = run(self._connection, questions.holders(job.concurrency_key), self._schema)
        if len(holders) >= min(job.concurrency_limit or 1, 10):
            first = holders[0]
            many = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
            yield Cause(
                "key_busy",
                f"its concurrency key {job.concurrency_key!r} is held by job {first.job_id} "
                f"({first.task}){many}, running for "
                f"{elapsed(first.started_at, self._now)}{self._where(first.host, first.pid)}",
                [self._command("jobs why", first.job_id), self._command("jobs cancel", first.job_id)],
            )
        elif job.state == JobState.BLOCKED:
            yield Cause(
                "key_free",
                f"its concurrency key {job.concurrency_key!r} has a free slot: a claim of the queue takes "
                "the best job that waits for it, and workers look for forgotten ones every minute",
                [self._command("queues list")],
            )

    def _effect(self) -> Iterator[Cause]:
        job = self._job
        if job.idempotency_key is None:
            return
        effect = run(self._connection, questions.effect(job.idempotency_key, job.id), self._schema)
        if effect is not None:
            whose = f"job {effect.job_id}" if effect.job_id is not None else "another process"
            yield Cause(
                "effect_in_progress",
                f"{whose} has been at work on its idempotency key {job.idempotency_key!r} for "
                f"{elapsed(effect.since, self._now)}",
                [self._command("processed show", job.idempotency_key)],
            )

    def _turn(self, workers: questions.Workers) -> Iterator[Cause]:
        line = run(self._connection, questions.line(self._job.id), self._schema)
        ahead = line.ahead if line else 0
        waited = elapsed(self._job.run_at, self._now)
        if workers.running >= workers.slots:
            yield Cause(
                "workers_busy",
                f"all {counted(workers.slots, 'slot')} of the {counted(workers.serving, 'worker')} that "
                f"serve the queue {self._job.queue!r} are taken; it has waited {waited}"
                + (f", behind {_capped(ahead)}" if ahead else " and is next"),
                [
                    self._command("jobs list", state="running", queue=self._job.queue),
                    self._worker(concurrency=max(10, workers.slots)),
                ],
            )
        elif ahead:
            yield Cause(
                "in_line",
                f"it has waited {waited} behind {_capped(ahead)} of the queue {self._job.queue!r} that "
                "come first",
                [self._command("queues list"), self._worker()],
            )
        else:
            yield Cause(
                "next",
                f"nothing keeps it: it has waited {waited}, is the next of its queue, and "
                f"{counted(workers.slots - workers.running, 'slot')} of live workers are free",
                [self._command("doctor")],
            )

    def _command(self, name: str, *words: object, **options: object) -> str:
        return write_command(name, *words, schema=self._schema, **options)

    def _worker(self, **options: object) -> str:
        return self._command("worker", app="MODULE:APP", queue=self._job.queue, **options)

    def _at(self, at: datetime) -> str:
        return str(instant(at, self._now))

    def _where(self, host: str | None, pid: int | None) -> str:
        return f" on {host} (pid {pid})" if host else ""


def _by(deed: questions.Deed | None) -> str:
    return "" if deed is None else f" by {deed.actor or deed.role}"


def _capped(jobs: int) -> str:
    return counted(jobs, "job") if jobs <= questions.COUNT_CAP else f"more than {questions.COUNT_CAP:,} jobs"


def _faster(rate: questions.Rate) -> str:
    """Give twice the rate, as it can be set."""
    return rate_text(min(2 * rate.tokens_per_second, MAX_TOKENS_PER_SECOND))


def _last_error(job: JobDetails) -> str | None:
    with suppress(ValueError, TypeError, LookupError):
        return headline(str(json.loads(job.errors or "[]")[-1]["error"]))
    return None
