"""`pgqueue worker`: run an application's jobs."""

from __future__ import annotations

import os

import click

from pgqueue.cli.options import DURATION, database_options, log_format_option

_DEFAULTS = {
    "concurrency": 10,
    "processes": 1,
    "lease": 10.0,
    "grace": 30.0,
    "kill_grace": 5.0,
    "poll": 1.0,
    "retention": 7 * 86_400.0,
    "key_retention": 7 * 86_400.0,
    "unknown_task_grace": 600.0,
}


@click.command(name="worker")
@click.option(
    "--app",
    envvar="PGQUEUE_APP",
    metavar="MODULE:NAME",
    help="The application: the module that makes the App, and its name there (default: app). "
    "Also [tool.pgqueue] app in pyproject.toml.  [env: PGQUEUE_APP]",
)
@click.option(
    "-q",
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME[:SLOTS]",
    help="A queue to work on, with slots of its own or sharing those of -c; may be repeated. A name may "
    "have colons: what follows the last one is SLOTS if it is a number. A queue that nobody knows is worth "
    "a warning in the log. Default: every queue that the application's tasks name.",
)
@click.option(
    "-c",
    "--concurrency",
    type=int,
    default=_DEFAULTS["concurrency"],
    show_default=True,
    help="How many jobs to run at once in the queues that share slots.",
)
@click.option(
    "--processes",
    type=int,
    default=_DEFAULTS["processes"],
    show_default=True,
    help="Child processes to run them in; 0 runs handlers inside the worker itself, for debugging.",
)
@click.option(
    "--max-jobs-per-child",
    type=int,
    metavar="N",
    help="Replace a child process once it has run so many jobs; what still runs in it finishes first.",
)
@click.option(
    "--max-memory-mb",
    type=int,
    metavar="MB",
    help="Replace a child process, in the same way, once it holds more memory; looked at every second.",
)
@click.option(
    "--until-empty",
    is_flag=True,
    help="End when nothing is left that is due, runs or will be retried: exit 0, or 3 if jobs died.",
)
@click.option(
    "--grace-seconds",
    type=DURATION,
    default=_DEFAULTS["grace"],
    show_default=True,
    help="How long running jobs may go on after SIGTERM; what is left then goes back to the queue.",
)
@click.option(
    "--kill-grace-seconds",
    type=DURATION,
    default=_DEFAULTS["kill_grace"],
    show_default=True,
    help="How long a handler may go on past its deadline before its process is killed.",
)
@click.option(
    "--lease-seconds",
    type=DURATION,
    default=_DEFAULTS["lease"],
    show_default=True,
    help="How long a job stays ours without a heartbeat; another worker takes it over after that.",
)
@click.option(
    "--heartbeat-seconds",
    type=DURATION,
    help="How often leases are renewed; at most a third of the lease.  [default: 0.3 of it]",
)
@click.option(
    "--poll-seconds",
    type=DURATION,
    default=_DEFAULTS["poll"],
    show_default=True,
    help="How often to look without being woken; the floor under the wake-ups.",
)
@click.option(
    "--no-wakeups",
    is_flag=True,
    help="Only poll, and hold no session. Behind a proxy that pools transactions that is so without it, "
    "unless --listen-dsn leads past the proxy.",
)
@click.option(
    "--listen-dsn",
    envvar="PGQUEUE_LISTEN_DSN",
    show_envvar=True,
    metavar="DSN",
    help="The server behind the proxy, for the one session that wake-ups need.",
)
@click.option(
    "--retention-seconds",
    type=DURATION,
    default=_DEFAULTS["retention"],
    show_default="7 days",
    help="How long the history of finished jobs is kept, in whole days.",
)
@click.option(
    "--key-retention-seconds",
    type=DURATION,
    default=_DEFAULTS["key_retention"],
    show_default="7 days",
    help="How long an idempotency key is remembered: a repetition within it does nothing.",
)
@click.option(
    "--unknown-task-grace-seconds",
    type=DURATION,
    default=_DEFAULTS["unknown_task_grace"],
    show_default=True,
    help="How old a job may get whose task this application lacks before it is dead; younger ones wait "
    "for a worker that knows it. 0 with --until-empty.",
)
@click.option(
    "--metrics-port",
    type=int,
    metavar="PORT",
    envvar="PGQUEUE_METRICS_PORT",
    show_envvar=True,
    help="Serve /metrics for Prometheus, and /healthz, /readyz and /startupz for probes, on this port; "
    "0: on any that is free, which the log names.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    envvar="PGQUEUE_METRICS_HOST",
    show_envvar=True,
    help="The address to serve them on; 0.0.0.0 or :: where others on the network may read them.",
)
@log_format_option
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    envvar="PGQUEUE_LOG_LEVEL",
    help="debug says when a job starts, info when one ends.",
)
@click.option(
    "--log-redact",
    metavar="MODULE:FUNCTION",
    envvar="PGQUEUE_LOG_REDACT",
    show_envvar=True,
    help="A function of yours through which every line of the log goes: it takes the fields as a dict, the "
    "event among them, and gives those to write.",
)
@database_options
def command(
    app: str | None,
    queues: tuple[str, ...],
    concurrency: int,
    processes: int,
    max_jobs_per_child: int | None,
    max_memory_mb: int | None,
    until_empty: bool,
    grace_seconds: float,
    kill_grace_seconds: float,
    lease_seconds: float,
    heartbeat_seconds: float | None,
    poll_seconds: float,
    no_wakeups: bool,
    listen_dsn: str | None,
    retention_seconds: float,
    key_retention_seconds: float,
    unknown_task_grace_seconds: float,
    metrics_port: int | None,
    metrics_host: str,
    log_format: str,
    log_level: str,
    log_redact: str | None,
    dsn: str | None,
    schema: str,
) -> int:
    """Run an application's jobs until told to stop.

    The worker is one parent, which talks to the database, and child processes, which import the
    application and run its handlers. SIGTERM or SIGINT: claim nothing more, let running jobs
    finish within the grace, give the rest back, exit 0; a second one, or SIGQUIT: give everything
    back now, exit 0. What was given back has used up no attempt. If the database is away then, the
    end does not wait for it: the leases run out, and another worker takes the jobs over.

    The log goes to standard error. It works as process 1 of a container, and tells systemd that it
    is ready, how it is, and that it lives (Type=notify, WatchdogSec).

    \b
    Exit codes:
       0  ended by a signal, or the queues were empty (--until-empty)
       1  failed: a part of the worker broke, or the queue's tables do not fit
       2  wrong usage, or an application that cannot be loaded
       3  jobs died (--until-empty)
      75  the database could not be reached at the start

    \b
    Example:
      pgqueue worker --app shop.jobs:app -q mail:5 -q default -c 10 --processes 2
    """
    from typing import cast

    from pgqueue.cli.application import application_name
    from pgqueue.model.settings import QueueSlots, WorkerSettings
    from pgqueue.runtime.child import run_loop
    from pgqueue.runtime.launch import Launch
    from pgqueue.runtime.log import LogFormat, configure
    from pgqueue.runtime.worker import Worker

    if log_redact:
        # The children read it there.
        os.environ["PGQUEUE_LOG_REDACT"] = log_redact
    settings = WorkerSettings(
        queues=tuple(QueueSlots.parse(text) for text in queues),
        concurrency=concurrency,
        processes=processes,
        lease_seconds=lease_seconds,
        heartbeat_seconds=heartbeat_seconds,
        grace_seconds=grace_seconds,
        kill_grace_seconds=kill_grace_seconds,
        poll_seconds=poll_seconds,
        retention_seconds=retention_seconds,
        key_retention_seconds=key_retention_seconds,
        unknown_task_grace_seconds=unknown_task_grace_seconds,
        until_empty=until_empty,
        listens=not no_wakeups,
        max_jobs_per_child=max_jobs_per_child,
        max_memory_mb=max_memory_mb,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    launch = Launch(
        app=application_name(app),
        dsn=dsn,
        schema=schema,
        settings=settings,
        # Locks that handlers take need a session, too.
        environment={**os.environ, **({"PGQUEUE_LISTEN_DSN": listen_dsn} if listen_dsn else {})},
        log_format=cast("LogFormat", log_format),
        log_level=log_level,
        listen_dsn=listen_dsn,
    )
    configure(launch.log_format, log_level)

    async def work() -> int:
        return await Worker(launch).run()

    return cast("int", run_loop(work()))
