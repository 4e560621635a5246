"""Every metric: name, kind, labels and words, what it is made of, where it is shown. Exposition, dashboards and pages come from here.

Names begin with ``relight_``, in base units (seconds, bytes, ratios), counters end in ``_total``. All carry ``store`` and ``run``; no label
takes a step, an id or a text, whose values have no end.
"""

from __future__ import annotations

from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
RUN_LABELS = ("store", "run")
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of a histogram's buckets, for all that takes time here."""


@dataclass(frozen=True, slots=True)
class MetricSource:
    """From which event: one each, or the number in ``field``. ``once``: the fields of which an event with the same values counts once,
    however many ranks tell of it."""

    event: str
    field: str = ""
    less: str = ""
    """A field that is taken off: where something began, of when it ended."""
    once: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One. ``made``: from an event, else by looking at the run's log. ``labels`` besides store and run; those of an event's are its
    fields, by these names or ``fields``."""

    name: str
    kind: str
    help: str
    panel: str
    """The row of the dashboard in which it is shown."""
    labels: tuple[str, ...] = ()
    made: MetricSource | None = None
    fields: tuple[tuple[str, str], ...] = ()
    """Labels that are called otherwise than the event's field: ``(label, field)``."""

    @property
    def unit(self) -> str:
        """``seconds``, ``bytes``, ``ratio``, or nothing for a number of things."""
        return next((unit for unit in ("seconds", "bytes", "ratio") if unit in self.name.removesuffix("_total").split("_")), "")

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Those of the run first."""
        return (*RUN_LABELS, *self.labels)

    def field_of(self, label: str) -> str:
        """The event's field that a label takes its value from."""
        return dict(self.fields).get(label, label)


CHECKPOINTS, SAVING, RESTORING, TIERS, JOB, EVENTS_ROW = "Checkpoints", "Saving", "Restoring", "Tiers", "Job", "Events"
ROWS = (CHECKPOINTS, SAVING, RESTORING, TIERS, JOB, EVENTS_ROW)

METRICS: tuple[Metric, ...] = (
    # by looking at the log
    Metric("relight_store_up", GAUGE, "1: the run's log could be read; 0: it could not.", CHECKPOINTS),
    Metric("relight_checkpoints", GAUGE, "Checkpoints that are there.", CHECKPOINTS),
    Metric("relight_checkpoint_step", GAUGE, "Step of the newest checkpoint.", CHECKPOINTS),
    Metric("relight_checkpoint_age_seconds", GAUGE, "Since the newest checkpoint was committed.", CHECKPOINTS),
    Metric("relight_checkpoint_good_age_seconds", GAUGE, "Since the newest good checkpoint; without one, since the attempt began.",
            CHECKPOINTS),
    Metric("relight_checkpoints_damaged", GAUGE, "Checkpoints that are there, and suspect or known to be damaged.", CHECKPOINTS),
    Metric("relight_run_active", GAUGE, "1: the run goes on, as far as can be told; 0: it has ended, or is silent for a day.",
            CHECKPOINTS),
    Metric("relight_retention_failed", GAUGE, "Times in a row that old checkpoints could not be removed.", CHECKPOINTS),
    Metric("relight_save_last_seconds", GAUGE, "From the call until durable, of the latest save.", SAVING),
    Metric("relight_saves_failed_in_a_row", GAUGE, "Saves that failed since one became a checkpoint.", SAVING),
    Metric("relight_checkpoint_logical_bytes", GAUGE, "What the newest checkpoint holds.", CHECKPOINTS),
    Metric("relight_checkpoint_stored_bytes", GAUGE, "What it takes where it stands by itself.", CHECKPOINTS),
    Metric("relight_checkpoint_new_bytes", GAUGE, "What it has added to the store.", CHECKPOINTS),
    Metric("relight_checkpoint_saved_ratio", GAUGE, "What it holds, by what it has added.", CHECKPOINTS),
    Metric("relight_attempts", GAUGE, "How often a process took charge of the run.", JOB),
    Metric("relight_tier_checkpoints", GAUGE, "Checkpoints in a tier, as the nearest log knows.", TIERS, ("tier",)),
    Metric("relight_tier_lag_checkpoints", GAUGE, "Checkpoints newer than the newest in that tier.", TIERS, ("tier",)),
    Metric("relight_tier_lag_seconds", GAUGE, "Age of the oldest checkpoint newer than the newest in that tier.", TIERS, ("tier",)),
    Metric("relight_tier_used_bytes", GAUGE, "What the run's checkpoints in a tier have added to it.", TIERS, ("tier",)),
    Metric("relight_tier_capacity_bytes", GAUGE, "What the run may take there: its limit, or all that the disk has for it.",
            TIERS, ("tier",)),
    Metric("relight_tier_full_ratio", GAUGE, "What is used of that.", TIERS, ("tier",)),
    Metric("relight_goodput_ratio", GAUGE, "Share of the jobs' time in steps that nobody had done before.", JOB),
    Metric("relight_job_seconds_total", COUNTER, "Where the jobs' time went.", JOB, ("part",)),
    Metric("relight_failures_total", COUNTER, "Failures of the job, by class.", JOB, ("class",)),
    Metric("relight_recent_failures", GAUGE, "Failures of the job within the last hour.", JOB),
    Metric("relight_recoveries", GAUGE, "The latest failures by outcome: recovered, failed again, stopped, left.", JOB, ("outcome",)),
    Metric("relight_recovery_success_ratio", GAUGE, "Share of the latest failures after which training went on.", JOB),
    Metric("relight_job_given_up", GAUGE, "1: relight run has given the job up, and no attempt has begun since; 0 otherwise.", JOB),
    Metric("relight_nodes_excluded", GAUGE, "Nodes that left the job within the last day.", JOB),
    Metric("relight_recent_roll_backs", GAUGE, "Times within the last day that the run went back to before a step.", JOB),
    Metric("relight_recent_hardware_failures", GAUGE, "Hardware failures of the job within the last day.", JOB),
    Metric("relight_last_decision", GAUGE, "1 for the action that was decided after the latest failure, 0 for each other action.",
            JOB, ("action",)),
    Metric("relight_last_decision_time_seconds", GAUGE, "When that was decided, in seconds since 1970.", JOB),
    Metric("relight_steps_total", COUNTER, "Steps that ended for the first time.", JOB),
    Metric("relight_risk_ratio", GAUGE, "Score of the latest alarm of a failure to come, 0 once it is a quarter of an hour old.", JOB),
    # from events
    Metric("relight_saves_total", COUNTER, "Saves that became checkpoints.", SAVING, made=MetricSource("save.durable", once=("id",))),
    Metric("relight_saves_failed_total", COUNTER, "Saves that did not, as each rank tells.", SAVING, ("kind",),
           MetricSource("save.failed")),
    Metric("relight_saves_put_off_total", COUNTER, "Saves that were made later, as those before were still written.", SAVING,
            made=MetricSource("save.coalesced", once=("step",))),
    Metric("relight_saves_held_total", COUNTER, "Saves that waited in memory for room.", SAVING,
           made=MetricSource("save.backpressured", once=("id",))),
    Metric("relight_saved_bytes_total", COUNTER, "Bytes of checkpoints that became durable.", SAVING,
            made=MetricSource("save.durable", "bytes", once=("id",))),
    Metric("relight_save_blocked_seconds", HISTOGRAM, "What a save kept the training of a rank waiting.", SAVING,
            made=MetricSource("save.durable", "blocked_s")),
    Metric("relight_save_snapshot_seconds", HISTOGRAM, "What copying a rank's values took, behind the call as a rule.", SAVING,
            made=MetricSource("save.sealed", "seconds")),
    Metric("relight_save_durable_seconds", HISTOGRAM, "From the call until the checkpoint was durable.", SAVING,
            made=MetricSource("save.durable", "seconds", once=("id",))),
    Metric("relight_save_phase_seconds", HISTOGRAM, "Each part of a rank's way to a checkpoint.", SAVING,
            ("phase",), MetricSource("save.span", "end", "start"), (("phase", "span"),)),
    Metric("relight_restores_total", COUNTER, "Restores, by where the bytes came from.", RESTORING, ("source",),
           MetricSource("restore.done")),
    Metric("relight_restore_seconds", HISTOGRAM, "What a restore took.", RESTORING, ("source",), MetricSource("restore.done", "seconds")),
    Metric("relight_restored_bytes_total", COUNTER, "Bytes that restores read.", RESTORING, ("source",),
           MetricSource("restore.done", "bytes")),
    Metric("relight_restores_skipped_total", COUNTER, "Checkpoints that a restore passed over.", RESTORING,
            ("kind",), MetricSource("restore.skipped")),
    Metric("relight_damaged_files_total", COUNTER, "Damaged files that no tier has whole.", RESTORING,
            made=MetricSource("scrub.damaged", once=("file",))),
    Metric("relight_drains_total", COUNTER, "Checkpoints copied to a further tier.", TIERS,
            ("tier",), MetricSource("drain.done", once=("tier", "id"))),
    Metric("relight_drained_bytes_total", COUNTER, "Bytes copied there.", TIERS,
            ("tier",), MetricSource("drain.done", "bytes", once=("tier", "id"))),
    Metric("relight_drain_seconds", HISTOGRAM, "What copying one took.", TIERS,
            ("tier",), MetricSource("drain.done", "seconds", once=("tier", "id"))),
    Metric("relight_drains_failed_total", COUNTER, "Tries to copy that failed, as each rank tells.", TIERS,
            ("tier",), MetricSource("drain.failed")),
    Metric("relight_prunes_total", COUNTER, "Times that retention removed something.", CHECKPOINTS, made=MetricSource("prune.done")),
    Metric("relight_prunes_failed_total", COUNTER, "Times that it could not.", CHECKPOINTS, ("kind",), MetricSource("prune.failed")),
    Metric("relight_recovery_seconds", HISTOGRAM, "From a failure to the first step behind it.", JOB,
            made=MetricSource("run.recovered", "seconds", once=("incident",))),
    Metric("relight_steps_lost_total", COUNTER, "Steps that had to be done again after failures.", JOB,
            made=MetricSource("run.recovered", "steps_lost", once=("incident",))),
    Metric("relight_alarms_total", COUNTER, "Alarms of failures to come, by class.", JOB,
            ("class",), MetricSource("prediction.alarm"), (("class", "kind"),)),
    Metric("relight_alarms_settled_total", COUNTER, "Alarms by outcome: true, false; and failures without an alarm: missed.", JOB,
            ("detector", "outcome"), MetricSource("prediction.scored")),
    Metric("relight_events_total", COUNTER, "Events, by level.", EVENTS_ROW, ("level",)),
    Metric("relight_events_lost_total", COUNTER, "Events that came faster than they could be written down.", EVENTS_ROW,
            made=MetricSource("events.lost", "count")),
)  # fmt: skip
"""All of them. A metric in no row of a dashboard, or a panel or rule of one that is not here, fails a test."""

BY_NAME = {metric.name: metric for metric in METRICS}
OF_EVENT: dict[str, list[Metric]] = {}
for _metric in METRICS:
    if _metric.made is not None:
        OF_EVENT.setdefault(_metric.made.event, []).append(_metric)
