"""The check at the end of the demo: the catalogue against the files, the queue against what was asked."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from pgqueue.demo.processes import start_python
from pgqueue.demo.reading import Reading
from pgqueue.errors import PgqueueError
from pgqueue.sql.demo import CatalogueRow, DemoJob


def read_files(
    paths: Sequence[str], environment: Mapping[str, str], advance: Callable[[int], None]
) -> list[Reading]:
    """Read the files once more, as many at once as there are processors."""
    count = min(os.cpu_count() or 1, 8, len(paths))
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        answers = [bytearray() for _ in range(count)]
        readers = []
        for number, answer in enumerate(answers):
            reader = stack.enter_context(
                start_python(
                    *("-m", "pgqueue.demo.reading"),
                    environment=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            assert reader.stdin is not None  # noqa: S101  a pipe, as asked for
            assert reader.stdout is not None  # noqa: S101
            with reader.stdin:
                reader.stdin.write("".join(json.dumps(path) + "\n" for path in paths[number::count]).encode())
            selector.register(reader.stdout, selectors.EVENT_READ, answer)
            readers.append(reader)
        while selector.get_map():
            for key, _ in selector.select():
                chunk = os.read(key.fd, 65_536)
                if not chunk:
                    selector.unregister(key.fileobj)
                key.data.extend(chunk)
                advance(chunk.count(b"\n"))
        if any(reader.wait() for reader in readers):
            raise PgqueueError("the files could not be read a second time; see above")
    return [Reading(*json.loads(line)) for answer in answers for line in answer.splitlines()]


def find_differences(
    readings: Iterable[Reading],
    catalogue: Iterable[CatalogueRow],
    jobs: Iterable[DemoJob],
    crashed: Iterable[int] = (),
) -> list[str]:
    """Say everything that is not as it should be, a file or a job a line; nothing is good news.

    `crashed` are the jobs that ran in the killed process when it died.
    """
    expected = {reading.path: reading for reading in readings}
    rows = {row.path: row for row in catalogue}
    jobs_of: dict[str, list[DemoJob]] = defaultdict(list)
    found = []
    ran_again = set()
    for job in jobs:
        if job.crashes:
            ran_again.add(job.job_id)
        if job.path in expected:
            jobs_of[job.path].append(job)
        elif job.path is not None:
            found.append(f"{job.path}: job {job.job_id} was about it, and nobody asked for that")
        elif job.state != "succeeded":
            found.append(f"job {job.job_id} ({job.task}) is {job.state}")
    for path in sorted(expected):
        found += _of_row(expected[path], rows.get(path))
        found += _of_jobs(expected[path], jobs_of[path])
    found += [
        f"{path}: in the catalogue, but nobody asked for it" for path in sorted(rows.keys() - expected.keys())
    ]
    found += [
        f"job {job_id} ran in the process that was killed, and did not run again"
        for job_id in crashed
        if job_id not in ran_again
    ]
    return found


def _of_row(reading: Reading, row: CatalogueRow | None) -> list[str]:
    path = reading.path
    if reading.fault is not None:
        return (
            [] if row is None else [f"{path}: in the catalogue, although it does not parse: {reading.fault}"]
        )
    if row is None:
        return [f"{path}: missing from the catalogue"]
    return [
        f"{path}: {name} is {wrong!r:.80} in the catalogue, {right!r:.80} in the file"
        for name in CatalogueRow._fields
        if (wrong := getattr(row, name)) != (right := getattr(reading, name))
    ]


def _of_jobs(reading: Reading, jobs: Sequence[DemoJob]) -> list[str]:
    path = reading.path
    if not jobs:
        return [f"{path}: its job is nowhere"]
    if len(jobs) > 1:
        return [f"{path}: {len(jobs)} jobs instead of one: {', '.join(str(job.job_id) for job in jobs)}"]
    job = jobs[0]
    if reading.fault is None:
        return [] if job.state == "succeeded" else [f"{path}: job {job.job_id} is {_standing(job)}"]
    if job.state != "dead":
        return [f"{path}: job {job.job_id} is {job.state}, although the file does not parse: {reading.fault}"]
    if reading.fault not in (job.reason or ""):
        return [f"{path}: job {job.job_id} is {_standing(job)}, but the reason is: {reading.fault}"]
    return []


def _standing(job: DemoJob) -> str:
    return job.state if job.reason is None else f"{job.state}: {job.reason.splitlines()[0]}"
