import logging

import pytest

from pgqueue.errors import Cancel, JobTimeout, LeaseLost
from pgqueue.model.context import JobContext


def context(**answers):
    return JobContext(job_id=7, task="resize", queue="images", **answers)


def test_a_context_answers_as_of_now():
    lost = []
    job = context(is_lost=lambda: bool(lost), remaining_seconds=lambda: 12.5)

    before = job.is_lost
    lost.append(True)

    assert (before, job.is_lost, job.remaining_seconds) == (False, True, 12.5)


def test_past_its_deadline_a_job_has_zero_seconds_and_without_one_none():
    assert context(remaining_seconds=lambda: -3.0).remaining_seconds == 0.0
    assert context(remaining_seconds=lambda: None).remaining_seconds is None


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({"is_lost": lambda: True}, LeaseLost),
        ({"is_cancel_requested": lambda: True}, Cancel),
        ({"remaining_seconds": lambda: 0.0}, JobTimeout),
        ({"is_lost": lambda: True, "is_cancel_requested": lambda: True}, LeaseLost),
    ],
)
def test_check_raises_what_makes_going_on_pointless(answers, error):
    with pytest.raises(error):
        context(**answers).check()


@pytest.mark.parametrize("remaining", [None, 0.1])
def test_check_returns_while_the_job_is_ours_and_in_time(remaining):
    assert context(remaining_seconds=lambda: remaining).check() is None


def test_progress_reaches_the_worker():
    said = []

    context(report=said.append).progress(3, 10, "third of ten")

    assert said == [{"done": 3, "total": 10, "message": "third of ten"}]


def test_log_records_carry_the_job(caplog):
    job = context(attempt=2)

    with caplog.at_level(logging.INFO):
        job.logger.info("half done")

    record = caplog.records[0]
    assert (record.name, record.job_id, record.task, record.attempt) == (
        "pgqueue.task.resize",
        7,
        "resize",
        2,
    )


def test_a_job_without_a_key_has_one_that_all_its_attempts_share():
    assert context().idempotency_key == "job:7"
    assert context(idempotency_key="charge:9").idempotency_key == "charge:9"


def test_the_last_attempt_knows_that_it_is():
    assert context(attempt=3, max_attempts=3).is_last_attempt
    assert not context(attempt=2, max_attempts=3).is_last_attempt
