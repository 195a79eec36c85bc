"""What was asked for and what was answered, written down beside the queue, never in it.

A line in a local file survives a killed writer and a killed server alike. So the checker knows
which jobs must be there (acknowledged), which may be (the answer was lost), and which must not be.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Journal:
    """One writer's journal. Every job asked for has a mark of its own in its arguments."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}-{os.getpid()}.journal"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @staticmethod
    def mark() -> str:
        return uuid.uuid4().hex[:16]

    def intend(self, *marks: str) -> None:
        """Write down what is about to be asked for."""
        self._write("intended", [[mark, None] for mark in marks])

    def acknowledge(self, marks: Sequence[str], job_ids: Sequence[int]) -> None:
        self._write("acknowledged", list(zip(marks, job_ids, strict=True)))

    def refuse(self, *marks: str) -> None:
        """Write down that these were refused: they must not be there."""
        self._write("refused", [[mark, None] for mark in marks])

    def _write(self, said: str, entries: Sequence[Sequence[object]]) -> None:
        # One write of a line: what is appended by a process that is killed meanwhile is all there or not.
        os.write(self._descriptor, (json.dumps([said, *entries]) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass
class Enqueues:
    """All journals together: marks, and the ids of those acknowledged."""

    intended: set[str] = field(default_factory=set)
    acknowledged: dict[str, int] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    @property
    def ambiguous(self) -> set[str]:
        """Those that may be there or not: the answer was lost, or whoever waited for it was killed."""
        return self.intended - self.acknowledged.keys() - self.refused

    @classmethod
    def read(cls, folder: Path) -> Enqueues:
        found = cls()
        for path in folder.glob("*.journal"):
            for line in path.read_text().splitlines():
                said, *entries = json.loads(line)
                match said:
                    case "intended":
                        found.intended.update(mark for mark, _ in entries)
                    case "acknowledged":
                        found.acknowledged.update((mark, job_id) for mark, job_id in entries)
                    case "refused":
                        found.refused.update(mark for mark, _ in entries)
        return found
