"""`pgqueue assets`: files for other programs, as they come with this version."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import click

from pgqueue.cli import output
from pgqueue.cli.options import json_option
from pgqueue.errors import ConfigurationError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


class Asset(NamedTuple):
    name: str
    purpose: str


ASSETS = (
    Asset("prometheus.yml", "a Prometheus that scrapes a worker and an exporter"),
    Asset("prometheus-rules.yml", "alerts, each with what to do about it"),
    Asset("prometheus-rules.test.yml", "what each alert does, for promtool test rules"),
    Asset("grafana-prometheus.json", "a Grafana dashboard on Prometheus"),
    Asset("grafana-postgresql.json", "a Grafana dashboard on the database itself, without Prometheus"),
    Asset("pgqueue.service", "a worker as a systemd service"),
    Asset("pgqueue-exporter.service", "the exporter as a systemd service"),
    Asset("supervisor.conf", "a worker and an exporter under Supervisor"),
    Asset("kubernetes.yaml", "a migration, workers and an exporter on Kubernetes, with probes"),
    Asset("pgbouncer.md", "what works through PgBouncer, and its settings"),
)


@click.group(name="assets", short_help="See files for Prometheus, Grafana, systemd, Kubernetes...")
def command() -> None:
    """See files for Prometheus, Grafana, systemd, Supervisor, Kubernetes and PgBouncer.

    They come with this version and fit it: the alerts name metrics that it has.

    \b
    Example:
      pgqueue assets list
      pgqueue assets show prometheus-rules.yml > /etc/prometheus/prometheus-rules.yml
    """


@command.command("list")
@json_option
def list_assets(as_json: bool) -> None:
    """List the files, and what each is for.

    \b
    Example:
      pgqueue assets list
    """
    if as_json:
        output.document([asset._asdict() for asset in ASSETS])
        return
    columns = [output.Column("name"), output.Column("purpose", may_shrink=True)]
    output.table(columns, [list(asset) for asset in ASSETS], empty="no assets")


@command.command("show")
@click.argument("name", shell_complete=lambda _context, _parameter, begun: _names(begun))
def show_asset(name: str) -> None:
    """Print a file as it is.

    \b
    Example:
      pgqueue assets show pgqueue.service > /etc/systemd/system/pgqueue.service
    """
    if name not in _names():
        near = get_close_matches(name, _names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see: pgqueue assets list"
        raise ConfigurationError(f"no asset {name!r}; {hint}")
    click.echo(read(name), nl=False)


def read(name: str) -> str:
    """Give an asset's text."""
    folder: Traversable = files("pgqueue").joinpath("assets")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _names(begun: str = "") -> list[str]:
    return [asset.name for asset in ASSETS if asset.name.startswith(begun)]
