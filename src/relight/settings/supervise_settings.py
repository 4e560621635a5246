"""The table ``[supervise]``: rules of ``relight run``."""

from __future__ import annotations

from typing import Annotated

from relight.settings.value_types import (
    Count,
    DaySeconds,
    Modules,
    MonthSecondsAbove0,
    Notices,
    Path,
    PauseShare,
    SettingsTable,
    UpTo1,
    UpToDay,
    YesNo,
    about,
)


class SuperviseRules(SettingsTable, frozen=True):
    """Rules for the decision about a failure, of ``[supervise]``."""

    failures: Annotated[
        Count, about("failures in a row without a step of progress that are allowed: the next one stops it")
    ] = 10
    same: Annotated[Count, about("failures that are alike, at the same step, until it stops")] = 3
    backoff_s: Annotated[DaySeconds, about("the first wait before another try; it doubles")] = 1.0
    backoff_max_s: Annotated[DaySeconds, about("the longest")] = 60.0
    roll_backs: Annotated[Count, about("how often it goes back to before one onset")] = 3
    node_failures: Annotated[Count, about("failures of its hardware within a day after which a machine leaves")] = 3
    skip: Annotated[
        Count, about("number of steps to skip after a rollback, with their samples; doubled at each further one")
    ] = 1
    lr_cut: Annotated[UpTo1, about("factor for the learning rates at each rollback")] = 1.0
    split: Annotated[
        YesNo, about("whether micro-batches may be made smaller: the script must read ckpt.micro_batch_split")
    ] = False
    spikes: Annotated[
        UpToDay, about("standard deviations above the median from which a loss counts as a spike; 0: never")
    ] = 10.0


class SuperviseSettings(SuperviseRules, frozen=True):
    """``[supervise]``: how ``relight run`` starts, watches and ends a job."""

    start_s: Annotated[MonthSecondsAbove0, about("how long is waited for the first step")] = 900.0
    phase_s: Annotated[MonthSecondsAbove0, about("how long is waited for a phase that was never seen")] = 900.0
    spares: Annotated[
        YesNo, about("whether spare processes wait to replace ranks; cost: a process and its memory for each rank")
    ] = True
    preload: Annotated[Modules, about("what the spares import in addition to torch and Relight")] = ()
    grace_s: Annotated[
        DaySeconds,
        about("from SIGTERM to SIGKILL, when the machine is wanted back", "not known", variable="RELIGHT_GRACE_S"),
    ] = 0.0
    notices: Annotated[Notices, about("sources of the cloud's preemption notices")] = ()
    predict: Annotated[YesNo, about("whether the node is monitored each second to predict failures")] = True
    model: Annotated[Path, about("a file of relight predict train", "rules alone", named=True)] = ""
    recordings: Annotated[
        Path, about("a directory for the recorded measurements of the newest fifty jobs", "nowhere", named=True)
    ] = ""
    pause: Annotated[
        PauseShare, about("share of the time that ranks pause while this node is too hot or under pressure")
    ] = 0.2
    lower_power: Annotated[
        YesNo, about("whether accelerators' power limits are lowered under heat, and restored after it; needs root")
    ] = False
    drain: Annotated[YesNo, about("whether a machine leaves the job if its device is about to fail")] = False
