"""begin_once, finish_once, complete_once: an effect happens once, whoever dies, freezes or comes twice."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.support import wait_until


def start(session, key="charge:1", **parameters):
    job_id = session.enqueue(idempotency_key=key, **parameters)
    return next(attempt for attempt in session.claim() if attempt.job_id == job_id)


def begin(session, attempt, key="charge:1", **parameters):
    return session.call(
        "begin_once", key=key, job_name="charge", token=attempt.token, job_id=attempt.job_id, **parameters
    )[0]


def finish(session, attempt, key="charge:1", **parameters):
    return session.call("finish_once", key=key, token=attempt.token, job_id=attempt.job_id, **parameters)[0][
        0
    ]


def processed(session, key="charge:1"):
    return session.row("SELECT * FROM pgqueue.processed_jobs WHERE idempotency_key = %s", key)


def let_time_pass(session, interval="1 day"):
    session.rows(
        "UPDATE pgqueue.processed_jobs SET created_at = created_at - %s::interval,"
        " updated_at = updated_at - %s::interval",
        interval,
        interval,
    )


# In one transaction.


def test_effect_key_and_job_are_one_commit(session):
    attempt = start(session)

    with session.connection.transaction():
        begun = begin(session, attempt)
        finished = finish(session, attempt, response='{"paid": 7}', began=str(begun.began))

    assert (begun.verdict, finished) == ("started", "done")
    assert (processed(session).status, processed(session).response_payload) == ("COMPLETED", {"paid": 7})
    assert session.state(attempt.job_id) == "succeeded"
    assert session.finished(attempt.job_id).result == {"paid": 7}


def test_a_transaction_that_rolls_back_leaves_nothing(session):
    attempt = start(session)

    with session.connection.transaction(force_rollback=True):
        begin(session, attempt)
        finish(session, attempt)

    assert processed(session) is None
    assert session.state(attempt.job_id) == "running"


def test_a_repetition_is_told_what_was_answered(session):
    with session.connection.transaction():
        first = start(session)
        begin(session, first)
        finish(session, first, response='"receipt"')

    begun = begin(session, start(session))

    assert (begun.verdict, begun.response) == ("done", "receipt")


def test_of_two_at_once_one_begins_and_the_other_is_told_to_wait(session, open_session):
    other = open_session()
    first, second = start(session), start(other)

    with session.connection.transaction():
        begin(session, first)
        assert begin(other, second).verdict == "busy"
        finish(session, first)

    assert begin(other, second).verdict == "done"


def test_a_zombies_transaction_is_refused_at_its_end(session, open_session):
    other = open_session()
    zombie = start(session)
    with session.connection.transaction() as transaction:
        begin(session, zombie)
        other.expire(zombie)
        other.call("reap")
        other.make_due()
        successor = other.claim()[0]

        assert finish(session, zombie) == "lost"
        raise psycopg.Rollback(transaction)
    assert processed(session) is None
    assert successor.job_id == zombie.job_id
    assert session.state(successor.job_id) == "running"


def test_the_session_of_a_frozen_attempt_is_ended_so_that_its_key_is_free(session, open_session):
    other = open_session()
    frozen = start(session)
    session.rows("BEGIN")
    begin(session, frozen)
    other.expire(frozen)
    other.call("reap")
    other.make_due()
    successor = other.claim()[0]

    assert begin(other, successor).verdict == "busy"
    with pytest.raises(psycopg.OperationalError):
        session.rows("SELECT 1")

    assert begin(other, successor).verdict == "started"


def test_a_client_that_freezes_before_its_commit_keeps_the_job_for_seconds_only(session, open_session):
    other = open_session()
    attempt = start(session)
    session.rows("BEGIN")
    begin(session, attempt)
    finish(session, attempt)

    wait_until(
        lambda: other.one("SELECT pg_try_advisory_lock(pgqueue.once_lock('charge:1'))"), 60, "the key is free"
    )

    other.expire(attempt)
    assert [row.job_id for row in other.call("reap")] == [attempt.job_id]


def test_the_session_of_a_live_attempt_is_left_alone(session, open_session):
    other = open_session()
    holder, waiting = start(session), start(other)
    with session.connection.transaction():
        begin(session, holder)

        assert begin(other, waiting).verdict == "busy"

        assert finish(session, holder) == "done"


def test_an_attempt_that_is_not_ours_any_more_begins_nothing(session):
    attempt = start(session)
    session.release(attempt)

    assert begin(session, attempt).verdict == "lost"
    assert processed(session) is None


def test_a_handler_that_ended_the_transaction_itself_is_found_out(session):
    attempt = start(session)
    session.rows("BEGIN")
    begun = begin(session, attempt)
    session.rows("COMMIT")

    with pytest.raises(psycopg.Error) as caught:
        finish(session, attempt, began=str(begun.began))

    assert caught.value.sqlstate == "PQ001"


# Effects elsewhere.


def test_completing_an_attempt_completes_its_key(session):
    attempt, plain = start(session), start(session, key=None)
    begin(session, attempt)

    completed = session._ending(
        "complete_once", [plain, attempt], keys=["none", "charge:1"], results=[None, '"receipt"']
    )

    assert sorted(row[0] for row in completed) == sorted([attempt.job_id, plain.job_id])
    assert (processed(session).status, processed(session).response_payload) == ("COMPLETED", "receipt")


def test_an_effect_that_happened_is_on_record_even_if_the_lease_was_lost(session):
    attempt = start(session)
    begin(session, attempt)
    session.expire(attempt)
    session.call("reap")

    completed = session._ending("complete_once", [attempt], keys=["charge:1"], results=['"receipt"'])

    assert completed == []
    session.make_due()
    assert begin(session, session.claim()[0]).verdict == "done"


def test_a_failure_of_the_handler_forgets_that_it_began(session):
    attempt = start(session)
    begin(session, attempt)

    session.fail(attempt)

    assert processed(session) is None


@pytest.mark.parametrize("ending", ["crash", "fail", "release"])
def test_after_an_interruption_the_outcome_is_unknown(session, ending):
    attempt = start(session)
    begin(session, attempt)
    match ending:
        case "crash":
            session.crash(attempt)
        case "fail":
            session.fail(attempt, is_unsure=[True])
        case "release":
            session.release(attempt, is_unsure=True)
    session.make_due()
    successor = session.claim()[0]

    assert begin(session, successor, may_take_over=False).verdict == "unknown"
    assert begin(session, successor).verdict == "takeover"
    assert processed(session).claim_token == successor.token


def test_an_owner_that_is_only_cut_off_is_given_the_time_to_finish(session):
    attempt = start(session)
    begin(session, attempt)
    session.expire(attempt)
    session.call("reap")
    session.make_due()
    successor = session.claim()[0]

    waiting = begin(session, successor)
    let_time_pass(session)

    assert waiting.verdict == "busy"
    assert 500 < waiting.retry_seconds <= 600
    assert begin(session, successor).verdict == "takeover"


def test_an_owner_that_still_runs_is_never_taken_over(session):
    owner, other = start(session), start(session)
    begin(session, owner)
    let_time_pass(session)

    assert begin(session, other).verdict == "busy"


def test_jobs_of_one_claim_share_a_token_and_nothing_else(session):
    jobs = [session.enqueue(idempotency_key="charge:1") for _ in range(3)]
    first, second, third = sorted(session.claim())
    assert [first.job_id, second.job_id, third.job_id] == jobs
    assert first.token == second.token == third.token

    assert [begin(session, one).verdict for one in (first, second)] == ["started", "busy"]
    session.release(second)
    session._ending("complete_once", [third], keys=["charge:1"])

    assert (processed(session).job_id, processed(session).status) == (first.job_id, "IN_PROGRESS")


def test_asking_again_under_the_same_token_gives_the_same_answer(session):
    attempt = start(session)

    assert [begin(session, attempt).verdict for _ in range(2)] == ["started", "started"]


# Pruning.


def test_old_keys_are_pruned_but_for_those_that_may_come_again(session):
    done, running, unknown = (start(session, key=key) for key in ("done", "running", "unknown"))
    for attempt, key in ((done, "done"), (running, "running"), (unknown, "unknown")):
        begin(session, attempt, key=key)
    finish(session, done, key="done")
    session.fail(unknown, is_dead=[True], is_unsure=[True])
    let_time_pass(session)
    begin(session, start(session, key="new"), key="new")

    pruned = session.call("prune_processed", older_than_seconds=3600)[0][0]

    assert pruned == 1
    left = session.rows("SELECT idempotency_key FROM pgqueue.processed_jobs ORDER BY 1")
    assert [row[0] for row in left] == ["new", "running", "unknown"]


def test_a_key_without_a_job_is_begun_and_finished_by_whoever_calls(session):
    token = uuid.uuid4()

    begun = session.call("begin_once", key="web:1", job_name="web", token=token)[0]
    finished = session.call("finish_once", key="web:1", token=token, response='"answer"')[0][0]

    assert (begun.verdict, finished) == ("started", "done")
    assert processed(session, "web:1").job_id is None
