"""Was it us? What a worker can find out about an outcome whose answer got lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pgqueue.database import run
from pgqueue.sql import attempts
from tests.sql.support import OpenSession, Session

BOOM = "boom\n" + "x" * 9000


def landed(session: Session, claimed: Any, reason: str | None, *, goes_on: bool = True) -> str | None:
    statement = attempts.landed(
        [claimed.job_id],
        [str(claimed.token)],
        [claimed.attempt],
        [claimed.age_seconds],
        [reason],
        str(session.worker_id),
        goes_on=goes_on,
    )
    return run(session.connection, statement).get(claimed.job_id)


def reap(session: Session, claimed: Any) -> None:
    session.expire(claimed)
    session.call("reap")


def wear_out(session: Session, claimed: Any) -> None:
    """Let the attempt be the job's last."""
    session.rows("UPDATE pgqueue.jobs SET max_attempts = 1, crashes = 2 WHERE id = %s", claimed.job_id)


def nothing(session: Session, claimed: Any) -> None:
    """Let the attempt run on."""


def claim_again(session: Session) -> Any:
    session.make_due()
    return session.claim()[0]


# What became of the attempt, what its worker had wanted to write, and what it is told.
ENDS: dict[str, tuple[Callable[[Session, Any], Any], str | None, str | None]] = {
    "failed": (lambda s, a: s.fail(a, errors=[BOOM], retry_seconds=[60.0]), BOOM, "ready"),
    "dead": (lambda s, a: s.fail(a, errors=[BOOM], is_dead=[True]), BOOM, "dead"),
    "cancelled": (lambda s, a: s.fail(a, errors=[BOOM], is_cancelled=[True]), BOOM, "cancelled"),
    "crashed": (lambda s, a: s.crash(a, reason="its process died"), "its process died", "ready"),
    "released": (lambda s, a: s.release(a), None, "ready"),
    "snoozed with a reason": (lambda s, a: s.release(a, reason="later"), "later", "ready"),
    "taken back before it failed": (reap, BOOM, None),
    "taken back before it was released": (reap, None, None),
    "cancelled before it was taken back": (lambda s, a: (s.cancel(a.job_id), reap(s, a)), BOOM, None),
    "cancelled and then released": (lambda s, a: (s.cancel(a.job_id), s.release(a)), None, "cancelled"),
    "dead because it was taken back": (lambda s, a: (wear_out(s, a), reap(s, a)), BOOM, None),
    "still running, failed": (nothing, BOOM, None),
    "still running, released": (nothing, None, None),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("is_claimed_again", [False, True])
def test_a_worker_can_tell_whether_it_ended_its_attempt_or_somebody_else_did(
    end: str, is_claimed_again: bool, session: Session, open_session: OpenSession
) -> None:
    become_of, reason, told = ENDS[end]
    session.enqueue()
    # An earlier attempt with the same number left its line, too.
    session.release(session.claim()[0], reason=reason or "later")
    claimed = session.claim()[0]

    become_of(session, claimed)
    if is_claimed_again and told != "dead" and session.job(claimed.job_id) and become_of is not nothing:
        other = open_session()
        other.complete(claim_again(other))

    assert landed(session, claimed, reason) == told


def test_a_completion_is_known_by_its_token_alone(session: Session, open_session: OpenSession) -> None:
    session.enqueue_many({"task": "t"}, {"task": "t"})
    ours, taken = session.claim()
    session.complete(ours)
    reap(session, taken)
    other = open_session()
    other.complete(claim_again(other))

    assert landed(session, ours, None, goes_on=False) == "succeeded"
    assert landed(session, taken, None, goes_on=False) is None


@pytest.mark.parametrize("end", ["cancelled", "dead"])
def test_a_job_that_left_the_queue_without_us_was_not_completed_by_us(end: str, session: Session) -> None:
    session.enqueue()
    claimed = session.claim()[0]
    if end == "cancelled":
        session.cancel(claimed.job_id)
    else:
        wear_out(session, claimed)

    reap(session, claimed)

    assert session.state(claimed.job_id) == end
    assert landed(session, claimed, None, goes_on=False) is None


def test_what_strangers_wrote_into_a_jobs_history_does_no_harm(session: Session) -> None:
    session.enqueue()
    claimed = session.claim()[0]
    session.rows("""UPDATE pgqueue.jobs SET errors = '[1, "x", null, {"attempt": "?", "at": "never"}, {}]'""")
    session.release(claimed)

    assert landed(session, claimed, None) == "ready"
