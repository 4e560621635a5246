"""Collect facts about a run: log, metadata and sizes of its newest checkpoints, further tiers, incidents."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from relight.catalog.find import metric_value
from relight.catalog.tiers import drained_to, newest_seq, pace_of, read_tier, retired_among, tiers_of
from relight.catalog.tiers import open_tier as opened_tier
from relight.doctor.bounded import BoundedProbe
from relight.doctor.facts import (
    AttemptFacts,
    CheckpointFacts,
    IncidentFacts,
    MeasuredRestore,
    RunFacts,
    TierFacts,
    Trouble,
)
from relight.errors import RelightError
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.log.known_damage import was_removed
from relight.log.truncated import whole_log
from relight.policy.tiers import Tier, owed
from relight.reader.opened import open_checkpoint
from relight.reader.verify import VerifyFinding, verify_checkpoint
from relight.reclaim import SweepPlan, plan_sweep
from relight.reclaim.prune import candidates_of
from relight.run_records.holds import holds_of
from relight.run_records.incident_sync import DIRECTORY as INCIDENTS
from relight.run_records.verification import VerificationResult, checked
from relight.store import ByteStore
from relight.store.urls import local_path
from relight.store.wrapper import guard_of
from relight.supervise.incidents import Incident, once_each, recent_incidents

_CHECKED_MAX = 8
"""Number of newest checkpoints for which metadata and sizes are checked."""
_CHECK_S = 20.0
_LONG_S = 30.0
INCIDENTS_S = 7 * 86400.0
"""Age in seconds up to which incidents are read; the newest is read whatever its age."""
_INCIDENTS_MAX = 200
"""Largest number of a run's incidents that are read, the newest."""


class _Enough(Exception):
    """The bound of the measurement was reached."""


def collect_run(store: ByteStore, name: str, path: str, *, quick: bool = False) -> RunFacts:
    """Collect facts about the run ``name``, which commands accept as ``path``.

    Cost: reads its log, the metadata of some checkpoints, and a listing.
    """
    probes = BoundedProbe(_LONG_S)
    seen = probes.at
    view = seen("log", lambda: whole_log(store, name), None)
    if view is None:
        return RunFacts(name=name, path=path, error=_reason(store, name, probes), unseen={})
    history = fold(view)
    known = checked(history)
    damage = _damage(store, view, history, probes, 1 if quick else _CHECKED_MAX)
    newest = history.live[-1] if history.live else None
    opened = None
    if newest is not None and not damage.get(newest.id):
        opened = seen(
            "newest checkpoint",
            lambda: open_checkpoint(store, name, newest, store_id=view.store_id, run_id=view.run_id),
            None,
        )
    sweep = seen("leftovers", lambda: plan_sweep(store, name), SweepPlan(name, [], []))
    times = [time_s for record in view.records if (time_s := seconds_since_epoch(record.time)) is not None]
    holds = holds_of(history)
    none: list[Incident] = []
    since_s = time.time() - INCIDENTS_S
    incidents = seen("incidents", lambda: once_each(recent_incidents(store, name, since_s, _INCIDENTS_MAX)), none)
    return RunFacts(
        name=name, path=path, records=view.head + 1,
        faults=tuple((fault.file, fault.reason) for fault in view.faults),
        void=tuple(f"record {record.seq}: {why}" for record, why in history.void if "was fenced by" in why),  # not a repeated COMMIT
        attempts=_attempts(history),
        checkpoints=tuple(_stored(checkpoint, history, damage.get(checkpoint.id), known.get(checkpoint.id)) for checkpoint in history.live),
        newest_record_s=times[-1] if times else None,
        back_s=max((before - after for before, after in itertools.pairwise(times)), default=0.0),
        retired=len(history.retired),
        pinned=sum(checkpoint.id in holds or checkpoint.id in history.tags.values() for checkpoint in history.live),
        leftovers=tuple(sweep.directories), held=tuple(sweep.held), temporaries=tuple(sweep.temporaries),
        environment=opened.root.environment if opened is not None else {},
        exact=tuple(opened.root.exact) if opened is not None else (),
        tiers=tuple(seen(f"tier {tier.name}", partial(_tier, store, history, tier), _silent(tier)) for tier in tiers_of(history)),
        incidents=tuple(IncidentFacts(seconds_since_epoch(row.at), row.kind, row.action, row.why) for row in incidents),
        supervised=bool(incidents) or seen("accounts", lambda: any(True for _ in store.list(f"{name}/{INCIDENTS}")), False),
        signed=guard_of(store).trust is not None,
        unseen=probes.unseen,
    )  # fmt: skip


def measure_restore(
    store: ByteStore,
    name: str,
    *,
    bytes_max: int,
    seconds_max: float,
    progress: Callable[[int], None] = lambda count: None,
) -> MeasuredRestore | None:
    """Read and hash the newest checkpoint as a restore does, without a destination. Return None if the run has no checkpoint,
    or if retention removed it meanwhile.

    Stops after ``bytes_max`` bytes or ``seconds_max`` seconds. ``progress`` receives the number of bytes of each read.
    """
    view = Log(store, name).read()
    live = fold(view).live
    if not live:
        return None
    began, done = time.perf_counter(), 0

    def count(length: int) -> None:
        nonlocal done
        done += length
        progress(length)
        if done >= bytes_max or time.perf_counter() - began >= seconds_max:
            raise _Enough

    try:
        findings = verify_checkpoint(store, view, live[-1], progress=count)
    except _Enough:
        whole = done >= live[-1].body.stored_bytes
        return MeasuredRestore(done, time.perf_counter() - began, whole)
    if findings and was_removed(store, name, live[-1].id):
        return None
    return MeasuredRestore(
        done, time.perf_counter() - began, True, tuple(f"{finding.file}: {finding.detail}" for finding in findings)
    )


def _reason(store: ByteStore, name: str, probes: BoundedProbe) -> Trouble:
    """Return why the log could not be read. Reads it again, because the error itself has the place and a hint."""
    if probes.unseen["log"].startswith("no answer"):  # a second read could take as long
        return Trouble("store", probes.unseen["log"], f"{store.url}/{name}")
    try:
        whole_log(store, name)
    except RelightError as error:
        return Trouble.from_error(error, f"{store.url}/{name}")
    return Trouble(
        "store", probes.unseen["log"], f"{store.url}/{name}", "a second read succeeded: run relight doctor again"
    )


def _damage(
    store: ByteStore, view: LogView, history: History, probes: BoundedProbe, at_most: int
) -> dict[str, tuple[str, ...]]:
    """Return the damage of metadata and sizes by checkpoint ID, the newest first.

    Checks ``at_most`` checkpoints, and continues with older ones until a good one is found or ``_CHECK_S`` seconds have passed.
    """
    damage_of: dict[str, tuple[str, ...]] = {}
    ends = time.monotonic() + _CHECK_S
    for checkpoint in reversed(history.live):
        good = any(not damage for damage in damage_of.values())
        if (len(damage_of) >= at_most and good) or time.monotonic() > ends:
            break
        findings = probes.at(f"checkpoint {checkpoint.id}", partial(_quickly_verified, store, view, checkpoint), None)
        if findings is not None and not any(finding.is_unknown for finding in findings):
            damage_of[checkpoint.id] = tuple(f"{finding.file}: {finding.detail}" for finding in findings)
    return damage_of


def _quickly_verified(store: ByteStore, view: LogView, checkpoint: Checkpoint) -> list[VerifyFinding] | None:
    """Return the damage that metadata and sizes show; None if retention removed the checkpoint meanwhile."""
    findings = verify_checkpoint(store, view, checkpoint, data=False)
    return None if findings and was_removed(store, view.run, checkpoint.id) else findings


def _stored(
    checkpoint: Checkpoint, history: History, damage: tuple[str, ...] | None, known: VerificationResult | None
) -> CheckpointFacts:
    whole_s = seconds_since_epoch(known.at) if known is not None and not known.damage else None
    if known is not None and known.damage:  # a full read has found more than metadata and sizes show
        damage = (f"{known.damage} (found by {known.by}, {known.at})", *(damage or ()))
    body = checkpoint.body
    metrics = {name: metric_value(value) for name, value in checkpoint.metrics.items()}
    return CheckpointFacts(
        checkpoint.id, checkpoint.step, seconds_since_epoch(checkpoint.time), body.stored_bytes, checkpoint.new_bytes, body.suspect, damage,
        len(checkpoint.requires), metrics, checkpoint.id in history.rolled_back_ids, whole_s,
    )  # fmt: skip


def _attempts(history: History) -> tuple[AttemptFacts, ...]:
    """Return the attempts, each with the number of its commits, also of retired checkpoints."""
    commits = Counter(checkpoint.epoch for checkpoint in [*history.live, *history.retired.values()])
    return tuple(
        AttemptFacts(fence.epoch, seconds_since_epoch(fence.time), fence.writer.partition(":")[0], commits[fence.epoch])
        for fence in history.fences
    )


def _silent(tier: Tier) -> TierFacts:
    return TierFacts(tier.name, tier.url, Trouble("store", "it does not answer", tier.url))


def _tier(store: ByteStore, history: History, tier: Tier) -> TierFacts:
    far, run = opened_tier(tier, guard_of(store))
    reach = read_tier(tier.name, far, run)
    if reach.error is not None:
        return TierFacts(tier.name, tier.url, Trouble.from_error(reach.error, tier.url))
    copied = drained_to(history).get(tier.name, set())
    pace, had = pace_of(history, tier.name, copied), retired_among(history, copied)
    lacks = set(owed(tier.keep, candidates_of(history), newest_seq(history, copied), pace, had)) - copied
    since = [
        time_s
        for checkpoint in history.live
        if checkpoint.id in lacks and (time_s := seconds_since_epoch(checkpoint.time)) is not None
    ]
    lacks_s = max(0.0, time.time() - min(since)) if since else 0.0
    return TierFacts(tier.name, tier.url, None, len(lacks), lacks_s, _on_one_device(store.url, tier.url))


def _on_one_device(*urls: str) -> bool:
    """Return whether these places are directories on one disk. False if one is not a directory."""
    devices = set()
    for url in urls:
        path = local_path(url) or ""
        while path and not os.path.exists(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        try:
            devices.add(os.stat(path).st_dev)
        except (OSError, ValueError):
            return False
    return len(devices) == 1
