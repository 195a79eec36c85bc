"""Command lines that are suggested, written so that a shell takes every word as it is meant.

Names and keys are whatever a customer made them: pasted into a shell, none of them is executed, split or
taken for an option, and what is suggested acts on the schema it was suggested for.
"""

from __future__ import annotations

import shlex


def write_command(name: str, *words: object, schema: str, **options: object) -> str:
    """Write a command of pgqueue's: `write_command("log", "mail", schema=schema, action="queue.pause")`.

    An option that is True is written without a value; the schema is said unless it is the default one.
    """
    line = ["pgqueue", *name.split()]
    if schema != "pgqueue":
        options["schema"] = schema
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif str(value).startswith("-"):
            line.append(_quoted(f"{flag}={value}"))
        else:
            line += [flag, _quoted(str(value))]
    texts = [str(word) for word in words]
    if any(text.startswith("-") for text in texts):
        line.append("--")
    return " ".join([*line, *map(_quoted, texts)])


def write_psql(*statements: str) -> str:
    """Write what runs these statements one by one, in one session."""
    return " ".join(['psql "$PGQUEUE_DSN"', *(f"-c {_quoted(statement)}" for statement in statements)])


def write_termination(pid: int | None) -> str:
    """Write what ends a session, whatever it is about."""
    return write_psql(f"SELECT pg_terminate_backend({pid})")


def sql_name(name: str, schema: str | None = None) -> str:
    """Write a name as SQL takes it; behind its schema it is quoted only where it has to be."""
    quoted = '"' + name.replace('"', '""') + '"'
    if schema is None:
        return quoted
    is_plain = name.isascii() and name.isidentifier() and name.islower()
    return f"{schema}.{name if is_plain else quoted}"


def sql_text(text: str) -> str:
    """Write a text as SQL takes it."""
    return "'" + text.replace("'", "''") + "'"


def _quoted(text: str) -> str:
    if text.isprintable():
        return shlex.quote(text)
    # No terminal shows it as it is, and what it shows instead would be another name.
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode())
