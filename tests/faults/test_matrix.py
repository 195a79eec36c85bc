"""The fault matrix names what there is: faults, steps, mutants, tasks, and tests."""

from __future__ import annotations

import re

from tests.faults.jobs import app
from tests.faults.mutants import MUTANTS
from tests.faults.nemesis import Nemesis
from tests.faults.steps import STEPS
from tests.support import ROOT

README = ROOT / "tests/faults/README.md"
ROW = re.compile(r"^\| (\d+) \| .+? \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"(?:\b(fault|step|mutant|task) )?`(.+?)`")


def test_the_fault_matrix_names_what_there_is() -> None:
    sources = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    known = {
        "": set(re.findall(r"def (test_\w+)", sources)) | {"bench"},
        "fault": {name.strip("_").replace("_", " ") for name in vars(Nemesis)},
        "step": set(STEPS),
        "mutant": {mutant.name for mutant in MUTANTS},
        "task": {definition.name for definition in app.registry},
    }

    rows = ROW.findall(README.read_text())

    assert [int(number) for number, _ in rows] == list(range(1, 76))
    assert [name for _, text in rows for kind, name in NAME.findall(text) if name not in known[kind]] == []


def test_a_row_of_the_fault_matrix_names_what_covers_it_or_says_why_nothing_does() -> None:
    rows = ROW.findall(README.read_text())

    covered = [text for _, text in rows if not text.startswith("—")]
    assert all(NAME.search(text) for text in covered)
    assert len(covered) >= 60
