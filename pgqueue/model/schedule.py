"""Schedules: when a cron expression ticks, and what becomes of the ticks that nobody was there for.

cronsim reads the expressions and finds the local times that match. Which instants those are is
decided here, because its own answer loses or doubles some when clocks are changed: it knows the
rule below for five fields only, can give a time before the one it was asked for, and loses two
hours where clocks change by half an hour.

The rule is that of Debian's cron. An expression whose minute and hour are both given as numbers
means local times: each comes once a day. One that the change of clocks leaves out comes when the
clocks have been changed, one that it repeats comes the first time. An expression whose minute or
hour begins with `*` means intervals: it goes by the time that really passes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo, available_timezones

from pgqueue.errors import ConfigurationError, InvalidArguments, InvalidJob
from pgqueue.model.encoding import checked_text
from pgqueue.model.job import NewJob
from pgqueue.model.options import JobOptions
from pgqueue.model.task import TaskDefinition, unregistered_job

CatchUp = Literal["latest", "all", "skip"]
MakeJob = Callable[[Mapping[str, Any], JobOptions], NewJob]

DEFAULT_CATCH_UP_LIMIT = 100
MAX_CATCH_UP_LIMIT = 1000
MAX_TEXT_BYTES = 255
INSTALL_HINT = "pip install 'pgqueue-jobs[cron]'"

# A worker looks every few seconds, or every ten while there is nothing: what it finds no later than
# this was not missed.
GRACE = timedelta(seconds=15)
# Of the ticks missed in a long absence so many are counted, in about a second.
MAX_COUNTED = 100_000

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_FIELDS = {
    "second": "0-59",
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31, L or LW",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT, 5L, MON#1",
}

# No change of clocks repeats more.
_LONGEST_REPEAT = timedelta(hours=3)
# Any year will do to see whether an expression comes at all: it says nothing of years.
_SOME_TIME = datetime(2000, 1, 1)  # noqa: DTZ001  local times are what cronsim counts in
# Links to zones, or zones with leap seconds, which PostgreSQL's clock does not have.
_NO_ZONES = re.compile(r"(?:posix|right)/|localtime$|posixrules$")


def has_cron() -> bool:
    """Say whether what reads cron expressions is installed."""
    try:
        import cronsim  # noqa: F401
    except ImportError:
        return False
    return True


class Cron:
    """A cron expression in a time zone: the instants when it ticks.

    Five fields, minute hour day month weekday, or six with the second first, or an alias. If both
    days are given, either of them will do, unless one begins with `*`.
    """

    __slots__ = ("_fields", "_is_local", "_zone", "text", "timezone")

    def __init__(self, text: str, timezone: str = "UTC") -> None:
        """Read an expression.

        Raises:
            ConfigurationError: it cannot be read or never comes, there is no such time zone, or
                cronsim is not installed.
        """
        try:
            self.text = " ".join(checked_text("cron", text, MAX_TEXT_BYTES).split())
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        self._fields = _checked_fields(self.text)
        self._zone = _zone(timezone)
        self.timezone = timezone
        minute, hour = self._fields.split()[-5:-3]
        self._is_local = not minute.startswith("*") and not hour.startswith("*")

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Give the ticks after an instant, in UTC, one after the other."""
        found = self._local_times(instant) if self._is_local else self._intervals(instant)
        last = instant
        for tick in found:
            if tick > last:
                last = tick
                yield tick

    def next_after(self, instant: datetime) -> datetime:
        """Give the first tick after an instant, in UTC.

        Raises:
            ConfigurationError: there is none within fifty years.
        """
        tick = next(self.after(instant), None)
        if tick is None:
            raise ConfigurationError(f"cron {self.text!r} does not come again within fifty years")
        return tick

    def local(self, instant: datetime) -> datetime:
        """Give an instant as the clocks of the time zone show it."""
        return instant.astimezone(self._zone)

    def _local_times(self, instant: datetime) -> Iterator[datetime]:
        for local in _matches(self._fields, instant.astimezone(self._zone)):
            first, second = self._instants(local)
            if second < first:  # left out by the change of clocks
                local = local.replace(second=0)  # noqa: PLW2901
                while second < first:
                    local += timedelta(minutes=1)  # noqa: PLW2901
                    first, second = self._instants(local)
            yield first

    def _intervals(self, instant: datetime) -> Iterator[datetime]:
        start = instant.astimezone(self._zone)
        # Clocks that go back within reach show once more what lies behind us now.
        back = _offset(start) - _offset((instant + _LONGEST_REPEAT).astimezone(self._zone))
        repeated: deque[datetime] = deque()
        for local in _matches(self._fields, start - max(back, timedelta(0))):
            first, second = self._instants(local)
            if second < first:  # clocks never show it
                continue
            while repeated and repeated[0] < first:
                yield repeated.popleft()
            yield first
            if second > first:
                repeated.append(second)
        yield from repeated

    def _instants(self, local: datetime) -> tuple[datetime, datetime]:
        """Give the instants of a local time: equal, or the second one later if clocks show it twice.

        The second one is earlier if they never do (PEP 495).
        """
        return (
            local.replace(tzinfo=self._zone).astimezone(UTC),
            local.replace(tzinfo=self._zone, fold=1).astimezone(UTC),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of an entry that is due: ticks to fire, how many to skip, and when it is due again.

    Not `is_counted`: there were more than were counted, and `skipped` is too low.
    """

    ticks: list[datetime]
    skipped: int
    next_tick: datetime
    is_counted: bool = True


def plan(cron: Cron, catch_up: str, limit: int, next_tick: datetime | None, now: datetime) -> Plan:
    """Decide what becomes of the ticks from `next_tick` to now; the database's now, as ticks are its.

    `latest` fires the last one, `all` the last `limit` ones, `skip` the last one unless it is older
    than a worker's looks explain. A new entry, without next_tick, counts from now.

    Raises:
        ConfigurationError: the expression does not come again.
    """
    if next_tick is None:
        return Plan([], 0, cron.next_after(now))
    due = deque([next_tick], maxlen=limit)
    counted = 1
    following = next_tick
    for following in cron.after(next_tick):
        if following > now or counted == MAX_COUNTED:
            break
        due.append(following)
        counted += 1
    is_counted = following > now
    if not is_counted:
        due = _latest(cron, limit, next_tick, due[-1], now)
        following = cron.next_after(now)
    match catch_up:
        case "all":
            ticks = list(due)
        case "skip" if now - due[-1] > GRACE:
            ticks = []
        case _:
            ticks = [due[-1]]
    return Plan(ticks, counted - len(ticks), following, is_counted)


def _latest(cron: Cron, limit: int, first: datetime, last: datetime, now: datetime) -> deque[datetime]:
    """Give the last ticks up to now without going through all of them; it ticked so often up to `last`."""
    span = (last - first) * limit / MAX_COUNTED
    while True:
        ahead = cron.after(max(now - span, first))
        found = deque(takewhile(lambda tick: tick <= now, ahead), maxlen=limit)
        if len(found) == limit or now - span <= first:
            return found
        span *= 2


# Declaring.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDefinition:
    """A schedule as declared, everything checked. `args` is the JSON text of an object.

    `queue` and `priority` None: those of the task.
    """

    name: str
    cron: str
    timezone: str
    task: str
    args: str
    queue: str | None
    priority: int | None
    catch_up: CatchUp
    catch_up_limit: int

    def registration(self) -> dict[str, Any]:
        """Give the definition as the database keeps it."""
        return {name: getattr(self, name) for name in self.__slots__}


def define(
    cron: str,
    task: str,
    make_job: MakeJob,
    *,
    name: str | None = None,
    timezone: str = "UTC",
    args: Mapping[str, Any] | None = None,
    queue: str | None = None,
    priority: int | None = None,
    catch_up: CatchUp = "latest",
    catch_up_limit: int = DEFAULT_CATCH_UP_LIMIT,
) -> ScheduleDefinition:
    """Make the definition of a schedule; its name is the task's unless another one is given.

    `make_job` makes the job of a tick: what it refuses is refused now.

    Raises:
        ConfigurationError: a value makes no sense, or the task could not take these arguments.
    """
    try:
        name = checked_text("the schedule's name", task if name is None else name, MAX_TEXT_BYTES)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    try:
        known = Cron(cron, timezone)
        _check_catch_up(catch_up, catch_up_limit)
        job = make_job({} if args is None else args, JobOptions(queue=queue, priority=priority))
    except (ConfigurationError, InvalidJob) as error:
        raise ConfigurationError(f"schedule {name!r}: {error}") from None
    return ScheduleDefinition(
        name=name,
        cron=known.text,
        timezone=timezone,
        task=task,
        args=job.args,
        queue=queue,
        priority=priority,
        catch_up=catch_up,
        catch_up_limit=catch_up_limit,
    )


def job_maker(definition: TaskDefinition) -> MakeJob:
    """Give what makes the job of a tick where the task's code is at hand."""
    return lambda args, options: definition.new_job((), _named(definition.name, args), options)


def far_job_maker(task: str, args_schema: Mapping[str, Any] | None) -> MakeJob:
    """Give what makes the job of a tick where only the task's name and registered schema are known."""

    def make(args: Mapping[str, Any], options: JobOptions) -> NewJob:
        job = unregistered_job(task, args, options)
        _check_names(task, args_schema or {}, args)
        return job

    return make


class ScheduleRegistry:
    """The schedules that an application declares."""

    def __init__(self) -> None:
        self._schedules: dict[str, ScheduleDefinition] = {}
        self._waiting: list[tuple[Any, Callable[[TaskDefinition], ScheduleDefinition]]] = []

    def add(self, definition: ScheduleDefinition) -> None:
        """Take a definition in.

        Raises:
            ConfigurationError: another one has this name.
        """
        other = self._schedules.get(definition.name)
        if other is not None:
            raise ConfigurationError(
                f"schedule {definition.name!r} is declared twice, at {other.cron!r} for {other.task!r} "
                f"and at {definition.cron!r} for {definition.task!r}; give one of them another name: "
                "@app.schedule(..., name=...)"
            )
        self._schedules[definition.name] = definition

    def await_task(self, function: Any, make: Callable[[TaskDefinition], ScheduleDefinition]) -> None:
        """Keep a schedule of a function that is to become a task."""
        self._waiting.append((function, make))

    def adopt(self, definition: TaskDefinition) -> None:
        """Take in the schedules of a function that has become a task."""
        waiting, self._waiting = self._waiting, []
        for function, make in waiting:
            if function is definition.function:
                self.add(make(definition))
            else:
                self._waiting.append((function, make))

    def __iter__(self) -> Iterator[ScheduleDefinition]:
        return iter(self._schedules.values())

    def __len__(self) -> int:
        return len(self._schedules)

    def registrations(self) -> list[dict[str, Any]]:
        """Give all definitions as the database keeps them.

        Raises:
            ConfigurationError: one is declared for what has not become a task.
        """
        for function, _ in self._waiting:
            raise ConfigurationError(
                f"@app.schedule stands at {getattr(function, '__qualname__', repr(function))!r}, which is no "
                "task; put @app.task() directly above or below it"
            )
        return [self._schedules[name].registration() for name in sorted(self._schedules)]


# Inner parts.


def _matches(fields: str, after: datetime) -> Iterator[datetime]:
    """Give the local times after this one that match, as clocks without any change would show them."""
    from cronsim import CronSim

    return CronSim(fields, after.replace(tzinfo=None, fold=0))


def _offset(local: datetime) -> timedelta:
    return local.utcoffset() or timedelta(0)


def _checked_fields(text: str) -> str:
    """Give the fields of an expression that can be read and comes at all."""
    if not has_cron():
        raise ConfigurationError(f"schedules need the package cronsim: {INSTALL_HINT}")
    fields = text
    if text.startswith("@"):
        if text.lower() not in ALIASES:
            raise ConfigurationError(f"cron {text!r} is unknown; there are {', '.join(ALIASES)}")
        fields = ALIASES[text.lower()]
    reason = _refused(fields)
    if reason == "Bad day-of-month" and _refused(_without_month(fields)) is None:
        reason = "never"
    if reason is None and next(_matches(fields, _SOME_TIME), None) is None:
        reason = "never"
    if reason is not None:
        raise ConfigurationError(f"cron {text!r} {_explained(fields, reason)}")
    return fields


def _refused(fields: str) -> str | None:
    from cronsim import CronSim, CronSimError

    try:
        CronSim(fields, _SOME_TIME)
    except CronSimError as error:
        return str(error)
    return None


def _without_month(fields: str) -> str:
    parts = fields.split()
    return " ".join([*parts[:-2], "*", parts[-1]])


def _explained(fields: str, reason: str) -> str:
    parts = fields.split()
    if reason == "never":
        return "never comes: there is no such day"
    if len(parts) not in (5, 6):
        return (
            f"has {len(parts)} field{'s' * (len(parts) != 1)}; write five, minute hour day month weekday, or "
            "six with the second first"
        )
    name = reason.removeprefix("Bad ")
    names = list(_FIELDS)[-len(parts) :]
    if name not in names:
        return f"cannot be read: {reason}"
    given = parts[names.index(name)]
    return f"has {given!r:.60} for the {name}, which takes {_FIELDS[name]}, lists, ranges and steps"


def _zone(timezone: str) -> ZoneInfo:
    try:
        name = checked_text("timezone", timezone, MAX_TEXT_BYTES)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    try:
        if not _NO_ZONES.match(name):
            return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        pass
    zones = sorted(zone for zone in available_timezones() if not _NO_ZONES.match(zone))
    if not zones:
        raise ConfigurationError(f"this machine has no time zones; install them: {INSTALL_HINT}") from None
    near = _near_zones(name, zones)
    raise ConfigurationError(
        f"there is no time zone {name!r}"
        + (f"; did you mean {near[0]!r}?" if near else "; write it like Europe/Berlin")
    ) from None


def _near_zones(name: str, zones: Sequence[str]) -> list[str]:
    """Give zones that may be meant: the name in other letters, a city alone, a slip."""
    city = name.casefold().replace(" ", "_").rpartition("/")[2]
    cities = [zone for zone in zones if zone.casefold().rpartition("/")[2] == city]
    return cities or get_close_matches(name, zones, n=1, cutoff=0.7)


def _check_catch_up(catch_up: Any, limit: Any) -> None:
    if catch_up not in get_args(CatchUp):
        raise ConfigurationError(
            f"catch_up must be one of {', '.join(get_args(CatchUp))}, not {catch_up!r:.60}"
        )
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_CATCH_UP_LIMIT:
        raise ConfigurationError(
            f"catch_up_limit must be between 1 and {MAX_CATCH_UP_LIMIT}, not {limit!r:.60}"
        )


def _named(task: str, args: Any) -> Mapping[str, Any]:
    if not isinstance(args, Mapping):
        raise InvalidArguments(task, f"args is a {type(args).__name__}, not a dict by name")
    return args


def _check_names(task: str, schema: Mapping[str, Any], args: Mapping[str, Any]) -> None:
    known = schema.get("properties", {})
    for name in args:
        if name not in known and not schema.get("additionalProperties", True):
            raise InvalidArguments(
                task, f"takes no argument {name!r} (it takes: {', '.join(known) or 'none'})"
            )
    missing = [name for name in schema.get("required", ()) if name not in args]
    if missing:
        raise InvalidArguments(
            task, f"misses the argument{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
        )
