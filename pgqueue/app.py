"""The front of pgqueue: an App holds tasks, and its tasks ask for jobs.

Thin on purpose: what a call means is decided in `model`, how it reaches the database in `client`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from pgqueue.client import DEFAULT_MAX_CONNECTIONS, DEFAULT_WAIT_SECONDS, AsyncClient, Client, result_of
from pgqueue.database import AsyncConnection, Connection
from pgqueue.errors import ConfigurationError
from pgqueue.locks import AsyncLock, Lock
from pgqueue.model.breaker import declaration
from pgqueue.model.context import JobContext
from pgqueue.model.job import JobState, NewJob, OnConflict, UniqueUntil
from pgqueue.model.limits import RateLimits, checked_name, rate_limit
from pgqueue.model.options import NO_OPTIONS, JobOption, JobOptions
from pgqueue.model.retry import Retry
from pgqueue.model.schedule import (
    DEFAULT_CATCH_UP_LIMIT,
    CatchUp,
    Cron,
    ScheduleDefinition,
    ScheduleRegistry,
    job_maker,
)
from pgqueue.model.schedule import define as define_schedule
from pgqueue.model.task import TaskDefinition, TaskRegistry, define, unregistered_job
from pgqueue.sql import SCHEMA_NAME
from pgqueue.sql.enqueue import Enqueued
from pgqueue.sql.results import Standing

C = ParamSpec("C")  # how the handler is called
P = ParamSpec("P")  # how its jobs are asked for: without what the worker injects
V = TypeVar("V")  # what calling it gives: a result, or a coroutine
R = TypeVar("R")  # what a job gives

S = TypeVar("S", bound=Callable[..., Any])  # a task, or a function that becomes one

AnyConnection = Connection[Any] | AsyncConnection[Any]


class TaskOption(TypedDict, total=False):
    """The keywords of `@app.task(...)`, for type checkers; `model.task.define` says what they mean."""

    name: str
    queue: str
    priority: int
    max_attempts: int
    timeout_seconds: float | None
    retry: Retry | None
    unrecoverable: Sequence[type[BaseException]]
    concurrency_key: str | None
    concurrency_limit: int
    unique_key: str | None
    unique_until: UniqueUntil
    on_conflict: OnConflict
    idempotency_key: str | None
    rate_key: str | None
    rate_limit: str | None
    rate_burst: int | None
    breaker: str | None
    idempotent: bool
    reconcile: Callable[..., Any] | None
    takeover_seconds: float | None
    store_result: bool


class App:
    """An application's tasks and its way to the queue.

    The DSN is looked for at the first use: the one given here, PGQUEUE_DSN, DATABASE_URL, the
    variables of libpq, the embedded server. The schema is PGQUEUE_SCHEMA's or `pgqueue` unless it
    is given. Safe to share between threads and event loops, and across a fork.

    Raises:
        ConfigurationError: the schema's name is not a plain one.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str | None = None,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self.dsn = dsn
        self.schema = schema or os.environ.get("PGQUEUE_SCHEMA") or "pgqueue"
        if not SCHEMA_NAME.fullmatch(self.schema):
            raise ConfigurationError(
                f"{self.schema!r} is not a schema's name: up to 48 small letters, digits and _"
            )
        self.registry = TaskRegistry()
        self._breakers: dict[str, dict[str, Any]] = {}
        self._rate_limits = RateLimits()
        self.schedules = ScheduleRegistry()
        self.client = Client(dsn, schema=self.schema, max_connections=max_connections)
        self.aclient = AsyncClient(dsn, schema=self.schema, max_connections=max_connections)

    # Declaring tasks.

    @overload
    def task(
        self, function: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /
    ) -> Task[Concatenate[JobContext, P], P, Coroutine[Any, Any, R], R]: ...
    @overload
    def task(
        self, function: Callable[Concatenate[JobContext, P], R], /
    ) -> Task[Concatenate[JobContext, P], P, R, R]: ...
    @overload
    def task(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Task[P, P, Coroutine[Any, Any, R], R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, P, R, R]: ...
    @overload
    def task(
        self, /, *, transactional: Literal[True], **options: Unpack[TaskOption]
    ) -> TransactionalTaskDecorator: ...
    @overload
    def task(
        self, /, *, transactional: Literal[False] = False, **options: Unpack[TaskOption]
    ) -> TaskDecorator: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        transactional: bool = False,
        **options: Unpack[TaskOption],
    ) -> Any:
        """Declare a function, sync or async, as a task: `@app.task` or `@app.task(queue="mail", …)`.

        The function can still be called as before. A parameter annotated with `JobContext` is
        filled in by the worker, and for `transactional=True` one annotated with
        `psycopg.Connection` (`AsyncConnection` if async); a type checker knows that `enqueue` does
        not take the context if it comes first.

        `timeout_seconds` None means no limit. `retry` is a number of seconds, a list of them, a
        policy of `pgqueue.model.retry`, or a function of attempt and error. `unrecoverable` lists
        exceptions that no retry mends. Keys are templates over the arguments: `"charge:{order_id}"`.
        `breaker` names what the task depends on: its jobs wait while that is down; see `breaker()`.

        Raises:
            ConfigurationError: a value makes no sense, the function cannot be a handler, or
                another task has its name.
        """
        if function is None:
            return lambda handler: self._declared(handler, transactional, options)
        return self._declared(function, transactional, options)

    def _declared(self, function: Any, transactional: bool, options: TaskOption) -> Task[..., ..., Any, Any]:
        definition = define(function, transactional=transactional, **options)
        self.registry.add(definition)
        if definition.rate_limit is not None:
            self._rate_limits.add(definition.rate_limit_name, definition.rate_limit)
        self.schedules.adopt(definition)
        return Task(self, definition)

    def schedule(
        self,
        cron: str,
        /,
        *,
        timezone: str = "UTC",
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        queue: str | None = None,
        priority: int | None = None,
        catch_up: CatchUp = "latest",
        catch_up_limit: int = DEFAULT_CATCH_UP_LIMIT,
    ) -> Callable[[S], S]:
        """Let a task run by the clock: `@app.schedule("*/5 * * * *")` directly above or below `@app.task`.

        `cron` has five fields, minute hour day month weekday, or six with the second first; or is
        `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`. `timezone` is an IANA name, `args` are
        the handler's arguments, the name is the task's unless another one is given; queue and
        priority are the task's, too. Of the ticks that no worker was there for, `catch_up` fires
        the `latest`, `all` (the last `catch_up_limit`) or none: `skip`.

        Raises:
            ConfigurationError: the expression cannot be read or never comes, there is no such time
                zone, the task does not take these arguments, or another schedule has its name.
        """
        Cron(cron, timezone)

        def make(definition: TaskDefinition) -> ScheduleDefinition:
            return define_schedule(
                cron,
                definition.name,
                job_maker(definition),
                name=name,
                timezone=timezone,
                args=args,
                queue=queue,
                priority=priority,
                catch_up=catch_up,
                catch_up_limit=catch_up_limit,
            )

        def declare(task: S) -> S:
            declared: object = task
            if not isinstance(declared, BoundTask):
                self.schedules.await_task(declared, make)
            elif isinstance(declared, Task) and self.registry.get(declared.name) is declared.definition:
                self.schedules.add(make(declared.definition))
            else:
                raise ConfigurationError(
                    f"@app.schedule takes a task of this App as it was declared, not {task!r:.100}"
                )
            return task

        return declare

    def breaker(
        self,
        name: str,
        *,
        failure_ratio: float | None = None,
        min_calls: int | None = None,
        max_failures: int | None = None,
        window_seconds: float | None = None,
        open_seconds: float | None = None,
        max_open_seconds: float | None = None,
        probe_seconds: float | None = None,
    ) -> str:
        """Say when a circuit breaker opens and for how long, and give its name, for `@app.task(breaker=…)`.

        Optional: a name that no one declares has the defaults of `pgqueue.model.breaker.BreakerSettings`,
        which also says what each setting means. What an operator set with `pgqueue breakers set` stays.

        Raises:
            ConfigurationError: a value makes no sense, or the name is declared already.
        """
        if name in self._breakers:
            raise ConfigurationError(f"breaker {name!r} is declared twice")
        self._breakers[name] = declaration(
            name,
            {
                "failure_ratio": failure_ratio,
                "min_calls": min_calls,
                "max_failures": max_failures,
                "window_seconds": window_seconds,
                "open_seconds": open_seconds,
                "max_open_seconds": max_open_seconds,
                "probe_seconds": probe_seconds,
            },
        )
        return name

    def rate_limit(self, name: str, rate: str, *, burst: int | None = None) -> None:
        """Let no more jobs start than that, over all workers: `app.rate_limit("queue:mail", "100/s")`.

        `name` is `queue:` or `task:` and a name, a rate key, or the beginning of rate keys and a `*`:
        `api:*` gives each customer of `rate_key="api:{customer}"` a limit of its own. `burst` may start
        at once after a calm; a tenth of a second's worth unless it is said, at least one. Known to
        the database from the next start of a worker on; what an operator set with `pgqueue limits set` stays.

        Raises:
            ConfigurationError: the rate or the name makes no sense, or it is declared already.
        """
        try:
            checked, limit = checked_name(name), rate_limit(rate, burst)
        except ValueError as error:
            raise ConfigurationError(f"rate limit {name!r:.80}: {error}") from None
        self._rate_limits.add(checked, limit)

    # Asking for jobs.

    def enqueue(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        conn: Connection[Any] | None = None,
        **options: Unpack[JobOption],
    ) -> JobHandle[Any]:
        """Add a job by its task's name; the options are those of `Task.using`.

        A task that is not declared here may be elsewhere: its job is sent as it is, and what is
        not said comes from the definition in the database.

        Raises:
            InvalidJob: it was refused; nothing was enqueued.
        """
        return self.handle(self.client.enqueue(self.new_job(task, args, **options), conn))

    async def aenqueue(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        conn: AsyncConnection[Any] | None = None,
        **options: Unpack[JobOption],
    ) -> JobHandle[Any]:
        """Add a job by its task's name; see `enqueue`."""
        return self.handle(await self.aclient.enqueue(self.new_job(task, args, **options), conn))

    def enqueue_many(
        self, jobs: Iterable[NewJob], conn: Connection[Any] | None = None
    ) -> list[JobHandle[Any]]:
        """Add all of these jobs or none, and give a handle for each, in order.

        Takes any iterable, also an endless-looking generator: `app.enqueue_many(send.job(user_id=i)
        for i in range(100_000))`. Without `conn` they are committed together when this returns.

        Raises:
            InvalidJob: one was refused; none was enqueued.
        """
        return [self.handle(enqueued) for enqueued in self.client.enqueue_many(jobs, conn)]

    async def aenqueue_many(
        self, jobs: Iterable[NewJob], conn: AsyncConnection[Any] | None = None
    ) -> list[JobHandle[Any]]:
        """Add all of these jobs or none; see `enqueue_many`."""
        return [self.handle(enqueued) for enqueued in await self.aclient.enqueue_many(jobs, conn)]

    def new_job(
        self, task: str, args: Mapping[str, Any] | None = None, **options: Unpack[JobOption]
    ) -> NewJob:
        """Give a job by its task's name without adding it, for `enqueue_many`.

        Raises:
            InvalidJob: it would be refused.
        """
        chosen = NO_OPTIONS.merged(options) if options else NO_OPTIONS
        definition = self.registry.get(task)
        if definition is None:
            return unregistered_job(task, args or {}, chosen)
        return definition.new_job((), args or {}, chosen)

    # Looking at jobs.

    def job(self, job_id: int) -> JobHandle[Any]:
        """Give a handle on a job, whether it exists is asked when the handle is used."""
        return JobHandle(self, job_id)

    def handle(self, enqueued: Enqueued) -> JobHandle[Any]:
        return JobHandle(self, enqueued.job_id, enqueued.outcome)

    def describe(self) -> dict[str, Any]:
        """Give what a worker needs to know about the tasks without importing them, as JSON takes it."""
        return {
            "tasks": self.registry.registrations(),
            "schedules": self.schedules.registrations(),
            "breakers": list(self._breakers.values()),
            "rate_limits": self._rate_limits.declarations([task.name for task in self.registry]),
            "transactional": [definition.name for definition in self.registry if definition.is_transactional],
            "dsn": self.dsn,
            "schema": self.schema,
        }

    # Locks.

    def lock(
        self, name: str, *, wait_seconds: float | None = 0.0, conn: Connection[Any] | None = None
    ) -> Lock:
        """Give a lock by a name of the application's own: `with app.lock("nightly-report"):`.

        One holder at a time in the whole database. Waits `wait_seconds`, None for ever, and raises
        LockBusy then; `acquire()` says False instead. Without `conn` it has a session of its own,
        which PgBouncer's transaction mode cannot give, and lasts until it is released or the
        session breaks. With `conn` it belongs to that connection's transaction and ends with it; one in
        autocommit needs `with conn.transaction():` around the lock.

        Raises:
            ConfigurationError: the name or the time makes no sense.
        """
        return Lock(self.dsn, self.schema, name, wait_seconds, conn)

    def alock(
        self, name: str, *, wait_seconds: float | None = 0.0, conn: AsyncConnection[Any] | None = None
    ) -> AsyncLock:
        """Give a lock for an event loop: `async with app.alock("nightly-report"):`; see `lock`."""
        return AsyncLock(self.dsn, self.schema, name, wait_seconds, conn)

    # Connections.

    def close(self) -> None:
        """Close the connections of the sync calls; the next call opens new ones."""
        self.client.close()

    async def aclose(self) -> None:
        """Close the connections of the async calls made in this event loop."""
        await self.aclient.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class BoundTask(Generic[P, R]):
    """A task with what was said about its jobs: `task.using(delay_seconds=60).enqueue(7)`."""

    def __init__(
        self,
        app: App,
        definition: TaskDefinition,
        options: JobOptions = NO_OPTIONS,
        conn: AnyConnection | None = None,
    ) -> None:
        self.definition = definition
        self._app = app
        self._options = options
        self._conn: Any = conn

    @property
    def name(self) -> str:
        return self.definition.name

    def using(self, *, conn: AnyConnection | None = None, **options: Unpack[JobOption]) -> BoundTask[P, R]:
        """Give this task with something said about its jobs; the task itself stays as it is.

        With `conn`, a psycopg connection of the caller's, jobs are part of its transaction: they
        exist if, and only if, that commits. `delay_seconds` counts from the database's now,
        `run_at` is aware. `timeout_seconds` None (or 0) means no limit; None for anything else
        leaves it to the task.

        Raises:
            InvalidJob: a value makes no sense, or two exclude each other.
        """
        chosen = self._options.merged(options) if options else self._options
        return BoundTask(self._app, self.definition, chosen, self._conn if conn is None else conn)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """Give the job that `enqueue` would add, for `app.enqueue_many`.

        Raises:
            InvalidJob: it would be refused.
        """
        return self.definition.new_job(args, kwargs, self._options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Add a job with these arguments of the handler; when this returns, it is committed.

        Raises:
            InvalidArguments: they do not fit the handler's signature, or are not JSON.
            InvalidJob: the job was refused otherwise; nothing was enqueued.
            DuplicateJob: a live job has its unique key, and `on_conflict` is `reject`.
            DatabaseUnreachable: nothing was enqueued.
        """
        job = self.definition.new_job(args, kwargs, self._options)
        return self._app.handle(self._app.client.enqueue(job, self._conn))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Add a job; see `enqueue`."""
        job = self.definition.new_job(args, kwargs, self._options)
        return self._app.handle(await self._app.aclient.enqueue(job, self._conn))

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Add a job; `enqueue` by the name that other queues use."""
        return self.enqueue(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Task(BoundTask[P, R], Generic[C, P, V, R]):
    """A declared function: call it as before, or ask for a job that does."""

    def __init__(self, app: App, definition: TaskDefinition) -> None:
        super().__init__(app, definition)
        self._function: Callable[..., Any] = definition.function
        update_wrapper(self, definition.function, updated=())

    def __call__(self, *args: C.args, **kwargs: C.kwargs) -> V:
        """Call the function here and now, without a job."""
        result: V = self._function(*args, **kwargs)
        return result


class JobHandle(Generic[R]):
    """One job: where it stands and, once it has ended, what its handler returned.

    `outcome` says what the enqueue did: `inserted`, or what a live job with the same unique key
    meant, `skipped` or `replaced`; None when the handle was made from an id.
    """

    __slots__ = ("_app", "job_id", "outcome")

    def __init__(self, app: App, job_id: int, outcome: str | None = None) -> None:
        self.job_id = job_id
        self.outcome = outcome
        self._app = app

    def state(self) -> JobState:
        """Give the job's state now.

        Raises:
            JobNotFound: there is no such job, or not any more.
        """
        return self._app.client.look_up(self.job_id).state

    async def astate(self) -> JobState:
        """Give the job's state now; see `state`."""
        return (await self._app.aclient.look_up(self.job_id)).state

    def result(self, timeout_seconds: float | None = DEFAULT_WAIT_SECONDS) -> R:
        """Wait for the job to end and give what its handler returned.

        `timeout_seconds` None waits for ever, 0 looks once.

        Raises:
            JobDead, JobCancelled: it ended otherwise; with the reason.
            ResultNotReady: it has not ended by then.
            ResultUnavailable: it succeeded, but its result was not kept or does not fit any more.
            JobNotFound: there is no such job, or not any more.
        """
        return self._result(self._app.client.wait(self.job_id, timeout_seconds))

    async def aresult(self, timeout_seconds: float | None = DEFAULT_WAIT_SECONDS) -> R:
        """Wait for the job to end and give what its handler returned; see `result`."""
        return self._result(await self._app.aclient.wait(self.job_id, timeout_seconds))

    def _result(self, standing: Standing) -> R:
        result: R = result_of(self.job_id, standing, self._app.registry.get(standing.task))
        return result

    def __repr__(self) -> str:
        return f"<JobHandle {self.job_id}>"


class TaskDecorator(Protocol):
    """What `@app.task(...)` gives: as `@app.task`, but to be called with the function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /
    ) -> Task[Concatenate[JobContext, P], P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[JobContext, P], R], /
    ) -> Task[Concatenate[JobContext, P], P, R, R]: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Task[P, P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, P, R, R]: ...


class TransactionalTaskDecorator(Protocol):
    """What `@app.task(transactional=True)` gives: no type can say which parameter is the connection."""

    @overload
    def __call__(
        self, function: Callable[C, Coroutine[Any, Any, R]], /
    ) -> Task[C, ..., Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, function: Callable[C, R], /) -> Task[C, ..., R, R]: ...
