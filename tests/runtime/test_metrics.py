"""What a worker counts about itself."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pgqueue.model.outcome import RELEASED, Ending, Outcome
from pgqueue.runtime.children import Child
from pgqueue.runtime.exposition import Family
from pgqueue.runtime.ledger import Held, Pool
from pgqueue.runtime.metrics import MAX_TASKS, Histogram, Metrics
from pgqueue.sql.attempts import ClaimedRow, ReapedRow

CHILD = cast("Child", None)
SUCCEEDED = Outcome(Ending.SUCCEEDED)
FAILED = Outcome(Ending.FAILED, "RuntimeError: no luck")


def row(task: str = "send", attempt: int = 1, run_at: str = "") -> ClaimedRow:
    return ClaimedRow(1, "t", attempt, task, "{}", None, 0, run_at, True, 300, 5, 0, None, None, 1.0)


def held(task: str = "send", queue: str = "mail", attempt: int = 1) -> Held:
    return Held(1, row(task, attempt), queue, Pool(1, [queue]), CHILD, time.monotonic())


def finished(outcome: Outcome, *, has_crashed: bool = False, **names: object) -> Held:
    ended = held(**names).ended(outcome, 0.02)
    ended.has_crashed = has_crashed
    return ended


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics()
    made.is_read = True
    made.know(["send"], ["mail"])
    return made


def test_a_histogram_tells_how_many_were_at_most_as_large():
    histogram = Histogram((1, 5))

    for value in (0.5, 1, 3, 9):
        histogram.observe(value)

    assert histogram.buckets() == [("1", 2), ("5", 3), ("+Inf", 4)]
    assert histogram.total == 13.5


@pytest.mark.parametrize(
    ("outcome", "has_crashed", "state", "counted"),
    [
        (FAILED, False, "scheduled", "retried"),
        (FAILED, False, "ready", "retried"),
        (FAILED, False, "dead", "dead"),
        (FAILED, False, "cancelled", "cancelled"),
        (Outcome(Ending.SNOOZED, None, 5.0), False, "scheduled", "snoozed"),
        (Outcome(Ending.UNKNOWN_TASK, "no task"), False, "scheduled", "released"),
        (FAILED, True, "ready", "crashed"),
        (FAILED, True, "dead", "dead"),
    ],
)
def test_an_attempt_is_counted_by_what_became_of_its_job(metrics, outcome, has_crashed, state, counted):
    metrics.ended(finished(outcome, has_crashed=has_crashed), state)

    (one,) = metrics.tasks()
    assert {name: number for name, number in one.outcomes.items() if number} == {counted: 1}


def test_successes_are_counted(metrics):
    metrics.succeeded([finished(SUCCEEDED), finished(Outcome(Ending.SETTLED))])

    (one,) = metrics.tasks()
    assert {name: number for name, number in one.outcomes.items() if number} == {"succeeded": 2}


@pytest.mark.parametrize(
    ("outcome", "has_crashed", "reason"),
    [
        (FAILED, False, "failed"),
        (FAILED, True, "crashed"),
        (Outcome(Ending.FAILED, "timed out after 3 s"), False, "timed_out"),
        (Outcome(Ending.DEAD, "ValueError: bad"), False, "unrecoverable"),
        (Outcome(Ending.UNKNOWN_TASK, "no task"), False, "unknown_task"),
    ],
)
def test_a_death_is_counted_by_one_of_a_few_words(metrics, outcome, has_crashed, reason):
    metrics.ended(finished(outcome, has_crashed=has_crashed), "dead")

    (one,) = metrics.tasks()
    assert one.dead == {reason: 1}


def test_what_has_not_started_is_not_counted(metrics):
    metrics.ended(finished(RELEASED), "ready")

    assert list(metrics.tasks()) == []


def test_attempts_are_counted_when_a_job_has_succeeded_or_died(metrics):
    metrics.ended(finished(FAILED, attempt=1), "scheduled")
    metrics.succeeded([finished(SUCCEEDED, attempt=2)])

    (one,) = metrics.tasks()
    assert dict(one.attempts.buckets()) == {"1": 0, "2": 1, "3": 1, "5": 1, "10": 1, "25": 1, "+Inf": 1}
    assert one.seconds.buckets()[-1] == ("+Inf", 2)


def test_a_job_cannot_make_up_a_label(metrics):
    for number in range(10):
        metrics.ended(finished(FAILED, task=f"made up {number}"), "dead")

    assert [one.task for one in metrics.tasks()] == ["unknown"]


def test_tasks_beyond_the_bound_are_counted_together():
    metrics = Metrics()
    metrics.is_read = True
    metrics.know([f"task {number}" for number in range(MAX_TASKS + 50)], ["mail"])

    for number in range(MAX_TASKS + 50):
        metrics.succeeded([finished(SUCCEEDED, task=f"task {number}")])

    found = list(metrics.tasks())
    assert len(found) == MAX_TASKS + 1
    assert [one.outcomes["succeeded"] for one in found if one.task == "other"] == [50]


def test_a_wait_is_measured_by_the_database_clock(metrics):
    # It is an hour behind ours.
    now = datetime.now(UTC).timestamp() - 3600
    metrics.heard_clock(now)
    run_at = str(datetime.fromtimestamp(now - 7, UTC))

    metrics.claimed("mail", [row(run_at=run_at)], 0.002)

    assert 7 <= metrics.waits["mail"].total < 60
    assert dict(metrics.waits["mail"].buckets())["60"] == 1


def test_of_a_large_claim_some_jobs_stand_for_all(metrics):
    metrics.heard_clock(1_000_000.0)
    rows = [row(run_at=str(datetime.fromtimestamp(1_000_000 - n / 10, UTC))) for n in range(123, 0, -1)]

    metrics.claimed("mail", rows, 0.002)

    assert metrics.waits["mail"].buckets()[-1] == ("+Inf", 123)
    assert metrics.waits["mail"].total == pytest.approx(sum(n / 10 for n in range(1, 124)), rel=0.05)


def test_without_a_port_nothing_is_counted_job_by_job():
    metrics = Metrics()

    metrics.succeeded([finished(SUCCEEDED)])

    assert list(metrics.tasks()) == []


def test_a_time_in_another_style_is_left_out(metrics):
    metrics.heard_clock(0.0)

    metrics.claimed("mail", [row(run_at="Mon 30 Nov 07:38:30.123456 2026 UTC")], 0.002)

    assert metrics.waits["mail"].buckets()[-1] == ("+Inf", 0)
    assert metrics.claim_seconds.buckets()[-1] == ("+Inf", 1)


def test_what_was_taken_back_is_counted_by_its_cause(metrics):
    expired = "lease expired: the worker crashed or was cut off"

    metrics.reaped(
        [
            ReapedRow(1, "scheduled", expired, "send", "mail"),
            ReapedRow(2, "dead", expired, "send", "mail"),
            ReapedRow(3, "dead", "timed out", "send", "somebody else's"),
        ]
    )

    assert metrics.rescued["lease_expired"] == 2
    assert metrics.rescued["overdue"] == 1
    assert {(one.queue, one.task): one.dead for one in metrics.tasks()} == {
        ("mail", "send"): {"crashed": 1},
        ("other", "send"): {"timed_out": 1},
    }


def test_a_lost_claim_is_counted_for_its_queue(metrics):
    metrics.lost(held())

    assert metrics.claims_lost == {"mail": 1}


def test_the_text_is_what_prometheus_reads():
    family = Family("counter", "x_total", "What it is.", "queue", "task")
    family.add(['say "hi"\\', "two\nlines"], 3)
    family.add(["mail", "send"], 0.5)
    histogram = Histogram((0.5, 1))
    histogram.observe(0.7)
    seconds = Family("histogram", "y_seconds", "How long.")
    seconds.add_histogram([], histogram)

    parsed = list(text_string_to_metric_families(family.text() + seconds.text()))

    found = {(sample.name, *sample.labels.values()): sample.value for one in parsed for sample in one.samples}
    assert found == {
        ("x_total", 'say "hi"\\', "two\nlines"): 3,
        ("x_total", "mail", "send"): 0.5,
        ("y_seconds_bucket", "0.5"): 0,
        ("y_seconds_bucket", "1"): 1,
        ("y_seconds_bucket", "+Inf"): 1,
        ("y_seconds_count",): 1,
        ("y_seconds_sum",): 0.7,
    }
    assert [(one.name, one.type, one.documentation) for one in parsed] == [
        ("x", "counter", "What it is."),
        ("y_seconds", "histogram", "How long."),
    ]
