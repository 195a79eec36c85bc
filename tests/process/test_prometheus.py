"""A real Prometheus scrapes real workers: every panel gets data, and what goes wrong sets off its alert.

The shipped rules with their minutes turned into seconds, so that "within ten minutes" is a test of ten
seconds; how long each takes by the clock is what `promtool test rules` checks.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psycopg

from pgqueue.cli.assets import read
from tests.monitoring import exporter, prometheus
from tests.process.support import Queue, worker
from tests.support import wait_until


def panels() -> list[tuple[str, str]]:
    """Give each query of the dashboard, with what Grafana puts in."""
    found = []
    for panel in json.loads(read("grafana-prometheus.json"))["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "10s").replace("$queue", ".*")
            assert "$" not in text
            found.append((panel["title"], text))
    return found


def test_every_panel_of_the_dashboard_shows_something(queue: Queue, tmp_path: Path) -> None:
    queue.connection.execute("INSERT INTO pgqueue.breakers (name, state) VALUES ('bank', 'open')")
    queue.connection.execute("INSERT INTO pgqueue.rate_limits (name, tokens_per_second) VALUES ('task:x', 1)")
    with (
        worker(queue.dsn, tmp_path, "--metrics-port", "0") as started,
        exporter(queue.dsn, tmp_path) as other,
        prometheus(
            tmp_path, pgqueue_worker=started.wait_for("metrics served")[0]["port"], pgqueue_exporter=other
        ) as made,
    ):
        empty: dict[str, str] = {}

        def all_show() -> bool:
            for task in ("nothing", "fail"):
                queue.insert(task)
            empty.clear()
            empty.update({title: text for title, text in panels() if not made.query(text)})
            return not empty

        try:
            wait_until(all_show, 60)
        except AssertionError:
            raise AssertionError(f"no data for {empty}") from None
        # And numbers, where numbers were made: a quotient of zeros is data, too.
        (ended,) = made.query('sum(pgqueue_jobs_processed_total{outcome="succeeded"})')
        assert float(ended["value"][1]) >= 1


def test_what_goes_wrong_sets_off_its_alert(queue: Queue, tmp_path: Path) -> None:
    queue.connection.execute("INSERT INTO pgqueue.breakers (name) VALUES ('bank')")
    quick = ("--metrics-port", "0", "--lease-seconds", "2")
    with (
        worker(queue.dsn, tmp_path, *quick, "-q", "frozen:1") as frozen,
        worker(queue.dsn, tmp_path, *quick) as healthy,
        exporter(queue.dsn, tmp_path) as other,
        prometheus(
            tmp_path,
            pgqueue_frozen=frozen.wait_for("metrics served")[0]["port"],
            pgqueue_healthy=healthy.wait_for("metrics served")[0]["port"],
            pgqueue_exporter=other,
        ) as made,
        psycopg.connect(queue.dsn) as holder,
    ):
        queue.insert("nothing")
        held = queue.insert("block", '{"seconds": 60}', queue="frozen")
        wait_until(lambda: queue.effects(held) == 1)
        wait_until(lambda: len(made.query("up == 1")) == 3, 20, "all are scraped")
        wait_until(lambda: made.query("pgqueue_jobs_rescued_total"), 20)
        # Until the first scrape nobody was heard of, which is an alert of its own.
        wait_until(lambda: not made.firing(), 20, "all is quiet")
        made.seen.clear()

        # A child is killed, the dead letters fill, a breaker opens, a snapshot is held, a worker freezes.
        os.kill(healthy.children()[0], signal.SIGKILL)
        for _ in range(5):
            queue.insert("raise_unprintable")
        queue.connection.execute("SELECT pgqueue.breaker_open('bank')")
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        frozen.signal(signal.SIGSTOP)
        made.wait_for("PgqueueChildrenDying", "PgqueueDeadLetters", "PgqueueJobsRescued")
        made.wait_for("PgqueueBreakerOpen", "PgqueueVacuumBlocked")
        holder.rollback()

        # All workers stop, and there is work.
        frozen.signal(signal.SIGCONT)
        for one in (frozen, healthy):
            one.signal(signal.SIGQUIT)
            one.wait()
        queue.insert("nothing")
        made.wait_for("PgqueueNoWorkerAlive", "PgqueueNoWorker", "PgqueueQueueIsBehind")
        assert "PgqueueDatabaseUnreachable" not in made.seen

        for name, states in made.seen.items():
            if "firing" in states:
                assert states[0] == "pending", name
