"""Storing less: what may be left out of a save, and whether coding the rest pays. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from relight.errors import ConfigError, shown
from relight.policy.units import check_bool, one_of, whole_of

LEVEL_MAX = 19
"""Of zstd's levels; higher ones use windows that readers refuse."""
CODECS = ("auto", "never", "always")
CODERS = ("cpu", "gpu")
AUDIT_BYTES = 8 << 20
"""Of what is taken to be unchanged, so much is compared in each save all the same."""
EQUAL_MIN = 0.01
"""If less than this share of a save can be as in an earlier one, all of it is stored, in plain files that anything opens."""
LOSSY = "RELIGHT_LOSSY"
"""The setting that stores tensors inexactly, whatever a script says: ``prove --lossy`` uses it."""
LOSSY_BOUNDS = {"bfloat16": 1 / 256, "float16": 1 / 2048, "int8": 1 / 254}
"""How far off a value may be: of its own magnitude (as ``float16``, or by 2^-25), or, as ``int8``, of the largest of its 256."""
BOUNDED = "bounded"
"""What a root calls the way of tensors that ``max_error`` alone names."""
SMALLEST_FIRST = ("int8", "bfloat16", "float16")
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "second_moment", "sum_sq")
"""What optimizers call what they divide by the root of."""
WORTH = 0.97
"""What chunks must come to, at most, to be coded."""
LONGER_MAX, RECOVERS = 20.0, 0.9
"""Of what coding was once seen to take beyond what it should, a tenth is forgotten with each save that is not coded: then it is tried
again. And a save that is coded shows a store to be faster by a tenth at most, as one that takes what it is given into memory looks fast."""
DRAG = 1.1
"""What coding and storing together take, over the longer of the two, until it is seen, but no more than one after the other: the first save
that is coded is no gamble."""
SLACK = 0.9
"""Coding must make a save at least so much shorter: what is measured is not exact."""


@dataclass(frozen=True, slots=True)
class Compact:
    """How a run's saves are to be made smaller. Every one of them restores to the same bits as without.

    ``reuse``: a chunk that an earlier save has is not stored again, and that save is kept as long as it is needed. ``codecs``: what is
    stored is coded: ``"auto"`` where that takes no longer than storing it as it is would, ``"always"``, or ``"never"``. ``full_every``:
    each so many saves one stores everything itself, so that no checkpoint is kept for longer than that for another's sake. Of a chunk
    that changed a little, the others store the differences from the save before, however fast the store is; ``codecs="never"`` stores
    the whole chunk. None: how long is left to retention, and there are no differences. ``coder``: who codes:
    ``"cpu"``, or ``"gpu"``, nvCOMP on the device, where both are there; what it codes is read anywhere.
    ``level``: zstd's level from 1 to 19 for the planes in which it finds repetitions: a higher one takes more time and stores less.
    None: the fastest that gains anything.
    ``trust_versions``: parameters that need no gradient, and that no optimizer has, are neither copied nor hashed while their version
    counters, addresses and samples of their bytes stay the same; some of them are compared in each save all the same. What writes to them
    through ``.data``, or by kernels that PyTorch knows nothing of, need not leave such traces: leave it off then. Where ranks share one
    checkpoint, all are copied and hashed.
    ``lossy``: float32 tensors whose names fit a pattern (``"optimizer/*"``) are stored as ``"bfloat16"``, ``"float16"`` or ``"int8"``, with
    no value further off than that allows (``LOSSY_BOUNDS``); the first pattern that fits counts. Then a restore is not exact.
    ``max_error``: the largest error of any value of float32 tensors whose names fit a pattern: ``{"model/*": 1e-4}``, or
    ``{"model/*": "0.1%"}`` of the tensor's largest magnitude. Each piece of a tensor is stored in the smallest of these ways (or in the
    one that ``lossy`` names) in which no value is further off, as decoded from what is written; in none, it is stored exactly.

    Signals', exceptions' and other urgent saves are stored as they are.
    """

    reuse: bool = True
    codecs: str = "auto"
    full_every: int | None = None
    trust_versions: bool = False
    lossy: Mapping[str, str] = field(default_factory=dict)
    coder: str = "cpu"
    level: int | None = None
    max_error: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.lossy, Mapping):
            raise ConfigError("Compact(lossy=…) has a way for each pattern", hint='such as {"optimizer/*": "bfloat16"}')
        for pattern, way in dict(self.lossy).items():
            if not isinstance(pattern, str):
                hint = '{"optimizer/*": "bfloat16"}'
                raise ConfigError(f"Compact(lossy=…) names tensors by patterns, not by {shown(pattern)}", hint=hint)
            if not isinstance(way, str) or way not in LOSSY_BOUNDS:
                raise ConfigError(f"Compact(lossy=…) stores values as {', '.join(LOSSY_BOUNDS)}, not {shown(way)}", where=pattern)
            if way == "int8" and any(name in pattern for name in SECOND_MOMENTS):
                hint = "small ones would be zero: bfloat16 keeps them"
                raise ConfigError("second moments are never stored in 8 bits", where=pattern, hint=hint)
        if not isinstance(self.max_error, Mapping) or not all(isinstance(one, str) for one in self.max_error):
            raise ConfigError("Compact(max_error=…) has a bound for each pattern", hint='such as {"optimizer/*": 1e-4, "model/*": "0.1%"}')
        for pattern, bound in dict(self.max_error).items():
            bound_of(bound, pattern)
        check_bool(self.reuse, "Compact(reuse=…)")
        check_bool(self.trust_versions, "Compact(trust_versions=…)")
        one_of(self.codecs, CODECS, "Compact(codecs=…)")
        one_of(self.coder, CODERS, "Compact(coder=…)")
        if self.level is not None:
            object.__setattr__(self, "level", whole_of(self.level, "Compact(level=…)", most=LEVEL_MAX))
            if self.coder == "gpu" or self.codecs == "never":
                clash = 'coder="gpu"' if self.coder == "gpu" else 'codecs="never"'
                raise ConfigError(f"Compact(level=…) does not go with {clash}", hint="a level is of the coding by processors")
        if self.full_every is not None:
            object.__setattr__(self, "full_every", whole_of(self.full_every, "Compact(full_every=…)"))

    @property
    def inexact(self) -> bool:
        """Whether some tensors may be stored inexactly."""
        return bool(self.lossy or self.max_error)


class ErrorBound(NamedTuple):
    """The largest error that values may have."""

    most: float
    relative: bool
    """Whether it is a share of the largest magnitude."""


_PERCENT = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,12})?)\s*%\s*\Z")


def bound_of(value: object, where: str) -> ErrorBound:
    """Return the bound that a number, or a text such as ``"0.1%"``, states."""
    percent = _PERCENT.match(value) if isinstance(value, str) else None
    if percent is not None:
        found = ErrorBound(float(percent[1]) / 100, relative=True)
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        found = ErrorBound(float(value) if number else math.nan, relative=False)  # type: ignore[arg-type]
    if not 0 < found.most < (1 if found.relative else math.inf):
        hint = 'a number above 0, or a share of the largest magnitude such as "0.1%"'
        raise ConfigError(f"Compact(max_error=…) is a bound, not {shown(value)}", where=where, hint=hint)
    return found


def with_asked(rules: Compact, asked: Mapping[str, str]) -> Compact:
    """Return ``rules`` with other ways and bounds, which are mixed as ``RELIGHT_LOSSY`` has them: ``bfloat16``, ``1e-4``, ``0.1%``."""
    lossy, bounds = dict[str, str](), dict[str, float | str]()
    for pattern, way in asked.items():
        try:
            bounds[pattern] = way if way.endswith("%") else float(way)
        except ValueError:
            lossy[pattern] = way
    return replace(rules, lossy=lossy or rules.lossy, max_error=bounds or rules.max_error)


def lossy_of(text: str) -> dict[str, str]:
    """``PATTERN=WAY``, parted by spaces."""
    found = {}
    for one in text.split():
        pattern, equals, way = one.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"{one[:80]!r} is not PATTERN=WAY", hint="such as optimizer/*=bfloat16")
        found[pattern] = way
    return found


def lossy_ways(rules: Compact, name: str, dtype: str) -> tuple[str, ...]:
    """Return the ways in which a tensor of that name may be stored, the smallest first; empty: exactly."""
    way = lossy_in(rules.lossy, name, dtype)
    if way is not None:
        return (way,)
    if _named(rules.lossy, name) is not None or bound_for(rules, name, dtype) is None:
        return ()
    return tuple(one for one in SMALLEST_FIRST if one != "int8" or not any(part in name for part in SECOND_MOMENTS))


def bound_for(rules: Compact, name: str, dtype: str) -> ErrorBound | None:
    """Return the bound of the first pattern that fits a tensor; None: none but its way's own."""
    pattern = _named(rules.max_error, name) if dtype == "float32" else None
    return None if pattern is None else bound_of(rules.max_error[pattern], pattern)


def _named(patterns: Iterable[str], name: str) -> str | None:
    return next((one for one in patterns if fnmatchcase(name, one)), None)


def lossy_in(patterns: Mapping[str, str], name: str, dtype: str) -> str | None:
    """How ``patterns`` store a tensor of that name and dtype inexactly; None: exactly."""
    way = next((way for pattern, way in patterns.items() if fnmatchcase(name, pattern)), None) if dtype == "float32" else None
    return None if way == "int8" and any(one in name for one in SECOND_MOMENTS) else way


def is_used(rules: Compact, pattern: str, tensors: Iterable[tuple[str, str]]) -> bool:
    """Whether some tensor, given by name and dtype, is stored inexactly because of ``pattern``."""

    patterns = rules.lossy if pattern in rules.lossy else rules.max_error
    return any(lossy_ways(rules, name, dtype) and _named(patterns, name) == pattern for name, dtype in tensors)


class CodecSample(NamedTuple):
    """What is known of a save's chunks of one dtype and role, such as ``bfloat16 param``; of those that must be written."""

    kind: str
    weight: float
    """Their share of all that must be."""
    coded: float
    """What they come to, coded, as a share of themselves."""
    code_s_per_byte: float
    """Of one thread that has a processor for itself."""


@dataclass(slots=True)
class Experience:
    """What earlier saves of this attempt have shown; None: nothing yet."""

    equal: float | None = None
    """The share of bytes that two saves, one behind the other, had in common."""
    alike: float | None = None
    """The share of bytes of the save that is being made that may be as in an earlier one, by samples of each chunk; None: not sampled."""
    untrained: float | None = None
    """The share of the first save that nothing trains, if there is a checkpoint before it that may have the same."""
    samples: tuple[CodecSample, ...] | None = None
    """What coding the last save comes to, by kind of chunk; empty: there is nothing in it to code."""
    lane_s_per_byte: float | None = None
    """What the store took, of one that writes a file at a time."""
    strain: float = 1.0
    """How many times as long as the samples say coding takes, beside whatever else the processors do."""
    crowd: float = 1.0
    """How many times as long as it had a processor the last save's hashing took: what strain is to be expected, before any was seen."""
    drag: float | None = None
    """How many times as long as coding alone, or storing alone, whatever is longer, a save took that did both; None: none did yet."""
    since_full: int = 0
    """Saves since one that stored everything itself, that one included."""


class Choice(NamedTuple):
    """What is to be done with a save, and why."""

    reuse: bool
    coded: bool
    reason: str
    differences: bool = False
    """Whether a chunk may be coded as differences from the save before."""
    kinds: tuple[str, ...] | None = ()
    """Of which dtype and role what is coded is; None: of any."""


class Conditions(NamedTuple):
    """What saves are made under."""

    threads: int
    lanes: int = 1
    """How many files at once a save that is stored as it is writes; one that is not writes one after the other."""
    bytes_per_second: float | None = None
    """No more than that are to be stored."""

    def store_s_per_byte(self, seen: Experience, lanes: int) -> float:
        """Of what is stored, by one that writes to ``lanes``."""
        pace = 1 / self.bytes_per_second if self.bytes_per_second else 0.0
        return max((seen.lane_s_per_byte or 0.0) / lanes, pace)


def choose(rules: Compact, seen: Experience, under: Conditions) -> Choice:
    """What the next save is to be, given what was seen. Says how it came to that."""
    reuse, why_reuse = _reuse(rules, seen)
    kinds, why_coded = _coded(rules, seen, under, 1 if reuse or rules.inexact else under.lanes)
    coded = kinds is None or bool(kinds)
    differences = rules.codecs != "never" and rules.full_every is not None and 0 < seen.since_full < rules.full_every
    differences = differences and (coded or seen.alike is None or seen.alike >= EQUAL_MIN)
    return Choice(reuse, coded, f"{why_reuse}; {why_coded}", differences, kinds)


def should_take(seen: Experience, under: Conditions, kinds: Collection[str]) -> float:
    """Seconds for each byte that must be written, with those kinds coded: the longer of coding and storing, and what the other adds."""
    held = [one for one in seen.samples or () if one.kind in kinds]
    spent = sum(one.weight * one.code_s_per_byte for one in held) * max(seen.strain, seen.crowd) / under.threads
    stored = _left(held) * under.store_s_per_byte(seen, 1)
    longer = max(stored, spent)
    return min(longer * DRAG, stored + spent) if seen.drag is None else longer * seen.drag


def _left(coded: Iterable[CodecSample]) -> float:
    """What is stored of a byte, with these coded."""
    return 1 - sum(one.weight * (1 - one.coded) for one in coded)


def _reuse(rules: Compact, seen: Experience) -> tuple[bool, str]:
    """Whether chunks are compared with earlier saves, and why."""
    if not rules.reuse:
        return False, "reuse is off"
    if rules.full_every is not None and seen.since_full >= rules.full_every:
        return False, f"every {rules.full_every} saves one stores everything itself"
    if seen.equal is None and (seen.untrained or 0) >= EQUAL_MIN:
        return True, f"nothing trains {seen.untrained:.0%} of it, and there is a checkpoint before"
    if seen.alike is not None and (seen.equal or 0) < EQUAL_MIN:
        return seen.alike >= EQUAL_MIN, f"{seen.alike:.1%} of it may be as in an earlier save"
    if seen.equal is None:
        return False, "nothing to compare with yet"
    if seen.equal < EQUAL_MIN:
        return False, f"{seen.equal:.1%} of the last two saves was equal"
    return True, f"{seen.equal:.0%} of the last two saves was equal"


def _coded(rules: Compact, seen: Experience, under: Conditions, lanes: int) -> tuple[tuple[str, ...] | None, str]:
    """The kinds that are coded, None for any, and why. ``lanes``: those of a save that is not coded."""
    if rules.codecs == "never":
        return (), "codecs are off"
    if seen.samples == ():
        return (), "there is nothing to code"
    worth = [one for one in seen.samples or () if one.coded <= WORTH]
    if seen.samples is not None and not worth:
        return (), f"coded, a sample came to {_left(seen.samples):.0%}"
    if rules.codecs == "always":
        return None, "codecs are on"
    if seen.samples is None or seen.lane_s_per_byte is None:
        return (), "nothing is known of codecs and store yet"
    order = sorted(worth, key=lambda one: -(1 - one.coded) / max(one.code_s_per_byte, 1e-15))
    ways = [tuple(one.kind for one in order[:number]) for number in range(1, len(order) + 1)]
    kinds = min(ways, key=lambda way: should_take(seen, under, way))
    as_it_is, coded = under.store_s_per_byte(seen, lanes), should_take(seen, under, kinds)
    left = _left(one for one in worth if one.kind in kinds)
    said = f"with {' and '.join(kinds)} coded a sample came to {left:.0%}, {_speed(coded)}; as it is the store takes {_speed(as_it_is)}"
    return (kinds, said) if coded <= SLACK * as_it_is else ((), f"coding would take too long: {said}")


def _speed(seconds_per_byte: float) -> str:
    return f"{1e-6 / seconds_per_byte:,.0f} MB/s" if seconds_per_byte > 0 else "more than can be measured"
