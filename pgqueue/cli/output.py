"""What commands print: tables for people, one JSON document for programs, talk on stderr.

Whatever comes out of the database is made harmless first: a task name, an error or an argument
may hold escape sequences that a terminal would obey.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import click

from pgqueue.model.spoken import ago, counted, duration, elapsed, headline, instant

__all__ = [
    "Cell",
    "Column",
    "ago",
    "block",
    "commands",
    "counted",
    "display_width",
    "document",
    "duration",
    "elapsed",
    "fields",
    "heading",
    "headline",
    "instant",
    "json_text",
    "plain",
    "pretty",
    "progress",
    "say",
    "shorten",
    "table",
    "table_lines",
]

Cell = str | int | None
GAP = "  "
NARROWEST = 10
PROGRESS_EVERY_SECONDS = 30.0


def say(message: str) -> None:
    """Tell the person something that is not the result: stderr. Lost, it fails nothing that was done."""
    with suppress(OSError):
        click.echo(message, err=True)


# Tables.


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title, and whether it may be cut when the terminal is too narrow."""

    title: str
    is_number: bool = False
    may_shrink: bool = False


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, empty: str) -> None:
    """Print an aligned table, or say `empty` on stderr; cut to the terminal only if there is one."""
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if lines := table_lines(columns, rows, room):
        click.echo("\n".join(lines))
    else:
        say(empty)


def table_lines(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], room: int | None) -> list[str]:
    """Give the lines of an aligned table with its head, none without rows; cut to the room, if given."""
    lines = [[plain(cell) for cell in row] for row in rows]
    if not lines:
        return []
    lines.insert(0, [column.title.upper() for column in columns])
    widths = [max(map(display_width, cells)) for cells in zip(*lines, strict=True)]
    if room is not None:
        _shrink(widths, columns, room)
    return [_line(cells, columns, widths) for cells in lines]


def _shrink(widths: list[int], columns: Sequence[Column], room: int) -> None:
    # From the right: what tells one row from another stands at the left.
    for place in reversed(range(len(columns))):
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - room
        if excess > 0 and columns[place].may_shrink:
            widths[place] = min(widths[place], max(NARROWEST, widths[place] - excess))


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        cut = shorten(cell, width)
        space = " " * (width - display_width(cut))
        padded.append(space + cut if column.is_number else cut + space)
    return GAP.join(padded).rstrip()


def fields(pairs: Iterable[tuple[str, Cell]]) -> None:
    """Print `name  value` lines; a field without a value is left out."""
    shown = [(name, plain(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    click.echo("\n".join(f"{name.ljust(width)}{GAP}{value}" for name, value in shown))


def heading(title: str) -> None:
    click.echo(f"\n{title}")


def commands(lines: Iterable[str]) -> None:
    """Print command lines that come next, ready to be copied."""
    for line in lines:
        click.echo(f"  {plain(line)}")


def block(text: str, indent: str = "  ") -> None:
    """Print text of several lines, harmless and indented."""
    click.echo("\n".join((indent + plain(line)).rstrip() for line in text.splitlines()))


def plain(cell: Cell) -> str:
    """Give the cell as one line that no terminal takes for a command."""
    if cell is None:
        return "-"
    text = str(cell)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def display_width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(_cells(character) for character in text)


def shorten(text: str, width: int) -> str:
    """Cut the text to so many terminal cells, with an ellipsis where something is missing."""
    if display_width(text) <= width:
        return text
    kept, used = [], 1
    for character in text:
        used += _cells(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept) + "…"


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


# JSON.


def document(value: Any, *, on_one_line: bool = False) -> None:
    """Print the JSON document of a --json command; on a line, where it is one of several."""
    text = json_text(value)
    if on_one_line:  # all line ends are our own: in a string they are escaped
        text = " ".join(line.strip() for line in text.split("\n"))
    # Only strings can hold anything unprintable besides our own line ends.
    click.echo(text if text.replace("\n", "").isprintable() else "".join(map(_escaped, text)))


def _escaped(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return json.dumps(character)[1:-1]


def pretty(text: str) -> str:
    """Give JSON text over several lines; numbers stay as they are written."""
    from pgqueue.sql.inspect import JsonText

    try:
        return json_text(json.loads(text, parse_int=JsonText, parse_float=JsonText))
    except (ValueError, RecursionError):
        return text


def json_text(value: Any, indent: str = "\n") -> str:
    """Encode dataclasses, times (ISO 8601, UTC), uuids, and JSON from the database as it is."""
    from pgqueue.sql.inspect import JsonText

    if isinstance(value, JsonText):
        return str(value)
    if isinstance(value, datetime):
        return json.dumps(value.astimezone(UTC).isoformat().replace("+00:00", "Z"))
    if isinstance(value, UUID):
        return json.dumps(str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    deeper = indent + "  "
    if isinstance(value, Mapping):
        members = [f"{json.dumps(str(k))}: {json_text(v, deeper)}" for k, v in value.items()]
        return "{" + deeper + ("," + deeper).join(members) + indent + "}" if members else "{}"
    if isinstance(value, (list, tuple)):
        elements = [json_text(each, deeper) for each in value]
        return "[" + deeper + ("," + deeper).join(elements) + indent + "]" if elements else "[]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# Progress.


@contextmanager
def progress(
    label: str, total: int, every_seconds: float = PROGRESS_EVERY_SECONDS
) -> Iterator[Callable[[int], None]]:
    """Show how far a long operation is: a bar on a terminal, now and then a line elsewhere; on stderr."""
    if sys.stderr.isatty() and total > 1:
        with click.progressbar(length=total, label=label, file=sys.stderr, show_pos=True) as bar:
            yield bar.update
        return
    done = 0
    said_at = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said_at
        done += count
        if time.monotonic() - said_at >= every_seconds:
            said_at = time.monotonic()
            say(f"{label}: {done:,} of {total:,}")

    yield advance
