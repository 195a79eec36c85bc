"""What several sessions did to a few jobs and what they were told, and what is wrong with that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pgqueue.model.job import ENDED, TRANSITIONS, JobState
from tests.guarantees.support import OVER_LIMIT, STUCK
from tests.sql.support import Attempt, Session

BORN = frozenset({"ready", "scheduled"})
MAX_CRASHES = 3

# Answers that promise no change of the job, and promises that are not the name of its next state.
NOTHING = frozenset({"lost", "busy", "not_found", "unique_key_taken"})
STATE_PROMISED = dict.fromkeys(("requested", "renewed", "cancel", "overdue"), "running")

# What claim, and whoever frees a slot of a key, does to jobs of which it says nothing.
SIDE_EFFECTS = {("ready", "blocked"), ("blocked", "ready")}

# Every change of a job's row, written down by the transaction that makes it: undone is unwritten.
JOURNAL = """
CREATE SCHEMA stage;
CREATE TABLE stage.journal (
    nth bigint GENERATED ALWAYS AS IDENTITY,
    pid integer NOT NULL DEFAULT pg_backend_pid(),
    xid text NOT NULL DEFAULT pg_current_xact_id()::text,
    job_id bigint NOT NULL,
    before text,
    after text,
    token text,
    is_cancel_requested boolean,
    is_expired boolean
);
CREATE FUNCTION stage.write_down() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    old jsonb := to_jsonb(OLD);
    new jsonb := to_jsonb(NEW);
    kind text := CASE WHEN TG_TABLE_NAME = 'dead_jobs' THEN 'dead' END;
BEGIN
    INSERT INTO stage.journal (job_id, before, after, token, is_cancel_requested, is_expired) VALUES (
        coalesce(old ->> 'id', new ->> 'id')::bigint,
        CASE WHEN old IS NOT NULL THEN coalesce(kind, old ->> 'state') END,
        CASE WHEN new IS NOT NULL THEN coalesce(kind, new ->> 'state') END,
        old ->> 'claim_token',
        old ->> 'cancel_requested_at' IS NOT NULL,
        (old ->> 'heartbeat_at')::timestamptz + make_interval(secs => (old ->> 'lease_seconds')::float)
            < clock_timestamp()
    );
    RETURN NULL;
END $$;
CREATE TRIGGER journal AFTER INSERT OR UPDATE OR DELETE ON pgqueue.jobs
    FOR EACH ROW EXECUTE FUNCTION stage.write_down();
CREATE TRIGGER journal AFTER INSERT OR DELETE ON pgqueue.dead_jobs
    FOR EACH ROW EXECUTE FUNCTION stage.write_down();
CREATE TRIGGER journal AFTER INSERT OR DELETE ON pgqueue.finished_jobs
    FOR EACH ROW EXECUTE FUNCTION stage.write_down();
"""

PLACES = """
SELECT id, state FROM pgqueue.jobs
UNION ALL
SELECT id, 'dead' FROM pgqueue.dead_jobs
UNION ALL
SELECT id, state FROM pgqueue.finished_jobs
"""

EVIDENCE = f"""
SELECT
    (SELECT coalesce(jsonb_agg(jsonb_build_array(p.id, p.state)), '[]') FROM ({PLACES}) AS p) AS places,
    (SELECT coalesce(jsonb_agg(j ORDER BY j.nth), '[]') FROM stage.journal AS j) AS journal,
    ({STUCK}) AS stuck,
    ({OVER_LIMIT}) AS keys_over_limit,
    (
        SELECT count(*) FROM (
            SELECT attempt, max_attempts, crashes + 1 AS crashes FROM pgqueue.jobs
            UNION ALL
            SELECT attempt, max_attempts, crashes FROM pgqueue.dead_jobs
        ) AS j
        WHERE j.attempt - j.crashes > j.max_attempts OR j.crashes > {MAX_CRASHES}
    ) AS jobs_over_limit
"""


@dataclass(frozen=True)
class Cast:
    """The jobs of a scene: attempts that somebody holds, and jobs that a person names."""

    held: tuple[Attempt, ...] = ()
    named: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of the queue's API; `make` gives what the database said about each job."""

    name: str
    make: Callable[[Session, Cast], dict[int, str]]
    is_fenced: bool = False  # acts on cast.held, under their tokens
    waits_for: frozenset[str] = frozenset({"transactionid", "tuple", "advisory"})


@dataclass
class Answer:
    """What a call said, and whether that was committed."""

    call: Call
    pid: int
    said: dict[int, str]
    is_committed: bool = False


class Move(NamedTuple):
    """What one transaction did to a job."""

    nth: int
    pid: int
    job_id: int
    before: str | None
    after: str | None
    token: str | None
    is_cancel_requested: bool
    is_expired: bool

    @property
    def ends_attempt(self) -> bool:
        return self.before == "running" != self.after


@dataclass
class Evidence:
    """All that is known after a play."""

    cast: Cast
    first: Mapping[int, str]
    answers: Sequence[Answer]
    places: Counter[tuple[int, str]]
    moves: list[Move]
    stuck: int
    over_limit: int
    ended: set[str | None] = field(init=False)

    def __post_init__(self) -> None:
        self.ended = {move.token for move in self.moves if move.ends_attempt}


def look(session: Session, cast: Cast, first: Mapping[int, str], answers: Sequence[Answer]) -> Evidence:
    row = session.row(EVIDENCE)
    places = Counter((job, state) for job, state in row.places)
    over_limit = row.keys_over_limit + row.jobs_over_limit
    return Evidence(cast, first, answers, places, moves(row.journal), row.stuck, over_limit)


def moves(journal: Iterable[dict[str, Any]]) -> list[Move]:
    """Put together what one transaction took out of one table and into another."""
    made: list[Move] = []
    halves: dict[tuple[int, str], Move] = {}
    for entry in journal:
        key = (entry["job_id"], entry["xid"])
        move = Move(**{name: entry[name] for name in Move._fields})
        if move.before and move.after:
            made.append(move)
        elif key in halves:
            half = halves.pop(key)
            out, into = (half, move) if half.before else (move, half)
            made.append(out._replace(nth=move.nth, after=into.after))
        else:
            halves[key] = move
    return sorted([*made, *halves.values()])


def violations(evidence: Evidence) -> Iterator[str]:
    """Say in one line each what must not be."""
    yield from fates(evidence)
    if evidence.over_limit:
        yield f"{evidence.over_limit} keys or jobs over their limit"
    if evidence.stuck:
        yield f"{evidence.stuck} blocked jobs that nobody would wake"
    for answer in evidence.answers:
        yield from refusals(evidence, answer)
        if answer.is_committed:
            yield from trespasses(evidence, answer)
    for pid in {answer.pid for answer in evidence.answers}:
        yield from lies(evidence, pid)


def fates(evidence: Evidence) -> Iterator[str]:
    """Each job is in one place, and went there by legal steps, each from where the last one led.

    So an attempt ends once, and one whose cancel was answered never leads to another one.
    """
    now: dict[int, str | None] = dict(evidence.first)
    for move in evidence.moves:
        step = f"job {move.job_id} went from {move.before} to {move.after}"
        if now.get(move.job_id) != move.before:
            yield f"{step}, but it was {now.get(move.job_id)}"
        legal = TRANSITIONS[JobState(move.before)] if move.before else BORN
        if move.before != move.after and move.after not in legal:
            yield f"{step}, which is no legal step"
        if move.ends_attempt and move.is_cancel_requested and move.after not in {"succeeded", "cancelled"}:
            yield f"{step}, but its cancel had been answered"
        now[move.job_id] = move.after
    if evidence.places != Counter(now.items()):
        places = sorted(evidence.places.elements())
        yield f"the jobs are {places}, but they were brought to {sorted(now.items())}"


def refusals(evidence: Evidence, answer: Answer) -> Iterator[str]:
    """Who is told that an attempt is lost, or a job not live, is told the truth."""
    if answer.call.is_fenced:
        for job, token in evidence.cast.held:
            if answer.said.get(job, "lost") == "lost" and str(token) not in evidence.ended:
                yield f"{answer.call.name} was refused job {job}, but nobody has ended that attempt"
    if answer.call.name == "cancel":
        for job in set(evidence.cast.named) - set(answer.said):
            states = {move.after for move in evidence.moves if move.job_id == job} | {evidence.first[job]}
            if not states & ENDED:
                yield f"cancel passed over job {job}, which was live all the time"


def trespasses(evidence: Evidence, answer: Answer) -> Iterator[str]:
    """Only the holder of an attempt touches it; only when its lease is over may the reaper."""
    mine = [move for move in evidence.moves if move.pid == answer.pid and move.before == "running"]
    if answer.call.is_fenced:
        for job, token in evidence.cast.held:
            touched = {move.token for move in mine if move.job_id == job}
            if touched and str(token) not in touched:
                yield f"{answer.call.name} touched job {job} without holding it"
    if answer.call.name == "reap":
        for move in mine:
            if move.job_id in answer.said and move.ends_attempt and not move.is_expired:
                yield f"reap took job {move.job_id} from an owner whose lease was good"


def lies(evidence: Evidence, pid: int) -> Iterator[str]:
    """What the calls of a session said is what they did, no more and no less; refused is untouched."""
    promised: Counter[tuple[int, str | None]] = Counter()
    for answer in evidence.answers:
        if answer.pid == pid and answer.is_committed:
            words = {job: STATE_PROMISED.get(w, w) for job, w in answer.said.items() if w not in NOTHING}
            promised.update(words.items())
    done = Counter(
        (move.job_id, move.after)
        for move in evidence.moves
        if move.pid == pid and (move.before, move.after) not in SIDE_EFFECTS
    )
    if promised != done:
        names = " and ".join(answer.call.name for answer in evidence.answers if answer.pid == pid)
        yield f"{names} said {sorted(promised.elements())}, but did {sorted(done.elements())}"
