"""Clear away after a run that was killed, once whoever started this process is gone.

The folder comes as a line on standard input; the end of input without another line means that the
run is gone without having cleared up itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

from tests.support import processes_with


def main() -> None:
    folder = sys.stdin.readline().strip()
    if not folder or sys.stdin.readline():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    began_at = time.monotonic()
    while found := processes_with(folder):
        for pid, command in found.items():
            # A server that is asked to quit takes its shared memory with it.
            is_asked = "postgres" in command and time.monotonic() - began_at < 3
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT if is_asked else signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
