"""The work: what should have been done and was not, and who should have done it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pgqueue.diagnosis.finding import Exam, Finding
from pgqueue.errors import ConfigurationError
from pgqueue.model.schedule import Cron, has_cron
from pgqueue.model.spoken import counted, duration
from pgqueue.sql import doctor as questions
from pgqueue.sql import inspect
from pgqueue.sql.inspect import QueueSummary


def work(exam: Exam) -> Iterator[Finding]:
    work = exam.ask(questions.work(exam.at.late_seconds))
    late = duration(exam.at.late_seconds)
    if work.expired:
        yield Finding(
            "leases_expired",
            "critical",
            f"the leases of {_capped(work.expired)} ended more than {late} ago and nobody has taken them "
            "back: no worker that is alive looks after the queue",
            [exam.command("workers"), exam.command("jobs list", state="running")],
        )
    if work.due:
        yield Finding(
            "promotion_late",
            "critical",
            f"{_capped(work.due)} became due more than {late} ago and {'is' if work.due == 1 else 'are'} "
            "still scheduled: no worker that is alive looks after the queue",
            [exam.command("workers"), exam.command("jobs list", state="scheduled")],
        )
    if work.late_schedules:
        yield Finding(
            "schedules_late",
            "critical",
            f"schedules have not fired though they were due more than {late} ago: "
            f"{', '.join(work.late_schedules)}",
            [exam.command("schedules list"), exam.command("workers")],
        )
    yield from _unreadable_schedules(exam)
    if work.unknown_tasks and _live_workers(exam):
        yield Finding(
            "task_unknown",
            "critical",
            f"jobs wait whose task no live worker knows: {', '.join(work.unknown_tasks[:5])}; after ten "
            "minutes they die",
            [
                exam.command("jobs list", state="live", task=work.unknown_tasks[0]),
                exam.command("workers"),
            ],
        )


def _unreadable_schedules(exam: Exam) -> Iterator[Finding]:
    """Find what SQL wrote and no worker can read: it gets no tick, so it is never late."""
    if not has_cron():
        return
    for entry in exam.ask(questions.unplanned_schedules()):
        try:
            Cron(entry.cron, entry.timezone)
        except ConfigurationError as error:
            yield Finding(
                "schedule_unreadable",
                "critical",
                f"the schedule {entry.name!r} never fires: {error}",
                [
                    exam.command(
                        "schedules add", entry.name, "CRON", entry.task, "JSON", timezone="ZONE", replace=True
                    ),
                    exam.command("schedules remove", entry.name),
                ],
            )


def queues(exam: Exam) -> Iterator[Finding]:
    waiting = [
        queue
        for queue in exam.ask(inspect.list_queues(1000))
        if not queue.is_paused
        and queue.max_running != 0
        and (queue.oldest_ready_seconds or 0.0) >= exam.at.late_seconds
    ]
    # One finding for all of them: when the workers are gone, every queue is without.
    if unserved := [queue for queue in waiting if not queue.workers]:
        yield Finding(
            "queue_unserved",
            "critical",
            f"no live worker serves {_named(unserved)}",
            [exam.command("worker", app="MODULE:APP", queue=unserved[0].queue), exam.command("workers")],
        )
    stalled = [
        queue
        for queue in waiting
        if queue.workers
        and not queue.running
        and (queue.oldest_ready_seconds or 0.0) >= exam.at.stalled_seconds
    ]
    if stalled:
        yield Finding(
            "queue_stalled",
            "critical",
            f"live workers serve but run nothing of {_named(stalled)}",
            [exam.command("jobs list", state="ready", queue=stalled[0].queue), exam.command("workers")],
        )


def _named(queues: Sequence[QueueSummary]) -> str:
    """Name some of these queues, and say how long the oldest of their jobs has waited."""
    names = ", ".join(repr(queue.queue) for queue in queues[:5])
    if len(queues) > 5:
        names += f" and {len(queues) - 5:,} more"
    waited = duration(max(queue.oldest_ready_seconds or 0.0 for queue in queues))
    what = "the queue" if len(queues) == 1 else "the queues"
    return f"{what} {names}, where a job has waited for {waited}"


def workers(exam: Exam) -> Iterator[Finding]:
    versions = sorted({worker.version for worker in exam.ask(inspect.list_workers()) if not worker.is_silent})
    if len(versions) > 1:
        yield Finding(
            "versions_mixed",
            "warning",
            f"live workers run different versions of pgqueue: {', '.join(versions)}",
            [exam.command("workers")],
        )


def forgotten(exam: Exam) -> Iterator[Finding]:
    for entry in exam.ask(questions.forgotten(exam.at.forgotten_seconds)):
        if entry.kind == "queue":
            yield Finding(
                "pause_forgotten",
                "warning",
                f"the queue {entry.name!r} has been paused since {entry.since:%Y-%m-%d %H:%M} without an "
                "end, and jobs wait in it",
                [
                    exam.command("log", entry.name, action="queue.pause"),
                    exam.command("queues resume", entry.name),
                ],
            )
        else:
            yield Finding(
                "breaker_forgotten",
                "warning",
                f"the circuit breaker {entry.name!r} was opened by hand at {entry.since:%Y-%m-%d %H:%M} "
                "without an end",
                [
                    exam.command("log", entry.name, action="breaker.open"),
                    exam.command("breakers close", entry.name),
                ],
            )


def clocks(exam: Exam) -> Iterator[Finding]:
    ahead = exam.ask(questions.future())
    if ahead is not None and ahead > exam.at.clock_seconds:
        yield Finding(
            "clock_set_back",
            "critical",
            f"the database's clock has gone back: signs of life lie {duration(ahead)} in the future, and "
            "leases last as much longer",
            ["timedatectl status   # on the database's machine", "chronyc tracking"],
        )


def _live_workers(exam: Exam) -> int:
    return sum(not worker.is_silent for worker in exam.ask(inspect.list_workers()))


def _capped(jobs: int) -> str:
    return counted(jobs, "job") if jobs < 1000 else "1,000 jobs and more"
