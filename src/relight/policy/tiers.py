"""Several stores of one run, near to far: what each is to hold."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from relight.errors import ConfigError, shown
from relight.policy.keep import RULES, Candidate, Keep, decide_keep, lasting
from relight.policy.units import Duration, bytes_of, number_above_0, seconds_of, whole_of

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}\Z")
NOTE_TOPIC = "tiers"
"""Topic of the NOTE by which an attempt tells which tiers there are; whoever reads the log knows them then."""
DRAINED_TOPIC = "drained"
"""Topic of the NOTE that says of a checkpoint that a tier has it."""


PACE_TOPIC = "tiers' pace"
"""Topic of the NOTE that says how often each further tier gets a copy of what a schedule saves."""
COPYING_TOPIC = "copying outwards"
"""Topic of the NOTE that names the checkpoint which is being copied to a further tier: it stays near until the copy is there."""
NOW = "all"
"""In place of tiers' names in it: from here on every save goes to all of them."""


class HasPath(Protocol):
    """A path, such as ``pathlib``'s."""

    def __fspath__(self) -> str:
        """As text."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One of the stores: ``url`` is a run's (``store/run``), ``keep`` what stays there, ``bytes_per_second`` bounds copying to it.

    ``also`` are further places for the same, each with a copy of its own. Once they are spread out, ``group`` is what all of them have in
    common, and ``quorum`` how many of them are enough.
    """

    url: str
    keep: Keep = field(default_factory=Keep)
    bytes_per_second: float | None = None
    name: str = ""
    also: tuple[str, ...] = ()
    group: str = ""
    quorum: int = 1
    lag_s: float | None = None
    """How far it may be behind; None: as ``relight.adaptive()`` finds best."""


class TierPace(NamedTuple):
    """How soon behind the one before a tier gets the next."""

    least_s: float = 0.0
    last_s: float | None = None
    """When the newest that it has was committed; None: it has none, or nobody knows."""

    def holds_back(self, one: Candidate) -> bool:
        """Whether it is too soon for that one. Clocks that disagree hold nothing back; nor is anything that somebody asked for."""
        known = one.routine and self.last_s is not None and one.time_s is not None
        return known and 0 <= one.time_s - self.last_s < self.least_s  # type: ignore[operator]


AT_ONCE = TierPace()


class Group(NamedTuple):
    """Tiers that hold copies of the same: their names, and how many of them are enough. A tier by itself is a group of one."""

    name: str
    members: tuple[str, ...]
    quorum: int


@dataclass(frozen=True, init=False, slots=True)
class Tiers:
    """The stores of one run, from the nearest to the safest: ``relight.Tiers(hot="/nvme/ckpts/demo", cold="s3://bucket/ckpts/demo")``.

    A save is a checkpoint once the first has it; what the others are to hold is copied there behind training's back, and stays in the
    first one until it is there. The names are yours; the order counts. ``relight.tier(url, …)`` says more of one, and names several
    places that are to have a copy each: they are called ``cold-1``, ``cold-2`` …
    """

    tiers: tuple[Tier, ...]

    def __init__(self, **tiers: str | HasPath | Tier) -> None:
        if not tiers:
            raise ConfigError("Tiers() names no store", hint='relight.Tiers(hot="/nvme/ckpts/demo", cold="s3://bucket/ckpts/demo")')
        made: list[Tier] = []
        for name, given in tiers.items():
            if not _NAME.match(name):
                raise ConfigError(f"{name[:40]!r} cannot be a tier's name", hint="a lower-case letter, then letters, digits, _ or -")
            one = given if isinstance(given, Tier) else tier(given)
            places = (one.url, *one.also)
            for number, url in enumerate(places, start=1):
                own = f"{name}-{number}" if len(places) > 1 else name
                made.append(replace(one, url=url, name=own, also=(), group=name))
        urls = [one.url.rstrip("/") for one in made]
        if len(set(urls)) < len(urls):
            raise ConfigError("two tiers are the same place", where=next(url for url in urls if urls.count(url) > 1))
        names = [one.name for one in made]
        if len(set(names)) < len(names):
            raise ConfigError(f"two tiers are called {next(name for name in names if names.count(name) > 1)}", hint="choose another name")
        object.__setattr__(self, "tiers", tuple(made))

    @property
    def nearest(self) -> Tier:
        """Where saves commit."""
        return self.tiers[0]

    @property
    def further(self) -> tuple[Tier, ...]:
        """Where they are copied to, in that order."""
        return self.tiers[1:]


def tier(
    url: str | HasPath,
    *also: str | HasPath,
    keep: Keep | None = None,
    bytes_per_second: float | None = None,
    quorum: int | None = None,
    capacity: str | int | None = None,
    lag: str | float | Duration | None = None,
) -> Tier:
    """One store for ``relight.Tiers``: the run there, what stays there, and how fast it may be copied to.

    Without ``keep`` everything that is copied there stays. What its rules name for good (``every``, ``best``, tags) is always copied;
    otherwise the newest is, and those in between as far as there is time. Above ``capacity`` (``"2TB"``) the oldest go that are safe
    further out, whatever its rules say of them; then the oldest that no further tier will get, because the copies are slower than the
    saves. What ``every``, ``best`` or a tag names waits until it is copied.

    With ``relight.adaptive()`` the interval of copies is worked out from what they cost the steps; ``lag`` (``"10m"``, seconds) is the
    longest that it may be, and 0 copies every save.

    With further urls each of these places, which may be other disks, buckets or regions, gets a copy; ``quorum`` of them, by default all,
    are enough for a checkpoint to count as drained, and to be removed nearer by.
    """
    texts = [_path_of(one) for one in (url, *also)]
    if keep is not None and not isinstance(keep, Keep):
        raise ConfigError(f"keep= takes relight.keep(…), not {shown(keep)}")
    if bytes_per_second is not None:
        bytes_per_second = number_above_0(bytes_per_second, "bytes_per_second=")
    if quorum is not None:
        quorum = whole_of(quorum, "quorum=", most=len(texts))
    rules = keep or Keep()
    if capacity is not None:
        rules = replace(rules, capacity=bytes_of(capacity, "capacity"))
    lag_s = None if lag is None else 0.0 if lag == 0 and not isinstance(lag, bool) else seconds_of(lag, "lag")
    return Tier(texts[0], rules, bytes_per_second, also=tuple(texts[1:]), quorum=quorum or len(texts), lag_s=lag_s)


def _path_of(value: Any) -> str:
    """A tier's place as a text that is not empty."""
    text = value if isinstance(value, str) else value.__fspath__() if hasattr(value, "__fspath__") else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"a tier is the path or URL of a run, not {shown(value)}", hint='relight.tier("s3://bucket/ckpts/demo")')
    return text


def groups_of(tiers: Sequence[Tier]) -> list[Group]:
    """What a run's tiers, nearest first, are to have beside the nearest, which has everything: of its group one fewer is enough."""
    found: dict[str, list[Tier]] = {}
    for one in tiers[1:]:
        found.setdefault(one.group or one.name, []).append(one)
    near = tiers[0].group or tiers[0].name if tiers else ""
    return [
        Group(name, tuple(one.name for one in members), min(members[0].quorum - (name == near), len(members)))
        for name, members in found.items()
    ]


def encode_tiers(tiers: Sequence[Tier]) -> dict[str, str]:
    """The data of a NOTE that names them."""
    return {"tiers": json.dumps([asdict(one) for one in tiers], sort_keys=True)}


def decode_tiers(data: dict[str, Any]) -> tuple[Tier, ...]:
    """What a NOTE says; what makes no sense is left out, as a newer Relight may have written it."""
    found = []
    try:
        for one in json.loads(str(data.get("tiers", "[]"))):
            known = {name: one["keep"][name] for name in (*RULES, "metric", "mode", "undo_s", "capacity") if name in one["keep"]}
            name, group, quorum = str(one["name"]), str(one.get("group", "")), int(one.get("quorum", 1))
            lag_s = one.get("lag_s")
            url, pace = str(one["url"]), one.get("bytes_per_second")
            found.append(Tier(url, Keep(**known), pace, name, group=group, quorum=quorum, lag_s=None if lag_s is None else float(lag_s)))
    except (ValueError, TypeError, KeyError):
        return ()
    return tuple(found)


def owed(rules: Keep, checkpoints: Sequence[Candidate], after: int, pace: TierPace = AT_ONCE, had: Sequence[Candidate] = ()) -> list[str]:
    """Ids of those that a further tier with such rules still lacks, in the order in which they are to be copied: oldest first.

    The newest, and what the rules name for good. ``after`` is the ``seq`` of the newest that the tier has, or had: nothing older is copied
    behind it, since a run resumes from what came last. ``pace`` may hold the newest back, never what is named for good. ``had``: those
    that the tier has or had, and that are not live here. Without them each save after a pruned milestone would look like the first one.
    """
    behind = sorted((one for one in checkpoints if one.seq > after and one.verified is not False), key=lambda one: one.seq)
    newest = behind[-1] if behind and not pace.holds_back(behind[-1]) else None
    named = lasting(rules, checkpoints, had) if behind else set()
    return [one.id for one in behind if one is newest or one.id in named]


def safe_on(tier: Tier, checkpoints: Sequence[Candidate], copied: Collection[str], had: Sequence[Candidate] = ()) -> set[str]:
    """Of those that were copied to a tier: which are there still, as its rules decide of what was copied there. ``had``: see ``owed``."""
    there = [replace(one, verified=True, held="", elsewhere="") for one in checkpoints if one.id in copied]
    # Older than all others, and without bytes: so they change no other rule's choice.
    gone = [Candidate(f"\0{one.id}", -1 - number, one.step, verified=True, time_s=0.0) for number, one in enumerate(had)]
    kept = {verdict.id for verdict in decide_keep(replace(tier.keep, capacity=None), [*there, *gone]) if verdict.keep}
    return {one.id for one in there if one.id in kept}
