"""The products to compare: which version, how it is installed and set, and how to ask if anything is left."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from psycopg import conninfo

from bench.server import ROOT, worker_command
from pgqueue import __version__


@dataclass(frozen=True)
class Product:
    """One product; `settings` says what `default` and `best` are, `drains` how many jobs take some seconds.

    One that `only_polls` by default takes so few jobs a second that a queue is never idle.
    """

    name: str
    version: str
    pending: str
    settings: Mapping[str, str]
    drains: Mapping[str, int]
    packages: tuple[str, ...] = ()
    is_node: bool = False
    only_polls: bool = False
    workers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    def install(self, home: Path) -> None:
        """Install the product into a folder of its own, unless it is there."""
        place, marker = home / self.name, home / self.name / "installed.json"
        if not self.packages or (marker.exists() and json.loads(marker.read_text()) == list(self.packages)):
            return
        print(f"installing {' '.join(self.packages)} into {place}", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        if self.is_node:
            (place / "package.json").write_text("{}")
            subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", *self.packages], cwd=place, check=True
            )
        else:
            subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
            python = str(place / "venv/bin/python")
            subprocess.run([python, "-m", "pip", "install", "--quiet", *self.packages], check=True)
        marker.write_text(json.dumps(list(self.packages)))

    def adapter(self, home: Path, *arguments: str) -> list[str]:
        """Give the command that does something with the product's own API."""
        if self.is_node:
            own = home / self.name / "node_modules/.bin/node"
            program = [str(own) if own.exists() else "node", str(ROOT / f"bench/peers/{self.module}.mjs")]
        else:
            python = str(home / self.name / "venv/bin/python") if self.packages else sys.executable
            program = [python, "-m", f"bench.peers.{self.module}"]
        return [*program, *arguments]

    def worker(self, home: Path, setting: str) -> list[str]:
        if self.workers:
            return worker_command(*self.workers[setting])
        return self.adapter(home, "worker", "--setting", setting)

    def environment(self, home: Path, dsn: str, setting: str) -> dict[str, str]:
        """Give the variables by which each finds the database, and its own things."""
        parts = {name: str(value) for name, value in conninfo.conninfo_to_dict(dsn).items()}
        return {
            "PGQUEUE_DSN": dsn,
            "PGHOST": parts["host"],
            "PGPORT": parts["port"],
            "PGUSER": parts["user"],
            "PGDATABASE": parts["dbname"],
            "PGQUEUE_BENCH_MODULES": str(home / self.name),
            "PGQUEUE_BENCH_SETTING": setting,
        }


# pg-boss needs a newer Node than many have; the `node` package itself would run a script to fetch this one.
NODE = f"node-{sys.platform}-{'arm64' if platform.machine() in ('arm64', 'aarch64') else 'x64'}@22"
NOWHERE = Path("nowhere")  # the home of what is not installed: us

PGQUEUE = Product(
    name="pgqueue",
    version=__version__,
    pending="SELECT count(*) FROM pgqueue.jobs",
    settings={"default": "10 slots, one child", "best": "100 slots, one child, log level warning"},
    drains={"default": 150_000, "best": 200_000},
    workers={"default": (), "best": ("-c", "100", "--log-level", "warning")},
)

PRODUCTS = (
    PGQUEUE,
    Product(
        name="graphile-worker",
        version="0.17.3",
        packages=("graphile-worker@0.17.3",),
        is_node=True,
        pending="SELECT count(*) FROM graphile_worker._private_jobs WHERE attempts < max_attempts",
        settings={"default": "1 job at a time", "best": "24 jobs, localQueue 500, batched completion"},
        drains={"default": 6_000, "best": 150_000},
    ),
    Product(
        name="pg-boss",
        version="12.38.0",
        packages=("pg-boss@12.38.0", NODE),
        is_node=True,
        only_polls=True,
        pending="SELECT count(*) FROM pgboss.job WHERE state < 'completed' AND name = 'counted'",
        settings={
            "default": "a poll of 2 s, 1 job each",
            "best": "batchSize 1000, burstWhenBatchFull, notify",
        },
        drains={"default": 8, "best": 100_000},
    ),
    Product(
        name="pgqueuer",
        version="1.6.0",
        packages=("pgqueuer[asyncpg]==1.6.0", "uvloop"),
        pending="SELECT count(*) FROM pgqueuer WHERE status <> 'failed'",
        settings={"default": "batches of 10, one connection", "best": "batches of 100, asyncpg pool, uvloop"},
        drains={"default": 20_000, "best": 80_000},
    ),
    Product(
        name="procrastinate",
        version="3.10.0",
        packages=("procrastinate==3.10.0", "psycopg[binary,pool]"),
        pending="SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
        settings={"default": "concurrency 1", "best": "concurrency 16, pool of 8 to 18"},
        drains={"default": 2_500, "best": 3_000},
    ),
)
