"""The worker: a parent that owns the queue, and the children that run the user's code.

It wires the parts together and decides how a worker starts and how it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from pgqueue import __version__, migrate
from pgqueue.database import (
    Error,
    describe,
    implementation,
    normalise,
    passwords,
    pools_transactions,
    redact,
)
from pgqueue.dsn import resolve
from pgqueue.errors import ConfigurationError
from pgqueue.model.outcome import RELEASED
from pgqueue.runtime.bell import Bell, BellApart, NoBell
from pgqueue.runtime.breakers import Breakers
from pgqueue.runtime.feeder import Feeder
from pgqueue.runtime.finisher import Finisher
from pgqueue.runtime.launch import Launch
from pgqueue.runtime.lease import LeaseKeeper, Verdicts
from pgqueue.runtime.ledger import Held, Ledger, Pool
from pgqueue.runtime.link import DatabaseLost, Link, Outage
from pgqueue.runtime.log import Log, hide, identify
from pgqueue.runtime.maintenance import Maintenance
from pgqueue.runtime.monitor import Monitor
from pgqueue.runtime.notify import Notifier
from pgqueue.runtime.nursery import Nursery
from pgqueue.runtime.scheduler import Scheduler
from pgqueue.sql import attempts, presence

# Exit codes, as documented.
DONE = 0
FAILED = 1
DEAD_JOBS = 3

_OLDEST_SERVER = 14

# Longer than any try to renew takes: until then the lease thread is not stuck.
_LEASE_TURN_SECONDS = 30.0
# Thirty times Python's own figure: one claim makes thousands of objects, and completion takes them away.
_COLLECT_AFTER = 20_000


class Worker:
    """One worker. `run` ends with an exit code."""

    def __init__(self, launch: Launch) -> None:
        self._id = str(uuid4())
        # Every line of the log says whose it is, those of the children, too.
        identify(self._id)
        hide(*passwords(launch.dsn or ""), *passwords(launch.listen_dsn or ""))
        launch = replace(launch, worker_id=self._id)
        self._launch = launch
        self._settings = launch.settings
        self._log = Log("pgqueue.worker", worker=self._id[:8])
        self._is_draining = False
        self._must_end_now = False
        self._ending = asyncio.Event()
        self._wake = asyncio.Event()
        self._questions: set[asyncio.Task[None]] = set()
        # When the last of the jobs we gave back for later comes due; monotonic.
        self._due_back_at = 0.0
        self._outage = Outage(self._log)
        self._ledger = Ledger([])
        self._notifier = Notifier(launch.environment)
        self._nursery = Nursery(launch, self._ledger, self._wake, self._log)
        self._monitor = Monitor(
            self._settings,
            self._ledger,
            self._outage,
            self._log,
            count_children=self._nursery.count_up,
            is_draining=lambda: self._is_draining,
        )

    async def run(self) -> int:
        """Work until told to stop, or until the queues are empty if that was asked for."""
        loop = asyncio.get_running_loop()
        for number, handler in (
            (signal.SIGTERM, self.drain),
            (signal.SIGINT, self.drain),
            (signal.SIGQUIT, self.end_now),
        ):
            loop.add_signal_handler(number, handler)
        try:
            self._monitor.open()
            hello = await self._nursery.start(self._ending)
            return DONE if hello is None else await self._work(hello)
        finally:
            self._nursery.close()
            await self._monitor.close()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
                # It is all given back: a signal that comes now must not turn a clean end into a kill.
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    def drain(self) -> None:
        """Stop claiming and let what runs finish; told twice, end now."""
        if self._is_draining:
            self.end_now()
            return
        self._is_draining = True
        self._log.info(
            "draining", running=len(self._unfinished()), grace_seconds=self._settings.grace_seconds
        )
        self._ending.set()
        self._wake.set()

    def end_now(self) -> None:
        """Give everything back and end without waiting for handlers."""
        self._must_end_now = self._is_draining = True
        self._ending.set()
        self._wake.set()

    # Leases.

    def _on_verdicts(self, verdicts: Verdicts) -> None:
        for held, verdict in verdicts:
            if held.serial not in self._ledger.held or held.is_lost:
                continue
            match verdict:
                case "lost" if held.is_transactional and not held.is_finishing:
                    self._question(held)
                case "lost" if not held.is_finishing:
                    self._lose(held)
                case "cancel" if held.kill_at == math.inf and not held.is_finishing:
                    held.kill_at = time.monotonic() + self._settings.kill_grace_seconds
                    held.child.cancel([held.serial])

    def _lose(self, held: Held) -> None:
        self._nursery.lose(held, "its lease had run out")

    def _question(self, held: Held) -> None:
        """Ask whether an attempt has ended itself or was taken from us; either way its row is gone."""
        if not held.is_questioned:
            held.is_questioned = True
            question = asyncio.create_task(self._finisher.settle_or_lose(held, self._lose))
            self._questions.add(question)
            question.add_done_callback(self._questions.discard)

    def _on_lease_trouble(self, error: BaseException | None, heard_at: float) -> None:
        if error is None:
            self._outage.ends("lease")
            self._wake.set()
        else:
            self._outage.begins("lease", error, heard_at)

    # Working.

    async def _work(self, hello: Mapping[str, Any]) -> int:
        launch, settings = self._launch, self._settings
        schema = hello["schema"] or launch.schema
        resolved = await asyncio.to_thread(
            resolve, launch.dsn or hello["dsn"], launch.environment, schema=schema
        )
        await asyncio.to_thread(migrate.check, resolved.dsn, schema)
        default_queues = tuple(sorted({task["queue"] for task in hello["tasks"]})) or ("default",)
        self._ledger.pools = [
            Pool(slots, queues, number)
            for number, (slots, queues) in enumerate(settings.pools(default_queues))
        ]
        self._ledger.metrics.know((task["name"] for task in hello["tasks"]), self._ledger.queues)
        dsn = resolved.dsn
        claim = Link(dsn, schema, "claim", self._outage, {"synchronous_commit": "off"})
        finish = Link(dsn, schema, "finish", self._outage, {"lock_timeout": "1s"})
        sessions = await asyncio.to_thread(self._find_sessions, dsn)
        is_apart = launch.listen_dsn is not None
        # Jobs run as long as the database is there, whatever becomes of the way past its proxy.
        outage = Outage(self._log, "server for wake-ups") if is_apart else self._outage
        history = None
        if sessions is not None:
            history = Link(
                sessions, schema, "history", outage, {"statement_timeout": "0"}, patience_seconds=3600
            )
        make_bell = NoBell if sessions is None or not settings.listens else BellApart if is_apart else Bell
        bell = make_bell(
            sessions or dsn, schema, outage, self._ledger.queues, self._wake, settings.poll_seconds
        )
        self._finisher = Finisher(
            link=finish,
            ledger=self._ledger,
            worker_id=self._id,
            unknown_task_grace_seconds=0.0 if settings.until_empty else settings.unknown_task_grace_seconds,
            on_retry=lambda seconds: self._expect_back(maintenance, seconds),
            on_room=self._wake.set,
            log=self._log,
        )
        maintenance = Maintenance(
            link=finish,
            history=history,
            ledger=self._ledger,
            outage=self._outage,
            worker_id=self._id,
            slots=sum(pool.slots for pool in self._ledger.pools),
            lease_seconds=settings.lease_seconds,
            kill_grace_seconds=settings.kill_grace_seconds,
            retention_seconds=settings.retention_seconds,
            key_retention_seconds=settings.key_retention_seconds,
            definitions=lambda: hello["tasks"],
            rate_limits=hello["rate_limits"],
            bell=bell,
            log=self._log,
        )
        scheduler = Scheduler(
            link=finish,
            app=launch.app,
            definitions=hello["schedules"],
            keep_seconds=settings.retention_seconds,
            is_maintainer=lambda: bell.is_maintainer,
            log=self._log,
        )
        breakers = Breakers(
            link=claim,
            ledger=self._ledger,
            tasks=hello["tasks"],
            declared=hello["breakers"],
            log=self._log,
        )
        feeder = Feeder(
            link=claim,
            bell=bell,
            ledger=self._ledger,
            worker_id=self._id,
            lease_seconds=settings.lease_seconds,
            poll_seconds=settings.poll_seconds,
            dispatch=self._nursery.dispatch,
            breakers=breakers,
            room=self._nursery.room,
            wake=self._wake,
            log=self._log,
        )
        lease = LeaseKeeper(
            dsn,
            schema,
            self._ledger,
            settings.beat_seconds,
            on_verdicts=self._on_verdicts,
            on_trouble=self._on_lease_trouble,
        )
        await self._nursery.fill(dsn, self._finisher, breakers)
        since = await self._first_contact(finish, maintenance, breakers, default_queues)
        lease.start()
        self._monitor.watch(sessions or dsn, schema, outage, bell)
        tasks = {
            asyncio.create_task(feeder.run(), name="feeder"),
            asyncio.create_task(self._finisher.run(), name="finisher"),
            asyncio.create_task(maintenance.run(), name="maintenance"),
            asyncio.create_task(breakers.run(), name="breakers"),
            asyncio.create_task(self._nursery.watch(), name="children"),
        }
        # Apart from the others: it may end early, and ends last.
        report = asyncio.create_task(self._notifier.report(self._status, lambda: _turns(lease)))
        if settings.until_empty:
            tasks.add(asyncio.create_task(self._end_when_empty(finish, feeder), name="until-empty"))
        else:  # what is there is worked off; ticks would add to it
            tasks.add(asyncio.create_task(scheduler.run(), name="scheduler"))
        for task in tasks:
            task.add_done_callback(self._say_if_broken)
        if settings.processes:
            _collect_seldom()
        self._log.info(
            "worker started",
            app=launch.app,
            queues=",".join(self._ledger.queues),
            slots=sum(pool.slots for pool in self._ledger.pools),
            processes=settings.processes,
            database=resolved.origin,
            version=__version__,
            psycopg=implementation(),
        )
        if not self._ending.is_set():
            self._notifier.say("READY=1")
        ending: asyncio.Task[Any] = asyncio.create_task(self._ending.wait(), name="ending")
        await asyncio.wait({*tasks, ending}, return_when=asyncio.FIRST_COMPLETED)
        self._is_draining = self._nursery.is_draining = True
        self._notifier.say("STOPPING=1")
        await self._stop_feeding(feeder, next(task for task in tasks if task.get_name() == "feeder"))
        await self._finish_held()
        dead = await self._count_dead(finish, since) if settings.until_empty else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await maintenance.leave()
                await breakers.leave()
        await asyncio.to_thread(lease.stop)
        for task in (*tasks, ending, report, *self._questions):
            task.cancel()
        await asyncio.gather(*tasks, ending, report, return_exceptions=True)
        broken = [task for task in tasks if not task.cancelled() and task.exception()]
        await finish.close()
        await claim.close()
        counts = self._ledger.counts
        self._log.info(
            "worker ended",
            claimed=counts.claimed,
            succeeded=counts.succeeded,
            failed=counts.failed,
            dead=counts.dead,
            cancelled=counts.cancelled,
            released=counts.released,
            crashed=counts.crashed,
            lost=counts.lost,
        )
        if broken:
            return FAILED
        return DEAD_JOBS if dead else DONE

    def _find_sessions(self, dsn: str) -> str | None:
        """Give the DSN for what needs a session of its own; None: there is none to be had.

        Raises:
            ConfigurationError: the DSN given for it leads to a proxy as well.
        """
        if given := self._launch.listen_dsn:
            given = normalise(given)
            if pools_transactions(given):
                raise ConfigurationError(
                    f"--listen-dsn leads to {describe(given)}, which pools transactions like the proxy it is "
                    "to lead past; give it the server itself, or --no-wakeups"
                )
            return given
        if not pools_transactions(dsn):
            return dsn
        if self._settings.listens:
            self._log.info(
                "a proxy that pools transactions: no wake-ups, polling",
                database=describe(dsn),
                poll_seconds=self._settings.poll_seconds,
                hint="--listen-dsn gives wake-ups; PGQUEUE_POOLER=session says that it pools sessions",
            )
        return None

    async def _first_contact(
        self, link: Link, maintenance: Maintenance, breakers: Breakers, queues_of_tasks: Sequence[str]
    ) -> str:
        """Reach the database for the first time; gives its clock's time.

        An outage that begins just now is ridden out like any other.
        """
        while True:
            try:
                now, version = await link.run(attempts.database_now())
                if int(version.partition(".")[0]) < _OLDEST_SERVER:
                    raise ConfigurationError(
                        f"PostgreSQL {version} is too old: pgqueue needs {_OLDEST_SERVER} or newer"
                    )
                await maintenance.register()
                await breakers.start()
                await self._warn_of_strangers(link, queues_of_tasks)
            except DatabaseLost:
                if self._ending.is_set():
                    return "now"
                continue
            return now

    async def _warn_of_strangers(self, link: Link, queues_of_tasks: Sequence[str]) -> None:
        """Warn of queues that may be misspelt. Not more: producers in other languages use any queue."""
        own = [queue for queue in self._ledger.queues if queue not in queues_of_tasks]
        if own and (unknown := await link.run(presence.unknown_queues(own))):
            self._log.warning(
                "queues that no task of this application uses and that nobody knows",
                queues=",".join(unknown),
                queues_of_tasks=",".join(queues_of_tasks),
            )

    def _status(self) -> str:
        counts, running = self._ledger.counts, len(self._unfinished())
        state = "draining, " if self._is_draining else ""
        if self._outage.is_on:
            state += "database away, "
        ended = f"{counts.succeeded} succeeded, {counts.failed} failed, {counts.dead} dead"
        return f"{state}{running} running, {ended}"

    def _say_if_broken(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            # The first line: in the others the driver may quote whole rows.
            summary = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._log.error("a part of the worker failed", part=task.get_name(), error=redact(summary))

    def _expect_back(self, maintenance: Maintenance, seconds: float) -> None:
        """Take note that a job of ours comes due so soon, after a failure or a snooze."""
        self._due_back_at = max(self._due_back_at, time.monotonic() + seconds)
        maintenance.expect_due(seconds)

    async def _end_when_empty(self, link: Link, feeder: Feeder) -> None:
        """End the worker once its queues have nothing left that is due, runs, or will be tried again."""
        while True:
            await feeder.is_idle.wait()
            if not self._ledger.held and time.monotonic() > self._due_back_at:
                with contextlib.suppress(DatabaseLost):
                    if not await link.run(attempts.count_remaining(self._ledger.queues)):
                        self._is_draining = True
                        self._ending.set()
                        return
            await asyncio.sleep(0.05)

    async def _count_dead(self, link: Link, since: str) -> int:
        try:
            return await link.run(attempts.count_dead_since(self._ledger.queues, since))
        except (DatabaseLost, Error):
            return self._ledger.counts.dead

    async def _stop_feeding(self, feeder: Feeder, task: asyncio.Task[None]) -> None:
        feeder.stop()
        # A claim is heard to its end unless the database is away; its jobs go straight back.
        await asyncio.wait({task}, timeout=2.0)
        task.cancel()
        await asyncio.wait({task})
        await feeder.close()

    async def _finish_held(self) -> None:
        """Let what runs finish within the grace, then give the rest back."""
        self._nursery.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.grace_seconds):
                while self._unfinished() and not self._must_end_now:
                    self._wake.clear()
                    await self._wake.wait()
        if self._unfinished():
            # First the handler is gone, then its job is given back: nobody runs it twice at once.
            self._nursery.end()
        rest = self._unfinished()
        if rest:
            self._finisher.add([held.ended(RELEASED) for held in rest])
            self._log.warning("gave back what had not finished", jobs=len(rest))
        with contextlib.suppress(TimeoutError):
            # A database that is away must not hold up the end: the leases run out by themselves.
            async with asyncio.timeout(2.0 if self._must_end_now else 5.0):
                await self._finisher.is_clear.wait()

    def _unfinished(self) -> list[Held]:
        return [held for held in self._ledger.snapshot() if not held.is_finishing and not held.is_lost]


def _collect_seldom() -> None:
    """Have Python look for cycles less often: jobs leave none here, and each look passes all that is held."""
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def _turns(lease: LeaseKeeper) -> bool:
    return time.monotonic() - lease.last_turn_at < lease.beat_seconds + _LEASE_TURN_SECONDS
