"""``relight show --trace``: show where the time of a save went: lanes, slowest rank, critical path."""

from __future__ import annotations

from pathlib import Path

import click

from relight.catalog.find import DIGITS_MAX
from relight.catalog.locate import locate
from relight.cli.common import drawn, json_option, open_run_at, plot_option
from relight.cli.output import emit_json, escape, facts_list, table
from relight.errors import CheckpointNotFound, RelightError
from relight.monitoring.files import EventFiles, FileEvent
from relight.monitoring.trace import GAP_S, SaveTrace, TraceSpan, as_value, saves_in, trace_of
from relight.observe.spans import PARTS
from relight.units import count_text, duration_text, percent_text

LANE = 56
MARKS = {
    "blocked": "b",
    "snapshot": "s",
    "held": "h",
    "write": "w",
    "wait": ".",
    "parts": "p",
    "commit": "c",
    "drain": "d",
}
RANKS_SHOWN = 16


@click.command("show --trace")
@click.argument("path", metavar="RUN[@WHICH]")
@click.option(
    "--otlp", metavar="URL", help="Send it to an OpenTelemetry receiver, http://127.0.0.1:4318/v1/traces for instance."
)
@plot_option("Draw the lanes and the critical path.")
@json_option
def command(path: str, otlp: str | None, plot: Path | None, as_json: bool) -> int:
    """Show where the time of a save went: each rank's stages up to the commit, the slowest rank, the critical path.

    Reads the events of this machine's processes, for the latest save or the one that WHICH names: a step, an id, a tag, best. Failed saves
    are included. On the critical path, each moment belongs to the earliest unfinished stage of the slowest rank.

    \b
    Examples:
      relight show runs/demo --trace
      relight show runs/demo@500 --trace --otlp http://127.0.0.1:4318/v1/traces
    """
    base, which = _parted(path)
    opened = open_run_at(base, warnings=False)
    store, run = opened.run.store.url, opened.run.name
    files = EventFiles()
    events: list[FileEvent] = []
    while new := [event for event in files.new() if event.name in ("save.span", "drain.done")]:
        events += new
    saves = saves_in(events, store, run)
    if not saves:
        why = files.why or f"the processes of this machine have recorded no save of {run}"
        raise CheckpointNotFound("there is no trace", where=path, hint=why)
    id_ = _chosen(saves, which)
    if id_ is None:
        try:
            id_ = opened.choose(which).id
        except CheckpointNotFound:
            id_ = ""
    trace = trace_of(store, run, id_, saves[id_]) if id_ in saves else None
    if trace is None:
        raise CheckpointNotFound(
            f"no trace of {which!r} here", where=base, hint=f"there are traces of {_listed(saves)}"
        )
    if otlp is not None:
        from relight.monitoring.otlp import export

        click.echo(f"{count_text(export(trace, otlp), 'span')} sent", err=True)
    if plot is not None:
        from relight.monitoring.plot import draw

        draw(trace, plot)
        drawn(plot)
    if as_json:
        emit_json(as_value(trace))
    else:
        _show(trace)
    return 0


def _parted(path: str) -> tuple[str, str]:
    """Split a path into the run and the save. A failed save is not a checkpoint, so the catalog cannot find it."""
    try:
        place = locate(path)
    except RelightError:
        base, separator, which = path.rpartition("@")
        if not separator:
            raise
        return base, which or "latest"
    if place.which is None:
        return path, "latest"
    return f"{place.store.url.rstrip('/')}/{place.run}", place.which


def _chosen(saves: dict[str, list[FileEvent]], which: str) -> str | None:
    if which == "latest":
        return list(saves)[-1]
    if which in saves:
        return which
    step = int(which) if which.isdecimal() and len(which) <= DIGITS_MAX else None
    steps = [
        id_
        for id_, events in saves.items()
        if step is not None and any(event.fields.get("step") == step for event in events)
    ]
    # digits are a step: one without a trace must not mean another save
    starts = [id_ for id_ in saves if id_.startswith(which)] if len(which) >= 3 and not which.isdecimal() else []
    return steps[-1] if steps else starts[0] if len(starts) == 1 else None


def _listed(saves: dict[str, list[FileEvent]]) -> str:
    steps = [f"{id_} (step {events[0].fields.get('step')})" for id_, events in saves.items()]
    return ", ".join(steps[-3:]) + (f" and {len(steps) - 3} before" if len(steps) > 3 else "")


def _show(trace: SaveTrace) -> None:
    ranks = sorted({span.rank for span in trace.spans})
    head = [("save", f"{trace.id}, step {trace.step}"), ("ended", "committed" if trace.committed else "not committed")]
    head.append(
        (
            "took",
            f"{duration_text(trace.durable_s)} from the step to {'the commit' if trace.committed else 'its end'}",
        )
    )
    if trace.slowest is not None and len(ranks) > 1:
        lag = max(trace.slack.values())
        head.append(("slowest", f"rank {trace.slowest}, {duration_text(lag)} after the first"))
    if len(trace.hosts) > 1:
        head.append(("machines", f"{len(trace.hosts)}, aligned at the commit"))
    facts_list(head)
    click.echo()
    _lanes(trace)
    click.echo("\ncritical path:")
    whole = trace.durable_s or 1.0
    legs = [leg for leg in trace.path if leg.seconds >= GAP_S] or trace.path
    rows = [[leg.part, leg.rank, duration_text(leg.seconds), percent_text(leg.seconds / whole, 0)] for leg in legs]
    table(["part", "rank", "time", "share"], rows, right=("rank", "time", "share"))


def _lanes(trace: SaveTrace) -> None:
    end = max(span.end for span in trace.spans)
    whole = (end - trace.start) or 1.0
    lanes: dict[tuple[int, str], list[TraceSpan]] = {}
    for span in trace.spans:
        lanes.setdefault((span.rank, span.role), []).append(span)
    shown = sorted(
        lanes, key=lambda lane: (lane[1] == "drain", trace.slack.get(lane[0], 0.0), lane[0], lane[1] != "trainer")
    )
    for rank, role in shown[: 2 * RANKS_SHOWN]:
        cells = [" "] * LANE
        for span in sorted(lanes[rank, role], key=lambda span: -PARTS.index(span.part)):
            first = int((span.start - trace.start) / whole * LANE)
            last = max(first + 1, int((span.end - trace.start) / whole * LANE))
            if span.seconds < GAP_S and cells[min(first, LANE - 1)] != " ":
                continue  # too short to hide another
            cells[first:last] = MARKS[span.part] * (min(last, LANE) - min(first, LANE))
        name = f"{'' if role == 'drain' else f'rank {rank} '}{escape(role)}"
        click.echo(f"{name[:18]:<18} |{''.join(cells[:LANE])}|")
    if len(shown) > 2 * RANKS_SHOWN:
        click.echo(f"… and {len(shown) - 2 * RANKS_SHOWN} lanes more, of faster ranks; --json has all")
    click.echo(f"{'':<18} 0{duration_text(whole):>{LANE}}")
    used = sorted({span.part for span in trace.spans}, key=PARTS.index)
    click.echo(f"{'':<18} {' '.join(f'{MARKS[part]}={part}' for part in used)}")
