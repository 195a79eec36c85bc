"""Process 1 inherits every process whose own parent is gone, and has to bury it."""

from __future__ import annotations

import os
from collections.abc import Collection


def bury_orphans(own: Collection[int | None]) -> None:
    """Bury the dead processes that nobody waits for, if we are process 1.

    `own` are those somebody does wait for. Only a look comes first: to bury one of them here would
    take away the status of its end. It hides those behind it until it is buried by its owner.
    """
    if os.getpid() != 1:
        return
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in own:
            return
        os.waitpid(dead.si_pid, os.WNOHANG)
