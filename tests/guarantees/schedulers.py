"""A process full of real schedulers, some of which die between the insert of a tick's job and its commit.

`python -m tests.guarantees.schedulers COUNT SECONDS CRASH_SHARE SEED`, the database in PGQUEUE_DSN.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from typing import Any

from pgqueue.runtime.link import DatabaseLost, Link, Outage
from pgqueue.runtime.log import Log
from pgqueue.runtime.scheduler import Scheduler
from pgqueue.sql import Statement, load

FIRE = load("schedules")["fire"]


class DyingLink(Link):
    """A link whose process dies now and then, when its ticks are fired but not committed."""

    def __init__(self, dsn: str, outage: Outage, seen: Counter[str], crash_share: float) -> None:
        super().__init__(dsn, "pgqueue", "scheduler", outage)
        self._seen = seen
        self._crash_share = crash_share

    async def run(self, statement: Statement[Any]) -> Any:
        if statement.text != FIRE:
            return await super().run(statement)
        # Of each process the first one, so that it happens however short the run is.
        dies = not self._seen["died"] or random.random() < self._crash_share
        connection = await self.connect()
        await connection.set_autocommit(not dies)
        answer = await super().run(statement)
        if dies and answer == "fired":
            self._seen["died"] += 1
            await self.close()
            raise DatabaseLost
        await connection.rollback()
        await connection.set_autocommit(True)
        self._seen[answer] += 1
        return answer


async def main(count: int, seconds: float, crash_share: float, seed: int) -> None:
    log = Log("test")
    random.seed(seed)
    seen: Counter[str] = Counter()
    links = [DyingLink(os.environ["PGQUEUE_DSN"], Outage(log), seen, crash_share) for _ in range(count)]
    made = [
        Scheduler(
            link=link,
            app="test:app",
            definitions=[],
            keep_seconds=0,
            is_maintainer=lambda: True,
            log=log,
        )
        for link in links
    ]
    tasks = [asyncio.create_task(scheduler.run()) for scheduler in made]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for link in links:
        await link.close()
    broken = [repr(error) for error in ended if not isinstance(error, asyncio.CancelledError)]
    print(f"{seen['fired']} {seen['lost']} {seen['died']} {' '.join(broken)}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
