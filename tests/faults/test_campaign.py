"""The campaign in its small size, and the step table. With CI set all of it; elsewhere a shorter form."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pgqueue import embedded
from tests.faults.steps import FAULTS, QUICK_FAULTS, STEPS
from tests.support import ROOT, end, open_folder, processes_with, wait_until

IN_CI = os.environ.get("CI") == "true"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="is about what /proc shows"),
    pytest.mark.timeout(600),
]


def program(folder: Path, *arguments: str) -> list[str]:
    # With each version of PostgreSQL other faults come first.
    seed = embedded.installs()[0].version.partition(".")[0]
    logs = ("--logs", str(folder / "logs"))
    return [sys.executable, "-m", "tests.faults", "--seed", seed, *logs, *arguments]


def run_faults(folder: Path, *arguments: str) -> list[str]:
    """Run the program to its good end and give the lines it says; if it fails, its logs are in the folder."""
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(program(folder, *arguments), cwd=ROOT, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=500)
        finally:
            end(process, 30)
    assert process.returncode == 0, said
    return said.splitlines()


def test_every_invariant_holds_while_everything_goes_wrong(tmp_path: Path) -> None:
    said = run_faults(tmp_path, "--size", "smoke", *(() if IN_CI else ("--seconds", "6")))

    held = [line.split()[0] for line in said if line.startswith("I") and ": ok" in line]
    assert held == [f"I{number}" for number in range(1, 13)]
    assert "lost 0, doubled 0, over the limit 0, leaks 0" in said


def test_a_fault_at_any_step_of_an_attempt_leaves_one_job_well_ended(tmp_path: Path) -> None:
    said = run_faults(tmp_path, "--steps", *(() if IN_CI else ("--quick",)))

    cells = len(STEPS) * len(FAULTS if IN_CI else QUICK_FAULTS)
    assert said[-1].startswith(f"{cells} cells, 0 wrong")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL] if IN_CI else [signal.SIGKILL])
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
                wait_until(lambda: len(processes_with(str(temporary))) > 20, 120, "the campaign is under way")

                run.send_signal(number)
                run.wait(60)
                wait_until(lambda: not processes_with(str(temporary)), 60, "everything has ended")
            finally:
                run.kill()

        wait_until(lambda: not [*temporary.glob("*/server")], 60, "its server is gone")
