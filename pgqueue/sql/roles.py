"""The roles that may be given to those who log in, as a statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.sql import Statement, load

_TEXT = load("roles")


@dataclass(frozen=True, slots=True)
class Role:
    """One of the roles, whether somebody has made it, and who has it; superusers need none."""

    name: str
    exists: bool
    members: list[str]


def list_roles(names: Sequence[str]) -> Statement[list[Role]]:
    return Statement(_TEXT["list_roles"], {"names": list(names)}, lambda found: [Role(*row) for row in found])
