"""Statements as values: the only place that knows a table's name.

A statement is a text, its parameters and how to read its rows. Running it is somebody else's
business, so the same statement serves sync, async and foreign connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]

SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Statement(Generic[T]):
    """One SQL statement, its parameters, and how to read its rows."""

    text: str
    params: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Sequence[Row]], T] = list  # type: ignore[assignment]

    def in_schema(self, schema: str) -> bytes:
        """Give the text for that schema, as bytes: the form in which the driver takes any text."""
        return _render(self.text, schema)


def load(subject: str) -> dict[str, str]:
    """Read `subject.sql`: each statement by its `-- name:`."""
    text = files("pgqueue.sql").joinpath(f"{subject}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)
    return {name: body.strip().rstrip(";") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


@lru_cache(maxsize=512)
def _render(text: str, schema: str) -> bytes:
    if not SCHEMA_NAME.fullmatch(schema):
        raise ValueError(f"not a plain schema name: {schema!r}")
    return text.replace("{{schema}}", schema).encode()


# How rows are read.


def nothing(_rows: Sequence[Row]) -> None:
    return None


def rows(found: Sequence[Row]) -> list[Row]:
    return list(found)


def first_value(found: Sequence[Row]) -> Any:
    """Give the first column of the first row, or None without a row."""
    return found[0][0] if found else None


def column(found: Sequence[Row]) -> list[Any]:
    return [row[0] for row in found]
