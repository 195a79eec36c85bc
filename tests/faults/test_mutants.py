"""The checker bites: it finds each mutant, and nothing wrong with the queue as shipped in the same scenario.

Without CI set those are left out that start workers or the server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.faults.arena import Arena, run_folder
from tests.faults.mutants import MUTANTS, Mutant
from tests.faults.trial import Trials

IN_CI = os.environ.get("CI") == "true"
CHOSEN = [mutant for mutant in MUTANTS if IN_CI or not mutant.is_slow]


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with run_folder(keep=lambda: False) as folder, Arena(folder, is_durable=False) as arena:
        yield Trials(arena)


@pytest.mark.skipif(sys.platform != "linux", reason="is about what /proc shows")
@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_and_what_is_shipped_holds(mutant: Mutant, trials: Trials) -> None:
    assert trials.as_shipped(mutant) is None
    assert trials.altered(mutant) is None


def test_every_invariant_has_a_mutant_that_shows_it_can_fail() -> None:
    named = {mutant.invariant for mutant in MUTANTS}

    assert named == {f"I{number}" for number in range(1, 13)}
