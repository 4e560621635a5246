"""Every metric: name, kind, labels, help, source, panel. The exposition, the dashboards and the pages are made from
this table.

Names begin with ``relight_`` and use base units (seconds, bytes, ratios); counters end in ``_total``. All have
``store`` and ``run``. No label has a step, an id or a text as its value: the number of values would be unbounded.
"""

from __future__ import annotations

from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
RUN_LABELS = ("store", "run")
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of a histogram's buckets, for all durations."""


@dataclass(frozen=True, slots=True)
class MetricSource:
    """The event that a metric counts: each event is 1, or the number in ``field``.

    ``once``: events with equal values of these fields count once, however many ranks emit them.
    """

    event: str
    field: str = ""
    less: str = ""
    """A field that is subtracted: the begin of a stage, from its end."""
    once: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric. ``made``: the event that it comes from; None: it is read from the run's log.

    ``labels``: those in addition to store and run. Labels of an event's metric are fields of the event, renamed by
    ``fields``.
    """

    name: str
    kind: str
    help: str
    panel: str
    """The row of the dashboard in which it is shown."""
    labels: tuple[str, ...] = ()
    made: MetricSource | None = None
    fields: tuple[tuple[str, str], ...] = ()
    """Labels with another name than the event's field: ``(label, field)``."""

    @property
    def unit(self) -> str:
        """Return ``seconds``, ``bytes`` or ``ratio``; empty for a count."""
        return next(
            (unit for unit in ("seconds", "bytes", "ratio") if unit in self.name.removesuffix("_total").split("_")), ""
        )

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Return all labels, those of the run first."""
        return (*RUN_LABELS, *self.labels)

    def field_of(self, label: str) -> str:
        """Return the event's field that a label takes its value from."""
        return dict(self.fields).get(label, label)


CHECKPOINTS, SAVING, RESTORING, FOLLOWING = "Checkpoints", "Saving", "Restoring", "Followers"
TIERS, JOB, EVENTS_ROW = "Tiers", "Job", "Events"
ROWS = (CHECKPOINTS, SAVING, RESTORING, FOLLOWING, TIERS, JOB, EVENTS_ROW)

METRICS: tuple[Metric, ...] = (
    # read from the run's log
    Metric("relight_store_up", GAUGE, "1: the run's log could be read; 0: it could not.", CHECKPOINTS),
    Metric("relight_checkpoints", GAUGE, "Checkpoints that exist.", CHECKPOINTS),
    Metric("relight_checkpoint_step", GAUGE, "Step of the newest checkpoint.", CHECKPOINTS),
    Metric("relight_checkpoint_age_seconds", GAUGE, "Seconds since the newest checkpoint was committed.", CHECKPOINTS),
    Metric("relight_checkpoint_good_age_seconds", GAUGE, "Seconds since the newest good checkpoint; without one, since the attempt began.",
            CHECKPOINTS),
    Metric("relight_checkpoints_damaged", GAUGE, "Checkpoints that are suspect or known to be damaged.", CHECKPOINTS),
    Metric("relight_run_active", GAUGE, "1: the run is active, as far as its log shows; 0: it has ended, or is silent for a day.",
            CHECKPOINTS),
    Metric("relight_mirror_drives_degraded", GAUGE, "Drives of the run's mirrored store that failed or are not whole.", CHECKPOINTS),
    Metric("relight_retention_failed", GAUGE, "Times in a row that old checkpoints could not be removed.", CHECKPOINTS),
    Metric("relight_save_last_seconds", GAUGE, "From the call until durable, of the latest save.", SAVING),
    Metric("relight_saves_failed_in_a_row", GAUGE, "Saves that failed since one became a checkpoint.", SAVING),
    Metric("relight_checkpoint_logical_bytes", GAUGE, "Bytes of state in the newest checkpoint.", CHECKPOINTS),
    Metric("relight_checkpoint_stored_bytes", GAUGE, "Bytes of the newest checkpoint if it were stored alone.", CHECKPOINTS),
    Metric("relight_checkpoint_new_bytes", GAUGE, "Bytes that the newest checkpoint has added to the store.", CHECKPOINTS),
    Metric("relight_checkpoint_saved_ratio", GAUGE, "State of the newest checkpoint, divided by the bytes that it has added.", CHECKPOINTS),
    Metric("relight_attempts", GAUGE, "How often a process took charge of the run.", JOB),
    Metric("relight_tier_checkpoints", GAUGE, "Checkpoints in a tier, as recorded in the nearest tier's log.", TIERS, ("tier",)),
    Metric("relight_tier_lag_checkpoints", GAUGE, "Checkpoints newer than the newest in that tier.", TIERS, ("tier",)),
    Metric("relight_tier_lag_seconds", GAUGE, "Age of the oldest checkpoint newer than the newest in that tier.", TIERS, ("tier",)),
    Metric("relight_tier_used_bytes", GAUGE, "Bytes that the run's checkpoints have added to a tier.", TIERS, ("tier",)),
    Metric("relight_tier_capacity_bytes", GAUGE, "Bytes that the run may use in a tier: its limit, or all that the disk has for it.",
            TIERS, ("tier",)),
    Metric("relight_tier_full_ratio", GAUGE, "Used share of the bytes that the run may use in a tier.", TIERS, ("tier",)),
    Metric("relight_goodput_ratio", GAUGE, "Share of the jobs' time in steps that were done for the first time.", JOB),
    Metric("relight_job_seconds_total", COUNTER, "Seconds of the jobs, by what they were spent on.", JOB, ("part",)),
    Metric("relight_failures_total", COUNTER, "Failures of the job, by class.", JOB, ("class",)),
    Metric("relight_recent_failures", GAUGE, "Failures of the job within the last hour.", JOB),
    Metric("relight_recoveries", GAUGE, "The latest 200 failures by outcome: recovered, failed again, stopped, left.", JOB, ("outcome",)),
    Metric("relight_recovery_success_ratio", GAUGE, "Share of the latest 200 failures after which training continued.", JOB),
    Metric("relight_job_given_up", GAUGE, "1: relight run has given the job up, and no attempt has begun since; 0 otherwise.", JOB),
    Metric("relight_nodes_excluded", GAUGE, "Nodes that left the job within the last day.", JOB),
    Metric("relight_recent_roll_backs", GAUGE, "Number of rollbacks of the run within the last day.", JOB),
    Metric("relight_recent_hardware_failures", GAUGE, "Hardware failures of the job within the last day.", JOB),
    Metric("relight_last_decision", GAUGE, "1 for the action that was decided after the latest failure, 0 for each other action.",
            JOB, ("action",)),
    Metric("relight_last_decision_time_seconds", GAUGE, "When that was decided, in seconds since 1970.", JOB),
    Metric("relight_steps_total", COUNTER, "Steps that ended for the first time.", JOB),
    Metric("relight_risk_ratio", GAUGE, "Score of the latest alarm of a failure to come, 0 once it is a quarter of an hour old.", JOB),
    # from events
    Metric("relight_saves_total", COUNTER, "Saves that became checkpoints.", SAVING, made=MetricSource("save.durable", once=("id",))),
    Metric("relight_saves_failed_total", COUNTER, "Saves that did not become checkpoints, as reported by each rank.", SAVING, ("kind",),
           MetricSource("save.failed")),
    Metric("relight_saves_put_off_total", COUNTER,
           "Saves that were postponed: the agent was not ready yet, or earlier ones were still being written.", SAVING,
            made=MetricSource("save.coalesced", once=("step",))),
    Metric("relight_saves_held_total", COUNTER, "Saves that waited in memory for space in the nearest tier.", SAVING,
           made=MetricSource("save.backpressured", once=("id",))),
    Metric("relight_saved_bytes_total", COUNTER, "Bytes of checkpoints that became durable.", SAVING,
            made=MetricSource("save.durable", "bytes", once=("id",))),
    Metric("relight_save_blocked_seconds", HISTOGRAM, "Seconds that a save blocked the training of a rank.", SAVING,
            made=MetricSource("save.durable", "blocked_s")),
    Metric("relight_save_snapshot_seconds", HISTOGRAM, "Seconds to copy a rank's values, usually after the call has returned.", SAVING,
            made=MetricSource("save.sealed", "seconds")),
    Metric("relight_save_durable_seconds", HISTOGRAM, "From the call until the checkpoint was durable.", SAVING,
            made=MetricSource("save.durable", "seconds", once=("id",))),
    Metric("relight_save_phase_seconds", HISTOGRAM, "Seconds of each stage of a rank's save.", SAVING,
            ("phase",), MetricSource("save.span", "end", "start"), (("phase", "span"),)),
    Metric("relight_restores_total", COUNTER, "Restores, by where the bytes came from.", RESTORING, ("source",),
           MetricSource("restore.done")),
    Metric("relight_restore_seconds", HISTOGRAM, "Seconds of a restore.", RESTORING, ("source",), MetricSource("restore.done", "seconds")),
    Metric("relight_restored_bytes_total", COUNTER, "Bytes that restores read.", RESTORING, ("source",),
           MetricSource("restore.done", "bytes")),
    Metric("relight_peers_bytes_total", COUNTER, "Bytes that were sent to peers, or read from them, by plane.", RESTORING,
           ("action", "plane"), MetricSource("peers.moved", "bytes")),
    Metric("relight_restores_skipped_total", COUNTER, "Damaged checkpoints that a restore skipped.", RESTORING,
            ("kind",), MetricSource("restore.skipped")),
    Metric("relight_follower_switches_total", COUNTER, "Switches of followers to another checkpoint, by where the bytes came from.",
           FOLLOWING, ("source",), MetricSource("follow.switched")),
    Metric("relight_follower_read_bytes_total", COUNTER, "Bytes that followers read.", FOLLOWING, ("source",),
           MetricSource("follow.switched", "bytes")),
    Metric("relight_follower_lag_seconds", HISTOGRAM, "Seconds from a checkpoint's commit until a follower had it.", FOLLOWING,
           made=MetricSource("follow.switched", "lag_s")),
    Metric("relight_follower_switch_seconds", HISTOGRAM, "Seconds in which a follower's tensors were changed.", FOLLOWING,
           made=MetricSource("follow.switched", "seconds")),
    Metric("relight_followers_skipped_total", COUNTER, "Checkpoints that a follower could not read.", FOLLOWING, ("kind",),
           MetricSource("follow.skipped")),
    Metric("relight_damaged_files_total", COUNTER, "Damaged files that no tier has whole.", RESTORING,
            made=MetricSource("scrub.damaged", once=("file",))),
    Metric("relight_drains_total", COUNTER, "Checkpoints copied to a further tier.", TIERS,
            ("tier",), MetricSource("drain.done", once=("tier", "id"))),
    Metric("relight_drained_bytes_total", COUNTER, "Bytes copied to a further tier.", TIERS,
            ("tier",), MetricSource("drain.done", "bytes", once=("tier", "id"))),
    Metric("relight_drain_seconds", HISTOGRAM, "Seconds to copy one checkpoint to a further tier.", TIERS,
            ("tier",), MetricSource("drain.done", "seconds", once=("tier", "id"))),
    Metric("relight_drains_failed_total", COUNTER, "Failed copies to a further tier, as reported by each rank.", TIERS,
            ("tier",), MetricSource("drain.failed")),
    Metric("relight_prunes_total", COUNTER, "Times that retention removed something.", CHECKPOINTS, made=MetricSource("prune.done")),
    Metric("relight_prunes_failed_total", COUNTER, "Times that retention failed.", CHECKPOINTS, ("kind",), MetricSource("prune.failed")),
    Metric("relight_recovery_seconds", HISTOGRAM, "Seconds from a failure to the first step after it.", JOB,
            made=MetricSource("run.recovered", "seconds", once=("incident",))),
    Metric("relight_steps_lost_total", COUNTER, "Steps that were repeated after failures.", JOB,
            made=MetricSource("run.recovered", "steps_lost", once=("incident",))),
    Metric("relight_alarms_total", COUNTER, "Alarms of failures to come, by class.", JOB,
            ("class",), MetricSource("prediction.alarm"), (("class", "kind"),)),
    Metric("relight_alarms_settled_total", COUNTER, "Alarms by outcome: true, false; and failures without an alarm: missed.", JOB,
            ("detector", "outcome"), MetricSource("prediction.scored")),
    Metric("relight_events_total", COUNTER, "Events, by level.", EVENTS_ROW, ("level",)),
    Metric("relight_events_lost_total", COUNTER, "Events that came faster than they could be written.", EVENTS_ROW,
            made=MetricSource("events.lost", "count")),
)  # fmt: skip
"""All metrics. A test fails for a metric without a dashboard row, and for a panel or rule of an unknown metric."""

SAME_ON_ALL_NODES = frozenset(
    f"relight_{name}_total"
    for name in (
        "job_seconds",
        "failures",
        "steps",
        "steps_lost",
        "saves",
        "saves_put_off",
        "saves_held",
        "saved_bytes",
        "drains",
    )
)
"""Counters that each node of a job reports with the same value: over nodes, they are aggregated with ``max``, all others with ``sum``."""
BY_NAME = {metric.name: metric for metric in METRICS}
OF_EVENT: dict[str, list[Metric]] = {}
"""Filled below, once."""
for _metric in METRICS:
    if _metric.made is not None:
        OF_EVENT.setdefault(_metric.made.event, []).append(_metric)
