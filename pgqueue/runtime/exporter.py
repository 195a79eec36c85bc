"""The exporter: one fixed target that shows the whole queue's numbers, whichever workers come and go."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from pgqueue import __version__, migrate
from pgqueue.dsn import resolve
from pgqueue.errors import DatabaseUnreachable
from pgqueue.runtime.exposition import Exposition
from pgqueue.runtime.gauges import Gauges
from pgqueue.runtime.health import Health
from pgqueue.runtime.http import Server, pages
from pgqueue.runtime.link import Outage
from pgqueue.runtime.log import Log


class Exporter:
    """Reads the database every few seconds and serves what it read, until told to stop."""

    def __init__(
        self,
        *,
        dsn: str | None,
        schema: str,
        environment: Mapping[str, str],
        host: str,
        port: int,
        refresh_seconds: float,
    ) -> None:
        self._dsn = dsn
        self._schema = schema
        self._environment = environment
        self._host = host
        self._port = port
        self._refresh_seconds = refresh_seconds
        self._log = Log("pgqueue.exporter")

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. A database that is away is waited for, and told of.

        Raises:
            ConfigurationError: the address cannot be had.
            SchemaMismatch: the database's schema is not this version's.
        """
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        resolved = await asyncio.to_thread(resolve, self._dsn, self._environment, schema=self._schema)
        try:
            await asyncio.to_thread(migrate.check, resolved.dsn, self._schema)
        except DatabaseUnreachable as error:
            self._log.warning("database not there yet", error=str(error))
        outage, pulse, exposition = Outage(self._log), Health(), Exposition()
        gauges = Gauges(resolved.dsn, self._schema, outage, self._log, refresh_seconds=self._refresh_seconds)
        exposition.add_database(gauges, lambda: not outage.is_on)
        pulse.hindrances.append(
            lambda: [] if gauges.latest is not None else ["the queue's numbers cannot be read"]
        )
        server = Server(self._host, self._port, pages(exposition.render, pulse))
        self._log.info(
            "exporter started",
            host=self._host,
            port=server.port,
            database=resolved.origin,
            version=__version__,
        )
        told = asyncio.create_task(ending.wait())
        work = {asyncio.create_task(gauges.run()), asyncio.create_task(pulse.turn())}
        try:
            done, _ = await asyncio.wait({told, *work}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & work:
                task.result()  # neither ends by itself: let its error be heard
        finally:
            for task in (told, *work):
                task.cancel()
            await asyncio.gather(told, *work, return_exceptions=True)
            await asyncio.to_thread(server.close)
            self._log.info("exporter ended")
