"""Outcomes on their way into the database."""

from __future__ import annotations

import asyncio
import contextlib
from uuid import uuid4

from pgqueue.database import run
from pgqueue.model.outcome import Ending, Outcome
from pgqueue.runtime.children import Child
from pgqueue.runtime.finisher import Finisher
from pgqueue.runtime.ledger import Ledger, Pool
from pgqueue.runtime.link import Link, Outage
from pgqueue.runtime.log import Log
from pgqueue.sql import attempts, presence
from tests.process import jobs
from tests.process.support import Queue


class Silent:
    """Who hears nothing of a child that says nothing."""


def test_a_text_that_cannot_be_encoded_costs_its_own_outcome_the_text_and_no_other_anything(
    dsn: str,
) -> None:
    queue = Queue(dsn)
    run(queue.connection, presence.register_tasks(jobs.app.registry.registrations()))
    odd, fine = queue.insert("fail", max_attempts=1), queue.insert("fail", max_attempts=1)
    worker_id = str(uuid4())
    rows = run(queue.connection, attempts.claim("default", worker_id, 10, 60.0))
    errors = {odd: "half a pair \ud800", fine: "no luck"}

    async def finish() -> None:
        log = Log("test")
        pool = Pool(4, ["default"])
        ledger = Ledger([pool])
        taken, _ = ledger.take(rows, "default", pool, Child(0, [4], Silent()), 0.0)  # type: ignore[arg-type]
        link = Link(queue.dsn, "pgqueue", "finish", Outage(log))
        finisher = Finisher(
            link=link,
            ledger=ledger,
            worker_id=worker_id,
            unknown_task_grace_seconds=0.0,
            on_retry=lambda _seconds: None,
            on_room=lambda: None,
            log=log,
        )
        finisher.note_progress(taken[0], '{"message": "\ud800"}')
        finisher.add([held.ended(Outcome(Ending.FAILED, errors[held.row.job_id])) for held in taken])
        running = asyncio.create_task(finisher.run())
        waiting = asyncio.create_task(finisher.is_clear.wait())
        await asyncio.wait({running, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await link.close()

    asyncio.run(finish())

    with contextlib.closing(queue):
        reasons = dict(queue.all("SELECT id, reason FROM pgqueue.dead_jobs"))
        assert reasons == {odd: "the error's text could not be stored", fine: "no luck"}
