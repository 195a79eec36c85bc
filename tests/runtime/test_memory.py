"""Whether a kill was for memory, read from what the kernel counts in control groups of either version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pgqueue.runtime.memory import OomKills, resident_megabytes

VERSIONS = {
    "v2": ("0::/shop/worker", "cgroup2 cgroup2 rw", "memory.events", "low 0\noom 7\noom_kill {}\n"),
    "v1": (
        "5:cpu:/\n4:hugetlb,memory:/shop/worker\n0::/",
        "cgroup cgroup rw,hugetlb,memory",
        "memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    ),
}


class Kernel:
    """A /proc of a test's own, and the control group that it tells of."""

    def __init__(self, folder: Path, version: str, root: str = "/") -> None:
        self.groups, kind, self.name, self._text = VERSIONS[version]
        self.proc, self.mount = folder / "proc", folder / "cgroup"
        self.write("self", "cgroup", self.groups)
        self.write("7", "cgroup", self.groups)
        self.write("self", "mountinfo", f"31 23 0:28 {root} {self.mount} rw shared:9 - {kind}")

    def write(self, who: str, name: str, text: str) -> None:
        (self.proc / who).mkdir(parents=True, exist_ok=True)
        (self.proc / who / name).write_text(text + "\n")

    def count(self, number: int, group: str = "shop/worker") -> None:
        file = self.mount / group / self.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._text.format(number))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_counter_that_rose_says_so_and_one_that_did_not_does_not(tmp_path: Path, version: str) -> None:
    kernel = Kernel(tmp_path, version)
    kernel.count(3)
    kills = OomKills(7, kernel.proc)

    assert not kills.may_have_risen()
    kernel.count(4)
    assert kills.may_have_risen()


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_counter_it_may_have_been_memory(tmp_path: Path, version: str) -> None:
    kernel = Kernel(tmp_path, version)

    assert OomKills(7, kernel.proc).may_have_risen()
    assert OomKills(7, tmp_path / "nowhere").may_have_risen()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_group_that_a_process_moved_to_counts_too_and_not_where_the_dead_one_seems_to_be(
    tmp_path: Path, version: str
) -> None:
    kernel = Kernel(tmp_path, version)
    kernel.count(0)
    kills = OomKills(7, kernel.proc)

    kernel.write("7", "cgroup", kernel.groups.replace("/shop/worker", "/shop/job"))
    kernel.count(5, "shop/job")
    kills.look()
    kernel.write("7", "cgroup", kernel.groups.replace("/shop/worker", "/"))
    kernel.count(9, "")
    assert not kills.may_have_risen()
    kernel.count(6, "shop/job")
    assert kills.may_have_risen()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_container_finds_its_counter_below_its_own_root(tmp_path: Path, version: str) -> None:
    kernel = Kernel(tmp_path, version, root="/shop")
    kernel.count(0, "worker")
    kills = OomKills(7, kernel.proc)

    assert not kills.may_have_risen()


def test_resident_memory_is_that_of_processes_that_live() -> None:
    found = resident_megabytes([os.getpid(), 2**22 + 1])

    assert list(found) == [os.getpid()]
    assert 5 < found[os.getpid()] < 10_000
