"""What a mutant is: the queue with one thing done wrong, and a scenario in which an invariant shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.drill import Drill

Scenario = Callable[[Drill], None]


@dataclass(frozen=True)
class Mutant:
    """One thing done wrong, and the scenario in which the named invariant shows it."""

    name: str
    invariant: str
    scenario: Scenario
    alter: Callable[[Drill], None]
    # Whether its scenario takes a worker's start or the server's.
    is_slow: bool

    @property
    def scenario_name(self) -> str:
        return self.scenario.__name__.replace("_", " ")


MUTANTS: list[Mutant] = []


def mutant(
    invariant: str, scenario: Scenario, *, is_slow: bool = False
) -> Callable[[Callable[[Drill], None]], Callable[[Drill], None]]:
    """Make a mutant of a function that alters a drill; its name is the mutant's."""

    def made(alter: Callable[[Drill], None]) -> Callable[[Drill], None]:
        MUTANTS.append(Mutant(alter.__name__.replace("_", "-"), invariant, scenario, alter, is_slow))
        return alter

    return made
