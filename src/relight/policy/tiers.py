"""Several stores of one run, near to far, and the checkpoints that each must have."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from relight.errors import ConfigError, shown
from relight.policy.argument_checks import checked_arguments, whole_of
from relight.policy.call_text import ShownAsCall
from relight.policy.keep import RULES, Candidate, Keep, decide_keep, lasting
from relight.settings.amounts import seconds_of
from relight.settings.checkpoint_settings import TierSettings
from relight.settings.short_traceback import short_traceback
from relight.units import Duration, Rate, Size

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}\Z")
NOW = "all"
"""Key in a pace NOTE instead of tiers' names: from that record on every save goes to all tiers."""


class HasPath(Protocol):
    """A path, such as ``pathlib``'s."""

    def __fspath__(self) -> str:
        """Return the path as text."""


@dataclass(frozen=True, slots=True, repr=False)
class Tier(ShownAsCall):
    """One tier: ``url`` names store and run (``store/run``), ``keep`` its retention, ``bytes_per_second`` bounds
    copying to it.

    ``also``: further places. Each gets its own copy. ``Tiers`` makes a tier of each: then ``group`` is
    their common name, and ``quorum`` the number of copies that are enough.
    """

    _call: ClassVar[str] = "tier"
    _arguments: ClassVar[dict[str, str]] = {"lag_s": "lag"}

    url: str
    keep: Keep = field(default_factory=Keep)
    bytes_per_second: float | None = None
    name: str = ""
    also: tuple[str, ...] = ()
    group: str = ""
    quorum: int = 1
    lag_s: float | None = None
    """Longest interval between copies under ``relight.adaptive()``, which computes it; else their least interval."""


class TierPace(NamedTuple):
    """The least seconds between two checkpoints that a tier gets."""

    least_s: float = 0.0
    last_s: float | None = None
    """When the tier's newest checkpoint was committed; None: it has none, or the time is unknown."""

    def holds_back(self, checkpoint: Candidate) -> bool:
        """Return whether the checkpoint follows the tier's newest too soon. Only scheduled saves are held back, and
        none if clocks disagree."""
        known = checkpoint.routine and self.last_s is not None and checkpoint.time_s is not None
        return known and 0 <= checkpoint.time_s - self.last_s < self.least_s  # type: ignore[operator]


AT_ONCE = TierPace()


class Group(NamedTuple):
    """Tiers that have copies of the same checkpoints: their names, and how many copies are enough. A single tier is a
    group of one."""

    name: str
    members: tuple[str, ...]
    quorum: int


@dataclass(frozen=True, init=False, slots=True, repr=False)
class Tiers:
    """The stores of one run, from the nearest to the safest.

    ``relight.Tiers(hot="/nvme/ckpts/demo", cold="s3://bucket/ckpts/demo")``: a save is a checkpoint once it is
    committed in the first store. Copies to the other stores are made in the background, and a checkpoint stays in the
    first store until they are complete.

    Args:
        **tiers: The stores by name, near to far: a path or URL with the run, or ``relight.tier(url, …)``, which has
            options and may name several places that each get a copy. These are called ``cold-1``, ``cold-2`` and so on.
            Names are free, and their order counts.
    """

    tiers: tuple[Tier, ...]

    @short_traceback
    def __init__(self, **tiers: str | HasPath | Tier) -> None:
        if not tiers:
            raise ConfigError(
                "Tiers() names no store", hint='relight.Tiers(hot="/nvme/ckpts/demo", cold="s3://bucket/ckpts/demo")'
            )
        made: list[Tier] = []
        for name, given in tiers.items():
            if not _NAME.match(name):
                raise ConfigError(
                    f"{name[:40]!r} cannot be a tier's name", hint="a lower-case letter, then letters, digits, _ or -"
                )
            base = given if isinstance(given, Tier) else tier(given)
            places = (base.url, *base.also)
            for number, url in enumerate(places, start=1):
                own = f"{name}-{number}" if len(places) > 1 else name
                made.append(replace(base, url=url, name=own, also=(), group=name))
        urls = [base.url.rstrip("/") for base in made]
        if len(set(urls)) < len(urls):
            raise ConfigError("two tiers are the same place", where=next(url for url in urls if urls.count(url) > 1))
        names = [base.name for base in made]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"two tiers are called {next(name for name in names if names.count(name) > 1)}",
                hint="choose another name",
            )
        object.__setattr__(self, "tiers", tuple(made))

    def __repr__(self) -> str:
        return f"Tiers({', '.join(f'{tier.name}={tier.url!r}' for tier in self.tiers)})"

    @property
    def nearest(self) -> Tier:
        """The tier where saves commit."""
        return self.tiers[0]

    @property
    def further(self) -> tuple[Tier, ...]:
        """The tiers to which checkpoints are copied, in that order."""
        return self.tiers[1:]


@short_traceback
def tier(
    url: str | HasPath,
    *also: str | HasPath,
    keep: Keep | None = None,
    bytes_per_second: Rate | None = None,
    quorum: int | None = None,
    capacity: Size | None = None,
    lag: Duration | None = None,
) -> Tier:
    """Return one store for ``relight.Tiers``, with its options.

    Args:
        url: The store and the run.
        *also: More URLs, such as other disks, buckets or regions. Each place gets a copy.
        keep: Its retention: ``relight.keep(…)``. Checkpoints that the rules keep for good (``every``, ``best``), and
            those with a tag or on hold, are always copied. Of the others the newest is copied, and older ones as far as
            there is time. Tags and holds of the nearest tier also count here. None: every copied checkpoint stays.
        bytes_per_second: Limit for copies to it: ``"200MB/s"``, or bytes a second. None: no limit.
        quorum: The number of copies after which a checkpoint counts as drained, and may be removed from nearer tiers.
            None: all.
        capacity: The size above which checkpoints are removed despite the rules: ``"2TB"``, or bytes. First go the
            oldest that are also on a further tier, then the oldest that no further tier will get, because copies are
            slower than saves. Checkpoints named by ``every``, ``best`` or a tag stay until they are copied. None: no
            limit.
        lag: How much older than the run its newest copy may be: ``"10m"``, a ``timedelta``, or seconds. Under
            ``relight.adaptive()``, the longest interval of copies, which it computes from their cost to the steps. With
            other triggers, one scheduled save in this time is copied; requested saves, and those that stay for good,
            are copied in any case. 0 copies every save. None: no limit, and every save with other triggers.
    """
    texts = [_path_of(place) for place in (url, *also)]
    if keep is not None and not isinstance(keep, Keep):
        raise ConfigError(f"keep= takes relight.keep(…), not {shown(keep)}")
    limits = checked_arguments(TierSettings, {"bytes_per_second": bytes_per_second, "capacity": capacity}, "{}=")
    if quorum is not None:
        quorum = whole_of(quorum, "quorum=", most=len(texts))
    rules = keep or Keep()
    if capacity is not None:
        rules = replace(rules, capacity=limits["capacity"])
    lag_s = None if lag is None else 0.0 if lag == 0 and not isinstance(lag, bool) else seconds_of(lag, "lag")
    return Tier(
        texts[0], rules, limits["bytes_per_second"], also=tuple(texts[1:]), quorum=quorum or len(texts), lag_s=lag_s
    )


def _path_of(value: Any) -> str:
    """Return a tier's path or URL as text. Raise ``ConfigError`` if it is empty or another type."""
    text = value if isinstance(value, str) else value.__fspath__() if hasattr(value, "__fspath__") else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"a tier is the path or URL of a run, not {shown(value)}", hint='relight.tier("s3://bucket/ckpts/demo")'
        )
    return text


def groups_of(tiers: Sequence[Tier]) -> list[Group]:
    """Return the groups of a run's further tiers. ``tiers`` are nearest first. The nearest has every checkpoint, so its
    own group needs one copy fewer."""
    groups: dict[str, list[Tier]] = {}
    for further in tiers[1:]:
        groups.setdefault(further.group or further.name, []).append(further)
    near = tiers[0].group or tiers[0].name if tiers else ""
    return [
        Group(name, tuple(member.name for member in members), min(members[0].quorum - (name == near), len(members)))
        for name, members in groups.items()
    ]


def encode_tiers(tiers: Sequence[Tier]) -> dict[str, str]:
    """Return the data of a NOTE that records the tiers."""
    return {"tiers": json.dumps([asdict(each) for each in tiers], sort_keys=True)}


def decode_tiers(data: dict[str, Any]) -> tuple[Tier, ...]:
    """Return the tiers that a NOTE records; none if its data are invalid, as a newer version of Relight may have
    written them."""
    decoded = []
    try:
        for fields in json.loads(str(data.get("tiers", "[]"))):
            known = {
                name: fields["keep"][name]
                for name in (*RULES, "metric", "mode", "undo_s", "prune_abandoned", "capacity")
                if name in fields["keep"]
            }
            name, group, quorum = str(fields["name"]), str(fields.get("group", "")), int(fields.get("quorum", 1))
            lag_s = fields.get("lag_s")
            url, pace = str(fields["url"]), fields.get("bytes_per_second")
            decoded.append(
                Tier(
                    url,
                    Keep(**known),
                    pace,
                    name,
                    group=group,
                    quorum=quorum,
                    lag_s=None if lag_s is None else float(lag_s),
                )
            )
    except (ValueError, TypeError, KeyError):
        return ()
    return tuple(decoded)


def owed(
    rules: Keep, checkpoints: Sequence[Candidate], after: int, pace: TierPace = AT_ONCE, had: Sequence[Candidate] = ()
) -> list[str]:
    """Return the ids of checkpoints that a further tier with these rules still lacks, in the order in which to copy
    them: oldest first.

    These are the newest one, and those that the rules keep for good. ``after`` is the ``seq`` of the newest checkpoint
    that the tier has or had: no older one is copied after it, because a run resumes from the last one. ``pace`` may
    hold back the newest, but none that is kept for good. ``had``: checkpoints that the tier has or had and that are not
    live here. Without them each save after a pruned milestone would look like the first one.
    """
    later = sorted(
        (each for each in checkpoints if each.seq > after and each.verified is not False), key=lambda each: each.seq
    )
    newest = later[-1] if later and not pace.holds_back(later[-1]) else None
    named = lasting(rules, checkpoints, had) if later else set()
    return [checkpoint.id for checkpoint in later if checkpoint is newest or checkpoint.id in named]


def short_of(group: Group, lacks: Mapping[str, Collection[str]]) -> set[str]:
    """Return the ids of the checkpoints that too few tiers of a group have. ``lacks``: by member, what it lacks."""
    counts = Counter(checkpoint_id for name in group.members for checkpoint_id in lacks[name])
    return {checkpoint_id for checkpoint_id, count in counts.items() if len(group.members) - count < group.quorum}


def safe_on(
    tier: Tier, checkpoints: Sequence[Candidate], copied: Collection[str], had: Sequence[Candidate] = ()
) -> set[str]:
    """Return the ids of copied checkpoints that the tier's own rules still keep there. ``had``: see ``owed``."""
    present = [replace(each, verified=True, held="", elsewhere="") for each in checkpoints if each.id in copied]
    # Older than all others, and without bytes, so that they do not change another rule's choice.
    gone = [
        Candidate(f"\0{each.id}", -1 - number, each.step, verified=True, time_s=0.0) for number, each in enumerate(had)
    ]
    kept = {verdict.id for verdict in decide_keep(replace(tier.keep, capacity=None), [*present, *gone]) if verdict.keep}
    return {checkpoint.id for checkpoint in present if checkpoint.id in kept}
