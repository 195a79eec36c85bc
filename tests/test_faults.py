"""The fault campaign's own papers: what it can break is what it says it breaks.

The campaign itself is `python -m tests.faults`, and in its short form `pytest tests/faults/suite.py`.
"""

from __future__ import annotations

import re

from tests.faults.jobs import app
from tests.faults.mutants import MUTANTS
from tests.faults.nemesis import Nemesis
from tests.faults.steps import STEPS
from tests.support import ROOT

README = ROOT / "tests/faults/README.md"


def test_every_invariant_has_a_mutant_that_shows_it_can_fail() -> None:
    named = {mutant.invariant for mutant in MUTANTS}

    assert named == {f"I{number}" for number in range(1, 13)} - {"I4"}


def test_the_fault_matrix_names_what_there_is() -> None:
    rows = re.findall(r"^\| (\d+) \| .+? \| (.+) \|$", README.read_text(), re.MULTILINE)
    sources = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    known = {
        "": set(re.findall(r"def (test_\w+)", sources)),
        "fault": {name.strip("_").replace("_", " ") for name in vars(Nemesis)},
        "step": set(STEPS),
        "mutant": {mutant.name for mutant in MUTANTS},
        "task": {definition.name for definition in app.registry},
    }

    named = [
        found for _, text in rows for found in re.findall(r"(?:\b(fault|step|mutant|task) )?`(.+?)`", text)
    ]

    assert [int(number) for number, _ in rows] == list(range(1, 76))
    assert [name for kind, name in named if name not in known[kind] and name != "bench"] == []
    assert len([text for _, text in rows if not text.startswith("—")]) >= 60
