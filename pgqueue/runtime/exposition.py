"""The metrics as Prometheus reads them, written when somebody scrapes.

Names, labels and their bounds are decided here. Nothing is kept: each scrape tells what `metrics.py` and
`gauges.py` know, so there is no second account that could differ, and no series of what is gone.

The text is written here, too: the library takes 14 us a series, this 2, and a worker of 300 tasks has 15,000.
What the library knows is the process: its memory, processor time and files. This is the only door to it.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from pgqueue import __version__
from pgqueue.runtime.gauges import STATES, Gauges, Snapshot
from pgqueue.runtime.metrics import Histogram, Metrics

_BREAKER_STATES = ("closed", "open", "half_open")


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """How a worker stands at this instant."""

    slots: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    children: int = 0
    database_errors: int = 0
    listener_reconnects: int = 0
    is_database_up: bool = True


class Exposition:
    """What one process has to tell."""

    def __init__(self) -> None:
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._parts: list[Callable[[], Iterator[Family]]] = []

    def add_worker(self, metrics: Metrics, look: Callable[[], WorkerNow]) -> None:
        """Tell what a worker has counted, and how it stands."""
        self._parts.append(lambda: _of_worker(metrics, look()))

    def add_database(self, gauges: Gauges, is_up: Callable[[], bool]) -> None:
        """Tell whether the database is up, and while this process reads them, the whole queue's numbers."""
        self._parts.append(lambda: _of_database(gauges, is_up()))

    def render(self) -> bytes:
        """Give everything in the text format."""
        text = "".join(family.text() for part in list(self._parts) for family in part())
        return text.encode() + generate_latest(self._process)


class Family:
    """All series of one name; `kind` is counter, gauge or histogram."""

    def __init__(self, kind: str, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._labels = labels
        self._lines = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n"]

    def add(self, values: Sequence[str], number: float) -> None:
        self._lines.append(f"{self._name}{self._braces(values)} {_number(number)}\n")

    def add_histogram(self, values: Sequence[str], histogram: Histogram) -> None:
        braces = self._braces(values)
        others = "," + braces[1:] if braces else "}"
        name, lines, count = self._name, self._lines, 0
        for bound, count in histogram.buckets():
            lines.append(f'{name}_bucket{{le="{bound}"{others} {count}\n')
        lines.append(f"{name}_count{braces} {count}\n{name}_sum{braces} {_number(histogram.total)}\n")

    def text(self) -> str:
        return "".join(self._lines)

    def _braces(self, values: Sequence[str]) -> str:
        if not self._labels:
            return ""
        pairs = zip(self._labels, values, strict=True)
        return "{" + ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs) + "}"


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(number: float) -> str:
    if isinstance(number, bool):
        return str(int(number))
    return repr(number) if math.isfinite(number) else "NaN"


def _simple(kind: str, name: str, text: str, number: float) -> Family:
    family = Family(kind, name, text)
    family.add((), number)
    return family


def _of_worker(metrics: Metrics, now: WorkerNow) -> Iterator[Family]:
    info = Family(
        "gauge", "pgqueue_worker_info", "1, with the worker's version and host.", "version", "hostname"
    )
    info.add([__version__, socket.gethostname()], 1)
    yield info
    yield from _of_tasks(metrics)

    waits = Family(
        "histogram",
        "pgqueue_job_wait_seconds",
        "From when a job could have run to when a worker claimed it.",
        "queue",
    )
    for queue, histogram in list(metrics.waits.items()):
        waits.add_histogram([queue], histogram)
    yield waits
    lost = Family(
        "counter",
        "pgqueue_claims_lost_total",
        "Attempts whose job was no longer this worker's when it ended them: nothing was written.",
        "queue",
    )
    for queue, count in list(metrics.claims_lost.items()):
        lost.add([queue], count)
    yield lost
    rescued = Family(
        "counter",
        "pgqueue_jobs_rescued_total",
        "Jobs brought back that nobody was looking after any more, by the cause.",
        "cause",
    )
    for cause, count in metrics.rescued.items():
        rescued.add([cause], count)
    yield rescued

    for name, text, by_queue in (
        ("slots", "Slots that may run jobs of the queue; shared ones count for each.", now.slots),
        ("jobs_running", "Jobs of the queue that this worker holds.", now.running),
    ):
        gauge = Family("gauge", f"pgqueue_worker_{name}", text, "queue")
        for queue, number in by_queue.items():
            gauge.add([queue], number)
        yield gauge
    yield _simple("gauge", "pgqueue_worker_children", "Child processes that are up.", now.children)
    yield _simple(
        "counter",
        "pgqueue_children_died_total",
        "Child processes that died, or were killed over a deadline.",
        metrics.children_died,
    )
    yield _simple(
        "counter",
        "pgqueue_heartbeat_failures_total",
        "Tries to renew leases that failed.",
        metrics.heartbeat_failures,
    )
    yield _simple(
        "counter",
        "pgqueue_database_errors_total",
        "Connections lost and statements the server was unable to do.",
        now.database_errors,
    )
    yield _simple(
        "counter",
        "pgqueue_listener_reconnects_total",
        "Times the listening session was opened again.",
        now.listener_reconnects,
    )
    fetches = Family("histogram", "pgqueue_fetch_seconds", "How long a claim took, empty ones included.")
    fetches.add_histogram([], metrics.claim_seconds)
    yield fetches


def _of_tasks(metrics: Metrics) -> Iterator[Family]:
    processed = Family(
        "counter",
        "pgqueue_jobs_processed_total",
        "Attempts that ended: succeeded, retried, dead, cancelled, snoozed, released, crashed, lost.",
        "queue",
        "task",
        "outcome",
    )
    dead = Family(
        "counter",
        "pgqueue_dead_jobs_total",
        "Jobs that became dead letters: failed, timed_out, crashed, unrecoverable, unknown_task.",
        "queue",
        "task",
        "reason",
    )
    durations = Family("histogram", "pgqueue_job_duration_seconds", "How long attempts ran.", "queue", "task")
    attempts = Family(
        "histogram", "pgqueue_job_attempts", "Attempts it took until success or death.", "queue", "task"
    )
    for one in metrics.tasks():
        labels = [one.queue, one.task]
        for outcome, count in list(one.outcomes.items()):
            processed.add([*labels, outcome], count)
        for reason, count in list(one.dead.items()):
            dead.add([*labels, reason], count)
        durations.add_histogram(labels, one.seconds)
        attempts.add_histogram(labels, one.attempts)
    yield from (processed, dead, durations, attempts)


def _of_database(gauges: Gauges, is_up: bool) -> Iterator[Family]:
    is_reading = gauges.is_reading
    # While the database is away, what was read before is old already.
    snapshot = gauges.latest if is_reading and is_up else None
    yield _simple(
        "gauge",
        "pgqueue_database_up",
        "1 if this process can use the database, and has read the queue's numbers if that is its part.",
        is_up and not (is_reading and snapshot is None),
    )
    yield _simple(
        "gauge", "pgqueue_leader", "1 if this process reads the numbers of the whole queue.", is_reading
    )
    if snapshot is not None:
        yield from _of_snapshot(snapshot)


def _of_snapshot(snapshot: Snapshot) -> Iterator[Family]:
    jobs = Family("gauge", "pgqueue_queue_jobs", "Jobs in a queue, by state.", "queue", "state")
    for name, queue in snapshot.queues.items():
        for state in STATES:
            jobs.add([name, state], queue.jobs[state])
    yield jobs
    estimated = Family(
        "gauge",
        "pgqueue_queue_jobs_estimated",
        "1 if the state's jobs are too many to count: large numbers are then the planner's estimate.",
        "state",
    )
    for state in STATES:
        estimated.add([state], state in snapshot.estimated)
    yield estimated
    queues = snapshot.queues.items()
    for name, text, numbers in (
        (
            "pgqueue_queue_recent_deaths",
            "Jobs of the queue that died within ten minutes, whatever has become of them since.",
            {name: queue.recent_deaths for name, queue in queues},
        ),
        (
            "pgqueue_queue_oldest_ready_seconds",
            "For how long the oldest runnable job has waited; 0 if none waits.",
            {name: queue.oldest_ready_seconds for name, queue in queues},
        ),
        (
            "pgqueue_queue_paused",
            "1 if the queue is paused.",
            {name: float(queue.is_paused) for name, queue in queues},
        ),
        (
            "pgqueue_queue_workers",
            "Live workers that serve the queue.",
            {name: float(queue.workers) for name, queue in queues},
        ),
        (
            "pgqueue_lease_age_seconds",
            "For how long the oldest running job has been held.",
            {name: queue.oldest_running_seconds for name, queue in queues},
        ),
        (
            "pgqueue_lease_timeout_ratio",
            "The greatest share of its timeout that a running job has used.",
            {name: queue.timeout_ratio for name, queue in queues},
        ),
        (
            "pgqueue_lease_heartbeat_ratio",
            "The greatest share of a lease passed since its heartbeat; from 1 on the job is taken back.",
            {name: queue.lease_ratio for name, queue in queues},
        ),
    ):
        gauge = Family("gauge", name, text, "queue")
        for queue_name, number in numbers.items():
            gauge.add([queue_name], number)
        yield gauge
    yield from _of_overview(snapshot)


def _of_overview(snapshot: Snapshot) -> Iterator[Family]:
    overview = snapshot.overview
    yield _simple("gauge", "pgqueue_workers_alive", "Workers seen within a minute.", overview.workers)
    yield _simple(
        "counter",
        "pgqueue_jobs_enqueued_total",
        "Ids given to jobs since the schema was made; those of enqueues that were rolled back count.",
        overview.enqueued,
    )
    yield _simple(
        "gauge",
        "pgqueue_schedules_late",
        "Schedules whose tick is overdue by 30 s or more.",
        overview.late_schedules,
    )
    yield _simple(
        "gauge",
        "pgqueue_schedule_late_seconds",
        "By how much the latest of them is overdue.",
        overview.late_seconds,
    )
    yield _simple(
        "gauge",
        "pgqueue_schedules_unplanned",
        "Schedules without a next tick: just made, or of an expression or time zone that cannot be read.",
        overview.unplanned_schedules,
    )
    yield _simple(
        "gauge",
        "pgqueue_notification_queue_ratio",
        "How full the server's queue of notifications is; at 1 NOTIFY fails.",
        overview.notification_ratio,
    )
    yield _simple(
        "gauge",
        "pgqueue_oldest_transaction_seconds",
        "For how long the oldest snapshot has kept dead rows of this database from being removed.",
        overview.oldest_snapshot_seconds,
    )
    for name, text, numbers in (
        ("rows", "Live rows, as the statistics say.", {one.table: one.rows for one in snapshot.tables}),
        (
            "dead_rows",
            "Dead rows, as the statistics say.",
            {one.table: one.dead_rows for one in snapshot.tables},
        ),
        (
            "bytes",
            "Size with indexes, as of the last vacuum.",
            {one.table: one.bytes for one in snapshot.tables},
        ),
    ):
        gauge = Family("gauge", f"pgqueue_table_{name}", text, "table")
        for table, number in numbers.items():
            gauge.add([table], number)
        yield gauge
    breakers = Family(
        "gauge", "pgqueue_breaker_state", "1 for the state that a circuit breaker is in.", "breaker", "state"
    )
    for breaker, state in snapshot.breakers:
        for each in _BREAKER_STATES:
            breakers.add([breaker, each], each == state)
    yield breakers
    limits = Family(
        "gauge",
        "pgqueue_rate_limit_delay_seconds",
        "For how long the next in line before a rate limit has waited; 0 if nobody waits.",
        "limit",
    )
    for limit, seconds in snapshot.rate_limits:
        limits.add([limit], seconds)
    yield limits
    yield _simple(
        "gauge", "pgqueue_database_read_seconds", "How long one read of the database took.", snapshot.seconds
    )
