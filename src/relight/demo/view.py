"""The demo in a terminal: progress while it runs, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from relight.demo.report import DemoReport, Kill
from relight.demo.shape import DemoSize
from relight.units import compact_text, duration_text, size_text

GOOD, BAD, SAVE, QUIET = "bold green", "bold red", "bold magenta", "dim"


class DemoView:
    """Two progress bars, with a line above them for each kill and each resume."""

    def __init__(self, shape: DemoSize, *, enabled: bool, console: Console | None) -> None:
        console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32, complete_style="cyan", finished_style="green"),
            TextColumn("step {task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[loss]:>10}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not enabled,
        )
        self._enabled = enabled
        self._straight = self._bars.add_task("straight run", total=shape.steps, loss="", state="starting")
        self._killed = self._bars.add_task("killed run  ", total=shape.steps, loss="", state="starting")

    def __enter__(self) -> DemoView:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def straight(self, entry: Mapping[str, Any]) -> None:
        """Show a new journal entry of the straight run."""
        self._advance(self._straight, entry)

    def killed(self, entry: Mapping[str, Any]) -> None:
        """Show a new journal entry of the killed run."""
        self._advance(self._killed, entry)

    def kill(self, kill: Kill) -> None:
        """Show a kill."""
        line = Text.assemble((" ✗ ", SAVE if kill.inside_save else BAD), f"kill -9 #{kill.number} ")
        if kill.inside_save:
            line.append(f"inside the save of step {kill.step}").append("  begun, and never committed", QUIET)
        else:
            line.append(f"after step {kill.step}")
        self._print(line)
        self._bars.update(self._killed, state=Text("killed, starting again", BAD).markup)

    def back(self, kill: Kill) -> None:
        """Show that the run has resumed."""
        self._print(
            Text.assemble(
                (" ↻ ", GOOD), f"back at work after {duration_text(kill.back_s)}, from step {kill.resumed_from}"
            )
        )

    def _advance(self, task: Any, entry: Mapping[str, Any]) -> None:
        match entry["what"]:
            case "started":
                self._bars.update(task, state="training", completed=entry["start"])
            case "finished":
                self._bars.update(task, completed=entry["step"] + 1, loss=f"loss {float.fromhex(entry['loss']):.3f}")
            case "ended":
                self._bars.update(task, state="done")

    def _print(self, line: Text) -> None:
        if self._enabled:
            self._bars.console.print(line)


def render(report: DemoReport) -> Group:
    """Return the table of kills, the figures and the verdict."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("kill -9", "after step", "inside a save", "resumed from", "steps redone", "back at work"):
        table.add_column(heading, justify="left" if heading == "inside a save" else "right")
    for kill in report.kills:
        table.add_row(
            str(kill.number),
            str(kill.step),
            Text("yes", SAVE) if kill.inside_save else Text("no", QUIET),
            "–" if kill.resumed_from is None else str(kill.resumed_from),
            str(kill.redone),
            duration_text(kill.back_s),
        )
    parts: list[RenderableType] = [table, Text(), _numbers(report), Text(), _verdict(report)]
    return Group(*(Padding(part, (0, 1)) for part in parts))


def _numbers(report: DemoReport) -> Table:
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(style="bold")
    numbers.add_column()
    count = len(report.kills)
    numbers.add_row("kills", f"{count}, of them {report.kills_inside_save} inside a save; {report.redone} steps redone")
    numbers.add_row(
        "saves", f"{report.saves} of {size_text(report.bytes_per_save)}, one every {report.save_every} steps"
    )
    numbers.add_row(
        "stall per save",
        f"{duration_text(report.stall_ms_median / 1e3)} (median), {duration_text(report.stall_ms_max / 1e3)} (longest)",
    )
    numbers.add_row(
        "training",
        f"{report.steps} steps of a GPT, {compact_text(report.parameters)} parameters, on Python's own source",
    )
    machine = report.machine
    numbers.add_row(
        "machine", f"{machine.get('cores')} cores, Python {machine.get('python')}, torch {machine.get('torch')}"
    )
    numbers.add_row("loader", f"{report.loader}, shuffled, with workers")
    numbers.add_row("took", f"{duration_text(report.seconds)}; seed {report.seed}")
    numbers.add_row("picture", report.picture)
    if report.kept:
        numbers.add_row("runs", report.kept)
    return numbers


def _verdict(report: DemoReport) -> Text:
    if report.difference is not None:
        return Text(f"✗ not equal: {report.difference}", BAD)
    same = f"all {report.steps} losses are equal to the bit; so are parameters and optimizer"
    if report.problem is not None:
        return Text(f"✗ {same}, but: {report.problem}", BAD)
    return Text(f"✓ {same}", GOOD)
