"""A handler's signature: how a call becomes the JSON of a job, and that JSON a call again.

The same signature stands at both ends. At the door it refuses what the handler could not take, so
that a mistake fails where it is made; in the worker it refuses what no retry mends.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

from pgqueue.errors import ArgumentsTooLarge, ConfigurationError, InvalidArguments
from pgqueue.model.annotations import codec_for
from pgqueue.model.codecs import PLAIN, Codec
from pgqueue.model.context import JobContext
from pgqueue.model.encoding import Misfit, checked_key, dumps, loads, plain
from pgqueue.model.job import MAX_ARGS_BYTES, MAX_RESULT_BYTES
from pgqueue.model.outcome import clean

_UNRESOLVED = re.compile(r"(?:Optional\[)?(?:(\w+)\.)?(JobContext|AsyncConnection|Connection)\b")
_CONNECTIONS = ("Connection", "AsyncConnection")
_NO_DEFAULT = inspect.Parameter.empty


class Argument:
    """One argument of a handler; its codec is made at the first use that needs it."""

    __slots__ = ("_annotation", "_codec", "_namespace", "_task", "default", "name")

    def __init__(
        self, task: str, name: str, annotation: Any, namespace: dict[str, Any], default: Any
    ) -> None:
        self.name = name
        self.default = default
        self._task = task
        self._annotation = annotation
        self._namespace = namespace
        self._codec: Codec | None = None
        # A name that is defined further down in the module cannot be known yet: it is looked up later.
        self._make_codec(may_wait=True)

    @property
    def is_required(self) -> bool:
        return self.default is _NO_DEFAULT

    @property
    def codec(self) -> Codec:
        return self._codec or self._make_codec(may_wait=False)

    def _make_codec(self, *, may_wait: bool) -> Codec:
        codec = PLAIN
        try:
            if self._annotation is not _NO_DEFAULT:
                codec = codec_for(_resolved(self._annotation, self._namespace))
        except NameError as error:
            if may_wait:
                return PLAIN
            raise ConfigurationError(
                f"task {self._task!r}: the annotation of {self.name!r} cannot be read ({error}); "
                "define or import it where it can be found at run time"
            ) from None
        except (TypeError, SyntaxError, AttributeError) as error:
            raise ConfigurationError(
                f"task {self._task!r}: the annotation of {self.name!r} does not do: {error}"
            ) from None
        self._codec = codec
        return codec


class Signature:
    """What a handler takes and gives, and what is injected.

    Parameters annotated with `JobContext` or a connection of psycopg are filled in by the worker;
    all others are the job's arguments.
    """

    def __init__(self, task: str, function: Callable[..., Any]) -> None:
        """Read a function's signature.

        Raises:
            ConfigurationError: a handler cannot look like this; says what to change.
        """
        self.task = task
        self.arguments: dict[str, Argument] = {}
        self.context_names: tuple[str, ...] = ()
        self.connection_names: tuple[str, ...] = ()
        self._positional: list[str] = []
        self._others: Argument | None = None
        self._decoders: dict[str, Callable[[Any], Any]] = {}
        if not callable(function):
            raise ConfigurationError(f"task {task!r}: a handler is a function, not {function!r}")
        self.is_async = _is_async(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(f"task {task!r}: a handler returns its result, it does not yield")
        namespace = _namespace_of(function)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"task {task!r}: the handler has no readable signature: {error}"
            ) from None
        for name, parameter in signature.parameters.items():
            self._add(name, parameter, namespace)
        self._result: Codec | None = None
        self._returns = signature.return_annotation
        self._namespace = namespace

    def _add(self, name: str, parameter: inspect.Parameter, namespace: dict[str, Any]) -> None:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise ConfigurationError(f"task {self.task!r}: *{name} gives its values no names; take a list")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigurationError(
                f"task {self.task!r}: {name!r} is positional-only, and a job's arguments go by name; "
                "remove the /"
            )
        match _injection(parameter.annotation, namespace):
            case "JobContext":
                self.context_names += (name,)
            case "Connection" | "AsyncConnection" as wanted:
                if self.is_async != (wanted == "AsyncConnection"):
                    kind = "an async" if self.is_async else "a sync"
                    raise ConfigurationError(
                        f"task {self.task!r}: {kind} handler cannot use {name!r}, a psycopg.{wanted}"
                    )
                self.connection_names += (name,)
            case _:
                argument = Argument(self.task, name, parameter.annotation, namespace, parameter.default)
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    self._others = argument
                    return
                self.arguments[name] = argument
                if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                    self._positional.append(name)

    # From a call to JSON.

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Give each value its argument's name, as Python would; defaults are left to the handler.

        Raises:
            InvalidArguments: one is unknown, missing or given twice.
        """
        bound: dict[str, Any] = {}
        if args:
            if len(args) > len(self._positional):
                raise self._invalid(
                    f"takes {len(self._positional)} arguments by position, {len(args)} were given"
                )
            bound.update(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in bound:
                raise self._invalid(f"the argument {name!r} was given twice")
            bound[name] = value
        # Usually the call names just what there is; these views compare in one step.
        if bound.keys() != self.arguments.keys():
            self._check_names(bound)
        return bound

    def encode_values(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Turn bound arguments into what JSON holds.

        Raises:
            InvalidArguments: one does not fit its annotation or is not JSON; names its path.
        """
        encoded: dict[str, Any] = {}
        name = ""
        try:
            for name, value in bound.items():
                argument = self.arguments.get(name)
                if argument is not None:
                    encoded[name] = argument.codec.encode(value, 1)
                else:
                    encoded[checked_key(name)] = self._codec(name).encode(value, 1)
        except Misfit as misfit:
            raise self._invalid_at("args", misfit.inside(name)) from None
        return encoded

    def encode(self, bound: Mapping[str, Any]) -> str:
        """Give bound arguments as the JSON text of an object; see `encode_values`.

        Raises:
            ArgumentsTooLarge: they are more than a job carries.
        """
        return args_text(self.task, self.encode_values(bound))

    # From JSON to a call.

    def decode(self, text: str) -> dict[str, Any]:
        """Give the handler's arguments from a job's JSON.

        Raises:
            InvalidArguments: they do not fit the signature; no retry mends that.
        """
        try:
            given = loads(text)
            if not isinstance(given, dict):
                raise self._invalid(f"the arguments are no JSON object: {text[:60]}")
            if given.keys() != self.arguments.keys():
                self._check_names(given)
            return self._decoded(given)
        except Misfit as misfit:
            raise self._invalid_at("args", misfit) from None
        except RecursionError:
            raise self._invalid("args: nested too deeply for Python to read") from None

    def _decoded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        decoded: dict[str, Any] = {}
        name = ""
        try:
            for name, value in given.items():
                decoder = self._decoders.get(name)
                if decoder is None:
                    decoder = self._codec(name).decode
                    if name in self.arguments:  # others could be any number
                        self._decoders[name] = decoder
                decoded[name] = decoder(value)
        except Misfit as misfit:
            raise misfit.inside(name) from None
        return decoded

    # What the handler returned.

    def encode_result(self, value: Any) -> tuple[str | None, str | None]:
        """Give the JSON text of a result, or None and why it cannot be kept.

        Never raises: the work is done, and a result that is no JSON must not undo it.
        """
        try:
            text = dumps(self._result_codec().encode(value))
            size = len(text.encode())
        except Misfit as misfit:
            return None, clean(misfit.where("result"))
        except Exception as error:  # noqa: BLE001  a model's own code may raise anything
            return None, f"result: {type(error).__name__} while it was written as JSON"
        if size > MAX_RESULT_BYTES:
            return None, f"result: {size:,} bytes, at most {MAX_RESULT_BYTES:,} are kept"
        return text, None

    def decode_result(self, text: str) -> Any:
        """Give a result back from its JSON.

        Raises:
            InvalidArguments: it does not fit the handler's return annotation any more.
        """
        try:
            return self._result_codec().decode(loads(text))
        except Misfit as misfit:
            raise self._invalid_at("result", misfit) from None

    def _result_codec(self) -> Codec:
        if self._result is None:
            self._result = PLAIN
            if self._returns is not _NO_DEFAULT:
                # A handler may return what nobody keeps, a response or a model of an ORM. It is
                # then treated as not annotated: kept if it is plain JSON, and noted if it is not.
                with suppress(NameError, TypeError, SyntaxError, AttributeError):
                    self._result = codec_for(_resolved(self._returns, self._namespace))
        return self._result

    # For the database and for people.

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """The JSON of each default that has one."""
        encoded: dict[str, Any] = {}
        for name, argument in self.arguments.items():
            if not argument.is_required:
                try:
                    encoded[name] = argument.codec.encode(argument.default, 1)
                except Misfit:
                    continue
        return encoded

    def schema(self) -> dict[str, Any]:
        """Describe the arguments as JSON Schema does, for forms and for the database's key templates."""
        defaults = self.defaults
        properties = {
            name: {**argument.codec.schema(), **({"default": defaults[name]} if name in defaults else {})}
            for name, argument in self.arguments.items()
        }
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name, argument in self.arguments.items() if argument.is_required],
            "additionalProperties": self._others is not None,
        }

    def _codec(self, name: str) -> Codec:
        argument = self.arguments.get(name) or self._others
        return argument.codec if argument else PLAIN

    def _check_names(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name in self.context_names or name in self.connection_names:
                raise self._invalid(f"{name!r} is injected by the worker, it is no argument of the job")
            if name not in self.arguments and self._others is None:
                known = ", ".join(self.arguments) or "none"
                raise self._invalid(f"takes no argument {name!r} (it takes: {known})")
        missing = [
            name for name, argument in self.arguments.items() if argument.is_required and name not in given
        ]
        if missing:
            raise self._invalid(
                f"misses the argument{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
            )

    def _invalid(self, reason: str) -> InvalidArguments:
        return InvalidArguments(self.task, reason)

    def _invalid_at(self, root: str, misfit: Misfit) -> InvalidArguments:
        return InvalidArguments(self.task, misfit.where(root))


def args_text(task: str, encoded: Mapping[str, Any]) -> str:
    """Give encoded arguments as JSON text.

    Raises:
        ArgumentsTooLarge: they are more than a job carries.
    """
    try:
        text = dumps(encoded)
    except Misfit as misfit:
        raise InvalidArguments(task, misfit.where("args")) from None
    # A character has at most four bytes, so small texts need no second look.
    if len(text) * 4 > MAX_ARGS_BYTES and (size := len(text.encode())) > MAX_ARGS_BYTES:
        raise ArgumentsTooLarge(task, size, MAX_ARGS_BYTES)
    return text


def plain_args(task: str, args: Mapping[str, Any]) -> str:
    """Give the arguments of a task whose signature is not known here as JSON text.

    Raises:
        InvalidArguments: they are not a plain JSON object; names the path.
        ArgumentsTooLarge: they are more than a job carries.
    """
    if not isinstance(args, Mapping):
        raise InvalidArguments(task, f"the arguments are a {type(args).__name__}, not a dict by name")
    try:
        encoded = plain(dict(args))
    except Misfit as misfit:
        raise InvalidArguments(task, misfit.where("args")) from None
    return args_text(task, encoded)


def _is_async(function: Any) -> bool:
    # An object with an async __call__ is a handler too, and so is one with some arguments filled in.
    while isinstance(function, partial):
        function = function.func
    call = vars(type(function)).get("__call__")
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _namespace_of(function: Any) -> dict[str, Any]:
    function = inspect.unwrap(function)
    while hasattr(function, "func"):  # functools.partial
        function = inspect.unwrap(function.func)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__globals__"):
        function = type(function).__call__
    return getattr(function, "__globals__", {})


def _resolved(annotation: Any, namespace: dict[str, Any]) -> Any:
    """Give the type that an annotation means, also when it is a text or holds one."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(holder, globalns=namespace, include_extras=True)["it"]


def _injection(annotation: Any, namespace: dict[str, Any]) -> str | None:
    """Say which of the injected classes an annotation means, without importing the driver."""
    try:
        resolved = _resolved(annotation, namespace)
    except Exception:  # noqa: BLE001  whatever is wrong with it is said when the codec is made
        # Imported for the type checker only: the text says enough.
        found = _UNRESOLVED.match(annotation) if isinstance(annotation, str) else None
        return found[2] if found and found[1] in (None, "pgqueue", "psycopg") else None
    for candidate in (resolved, *typing.get_args(resolved)):
        kind = typing.get_origin(candidate) or candidate
        if kind is JobContext:
            return "JobContext"
        for ancestor in getattr(kind, "__mro__", ()):
            name = str(ancestor.__name__)
            if name in _CONNECTIONS and ancestor.__module__.partition(".")[0] == "psycopg":
                return name
    return None
