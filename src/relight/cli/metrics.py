"""``relight metrics``."""

from __future__ import annotations

import time

import click

from relight.cli.common import json_option
from relight.cli.output import emit_json, escape
from relight.errors import ConfigError
from relight.watch import RunSeen, Watcher


@click.command("metrics")
@click.argument("paths", metavar="RUN|STORE…", nargs=-1, required=True)
@click.option("--listen", metavar="HOST:PORT", help="Serve them under /metrics until Ctrl-C; 127.0.0.1:9464, for instance.")
@click.option("--once", is_flag=True, help="Print them once, as Prometheus reads them: the default.")
@json_option
def command(paths: tuple[str, ...], listen: str | None, once: bool, as_json: bool) -> int:
    """What runs are like, as metrics for Prometheus.

    Made of the runs' logs, and of the events that processes of this machine keep. Trainers serve nothing: this command does, and may run
    beside them, or anywhere that sees the store.

    \b
    Examples:
      relight metrics runs
      relight metrics runs --listen 127.0.0.1:9464
    """
    from relight.watch.exposition import Collector

    if listen is not None and (once or as_json):
        raise ConfigError("--listen serves, --once and --json print: choose one")
    watcher = Watcher(paths)
    if as_json:
        emit_json([as_value(seen) for seen in watcher.look(time.time())])
        return 0
    collector = Collector(watcher.look)
    if listen is not None:
        from relight.watch.http import serve

        serve(collector, listen, lambda line: click.echo(escape(line), err=True))
        return 0
    click.echo(collector.text().decode(), nl=False)
    return 0


def as_value(seen: RunSeen) -> dict[str, object]:
    """A run's metrics for ``--json``."""
    metrics = [
        {
            "name": sample.metric.name, "labels": dict(zip(sample.metric.labels, sample.labels, strict=True)), "value": sample.value,
            **({"counts": list(sample.counts)} if sample.counts else {}),
        }
        for sample in seen.samples
    ]  # fmt: skip
    return {"store": seen.store, "run": seen.run, "error": seen.error, "metrics": metrics}
