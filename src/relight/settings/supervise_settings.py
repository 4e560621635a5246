"""The table ``[supervise]``: rules of ``relight run``."""

from __future__ import annotations

from typing import Annotated

from relight.settings import kinds
from relight.settings.kinds import SettingsTable, about

GRACE_VARIABLE = "RELIGHT_GRACE_S"
"""From before the naming scheme. ``relight run`` sets it for its ranks, too."""

# fmt: off


class SuperviseRules(SettingsTable, frozen=True):
    """Rules for the decision about a failure, of ``[supervise]``."""

    failures: Annotated[kinds.Count, about("failures in a row without a step of progress that are allowed: the next one stops it")] = 10
    same: Annotated[kinds.Count, about("failures that are alike, at the same step, until it stops")] = 3
    backoff_s: Annotated[kinds.DaySeconds, about("the first wait before another try; it doubles")] = 1.0
    backoff_max_s: Annotated[kinds.DaySeconds, about("the longest")] = 60.0
    roll_backs: Annotated[kinds.Count, about("how often it goes back to before the same spike or divergence, until it stops")] = 3
    node_failures: Annotated[kinds.Count, about("failures of its hardware within a day after which a machine leaves")] = 3
    skip: Annotated[kinds.Count, about("number of steps to skip after a rollback, with their samples; doubled at each further one")] = 1
    lr_cut: Annotated[kinds.UpTo1, about("factor for the learning rates at each rollback")] = 1.0
    split: Annotated[kinds.YesNo, about("whether micro-batches may be made smaller: the script must read ckpt.micro_batch_split")] = False
    spikes: Annotated[kinds.UpToDay, about("standard deviations above the median from which a loss counts as a spike; 0: never")] = 10.0


class SuperviseSettings(SuperviseRules, frozen=True):
    """``[supervise]``: how ``relight run`` starts, watches and ends a job."""

    start_s: Annotated[kinds.MonthSecondsAbove0, about("how long is waited for the first step")] = 900.0
    phase_s: Annotated[kinds.MonthSecondsAbove0, about("longest duration of a phase that states none and was not seen before")] = 900.0
    spares: Annotated[kinds.YesNo, about("whether spare processes wait to replace ranks: a process with its memory for each")] = True
    preload: Annotated[kinds.Modules, about("what the spares import in addition to torch and Relight")] = ()
    grace_s: Annotated[
        kinds.DaySeconds,
        about("from SIGTERM to SIGKILL: a save that does not fit is not begun", "not known", variable=GRACE_VARIABLE),
    ] = 0.0
    notices: Annotated[kinds.Notices, about("sources of the cloud's preemption notices")] = ()
    predict: Annotated[kinds.YesNo, about("whether the node is monitored each second to predict failures")] = True
    model: Annotated[kinds.Path, about("a file of relight plan predict train", "rules alone", named=True)] = ""
    recordings: Annotated[kinds.Path, about("a directory for the measurements of the newest fifty jobs", "nowhere", named=True)] = ""
    pause: Annotated[kinds.PauseShare, about("share of the time that ranks pause while this node is too hot or under pressure")] = 0.2
    lower_power: Annotated[kinds.YesNo, about("whether accelerators' power limits are lowered under heat; needs root")] = False
    drain: Annotated[kinds.YesNo, about("whether a machine leaves the job if its device is about to fail")] = False
