"""Trying a mutant: its scenario as shipped, where every invariant must hold, and altered, where one must not.

Each time on a database of its own. A scenario that several mutants share is tried once as shipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.faults.arena import Arena
from tests.faults.drill import Drill
from tests.faults.invariants import Verdict
from tests.faults.mutants import MUTANTS, Mutant
from tests.faults.mutants.mutant import Scenario


class Trials:
    """Tries mutants on one server. What is wrong is told in words; None means that nothing is."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._count = 0
        self._as_shipped: dict[Scenario, str | None] = {}
        # How the latest mutant was caught.
        self.evidence = ""

    def as_shipped(self, mutant: Mutant) -> str | None:
        """Run its scenario with nothing done wrong."""
        if mutant.scenario not in self._as_shipped:
            found = self._violated(mutant, is_altered=False)
            lines = "\n  ".join(verdict.line() for verdict in found)
            problem = f"as shipped, {mutant.scenario_name}: VIOLATED\n  {lines}" if found else None
            self._as_shipped[mutant.scenario] = problem
        return self._as_shipped[mutant.scenario]

    def altered(self, mutant: Mutant) -> str | None:
        """Run its scenario with its one thing done wrong."""
        found = {verdict.name: verdict for verdict in self._violated(mutant, is_altered=True)}
        if (told := found.get(mutant.invariant)) is None:
            return f"mutant {mutant.name}: NOT CAUGHT by {mutant.invariant}, only by {[*found] or 'nothing'}"
        self.evidence = f"caught by {told.name} ({told.violations[0]})"
        return None

    def _violated(self, mutant: Mutant, *, is_altered: bool) -> list[Verdict]:
        self._count += 1
        drill = Drill(self._arena, f"{'mutant' if is_altered else 'shipped'}_{self._count}")
        try:
            if is_altered:
                mutant.alter(drill)
            mutant.scenario(drill)
            return [verdict for verdict in drill.verdicts() if verdict.violations]
        finally:
            drill.close()


def run(arena: Arena, only: str | None, say: Callable[[str], None], *, is_quick: bool = False) -> bool:
    """Try the mutants, or one of them; True if every one was caught and every scenario holds as shipped."""
    chosen = [one for one in MUTANTS if only in (None, one.name) and not (is_quick and one.is_slow)]
    if not chosen:
        say(f"no mutant {only!r}; there are: {', '.join(mutant.name for mutant in MUTANTS)}")
        return False
    began_at = time.monotonic()
    trials = Trials(arena)
    bad = []
    for mutant in chosen:
        problems = [
            problem for problem in (trials.as_shipped(mutant), trials.altered(mutant)) if problem is not None
        ]
        for problem in problems:
            say(problem)
        if problems:
            bad.append(mutant.name)
        else:
            say(f"mutant {mutant.name}: {trials.evidence}; as shipped, {mutant.scenario_name}: holds")
    said = f"FAILED: {', '.join(bad)}" if bad else "all caught"
    say(f"{len(chosen)} mutants, {said} ({time.monotonic() - began_at:.0f} s)")
    return not bad
