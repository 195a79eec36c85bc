"""Attempts, crashes and cancels count: I6, I7."""

from __future__ import annotations

from tests.faults.drill import Drill
from tests.faults.mutants.mutant import mutant


def a_job_kills_its_process_again_and_again(drill: Drill) -> None:
    drill.enqueue()
    for _ in range(8):
        drill.session.make_due()
        if claimed := drill.session.claim():
            drill.session.crash(*claimed, reason="its process exited with status 9", base_seconds=0)
    drill.cancel_all()


@mutant("I6", a_job_kills_its_process_again_and_again)
def gives_attempts_back_on_a_crash(drill: Drill) -> None:
    drill.alter("crash", "h.attempt, h.crashes + 1,", "h.attempt - 1, h.crashes,")


def a_job_fails_again_and_again(drill: Drill) -> None:
    drill.enqueue(max_attempts=2)
    for _ in range(4):
        drill.session.make_due()
        if claimed := drill.session.claim():
            drill.session.fail(*claimed)
    drill.cancel_all()


@mutant("I6", a_job_fails_again_and_again)
def retries_for_ever(drill: Drill) -> None:
    drill.alter("fail_many", "h.attempt - h.crashes >= h.max_attempts", "false")


def a_running_job_is_cancelled_and_then_fails(drill: Drill) -> None:
    (job_id,) = drill.enqueue()
    claimed = drill.session.claim()
    drill.cancel(job_id)
    drill.session.fail(*claimed)
    drill.work()


@mutant("I7", a_running_job_is_cancelled_and_then_fails)
def forgets_the_cancel_when_failing(drill: Drill) -> None:
    drill.alter("fail_many", "h.is_cancel_requested OR ", "")
