"""Every check there is: `python -m tests`, or one part of it: `python -m tests checks|pytest`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("pyright", "--pythonpath", sys.executable),
    ("lint-imports",),
)


def main(parts: list[str]) -> int:
    commands: list[tuple[str, ...]] = []
    if not parts or "checks" in parts:
        commands += CHECKS
    if not parts or "pytest" in parts:
        commands.append(("pytest",))
    failed = []
    for name, *arguments in commands:
        print(f"--- {name} {' '.join(arguments)}", flush=True)
        if subprocess.run([str(BIN / name), *arguments], check=False).returncode:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "all checks passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
