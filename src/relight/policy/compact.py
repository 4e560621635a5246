"""Compaction: which chunks a save need not store again, and whether compressing the others pays. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from relight.errors import ConfigError, shown
from relight.format.chunk_codecs import plugin
from relight.policy.argument_checks import checked_arguments
from relight.policy.call_text import ShownAsCall
from relight.settings.checkpoint_settings import CompactSettings
from relight.settings.environment import variable_of
from relight.settings.short_traceback import short_traceback
from relight.units import percent_text, rate_text

_REQUIRED = ("reuse", "codecs", "trust_versions", "coder")
AUDIT_BYTES = 8 << 20
"""Bytes of supposedly unchanged parameters that each save compares anyway."""
EQUAL_MIN = 0.01
"""If a smaller share than this of a save can be equal to an earlier one, all of it is stored, in plain safetensors
files."""
LOSSY = variable_of("environment.lossy")
"""Variable that stores tensors inexactly and overrides the script; ``prove --lossy`` uses it."""
LOSSY_BOUNDS = {"bfloat16": 1 / 256, "float16": 1 / 2048, "int8": 1 / 254}
"""Largest error of a value, as a share of its own magnitude (``float16`` also: 2^-25), or for ``int8`` of the largest
of its 256 values."""
BOUNDED = "bounded"
"""Name in the root for the method of tensors that only ``max_error`` names."""
SMALLEST_FIRST = ("int8", "bfloat16", "float16")
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "second_moment", "sum_sq")
"""Names of optimizers' second moments. Optimizers divide by their square root."""
WORTH = 0.97
"""Highest ratio of coded to raw size at which chunks are coded."""
LONGER_MAX, RECOVERS = 20.0, 0.9
"""``RECOVERS``: each save without coding reduces the measured slowdown of coding by a tenth, so that coding is tried
again. A coded save raises the measured speed of the store by a tenth at most, because a store that buffers in memory
seems fast."""
DRAG = 1.1
"""Assumed time of coding and storing together, relative to the longer of the two, until it is measured. The estimate is
never above the sum of both, so that the first coded save is a small risk."""
SLACK = 0.9
"""Coding must reduce the estimated time of a save to this share: measurements are not exact."""


@dataclass(frozen=True, slots=True, repr=False)
class Compact(ShownAsCall):
    """Settings that make a run's saves smaller. Except with ``lossy`` or ``max_error``, a restore is bit-identical.

    Saves for signals and exceptions, and other urgent saves, are stored raw.

    Args:
        reuse: Do not store a chunk again that an earlier save has. Retention keeps that save as long as it is needed.
        codecs: Compress chunks: ``"auto"`` if that takes no longer than storing them raw, ``"always"``, or ``"never"``.
        full_every: One in this many saves stores everything itself, which bounds how long a checkpoint is kept for
            another one. The saves between store the differences of a chunk that changed a little, however fast the
            store is; with ``codecs="never"`` they store the whole chunk. None: retention decides, and there are no
            differences.
        trust_versions: Neither copy nor hash parameters without gradient that no optimizer has, while their version
            counters, addresses and samples of their bytes are unchanged. Each save compares some of them anyway. Leave
            this off if code writes to them through ``.data`` or with kernels unknown to PyTorch, which may not change
            these marks. If ranks share one checkpoint, all parameters are copied and hashed.
        lossy: Store float32 tensors with matching names (``"optimizer/*"``) as ``"bfloat16"``, ``"float16"`` or
            ``"int8"``, with errors up to ``LOSSY_BOUNDS``. The first matching pattern counts. A restore is then not
            exact.
        coder: What encodes: ``"cpu"``, or ``"gpu"`` for nvCOMP on the device, if both are available. The result can be
            read anywhere.
        level: zstd's level, 1 to 19, for byte planes with repetitions. A higher level takes more time and stores less.
            None: the fastest level that gains anything.
        max_error: The largest error of any value of float32 tensors with matching names: ``{"model/*": 1e-4}``, or
            ``{"model/*": "0.1%"}`` of the tensor's largest magnitude. Each piece of a tensor is stored in the smallest
            of the three formats (or in the one that ``lossy`` names) that decodes to values within the bound. If there
            is none, it is stored exactly.
        plugin_codecs: The codec of another package for tensors with matching names: ``{"model/*": "toy"}``. A chunk
            that does not become smaller by it is stored as usual. Readers need that package, too.
    """

    reuse: bool = True
    codecs: Literal["auto", "never", "always"] = "auto"
    full_every: int | None = None
    trust_versions: bool = False
    lossy: Mapping[str, str] = field(default_factory=dict)
    coder: Literal["cpu", "gpu"] = "cpu"
    level: int | None = None
    max_error: Mapping[str, float | str] = field(default_factory=dict)
    plugin_codecs: Mapping[str, str] = field(default_factory=dict)

    @short_traceback
    def __post_init__(self) -> None:
        if not isinstance(self.lossy, Mapping):
            raise ConfigError(
                "Compact(lossy=…) maps patterns to the type in which matching tensors are stored",
                hint='such as {"optimizer/*": "bfloat16"}',
            )
        for pattern, way in dict(self.lossy).items():
            if not isinstance(pattern, str):
                hint = '{"optimizer/*": "bfloat16"}'
                raise ConfigError(f"Compact(lossy=…) names tensors by patterns, not by {shown(pattern)}", hint=hint)
            if not isinstance(way, str) or way not in LOSSY_BOUNDS:
                raise ConfigError(
                    f"Compact(lossy=…) stores values as {', '.join(LOSSY_BOUNDS)}, not {shown(way)}", where=pattern
                )
            if way == "int8" and any(name in pattern for name in SECOND_MOMENTS):
                hint = "small ones would be zero: bfloat16 keeps them"
                raise ConfigError("second moments are never stored in 8 bits", where=pattern, hint=hint)
        if not isinstance(self.max_error, Mapping) or not all(isinstance(bound, str) for bound in self.max_error):
            raise ConfigError(
                "Compact(max_error=…) has a bound for each pattern",
                hint='such as {"optimizer/*": 1e-4, "model/*": "0.1%"}',
            )
        for pattern, bound in dict(self.max_error).items():
            bound_of(bound, pattern)
        if not isinstance(self.plugin_codecs, Mapping):
            raise ConfigError(
                "Compact(plugin_codecs=…) has a codec for each pattern", hint='such as {"model/*": "toy"}'
            )
        for pattern, name in dict(self.plugin_codecs).items():
            if not isinstance(pattern, str) or not isinstance(name, str):
                raise ConfigError(
                    f"Compact(plugin_codecs=…) maps patterns to names, not {shown(pattern)} to {shown(name)}"
                )
            plugin(name)
        given = {name: getattr(self, name) for name in CompactSettings.__struct_fields__}
        for name, value in checked_arguments(CompactSettings, given, "Compact({}=…)", _REQUIRED).items():
            object.__setattr__(self, name, value)
        if self.level is not None and (self.coder == "gpu" or self.codecs == "never"):
            clash = 'coder="gpu"' if self.coder == "gpu" else 'codecs="never"'
            raise ConfigError(
                f"Compact(level=…) does not go with {clash}", hint="a level is of the coding by processors"
            )

    @property
    def inexact(self) -> bool:
        """Return whether some tensors may be stored inexactly."""
        inexact_plugins = any(not plugin(name).exact for name in self.plugin_codecs.values())
        return bool(self.lossy or self.max_error) or inexact_plugins


class ErrorBound(NamedTuple):
    """The largest allowed error of a value."""

    most: float
    relative: bool
    """Whether ``most`` is a share of the largest magnitude."""


_PERCENT = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,12})?)\s*%\s*\Z")


def bound_of(value: object, where: str) -> ErrorBound:
    """Return the bound that a number, or a text such as ``"0.1%"``, states."""
    percent = _PERCENT.match(value) if isinstance(value, str) else None
    if percent is not None:
        bound = ErrorBound(float(percent[1]) / 100, relative=True)
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        bound = ErrorBound(float(value) if number else math.nan, relative=False)  # type: ignore[arg-type]
    if not 0 < bound.most < (1 if bound.relative else math.inf):
        hint = 'a number above 0, or a share of the largest magnitude such as "0.1%"'
        raise ConfigError(f"Compact(max_error=…) must be a bound, not {shown(value)}", where=where, hint=hint)
    return bound


def with_asked(rules: Compact, asked: Mapping[str, str]) -> Compact:
    """Return ``rules`` with the methods and bounds of ``RELIGHT_LOSSY``, by pattern: ``bfloat16``, ``1e-4``,
    ``0.1%``."""
    lossy, bounds = dict[str, str](), dict[str, float | str]()
    for pattern, way in asked.items():
        try:
            bounds[pattern] = way if way.endswith("%") else float(way)
        except ValueError:
            lossy[pattern] = way
    return replace(rules, lossy=lossy or rules.lossy, max_error=bounds or rules.max_error)


def lossy_of(text: str) -> dict[str, str]:
    """Parse ``PATTERN=WAY`` pairs separated by spaces."""
    ways = {}
    for pair in text.split():
        pattern, equals, way = pair.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"{pair[:80]!r} is not PATTERN=WAY", hint="such as optimizer/*=bfloat16")
        ways[pattern] = way
    return ways


def lossy_ways(rules: Compact, name: str, dtype: str) -> tuple[str, ...]:
    """Return the inexact methods that are allowed for a tensor, smallest result first; empty: store it exactly."""
    way = lossy_in(rules.lossy, name, dtype)
    if way is not None:
        return (way,)
    if _named(rules.lossy, name) is not None or bound_for(rules, name, dtype) is None:
        return ()
    return tuple(
        method for method in SMALLEST_FIRST if method != "int8" or not any(part in name for part in SECOND_MOMENTS)
    )


def bound_for(rules: Compact, name: str, dtype: str) -> ErrorBound | None:
    """Return the bound of the first pattern that matches a tensor; None: only the method's own bound."""
    pattern = _named(rules.max_error, name) if dtype == "float32" else None
    return None if pattern is None else bound_of(rules.max_error[pattern], pattern)


def plugin_for(rules: Compact, name: str) -> str | None:
    """Return the codec of the first pattern of ``plugin_codecs`` that matches a tensor; None if none does."""
    pattern = _named(rules.plugin_codecs, name)
    return None if pattern is None else rules.plugin_codecs[pattern]


def _named(patterns: Iterable[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def lossy_in(patterns: Mapping[str, str], name: str, dtype: str) -> str | None:
    """Return the method of the first pattern that matches a tensor; None: store it exactly."""
    way = (
        next((way for pattern, way in patterns.items() if fnmatchcase(name, pattern)), None)
        if dtype == "float32"
        else None
    )
    return None if way == "int8" and any(moment in name for moment in SECOND_MOMENTS) else way


def is_used(rules: Compact, pattern: str, tensors: Iterable[tuple[str, str]]) -> bool:
    """Return whether ``pattern`` makes a tensor (name and dtype in ``tensors``) stored inexactly."""
    if pattern in rules.plugin_codecs:
        return any(_named(rules.plugin_codecs, name) == pattern for name, _ in tensors)
    patterns = rules.lossy if pattern in rules.lossy else rules.max_error
    return any(lossy_ways(rules, name, dtype) and _named(patterns, name) == pattern for name, dtype in tensors)


def unmatched(rules: Compact, names: Collection[str]) -> list[tuple[str, str]]:
    """Return setting and pattern of each pattern that matches none of a save's tensors, as a misspelt one does."""
    settings = {"lossy": rules.lossy, "max_error": rules.max_error, "plugin_codecs": rules.plugin_codecs}
    return [
        (setting, pattern)
        for setting, patterns in settings.items()
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


class CodecSample(NamedTuple):
    """Measurements of coding a save's chunks of one dtype and role, such as ``bfloat16 param``. Only chunks that must
    be written count."""

    kind: str
    weight: float
    """Their share of all bytes that must be written."""
    coded: float
    """Ratio of their coded size to their raw size."""
    code_s_per_byte: float
    """Seconds to code a byte, for one thread with a processor of its own."""


@dataclass(slots=True)
class Experience:
    """Measurements of earlier saves of this attempt; None: not measured yet."""

    equal: float | None = None
    """Share of bytes that two consecutive saves had in common."""
    alike: float | None = None
    """Share of the current save's bytes that may be equal to an earlier save's, by samples of each chunk; None: not
    sampled."""
    untrained: float | None = None
    """Share of the first save that is not trained, if an earlier checkpoint exists that may have the same bytes."""
    samples: tuple[CodecSample, ...] | None = None
    """Results of coding the last save, by kind of chunk; empty: it has nothing to code."""
    lane_s_per_byte: float | None = None
    """Seconds in which the store wrote a byte, with one file at a time."""
    strain: float = 1.0
    """Actual ÷ sampled coding time: CPU contention by other load."""
    crowd: float = 1.0
    """Wall ÷ CPU time of hashing in the last save (CPU contention): the first estimate of ``strain``."""
    drag: float | None = None
    """Time of a save that codes and stores ÷ the longer of coding alone and storing alone; None: no save did both
    yet."""
    since_full: int = 0
    """Saves since the last one that stored everything itself, including that one."""


class Choice(NamedTuple):
    """Decision how to store a save, and its reason."""

    reuse: bool
    coded: bool
    reason: str
    differences: bool = False
    """Whether a chunk may be coded as differences from the previous save."""
    kinds: tuple[str, ...] | None = ()
    """Dtypes and roles of the chunks to code; None: all."""


class Conditions(NamedTuple):
    """Conditions under which saves are made."""

    threads: int
    lanes: int = 1
    """Number of files that a raw save writes at the same time. Other saves write one file after another."""
    bytes_per_second: float | None = None
    """Upper limit of the bytes stored per second."""

    def store_s_per_byte(self, seen: Experience, lanes: int) -> float:
        """Return the estimated seconds to store a byte with ``lanes`` files at the same time."""
        pace = 1 / self.bytes_per_second if self.bytes_per_second else 0.0
        return max((seen.lane_s_per_byte or 0.0) / lanes, pace)


def choose(rules: Compact, seen: Experience, under: Conditions) -> Choice:
    """Return how to store the next save, with the reason."""
    reuse, why_reuse = _reuse(rules, seen)
    kinds, why_coded = _coded(rules, seen, under, 1 if reuse or rules.inexact else under.lanes)
    coded = kinds is None or bool(kinds)
    differences = rules.codecs != "never" and rules.full_every is not None and 0 < seen.since_full < rules.full_every
    differences = differences and (coded or seen.alike is None or seen.alike >= EQUAL_MIN)
    return Choice(reuse, coded, f"{why_reuse}; {why_coded}", differences, kinds)


def should_take(seen: Experience, under: Conditions, kinds: Collection[str]) -> float:
    """Return the estimated seconds per byte to write with those kinds coded: the longer of coding and storing, times
    their drag."""
    samples = [sample for sample in seen.samples or () if sample.kind in kinds]
    spent = (
        sum(sample.weight * sample.code_s_per_byte for sample in samples) * max(seen.strain, seen.crowd) / under.threads
    )
    stored = _left(samples) * under.store_s_per_byte(seen, 1)
    longer = max(stored, spent)
    return min(longer * DRAG, stored + spent) if seen.drag is None else longer * seen.drag


def _left(coded: Iterable[CodecSample]) -> float:
    """Return the stored share of the raw size, with these kinds coded."""
    return 1 - sum(sample.weight * (1 - sample.coded) for sample in coded)


def _reuse(rules: Compact, seen: Experience) -> tuple[bool, str]:
    """Return whether chunks are compared with earlier saves, and why."""
    if not rules.reuse:
        return False, "reuse is off"
    if rules.full_every is not None and seen.since_full >= rules.full_every:
        return False, f"every {rules.full_every} saves one stores everything itself"
    if seen.equal is None and (seen.untrained or 0) >= EQUAL_MIN:
        return True, f"nothing trains {percent_text(seen.untrained)} of it, and there is a checkpoint before"
    if seen.alike is not None and (seen.equal or 0) < EQUAL_MIN:
        return seen.alike >= EQUAL_MIN, f"{percent_text(seen.alike)} of it may be as in an earlier save"
    if seen.equal is None:
        return False, "nothing to compare with yet"
    if seen.equal < EQUAL_MIN:
        return False, f"{percent_text(seen.equal)} of the last two saves was equal"
    return True, f"{percent_text(seen.equal)} of the last two saves was equal"


def _coded(rules: Compact, seen: Experience, under: Conditions, lanes: int) -> tuple[tuple[str, ...] | None, str]:
    """Return the kinds to code (None: all), and why. ``lanes``: number of files at the same time of a save without
    coding."""
    if rules.codecs == "never":
        return (), "codecs are off"
    if seen.samples == ():
        return (), "there is nothing to code"
    worth = [sample for sample in seen.samples or () if sample.coded <= WORTH]
    if seen.samples is not None and not worth:
        return (), f"a coded sample takes {percent_text(_left(seen.samples))} of its raw bytes"
    if rules.codecs == "always":
        return None, "codecs are on"
    if seen.samples is None or seen.lane_s_per_byte is None:
        return (), "nothing is known of codecs and store yet"
    order = sorted(worth, key=lambda sample: -(1 - sample.coded) / max(sample.code_s_per_byte, 1e-15))
    ways = [tuple(sample.kind for sample in order[:number]) for number in range(1, len(order) + 1)]
    kinds = min(ways, key=lambda way: should_take(seen, under, way))
    raw, coded = under.store_s_per_byte(seen, lanes), should_take(seen, under, kinds)
    left = _left(sample for sample in worth if sample.kind in kinds)
    taken = f"a sample takes {percent_text(left)} of its raw bytes, {_speed(coded)}; the store takes raw bytes at {_speed(raw)}"
    text = f"with {' and '.join(kinds)} coded, {taken}"
    return (kinds, text) if coded <= SLACK * raw else ((), f"coding would take too long: {text}")


def _speed(seconds_per_byte: float) -> str:
    return rate_text(1 / seconds_per_byte) if seconds_per_byte > 0 else "more than can be measured"
