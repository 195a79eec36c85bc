"""The whole life of jobs, as a model in Python says it, step by step, and as PostgreSQL does it.

Hypothesis thinks of sequences of calls. The model knows no SQL: it predicts each answer, and what every
job looks like after it. Two things it leaves open: whether a job waits for its key as ready or as
blocked (that none is forgotten is asked for), and which of several keys gets the last free slots of a claim.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pgqueue.model.job import TRANSITIONS, JobState
from tests.guarantees.support import OVER_LIMIT, STUCK
from tests.guarantees.verdicts import BORN, JOURNAL, MAX_CRASHES, moves
from tests.sql.support import Attempt, Session
from tests.support import make_database

QUEUES = ("default", "mail")
LIMITS = {"one": 1, "two": 2}
LATER = 3600.0
LEASE_SECONDS = 3600.0  # no lease ends unless the test says so
GRACE_SECONDS = 3600.0  # nor is a job past its deadline given up

FACTS = f"""
WITH journal AS (
    DELETE FROM stage.journal RETURNING *
), job AS (
    SELECT id, state, attempt, crashes, errors, claim_token, max_attempts, concurrency_key,
           cancel_requested_at IS NOT NULL AS is_asked,
           heartbeat_at + make_interval(secs => lease_seconds) < clock_timestamp() AS is_expired
    FROM pgqueue.jobs
    UNION ALL
    SELECT id, 'dead', attempt, crashes, errors, claim_token, max_attempts, NULL, NULL, NULL
    FROM pgqueue.dead_jobs
    UNION ALL
    SELECT id, state, attempt, crashes, errors, claim_token, NULL, NULL, NULL, NULL
    FROM pgqueue.finished_jobs
)
SELECT
    (
        SELECT coalesce(jsonb_agg(jsonb_build_array(
            j.id,
            CASE WHEN j.state = 'ready' OR (j.state = 'blocked' AND j.concurrency_key IS NOT NULL)
                 THEN 'waiting' ELSE j.state END,
            j.attempt, j.crashes, coalesce(jsonb_array_length(j.errors), 0), j.claim_token, j.max_attempts,
            j.is_asked, j.is_expired
        ) ORDER BY j.id), '[]')
        FROM job AS j
    ) AS jobs,
    (SELECT coalesce(jsonb_agg(j ORDER BY j.nth), '[]') FROM journal AS j) AS journal,
    ({STUCK}) AS stuck,
    ({OVER_LIMIT}) AS over_limit
"""
START = """
DELETE FROM pgqueue.jobs; DELETE FROM pgqueue.dead_jobs; DELETE FROM pgqueue.finished_jobs;
DELETE FROM pgqueue.queues; DELETE FROM pgqueue.rate_limits; DELETE FROM stage.journal
"""


@dataclass(frozen=True)
class Wish:
    """What a producer asks for."""

    queue: str
    priority: int
    max_attempts: int
    key: str | None
    unique_key: str | None
    on_conflict: str
    is_delayed: bool


WISH = st.builds(
    Wish,
    queue=st.sampled_from(["default", "default", "mail"]),
    priority=st.integers(0, 1),
    max_attempts=st.integers(1, 3),
    key=st.sampled_from([None, "one", "two", "two"]),
    unique_key=st.sampled_from([None, "u", "v"]),
    on_conflict=st.sampled_from(["replace", "replace", "skip", "reject"]),
    is_delayed=st.sampled_from([False, False, False, True]),
)


@dataclass
class Job:
    """What the model knows of a job."""

    id: int
    wish: Wish
    state: str  # waiting stands for ready and blocked
    place: float  # in the order of run_at
    max_attempts: int = 0
    is_due: bool = False
    attempt: int = 0
    crashes: int = 0
    errors: int = 0
    token: uuid.UUID | None = None
    is_asked: bool = False  # to stop
    is_expired: bool = False
    is_overdue: bool = False
    is_given_up: bool = False  # overdue for longer than its owner's grace

    @property
    def is_due_to_reap(self) -> bool:
        return self.is_expired or self.is_given_up

    def __post_init__(self) -> None:
        self.max_attempts = self.wish.max_attempts

    @property
    def is_live(self) -> bool:
        return self.state in {"scheduled", "waiting", "running"}

    @property
    def order(self) -> tuple[int, float, int]:
        return (self.wish.priority, self.place, self.id)

    @property
    def has_used_up(self) -> bool:
        return self.attempt - self.crashes >= self.max_attempts

    def facts(self) -> list[object]:
        token = str(self.token) if self.token else None
        is_finished = self.state in {"succeeded", "cancelled"}
        return [
            self.id,
            self.state,
            self.attempt,
            self.crashes,
            self.errors,
            token,
            None if is_finished else self.max_attempts,
            self.is_asked if self.is_live else None,
            self.is_expired if self.state == "running" else None,
        ]


@dataclass
class World:
    """What the model knows of them all."""

    jobs: dict[int, Job] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    paused: set[str] = field(default_factory=set)
    clock: count[int] = field(default_factory=count)

    def of(self, *states: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]

    def holder(self, unique_key: str | None) -> Job | None:
        live = (job for job in self.jobs.values() if job.is_live and job.wish.unique_key)
        return next((job for job in live if job.wish.unique_key == unique_key), None)

    def replaceable(self) -> list[Job]:
        return [job for job in self.of("waiting", "scheduled") if job.wish.unique_key]

    def held(self, attempts: list[Attempt]) -> list[Job]:
        """Give the jobs that really are held under one of these tokens, in order of id."""
        held = [job for job in self.of("running") if (job.id, job.token) in attempts]
        return sorted(held, key=lambda job: job.id)

    def free(self, key: str) -> int:
        return LIMITS[key] - sum(job.wish.key == key for job in self.of("running"))

    def end(self, job: Job, state: str, *, is_error: bool = True, is_new_place: bool = False) -> str:
        """Bring a job that ran, or waited, to where it goes next; give the word for it."""
        job.errors += is_error
        job.state = "waiting" if state == "ready" else state
        if job.is_live:
            job.token = None
            job.is_asked = job.is_expired = job.is_overdue = job.is_given_up = False
        if is_new_place:
            job.place = next(self.clock)
        return state


class Life(RuleBasedStateMachine):
    """The rules: what can be called, what it must say, and what it must have done."""

    session: Session

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.session.rows(START)

    # One rule, because Hypothesis leaves rules out at random, and without claims little happens.
    @rule(data=st.data())
    def step(self, data):
        world = self.world
        running = world.of("running")
        weights = {
            "enqueue": 2 if len(world.of("scheduled", "waiting", "running")) < 8 else 0,
            "replace": 2 if world.replaceable() else 0,
            "claim": 3 if world.of("waiting") else 0,
            **dict.fromkeys(("heartbeat", "complete", "fail", "release", "crash"), 2 if running else 0),
            **dict.fromkeys(("a_lease_ends", "a_deadline_passes"), 2 if running else 0),
            "reap": 8 if any(job.is_due_to_reap for job in running) else 1 if running else 0,
            "a_time_comes": 2 if world.of("scheduled") else 0,
            "promote": 3 if any(job.is_due for job in world.of("scheduled")) else 0,
            "cancel": 3 if world.jobs else 0,
            "redrive": 9 if any(job.crashes for job in world.of("dead")) else 3 if world.of("dead") else 0,
            "delete_by_hand": 1 if running else 0,
            "pause_or_resume": 3 if world.paused else 1,
        }
        choices = [what for what, weight in weights.items() for _ in range(weight)]
        getattr(self, data.draw(st.sampled_from(choices), label="what"))(data)

    # Producers.

    @initialize(wishes=st.lists(WISH, min_size=3, max_size=6), max_jobs=st.integers(0, 6))
    def begin(self, wishes, max_jobs):
        for wish in wishes:
            self._enqueue(wish)
        self._claim("default", max_jobs)

    def enqueue(self, data):
        self._enqueue(data.draw(WISH))

    def replace(self, data):
        job = data.draw(st.sampled_from(self.world.replaceable()))
        wish = data.draw(WISH)
        self._enqueue(replace(wish, unique_key=job.wish.unique_key, on_conflict="replace"))

    def _enqueue(self, wish: Wish) -> None:
        holder = self.world.holder(wish.unique_key)
        asked = {
            "queue": wish.queue,
            "priority": wish.priority,
            "max_attempts": wish.max_attempts,
            "concurrency_key": wish.key,
            "concurrency_limit": wish.key and LIMITS[wish.key],
            "unique_key": wish.unique_key,
            "on_conflict": wish.on_conflict,
            "delay_seconds": LATER if wish.is_delayed else None,
        }
        if holder and wish.on_conflict == "reject":
            with pytest.raises(psycopg.errors.UniqueViolation):
                self.session.enqueue(**asked)
            return
        job_id = self.session.enqueue(**asked)
        if holder and (wish.on_conflict == "skip" or holder.state == "running"):
            assert job_id == holder.id
            return
        job = Job(job_id, wish, "scheduled" if wish.is_delayed else "waiting", next(self.world.clock))
        if holder:
            assert job_id == holder.id
            job.attempt, job.crashes, job.errors = holder.attempt, holder.crashes, holder.errors
            job.max_attempts += holder.attempt
        self.world.jobs[job_id] = job

    # Workers.

    def claim(self, data):
        self._claim(data.draw(st.sampled_from(["default", "default", "mail"])), data.draw(st.integers(1, 3)))

    def _claim(self, queue: str, max_jobs: int) -> None:
        waiting = [job for job in self.world.of("waiting") if job.wish.queue == queue]
        waiting.sort(key=lambda job: job.order)
        by_key = {key: [job for job in waiting if job.wish.key == key] for key in (None, *LIMITS)}
        room = {key: self.world.free(key) if key else len(waiting) for key in by_key}
        can_run = [job for key, line in by_key.items() for job in line[: max(room[key], 0)]]

        claimed = self.session.claim(queue, max_jobs, lease_seconds=LEASE_SECONDS)

        assert len(claimed) == (0 if queue in self.world.paused else min(max_jobs, len(can_run)))
        taken = {row.job_id: row for row in claimed}
        for key, line in by_key.items():
            best = [job.id for job in line][: sum(job.id in taken for job in line)]
            assert all(job_id in taken for job_id in best), f"not the best of {key}: {taken} of {line}"
        for job_id, row in taken.items():
            job = self.world.jobs[job_id]
            job.state, job.token, job.attempt = "running", row.token, job.attempt + 1
            told = (row.key, row.attempt, row.crashes, row.max_attempts)
            assert told == (job.wish.key, job.attempt, job.crashes, job.max_attempts)
        self.world.attempts += [Attempt(row.job_id, row.token) for row in claimed]

    def heartbeat(self, data):
        asked = list({attempt.job_id: attempt for attempt in self._some_attempts(data)}.values())
        expected = {attempt.job_id: "lost" for attempt in asked}
        for job in self.world.held(asked):
            expected[job.id] = "overdue" if job.is_overdue else "cancel" if job.is_asked else "renewed"
            job.is_expired = False

        assert self.session.heartbeat(*asked) == expected

    def complete(self, data):
        ended = self._some_attempts(data)
        expected = [job.id for job in self.world.held(ended)]
        for job in self.world.held(ended):
            self.world.end(job, "succeeded", is_error=False)

        assert sorted(self.session.complete(*ended)) == expected

    def fail(self, data):
        how = data.draw(st.sampled_from(["now", "now", "later", "jitter", "dead", "cancelled"]))
        ended = self._some_attempts(data)
        expected = {}
        for job in self.world.held(ended):
            if job.is_asked or how == "cancelled":
                expected[job.id] = self.world.end(job, "cancelled")
            elif how == "dead" or job.has_used_up:
                expected[job.id] = self.world.end(job, "dead")
            elif how == "now":
                expected[job.id] = self.world.end(job, "ready", is_new_place=True)
            else:
                expected[job.id] = self.world.end(job, "scheduled", is_new_place=True)
                job.is_due = how == "jitter"  # of nothing: see base_seconds

        said = self.session.fail(
            *ended,
            retry_seconds=[{"now": 0.0, "later": LATER}.get(how) for _ in ended],
            is_dead=[how == "dead" for _ in ended],
            is_cancelled=[how == "cancelled" for _ in ended],
            base_seconds=0,
        )

        assert said == expected

    def release(self, data):
        burn, is_later = data.draw(st.booleans()), data.draw(st.booleans())
        reason = data.draw(st.sampled_from([None, "why"]))
        ended = self._some_attempts(data)
        expected = {}
        for job in self.world.held(ended):
            has_used_up = job.has_used_up
            job.attempt -= not burn
            if job.is_asked:
                state = "cancelled"
            elif burn and has_used_up:
                state = "dead"
            else:
                state = "scheduled" if is_later else "ready"
            expected[job.id] = self.world.end(
                job, state, is_error=reason is not None, is_new_place=state == "scheduled"
            )
            job.is_due = False

        delays = [LATER if is_later else 0.0 for _ in ended]
        said = self.session.release(*ended, burn=burn, reason=reason, delay_seconds=delays)

        assert said == expected

    def crash(self, data):
        ended = self._some_attempts(data)
        expected = {}
        for job in self.world.held(ended):
            job.crashes += 1
            if job.is_asked:
                state = "cancelled"
            elif job.crashes >= MAX_CRASHES:
                state = "dead"
            else:
                state = "ready" if job.crashes == 1 else "scheduled"
            expected[job.id] = self.world.end(job, state, is_new_place=state == "scheduled")
            job.is_due = True

        assert self.session.crash(*ended, base_seconds=0) == expected

    # Time.

    def a_lease_ends(self, data):
        attempt = self._some_attempts(data)[0]
        for job in self.world.held([attempt]):
            job.is_expired = True
            self.session.expire(attempt)

    def a_deadline_passes(self, data):
        attempt = self._some_attempts(data)[0]
        """Its owner has not stopped it: with some luck it still renews its lease."""
        is_long_ago, is_expired = data.draw(st.booleans()), data.draw(st.booleans())
        for job in self.world.held([attempt]):
            job.is_overdue, job.is_given_up = True, is_long_ago
            if is_expired:
                job.is_expired = True
                self.session.expire(attempt)
            self.session.overrun(attempt, seconds=GRACE_SECONDS + 600 if is_long_ago else 1)

    def a_time_comes(self, data):
        job = data.draw(st.sampled_from(self.world.of("scheduled")))
        job.is_due, job.place = True, next(self.world.clock)
        self.session.rows("UPDATE pgqueue.jobs SET run_at = clock_timestamp() WHERE id = %s", job.id)

    # Maintenance.

    def reap(self, _data):
        expected = {}
        for job in sorted(self.world.of("running"), key=lambda job: job.id):
            if not job.is_due_to_reap:
                continue
            is_overdue = job.is_overdue
            job.crashes += not is_overdue
            if job.is_asked:
                state = "cancelled"
            elif (job.crashes >= MAX_CRASHES and not is_overdue) or job.has_used_up:
                state = "dead"
            elif job.crashes == 1 and not is_overdue:
                state = "ready"
            else:
                state = "scheduled"
            expected[job.id] = self.world.end(job, state, is_new_place=state == "scheduled")
            job.is_due = True

        taken = self.session.call("reap", base_seconds=0, deadline_grace_seconds=GRACE_SECONDS)

        assert {row.job_id: row.state for row in taken} == expected

    def promote(self, _data):
        due = [job for job in self.world.of("scheduled") if job.is_due]
        for job in due:
            job.state = "waiting"

        assert self.session.call("promote") == [(len(due),)]

    # People.

    def cancel(self, data):
        likely = [job.id for job in (*self.world.of("running") * 3, *self.world.jobs.values())]
        named = data.draw(st.lists(st.sampled_from(likely), min_size=1, max_size=2, unique=True))
        expected = {}
        for job in map(self.world.jobs.__getitem__, named):
            if job.state == "running":
                job.is_asked = True
                expected[job.id] = "requested"
            elif job.is_live:
                expected[job.id] = self.world.end(job, "cancelled")

        assert self.session.cancel(*named) == expected

    def redrive(self, data):
        extra_attempts = data.draw(st.integers(1, 2))
        job = data.draw(st.sampled_from([*self.world.of("dead") * 3, *self.world.jobs.values()]))
        if job.state != "dead":
            expected = "not_found"
        elif self.world.holder(job.wish.unique_key):
            expected = "unique_key_taken"
        else:
            expected = self.world.end(job, "ready", is_error=False, is_new_place=True)
            job.crashes, job.max_attempts = 0, job.attempt + extra_attempts

        said = self.session.call("redrive", job_ids=[job.id], extra_attempts=extra_attempts)

        assert said == [(job.id, expected)]

    def pause_or_resume(self, data):
        queue = next(iter(self.world.paused), None) or data.draw(st.sampled_from(QUEUES))
        self.world.paused ^= {queue}
        self.session.rows(
            "INSERT INTO pgqueue.queues (name, is_paused) VALUES (%s, true) "
            "ON CONFLICT (name) DO UPDATE SET is_paused = NOT queues.is_paused",
            queue,
        )

    def delete_by_hand(self, data):
        job = data.draw(st.sampled_from(self.world.of("running")))
        del self.world.jobs[job.id]
        self.session.rows("DELETE FROM pgqueue.jobs WHERE id = %s", job.id)
        self.session.call("sweep")

    def _some_attempts(self, data: st.DataObject) -> list[Attempt]:
        """Choose among those that are held, and, less often, those that are not any more."""
        held = [Attempt(job.id, job.token) for job in self.world.of("running")]
        likely = held * 3 + self.world.attempts[-3:]
        return data.draw(st.lists(st.sampled_from(likely), min_size=1, max_size=3, unique=True))

    # What PostgreSQL knows.

    @invariant()
    def every_job_is_what_the_model_says(self):
        facts = self.session.row(FACTS)
        assert facts.jobs == [self.world.jobs[job_id].facts() for job_id in sorted(self.world.jobs)]
        assert (facts.stuck, facts.over_limit) == (0, 0)
        for move in moves(facts.journal):
            legal = TRANSITIONS[JobState(move.before)] if move.before else BORN
            assert move.after in {*legal, move.before, None}, f"{move.before} became {move.after}"


def live(session: Session, *phases: Phase) -> None:
    """Live many lives, the same ones each time."""
    Life.session = session
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            derandomize=True,
            database=None,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(scope="module")
def journal_dsn(postgres, postgresql_noproc):
    """A database that keeps a journal of what becomes of jobs."""
    with make_database(postgres.dsn, postgresql_noproc.template_dbname) as dsn:
        with psycopg.connect(dsn) as connection:
            connection.execute(JOURNAL)
        yield dsn


@pytest.fixture
def session(journal_dsn, open_session):
    session = open_session(journal_dsn)
    session.rows("SET synchronous_commit = off")
    session.rows(START)
    session.rows("ALTER TABLE pgqueue.jobs ALTER COLUMN id RESTART")
    return session


@pytest.mark.timeout(600)
def test_jobs_live_as_the_model_says(session):
    live(session, Phase.generate, Phase.shrink)


MUTANTS = {
    "claims from a paused queue": ("claim", "IF is_paused OR room", "IF room"),
    "claims the worst job of a key": (
        "claim",
        "ORDER BY j.priority, j.run_at, j.id\n                                LIMIT",
        "ORDER BY j.priority DESC, j.run_at, j.id\n                                LIMIT",
    ),
    "fails one attempt too late": (
        "fail_many",
        "h.attempt - h.crashes >= h.max_attempts",
        "h.attempt > h.max_attempts",
    ),
    "takes a crash for a failure": (
        "crash",
        "h.crashes + 1, h.concurrency_key",
        "h.crashes, h.concurrency_key",
    ),
    "releases and keeps the attempt": (
        "release",
        "WHEN release.burn THEN 0 ELSE 1",
        "WHEN release.burn THEN 1 ELSE 0",
    ),
    "reaps and forgets the cancel": (
        "reap",
        "WHEN h.cancel_requested_at IS NOT NULL THEN 'cancelled'",
        "WHEN false THEN ''",
    ),
    "leaves the owner no grace": (
        "heartbeat",
        "            FOR NO KEY UPDATE",
        "            AND coalesce(j.deadline_at > clock_timestamp(), true) FOR NO KEY UPDATE",
    ),
    "reaps within the grace": ("reap", "secs => reap.deadline_grace_seconds", "secs => 0"),
    "lets a hung owner keep its job": ("reap", "OR j.deadline_at +", "OR false AND j.deadline_at +"),
    "keeps quiet about the deadline": ("heartbeat", "WHEN j.deadline_at <= clock_timestamp()", "WHEN false"),
    "redrives with the old crashes": ("redrive", "d.priority, 0, d.", "d.priority, d.crashes, d."),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_function_that_does_one_thing_wrong_is_found_out(session, name):
    function, old, new = MUTANTS[name]
    text = session.one("SELECT pg_get_functiondef(%s::regproc)", f"pgqueue.{function}")
    assert old in text, f"{function} does not say {old!r} any more"

    session.connection.execute(text.replace(old, new))
    try:
        with pytest.raises(AssertionError):
            live(session, Phase.generate)
    finally:
        session.connection.execute(text)


# The drawing.


def fill(session: Session, **key: object) -> Attempt:
    """Let the one slot of a key be taken, and the next job of it be blocked."""
    session.enqueue(**key)
    session.enqueue(**key)
    (attempt,) = session.claim()
    return attempt


def ends(how: str, **options: object) -> Callable[[Session], None]:
    def walk(session: Session) -> None:
        session.enqueue()
        getattr(session, how)(*session.claim(), **options)

    return walk


def a_blocked_job_is_replaced(session: Session) -> None:
    session.enqueue(concurrency_key="k")
    session.enqueue(concurrency_key="k", unique_key="u")
    session.claim()
    session.enqueue(unique_key="u", on_conflict="replace", delay_seconds=LATER)


def a_ready_job_is_replaced(session: Session) -> None:
    session.enqueue(unique_key="u")
    session.enqueue(unique_key="u", on_conflict="replace", delay_seconds=LATER)


def two_slots_are_free_for_blocked_jobs(session: Session) -> None:
    for _ in range(4):
        session.enqueue(concurrency_key="k", concurrency_limit=2)
    held = session.claim(max_jobs=2)
    session.claim()
    session.complete(*held)
    session.claim()


def the_line_of_a_rate_limit_moves_on(session: Session, **key: object) -> None:
    limit = "INSERT INTO pgqueue.rate_limits (name, tokens_per_second, burst) VALUES ('task:t', 0.001, 1)"
    session.rows(limit)
    session.enqueue()
    session.enqueue(**key)
    session.claim()
    session.claim()  # joins the line
    if key:
        session.enqueue("another", **key)
        session.claim()
    session.rows("UPDATE pgqueue.rate_limits SET tat = '2000-01-01', next_at = '2000-01-01'")
    session.claim()


WALKS: dict[tuple[str, str], Callable[[Session], object]] = {
    ("scheduled", "ready"): lambda s: (s.enqueue(delay_seconds=LATER), s.make_due()),
    ("scheduled", "cancelled"): lambda s: s.cancel(s.enqueue(delay_seconds=LATER)),
    ("scheduled", "running"): the_line_of_a_rate_limit_moves_on,
    ("scheduled", "blocked"): lambda s: the_line_of_a_rate_limit_moves_on(s, concurrency_key="k"),
    ("ready", "running"): lambda s: (s.enqueue(), s.claim()),
    ("ready", "blocked"): lambda s: fill(s, concurrency_key="k"),
    ("ready", "scheduled"): a_ready_job_is_replaced,
    ("ready", "cancelled"): lambda s: s.cancel(s.enqueue()),
    ("blocked", "ready"): lambda s: s.complete(fill(s, concurrency_key="k")),
    ("blocked", "running"): two_slots_are_free_for_blocked_jobs,
    ("blocked", "scheduled"): a_blocked_job_is_replaced,
    ("blocked", "cancelled"): lambda s: s.cancel(fill(s, concurrency_key="k").job_id + 1),
    ("running", "succeeded"): ends("complete"),
    ("running", "dead"): ends("fail", is_dead=[True]),
    ("running", "cancelled"): ends("fail", is_cancelled=[True]),
    ("running", "scheduled"): ends("release", delay_seconds=[LATER]),
    ("running", "ready"): ends("crash"),
    ("dead", "ready"): lambda s: (ends("fail", is_dead=[True])(s), s.redrive(1)),
}


@pytest.mark.parametrize("step", WALKS, ids="-".join)
def test_every_step_of_the_drawing_is_taken(session, step):
    WALKS[step](session)

    taken = {(m.before, m.after) for m in moves(session.row(FACTS).journal)}
    assert step in taken


def test_the_drawing_shows_these_steps_and_no_others():
    steps = {(before.value, after.value) for before, legal in TRANSITIONS.items() for after in legal}

    assert steps == set(WALKS)
