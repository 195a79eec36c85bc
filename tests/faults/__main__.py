"""`python -m tests.faults`: the campaign, the mutants, the step table."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

from tests.faults import campaign
from tests.faults.arena import Arena, run_folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="decides which faults, when and to whom")
    parser.add_argument("--seconds", type=float, help="how long the faults go on; default: the size's")
    parser.add_argument("--size", choices=sorted(campaign.SIZES), default="smoke")
    parser.add_argument("--fault", metavar="NAME", action="append", help="only this large fault, or these")
    parser.add_argument(
        "--alerts", action="store_true", help="scraped by a Prometheus, and then each alert in its own time"
    )
    parser.add_argument("--steps", action="store_true", help="the step table instead")
    parser.add_argument("--mutants", action="store_true", help="every mutant instead: each has to be caught")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only the mutants that start nothing, only the steps' quick faults",
    )
    parser.add_argument("--mutant", metavar="NAME", help="one mutant instead")
    parser.add_argument("--keep", action="store_true", help="keep journals and logs, as a failure does")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where to put what is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    # What mutants lose they lose with processes, and waiting for a disk shows nothing of steps either.
    is_durable = not (options.steps or options.mutants or options.mutant)
    is_good = False
    try:
        with run_folder(keep=lambda: not options.logs and (options.keep or not is_good)) as folder:
            try:
                with Arena(folder, is_durable=is_durable) as arena:
                    is_good = _run(arena, options)
            finally:
                if options.keep or not is_good:
                    kept = folder / "logs"
                    if options.logs:
                        kept = Path(shutil.copytree(kept, options.logs, dirs_exist_ok=True))
                    print(f"seed {options.seed}; journals and logs: {kept}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; everything that was started has ended", flush=True)
        return 130
    return 0 if is_good else 1


def _run(arena: Arena, options: argparse.Namespace) -> bool:
    def say(line: str) -> None:
        print(line, flush=True)

    if options.steps:
        from tests.faults import steps

        return steps.run(arena, say, is_quick=options.quick)
    if options.mutants or options.mutant:
        from tests.faults import trial

        return trial.run(arena, options.mutant, say, is_quick=options.quick)
    kind = campaign.Campaign
    if options.alerts:
        from tests.faults.alerts import WatchedCampaign

        kind = WatchedCampaign
    only = options.fault or ()
    return campaign.run(arena, options.size, options.seconds, options.seed, say, only=only, kind=kind)


if __name__ == "__main__":
    sys.exit(main())
