"""Codecs: how one type travels as JSON.

`encode` takes a value of its type (or that value's JSON form, so that a call by name may pass plain
JSON) and gives what `json.dumps` takes; `decode` gives the value back. What comes out equals what
went in, or it is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum, Flag
from typing import Any
from uuid import UUID

from pgqueue.model.encoding import Misfit, kind_of, listed, plain, shown

ALL_KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})


class Codec:
    """How one type travels; this one is for plain JSON of any kind.

    `kinds` are the JSON kinds it writes, `is_plain` says that the JSON form equals the value.
    """

    name = "JSON"
    kinds: frozenset[str] = ALL_KINDS
    is_plain = True

    def is_native(self, value: Any) -> bool:  # noqa: ARG002  other codecs look
        return True

    def encode(self, value: Any, depth: int = 0) -> Any:
        return plain(value, depth)

    def decode(self, value: Any) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}

    def refusal(self, value: Any) -> Misfit:
        return Misfit(f"expected {self.name}, got {kind_of(value)}")


PLAIN = Codec()


class ScalarCodec(Codec):
    """A type that is a JSON kind of its own."""

    def __init__(self, kind: type, name: str, json_kind: str, schema_type: str) -> None:
        self._kind = kind
        self.name = name
        self.kinds = frozenset({json_kind})
        self._schema_type = schema_type

    def is_native(self, value: Any) -> bool:
        return isinstance(value, self._kind) and (self._kind is bool or not isinstance(value, bool))

    def encode(self, value: Any, depth: int = 0) -> Any:
        if type(value) is not self._kind and not self.is_native(value):
            raise self.refusal(value)
        return plain(value, depth)

    def decode(self, value: Any) -> Any:
        if type(value) is not self._kind and not self.is_native(value):
            raise self.refusal(value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": self._schema_type}


class FloatCodec(ScalarCodec):
    """Float; takes whole numbers too, because jsonb writes 1e16 as one."""

    def __init__(self) -> None:
        super().__init__(float, "a float", "number", "number")

    def encode(self, value: Any, depth: int = 0) -> Any:
        return plain(self.decode(value), depth)

    def decode(self, value: Any) -> Any:
        if isinstance(value, float):
            return value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(value)
        try:
            return float(value)
        except OverflowError:
            raise Misfit("too large for a float") from None


class TextCodec(Codec):
    """A type written as a string."""

    is_plain = False
    kinds = frozenset({"string"})

    def __init__(
        self,
        kind: type,
        name: str,
        write: Callable[[Any], str],
        read: Callable[[str], Any],
        schema_format: str | None,
    ) -> None:
        self._kind = kind
        self.name = name
        self._write = write
        self._read = read
        self._format = schema_format

    def is_native(self, value: Any) -> bool:
        # datetime is a date to Python, but a date that came back would have lost its time.
        return isinstance(value, self._kind) and not (self._kind is date and isinstance(value, datetime))

    def encode(self, value: Any, depth: int = 0) -> Any:  # noqa: ARG002
        return self._write(value if self.is_native(value) else self.decode(value))

    def decode(self, value: Any) -> Any:
        if not isinstance(value, str):
            raise self.refusal(value)
        try:
            return self._read(value)
        except (ValueError, InvalidOperation):
            raise Misfit(f"expected {self.name}, got {shown(value)}") from None

    def schema(self) -> dict[str, Any]:
        return {"type": "string", **({"format": self._format} if self._format else {})}


class DecimalCodec(TextCodec):
    """Decimal as a string, which keeps every digit; reads numbers too, as other languages write them."""

    def __init__(self) -> None:
        super().__init__(Decimal, "a Decimal", _write_decimal, _read_decimal, None)

    def decode(self, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Decimal(str(value))
        return super().decode(value)


class TimedeltaCodec(Codec):
    """Timedelta as its number of seconds."""

    name = "a timedelta"
    is_plain = False
    kinds = frozenset({"number"})

    def is_native(self, value: Any) -> bool:
        return isinstance(value, timedelta)

    def encode(self, value: Any, depth: int = 0) -> Any:  # noqa: ARG002
        duration = value if isinstance(value, timedelta) else self.decode(value)
        seconds = duration.total_seconds()
        # A float of seconds is exact to the microsecond for some 270 years.
        if abs(seconds) > 2**33 and self.decode(seconds) != duration:
            raise Misfit(f"{duration!r} has more digits than a number of seconds keeps")
        return int(seconds) if seconds.is_integer() else seconds

    def decode(self, value: Any) -> Any:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.refusal(value)
        try:
            return timedelta(seconds=value)
        except (OverflowError, ValueError):
            raise Misfit(f"{shown(value)} seconds are more than a timedelta holds") from None

    def schema(self) -> dict[str, Any]:
        return {"type": "number"}


class EnumCodec(Codec):
    """An Enum by its value where all values are strings or integers, otherwise by its name."""

    is_plain = False

    def __init__(self, kind: type[Enum]) -> None:
        self._kind = kind
        self.name = kind.__name__
        self._is_flag = issubclass(kind, Flag)
        values = [member.value for member in kind]
        is_by_value = all(type(value) is str for value in values) or all(
            type(value) is int for value in values
        )
        self._members: dict[str | int, Enum] = {
            (member.value if is_by_value else member.name): member for member in kind
        }
        self._written = {member: written for written, member in self._members.items()}
        self.kinds = frozenset(
            {"number" if self._is_flag or (is_by_value and type(values[0]) is int) else "string"}
        )

    def is_native(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def encode(self, value: Any, depth: int = 0) -> Any:
        member = value if isinstance(value, self._kind) else self.decode(value)
        return plain(member.value if self._is_flag else self._written[member], depth)

    def decode(self, value: Any) -> Any:
        if self._is_flag and type(value) is int:
            try:
                flags = self._kind(value)
            except ValueError:
                raise self.refusal(value) from None
            # Before Python 3.11.4 a Flag drops the bits it does not know instead of refusing them.
            if flags.value != value:
                raise self.refusal(value)
            return flags
        # True equals 1, so the type is part of the question.
        if type(value) not in (str, int) or value not in self._members:
            raise Misfit(f"expected one of {listed(self._members)}, got {shown(value)}")
        return self._members[value]

    def schema(self) -> dict[str, Any]:
        return {"type": "integer"} if self._is_flag else {"enum": list(self._members)}


class LiteralCodec(Codec):
    """One of some plain values."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        for value in values:
            if type(value) not in (str, int, bool, type(None)):
                raise TypeError(f"Literal[{value!r}] is not plain JSON")
        self._values = values
        self.name = f"one of {listed(values)}"
        kinds = {str: "string", int: "number", bool: "boolean", type(None): "null"}
        self.kinds = frozenset(kinds[type(value)] for value in values)

    def is_native(self, value: Any) -> bool:
        return any(type(value) is type(known) and value == known for known in self._values)

    def encode(self, value: Any, depth: int = 0) -> Any:
        return plain(self.decode(value), depth)

    def decode(self, value: Any) -> Any:
        if not self.is_native(value):
            raise Misfit(f"expected {self.name}, got {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self._values)}


def _write_datetime(value: datetime) -> str:
    if value.tzinfo is None or value.utcoffset() is None:
        raise Misfit(f"{value!r} has no time zone, so it names no instant; give it one (tzinfo=UTC)")
    return value.isoformat()


def _read_datetime(text: str) -> datetime:
    value = datetime.fromisoformat(text)
    if value.tzinfo is None:
        raise Misfit(f"{shown(text)} has no time zone, so it names no instant; append Z or an offset")
    return value


def _write_time(value: time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise Misfit(f"{value!r} has a zone whose offset depends on the date")
    return value.isoformat()


def _write_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise Misfit(f"{value} is not a number")
    return str(value)


def _read_decimal(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite():
        raise Misfit(f"{value} is not a number")
    return value


SCALARS: Mapping[type, Codec] = {
    str: ScalarCodec(str, "a str", "string", "string"),
    int: ScalarCodec(int, "an int", "number", "integer"),
    bool: ScalarCodec(bool, "a bool", "boolean", "boolean"),
    type(None): ScalarCodec(type(None), "None", "null", "null"),
    float: FloatCodec(),
    Decimal: DecimalCodec(),
    timedelta: TimedeltaCodec(),
    datetime: TextCodec(datetime, "a datetime with time zone", _write_datetime, _read_datetime, "date-time"),
    date: TextCodec(date, "a date", date.isoformat, date.fromisoformat, "date"),
    time: TextCodec(time, "a time", _write_time, time.fromisoformat, "time"),
    UUID: TextCodec(UUID, "a UUID", str, UUID, "uuid"),
    bytes: TextCodec(
        bytes,
        "bytes (as base64)",
        lambda value: base64.b64encode(value).decode("ascii"),
        lambda text: base64.b64decode(text, validate=True),
        "byte",
    ),
}
