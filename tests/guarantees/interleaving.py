"""Sessions that take turns on one small set of jobs: every order of their steps, one after the other.

A session plays a program: calls, each in the transaction it belongs to. A call is more than one step: on
this stage the queue's functions stop before each statement that touches jobs, until they are let go on.
So the others get in between the statements of a function too, which is where the races are.

Nothing depends on time. One session moves; the next one does when all have finished their step, have
reached a stop (they say so), or wait for a lock of each other (the server says so). Who waits goes on
by itself when its blocker's transaction has ended, until it stands still again.

All orders: each play notes who could have moved at each turn. The next one repeats its choices up to the
last turn that had another possibility left, and takes that.
"""

from __future__ import annotations

import contextlib
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row

from tests.guarantees.verdicts import JOURNAL, PLACES, Answer, Call, Cast, look, violations
from tests.sql.support import Session

PATIENCE_SECONDS = 120.0  # with a server that does not answer; no order takes that long

# The conductor holds the lock of the next stop of each session. A sequence counts the stops, because a
# rollback does not take its numbers back.
STAGE = """
CREATE TABLE stage.saved_jobs (LIKE pgqueue.jobs);
CREATE TABLE stage.saved_dead_jobs (LIKE pgqueue.dead_jobs);
CREATE FUNCTION stage.save() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM stage.saved_jobs;
    INSERT INTO stage.saved_jobs TABLE pgqueue.jobs;
    DELETE FROM stage.saved_dead_jobs;
    INSERT INTO stage.saved_dead_jobs TABLE pgqueue.dead_jobs;
END $$;
CREATE FUNCTION stage.restore() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM pgqueue.jobs;
    DELETE FROM pgqueue.dead_jobs;
    DELETE FROM pgqueue.finished_jobs;
    INSERT INTO pgqueue.jobs OVERRIDING SYSTEM VALUE TABLE stage.saved_jobs;
    INSERT INTO pgqueue.dead_jobs TABLE stage.saved_dead_jobs;
    DELETE FROM stage.journal;
END $$;
CREATE FUNCTION stage.stop(place text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    actor integer := nullif(current_setting('stage.actor', true), '')::integer;
    number integer;
BEGIN
    IF current_setting('stage.is_quick', true) = 'on' THEN
        RAISE NOTICE 'passed %', place;
    ELSIF actor IS NOT NULL THEN
        number := nextval('stage.stops_' || actor);
        RAISE NOTICE 'stopped %', place;
        PERFORM pg_advisory_lock_shared(actor, number);
        PERFORM pg_advisory_unlock_shared(actor, number);
    END IF;
END $$;
"""

WAITS = """
SELECT w.pid, pg_blocking_pids(w.pid), a.wait_event
FROM unnest(%s::integer[]) AS w (pid)
CROSS JOIN LATERAL pg_stat_get_activity(w.pid) AS a
WHERE a.wait_event_type = 'Lock'
"""

# Functions called from outside stop before their second statement on jobs and each later one: before the
# first is where the session stands anyway. Those called by others stop before the first one too.
OUTER = ("claim", "heartbeat", "complete", "hold", "reap", "cancel", "promote", "redrive")
INNER = ("settle", "unblock")
STATEMENT = re.compile(r"(WITH|SELECT|UPDATE|DELETE|INSERT|PERFORM|RETURN QUERY)\b")
TOUCHED = re.compile(r"(UPDATE|DELETE FROM|INSERT INTO) \w*jobs|\w+_advisory_\w+|\b(dead_)?jobs\b")

# unblock tries for 50 ms to get a locked row. Here it tries three times, and it is up to the order whether
# the lock is gone by then.
SPIN = "unblock: tries again"
FIFTY_TRIES, THREE_TRIES = "tries >= 50", "tries >= 2"
SLEEP = "PERFORM pg_sleep(0.001)"


def with_stops(definition: str, name: str) -> str:
    made: list[str] = []
    begins = is_in_head = False  # a statement; the first one of a loop, before which the loop has stopped
    is_first = name in OUTER
    lines = [line.split("--")[0].rstrip() for line in definition.splitlines()]
    for number, line in enumerate(lines):
        if begins and (STATEMENT.match(line.strip()) or line.endswith("LOOP")):
            rest = lines[number + 1 :] if line.endswith("LOOP") else lines[number:]
            statement = "\n".join(rest).split(";")[0]
            if (touched := TOUCHED.search(statement)) and not is_in_head:
                if not is_first:
                    made.append(f"PERFORM stage.stop('{name}: {touched[0]}');")
                is_first = False
        made.append(line)
        if line:
            begins = line.endswith((";", " THEN", "ELSE", "LOOP", "BEGIN"))
            is_in_head = line.endswith("LOOP")
    return "\n".join(made)


# Programs.


@dataclass(frozen=True)
class Step:
    """What a session does in one go, unless it stops in between."""

    name: str
    call: Call | None = None
    end: str = ""  # of the transaction: autocommit, commit, rollback


Program = tuple[Step, ...]


def alone(*calls: Call) -> Program:
    """Make a program of calls in autocommit."""
    return tuple(Step(call.name, call, "autocommit") for call in calls)


def transaction(*calls: Call, end: str = "commit") -> Program:
    """Make a program that lets the others in between its calls, and before its end."""
    return (*(Step(call.name, call) for call in calls), Step(end, end=end))


class Actor:
    """One session, and the thread in which it may wait."""

    def __init__(self, name: str, session: Session, events: queue.SimpleQueue[Any]) -> None:
        self.name = name
        self.session = session
        self.pid = session.connection.info.backend_pid
        self.stops = 0
        self._events = events
        self._inbox: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self.take_up((), Cast())
        session.connection.add_notice_handler(self._hear)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def take_up(self, program: Program, cast: Cast) -> None:
        self.left = list(program)
        self.step = Step("nothing")
        self.state = "idle"  # running, stopped, waiting
        self.place = ""
        self.answers: list[Answer] = []
        self._open: list[Answer] = []
        self._cast = cast

    @property
    def can_move(self) -> bool:
        return self.state == "stopped" or (self.state == "idle" and bool(self.left))

    def begin(self) -> None:
        self.step = self.left.pop(0)
        self._inbox.put(self.step)

    def leave(self) -> None:
        self._inbox.put(None)
        self._thread.join(PATIENCE_SECONDS)
        self.session.connection.close()

    def _hear(self, notice: psycopg.errors.Diagnostic) -> None:
        kind, _, place = (notice.message_primary or "").partition(" ")
        if kind in {"stopped", "passed"}:
            self._events.put((self, kind, place))

    def _work(self) -> None:
        while step := self._inbox.get():
            error = None
            try:
                self._take_step(step)
            except Exception as caught:  # noqa: BLE001 - the thread has to say so, or its stage waits for ever
                error = caught
                with contextlib.suppress(psycopg.Error):
                    self.session.connection.rollback()
            self._events.put((self, "ended" if step.end or error else "done", error))

    def _take_step(self, step: Step) -> None:
        connection = self.session.connection
        if connection.autocommit != (step.end == "autocommit"):
            connection.autocommit = not connection.autocommit
        if step.call:
            answer = Answer(step.call, self.pid, step.call.make(self.session, self._cast))
            self.answers.append(answer)
            self._open.append(answer)
        if step.end == "rollback":
            connection.rollback()
        elif step.end == "commit":
            connection.commit()
        if step.end:
            for answer in self._open:
                answer.is_committed = step.end != "rollback"
            self._open.clear()


# Plays.


@dataclass
class Play:
    """One order that was played: who could move at each turn and who did, and what is wrong with the end."""

    choices: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    spins: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(chosen for chosen, _ in self.choices)

    def __str__(self) -> str:
        return " | ".join(self.log)


Choose = Callable[[tuple[int, ...]], int]


class Stage:
    """A database on which plays are given, and the conductor who leads and judges them."""

    def __init__(self, dsn: str, actors: str = "ABC") -> None:
        self._conductor = Session(psycopg.connect(dsn, autocommit=True, row_factory=namedtuple_row))
        self._conductor.rows("SET synchronous_commit = off")
        self._conductor.rows(JOURNAL)
        self._conductor.rows(STAGE)
        for name in OUTER + INNER:
            self._define(with_stops(self._definition(name), name))
        self._define(_replaced(self._definition("unblock"), FIFTY_TRIES, THREE_TRIES))
        self._define(_replaced(self._definition("unblock"), SLEEP, f"PERFORM stage.stop('{SPIN}')"))
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._actors = [self._hire(dsn, name, number) for number, name in enumerate(actors)]
        self._pids = [actor.pid for actor in self._actors]
        self._cast = Cast()
        self._first: dict[int, str] = {}

    def close(self) -> None:
        terminate = "SELECT pg_terminate_backend(a.pid) FROM unnest(%s::integer[]) AS a (pid)"
        self._conductor.rows(terminate, self._pids)
        self._conductor.connection.close()
        for actor in self._actors:
            actor.leave()

    def set_scene(self, prepare: Callable[[Session], Cast]) -> None:
        """Prepare the jobs that every play finds from now on; the first of them has the id 1."""
        self._conductor.rows("SELECT stage.restore()")
        self._conductor.rows("DELETE FROM pgqueue.jobs; DELETE FROM pgqueue.dead_jobs")
        self._conductor.rows("ALTER TABLE pgqueue.jobs ALTER COLUMN id RESTART")
        self._cast = prepare(self._conductor)
        self._conductor.rows("SELECT stage.save()")
        self._first = dict(self._conductor.rows(PLACES))

    @contextlib.contextmanager
    def altered(self, function: str, *changes: tuple[str, str]) -> Iterator[None]:
        """Do one thing wrong for a while."""
        text = altered = self._definition(function)
        for old, new in changes:
            altered = _replaced(altered, old, new)
        self._define(altered)
        try:
            yield
        finally:
            self._define(text)

    @contextlib.contextmanager
    def without_stops(self) -> Iterator[None]:
        """Let each call be one step for a while: only its transaction matters, not its inside."""
        self._set_is_quick("on")
        try:
            yield
        finally:
            self._set_is_quick("off")

    def every_order(self, *programs: Program) -> Iterator[Play]:
        """Play every order there is. Of two equal programs the first one begins: the rest is the same."""
        path: list[int] = []
        while True:
            play = self._play(programs, _follow(path))
            yield play
            turns = list(play.choices)
            while turns and turns[-1][0] == turns[-1][1][-1]:
                turns.pop()
            if not turns or (len(turns) == 1 and programs[0] == programs[-1]):
                return
            chosen, options = turns.pop()
            path = [earlier for earlier, _ in turns] + [options[options.index(chosen) + 1]]

    def some_orders(self, *programs: Program, count: int, seed: int) -> Iterator[Play]:
        """Draw this many orders, each of them once, if there are so many."""
        drawn, known = random.Random(seed), set()
        for _ in range(count * 2):
            play = self._play(programs, drawn.choice)
            if play.order not in known:
                known.add(play.order)
                yield play
            if len(known) == count:
                return

    def _play(self, programs: Sequence[Program], choose: Choose) -> Play:
        play, actors = Play(), self._actors[: len(programs)]
        self._conductor.rows("SELECT stage.restore()")
        for actor, program in zip(actors, programs, strict=True):
            actor.take_up(program, self._cast)
        while any(actor.can_move or actor.state == "waiting" for actor in actors):
            options = tuple(place for place, actor in enumerate(actors) if actor.can_move)
            if options:
                chosen = choose(options)
                play.choices.append((chosen, options))
                self._move(actors[chosen], play)
            else:  # a deadlock: the server will choose its victim
                self._take(self._events.get(timeout=PATIENCE_SECONDS), play)
            self._settle(play)
        answers = [answer for actor in actors for answer in actor.answers]
        evidence = look(self._conductor, self._cast, self._first, answers)
        has_given_up = max(play.spins.values(), default=0) > 1
        if evidence.stuck and has_given_up:  # that is what the sweep is for
            self._conductor.call("sweep")
            evidence = look(self._conductor, self._cast, self._first, answers)
        play.violations += violations(evidence)
        return play

    def _move(self, actor: Actor, play: Play) -> None:
        if actor.state == "stopped":
            play.log.append(f"{actor.name} {actor.place}")
            self._conductor.rows(
                "SELECT pg_advisory_lock(%s::integer, %s), pg_advisory_unlock(%s::integer, %s)",
                self._actors.index(actor),
                actor.stops + 2,
                self._actors.index(actor),
                actor.stops + 1,
            )
            actor.stops += 1
        else:
            actor.begin()
            play.log.append(f"{actor.name} {actor.step.name}")
        actor.state = "running"

    def _settle(self, play: Play) -> None:
        """Wait until nobody runs any more."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while running := {actor.pid: actor for actor in self._actors if actor.state == "running"}:
            assert time.monotonic() < deadline, f"{list(running)} stands still after {play}"
            try:
                self._take(self._events.get(timeout=0.001), play)
            except queue.Empty:
                for pid, blockers, wait_event in self._conductor.rows(WAITS, list(running)):
                    if set(blockers).intersection(self._pids):
                        self._let_wait(running[pid], wait_event, play)

    def _let_wait(self, actor: Actor, wait_event: str, play: Play) -> None:
        actor.state = "waiting"
        play.waits.append(wait_event)
        play.log.append(f"({actor.name} waits for {wait_event})")
        if actor.step.call and wait_event not in actor.step.call.waits_for:
            play.violations.append(f"{actor.step.name} waits for {wait_event}")

    def _take(self, event: tuple[Actor, str, Any], play: Play) -> None:
        actor, kind, detail = event
        if kind in {"stopped", "passed"}:
            play.spins[actor.name] += detail == SPIN
            if kind == "stopped":
                actor.state, actor.place = kind, detail
            return
        actor.state = "idle"
        if detail:
            actor.left.clear()
            kind_of_error = getattr(detail, "sqlstate", None) or type(detail).__name__
            play.violations.append(f"{actor.step.name}: {kind_of_error} {detail}")
        if kind == "ended":  # its locks are gone: who waited may run by now
            for other in self._actors:
                if other.state == "waiting":
                    other.state = "running"

    def _hire(self, dsn: str, name: str, number: int) -> Actor:
        options = f"-c deadlock_timeout=200ms -c synchronous_commit=off -c stage.actor={number}"
        connection = psycopg.connect(dsn, autocommit=True, row_factory=namedtuple_row, options=options)
        sequence = sql.Identifier("stage", f"stops_{number}")
        self._conductor.connection.execute(sql.SQL("CREATE SEQUENCE {}").format(sequence))
        self._conductor.rows("SELECT pg_advisory_lock(%s::integer, 1)", number)
        return Actor(name, Session(connection), self._events)

    def _set_is_quick(self, word: str) -> None:
        for actor in self._actors:
            actor.session.rows("SELECT set_config('stage.is_quick', %s, false)", word)
            actor.session.connection.commit()

    def _definition(self, name: str) -> str:
        text: str = self._conductor.one("SELECT pg_get_functiondef(%s::regproc)", f"pgqueue.{name}")
        return text

    def _define(self, text: str) -> None:
        self._conductor.connection.execute(text)


def _replaced(text: str, old: str, new: str) -> str:
    assert old in text, f"there is no {old!r} any more in {text}"
    return text.replace(old, new)


def _follow(path: Sequence[int]) -> Choose:
    ahead = iter(path)

    def choose(options: tuple[int, ...]) -> int:
        chosen = next(ahead, options[0])
        assert chosen in options, "the same choices led elsewhere"
        return chosen

    return choose
