"""Driver of the demo: runs the training twice at the same time, once without interruption and once killed many times."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relight.demo.compare import compare
from relight.demo.kills import Aim, plan_kills
from relight.demo.lane import DemoRun
from relight.demo.report import DemoReport, Kill, curve_digest
from relight.demo.shape import FULL, SHAPES, DemoSize
from relight.errors import ConfigError, NoSpace, extra_hint
from relight.settings.kept_directory import make_kept_directory
from relight.units import size_text

if TYPE_CHECKING:
    from rich.console import Console

    from relight.demo.view import DemoView

KILLS_MIN, KILLS_SAVING_MIN = 5, 2
ROOM_BYTES = {"full": 1_200_000_000, "quick": 100_000_000}
POLL_S, POLL_CLOSELY_S = 0.005, 0.0002
"""Seconds between polls of the trainings: usually, and while a kill waits for a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of the demo.

    ``quick``: a smaller model, in half a minute. ``seed``: seed of kills, data and curves. ``keep``: directory in which to keep
    the runs (None: they are removed). ``out``: path of the picture. ``progress``: whether to show progress on standard error.
    ``device``: torch's name of the device that trains.
    """

    quick: bool = False
    seed: int = 0
    keep: Path | None = None
    out: Path = Path("relight-demo.png")
    progress: bool = True
    device: str = "cpu"


def run(options: DemoOptions | None = None, *, console: Console | None = None) -> DemoReport:
    """Run both trainings, draw the picture, and return the report. ``rich.print(report)`` shows it; ``report.ok`` is the verdict.

    Raise ``ConfigError`` if a package is missing, ``NoSpace``, or ``RelightError`` if training itself fails.
    """
    from relight.demo.view import DemoView  # imported here, so that other commands start without it

    options = options or DemoOptions()
    _check_installed()
    began = time.monotonic()
    name = "quick" if options.quick else "full"
    shape = SHAPES[name]
    with _end_only_here() as end_if_asked, _folder(options.keep, ROOM_BYTES[name]) as folder:
        straight = DemoRun("straight", folder, name, shape, options.seed, options.device)
        killed = DemoRun("killed", folder, name, shape, options.seed, options.device)
        aim = Aim(plan_kills(options.seed, shape), shape.save_every)
        try:
            with DemoView(shape, enabled=options.progress, console=console) as view:
                kills = _run_both(straight, killed, aim, view, end_if_asked)
        finally:
            straight.stop()
            killed.stop()
        report = _report(options, shape, straight, killed, kills)

        from relight.demo.plot import draw

        draw(report, straight.steps, killed.steps, options.out)
        report = replace(report, seconds=round(time.monotonic() - began, 3))
        if options.keep is not None:
            (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return report


def _run_both(
    straight: DemoRun, killed: DemoRun, aim: Aim, view: DemoView, end_if_asked: Callable[[], None]
) -> list[Kill]:
    kills: list[Kill] = []

    def on_killed_entry(entry: dict[str, Any]) -> None:
        view.killed(entry)
        if kills and (updated := kills[-1].after(entry)) is not kills[-1]:
            if kills[-1].back_s is None and updated.back_s is not None:
                view.back(updated)
            kills[-1] = updated

    straight.on_entry = view.straight
    killed.on_entry = on_killed_entry
    straight.start()
    killed.start()
    polled_s = 0.0
    while True:
        end_if_asked()
        straight_ended, killed_ended = straight.ended, killed.ended
        if straight_ended and killed_ended:
            return kills
        closely = aim.watching_a_save(killed)
        now = time.monotonic()
        if not closely or now - polled_s > POLL_S:
            polled_s = now
            straight.poll()
        killed.poll()
        if not killed_ended and aim.due(killed, time.monotonic()):
            kill = _kill(killed, len(kills) + 1)
            kills.append(kill)
            aim.fired(kill.step, kill.inside_save)
            view.kill(kill)
            killed.start()
            if straight_ended:  # a core is free, and the new process is still importing torch
                import_module("relight.demo.plot")
        time.sleep(POLL_CLOSELY_S if closely else POLL_S)


def _kill(lane: DemoRun, number: int) -> Kill:
    killed_at, saving = lane.kill()
    assert lane.last is not None
    return Kill(number=number, step=lane.last, saving=saving, time=killed_at)


def _report(options: DemoOptions, shape: DemoSize, straight: DemoRun, killed: DemoRun, kills: list[Kill]) -> DemoReport:
    inside = sum(kill.inside_save for kill in kills)
    problem = None
    if len(kills) < KILLS_MIN or inside < KILLS_SAVING_MIN:
        problem = (
            f"only {len(kills)} kills, {inside} of them inside a save; {KILLS_MIN} and {KILLS_SAVING_MIN} are needed"
        )
    stalls = sorted([*straight.stalls_s, *killed.stalls_s])
    sizes = [*straight.save_bytes, *killed.save_bytes]
    return DemoReport(
        seed=options.seed,
        quick=options.quick,
        steps=shape.steps,
        save_every=shape.save_every,
        kills=tuple(kills),
        difference=compare(shape.steps, straight.steps, killed.steps, (straight.digest, killed.digest)),
        problem=problem,
        curve_digest=curve_digest(straight.steps),
        state_digest=straight.digest or "",
        saves=len(stalls),
        stall_ms_median=round(1000 * stalls[len(stalls) // 2], 3) if stalls else 0.0,
        stall_ms_max=round(1000 * stalls[-1], 3) if stalls else 0.0,
        bytes_per_save=max(sizes, default=0),
        parameters=straight.facts.get("parameters", 0),
        text_bytes=straight.facts.get("text_bytes", 0),
        loader=straight.facts.get("loader", ""),
        machine={
            "cores": os.cpu_count() or 0,
            "processor": platform.machine(),
            "python": platform.python_version(),
            "torch": straight.facts.get("torch", ""),
        },
        picture=str(options.out),
        kept=None if options.keep is None else str(options.keep),
    )


@contextmanager
def _end_only_here() -> Iterator[Callable[[], None]]:
    """Yield a function that ends the demo if Ctrl-C, SIGTERM or SIGHUP arrived.

    An exception raised by a signal handler could interrupt the start of a process, which would then never be ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signals: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in previous:
        signal.signal(number, lambda got, frame: signals.append(got))

    def end_if_asked() -> None:
        if signals:
            raise KeyboardInterrupt if signals[0] == signal.SIGINT else SystemExit(128 + signals[0])

    try:
        yield end_if_asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _folder(keep: Path | None, room: int) -> Iterator[Path]:
    """Yield the directory of the runs: ``keep``, new or empty, or a temporary directory that is removed at the end."""
    if keep is not None:
        make_kept_directory(keep)
    folder = keep or Path(tempfile.mkdtemp(prefix="relight-demo-"))
    try:
        free = shutil.disk_usage(folder).free
        if free < room:
            raise NoSpace(
                f"{size_text(free)} free, {size_text(room)} needed",
                where=str(folder),
                hint="make room, or choose another disk with --keep, or use --quick",
            )
        yield folder
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _check_installed() -> None:
    missing = [name for name in ("torch", "numpy", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}", hint=extra_hint("demo"))


assert FULL.kills >= KILLS_MIN and FULL.kills_saving >= KILLS_SAVING_MIN
