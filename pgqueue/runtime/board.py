"""Memory that parent and child share: which attempts run at this instant.

The child writes an attempt's serial before its handler starts and takes it away once the outcome
is on its way. When the child dies, in whatever manner, the parent reads here who was running, to
the instruction, and who had not begun.
"""

from __future__ import annotations

import mmap
import os
import tempfile

_WORD_BYTES = 8


class Board:
    """A row of numbered places, each empty or holding a serial. Writing one is a single store."""

    def __init__(self, descriptor: int, places: int) -> None:
        self.descriptor = descriptor
        self.places = places
        self._memory = mmap.mmap(descriptor, places * _WORD_BYTES)
        self._words = memoryview(self._memory).cast("q")
        self._free = list(range(places))

    @classmethod
    def create(cls, places: int) -> Board:
        """Make a board in the parent; the child opens it by its inherited descriptor."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("pgqueue-board", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, places * _WORD_BYTES)
        return cls(descriptor, places)

    def put(self, serial: int) -> int:
        """Take a free place for a serial and say which; -1 when none is left. Safe from any thread."""
        try:
            place = self._free.pop()
        except IndexError:
            # It will only seem not to have begun: no reason to fail it.
            return -1
        self._words[place] = serial
        return place

    def mark_ended(self, place: int) -> None:
        """Say that the handler at this place has ended, though nobody has been told how."""
        self._words[place] = -self._words[place]

    def clear(self, places: list[int]) -> None:
        for place in places:
            self._words[place] = 0
        self._free += places

    def running(self) -> set[int]:
        return {serial for serial in self._words if serial > 0}

    def ended(self) -> set[int]:
        return {-serial for serial in self._words if serial < 0}

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)
