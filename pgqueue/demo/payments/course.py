"""The course of the payments demo: ask for every transfer twice, break what can break, check to the cent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from pgqueue import migrate
from pgqueue.client import Client
from pgqueue.database import Connection, connect, run
from pgqueue.demo.course import Narrator
from pgqueue.demo.payments import tasks
from pgqueue.demo.payments.bank import Bank, open_bank
from pgqueue.demo.processes import children_of, ended_by_signals, start_python
from pgqueue.errors import PgqueueError
from pgqueue.sql import Statement
from pgqueue.sql import demo_payments as statements
from pgqueue.sql.demo import take_stage
from pgqueue.sql.demo_payments import Transfer
from pgqueue.sql.presence import register_tasks

T = TypeVar("T")

ACCOUNTS = 100
OPENING_CENTS = 1_000_000
DEAREST_CENTS = 5_000
WORKERS = 2
SLOTS = 8
# Short, so that a killed worker's jobs come back while one watches.
LEASE_SECONDS = 3
APP = "pgqueue.demo.payments.tasks:app"

_POLL_SECONDS = 0.05
_KILL_EVERY_SECONDS = (0.4, 1.2)
_MOST_KILLED = 15
_BANK_AWAY_SECONDS = 4.0
_STALL_SECONDS = 60.0
_STOP_SECONDS = 40.0
_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What came out; all is well if `differences` is empty."""

    accounts: int
    asked: int
    transfers: int
    repeated: int
    cents_moved: int
    settled: int
    killed_children: int
    killed_workers: int
    ran_again: int
    bank_calls: int
    bank_refused: int
    bank_repeated: int
    bank_away_seconds: float
    breaker_changes: int
    total_seconds: float
    differences: list[str]


def perform(dsn: str, schema: str, narrator: Narrator, count: int) -> Report:
    """Run the demo on this database; its tables stay there to be looked at.

    Raises:
        SchemaMismatch: the database has no schema of ours, or another version's.
        PgqueueError: it came to no end. What came out wrong is in the report instead.
    """
    migrate.check(dsn, schema)
    with (
        ended_by_signals(),
        TemporaryDirectory(prefix="pgqueue-demo-") as folder,
        connect(dsn, application_name="pgqueue demo") as connection,
        open_bank() as bank,
    ):
        return _Course(dsn, schema, connection, Path(folder), bank, narrator).run(count)


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def is_up(self) -> bool:
        """Whether its start is over: one that cannot load its application gives up, and should."""
        return b"worker started" in self.log.read_bytes()


class _Course:
    def __init__(
        self,
        dsn: str,
        schema: str,
        connection: Connection[Any],
        folder: Path,
        bank: Bank,
        narrator: Narrator,
    ) -> None:
        self._dsn = dsn
        self._schema = schema
        self._connection = connection
        self._folder = folder
        self._bank = bank
        self._say = narrator.say
        self._progress = narrator.progress
        self._environment = {
            **os.environ,
            "PGQUEUE_SCHEMA": schema,
            tasks.BANK_VARIABLE: bank.url,
            **({"PGQUEUE_DSN": dsn} if dsn else {}),
        }
        self._workers: list[_Worker] = []
        self._killed = Counter[str]()

    def run(self, count: int) -> Report:
        began_at = time.monotonic()
        since = self._prepare()
        wanted = [
            Transfer(number, source, target, random.randint(1, DEAREST_CENTS))
            for number in range(1, count + 1)
            for source, target in [random.sample(range(1, ACCOUNTS + 1), 2)]
        ]
        self._say(
            f"{ACCOUNTS} accounts with {OPENING_CENTS / 100:,.2f} each, {count:,} transfers between them, "
            "and each is asked for twice."
        )
        with ExitStack() as processes:
            for _ in range(WORKERS):
                self._workers.append(processes.enter_context(self._worker()))
            asking = self._ask_for_all(wanted)
            self._work_off(processes, asking, 2 * count + count)
            wrong = self._stop()
        self._say("Adding up, to check.")
        return self._report(wanted, since, wrong, time.monotonic() - began_at)

    def _prepare(self) -> int:
        """Have the stage for ourselves, cleared of an earlier run; gives a number below those of our jobs."""
        if not self._ask(take_stage()):
            raise PgqueueError("another demo is running in this database; wait for its end")
        names = [task.name for task in tasks.app.registry]
        if stranger := self._ask(statements.find_stranger(names)):
            raise PgqueueError(
                f"queue {tasks.QUEUE!r} holds jobs that are not the demo's (task {stranger!r}), "
                "and must be left alone; try another database"
            )
        self._ask(statements.clear(names, tasks.BREAKER))
        self._ask(statements.open_accounts())
        self._ask(statements.fill_accounts(ACCOUNTS, OPENING_CENTS))
        # As a worker does when it starts: from now on a plain INSERT knows the task's queue and keys.
        self._ask(register_tasks(tasks.app.registry.registrations()))
        return self._ask(statements.next_job_id())

    # Producers.

    def _ask_for_all(self, wanted: Sequence[Transfer]) -> list[threading.Thread]:
        """Start four producers, two of which ask for each transfer, each in a way and an order of its own."""
        ways: Mapping[str, Callable[[Connection[Any], Sequence[Transfer]], None]] = {
            "by SQL: INSERT INTO pgqueue.jobs …": self._insert,
            "in Python: transfer.enqueue(…)": self._enqueue,
            "in Python: app.enqueue_many(…)": self._enqueue_many,
            "by SQL, in one transaction": self._insert_together,
        }
        half = len(wanted) // 2
        # The first two share one asking of everything, the last two the other.
        shares = [wanted[:half], wanted[half:], wanted[half:], wanted[:half]]
        threads = []
        for (way, ask), share in zip(ways.items(), shares, strict=True):
            own = random.sample(share, len(share))
            self._say(f"{len(own):6,} jobs by a producer  {way}")
            threads.append(threading.Thread(target=self._produce, args=(ask, own), name=way))
        for thread in threads:
            thread.start()
        return threads

    def _produce(
        self, ask: Callable[[Connection[Any], Sequence[Transfer]], None], share: Sequence[Transfer]
    ) -> None:
        with connect(self._dsn, application_name="pgqueue demo producer") as conn:
            ask(conn, share)

    def _insert(self, conn: Connection[Any], share: Sequence[Transfer]) -> None:
        for one in share:
            run(conn, statements.insert_job(json.dumps(one._asdict())), self._schema)

    def _insert_together(self, conn: Connection[Any], share: Sequence[Transfer]) -> None:
        with conn.transaction():
            self._insert(conn, share)

    def _enqueue(self, conn: Connection[Any], share: Sequence[Transfer]) -> None:
        client = Client(schema=self._schema)
        for one in share:
            client.enqueue(tasks.transfer.job(*one), conn)

    def _enqueue_many(self, conn: Connection[Any], share: Sequence[Transfer]) -> None:
        Client(schema=self._schema).enqueue_many((tasks.transfer.job(*one) for one in share), conn)

    # Workers, and what becomes of them.

    @contextmanager
    def _worker(self) -> Iterator[_Worker]:
        arguments = (
            *("worker", "--app", APP, "-q", f"{tasks.QUEUE}:{SLOTS}"),
            *("--processes", "2", "--lease-seconds", str(LEASE_SECONDS)),
        )
        number = sum(1 for _ in self._folder.glob("worker-*.log"))
        if number < WORKERS:
            self._say(f"       a worker            pgqueue {' '.join(arguments)}")
        path = self._folder / f"worker-{number}.log"
        with (
            path.open("wb") as log,
            start_python(
                *("-m", "pgqueue", *arguments),
                environment=self._environment,
                stdout=log.fileno(),
                stderr=log.fileno(),
            ) as process,
        ):
            yield _Worker(process, path)

    def _work_off(self, processes: ExitStack, asking: Sequence[threading.Thread], total: int) -> None:
        """See all jobs end, while children and a worker are killed and the bank is away for a while."""
        kill_at = time.monotonic() + 1.0
        away_at = back_at = moved_at = 0.0
        has_killed_worker = False
        ended = 0
        with self._progress("Working", total) as advance:
            while True:
                is_asking = any(thread.is_alive() for thread in asking)
                remaining = self._ask(statements.count_remaining())
                if not is_asking and not remaining:
                    break
                now = time.monotonic()
                settled = len(self._bank.booked)
                done = len(self._ask(statements.transfers())) + settled
                if done != ended:
                    advance(done - ended)
                    ended, moved_at = done, now
                if moved_at and now - moved_at > _STALL_SECONDS:
                    raise self._failure(
                        f"nothing has ended for {_STALL_SECONDS:g} s, {remaining:,} jobs remain"
                    )
                if not away_at and settled > total // 12:
                    away_at, back_at = now, now + _BANK_AWAY_SECONDS
                    self._bank.go_away()
                    self._say(f"The bank is away for {_BANK_AWAY_SECONDS:g} s.")
                elif back_at and now >= back_at:
                    self._bank.come_back()
                    back_at = 0.0
                    self._say(f"The bank is back; it was bothered {self._bank.refused:,} times meanwhile.")
                if not has_killed_worker and done > total // 3:
                    has_killed_worker = True
                    self._kill_a_worker(processes)
                elif now >= kill_at and self._killed["child"] < _MOST_KILLED:
                    kill_at = now + random.uniform(*_KILL_EVERY_SECONDS)
                    self._kill_a_child()
                self._check_workers()
                time.sleep(_POLL_SECONDS)
            advance(total - ended)
        self._bank.come_back()
        self._say(
            f"Killed {self._killed['child']} child processes and {self._killed['worker']} worker (SIGKILL)."
        )

    def _kill_a_child(self) -> None:
        children = [
            pid for worker in self._workers if worker.is_up for pid in children_of(worker.process.pid)
        ]
        if children:
            with suppress(ProcessLookupError):
                os.kill(random.choice(children), signal.SIGKILL)
                self._killed["child"] += 1

    def _kill_a_worker(self, processes: ExitStack) -> None:
        """Kill a worker with everything it is doing, and start another in its place."""
        victim = self._workers.pop(0)
        victim.process.kill()
        victim.process.wait()
        self._killed["worker"] += 1
        self._workers.append(processes.enter_context(self._worker()))

    def _check_workers(self) -> None:
        for worker in self._workers:
            if (code := worker.process.poll()) is not None:
                raise self._failure(f"a worker ended with {code} in the middle of its work")

    def _stop(self) -> list[str]:
        """Stop the workers as any supervisor would, and say what is wrong with how they end."""
        wrong = []
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)
        for worker in self._workers:
            try:
                code = worker.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                wrong.append(f"a worker has not ended {_STOP_SECONDS:g} s after SIGTERM")
                continue
            if code:
                wrong.append(f"a worker ended with {code} on SIGTERM")
        return wrong

    def _failure(self, message: str) -> PgqueueError:
        for log in sorted(self._folder.glob("worker-*.log")):
            lines = log.read_text(errors="replace").splitlines()
            self._say("\n".join([f"The end of {log.name}:", *lines[-_LOG_LINES:]]))
        return PgqueueError(message)

    # The check.

    def _report(
        self, wanted: Sequence[Transfer], since: int, wrong: list[str], total_seconds: float
    ) -> Report:
        moved = self._ask(statements.transfers())
        ended = self._ask(statements.outcomes(since))
        breaker = self._ask(statements.breaker(tasks.BREAKER))
        jobs = {(one.task, one.state): one.jobs for one in ended}
        balances = self._ask(statements.balances())
        wrong += find_differences(wanted, moved, balances, self._bank.booked)
        wrong += [
            f"{count:,} jobs {task} are {state}"
            for (task, state), count in sorted(jobs.items())
            if state != "succeeded"
        ]
        for task, expected in (("demo.transfer", 2 * len(wanted)), ("demo.settle", len(wanted))):
            if (found := jobs.get((task, "succeeded"), 0)) != expected:
                wrong.append(f"{found:,} jobs {task} succeeded, not {expected:,}")
        wrong += [f"the bank was told two different things about {key}" for key in self._bank.contradicted]
        if not self._killed["child"] or not self._killed["worker"]:
            wrong.append("no child or no worker could be killed at work, so this showed too little")
        if breaker is None or breaker[1] < 3:
            wrong.append("the breaker did not open, so this showed too little")
        elif breaker[0] != "closed":
            wrong.append(f"the breaker is {breaker[0]} although the bank is back")
        return Report(
            accounts=ACCOUNTS,
            asked=2 * len(wanted),
            transfers=len(moved),
            repeated=2 * len(wanted) - len(moved),
            cents_moved=sum(one.cents for one in moved),
            settled=len(self._bank.booked),
            killed_children=self._killed["child"],
            killed_workers=self._killed["worker"],
            ran_again=sum(one.again for one in ended),
            bank_calls=self._bank.calls,
            bank_refused=self._bank.refused,
            bank_repeated=self._bank.repeated,
            bank_away_seconds=_BANK_AWAY_SECONDS,
            breaker_changes=(breaker[1] - 1) if breaker else 0,
            total_seconds=round(total_seconds, 1),
            differences=wrong,
        )

    def _ask(self, statement: Statement[T]) -> T:
        return run(self._connection, statement, self._schema)


def find_differences(
    wanted: Sequence[Transfer],
    moved: Sequence[Transfer],
    balances: Mapping[int, int],
    booked: Mapping[str, tuple[int, int]],
) -> list[str]:
    """Say everything that is not as it should be, a transfer or an account a line; nothing is good news."""
    times = Counter(moved)
    by_number = {one.transfer: one for one in wanted}
    found = [f"transfer {one.transfer} was made {times[one]} times" for one in wanted if times[one] != 1]
    found += [f"{one}: nobody asked for that" for one in times if by_number.get(one.transfer) != one]
    expected = dict.fromkeys(range(1, ACCOUNTS + 1), OPENING_CENTS)
    for one in wanted:
        expected[one.source] -= one.cents
        expected[one.target] += one.cents
    found += [
        f"account {account} has {balances.get(account)} cents, not {cents}"
        for account, cents in expected.items()
        if balances.get(account) != cents
    ]
    if sum(balances.values()) != ACCOUNTS * OPENING_CENTS:
        found.append(f"all accounts together have {sum(balances.values())} cents: money was made or lost")
    told = {key: (one.transfer, one.cents) for one in wanted for key in [f"demo:settle:{one.transfer}"]}
    found += [f"the bank never heard of {key}" for key in told.keys() - booked.keys()]
    found += [
        f"the bank was told {what} under {key}" for key, what in booked.items() if told.get(key) != what
    ]
    return found
