"""Firing schedules: a few workers look, and of all of them one fires each tick.

There is no leader, and nothing is held while anybody computes: whoever finds an entry due plans
with the database's time and fires by compare-and-set. So a worker that freezes, dies or has a
wrong clock stops no schedule and doubles no tick.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgqueue.database import Error, redact
from pgqueue.errors import ConfigurationError
from pgqueue.model.schedule import INSTALL_HINT, Cron, Plan, has_cron, plan
from pgqueue.runtime.link import DatabaseBusy, DatabaseLost, Link
from pgqueue.runtime.log import Log
from pgqueue.sql import schedules
from pgqueue.sql.schedules import DueSchedule, Look

# How soon a change made by somebody else is noticed; what is known to come due is not waited for so long.
_LOOK_SECONDS = 4.5
_LOOK_SECONDS_WITHOUT_ANY = 11.0
# Workers that wait for the same tick: the first one fires it, the others look a little later in vain.
_SPREAD_SECONDS = 0.05
_REGISTER_SECONDS = 30.0
# Who has no place among those who look after everybody finds out so soon that it has got one.
_NOT_OURS_SECONDS = 1.0
_PRUNE_SECONDS = 3600.0
_PRUNE_ROWS = 5000
_BATCH = 100
# An entry that cannot be fired is put off, so that it does not keep the others from it.
_FIRST_PUT_OFF_SECONDS = 5.0
_LONGEST_PUT_OFF_SECONDS = 300.0
_LOST_SECONDS = 1.0

_NOT_DECLARED = "schedule not declared"
_NOT_FIRED = "schedule not fired, trying again"
_NO_LOOK = "cannot look at the schedules, trying again"


@dataclass(frozen=True, slots=True)
class _PutOff:
    seconds: float
    until: float  # monotonic


class Scheduler:
    """Declares the application's schedules and fires what is due, its own and everybody's."""

    def __init__(
        self,
        *,
        link: Link,
        app: str,
        definitions: Sequence[Mapping[str, Any]],
        keep_seconds: float,
        is_maintainer: Callable[[], bool],
        log: Log,
    ) -> None:
        self._link = link
        self._is_maintainer = is_maintainer
        # One name for the application, however its App is named on the command line.
        self._app = app if ":" in app else f"{app}:app"
        self._definitions = definitions
        self._keep_seconds = keep_seconds
        self._log = log
        self._put_off: dict[str, _PutOff] = {}
        self._said: dict[tuple[str, str], str] = {}
        self._has_registered = False
        self._register_at = 0.0
        self._prune_at = time.monotonic() + _PRUNE_SECONDS * random.random()

    async def run(self) -> None:
        """Look, fire and sleep until cancelled."""
        while True:
            try:
                pause = await self._round()
            except DatabaseBusy:
                pause = random.uniform(0.5, 1.5)
            except DatabaseLost:
                pause = 0.0  # a pause has been made
            except Error as error:
                self._say_once("", _NO_LOOK, _reason(error))
                pause = _LOOK_SECONDS_WITHOUT_ANY
            if pause is None:
                # A part that ends would end the worker.
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(pause)

    async def _round(self) -> float | None:
        """Do what there is to do and give the seconds to sleep; None: no expression can be read here."""
        await self._register()
        if not self._is_maintainer():
            return _NOT_OURS_SECONDS
        asked_at = time.monotonic()
        look = await self._link.run(schedules.look(self._names_put_off(asked_at), _BATCH))
        if look.has_schedules and not has_cron():
            self._log.warning(f"this worker fires no schedules, it lacks a package: {INSTALL_HINT}")
            return None
        # In seconds from the look on.
        due_in = [await self._fire(entry, look) for entry in look.due]
        if look.next_in_seconds is not None:
            due_in.append(look.next_in_seconds)
        if len(look.due) == _BATCH:
            due_in.append(0.0)
        self._put_off = {name: one for name, one in self._put_off.items() if one.until > asked_at}
        due_in += [one.until - asked_at for one in self._put_off.values()]
        if look.has_schedules:
            await self._prune()
        longest = _LOOK_SECONDS if look.has_schedules else _LOOK_SECONDS_WITHOUT_ANY
        left = min(due_in, default=longest) - (time.monotonic() - asked_at)
        return max(min(left, longest * random.uniform(0.95, 1.1)), 0.0) + random.uniform(0, _SPREAD_SECONDS)

    # What the application declares.

    async def _register(self) -> None:
        """Declare our schedules, and say again and again that they stand."""
        if not self._definitions or time.monotonic() < self._register_at:
            return
        statement = schedules.register(self._definitions, self._app, is_start=not self._has_registered)
        outcomes = await self._link.run(statement)
        self._has_registered = True
        self._register_at = time.monotonic() + _REGISTER_SECONDS * random.uniform(0.9, 1.0)
        for name, outcome in outcomes:
            match outcome:
                case "added" | "changed":
                    self._log.info("schedule declared", schedule=name, outcome=outcome)
                case "runtime":
                    self._say_once(name, _NOT_DECLARED, "one made at run time has its name and stays")
                case "other":
                    self._say_once(name, _NOT_DECLARED, "another live worker declares it otherwise")

    # Firing.

    async def _fire(self, entry: DueSchedule, look: Look) -> float:
        """Fire an entry; gives when it is due again."""
        try:
            cron = Cron(entry.cron, entry.timezone)
            # Counting what was missed in a long absence takes a second, which the loop has not got.
            planned = await asyncio.to_thread(
                plan, cron, entry.catch_up, entry.catch_up_limit, entry.next_tick, look.now
            )
            answer = await self._link.run(
                schedules.fire(entry, planned.ticks, planned.skipped, planned.next_tick)
            )
        except ConfigurationError as error:
            return self._put_off_entry(entry, str(error))
        except (DatabaseBusy, Error) as error:
            return self._put_off_entry(entry, _reason(error))
        self._put_off.pop(entry.name, None)
        self._said.pop((_NOT_FIRED, entry.name), None)
        seconds = (planned.next_tick - look.now).total_seconds()
        if answer == "lost":
            # Somebody else is at it, unless that one dies now.
            return min(seconds, _LOST_SECONDS)
        self._say_fired(entry, planned)
        return seconds

    def _say_fired(self, entry: DueSchedule, planned: Plan) -> None:
        if planned.ticks:
            self._log.info(
                "schedule fired",
                schedule=entry.name,
                tick=planned.ticks[-1].isoformat(),
                ticks=len(planned.ticks),
                next_tick=planned.next_tick.isoformat(),
            )
        if planned.skipped:
            self._log.warning(
                "missed ticks skipped",
                schedule=entry.name,
                ticks=planned.skipped,
                are_all=planned.is_counted,
                catch_up=entry.catch_up,
            )

    def _put_off_entry(self, entry: DueSchedule, reason: str) -> float:
        before = self._put_off.get(entry.name)
        seconds = min(before.seconds * 2, _LONGEST_PUT_OFF_SECONDS) if before else _FIRST_PUT_OFF_SECONDS
        seconds_ahead = seconds * random.uniform(0.9, 1.1)
        self._put_off[entry.name] = _PutOff(seconds, time.monotonic() + seconds_ahead)
        self._say_once(entry.name, _NOT_FIRED, reason)
        return seconds_ahead

    def _names_put_off(self, now: float) -> list[str]:
        return [name for name, one in self._put_off.items() if one.until > now]

    def _say_once(self, name: str, event: str, reason: str) -> None:
        # Until something is mended there is nothing new to say.
        if self._said.get((event, name)) != reason:
            self._said[event, name] = reason
            self._log.warning(event, schedule=name or None, reason=reason)

    async def _prune(self) -> None:
        """Forget what fired long ago."""
        if time.monotonic() < self._prune_at:
            return
        pruned = await self._link.run(schedules.prune(self._keep_seconds, _PRUNE_ROWS))
        if pruned < _PRUNE_ROWS:
            self._prune_at = time.monotonic() + _PRUNE_SECONDS * random.uniform(0.9, 1.1)


def _reason(error: BaseException) -> str:
    return redact(str(error)).partition("\n")[0]
