"""The step table: each step of an attempt, and what happens to its job when a fault hits just there.

Two equal workers share a queue; whoever claims the job is the victim, the other one the heir. A step
is reached, not guessed: the handler stops where it is told to, the child or the parent is frozen, or
the job's row is locked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.faults.arena import Arena, Process, until
from tests.faults.invariants import Database, Evidence, Verdict, check
from tests.faults.journal import Enqueues, Journal
from tests.support import wait_until

LEASE_SECONDS = 3.0
FREEZE_SECONDS = LEASE_SECONDS * 1.5

STEPS = ("claimed", "handler started", "effect written", "outcome sent", "before complete", "after complete")
# Those after which no lease has to run out.
QUICK_FAULTS = ("kill -9 child", "terminate sessions")
FAULTS = (*QUICK_FAULTS, "kill -9 worker", "SIGSTOP past the lease")


@dataclass(frozen=True)
class Cell:
    """How one job fared."""

    step: str
    fault: str
    state: str
    effects: int
    claims: int
    rows: int
    seconds: float
    problem: str = ""

    def text(self) -> str:
        told = f"{self.state} {self.effects}e {self.claims}c {self.seconds:.1f}s"
        return f"{told} WRONG: {self.problem}" if self.problem else told


class Table:
    """Two workers and the jobs that go through them, one at a time."""

    def __init__(self, arena: Arena, dbname: str) -> None:
        self._arena = arena
        self._dsn = arena.make_database(dbname)
        self._dbname = dbname
        self._folder = arena.temporary / dbname
        self._folder.mkdir()
        self._workers: list[Process] = []
        self.enqueues = Enqueues()
        self.db = Database(arena.connect(dbname))

    def start(self) -> None:
        """Start the workers; in the main thread, which starts every process."""
        for name in ("a", "b"):
            options = (
                "-qdefault:1",
                f"-qown-{name}:1",
                "--lease-seconds",
                str(LEASE_SECONDS),
                "--poll-seconds",
                "0.2",
            )
            self._workers.append(self._arena.worker(f"{self._dbname}-{name}", self._dsn, *options).start())

    def revive(self) -> None:
        """Start who is dead, and wait until each worker gets jobs done."""
        for worker in self._workers:
            if not worker.is_up:
                worker.start()
        ids = []
        for name in ("a", "b"):
            mark = Journal.mark()
            self.enqueues.intended.add(mark)
            args = json.dumps({"mark": mark})
            ids.append(
                self.db.one("SELECT pgqueue.enqueue('touch', %s::jsonb, queue => %s)", args, f"own-{name}")
            )
            self.enqueues.acknowledged[mark] = ids[-1]
        wait_until(
            lambda: not self.db.one("SELECT count(*) FROM pgqueue.jobs WHERE id = ANY (%s)", ids),
            120,
            "both workers work",
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self.db.connection.close()

    # One job.

    def run(self, step: str, fault: str) -> Cell:
        mark = Journal.mark()
        place = self._folder / mark
        place.with_suffix(".first").touch()
        began_at = time.monotonic()
        with contextlib.ExitStack() as stack:
            victim, job_id = self._bring_to(step, mark, place, stack)
            self._do(fault, step, victim, place, stack)
        end = time.monotonic() + 90
        while self._count("pgqueue.jobs", job_id) and time.monotonic() < end:
            self.db.connection.execute(
                "UPDATE pgqueue.jobs SET run_at = clock_timestamp() WHERE state = 'scheduled' AND id = %s",
                (job_id,),
            )
            time.sleep(0.02)
        return self._judge(step, fault, job_id, time.monotonic() - began_at)

    def _count(self, table: str, job_id: int, column: str = "id") -> int:
        return self.db.one(f"SELECT count(*) FROM {table} WHERE {column} = %s", job_id)

    def _judge(self, step: str, fault: str, job_id: int, seconds: float) -> Cell:
        state = (
            self.db.one("SELECT string_agg(state, '+') FROM faults.everywhere WHERE id = %s", job_id)
            or "gone"
        )
        effects = self._count("faults.effects", job_id, "job_id")
        claims = self.db.one(
            "SELECT count(*) FROM faults.history WHERE job_id = %s AND event = 'claimed'", job_id
        )
        rows = self._count("faults.everywhere", job_id)
        problem = ""
        if state != "succeeded":
            problem = "it did not succeed"
        elif rows != 1:
            problem = f"{rows} rows"
        elif effects < 1:
            problem = "no effect"
        elif step == "after complete" and (effects, claims) != (1, 1):
            problem = "it ran again after it had ended"
        elif fault.startswith("kill") and step in ("claimed", "handler started") and effects != 1:
            problem = "an attempt that never came so far left an effect"
        elif effects > claims:
            problem = "more effects than attempts"
        return Cell(step, fault, state, effects, claims, rows, seconds, problem)

    # Reaching a step.

    def _bring_to(
        self, step: str, mark: str, place: Path, stack: contextlib.ExitStack
    ) -> tuple[Process, int]:
        if step == "claimed":
            # Frozen children start nothing: whoever claims has an attempt whose handler has not begun.
            frozen = [pid for worker in self._workers for pid in worker.children()]
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            victim, job_id = self._enqueue(step, mark)
            for worker in self._workers:
                if worker is not victim:
                    _signal(worker.children(), signal.SIGCONT)
            stack.callback(_signal, frozen, signal.SIGCONT)
            return victim, job_id
        stop_at = "started" if step == "handler started" else "written"
        victim, job_id = self._enqueue(stop_at, mark)
        self._wait_for(place, stop_at)
        if step == "outcome sent":
            # The handler goes on and its outcome is sent, to a parent that does not listen just now.
            _signal([victim.pid], signal.SIGSTOP)
            stack.callback(_signal, [victim.pid], signal.SIGCONT)
            self._let_go(place)
            self._wait_for(place, "sent")
        if step in ("before complete", "after complete"):
            locker = self._arena.connect(self._dbname)
            stack.callback(locker.close)
            locker.autocommit = False
            locker.execute("SELECT id FROM pgqueue.jobs WHERE id = %s FOR UPDATE", (job_id,))
            self._let_go(place)
            wait_until(self._is_completing, 60, "the completion waits for the row")
            if step == "after complete":
                _signal([victim.pid], signal.SIGSTOP)
                stack.callback(_signal, [victim.pid], signal.SIGCONT)
                locker.rollback()
                wait_until(lambda: not self._count("pgqueue.jobs", job_id), 60, "the completion is committed")
        return victim, job_id

    def _enqueue(self, step: str, mark: str) -> tuple[Process, int]:
        """Add the job and wait until one of the workers has claimed it; gives which."""
        self.enqueues.intended.add(mark)
        args = json.dumps({"mark": mark, "step": step, "folder": str(self._folder)})
        job_id = self.db.one("SELECT pgqueue.enqueue('stop_at', %s::jsonb)", args)
        self.enqueues.acknowledged[mark] = job_id
        pid = wait_until(
            lambda: self.db.one(
                "SELECT w.pid FROM pgqueue.jobs AS j JOIN pgqueue.workers AS w ON w.id = j.worker_id "
                "WHERE j.id = %s",
                job_id,
            ),
            60,
            "somebody claims the job",
        )
        return next(worker for worker in self._workers if worker.pid == pid), job_id

    def _wait_for(self, place: Path, step: str) -> None:
        wait_until(place.with_suffix(f".{step}").exists, 60, f"the handler is {step}")

    def _let_go(self, place: Path) -> None:
        place.with_suffix(".go").touch()

    def _is_completing(self) -> bool:
        return self.db.one(
            "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = 'pgqueue worker finish' AND wait_event_type = 'Lock'"
        )

    # Faults.

    def _do(self, fault: str, step: str, victim: Process, place: Path, stack: contextlib.ExitStack) -> None:
        match fault:
            case "kill -9 child":
                _signal(victim.children(), signal.SIGKILL)
            case "kill -9 worker":
                victim.kill()
            case "terminate sessions":
                self.db.all(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND application_name LIKE 'pgqueue worker %%' AND %s",
                    True,
                )
            case "SIGSTOP past the lease":
                frozen = victim.tree()
                _signal(frozen, signal.SIGSTOP)
                stack.callback(_signal, frozen, signal.SIGCONT)
                if step in ("before complete", "after complete"):
                    time.sleep(FREEZE_SECONDS)
                else:
                    # It is taken back, and only then the victim wakes.
                    until(
                        lambda: not self.db.one("SELECT count(*) FROM pgqueue.jobs WHERE state = 'running'"),
                        60,
                    )
                self._let_go(place)
                return
        self._let_go(place)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def run(arena: Arena, say: Callable[[str], None], *, is_quick: bool = False) -> bool:
    """Run every step with every fault, two tables at a time; True if every job fared as it must."""
    faults = QUICK_FAULTS if is_quick else FAULTS
    began_at = time.monotonic()
    cells: dict[tuple[str, str], Cell] = {}
    verdicts: list[Verdict] = []
    tables = [Table(arena, f"steps_{number}") for number in range(2)]
    try:
        for table in tables:
            table.start()
        with ThreadPoolExecutor(len(tables)) as threads:
            for fault in faults:
                for first in range(0, len(STEPS), len(tables)):
                    for table in tables:
                        table.revive()
                    pairs = list(zip(tables, STEPS[first : first + len(tables)], strict=False))
                    for cell in threads.map(lambda pair, fault=fault: pair[0].run(pair[1], fault), pairs):  # type: ignore[misc]
                        cells[cell.step, cell.fault] = cell
        for table in tables:
            verdicts += check(table.db, Evidence(enqueues=table.enqueues))
    finally:
        for table in tables:
            table.close()
    width = max(len(cell.text()) for cell in cells.values()) + 2
    say("step".ljust(18) + "".join(fault.ljust(width) for fault in faults))
    for step in STEPS:
        say(step.ljust(18) + "".join(cells[step, fault].text().ljust(width) for fault in faults))
    say("state, effects, claims, seconds from the insert to the end")
    wrong = [cell for cell in cells.values() if cell.problem]
    broken = [verdict for verdict in verdicts if verdict.violations]
    for verdict in broken:
        say(verdict.line())
    say(f"{len(cells)} cells, {len(wrong)} wrong ({time.monotonic() - began_at:.0f} s)")
    return not wrong and not broken
