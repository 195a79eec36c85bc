"""The fault campaign in its small size, the step table, and the mutants that the checker has to catch.

`pytest tests/faults/suite.py`. With CI set it is all of it; elsewhere the faults go on for a shorter
time, and of the mutants come those that start no processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.campaign import SIZES
from tests.faults.mutants import MUTANTS
from tests.support import ROOT, end, open_folder, processes_with, wait_until

README = ROOT / "tests/faults/README.md"
IN_CI = "CI" in os.environ
SEED = 7
SECONDS = SIZES["smoke"].seconds if IN_CI else 10

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="is about what /proc shows")


def program(folder: Path, *arguments: str) -> list[str]:
    logs = ("--logs", str(folder / "logs"))
    return [sys.executable, "-m", "tests.faults", "--seed", str(SEED), *logs, *arguments]


def run_faults(folder: Path, *arguments: str) -> list[str]:
    """Run the program to its good end and give the lines it says; if it fails, its logs are in the folder."""
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(program(folder, *arguments), cwd=ROOT, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=170)
        finally:
            end(process, 30)
    assert process.returncode == 0, said
    return said.splitlines()


@on_linux
def test_every_invariant_holds_while_everything_goes_wrong(tmp_path: Path) -> None:
    said = run_faults(tmp_path, "--size", "smoke", "--seconds", str(SECONDS))

    held = [line.split()[0] for line in said if line.startswith("I") and ": ok" in line]
    assert held == ["I1", "I2", "I3", "I5", "I6", "I7", "I8", "I9", "I10", "I11", "I12"]


@on_linux
def test_a_fault_at_any_step_of_an_attempt_leaves_one_job_well_ended(tmp_path: Path) -> None:
    said = run_faults(tmp_path, "--steps")

    assert any(line.startswith("24 cells, 0 wrong") for line in said)


@on_linux
def test_the_checker_catches_every_mutant(tmp_path: Path) -> None:
    said = run_faults(tmp_path, "--mutants", *([] if IN_CI else ["--quick"]))

    caught = {line.split(":")[0].removeprefix("mutant ") for line in said if ": caught by I" in line}
    assert caught == {mutant.name for mutant in MUTANTS if IN_CI or mutant.is_quick}


@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_cut_short_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_folder() as temporary:
        monkeypatch.setenv("TMPDIR", str(temporary))
        with subprocess.Popen(
            program(tmp_path, "--seconds", "600"), cwd=ROOT, stdout=subprocess.DEVNULL
        ) as run:
            try:
                # Workers with children, a server, producers: everything there is.
                wait_until(lambda: len(processes_with(str(temporary))) > 20, 60, "the campaign is under way")

                run.send_signal(number)
                run.wait(30)
                wait_until(lambda: not processes_with(str(temporary)), 20, "everything has ended")
            finally:
                run.kill()

        wait_until(lambda: not [*temporary.glob("*/server")], 10, "its server is gone")
