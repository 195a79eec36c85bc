"""A campaign under the eyes of a Prometheus, then six troubles: does each set off its alert in time?

The shipped rules as they are, minutes and all: half an hour, most of it waiting for what they call long.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tests.faults.arena import ROLE, Arena, until
from tests.faults.campaign import DBNAME, Campaign, Size
from tests.faults.invariants import Database, Verdict
from tests.monitoring import Prometheus, exporter, free_port, prometheus

READ_SECONDS = 15.0
# What comes to the time that a rule states: a read of the database, a scrape, an evaluation; a busy machine.
SLACK_SECONDS = READ_SECONDS + 2 * 5.0 + 10.0
QUEUE = "trouble"


@dataclass
class Alert:
    """What an alert promises, and when it did it; in seconds from its cause on."""

    name: str
    stated_seconds: float
    cause_at: float = 0.0
    pending_seconds: float | None = None
    firing_seconds: float | None = None

    @property
    def is_late(self) -> bool:
        over_at = self.cause_at + self.stated_seconds + SLACK_SECONDS
        return self.firing_seconds is None and time.monotonic() > over_at

    def __str__(self) -> str:
        def told(seconds: float | None) -> str:
            return "never" if seconds is None else f"after {seconds:.0f} s"

        return (
            f"{self.name}: stated {self.stated_seconds:.0f} s, pending {told(self.pending_seconds)}, "
            f"firing {told(self.firing_seconds)}"
        )


class WatchedCampaign(Campaign):
    """One whose workers are scraped all the while."""

    def __init__(self, arena: Arena, size: Size, seed: int, only: Collection[str]) -> None:
        self._ports = [free_port() for _ in range(size.workers)]
        super().__init__(arena, size, seed, only)

    def _options(self, number: int) -> list[str]:
        own = ("-q", f"{QUEUE}:1") if number == 0 else ()
        return [*super()._options(number), *own, "--metrics-port", str(self._ports[number])]

    def run(self, seconds: float) -> list[Verdict]:
        folder = self._arena.temporary / "prometheus"
        folder.mkdir()
        with (
            exporter(self._arena.dsn(DBNAME), folder, READ_SECONDS) as port,
            prometheus(folder, is_hurried=False, exporter=port, **self._targets()) as made,
        ):
            self._watcher = made
            return super().run(seconds)

    def _targets(self) -> dict[str, int]:
        return {f"worker_{number}": port for number, port in enumerate(self._ports)}

    def _conclude(self, db: Database, descriptors: int) -> list[Verdict]:
        verdicts = super()._conclude(db, descriptors)
        for verdict in verdicts:
            if verdict.name == "I10":
                verdict.skipped, verdict.violations = "the watchers are sessions and processes, too", []
        scrapes = Verdict("P1", "scraped under faults")
        for name, text in (
            ("scrapes", "sum(count_over_time(up[1h]))"),
            ("answered", "sum(sum_over_time(up[1h]))"),
            ("series", "count(last_over_time({__name__=~'pgqueue_.*'}[5m]))"),
            ("slowest_seconds", "max(max_over_time(scrape_duration_seconds[1h]))"),
        ):
            found = self._watcher.query(text)
            scrapes.facts[name] = float(found[0]["value"][1]) if found else 0.0
        scrapes.demand(scrapes.facts["answered"] > 0, "no scrape was answered")
        alarms = Verdict("P2", "alerts in time")
        folder = self._arena.temporary / "prometheus" / "after"
        folder.mkdir()
        # Fresh ones: the old ones remember the faults, and who died, for ten minutes.
        db.connection.execute("DELETE FROM pgqueue.dead_jobs")
        with (
            exporter(self._arena.dsn(DBNAME), folder, READ_SECONDS) as port,
            prometheus(folder, is_hurried=False, exporter=port, **self._targets()) as made,
        ):
            self._trouble(db, made, alarms)
        return [*verdicts, scrapes, alarms]

    def _trouble(self, db: Database, made: Prometheus, verdict: Verdict) -> None:
        # The checks are done, and ended them.
        for worker in self._workers:
            worker.start()
        until(lambda: all(worker.has_started for worker in self._workers), 60)
        # Else it sees its own sessions only, and the snapshot is somebody else's.
        db.connection.execute(f"GRANT pg_read_all_stats TO {ROLE}")
        db.connection.execute("INSERT INTO pgqueue.breakers (name) VALUES ('bank')")
        verdict.demand(
            until(lambda: len(made.query("up == 1")) == len(self._ports) + 1, 60), "not all are scraped"
        )
        time.sleep(2 * READ_SECONDS)
        if pending := made.get("/api/v1/alerts")["alerts"]:
            verdict.violations.append(f"alerts without a cause: {[one['labels'] for one in pending]}")
        alerts: dict[str, Alert] = {}

        def happens(name: str, stated_seconds: float) -> None:
            alerts[name] = Alert(name, stated_seconds, time.monotonic())

        with self._arena.connect(DBNAME) as holder:
            holder.autocommit = False
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT 1")
            happens("PgqueueVacuumBlocked", 600 + 300)
            os.kill(self._workers[1].children()[0], signal.SIGKILL)
            happens("PgqueueChildrenDying", 60)
            db.connection.execute(
                "INSERT INTO pgqueue.jobs (task, args, queue) "
                "SELECT 'give_up', '{\"mark\": \"x\"}', 'trouble' FROM generate_series(1, 10)"
            )
            happens("PgqueueDeadLetters", 60)
            db.connection.execute("SELECT pgqueue.breaker_open('bank')")
            happens("PgqueueBreakerOpen", 120)
            until(lambda: db.one("SELECT count(*) = 10 FROM pgqueue.dead_jobs"), 20)
            self._freeze(db)
            # Its lease, and the look of another worker.
            happens("PgqueueJobsRescued", 60 + 6)
            self._look(
                made,
                alerts,
                lambda: all(
                    one.firing_seconds is not None for one in alerts.values() if one.stated_seconds < 600
                ),
            )
            self._workers[0].signal(signal.SIGCONT)
            for worker in self._workers:
                worker.end()
            # One counts as alive for a minute after its last sign of life; these have said good-bye.
            happens("PgqueueNoWorkerAlive", 120)
            self._look(made, alerts, lambda: all(one.firing_seconds is not None for one in alerts.values()))
            holder.rollback()
        verdict.facts["alerts"] = len(alerts)
        for alert in alerts.values():
            print(alert, flush=True)
            verdict.demand(
                alert.pending_seconds is not None
                and alert.firing_seconds is not None
                and alert.firing_seconds <= alert.stated_seconds + SLACK_SECONDS,
                str(alert),
            )

    def _freeze(self, db: Database) -> None:
        """Freeze the worker of a queue of its own, which has a job running."""
        job = db.one(
            "INSERT INTO pgqueue.jobs (task, args, queue) "
            "VALUES ('sleep', '{\"mark\": \"y\", \"seconds\": 600}', 'trouble') RETURNING id"
        )
        until(lambda: db.one("SELECT state = 'running' FROM pgqueue.jobs WHERE id = %s", job), 20)
        self._workers[0].signal(signal.SIGSTOP)

    def _look(self, made: Prometheus, alerts: dict[str, Alert], is_enough: Callable[[], bool]) -> None:
        while not is_enough() and not any(alert.is_late for alert in alerts.values()):
            for one in made.get("/api/v1/alerts")["alerts"]:
                alert = alerts.get(one["labels"]["alertname"])
                if alert is not None:
                    seconds = time.monotonic() - alert.cause_at
                    if alert.pending_seconds is None:
                        alert.pending_seconds = seconds
                    if one["state"] == "firing" and alert.firing_seconds is None:
                        alert.firing_seconds = seconds
            time.sleep(1)
