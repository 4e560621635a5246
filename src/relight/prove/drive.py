"""Three runs of a script: uninterrupted, killed after a save, resumed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from relight.comm.children import child_command
from relight.decode import from_json_bytes
from relight.errors import CheckpointNotFound, ConfigError
from relight.policy.compact import LOSSY
from relight.prove.compare import FirstDifference, MetricDrift, compare, drift
from relight.prove.recorder_config import RecorderConfig
from relight.prove.trace import read_trace
from relight.settings.kept_directory import make_kept_directory
from relight.units import duration_text

CLEAN_UP_S = 10.0
"""Seconds to wait for agents that still write."""


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """``n``: steps before the kill. ``k``: steps after the resume. ``keep``: directory to keep the runs in; None: they are removed."""

    script: str
    args: Sequence[str] = ()
    n: int = 5
    k: int = 3
    keep: str | None = None
    lossy: Sequence[str] = ()
    """``PATTERN=WAY``: tensors that the killed run stores inexactly. The report then has the change in metrics instead of equality."""
    timeout_s: float = 3600.0
    on_stage: Callable[[str], None] = field(default=lambda text: None)
    """Receives a line when each of the three runs begins."""


@dataclass(frozen=True, slots=True)
class ProveReport:
    """Whether the resumed run equals the straight one to the bit, the number of equal steps, and the first difference."""

    ok: bool
    n: int
    k: int
    steps_compared: int
    things_compared: int
    difference: FirstDifference | None
    seconds: float
    drift: tuple[MetricDrift, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the value of ``--json``."""
        return {
            "ok": self.ok,
            "n": self.n,
            "k": self.k,
            "steps_compared": self.steps_compared,
            "things_compared": self.things_compared,
            "difference": self.difference.to_dict() if self.difference else None,
            "seconds": round(self.seconds, 3),
            "drift": [row._asdict() for row in self.drift],
        }


def run(options: ProveOptions) -> ProveReport:
    """Compare the runs. Return the report with the first difference, if any. Cost: three starts of the script and ``2(n+k)`` steps."""
    if options.n < 1 or options.k < 1:
        raise ConfigError("n and k are at least 1")
    if not Path(options.script).is_file():
        raise CheckpointNotFound(f"no script {options.script!r}")
    started = time.monotonic()
    if options.keep:
        kept = Path(options.keep)
        make_kept_directory(kept)
        return _run(options, kept, started)
    folder = Path(tempfile.mkdtemp(prefix="relight-prove-"))
    try:
        return _run(options, folder, started)
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove the runs' folder. The agent of a killed run may still write there: try until it has ended, at most ``CLEAN_UP_S`` seconds.

    A remaining folder is left, because an error would hide the result.
    """
    ends = time.monotonic() + CLEAN_UP_S
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < ends:
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def _run(options: ProveOptions, folder: Path, started: float) -> ProveReport:
    n, k = options.n, options.k
    last = n + k - 1
    options.on_stage(f"1/3 straight: {n + k} steps without interruption")
    _start(options, folder, "straight", record_from=n - 1, stop_after=last, kill=False, run="straight")
    options.on_stage(f"2/3 killed: {n} steps, a save, SIGKILL")
    _start(options, folder, "killed", record_from=n - 1, stop_after=n - 1, kill=True, run="killed")
    options.on_stage(f"3/3 resumed: {k} steps more")
    _start(options, folder, "resumed", record_from=n, stop_after=last, kill=False, run="killed")
    straight = read_trace(folder / "straight.trace")
    killed = read_trace(folder / "killed.trace")
    resumed = read_trace(folder / "resumed.trace")
    if options.lossy:
        rows = drift(straight, resumed)
        if not rows:
            raise ConfigError("the runs reported no metric to compare", hint="report one: ckpt.step(step, loss=loss)")
        return ProveReport(
            True, n, k, len({row.step for row in rows}), len(rows), None, time.monotonic() - started, rows
        )
    kinds = from_json_bytes((folder / "straight.kinds").read_bytes(), dict[str, str])
    _, unstable = compare(straight, killed, kinds=kinds)
    if unstable is not None:
        difference: FirstDifference | None = FirstDifference(
            unstable.step,
            f"at the end of step {unstable.step}, before any kill",
            unstable.what,
            "two runs from the start differ already: seed everything, and use deterministic operations",
            unstable.also,
        )
        agreed = 0
    else:
        agreed, difference = compare(straight, resumed, kinds=kinds)
        if difference is None and agreed < k:
            raise ConfigError(
                f"the resumed run recorded {agreed} of the {k} steps after step {n - 1}",
                hint="does the script start from what ckpt.restore() returns, and call ckpt.step(step) for each step?",
            )
    things = sum(len(entry.state) + len(entry.metrics) + len(entry.batches) + 1 for entry in resumed)
    return ProveReport(difference is None, n, k, agreed, things, difference, time.monotonic() - started)


def _start(
    options: ProveOptions, folder: Path, name: str, *, record_from: int, stop_after: int, kill: bool, run: str
) -> None:
    config = RecorderConfig(
        trace=str(folder / f"{name}.trace"),
        kinds=str(folder / f"{name}.kinds"),
        store=str(folder / "store"),
        run=run,
        record_from=record_from,
        stop_after=stop_after,
        kill=kill,
        seed=1 if name == "resumed" else 0,
    )
    command = child_command(
        "relight.prove.recorder", msgspec.json.encode(config).decode(), options.script, *options.args
    )
    output = folder / f"{name}.log"
    environment = {**os.environ, LOSSY: " ".join(options.lossy)} if options.lossy and name != "straight" else None
    with output.open("wb") as log:
        try:
            process = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=options.timeout_s,
                check=False,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"the {name} run took more than {duration_text(options.timeout_s)}", hint="fewer steps: -n and -k"
            ) from None
    expected = -signal.SIGKILL if kill else 0
    reached = os.path.exists(config.kinds)
    if process.returncode != expected or not reached:
        tail = output.read_text(errors="replace").strip().splitlines()[-15:]
        if process.returncode == 0:
            what, hint = f"the {name} run ended before its last step", f"it needs at least {stop_after + 1} steps"
        else:
            error = f": {tail[-1].strip()}" if tail else ""
            what = f"the script failed in the {name} run, with status {process.returncode}{error}"
            hint = f"run it alone: python {shlex.join([options.script, *options.args])}"
        raise ConfigError(what, where=options.script, details=tail, hint=hint)
