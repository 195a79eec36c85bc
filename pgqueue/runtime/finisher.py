"""Ending attempts in batches, and believing only what the database says of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pgqueue.database import Error, errors, redact
from pgqueue.model.outcome import Ending, Outcome
from pgqueue.runtime.ledger import Held, Ledger
from pgqueue.runtime.link import DatabaseBusy, DatabaseLost, Link
from pgqueue.runtime.log import Log, without_arguments
from pgqueue.sql import Statement, attempts, breakers, once

T = TypeVar("T")

FLUSH_JOBS = 500
FLUSH_SECONDS = 0.005

# What could not be written is tried again after so long, and at most so often in all.
_AGAIN_SECONDS = 1.0
_LATE_PAUSE_SECONDS = 0.05

# A job whose task this worker does not know comes back after so long, in case another worker does.
UNKNOWN_TASK_SECONDS = 15.0


Batch = list[Held]


class Finisher:
    """Writes outcomes down. What does not come back was not ours any more: nothing is written for it."""

    def __init__(
        self,
        *,
        link: Link,
        ledger: Ledger,
        worker_id: str,
        unknown_task_grace_seconds: float,
        on_retry: Callable[[float], None],
        on_room: Callable[[], None],
        log: Log,
    ) -> None:
        self._link = link
        self._ledger = ledger
        self._worker_id = worker_id
        self._unknown_task_grace_seconds = unknown_task_grace_seconds
        self._on_retry = on_retry
        self._on_room = on_room
        self._log = log
        self._pending: Batch = []
        self._late: deque[Held] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._progress: dict[int, tuple[Held, str]] = {}
        self._wake = asyncio.Event()
        self.is_clear = asyncio.Event()
        self.is_clear.set()
        # What the statement under way is about.
        self._under_way: Batch = []

    def is_writing(self, held: Held) -> bool:
        """Say whether an attempt's end is just being written, or was and we have not heard of it."""
        return any(one is held for one in self._under_way)

    def add(self, ended: Batch) -> None:
        """Take over attempts that know how they ended; their slots are free from now on."""
        self._ledger.free(*ended)
        for held in ended:
            if held.ticket is not None:
                held.ticket.note(held.outcome.ending)
        self._pending += ended
        self.is_clear.clear()
        self._wake.set()

    def note_progress(self, held: Held, progress: str) -> None:
        """Keep what a handler said of how far it is; the next flush writes it."""
        self._progress[held.serial] = (held, progress)
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled; during an outage outcomes wait, their leases kept by the heartbeat."""
        while True:
            await self._wake.wait()
            is_busy = any(pool.in_flight for pool in self._ledger.pools)
            if is_busy and len(self._pending) < FLUSH_JOBS:
                await asyncio.sleep(FLUSH_SECONDS)
            self._wake.clear()
            batch, self._pending = self._pending, []
            if self._progress:
                await self._write_progress()
            await self._write(batch)
            await self._write_late()
            if not self._pending and not self._late:
                self.is_clear.set()

    async def _write_progress(self) -> None:
        said, self._progress = list(self._progress.values()), {}
        try:
            await self._link.run(
                attempts.note_progress(
                    [held.row.job_id for held, _ in said],
                    [held.row.token for held, _ in said],
                    [progress for _, progress in said],
                )
            )
        except (DatabaseLost, Error, UnicodeError) as error:
            # The next one will do: nothing depends on it.
            self._log.debug("progress not kept", error=str(error))

    async def _write(self, batch: Batch) -> None:
        groups: dict[str, Batch] = {}
        for item in batch:
            groups.setdefault(self._kind(item), []).append(item)
        for kind, items in groups.items():
            for start in range(0, len(items), FLUSH_JOBS):
                await self._write_group(kind, items[start : start + FLUSH_JOBS])

    def _put_off(self, items: Batch, reason: str) -> None:
        """Try these again in a while, and let nobody wait for them meanwhile; their leases are kept.

        A stranger holds their rows, or a person has to mend something.
        """
        for item in items:
            if not item.again_at:
                self._log.warning("outcome put off", **_fields(item), reason=reason)
            item.again_at = time.monotonic() + _AGAIN_SECONDS
        self._late += items

    async def _write_late(self) -> None:
        """Try one of those put off: each may take as long as a lock's patience."""
        count = len(self._late)
        if self._late and time.monotonic() >= self._late[0].again_at:
            item = self._late.popleft()
            await self._write_group(self._kind(item), [item])
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._late:
            is_written = len(self._late) < count
            pause = max(0.0 if is_written else _LATE_PAUSE_SECONDS, self._late[0].again_at - time.monotonic())
            self._alarm = asyncio.get_running_loop().call_later(pause, self._wake.set)

    def _kind(self, held: Held) -> str:
        outcome, ending = held.outcome, held.outcome.ending
        if ending is Ending.SUCCEEDED:
            return "complete" if held.row.idempotency_key is None else "complete_once"
        if held.is_crash:
            return f"crash {outcome.text}"
        if held.breaker:
            return f"park {held.breaker}"
        match ending:
            case Ending.SETTLED:
                return "settled"
            case Ending.SNOOZED:
                return f"snooze {outcome.text or ''}"
            case Ending.RELEASED:
                return f"release {outcome.text or ''}"
            case Ending.UNKNOWN_TASK if held.row.age_seconds < self._unknown_task_grace_seconds:
                # A rolling deploy: another worker may know it. No attempt is used up.
                return "release "
        return "fail"

    async def _write_group(self, kind: str, items: Batch) -> None:
        """Write one kind of outcome for some attempts, or put off those that cannot be written now."""
        if kind == "settled":
            self._confirm(items, dict.fromkeys((held.row.job_id for held in items), "settled"))
            return
        self._under_way = items
        try:
            await self._write_items(kind, items)
        finally:
            self._under_way = []

    async def _write_items(self, kind: str, items: Batch) -> None:
        has_made_partition = False
        while True:
            try:
                states = await self._link.run(_statement(kind, items))
                break
            except DatabaseBusy as busy:
                await self._write_less(kind, items, str(busy))
                return
            except DatabaseLost:
                for item in items:
                    item.may_have_landed = True
            except (Error, UnicodeError) as error:
                reason = redact(str(error)).partition("\n")[0]
                if isinstance(error, UnicodeError):  # the driver's, before anything was sent
                    await self._write_less(kind, items, reason, is_its_text=True)
                    return
                if not _is_missing_partition(error):
                    is_its_text = isinstance(error, (errors.DataError, errors.IntegrityError))
                    await self._write_less(kind, items, reason, is_its_text=is_its_text)
                    return
                # A day nobody made a partition for: make it and go on.
                if has_made_partition or not await self._make_partition():
                    self._put_off(items, reason)
                    return
                has_made_partition = True
        self._confirm(items, {**await self._landed(kind, items, states), **states})

    async def _landed(self, kind: str, items: Batch, states: dict[int, str]) -> dict[int, str]:
        """Of what did not come back, find what had ended under its token all the same.

        By a statement whose answer broke, or in the transaction of its effect.
        """
        missing = [held for held in items if held.row.job_id not in states]
        found: dict[int, str] = {}
        if unheard := [held for held in missing if held.may_have_landed]:
            what, _, reason = kind.partition(" ")
            written = "" if what == "park" else reason
            question = attempts.landed(
                *_names(unheard),
                [held.row.attempt for held in unheard],
                [held.row.age_seconds for held in unheard],
                [held.outcome.text if what == "fail" else written or None for held in unheard],
                self._worker_id,
                goes_on=not what.startswith("complete"),
            )
            try:
                landed = await self._insist(question)
                found.update(landed)
            except Error as error:
                # What a stranger wrote into a job's history, say: no reason to end the worker.
                self._cannot_tell(error)
        if unsettled := [held for held in missing if held.is_transactional]:
            found.update(dict.fromkeys(await self._settled(unsettled), "settled"))
        return found

    async def _insist(self, question: Statement[T]) -> T:
        """Ask until there is an answer."""
        while True:
            try:
                return await self._link.run(question)
            except DatabaseLost:
                continue

    async def _settled(self, held: Sequence[Held]) -> list[int]:
        """Give the jobs whose attempts have ended themselves, as far as can be found out."""
        try:
            return await self._insist(_settled(held))
        except Error as error:
            self._cannot_tell(error)
            return []

    def _cannot_tell(self, error: Error) -> None:
        self._log.error("cannot tell what was written", error=redact(str(error)).partition("\n")[0])

    async def settle_or_lose(self, held: Held, lose: Callable[[Held], None]) -> None:
        """Find out whether an attempt whose row is gone has ended itself; of that its child will tell."""
        is_settled = held.row.job_id in await self._settled([held])
        if not is_settled and held.serial in self._ledger.held and not (held.is_finishing or held.is_lost):
            lose(held)

    async def _make_partition(self) -> bool:
        try:
            await self._link.run(attempts.make_partitions(0))
        except DatabaseLost:
            return True
        except Error as error:
            self._log.error("history's partition cannot be made", error=redact(str(error)).partition("\n")[0])
            return False
        return True

    async def _write_less(self, kind: str, items: Batch, reason: str, *, is_its_text: bool = False) -> None:
        """Find the one outcome that cannot be written: put it off, or write it without its text."""
        if len(items) > 1:
            middle = len(items) // 2
            await self._write_group(kind, items[:middle])
            await self._write_group(kind, items[middle:])
            return
        item = items[0]
        if not is_its_text or item.outcome.note == _REFUSED:
            self._put_off(items, reason)
            return
        self._log.warning("outcome written without its text", **_fields(item), error=reason)
        ending = item.outcome.ending
        text = None if ending is Ending.SUCCEEDED else "the error's text could not be stored"
        item.outcome = Outcome(ending, text, item.outcome.seconds, _REFUSED)
        await self._write_group(self._kind(item), [item])

    def _confirm(self, items: Batch, states: dict[int, str]) -> None:
        counts, metrics = self._ledger.counts, self._ledger.metrics
        succeeded: Batch = []
        self._ledger.forget(*items)
        if self._ledger.is_backed_up:
            self._ledger.is_backed_up = False
            self._on_room()
        for held in items:
            if held.is_lost:  # and an answer for its job is about a later attempt
                continue
            state = states.get(held.row.job_id)
            outcome = held.outcome
            if state is None:
                self.lost(held, "its outcome came too late", outcome.ending)
                continue
            if outcome.ending is Ending.SUCCEEDED or state == "settled":
                succeeded.append(held)
                continue
            metrics.ended(held, state)
            if held.is_crash:
                counts.crashed += 1
                self._log.warning("job crashed", **_fields(held), state=state, reason=outcome.text)
                continue
            match outcome.ending:
                case Ending.RELEASED:
                    counts.released += 1
                    self._log.debug("job released", **_fields(held), state=state)
                case Ending.SNOOZED:
                    counts.snoozed += 1
                    self._log.info("job snoozed", **_fields(held), snooze_seconds=outcome.seconds)
                case Ending.UNKNOWN_TASK if state != "dead":
                    counts.released += 1
                    self._log.warning("job left for a worker that knows its task", **_fields(held))
                case _:
                    self._say_failed(held, state)
            if state in ("scheduled", "ready") and not held.breaker:
                self._on_retry(outcome.seconds or 0.0)
        counts.succeeded += len(succeeded)
        metrics.succeeded(succeeded)
        self._log.many(logging.INFO, "job succeeded", map(_success_fields, succeeded))

    def lost(self, held: Held, reason: str, ending: Ending | None = None) -> None:
        """Count and say that an attempt was not ours any more; nothing was written for it."""
        held.is_lost = True
        self._ledger.counts.lost += 1
        self._ledger.metrics.lost(held)
        row = held.row
        self._log.warning(
            "claim lost", job_id=row.job_id, task=row.task, attempt=row.attempt, ending=ending, reason=reason
        )

    def _say_failed(self, item: Held, state: str) -> None:
        counts = self._ledger.counts
        summary = without_arguments((item.outcome.text or "").partition("\n")[0], item.row.args)
        match state:
            case "dead":
                counts.dead += 1
                self._log.error("job dead", **_fields(item), error=summary)
            case "cancelled":
                counts.cancelled += 1
                self._log.info("job cancelled", **_fields(item), reason=summary)
            case _:
                counts.failed += 1
                self._log.warning("job failed, will retry", **_fields(item), error=summary)


_REFUSED = "what it returned could not be stored"


def _is_missing_partition(error: Error) -> bool:
    # The message would be in the server's language; a CHECK has a name.
    return isinstance(error, errors.CheckViolation) and error.diag.constraint_name is None


def _statement(kind: str, items: Batch) -> Statement[dict[int, str]]:
    ids, tokens = _names(items)
    what, _, reason = kind.partition(" ")
    outcomes = [item.outcome for item in items]
    match what:
        case "complete" | "complete_once":
            results, reasons = [one.text for one in outcomes], [one.note for one in outcomes]
            completed = (
                attempts.complete(ids, tokens, results, reasons)
                if what == "complete"
                else attempts.complete_once(ids, tokens, [item.key for item in items], results, reasons)
            )
            return Statement(completed.text, completed.params, _as_succeeded)
        case "crash":
            return attempts.crash(ids, tokens, reason)
        case "park":
            return breakers.park(ids, tokens, reason)
        case "release" | "snooze":
            delays = [
                UNKNOWN_TASK_SECONDS if outcome.ending is Ending.UNKNOWN_TASK else outcome.seconds
                for outcome in outcomes
            ]
            return attempts.release(ids, tokens, reason or None, delays, is_unsure=what == "release")
    return attempts.fail(
        ids,
        tokens,
        [outcome.text for outcome in outcomes],
        [outcome.seconds for outcome in outcomes],
        [outcome.ending in (Ending.DEAD, Ending.UNKNOWN_TASK) for outcome in outcomes],
        [outcome.ending is Ending.CANCELLED for outcome in outcomes],
        [outcome.is_unsure for outcome in outcomes],
    )


def _as_succeeded(found: Sequence[tuple[Any, ...]]) -> dict[int, str]:
    return {row[0]: "succeeded" for row in found}


def _names(attempts_held: Sequence[Held]) -> tuple[list[int], list[str]]:
    return [held.row.job_id for held in attempts_held], [held.row.token for held in attempts_held]


def _settled(transactional: Sequence[Held]) -> Statement[list[int]]:
    return once.settled(*_names(transactional), [held.key for held in transactional])


def _fields(item: Held) -> dict[str, Any]:
    row = item.row
    return {
        "job_id": row.job_id,
        "task": row.task,
        "queue": item.queue,
        "attempt": row.attempt,
        "seconds": round(item.seconds, 6),
    }


def _success_fields(item: Held) -> dict[str, Any]:
    fields = _fields(item)
    if item.outcome.note:
        fields["result"] = item.outcome.note
    return fields
