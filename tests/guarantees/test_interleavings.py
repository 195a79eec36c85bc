"""Whatever order the steps of two or three sessions come in, each job has one fate, and each answer is true.

After every order (see verdicts.py): each job is in exactly one table, and got there by legal steps only; of
the calls that would end an attempt at most one did, under its token; what each said is what it did, no
more and no less; who was refused was refused for a reason; a cancel that was answered is honoured; no
limit is passed; no blocked job is left to nobody; nobody waits who must not; no deadlock, no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.guarantees.interleaving import Play, Program, Stage, alone, transaction
from tests.guarantees.verdicts import Call, Cast
from tests.sql.support import Attempt, Session
from tests.support import make_database

SEED = 20240229

NEVER: frozenset[str] = frozenset()
FOR_KEYS = frozenset({"advisory"})


# What a session can call.


def claim(session: Session, _cast: Cast) -> dict[int, str]:
    return {row.job_id: "running" for row in session.claim(lease_seconds=3600)}


def claim_q(session: Session, _cast: Cast) -> dict[int, str]:
    return {row.job_id: "running" for row in session.claim("q", lease_seconds=3600)}


def heartbeat(session: Session, cast: Cast) -> dict[int, str]:
    return session.heartbeat(*cast.held)


def complete(session: Session, cast: Cast) -> dict[int, str]:
    return dict.fromkeys(session.complete(*cast.held), "succeeded")


def fail(session: Session, cast: Cast) -> dict[int, str]:
    return session.fail(*cast.held, retry_seconds=[0 for _ in cast.held])


def bury(session: Session, cast: Cast) -> dict[int, str]:
    return session.fail(*cast.held, is_dead=[True for _ in cast.held])


def release(session: Session, cast: Cast) -> dict[int, str]:
    return session.release(*cast.held)


def crash(session: Session, cast: Cast) -> dict[int, str]:
    return session.crash(*cast.held)


def reap(session: Session, _cast: Cast) -> dict[int, str]:
    return {
        row.job_id: row.state for row in session.call("reap", base_seconds=0, deadline_grace_seconds=3600)
    }


def cancel(session: Session, cast: Cast) -> dict[int, str]:
    return session.cancel(*cast.named)


def promote(session: Session, _cast: Cast) -> dict[int, str]:
    """It says how many; the journal knows which."""
    ((count,),) = session.call("promote")
    ids = session.rows(
        "SELECT job_id FROM stage.journal "
        "WHERE pid = pg_backend_pid() AND before = 'scheduled' AND after = 'ready' ORDER BY nth"
    )
    return {(ids[nth][0] if nth < len(ids) else -nth): "ready" for nth in range(count)}


def redrive(session: Session, cast: Cast) -> dict[int, str]:
    return session.redrive(*cast.dead)


CALLS = {
    call.name: call
    for call in (
        Call("claim", claim, waits_for=NEVER),
        Call("heartbeat", heartbeat, is_fenced=True, waits_for=NEVER),
        Call("complete", complete, is_fenced=True),
        Call("fail", fail, is_fenced=True),
        Call("bury", bury, is_fenced=True),
        Call("release", release, is_fenced=True),
        Call("crash", crash, is_fenced=True),
        Call("reap", reap, waits_for=FOR_KEYS),
        Call("cancel", cancel),
        Call("promote", promote, waits_for=NEVER),
        Call("redrive", redrive),
    )
}
CLAIM_Q = Call("claim q", claim_q, waits_for=NEVER)
# The others end an attempt by the same inner functions as fail does.
MAIN = [CALLS[n] for n in ("claim", "heartbeat", "complete", "fail", "reap", "cancel", "promote", "redrive")]
FENCED = [name for name, call in CALLS.items() if call.is_fenced]


# Scenes.


def one_of_each(session: Session) -> Cast:
    """One job that runs and whose lease is over, one that is ready, one that is due, one that is dead."""
    runs, dead = session.enqueue(), session.enqueue()
    held, doomed = session.claim(lease_seconds=3600)
    session.fail(doomed, is_dead=[True])
    ready, due = session.enqueue(), session.enqueue(delay_seconds=60)
    session.rows("UPDATE pgqueue.jobs SET run_at = clock_timestamp() WHERE state = 'scheduled'")
    session.expire(held)
    return Cast((Attempt(held.job_id, held.token),), (runs, ready, due), (dead,))


def one_overdue(session: Session) -> Cast:
    """As `one_of_each`, but the one that runs is past its deadline, and its owner has a grace to stop it."""
    cast = one_of_each(session)
    session.overrun(*cast.held, seconds=1)
    return cast


def one_key(session: Session) -> Cast:
    """A key that lets one run: it runs and its lease is over; others are blocked, due and dead."""
    key = {"concurrency_key": "k"}
    dead = session.enqueue(**key)
    session.fail(*session.claim(lease_seconds=3600), is_dead=[True])
    session.enqueue(**key)
    blocked = session.enqueue(**key)
    (held,) = session.claim(lease_seconds=3600)
    due = session.enqueue(**key, delay_seconds=60)
    session.rows("UPDATE pgqueue.jobs SET run_at = clock_timestamp() WHERE state = 'scheduled'")
    session.expire(held)
    assert session.state(blocked) == "blocked"
    return Cast((Attempt(held.job_id, held.token),), (blocked, due), (dead,))


def two_of_a_key(session: Session) -> Cast:
    """A key that lets two run, in two queues: both run, one lease is over; blocked and ready ones in both."""
    key = {"concurrency_key": "k", "concurrency_limit": 2}
    first, _, waits = (session.enqueue(**key) for _ in range(3))
    session.enqueue(**key, queue="q")
    held = session.claim(lease_seconds=3600, max_jobs=2)
    session.claim()
    session.claim("q")
    last = session.enqueue(**key)
    session.enqueue(**key, queue="q")
    session.expire(held[0])
    assert session.state(waits) == "blocked"
    return Cast(tuple(Attempt(a.job_id, a.token) for a in held), (first, waits, last))


def two_queues(session: Session) -> Cast:
    """A key that lets one run, and one ready job of it in each of two queues."""
    session.enqueue(concurrency_key="k")
    session.enqueue(concurrency_key="k", queue="q")
    return Cast()


@pytest.fixture(scope="module")
def stage(postgres, postgresql_noproc):
    with make_database(postgres.dsn, postgresql_noproc.template_dbname) as dsn:
        stage = Stage(dsn)
        try:
            yield stage
        finally:
            stage.close()


def failures(plays) -> list[str]:
    return [f"{play}: {'; '.join(play.violations)}" for play in plays if play.violations]


@pytest.mark.parametrize("second", CALLS)
def test_the_owner_of_an_overdue_job_and_anybody_else_are_safe_in_every_order(stage, second):
    stage.set_scene(one_overdue)

    plays = list(stage.every_order(alone(CALLS["heartbeat"]), alone(CALLS[second])))

    assert failures(plays) == []


@pytest.mark.parametrize("first", CALLS)
def test_two_calls_are_safe_in_every_order_of_their_statements(stage, first):
    stage.set_scene(one_of_each)
    plays: list[Play] = []

    for second in list(CALLS)[list(CALLS).index(first) :]:
        plays += stage.every_order(alone(CALLS[first]), alone(CALLS[second]))

    assert failures(plays) == []


@pytest.mark.parametrize("scene", [one_of_each, one_key])
def test_a_transaction_that_is_rolled_back_has_never_been_whoever_waited_for_it(stage, scene):
    stage.set_scene(scene)
    plays: list[Play] = []

    with stage.without_stops():
        for undone, call in itertools.product(MAIN, MAIN):
            plays += stage.every_order(transaction(undone, end="rollback"), alone(call))

    assert failures(plays) == []
    assert sum(len(play.waits) for play in plays) >= 10


@pytest.mark.parametrize("late", FENCED)
def test_the_former_holder_of_a_job_that_went_round_is_refused_in_every_order(stage, late):
    stage.set_scene(one_of_each)
    goes_round = alone(CALLS["release"], CALLS["claim"])

    plays = list(stage.every_order(goes_round, alone(CALLS[late])))

    assert failures(plays) == []


def test_of_two_claims_for_one_slot_from_two_queues_one_gets_it_in_orders_drawn_by_a_seed(stage):
    stage.set_scene(two_queues)

    plays = list(stage.some_orders(alone(CALLS["claim"]), alone(CLAIM_Q), count=60, seed=SEED))

    assert failures(plays) == []
    assert len(plays) == 60


@pytest.mark.parametrize("scene", [one_key, two_of_a_key])
def test_two_transactions_on_the_jobs_of_a_key_are_safe_in_orders_drawn_by_a_seed(stage, scene):
    stage.set_scene(scene)
    plays: list[Play] = []

    for first, second in itertools.combinations_with_replacement(MAIN, 2):
        plays += stage.some_orders(transaction(first), transaction(second), count=3, seed=SEED)

    assert failures(plays) == []
    assert sum(len(play.waits) for play in plays) >= 10


@pytest.mark.parametrize("scene", [one_of_each, one_key])
def test_three_calls_are_safe_in_orders_drawn_by_a_seed(stage, scene):
    stage.set_scene(scene)
    plays: list[Play] = []

    for calls in itertools.combinations(MAIN, 3):
        plays += stage.some_orders(*(alone(call) for call in calls), count=2, seed=SEED)

    assert failures(plays) == []
    assert sum(len(play.waits) for play in plays) >= 10


def test_the_same_choices_give_the_same_play(stage):
    stage.set_scene(one_key)
    programs = [transaction(CALLS[name]) for name in ("complete", "cancel", "reap")]

    first = [play.choices for play in stage.some_orders(*programs, count=10, seed=SEED)]
    second = [play.choices for play in stage.some_orders(*programs, count=10, seed=SEED)]

    assert first == second
    assert len(first) == 10


# That it can fail: the same functions with one thing done wrong.


def touch(nth: int) -> Call:
    def make(session: Session, cast: Cast) -> dict[int, str]:
        session.rows("UPDATE pgqueue.jobs SET errors = errors WHERE id = %s", cast.named[nth])
        return {cast.named[nth]: session.state(cast.named[nth])}

    return Call(f"touch {nth}", make)


def test_a_deadlock_is_found(stage):
    """The control: two sessions that lock the same two rows, each in its own order."""
    stage.set_scene(one_of_each)
    up, down = transaction(touch(0), touch(1)), transaction(touch(1), touch(0))

    plays = list(stage.every_order(up, down))

    assert {"40P01" in "".join(play.violations) for play in plays} == {True, False}


class Mutant(NamedTuple):
    """One thing done wrong: what a function says and what it says then; where that is seen, and as what."""

    function: str
    changes: tuple[tuple[str, str], ...]
    scene: Callable[[Session], Cast]
    programs: tuple[tuple[str, ...], tuple[str, ...]]
    seen: str


ANY_TOKEN = ((" AND j.claim_token = g.token", ""),)
UNLOCKED = (("FOR NO KEY UPDATE SKIP LOCKED", ""),)
WAITING = ((" SKIP LOCKED", ""),)
# Looks first, by id as others do, and does not look again when it has the locks.
LOOKS_ONCE = """
PERFORM stage.stop('reap: has looked');
verdicts := ARRAY(
    SELECT ROW(j.ctid, v.job_id, v.state, v.run_at, v.reason, v.attempt, v.crashes, v.concurrency_key, v.task,
               v.queue)::verdict
    FROM unnest(verdicts) AS v JOIN jobs AS j ON j.id = v.job_id FOR NO KEY UPDATE OF j
);
PERFORM settle(verdicts);
"""
# Looks first, and does not follow a row that has moved since.
LOOKS = """
seen := ARRAY(SELECT j.ctid FROM jobs AS j WHERE j.id = ANY (complete.job_ids));
PERFORM stage.stop('complete: has looked');
"""
SAW_IT = (
    ("ids bigint[];", "ids bigint[]; seen tid[];"),
    ("WITH done AS (", f"{LOOKS}WITH done AS ("),
    ("j.id = ANY (complete.job_ids)\n", "j.ctid = ANY (seen)\n"),
    ("unnest(ids)", "unnest(complete.job_ids)"),
)
ROUND = ("release", "claim")
MUTANTS = {
    "completes whatever the token": Mutant(
        "complete", ((")) IS TRUE", ")) IS NOT NULL"),),
        one_of_each, (ROUND, ("complete",)), "complete touched job 1 without holding it",
    ),
    "fails whatever the token": Mutant(
        "hold", ANY_TOKEN,
        one_of_each, (ROUND, ("fail",)), "fail touched job 1 without holding it",
    ),
    "renews whatever the token": Mutant(
        "heartbeat", ANY_TOKEN,
        one_of_each, (ROUND, ("heartbeat",)), "heartbeat touched job 1 without holding it",
    ),
    "completes a row where it saw it": Mutant(
        "complete", SAW_IT,
        one_of_each, (("complete",), ("heartbeat",)), "complete said [(1, 'succeeded')], but did []",
    ),
    "reaps rows that are not locked": Mutant(
        "reap", UNLOCKED,
        one_of_each, (("reap",), ("complete",)), "reap said [(1, 'ready')], but did []",
    ),
    "reaps what it saw before": Mutant(
        "reap", (*UNLOCKED, ("PERFORM settle(verdicts);", LOOKS_ONCE)),
        one_of_each, (("reap",), ("heartbeat",)), "reap took job 1 from an owner whose lease was good",
    ),
    "reaps and waits": Mutant(
        "reap", WAITING,
        one_of_each, (("reap",), ("heartbeat",)), "reap waits for transactionid",
    ),
    "renews and waits": Mutant(
        "heartbeat", WAITING,
        one_of_each, (("heartbeat",), ("fail",)), "heartbeat waits for transactionid",
    ),
    "promotes and waits": Mutant(
        "promote", WAITING,
        one_of_each, (("promote",), ("cancel",)), "promote waits for transactionid",
    ),
    "answers a cancel and forgets it": Mutant(
        "cancel", (("ANY (running)", "ANY (running) AND false"),),
        one_of_each, (("cancel",), ("fail",)), "cancel said [(1, 'running'), ",
    ),
    "cancels what it saw before": Mutant(
        "cancel", (("FOR NO KEY UPDATE", ""),),
        one_of_each, (("cancel",), ("claim",)), "but did [(1, 'running'), (4, 'cancelled')]",
    ),
    "tries again what is to be cancelled": Mutant(
        "fail_many", (("h.is_cancel_requested OR ", ""),),
        one_of_each, (("cancel",), ("fail",)), "from running to ready, but its cancel had been answered",
    ),
    "redrives and keeps the dead one": Mutant(
        "redrive", (("DELETE FROM dead_jobs AS d WHERE d.id = ANY (back)", "NULL"),),
        one_of_each, (("redrive",), ("claim",)), "(2, 'dead'), (2, 'running')",
    ),
    "claims without the lock of the key": Mutant(
        "claim", (("WHERE pg_try_advisory_xact_lock(key_lock(w.key))", ""),),
        two_queues, (("claim",), ("claim q",)), "claim: 23505",
    ),
    "wakes nobody": Mutant(
        "complete", (("PERFORM unblock(keys)", "PERFORM NULL"),),
        one_key, (("complete",), ("heartbeat",)), "1 blocked jobs that nobody would wake",
    ),
    "wakes nobody when it would have to wait": Mutant(
        "complete", (("unblock(keys)", "unblock(keys, false)"),),
        one_key, (("complete",), ("promote", "claim")), "1 blocked jobs that nobody would wake",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_function_that_does_one_thing_wrong_is_found_out(stage, name):
    mutant = MUTANTS[name]
    stage.set_scene(mutant.scene)
    first, second = (program(*calls) for calls in mutant.programs)

    with stage.altered(mutant.function, *mutant.changes):
        plays = itertools.islice(stage.every_order(first, second), 300)
        is_seen = any(mutant.seen in failure for play in plays for failure in play.violations)

    assert is_seen


def program(*names: str) -> Program:
    return alone(*(CLAIM_Q if name == CLAIM_Q.name else CALLS[name] for name in names))
