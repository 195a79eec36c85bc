"""Memory that parent and child share: which attempts run at this instant, and which must not begin.

The child writes an attempt's serial before its handler starts and takes it away once the outcome
is on its way. When the child dies, in whatever manner, the parent reads here who was running, to
the instruction, and who had not begun.

The parent writes the serials of attempts that are not the child's any more. A child whose loop stands
still hears no message, but its threads look here before they begin what has waited.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable

_WORD_BYTES = 8
# So many revocations are remembered; the newest take the places of the oldest.
_REVOCATIONS = 4096


class Board:
    """A row of numbered places, each empty or holding a serial. Writing one is a single store."""

    def __init__(self, descriptor: int, places: int) -> None:
        self.descriptor = descriptor
        self.places = places
        self._memory = mmap.mmap(descriptor, (places + _REVOCATIONS) * _WORD_BYTES)
        words = memoryview(self._memory).cast("q")
        self._words, self._revoked = words[:places], words[places:]
        self._free = list(range(places))
        self._next_revocation = 0

    @classmethod
    def create(cls, places: int) -> Board:
        """Make a board in the parent; the child opens it by its inherited descriptor."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("pgqueue-board", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, (places + _REVOCATIONS) * _WORD_BYTES)
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

    def revoke(self, serials: Iterable[int]) -> None:
        """Say that these must not begin: one that is not seen to run a moment later never will."""
        for serial in serials:
            self._revoked[self._next_revocation] = serial
            self._next_revocation = (self._next_revocation + 1) % _REVOCATIONS

    def is_revoked(self, serial: int) -> bool:
        """Say whether this must not begin; to be asked after `put`. Not cheap once there are some."""
        return self._revoked[0] != 0 and serial in self._revoked

    def close(self) -> None:
        self._words.release()
        self._revoked.release()
        self._memory.close()
        os.close(self.descriptor)
