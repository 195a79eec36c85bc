"""The nemesis: picks faults by a seed, does them, and waits until everybody works again.

Large faults come one at a time, dealt from a shuffled deck so that none is forgotten; after each
one a job in every worker's own queue tells when that worker claims again. Small ones come all the
while. Everything happens in the one thread that also starts what has died.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator
from typing import Any, TypeVar

import psycopg

from pgqueue.runtime.link import PATIENCE_SECONDS
from tests.faults.arena import Arena, Process
from tests.faults.invariants import Cancelled, Database
from tests.faults.journal import Journal
from tests.faults.producer import SINGLE_KEYS
from tests.faults.proxy import Proxy
from tests.support import is_alive

T = TypeVar("T")

# A step of a fault: seconds to wait before the next one.
Steps = Generator[float, None, None]

SESSIONS = ("pgqueue worker claim", "pgqueue worker finish", "pgqueue worker listen", "pgqueue worker lease")
# Of handlers that are in one with the end of their job.
TRANSACTIONS = "pgqueue job %"
_FINE = 0
_UNREACHABLE = 75
# What outlives its worker does so for ever: this is only to tell that from a machine that is busy.
_CHILDREN_GONE_SECONDS = 15.0
_DUE_SECONDS = 0.2
# Of a fault's preparations, which take moments.
_PREPARATION_SECONDS = 10.0


def _name(fault: Callable[..., Any]) -> str:
    return fault.__name__.strip("_").replace("_", " ")


class Nemesis:
    """Does faults to the workers, producers, proxy and server of one campaign."""

    def __init__(
        self,
        arena: Arena,
        dbname: str,
        workers: list[Process],
        producers: list[Process],
        proxy: Proxy,
        *,
        seed: int,
        lease_seconds: float,
        recovery_seconds: float,
        is_patient: bool,
        only: Collection[str] = (),
    ) -> None:
        self._arena = arena
        self._dbname = dbname
        self._workers = workers
        self._producers = producers
        self._proxy = proxy
        # The n-th fault of a kind is the seed's, however many draws the machine's state has cost before.
        self._seed = seed
        self._rng = random.Random(f"{seed}:large")
        self._small_rng = random.Random(f"{seed}:small")
        self._small_count = 0
        self._pace = random.Random(f"{seed}:pace")
        self._lease_seconds = lease_seconds
        self._outage_seconds = (0.0, 0.3, 1.0, lease_seconds * 1.3, *([20.0] if is_patient else []))
        self._recovery_seconds = recovery_seconds
        self._journal = Journal(arena.logs, "nemesis")
        self._log = (arena.logs / "faults.jsonl").open("a")
        self._began_at = time.monotonic()
        self._admin: psycopg.Connection[Any] | None = None
        self._frozen: set[int] = set()
        self._may_revive = True
        self.faults: Counter[str] = Counter()
        self.small_faults: Counter[str] = Counter()
        self.recoveries: list[tuple[str, float]] = []
        self.failures: list[str] = []
        self.cancels: list[Cancelled] = []
        self._large: tuple[Callable[[], Steps], ...] = (
            self.kill_worker,
            self.drain_worker,
            self.interrupt_storm,
            self.freeze_worker,
            self.freeze_parent,
            self.freeze_child,
            self.restart_server,
            self.stop_server_at_once,
            self.kill_server,
            self.kill_backend,
            self.freeze_server,
            self.miss_standby,
            self.jump_clock,
            self.fill_lock_table,
            self.silence_bell,
            self.lock_table,
            self.fill_connections,
            self.shorten_statements,
            self.forbid_writing,
            self.terminate_everybody,
            self.cut_connections,
            self.silence_connections,
            self.silence_and_cut_connections,
            self.silence_answers,
            self.strand_new_connections,
            self.flap_connections,
            self.slow_connections,
            self.refuse_connections,
            self.delay_connections,
            self.lose_answers,
            self.hold_snapshot,
            self.hold_key,
            self.strand_connections,
        )
        if only:
            names = [_name(fault) for fault in self._large]
            if unknown := set(only).difference(names):
                raise SystemExit(f"no fault {', '.join(unknown)}; there are: {', '.join(names)}")
            self._large = tuple(fault for fault in self._large if _name(fault) in only)
        elif not is_patient:
            # It takes all of a worker's patience.
            self._large = tuple(fault for fault in self._large if fault != self.strand_connections)
        self._small: tuple[Callable[[], object], ...] = (
            *[self._terminate_one] * 3,
            *[self._cancel_statement] * 2,
            *[self._kill_child] * 2,
            *[self._cancel_jobs] * 4,
            *[self._redrive] * 2,
            self._kill_producer,
            self._lock_running_job,
        )

    # The run.

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        deck: list[Callable[[], Steps]] = []
        while time.monotonic() < end:
            if not deck:
                deck = list(self._large)
                self._rng.shuffle(deck)
            self._do(deck.pop())
            self._live(self._rng.uniform(0.1, 0.5))

    def _do(self, fault: Callable[[], Steps]) -> None:
        name = _name(fault)
        self._note("fault", fault=name)
        self.faults[name] += 1
        for pause in fault():
            self._live(pause)
        self._recover(name)

    def heal(self) -> None:
        """Undo whatever is under way and start what is dead."""
        self._note("healing")
        for pid in list(self._frozen):
            self._thaw(pid)
        self._proxy.heal()
        if not self._arena.server.is_up:
            self._arena.server.restart()
        self._arena.heal_settings()
        self._recover("healing")

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._journal.close()
        self._log.close()

    def _live(self, seconds: float) -> None:
        """Let time pass: start what has died, and do small faults if it is long enough."""
        end = time.monotonic() + seconds
        small_at = time.monotonic() + self._pace.uniform(0.05, 0.4)
        while (now := time.monotonic()) < end:
            self.tend()
            if now >= small_at:
                self._small_count += 1
                self._small_rng = random.Random(f"{self._seed}:small:{self._small_count}")
                self._small_rng.choice(self._small)()
                small_at = time.monotonic() + self._pace.uniform(0.1, 0.5)
            time.sleep(0.02)

    def _keep_still(self, seconds: float) -> None:
        """Let time pass without small faults, while whoever asks the database has to wait."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tend()
            time.sleep(0.02)

    def tend(self) -> None:
        """Start again what has died; whatever died by itself is written down."""
        for worker in self._workers:
            worker.look()
        for process in (*self._workers, *self._producers):
            if not process.lives or process.is_up:
                continue
            code = process.exit_code
            if process.ends_expected:
                if process.expected_code is not None and code != process.expected_code:
                    self.failures.append(f"{process.name} ended with {code}, not {process.expected_code}")
            elif code == _UNREACHABLE and not process.has_started:
                # As documented: who cannot reach the database at its start says so and leaves it to others.
                self._note("could not start", process=process.name)
            else:
                self.failures.append(f"{process.name} ended by itself with status {code}")
                self._note("ended by itself", process=process.name, status=code)
            if self._may_revive:
                process.start()

    def retire_producers(self) -> None:
        """Have the producers finish what they are at and end."""
        self._may_revive = False
        for producer in self._producers:
            if producer.end() is None:
                self.failures.append(f"{producer.name} did not end")
            producer.lives = 0
        self._may_revive = True

    def _recover(self, fault: str) -> None:
        """Wait until each worker has claimed a job of its own queue, and one that came due meanwhile."""
        began_at = time.monotonic()
        queues = ["own-0", *(f"own-{number}" for number in range(len(self._workers)))]
        delays = [_DUE_SECONDS, *[0.0] * len(self._workers)]
        put: dict[str, int] = {}

        def put_one_in_each() -> None:
            # An insert whose answer is lost may have happened: it stays ambiguous, the next try is another.
            marks = [self._journal.mark() for _ in queues]
            self._journal.intend(*marks)
            found = self._ask(
                lambda db: db.all(
                    "INSERT INTO pgqueue.jobs (task, queue, run_at, args) "
                    "SELECT 'touch', q, clock_timestamp() + make_interval(secs => d), "
                    "jsonb_build_object('mark', m) "
                    "FROM unnest(%s::text[], %s::float8[], %s::text[]) AS b (q, d, m) "
                    "RETURNING args ->> 'mark', id",
                    queues,
                    delays,
                    marks,
                )
            )
            put.update(found or ())

        def find_waiting() -> list[str] | None:
            return self._ask(
                lambda db: db.column(
                    "SELECT b.queue FROM faults.history AS b "
                    "WHERE b.job_id = ANY (%s) AND b.event = 'born' AND NOT EXISTS "
                    "(SELECT FROM faults.history AS h WHERE h.job_id = b.job_id AND h.event = 'claimed')",
                    list(put.values()),
                )
            )

        # Longer than the bound is on the slowest machine, so that who never works again is found.
        patience = self._recovery_seconds * 6
        while not put and time.monotonic() - began_at < patience:
            put_one_in_each()
            self._live(0.0 if put else 0.05)
        self._journal.acknowledge(list(put), list(put.values()))
        last = queues
        while (waiting := find_waiting()) != [] and time.monotonic() - began_at < patience:
            last = waiting or last
            self._live(0.03)
        seconds = time.monotonic() - began_at
        self.recoveries.append((fault, seconds))
        self._note("recovered", fault=fault, seconds=round(seconds, 3), last=last)

    # Asking the database, whatever state it is in.

    def _ask(self, question: Callable[[Database], T]) -> T | None:
        """Ask as the administrator; None if that is not possible just now."""
        try:
            if self._admin is None or self._admin.closed:
                self._admin = self._open()
                self._admin.execute("SET lock_timeout = '2s'")
            return question(Database(self._admin))
        except psycopg.Error:
            if self._admin is not None and self._admin.broken:
                self._admin = None
            return None

    def _is_answering(self) -> bool:
        return self._ask(lambda db: db.one("SELECT 1")) is not None

    def _open(self) -> psycopg.Connection[Any]:
        return self._arena.connect(self._dbname, connect_timeout=2)

    def _note(self, event: str, **fields: Any) -> None:
        line = {"at": round(time.monotonic() - self._began_at, 3), "event": event, **fields}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    def _wait_for(self, question: Callable[[], T | None]) -> Generator[float, None, T | None]:
        """Ask until the answer is good, but not for ever."""
        end = time.monotonic() + _PREPARATION_SECONDS
        while not (answer := question()) and time.monotonic() < end:
            yield 0.02
        return answer

    def _victim(self, processes: list[Process]) -> Process:
        # By its place, whether it is up or not: the choice must be the seed's, not the machine's.
        return processes[self._rng.randrange(len(processes))]

    # Faults of processes.

    def kill_worker(self) -> Steps:
        victim = self._victim(self._workers)
        children = victim.children()
        victim.kill()
        self._note("killed", process=victim.name, children=children)
        gone_by = time.monotonic() + _CHILDREN_GONE_SECONDS
        while any(map(is_alive, children)):
            if time.monotonic() > gone_by:
                self.failures.append(f"children of {victim.name} outlived it by {_CHILDREN_GONE_SECONDS:g} s")
                break
            yield 0.02

    def drain_worker(self) -> Steps:
        yield from self._end_worker((signal.SIGTERM,))

    def interrupt_storm(self) -> Steps:
        yield from self._end_worker((signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT))

    def _end_worker(self, numbers: tuple[signal.Signals, ...]) -> Steps:
        victim = self._victim(self._workers)
        # Without its signal handlers yet, a signal kills it: that is another fault.
        if not (yield from self._wait_for(lambda: victim.is_up and victim.has_started)):
            return
        life = victim.lives
        victim.ends_expected, victim.expected_code = True, _FINE
        for number in numbers:
            victim.signal(number)
            yield 0.02
        end = time.monotonic() + 60.0
        while victim.lives == life and victim.is_up:
            if time.monotonic() > end:
                self.failures.append(f"{victim.name} did not end when told to")
                victim.expected_code = None
                victim.kill()
            yield 0.02

    def freeze_worker(self) -> Steps:
        yield from self._freeze(self._victim(self._workers).tree())

    def freeze_parent(self) -> Steps:
        yield from self._freeze([self._victim(self._workers).pid])

    def freeze_child(self) -> Steps:
        children = yield from self._wait_for(self._victim(self._workers).children)
        yield from self._freeze((children or [])[:1])

    def _freeze(self, pids: list[int]) -> Steps:
        """Stop processes for longer than a lease, then let them go on as if nothing had happened."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._frozen.add(pid)
        yield self._lease_seconds * self._rng.uniform(1.1, 1.8)
        for pid in pids:
            self._thaw(pid)

    def _thaw(self, pid: int) -> None:
        self._frozen.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    # Faults of the server.

    def restart_server(self) -> Steps:
        yield from self._outage(self._arena.server.stop)

    def stop_server_at_once(self) -> Steps:
        yield from self._outage(self._arena.server.stop_at_once)

    def kill_server(self) -> Steps:
        yield from self._outage(self._arena.server.kill)

    def _outage(self, end: Callable[[], None]) -> Steps:
        end()
        self._note("server down")
        yield self._rng.choice(self._outage_seconds)
        self._arena.server.restart()
        self._note("server up")

    def kill_backend(self) -> Steps:
        """Kill one backend as the kernel does when memory runs out: the server restarts itself."""
        kind = self._rng.choice(SESSIONS)
        for pid in ((yield from self._wait_for(lambda: self._pids_of(kind))) or [])[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Until it is back, as after an outage: how much it has to recover is not the workers' doing.
        for is_answering in (False, True):
            yield from self._wait_for(lambda told=is_answering: self._is_answering() == told)  # type: ignore[misc]

    def freeze_server(self) -> Steps:
        """Stop the server's processes for longer than a lease; nobody's connection breaks."""
        self._arena.server.freeze()
        self._keep_still(self._lease_seconds * self._rng.uniform(1.1, 1.8))
        self._arena.server.thaw()
        yield 0.0

    def miss_standby(self) -> Steps:
        """Have every commit wait for a standby that is not there."""
        yield from self._with_setting("synchronous_standby_names", "nobody")

    def jump_clock(self) -> Steps:
        """Let the database's clock jump an hour ahead, as the running jobs see it."""
        self._ask(
            lambda db: db.connection.execute(
                """
                UPDATE pgqueue.jobs SET
                    heartbeat_at = heartbeat_at - interval '1 hour',
                    deadline_at = deadline_at - interval '1 hour'
                WHERE id IN (
                    SELECT id FROM pgqueue.jobs WHERE state = 'running' FOR NO KEY UPDATE SKIP LOCKED
                )
                """
            )
        )
        yield 0.5

    def fill_lock_table(self) -> Steps:
        """Take advisory locks until the server has room for no lock at all."""
        with contextlib.suppress(psycopg.Error), self._open() as hog:
            with contextlib.suppress(psycopg.Error):
                hog.execute("SELECT count(pg_advisory_lock(n)) FROM generate_series(1, 1000000) AS s (n)")
            yield self._rng.uniform(0.5, 1.5)

    def silence_bell(self) -> Steps:
        """Have inserts ring no more: polling has to do."""
        self._ask(lambda db: db.connection.execute("ALTER TABLE pgqueue.jobs DISABLE TRIGGER jobs_bell"))
        yield self._rng.uniform(1.0, 2.0)
        end = time.monotonic() + 10
        while time.monotonic() < end and not self._ask(
            lambda db: db.connection.execute("ALTER TABLE pgqueue.jobs ENABLE TRIGGER jobs_bell")
        ):
            yield 0.05

    def terminate_everybody(self) -> Steps:
        """End every session but our own, of workers, handlers and producers."""
        self._ask(
            lambda db: db.all(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND application_name <> 'faults admin'"
            )
        )
        yield 0.0

    def lock_table(self) -> Steps:
        """Do what a migration does: readers go on, writers wait."""
        seconds = self._rng.uniform(0.5, 1.5)
        mode = self._rng.choice(("SHARE", "ACCESS EXCLUSIVE"))
        with contextlib.suppress(psycopg.Error), self._open() as connection, connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '2s'")
            connection.execute(f"LOCK TABLE pgqueue.jobs IN {mode} MODE")
            self._keep_still(seconds)
        yield 0.0

    def fill_connections(self) -> Steps:
        """Take every connection that an ordinary role can get."""
        seconds = self._rng.uniform(0.5, 2.0)
        with contextlib.ExitStack() as hog:
            with contextlib.suppress(psycopg.Error):
                for _ in range(500):
                    hog.enter_context(
                        contextlib.closing(
                            psycopg.connect(
                                self._arena.dsn(self._dbname, application_name="hog"), autocommit=True
                            )
                        )
                    )
            # Now those who have one lose it, and find the door closed.
            self._terminate(self._rng.choice(SESSIONS))
            yield seconds

    def shorten_statements(self) -> Steps:
        """Give nobody the time for a statement; workers have a setting of their own, handlers have not."""
        yield from self._with_setting("statement_timeout", f"{self._rng.randrange(1, 6)}ms")

    def forbid_writing(self) -> Steps:
        """Be a standby, as far as a client can tell."""
        yield from self._with_setting("default_transaction_read_only", "on")

    def _with_setting(self, name: str, value: str) -> Steps:
        self._ask(lambda db: db.connection.execute(f"ALTER SYSTEM SET {name} = '{value}'"))
        self._ask(lambda db: db.one("SELECT pg_reload_conf()"))
        yield self._rng.uniform(0.5, 2.0)
        self._arena.heal_settings()

    def hold_snapshot(self) -> Steps:
        with contextlib.suppress(psycopg.Error), self._open() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM pgqueue.jobs")
            yield self._rng.uniform(1.0, 3.0)

    def hold_key(self) -> Steps:
        """Hold the advisory lock of a key, as any role may: that key waits, nobody else does."""
        key = f"one:{self._rng.choice(SINGLE_KEYS)}"
        with contextlib.suppress(psycopg.Error), self._open() as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(pgqueue.key_lock(%s))", (key,))
            yield self._rng.uniform(0.5, 1.5)

    # Faults of the network, to whoever goes through the proxy.

    def cut_connections(self) -> Steps:
        self._proxy.cut()
        yield 0.0

    def silence_connections(self) -> Steps:
        """Partition for longer than a lease; what was under way arrives late."""
        self._proxy.silence()
        yield self._lease_seconds * self._rng.uniform(1.1, 1.8)
        self._proxy.heal()

    def silence_and_cut_connections(self) -> Steps:
        self._proxy.silence()
        yield self._lease_seconds * self._rng.uniform(0.5, 1.8)
        self._proxy.cut()
        self._proxy.heal()

    def strand_connections(self) -> Steps:
        """Let a worker's connections fall silent while new ones work: a balancer forgot them."""
        self._proxy.strand()
        yield PATIENCE_SECONDS

    def strand_new_connections(self) -> Steps:
        """Have a worker connect anew, to something that lets it in and says nothing more."""
        self._proxy.strand_new()
        self._proxy.cut()
        yield self._rng.uniform(0.5, 2.0)
        self._proxy.heal()

    def silence_answers(self) -> Steps:
        """Lose the way back for longer than a lease: what workers ask is done, and they do not hear of it."""
        self._proxy.silence(answers_only=True)
        yield self._lease_seconds * self._rng.uniform(1.1, 1.8)
        self._proxy.heal()

    def flap_connections(self) -> Steps:
        for _ in range(self._rng.randrange(3, 7)):
            self._proxy.refuse()
            self._proxy.cut()
            yield 0.3
            self._proxy.heal()
            yield 0.3

    def slow_connections(self) -> Steps:
        """Let them carry a megabit a second, with large arguments among what they carry."""
        self._proxy.slow_down(125_000)
        yield self._rng.uniform(1.5, 3.0)
        self._proxy.heal()

    def refuse_connections(self) -> Steps:
        self._proxy.refuse()
        self._proxy.cut()
        yield self._rng.uniform(0.5, 2.0)
        self._proxy.heal()

    def delay_connections(self) -> Steps:
        self._proxy.delay(self._rng.uniform(0.05, 0.25))
        yield self._rng.uniform(1.0, 2.0)
        self._proxy.heal()

    def lose_answers(self) -> Steps:
        """Cut connections after the server did what was asked and before it is heard."""
        for _ in range(4):
            self._proxy.lose_answers(self._rng.randrange(1, 4))
            yield 0.3
        self._proxy.heal()

    # Small ones.

    def _count_small(self, name: str, **fields: Any) -> None:
        self.small_faults[name] += 1
        self._note("small fault", fault=name, **fields)

    def _pids_of(self, application_name: str) -> list[int]:
        return (
            self._ask(
                lambda db: db.column(
                    "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s ORDER BY pid",
                    application_name,
                )
            )
            or []
        )

    def _terminate(self, application_name: str) -> None:
        for pid in self._pids_of(application_name):
            self._ask(lambda db, pid=pid: db.one("SELECT pg_terminate_backend(%s)", pid))  # type: ignore[misc]

    def _session(self) -> tuple[str, int | None]:
        kind = self._small_rng.choice((*SESSIONS, "producer", "pgqueue", "handler", TRANSACTIONS))
        pids = self._pids_of(kind)
        return kind.removeprefix("pgqueue worker "), self._small_rng.choice(pids) if pids else None

    def _terminate_one(self) -> None:
        kind, pid = self._session()
        if self._ask(lambda db: db.one("SELECT pg_terminate_backend(%s)", pid)):
            self._count_small("terminate session", session=kind)

    def _cancel_statement(self) -> None:
        """End a statement as statement_timeout does."""
        kind, pid = self._session()
        if self._ask(lambda db: db.one("SELECT pg_cancel_backend(%s)", pid)):
            self._count_small("cancel statement", session=kind)

    def _kill_child(self) -> None:
        worker = self._small_rng.choice(self._workers)
        place = self._small_rng.random()
        children = worker.children()
        # A worker that starts reads its application in its first child: without that it says so and ends.
        if children and worker.has_started:
            pid = children[int(place * len(children))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._count_small("kill child", process=worker.name, pid=pid)

    def _kill_producer(self) -> None:
        producer = self._small_rng.choice(self._producers)
        producer.kill()
        self._count_small("kill producer", process=producer.name)

    def _cancel_jobs(self) -> None:
        """Cancel a few jobs, in whatever state they are."""
        found = self._ask(
            lambda db: db.all(
                "SELECT c.job_id, c.outcome FROM pgqueue.cancel(ARRAY(SELECT id FROM pgqueue.jobs "
                "WHERE queue NOT LIKE 'own-%%' ORDER BY md5(id::text || %s) LIMIT 3), 'the nemesis') AS c",
                str(self._small_rng.random()),
            )
        )
        if found:
            # Later than the cancel's commit: what is claimed after this, is claimed after it.
            at = self._ask(lambda db: db.one("SELECT clock_timestamp()"))
            if at is not None:
                self.cancels += [Cancelled(job_id, outcome, at) for job_id, outcome in found]
            self._count_small("cancel jobs", jobs=found)

    def _redrive(self) -> None:
        found = self._ask(
            lambda db: db.all(
                "SELECT r.job_id, r.outcome FROM pgqueue.redrive(ARRAY("
                "SELECT id FROM pgqueue.dead_jobs ORDER BY md5(id::text || %s) LIMIT 2), 2) AS r",
                str(self._small_rng.random()),
            )
        )
        if found:
            self._count_small("redrive", jobs=found)

    def _lock_running_job(self) -> None:
        """Lock a running job's row for a moment, as user code does by accident."""
        with contextlib.suppress(psycopg.Error), self._open() as connection, connection.transaction():
            row = connection.execute(
                "SELECT id FROM pgqueue.jobs WHERE state = 'running' LIMIT 1 FOR UPDATE SKIP LOCKED"
            ).fetchone()
            if row:
                self._count_small("lock job", job=row[0])
                time.sleep(0.15)
