"""Recommended settings, computed from measurements, each with its reason and the numbers. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from relight.bench.figures import useful
from relight.units import duration_text, percent_text, rate_text, size_text

LOST_MAX = 0.01
"""Fraction of training time that saves may cost."""
_SPARE = 256_000_000
"""Bytes of memory that slots leave free."""
_SLOT_SPARE = 8 << 20
_MINUTES = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 1440)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFacts:
    """Measurements that decide the settings. Seconds are medians, for a state of ``state_bytes``. None: not measured.

    ``available_bytes``: free memory before the bench took any. ``asked``: whether the user gave the size of the state. ``accelerator``:
    whether training runs on a device instead of this machine's cores. ``pace``: bytes per second of hashing and writing, by threads.
    """

    store: str
    state_bytes: int
    asked: bool
    available_bytes: int | None
    direct: bool
    write_buffered_s: float
    write_direct_s: float | None = None
    pace: Mapping[int, float]
    accelerator: bool = False
    waiting_s: float | None = None
    blocked_s: float | None = None
    durable_s: float | None = None
    lost_s: float | None = None


class RecommendedSetting(NamedTuple):
    """A recommended setting and the reason. ``value`` is "" if nothing has to be set."""

    name: str
    value: str
    reason: str


class Advice(NamedTuple):
    """All recommended settings, and the line of Python that sets them."""

    settings: tuple[RecommendedSetting, ...]
    line: str


def advise(facts: BenchFacts) -> Advice:
    """Return the recommended settings."""
    memory, slots = _memory(facts)
    background, cost_s = _background(facts, slots)
    threads = _threads(facts)
    when = _interval(facts, background.value == "True", cost_s)
    settings = tuple(setting for setting in (background, threads, _direct(facts), memory, when) if setting is not None)
    waits = background.value == "False"
    # without an agent these limits have no effect
    limits = [] if waits else [setting.value for setting in (memory, threads) if setting.value]
    words = [json.dumps(f"{facts.store.rstrip('/')}/my-run"), "model=model", "optimizer=optimizer"]
    words += [f"save={when.value}"] if when is not None else []
    words += ["background=False"] if waits else [f"limits=relight.Limits({', '.join(limits)})"]
    return Advice(settings, f"relight.Checkpointer({', '.join(words)})")


def slot_bytes(state_bytes: int) -> int:
    """Return about how many bytes of memory a slot takes: the state, its headers, and room for other data of a commit."""
    return -(-(state_bytes + state_bytes // 50 + _SLOT_SPARE) // (1 << 20)) * (1 << 20)


def _memory(facts: BenchFacts) -> tuple[RecommendedSetting, int]:
    """Return the ``memory`` setting and the number of slots that fit. If training runs on the cores, its state uses the same memory."""
    slot = slot_bytes(facts.state_bytes)
    two = f"two slots of a state of {size_text(facts.state_bytes)} take {size_text(2 * slot)} of memory"
    value = f"memory={2 * slot:_}" if facts.asked else ""
    if facts.available_bytes is None:
        return RecommendedSetting("memory", value, f"{two}; the available memory is unknown"), 2
    own_state = 0 if facts.accelerator else facts.state_bytes
    left = facts.available_bytes - own_state - _SPARE
    available = f"{size_text(facts.available_bytes)} are available"
    available += f", {size_text(own_state)} of them for the state itself" if own_state else ""
    if left >= 2 * slot:
        most = left // 2 if facts.accelerator else (facts.available_bytes - _SPARE) // 3
        more = "" if facts.asked else f": enough for a state of up to {size_text(most)}; --size gives a bound for yours"
        return RecommendedSetting("memory", value, f"{two}; {available}{more}"), 2
    if left >= slot:
        reason = f"{two}; {available}: room for one, so a save is postponed while the save before it is being written"
        return RecommendedSetting("memory", f"memory={slot:_}", reason), 1
    return RecommendedSetting(
        "memory", "memory=0", f"one slot takes {size_text(slot)} of memory; {available}: no room for a snapshot"
    ), 0


def _background(facts: BenchFacts, slots: int) -> tuple[RecommendedSetting, float | None]:
    """Return the ``background`` setting and the seconds that a save then costs training, None if not measured."""
    name, waits = "background", facts.waiting_s
    if slots == 0:
        return RecommendedSetting(
            name, "False", "there is no memory for snapshots, so the trainer writes saves itself and waits"
        ), waits
    if waits is None or facts.blocked_s is None:
        return RecommendedSetting(name, "True", "not measured: the default"), waits
    if facts.accelerator:
        cost_s, reason = (
            facts.blocked_s,
            f"step() returns after {duration_text(facts.blocked_s)}, and the device trains on",
        )
    elif facts.lost_s is None:
        cost_s, reason = facts.blocked_s, f"step() returns after {duration_text(facts.blocked_s)}"
    else:
        cost_s = max(facts.lost_s, facts.blocked_s)
        reason = f"step() returns after {duration_text(facts.blocked_s)}, and training on all cores loses {duration_text(cost_s)} in all"
    against = f"a save that waits takes {duration_text(waits)}"
    if cost_s <= waits:
        return RecommendedSetting(name, "True", f"{reason}; {against}, {waits / cost_s:.1f} times that"), cost_s
    return RecommendedSetting(name, "False", f"{reason}; {against} only: the memory for snapshots buys nothing"), waits


def _threads(facts: BenchFacts) -> RecommendedSetting:
    count = useful({threads: 1 / pace for threads, pace in facts.pace.items()})
    measured = ", ".join(f"{threads}: {rate_text(pace)}" for threads, pace in sorted(facts.pace.items()))
    more = "" if count == max(facts.pace) else "; more do not help"
    return RecommendedSetting("threads", f"threads={count}", f"hashing and writing by threads, {measured}{more}")


def _direct(facts: BenchFacts) -> RecommendedSetting:
    size = facts.state_bytes
    through = f"{rate_text(size / facts.write_buffered_s)} through the page cache"
    if not facts.direct or facts.write_direct_s is None:
        return RecommendedSetting(
            "direct I/O",
            "",
            f"does not work on this file system: {through}, which takes memory from what else is cached",
        )
    past = f"{rate_text(size / facts.write_direct_s)} past the page cache"
    return RecommendedSetting("direct I/O", "", f"works on this file system: {past}, {through}; used by itself")


def _interval(facts: BenchFacts, background: bool, cost_s: float | None) -> RecommendedSetting | None:
    if cost_s is None:
        return None
    shortest_s = cost_s / LOST_MAX
    why = f"a save costs training {duration_text(cost_s)}: {duration_text(shortest_s)} between two keep that under {percent_text(LOST_MAX)}"
    if background and facts.durable_s is not None and facts.durable_s > shortest_s:
        shortest_s = facts.durable_s
        why += f", but it is durable only after {duration_text(shortest_s)}"
    minutes = next((choice for choice in _MINUTES if choice * 60 >= shortest_s), _MINUTES[-1])
    return RecommendedSetting(
        "save",
        f"relight.every(minutes={minutes})",
        f"{why}; every {duration_text(60 * minutes)} that is {percent_text(cost_s / minutes / 60)}",
    )
