"""Plain JSON that PostgreSQL can store and Python reads back: what it is, and where a value is not.

Nothing is bent to fit. A NaN, a NUL, half of a surrogate pair or a key that is no string is refused
with its path, because each of them is either an opaque error of the database or a silent change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

from pgqueue.errors import ConfigurationError

# Far below what PostgreSQL's parser, Python's and those of other languages take, and far above
# what anybody passes on purpose.
MAX_DEPTH = 100

# Python refuses to read or write longer ones as text (its guard against quadratic conversion).
MAX_INTEGER_DIGITS = 4_300
_INTEGER_LIMIT = 10**MAX_INTEGER_DIGITS


def _writer() -> Callable[[Any], str]:
    """Make the function that writes JSON: once, for json.dumps makes an encoder at every call."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    # Without a look for cycles: what is written here has been copied, and is no deeper than MAX_DEPTH.
    texts = make(
        None,
        encoder.default,
        json.encoder.encode_basestring,
        None,
        encoder.key_separator,
        encoder.item_separator,
        encoder.sort_keys,
        encoder.skipkeys,
        encoder.allow_nan,
    )
    return lambda value: "".join(texts(value, 0))


write = _writer()
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class Misfit(Exception):
    """A value does not fit; `path` is where inside the whole it lies."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = ""

    def inside(self, step: Any) -> Misfit:
        """Say in which member of a container the value lies."""
        is_name = isinstance(step, str) and step.isidentifier()
        self.path = f".{step}{self.path}" if is_name else f"[{shown(step)}]{self.path}"
        return self

    def where(self, root: str) -> str:
        """Give path and reason, with the path from `root` on."""
        path = self.path if len(self.path) <= 120 else f"{self.path[:60]}...{self.path[-20:]}"
        return f"{root}{path}: {self.reason}"


def plain(value: Any, depth: int = 0) -> Any:
    """Check that a value is plain JSON that PostgreSQL can store, and give it without subclasses.

    Raises:
        Misfit: it is not; says where and why.
    """
    kind = type(value)
    if kind is str:
        return _checked_text(value)
    if kind is bool or value is None:
        return value
    if kind is int:
        return _checked_integer(value)
    if kind is float:
        if not isfinite(value):
            raise Misfit(f"{value} is not JSON")
        return value
    if isinstance(value, dict):
        return _plain_members(value, depth)
    if kind is tuple or isinstance(value, list):
        check_depth(depth)
        return each(value, lambda item: plain(item, depth + 1))
    # IntEnum, StrEnum and the like equal their plain value, so nothing changes on the way.
    if isinstance(value, str):
        return _checked_text(str.__str__(value))
    if isinstance(value, int):
        return _checked_integer(int(value))
    if isinstance(value, float):
        return plain(float(value))
    raise Misfit(
        f"{kind.__name__} is not JSON; annotate the handler with this type to have it converted both ways"
    )


def dumps(value: Any) -> str:
    """Write encoded values as PostgreSQL shows jsonb, so that lengths counted here hold there."""
    try:
        return write(value)
    except (ValueError, RecursionError) as error:
        # Only a lowered sys.set_int_max_str_digits leads here.
        raise Misfit(str(error)) from None


def loads(text: str) -> Any:
    """Read JSON; whatever this Python cannot take of what PostgreSQL stores is a Misfit."""
    value: Any = None
    # Half the time of json.loads, which looks for space around the document: PostgreSQL writes none.
    # (orjson would be faster still, but makes floats of integers beyond 64 bits.)
    try:
        value, end = _scan(text, 0)
    except (StopIteration, RecursionError, ValueError):
        end = -1
    if end == len(text):
        return value
    try:
        return json.loads(text)
    except RecursionError:
        raise Misfit("nested too deeply for Python to read") from None
    except ValueError as error:
        raise Misfit(f"not JSON that Python reads: {error}") from None


def _plain_members(value: dict[Any, Any], depth: int) -> dict[str, Any]:
    check_depth(depth)
    encoded: dict[str, Any] = {}
    key = ""
    try:
        for key, member in value.items():
            encoded[checked_key(key)] = plain(member, depth + 1)
    except Misfit as misfit:
        raise misfit.inside(key) from None
    return encoded


def each(values: Iterable[Any], convert: Callable[[Any], Any]) -> list[Any]:
    converted: list[Any] = []
    try:
        for value in values:
            converted.append(convert(value))  # noqa: PERF401  its length is where it failed
    except Misfit as misfit:
        raise misfit.inside(len(converted)) from None
    return converted


def check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise Misfit(f"nested deeper than {MAX_DEPTH} levels")


def checked_key(key: Any) -> str:
    if type(key) is str:
        return _checked_text(key)
    if isinstance(key, str):
        return _checked_text(str.__str__(key))
    raise Misfit(f"the key is {kind_of(key)}, and the keys of a JSON object are strings")


def _checked_text(text: str) -> str:
    if "\0" in text:
        raise Misfit(
            f"contains a NUL character at position {text.index(chr(0))}, which PostgreSQL cannot store"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Misfit(
                f"contains half of a surrogate pair (\\u{ord(text[error.start]):04x}) "
                f"at position {error.start}, which is not text"
            ) from None
    return text


def _checked_integer(value: int) -> int:
    if -_INTEGER_LIMIT < value < _INTEGER_LIMIT:
        return value
    raise Misfit(f"an integer of more than {MAX_INTEGER_DIGITS:,} digits")


def checked_text(name: str, value: Any, max_bytes: int) -> str:
    """Give a name or key back if the database takes it.

    Raises:
        ValueError: it is empty, too long or not text; begins with `name`.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty, not {value!r:.60}")
    try:
        _checked_text(value)
    except Misfit as misfit:
        raise ValueError(f"{name} {misfit.reason}") from None
    size = len(value.encode())
    if size > max_bytes:
        raise ValueError(f"{name} has {size:,} bytes, at most {max_bytes} fit ({value[:40]!r}...)")
    return value


def several(name: str, values: Any, kind: str = "names") -> list[Any]:
    """Give the members of a list; one text is refused, for nobody means its letters.

    Raises:
        ConfigurationError: it is no list; begins with `name`.
    """
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Iterable):
        raise ConfigurationError(f"{name} must be a list of {kind}, not {values!r:.60}")
    return list(values)


# Words for messages.


def json_kind(value: Any) -> str | None:
    """Name the JSON kind a value has as it stands, if it has one."""
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return "null" if value is None else kinds.get(type(value))


def kind_of(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, (list, dict, tuple, set, frozenset)):
        return f"a {type(value).__name__}"
    return f"{shown(value)} ({type(value).__name__})"


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  __repr__ is the user's code
        return f"<{type(value).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(values: Iterable[Any]) -> str:
    listed = [repr(value) for value in values]
    return ", ".join(listed[:10]) + (", ..." if len(listed) > 10 else "")


def _named(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)
