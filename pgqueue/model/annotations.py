"""From a type annotation to the codec that carries its values."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any, Literal

from pgqueue.model.codecs import PLAIN, SCALARS, Codec, EnumCodec, LiteralCodec
from pgqueue.model.containers import ArrayCodec, DictCodec, ModelCodec, ObjectCodec, TupleCodec, UnionCodec


def codec_for(annotation: Any) -> Codec:
    """Make the codec for an annotation.

    Raises:
        NameError: it names something that is not there (yet).
        TypeError: values of this type cannot be carried; says why.
    """
    return _make(annotation, {})


def _make(annotation: Any, known: dict[Any, Codec]) -> Codec:
    while True:
        if getattr(annotation, "__supertype__", None) is not None:  # NewType
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            if annotation in known:
                return known[annotation]
            # An alias that contains itself describes JSON; inside itself it is taken as such.
            known[annotation] = PLAIN
            annotation = annotation.__value__
        elif typing.get_origin(annotation) in (typing.Annotated, typing.Required, typing.NotRequired):
            annotation = typing.get_args(annotation)[0]
        else:
            break
    make = partial(_make, known=known)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return UnionCodec([make(argument) for argument in arguments])
    if origin is Literal:
        return LiteralCodec(arguments)
    if annotation in (Any, object) or isinstance(annotation, typing.TypeVar):
        return PLAIN
    kind = origin or annotation
    if kind is None or kind is type(None):
        return SCALARS[type(None)]
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        return TupleCodec([make(argument) for argument in arguments])
    if kind in _ARRAYS:
        return ArrayCodec(_ARRAYS[kind], make(arguments[0]) if arguments else PLAIN)
    if kind in _DICTS:
        key, value = arguments or (str, Any)
        return DictCodec(_key_codec(make(key)), make(value))
    if isinstance(kind, type):
        return _make_for_class(kind, known)
    raise TypeError(f"pgqueue cannot carry {_named(annotation)} as JSON")


def _make_for_class(kind: Any, known: dict[Any, Codec]) -> Codec:
    if kind in SCALARS:
        return SCALARS[kind]
    if issubclass(kind, Enum):
        if not len(kind):
            raise TypeError(f"{kind.__name__} has no members")
        return EnumCodec(kind)
    if hasattr(kind, "model_dump") and hasattr(kind, "model_validate_json"):
        return ModelCodec(kind)
    if kind in known:
        return known[kind]
    is_dataclass, is_named_tuple = _is_dataclass(kind), _is_named_tuple(kind)
    if not (is_dataclass or typing.is_typeddict(kind) or is_named_tuple):
        raise TypeError(f"pgqueue cannot carry {_named(kind)} as JSON")
    # Known before its fields are: a type may contain itself.
    codec = known[kind] = ObjectCodec(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    if any(isinstance(hint, dataclasses.InitVar) for hint in hints.values()):
        raise TypeError(f"{kind.__name__} has an InitVar, which is not kept, so it could not be made again")
    if is_dataclass:
        fields = [field for field in dataclasses.fields(kind) if field.init]
        names = [field.name for field in fields]
        codec.required = frozenset(
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
    elif is_named_tuple:
        names = list(kind._fields)
        codec.required = frozenset(names) - frozenset(kind._field_defaults)
    else:
        names = list(hints)
        codec.required = frozenset(kind.__required_keys__)
    for name in names:
        codec.fields[name] = _make(hints.get(name, Any), known)
    return codec


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _key_codec(codec: Codec) -> Codec:
    if codec is PLAIN:
        return SCALARS[str]
    if codec.kinds <= {"string"} or codec is SCALARS[int] or isinstance(codec, EnumCodec):
        return codec
    raise TypeError(f"{codec.name} cannot be a key of a JSON object")


_ARRAYS: Mapping[Any, type] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    collections.abc.Set: frozenset,
    collections.abc.MutableSet: set,
}
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _named(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)
