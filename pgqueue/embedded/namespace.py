"""Run a program as an ordinary account inside a user namespace of its own.

PostgreSQL refuses to run as root. In here root is that account; outside it stays root, so files
keep their owner, and no account is made and no mode is changed anywhere.

Started by its path, as `python -I -S namespace.py UID GID PROGRAM [ARGUMENT]...`: it sees
nothing but the standard library.
"""

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000


def enter(uid: int, gid: int) -> None:
    """Become that account, as seen from inside a new user namespace.

    Raises:
        OSError: the kernel, or whoever set up this container, refuses user namespaces.
    """
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER):
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{uid} {outer_uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{gid} {outer_gid} 1", encoding="ascii")


if __name__ == "__main__":
    enter(int(sys.argv[1]), int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])  # noqa: S606 -- there is no shell, and that is the point
