"""A task: a handler with everything its jobs need, decided once and checked when it is declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final

from pgqueue.errors import ConfigurationError, InvalidJob, UnknownTask, Unrecoverable
from pgqueue.model.arguments import Signature, args_text, plain_args
from pgqueue.model.encoding import checked_text
from pgqueue.model.job import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_PRIORITY,
    DEFAULT_QUEUE,
    DEFAULT_TAKEOVER_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    NewJob,
    OnConflict,
    UniqueUntil,
)
from pgqueue.model.keys import MAX_KEY_BYTES, KeyTemplate
from pgqueue.model.limits import RateLimit, name_for, rate_limit
from pgqueue.model.options import MAX_TASK_BYTES, NO_OPTIONS, JobOptions, check_option
from pgqueue.model.outcome import PLAIN_SUCCESS, Ending, Outcome
from pgqueue.model.retry import DEFAULT_RETRY, Retry, RetryPolicy, retry_policy


class NotDone(Enum):
    """The type of NOT_DONE."""

    NOT_DONE = "not done"


NOT_DONE: Final = NotDone.NOT_DONE
"""What a reconcile function returns when the effect has not happened."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """A task's way to find out whether an effect happened that was cut off."""

    function: Callable[..., Any]
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskDefinition:
    """A task as declared. Every value is concrete; `timeout_seconds` 0 means no limit."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    retry: RetryPolicy = DEFAULT_RETRY
    unrecoverable: tuple[type[BaseException], ...] = ()
    concurrency_key: KeyTemplate | None = None
    concurrency_limit: int = 1
    unique_key: KeyTemplate | None = None
    unique_until: UniqueUntil = "end"
    on_conflict: OnConflict = "skip"
    idempotency_key: KeyTemplate | None = None
    rate_key: KeyTemplate | None = None
    rate_limit: RateLimit | None = None
    breaker: str | None = None
    is_transactional: bool = False
    is_idempotent: bool = False
    reconcile: Reconciliation | None = None
    takeover_seconds: float = DEFAULT_TAKEOVER_SECONDS
    stores_result: bool = True
    _templates: tuple[tuple[str, KeyTemplate], ...] = field(init=False, repr=False)
    _settings: Mapping[str, Any] = field(init=False, repr=False)
    # What follows the arguments in a job of this task about which nothing else is said.
    _rest: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The database makes the rate key: only it knows the limits.
        templates = {
            "concurrency_key": self.concurrency_key,
            "unique_key": self.unique_key,
            "idempotency_key": self.idempotency_key,
        }
        used = tuple((name, template) for name, template in templates.items() if template is not None)
        object.__setattr__(self, "_templates", used)
        settings: dict[str, Any] = {
            "task": self.name,
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "timeout_seconds": self.timeout_seconds,
            "concurrency_limit": self.concurrency_limit,
            "on_conflict": self.on_conflict,
            "is_complete": self.rate_key is None,
        }
        if self.unique_until != "end":
            settings["unique_until"] = self.unique_until
        object.__setattr__(self, "_settings", settings)
        object.__setattr__(self, "_rest", NewJob(**settings).rest)

    @property
    def is_async(self) -> bool:
        return self.signature.is_async

    @property
    def rate_limit_name(self) -> str:
        """Whose starts its rate limit counts: the task's, or those of each of its rate keys."""
        return name_for(self.name, self.rate_key)

    @property
    def may_take_over(self) -> bool:
        """Whether an effect that an earlier attempt began, and may have done, can be begun again."""
        return self.is_transactional or self.is_idempotent or self.reconcile is not None

    def success(self, value: Any) -> Outcome:
        """Turn what the handler returned into an outcome; a result that cannot be kept undoes no work.

        Raises:
            Unrecoverable: that is no result, but the handler itself, which has not run.
        """
        if value is None:
            return PLAIN_SUCCESS
        if (what := _what_did_not_run(value, self.function)) is not None:
            raise Unrecoverable(f"the handler of {self.name!r} did not run: {what}")
        if not self.stores_result:
            return PLAIN_SUCCESS
        text, why_not_kept = self.signature.encode_result(value)
        return Outcome(Ending.SUCCEEDED, text, None, why_not_kept)

    def new_job(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: JobOptions = NO_OPTIONS,
    ) -> NewJob:
        """Give the job that this call asks for, complete: nothing is left to the database.

        Raises:
            InvalidArguments: the call does not fit the handler's signature.
            ArgumentsTooLarge: the arguments are more than a job carries.
            InvalidJob: a key cannot be made from the arguments.
        """
        encoded = self.signature.encode_values(self.signature.bind(args, kwargs or {}))
        text = args_text(self.name, encoded)
        if options is NO_OPTIONS and not self._templates:
            return NewJob._make((self.name, text, *self._rest))
        said = options.said()
        return _new_job(args=text, **{**self._settings, **self._keys(said, encoded), **said})

    def registration(self) -> dict[str, Any]:
        """Give the definition as the database keeps it, so that a plain INSERT means the same."""
        return {
            "name": self.name,
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "timeout_seconds": self.timeout_seconds,
            "concurrency_key": self.concurrency_key and self.concurrency_key.text,
            "concurrency_limit": self.concurrency_limit,
            "unique_key": self.unique_key and self.unique_key.text,
            "is_unique_until_start": self.unique_until == "start",
            "idempotency_key": self.idempotency_key and self.idempotency_key.text,
            "rate_key": self.rate_key and self.rate_key.text,
            "breaker": self.breaker,
            "args_schema": self.signature.schema(),
        }

    def _keys(self, said: Mapping[str, Any], encoded: Mapping[str, Any]) -> dict[str, Any]:
        """Give the keys that the caller left to the task."""
        keys: dict[str, Any] = {}
        for name, template in self._templates:
            if name not in said:
                try:
                    keys[name] = template.render(encoded, self.signature.defaults)
                except ValueError as error:
                    raise InvalidJob(f"task {self.name!r}: {name}: {error}") from None
        return keys


def define(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = DEFAULT_PRIORITY,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
    retry: Retry | None = None,
    unrecoverable: Sequence[type[BaseException]] = (),
    concurrency_key: str | None = None,
    concurrency_limit: int = 1,
    unique_key: str | None = None,
    unique_until: UniqueUntil = "end",
    on_conflict: OnConflict = "skip",
    idempotency_key: str | None = None,
    rate_key: str | None = None,
    rate_limit: str | None = None,
    rate_burst: int | None = None,
    breaker: str | None = None,
    transactional: bool = False,
    idempotent: bool = False,
    reconcile: Callable[..., Any] | None = None,
    takeover_seconds: float | None = None,
    store_result: bool = True,
) -> TaskDefinition:
    """Make the definition of a task; its name is the function's unless another one is given.

    `timeout_seconds` None (or 0) means no limit. The keys are templates over the arguments:
    `"charge:{order_id}"`. `rate_limit` is a rate like `"100/s"` for all starts of the task or, with
    a `rate_key`, for those of each key. An effect outside the database that was cut off is begun again if the
    task is `idempotent` or once `reconcile` says NOT_DONE, and not before `takeover_seconds` have
    passed since it began (600; 0 if idempotent), unless its process is known to be gone.

    Raises:
        ConfigurationError: a value makes no sense, or the function cannot be a handler.
    """
    name = name if name is not None else getattr(function, "__name__", None)
    try:
        task = checked_text("the task's name", name, MAX_TASK_BYTES)
    except ValueError as error:
        raise ConfigurationError(f"{error}; give it one: @app.task(name=...)") from None
    signature = Signature(task, function)
    try:
        check_option("queue", queue)
        check_option("priority", priority)
        check_option("max_attempts", max_attempts)
        if timeout_seconds is not None:
            check_option("timeout_seconds", timeout_seconds)
        check_option("concurrency_limit", concurrency_limit)
        check_option("unique_until", unique_until)
        check_option("on_conflict", on_conflict)
        return TaskDefinition(
            name=task,
            function=function,
            signature=signature,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            timeout_seconds=float(timeout_seconds or 0.0),
            retry=retry_policy(retry),
            unrecoverable=_checked_exceptions(unrecoverable),
            concurrency_key=_template("concurrency_key", concurrency_key, signature),
            concurrency_limit=concurrency_limit,
            unique_key=_template("unique_key", unique_key, signature),
            unique_until=unique_until,
            on_conflict=on_conflict,
            idempotency_key=_template("idempotency_key", idempotency_key, signature),
            rate_key=_template("rate_key", rate_key, signature),
            rate_limit=_checked_rate(task, rate_key, rate_limit, rate_burst),
            breaker=None if breaker is None else checked_text("breaker", breaker, MAX_KEY_BYTES),
            is_transactional=_checked_transactional(transactional, signature),
            is_idempotent=_checked_flag("idempotent", idempotent),
            reconcile=_checked_reconcile(reconcile, signature, transactional=transactional),
            takeover_seconds=_checked_takeover(takeover_seconds, is_idempotent=idempotent),
            stores_result=_checked_flag("store_result", store_result),
        )
    except ValueError as error:
        raise ConfigurationError(f"task {task!r}: {error}") from None


def _what_did_not_run(value: Any, function: Callable[..., Any]) -> str | None:
    """Say so if what a handler returned is a call still to be made, which nobody will make."""
    if isinstance(value, (GeneratorType, AsyncGeneratorType)):
        code = value.gi_code if isinstance(value, GeneratorType) else value.ag_code
        if code is not getattr(inspect.unwrap(function), "__code__", None):
            return None
        return "it yields, which its decorator hides; a handler returns its result"
    # A future, which is under way already, can be told by this; asyncio itself does so.
    if not hasattr(type(value), "__await__") or hasattr(type(value), "_asyncio_future_blocking"):
        return None
    if isinstance(value, CoroutineType):
        value.close()
    return (
        f"to call it only made a {type(value).__name__}, which nobody awaits. Its decorator hides that it is "
        "async, or an await is missing: let the decorator's wrapper be async, and await the function there"
    )


def unregistered_job(task: str, args: Mapping[str, Any], options: JobOptions = NO_OPTIONS) -> NewJob:
    """Give a job of a task whose code is elsewhere: what is not said is left to the database.

    Raises:
        InvalidJob: the name or the arguments do not do.
    """
    try:
        checked_text("the task's name", task, MAX_TASK_BYTES)
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    return _new_job(task=task, args=plain_args(task, args), **options.said())


def _new_job(**said: Any) -> NewJob:
    job = NewJob(**said)
    if job.on_conflict == "debounce" and job.delay_seconds is None:
        raise InvalidJob(f"task {job.task!r}: on_conflict 'debounce' puts a job off: say delay_seconds")
    return job


class TaskRegistry:
    """The tasks of an application by name."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskDefinition] = {}

    def add(self, definition: TaskDefinition) -> None:
        """Take a definition in.

        Raises:
            ConfigurationError: another task has this name.
        """
        other = self._tasks.get(definition.name)
        if other is not None:
            raise ConfigurationError(
                f"task {definition.name!r} is declared twice, as {_place_of(other)} and as "
                f"{_place_of(definition)}; give one of them another name"
            )
        self._tasks[definition.name] = definition

    def __getitem__(self, name: str) -> TaskDefinition:
        """Give a definition.

        Raises:
            UnknownTask: no task has this name.
        """
        try:
            return self._tasks[name]
        except KeyError:
            raise UnknownTask(name, self._tasks) from None

    def get(self, name: str) -> TaskDefinition | None:
        return self._tasks.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def __iter__(self) -> Iterator[TaskDefinition]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def registrations(self) -> list[dict[str, Any]]:
        """Give all definitions as the database keeps them."""
        return [self._tasks[name].registration() for name in sorted(self._tasks)]


# Checks of what only a declaration says.


def _checked_exceptions(kinds: Any) -> tuple[type[BaseException], ...]:
    given: tuple[Any, ...] = (kinds,) if isinstance(kinds, type) else tuple(kinds)
    for kind in given:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(f"unrecoverable lists exception classes, {kind!r} is none")  # noqa: TRY004
    return given


def _checked_transactional(transactional: Any, signature: Signature) -> bool:
    _checked_flag("transactional", transactional)
    wanted = "psycopg.AsyncConnection" if signature.is_async else "psycopg.Connection"
    if transactional and len(signature.connection_names) != 1:
        raise ValueError(
            "a transactional handler does its work on the connection it is given: "
            f"declare one parameter as tx: {wanted}"
        )
    if signature.connection_names and not transactional:
        raise ValueError(
            f"{signature.connection_names[0]!r} is a connection, which only a transactional handler "
            "is given: declare it with transactional=True"
        )
    return bool(transactional)


def _checked_reconcile(
    function: Callable[..., Any] | None, signature: Signature, *, transactional: bool
) -> Reconciliation | None:
    if function is None:
        return None
    if transactional:
        raise ValueError("a transactional task leaves nothing to reconcile: its effect and its end are one")
    own = Signature(signature.task, function)
    if set(own.arguments) != set(signature.arguments) or own.connection_names:
        wanted = ", ".join(signature.arguments) or "none"
        raise ValueError(f"reconcile takes the arguments that the handler takes: {wanted}")
    if own.is_async != signature.is_async:
        raise ValueError("reconcile and the handler are both async, or neither is")
    return Reconciliation(function, own)


def _checked_takeover(seconds: Any, *, is_idempotent: bool) -> float:
    if seconds is None:
        # To do again what may still be under way is what an idempotent task allows.
        return 0.0 if is_idempotent else DEFAULT_TAKEOVER_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 3.2e7:
        raise ValueError(f"takeover_seconds must be between 0 and one year, not {seconds!r:.60}")
    return float(seconds)


def _checked_rate(task: str, rate_key: str | None, rate: str | None, burst: int | None) -> RateLimit | None:
    if rate is None:
        if burst is not None:
            raise ValueError("rate_burst goes with rate_limit")
        return None
    name_for(task, None if rate_key is None else KeyTemplate(rate_key))
    return rate_limit(rate, burst)


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r:.60}")  # noqa: TRY004
    return value


def _template(name: str, text: str | None, signature: Signature) -> KeyTemplate | None:
    if text is None:
        return None
    try:
        template = KeyTemplate(text)
        template.check_names(signature.arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return template


def _place_of(definition: TaskDefinition) -> str:
    function = definition.function
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
