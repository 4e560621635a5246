"""The table ``[checkpoint]``. Its tables have the arguments of the function that each is named for."""

from __future__ import annotations

from typing import Annotated

from relight.settings import kinds
from relight.settings.kinds import NOT_SET, SettingsTable, about

# fmt: off


class AdaptiveSettings(SettingsTable, frozen=True):
    """``[checkpoint.adaptive]``: arguments of ``relight.adaptive``."""

    at_least: Annotated[kinds.Time, about("the shortest interval between saves")] = NOT_SET
    at_most: Annotated[kinds.Time, about("the longest", "1h, or 100 times a save's cost")] = NOT_SET
    overhead: Annotated[kinds.Share, about("what share of the steps' time saves may take", "0.5")] = NOT_SET
    total_steps: Annotated[kinds.Count, about("how many steps there will be", "not known")] = NOT_SET
    mtbf: Annotated[kinds.Time, about("the time between failures of this job", "published rates")] = NOT_SET
    loss: Annotated[kinds.Metric, about("the metric; volatile values make saves more frequent")] = NOT_SET
    drop: Annotated[kinds.Share, about("by how much the loss must fall for the next save to come earlier")] = NOT_SET
    bytes_per_second: Annotated[kinds.RateAbove0, about("limit of the bytes that saves write to the store", "no bound")] = NOT_SET
    phases: Annotated[kinds.Factors, about("the factor of the interval in each phase that ckpt.phase names")] = NOT_SET
    busy: Annotated[kinds.BusyShares, about("the share of use above which the interval is twice as long")] = NOT_SET


class EverySettings(SettingsTable, frozen=True):
    """``[checkpoint.every]``: arguments of ``relight.every``."""

    steps: Annotated[kinds.Count, about("save after every n steps", "never")] = NOT_SET
    minutes: Annotated[kinds.Above0, about("save n minutes after the last save", "never")] = NOT_SET
    hours: Annotated[kinds.Above0, about("the same in hours; hours, minutes and seconds add up", "never")] = NOT_SET
    seconds: Annotated[kinds.Above0, about("the same in seconds", "never")] = NOT_SET
    epochs: Annotated[kinds.Count, about("save at the end of every n training epochs", "never")] = NOT_SET
    loader: Annotated[kinds.Component, about("the loader that epochs are counted by", "the only loader")] = NOT_SET


class KeepSettings(SettingsTable, frozen=True):
    """``[checkpoint.keep]``: arguments of ``relight.keep``."""

    last: Annotated[kinds.Count, about("the newest n", "no rule")] = NOT_SET
    best: Annotated[kinds.Count, about("the best n, by metric", "no rule")] = NOT_SET
    metric: Annotated[kinds.Metric, about("the metric of best", "the run's own")] = NOT_SET
    mode: Annotated[kinds.Mode, about("whether less or more of it is better", "by the name")] = NOT_SET
    every: Annotated[kinds.Count, about("one for each multiple of n steps: the first at or after it", "no rule")] = NOT_SET
    within: Annotated[kinds.Time, about("those within this time of the newest", "no rule")] = NOT_SET
    hourly: Annotated[kinds.Count, about("the newest of each of n hours", "no rule")] = NOT_SET
    daily: Annotated[kinds.Count, about("the newest of each of n days", "no rule")] = NOT_SET
    weekly: Annotated[kinds.Count, about("the newest of each of n weeks", "no rule")] = NOT_SET
    monthly: Annotated[kinds.Count, about("the newest of each of n months", "no rule")] = NOT_SET
    budget: Annotated[kinds.SizeAbove0, about("the newest that fit into it", "no rule")] = NOT_SET
    lag_steps: Annotated[kinds.Count, about("one that is n steps older than the newest", "no rule")] = NOT_SET
    undo_window: Annotated[kinds.Time, about("how long a removed checkpoint can be brought back", "not at all")] = NOT_SET
    prune_abandoned: Annotated[kinds.YesNo, about("whether abandoned checkpoints may go, too", "false")] = NOT_SET


class LimitsSettings(SettingsTable, frozen=True):
    """``[checkpoint.limits]``: arguments of ``relight.Limits``."""

    memory: Annotated[kinds.Bytes, about("shared memory for snapshots, all slots together", "what is there")] = NOT_SET
    threads: Annotated[kinds.Count, about("number of threads that hash and copy", "2")] = NOT_SET
    bytes_per_second: Annotated[kinds.RateAbove0, about("limit of writes, for all ranks of a node together", "no bound")] = NOT_SET
    read_bytes_per_second: Annotated[kinds.RateAbove0, about("limit of reads, for all ranks of a node together", "no bound")] = NOT_SET
    nice: Annotated[kinds.CountFrom0, about("the agent's niceness", "10")] = NOT_SET
    when_busy: Annotated[kinds.WhenBusy, about("what becomes of a save that is due while no slot is free", "newest")] = (NOT_SET)
    deadline_s: Annotated[kinds.Seconds, about("the longest wait for the agent", "600")] = NOT_SET


class CompactSettings(SettingsTable, frozen=True):
    """``[checkpoint.compact]``: arguments of ``relight.Compact``."""

    reuse: Annotated[kinds.YesNo, about("whether a chunk that an earlier save has is not stored again", "true")] = NOT_SET
    codecs: Annotated[kinds.Codecs, about("whether chunks are compressed", "auto")] = NOT_SET
    full_every: Annotated[kinds.Count, about("one in this many saves stores everything itself", "none")] = (NOT_SET)
    trust_versions: Annotated[kinds.YesNo, about("whether frozen parameters are known by their version counters", "false")] = NOT_SET
    lossy: Annotated[kinds.Ways, about("which tensors are stored inexactly, and how")] = NOT_SET
    max_error: Annotated[kinds.ErrorBounds, about('the largest error of values stored inexactly: 1e-4, or "0.1%"')] = NOT_SET
    plugin_codecs: Annotated[kinds.CodecNames, about("codecs of other packages, by names of tensors")] = NOT_SET
    coder: Annotated[kinds.Coder, about("who codes: nvCOMP on the GPU where it is there", "cpu")] = NOT_SET
    level: Annotated[kinds.UpTo19, about("zstd's level: higher ones take more time and store less", "the fastest")] = NOT_SET


class PeersSettings(SettingsTable, frozen=True):
    """``[checkpoint.peers]``: arguments of ``relight.Peers``."""

    copies: Annotated[kinds.UpTo4, about("how many other nodes hold each node's snapshot whole")] = NOT_SET
    data: Annotated[kinds.UpTo32, about("how many nodes a snapshot's pieces are spread over", "1")] = NOT_SET
    parity: Annotated[kinds.UpTo4, about("how many nodes of data + parity may be lost", "1")] = NOT_SET
    memory: Annotated[kinds.SizeAbove0, about("memory that a node uses for other nodes' snapshots", "what is there")] = NOT_SET
    bytes_per_second: Annotated[kinds.RateAbove0, about("limit of the bytes that a node sends", "no bound")] = NOT_SET
    tls: Annotated[kinds.YesNo, about("whether nodes encrypt what they exchange", "true if the run is encrypted")] = NOT_SET
    plane: Annotated[kinds.Plane, about("what moves the bytes: RDMA if it is there, or TCP", "auto")] = NOT_SET


class TierSettings(SettingsTable, frozen=True):
    """A table of ``[checkpoint.tiers]``: arguments of ``relight.tier``."""

    url: Annotated[kinds.Stores, about("the store, or several that each get a copy", "the script's store")] = NOT_SET
    keep: KeepSettings = NOT_SET
    bytes_per_second: Annotated[kinds.RateAbove0, about("limit of the bytes that are copied there", "no bound")] = NOT_SET
    quorum: Annotated[kinds.Count, about("number of copies after which a checkpoint counts as drained", "all")] = NOT_SET
    capacity: Annotated[kinds.SizeAbove0, about("the size above which the oldest checkpoints go", "no bound")] = NOT_SET
    lag: Annotated[kinds.Time, about("how old its newest copy may get; 0: copy every save", "computed by adaptive()")] = NOT_SET


class CheckpointSettings(SettingsTable, frozen=True):
    """``[checkpoint]``: defaults of a Checkpointer's arguments."""

    background: Annotated[
        kinds.YesNo,
        about(
            "whether the agent writes while training continues",
            "true",
            argument="Checkpointer(background=)",
            variable="RELIGHT_BACKGROUND",
        ),
    ] = NOT_SET
    takeover: Annotated[
        kinds.TakeoverChoice,
        about(
            "what a start does if another process still trains its run",
            "refuse, unless a launcher restarts",
            argument="Checkpointer(takeover=)",
        ),
    ] = NOT_SET
    adaptive: AdaptiveSettings = NOT_SET
    every: EverySettings = NOT_SET
    keep: KeepSettings = NOT_SET
    limits: LimitsSettings = NOT_SET
    compact: CompactSettings = NOT_SET
    peers: PeersSettings = NOT_SET
    tiers: Annotated[
        dict[str, TierSettings],
        kinds.kind("a table for each further store, near to far"),
        about("where checkpoints are copied to: url, and the arguments of tier()", argument="Checkpointer(Tiers(…))", named=True),
    ] = NOT_SET
