"""Everything a port tells about a worker: its metrics, perhaps the whole queue's, and its health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from pgqueue.database import redact
from pgqueue.model.settings import WorkerSettings
from pgqueue.runtime import health
from pgqueue.runtime.bell import Bell
from pgqueue.runtime.gauges import Gauges
from pgqueue.runtime.health import Health
from pgqueue.runtime.http import Server, pages
from pgqueue.runtime.ledger import Ledger
from pgqueue.runtime.link import Outage
from pgqueue.runtime.log import Log


class Monitor:
    """What serves a worker's port, from its first moment to its last. Without a port it does nothing."""

    def __init__(
        self,
        settings: WorkerSettings,
        ledger: Ledger,
        outage: Outage,
        log: Log,
        *,
        count_children: Callable[[], int],
        is_draining: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._outage = outage
        self._log = log
        self._count_children = count_children
        self._is_draining = is_draining
        self._server: Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._bell: Bell | None = None
        self._health = Health()

    def open(self) -> None:
        """Serve the port, if there is one.

        Raises:
            ConfigurationError: the address cannot be had.
        """
        settings = self._settings
        if settings.metrics_port is None:
            return
        # Prometheus's library is only for those who want it.
        from pgqueue.runtime.exposition import Exposition, WorkerNow

        def look() -> WorkerNow:
            slots, running = dict[str, int](), dict[str, int]()
            for pool in self._ledger.pools:
                slots |= dict.fromkeys(pool.queues, pool.slots)
                running |= dict.fromkeys(pool.queues, 0)
            for held in self._ledger.snapshot():
                running[held.queue] = running.get(held.queue, 0) + (not held.is_finishing)
            return WorkerNow(
                slots,
                running,
                self._count_children(),
                self._outage.errors,
                max(0, self._bell.sessions - 1) if self._bell else 0,
            )

        self._ledger.metrics.is_read = True
        self._exposition = Exposition()
        self._exposition.add_worker(self._ledger.metrics, look)
        pulse = self._health
        pulse.ailments.append(self._stuck)
        pulse.hindrances.append(self._hindrances)
        self._server = Server(
            settings.metrics_host, settings.metrics_port, pages(self._exposition.render, pulse)
        )
        self._start(pulse.turn())
        self._log.info("metrics served", host=settings.metrics_host, port=self._server.port)

    def watch(self, dsn: str, schema: str, outage: Outage, bell: Bell) -> None:
        """Work has begun: from now on it may be ready, and the database's numbers may be its part.

        `dsn` leads to sessions that keep what they are told, `outage` says whether there are any.
        """
        if self._server is None:
            return
        self._bell = bell
        gauges = Gauges(dsn, schema, outage, self._log, place=bell.place)
        self._exposition.add_database(gauges, lambda: not self._outage.is_on)
        # Behind a proxy that pools transactions no session keeps a place: there the exporter is for that.
        if bell.has_session:
            self._start(gauges.run())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    def _stuck(self) -> list[str]:
        return health.stuck(self._ledger.snapshot(), self._settings.kill_grace_seconds)

    def _hindrances(self) -> Iterator[str]:
        if self._is_draining():
            yield "it is draining"
        if self._bell is None:
            yield "it is starting"
            return
        if self._outage.is_on:
            yield "the database is away"
        elif not self._ledger.can_renew:
            yield "leases cannot be renewed"
        if not self._count_children():
            yield "no child process is up"

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._say_if_broken)

    def _say_if_broken(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._log.error("metrics failed", error=redact(repr(error)))
