"""The check's own reading of the files, in a process of its own: `python -m pgqueue.demo.reading`.

Takes paths from stdin, one JSON text a line, and answers each with a line. It shares no code with the
handlers that fill the catalogue, or their mistakes would be its own.
"""

from __future__ import annotations

import ast
import gc
import json
import sys
from hashlib import file_digest
from pathlib import Path
from typing import NamedTuple

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Reading(NamedTuple):
    """What is in a file; `fault` says why it does not parse."""

    path: str
    bytes: int
    lines: int
    sha256: str
    definitions: list[str]
    fault: str | None


def read(path: str) -> Reading:
    with Path(path).open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
        size = file.tell()
        file.seek(0)
        lines = list(file)
    definitions: list[str] = []
    fault = None
    try:
        tree = ast.parse(b"".join(lines), path)
    except SyntaxError as error:
        fault = error.msg
    except ValueError as error:
        fault = str(error)
    else:
        definitions = [node.name for node in tree.body if isinstance(node, _DEFINITIONS)]
    return Reading(path, size, len(lines), digest, definitions, fault)


def main() -> None:
    # Trees have no cycles; looking for some in millions of nodes costs a sixth of the time.
    gc.disable()
    for line in sys.stdin.readlines():
        sys.stdout.write(json.dumps(read(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
