"""The server's disk is full: nobody dies of it, nothing is lost, and all go on when there is room again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.outages.conftest import NewNode
from tests.outages.support import (
    BACK,
    LOST,
    TROUBLE,
    Crew,
    Producer,
    check_no_attempt_is_burnt,
    check_nothing_is_lost,
)
from tests.process.support import Queue
from tests.support import open_folder, wait_until

_MEGABYTES = 160

# The mount is the shell's, and goes with it when our end of the pipe is closed, however that comes.
_KEEP_MOUNTED = f"""
mount -t tmpfs -o size={_MEGABYTES}m,mode=755 tmpfs "$0" && echo mounted
read -r _
umount -l "$0"
"""


class Disk:
    """A small file system, to be filled up and emptied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12):
                while True:
                    filler.write(bytes(size))

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk() -> Iterator[Disk]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes Linux and root")
    with open_folder() as folder:
        keeper = subprocess.Popen(
            ["sh", "-c", _KEEP_MOUNTED, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert keeper.stdout is not None
            if keeper.stdout.readline() != b"mounted\n":
                pytest.skip(f"no file system can be mounted here: {keeper.communicate()[1].decode().strip()}")
            yield Disk(folder)
        finally:
            keeper.communicate()


# The disk comes first: it is unmounted when the server on it has ended.
def test_workers_ride_through_a_full_disk_and_a_full_log(
    disk: Disk, new_node: NewNode, tmp_path: Path
) -> None:
    node = new_node(
        {"max_wal_size": "32MB", "min_wal_size": "32MB", "restart_after_crash": "off"}, disk.folder
    )
    crew = Crew(node.app_dsn, tmp_path)
    with crew.start(2, "-c", "4"), Producer(node.app_dsn) as producer:
        wait_until(lambda: len(producer.acknowledged) > 50)
        with closing(Queue(node.admin_dsn)) as queue:
            queue.connection.execute(
                "INSERT INTO pgqueue.jobs (task, args) "
                "SELECT 'work', '{\"seconds\": 0.02}' FROM generate_series(1, 1000)"
            )

        # No table can grow. Rows still change where their pages have room.
        disk.fill()
        for one in crew.workers:
            one.wait_for(TROUBLE)
        wait_until(lambda: len(producer.refused) > 20, message="tries, all in vain")
        disk.free()
        for one in crew.workers:
            one.wait_for(BACK)
        count = len(producer.acknowledged)
        wait_until(lambda: len(producer.acknowledged) > count + 50)
        assert crew.lines_said(TROUBLE) == crew.lines_said(BACK) == [1, 1], crew.said()
        assert crew.lines_said(LOST) == [0, 0]

        # The log cannot grow: the server panics, and cannot come back before there is room.
        disk.fill()
        with contextlib.suppress(psycopg.Error), psycopg.connect(node.admin_dsn, autocommit=True) as admin:
            for _ in range(64):
                admin.execute("SELECT pg_logical_emit_message(true, 'fill', repeat('x', 1000000))")
        wait_until(lambda: not node.is_up, message="the server gave up")
        disk.free()
        node.restart()
        for one in crew.workers:
            one.wait_for(BACK, 2)
        producer.stop()

        with closing(Queue(node.admin_dsn)) as queue:
            check_nothing_is_lost(queue, producer)
            check_no_attempt_is_burnt(queue)
        said = [trouble + lost for trouble, lost in zip(*map(crew.lines_said, (TROUBLE, LOST)), strict=True)]
        assert said == crew.lines_said(BACK) == [2, 2], crew.said()
        assert {line["event"] for line in crew.complaints()} <= {"claim lost"}
        assert [one.stop() for one in crew.workers] == [0, 0]
