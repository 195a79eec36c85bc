"""Codecs of types that hold other types: lists, dicts, dataclasses, models, unions."""

from __future__ import annotations

import collections.abc
import json
import typing
from collections.abc import Mapping
from typing import Any

from pgqueue.model.codecs import ALL_KINDS, Codec, FloatCodec
from pgqueue.model.encoding import (
    Misfit,
    check_depth,
    checked_key,
    dumps,
    each,
    json_kind,
    plain,
    shown,
)


class ArrayCodec(Codec):
    """A list, set, frozenset or tuple of any length, whose items are of one type."""

    kinds = frozenset({"array"})

    def __init__(self, kind: type, item: Codec) -> None:
        self._kind = kind
        self._item = item
        self._accepted = (set, frozenset) if kind in (set, frozenset) else (list, tuple)
        self.name = f"a {kind.__name__}"
        self.is_plain = kind is list and item.is_plain

    def is_native(self, value: Any) -> bool:
        return isinstance(value, self._accepted)

    def encode(self, value: Any, depth: int = 0) -> Any:
        if not self.is_native(value) and not isinstance(value, list):
            raise self.refusal(value)
        check_depth(depth)
        encoded = each(value, lambda item: self._item.encode(item, depth + 1))
        # The same set gives the same text in every process, whatever its hash seed.
        return sorted(encoded, key=dumps) if self._kind in (set, frozenset) else encoded

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise self.refusal(value)
        items = each(value, self._item.decode)
        if self._kind is list:
            return items
        try:
            return self._kind(items)
        except TypeError as error:
            raise Misfit(str(error)) from None

    def schema(self) -> dict[str, Any]:
        item = self._item.schema()
        return {"type": "array", **({"items": item} if item else {})}


class TupleCodec(Codec):
    """A tuple of fixed length, each place with its own type."""

    is_plain = False
    kinds = frozenset({"array"})

    def __init__(self, items: list[Codec]) -> None:
        self._codecs = items
        self.name = f"a tuple of {len(items)}"

    def is_native(self, value: Any) -> bool:
        return isinstance(value, tuple)

    def encode(self, value: Any, depth: int = 0) -> Any:
        if not isinstance(value, (tuple, list)) or len(value) != len(self._codecs):
            raise self.refusal(value)
        check_depth(depth)
        codecs = iter(self._codecs)
        return each(value, lambda item: next(codecs).encode(item, depth + 1))

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(self._codecs):
            raise self.refusal(value)
        codecs = iter(self._codecs)
        return tuple(each(value, lambda item: next(codecs).decode(item)))

    def schema(self) -> dict[str, Any]:
        return {"type": "array"}


class DictCodec(Codec):
    """A dict whose keys are written as strings and whose values are of one type."""

    kinds = frozenset({"object"})

    def __init__(self, key: Codec, value: Codec) -> None:
        self._key = key
        self._value = value
        self.name = "a dict"
        self.is_plain = key.is_plain and key.kinds == {"string"} and value.is_plain

    def is_native(self, value: Any) -> bool:
        return isinstance(value, collections.abc.Mapping)

    def encode(self, value: Any, depth: int = 0) -> Any:
        if not isinstance(value, collections.abc.Mapping):
            raise self.refusal(value)
        check_depth(depth)
        encoded: dict[str, Any] = {}
        key: Any = None
        try:
            for key, member in value.items():
                is_written = isinstance(key, str) and not self._key.is_native(key)
                written = self._key.encode(self._decoded_key(key) if is_written else key)
                if type(written) is int:
                    written = str(written)
                encoded[checked_key(written)] = self._value.encode(member, depth + 1)
        except Misfit as misfit:
            raise misfit.inside(key) from None
        if len(encoded) != len(value):
            raise Misfit("two keys are written alike in JSON")
        return encoded

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise self.refusal(value)
        decoded: dict[Any, Any] = {}
        key = ""
        try:
            for key, member in value.items():
                decoded[self._decoded_key(key)] = self._value.decode(member)
        except Misfit as misfit:
            raise misfit.inside(key) from None
        return decoded

    def _decoded_key(self, key: str) -> Any:
        if "number" in self._key.kinds:
            try:
                number = int(key)
            except ValueError:
                number = None
            # "007" or " 7" was not written by us; two such keys could meet in one.
            if number is not None and str(number) == key:
                return self._key.decode(number)
        return self._key.decode(key)

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


class ObjectCodec(Codec):
    """A dataclass, NamedTuple or TypedDict, by the names of its fields."""

    is_plain = False
    kinds = frozenset({"object"})

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.name = kind.__name__
        # Filled afterwards, by who made it.
        self.fields: dict[str, Codec] = {}
        self.required: frozenset[str] = frozenset()
        self._is_dict = typing.is_typeddict(kind)

    def is_native(self, value: Any) -> bool:
        # A subclass has fields that would not come back.
        return isinstance(value, dict) if self._is_dict else type(value) is self._kind

    def encode(self, value: Any, depth: int = 0) -> Any:
        if not self.is_native(value):
            value = self.decode(value)
        check_depth(depth)
        if isinstance(value, dict):
            self._check_names(value)
        encoded: dict[str, Any] = {}
        name = ""
        try:
            for name, codec in self.fields.items():
                if not self._is_dict:
                    encoded[name] = codec.encode(getattr(value, name), depth + 1)
                elif name in value:
                    encoded[name] = codec.encode(value[name], depth + 1)
        except Misfit as misfit:
            raise misfit.inside(name) from None
        return encoded

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise self.refusal(value)
        self._check_names(value)
        decoded: dict[str, Any] = {}
        name = ""
        try:
            for name, member in value.items():
                decoded[name] = self.fields[name].decode(member)
        except Misfit as misfit:
            raise misfit.inside(name) from None
        try:
            return self._kind(**decoded)
        except Exception as error:  # noqa: BLE001  a check in __post_init__ raises what it likes
            raise Misfit(f"{self.name} refuses it: {error}") from None

    def _check_names(self, value: Mapping[Any, Any]) -> None:
        if unknown := [key for key in value if key not in self.fields]:
            raise Misfit(f"{self.name} has no field {shown(unknown[0])}")
        if missing := [name for name in self.fields if name in self.required and name not in value]:
            raise Misfit(f"{self.name} needs the field {missing[0]!r}")

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


class ModelCodec(Codec):
    """A pydantic model, or anything with the same two pairs of methods."""

    is_plain = False

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.name = kind.__name__
        self.kinds = ALL_KINDS if getattr(kind, "__pydantic_root_model__", False) else frozenset({"object"})

    def is_native(self, value: Any) -> bool:
        return type(value) is self._kind

    def encode(self, value: Any, depth: int = 0) -> Any:
        if hasattr(value, "model_dump") and not self.is_native(value):
            raise self.refusal(value)
        model = value if self.is_native(value) else self.decode(plain(value, depth))
        try:
            # round_trip leaves out what validation would refuse, such as computed fields.
            document = model.model_dump(mode="json", by_alias=True, round_trip=True)
        except ValueError as error:
            raise Misfit(f"{self.name} cannot be written as JSON: {error}") from None
        return plain(document, depth)

    def decode(self, value: Any) -> Any:
        try:
            # As JSON text: a strict model takes a datetime from a JSON string only in this mode.
            return self._kind.model_validate_json(json.dumps(value))
        except ValueError as error:
            raise self._unfit(error) from None

    def _unfit(self, error: Any) -> Misfit:
        if not hasattr(error, "errors"):
            return Misfit(f"{self.name} refuses it: {error}")
        first = error.errors()[0]
        misfit = Misfit(f"{self.name} refuses it: {first['msg']}")
        for step in reversed(first["loc"]):
            misfit.inside(step)
        return misfit

    def schema(self) -> dict[str, Any]:
        return {"type": "object"} if self.kinds == {"object"} else {}


class UnionCodec(Codec):
    """One of several types; refused at decoration where JSON could not tell them apart."""

    def __init__(self, members: list[Codec]) -> None:
        # A float takes what an int wrote, so it is asked last.
        self._members = sorted(members, key=lambda member: isinstance(member, FloatCodec))
        self.name = " or ".join(member.name for member in members)
        self.kinds = frozenset().union(*(member.kinds for member in members))
        self.is_plain = all(member.is_plain for member in members)
        self._needs_proof = False
        for place, one in enumerate(members):
            for other in members[:place]:
                shared = one.kinds & other.kinds
                if not shared or (one.is_plain and other.is_plain):
                    continue
                # Objects mostly differ in their fields: whether these do is seen on each value.
                if shared <= {"object"} and not one.is_plain and not other.is_plain:
                    self._needs_proof = True
                    continue
                raise TypeError(f"{other.name} and {one.name} in one union look alike in JSON")

    def is_native(self, value: Any) -> bool:
        return any(member.is_native(value) for member in self._members)

    def encode(self, value: Any, depth: int = 0) -> Any:
        members = [member for member in self._members if member.is_native(value)]
        members = members or [member for member in self._members if json_kind(value) in member.kinds]
        refusals: list[Misfit] = []
        for member in members:
            try:
                encoded = member.encode(value, depth)
            except Misfit as misfit:
                refusals.append(misfit)
                continue
            if self._needs_proof:
                self._prove(member, encoded)
            return encoded
        raise refusals[0] if len(refusals) == 1 else self.refusal(value)

    def decode(self, value: Any) -> Any:
        refusals: list[Misfit] = []
        for member in self._members:
            if json_kind(value) in member.kinds:
                try:
                    return member.decode(value)
                except Misfit as misfit:
                    refusals.append(misfit)
        raise refusals[0] if len(refusals) == 1 else self.refusal(value)

    def _prove(self, writer: Codec, encoded: Any) -> None:
        for member in self._members:
            if member is writer:
                return
            try:
                member.decode(encoded)
            except Misfit:
                continue
            raise Misfit(
                f"this {writer.name} would come back as {member.name}; give one of them a field to tell"
            )

    def schema(self) -> dict[str, Any]:
        schemas = [member.schema() for member in self._members]
        if all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
            return {"type": sorted({schema["type"] for schema in schemas})}
        return {"anyOf": schemas}
