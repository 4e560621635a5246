"""The register of chunk codecs: how a chunk's bytes may be stored, and what that means for reuse, deltas and exactness.

Five are built in; packages add others through the entry point group ``relight.codecs`` (:doc:`guide <guides/chunk-codec>`). Writer, reader,
statistics and settings ask this register. The built-in codecs import numpy when they are first used: it takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from relight.errors import ConfigError, CorruptCheckpoint, IncompatibleState, RelightError, UnsafeContent, shown

if TYPE_CHECKING:
    from relight.format.codecs import Way
    from relight.format.entropy import Compress
    from relight.format.lossy import LossyRange
    from relight.format.planes import Rooms

GROUP = "relight.codecs"
"""Entry point group: the entry's name is the codec's, and its value a ``ChunkCodec`` class without arguments."""
FEATURE = "codec:"
"""Prefix of the root feature for each codec that is not built in. A reader without that codec refuses the checkpoint by its name."""
PLUGIN_CODES = range(16, 255)
"""Codes of codecs that are not built in."""
UNCHANGED_MIN = 0.75
"""Smallest unchanged share of a chunk to store it as a delta, even if codecs do not pay: the delta is small and coded quickly."""


class EncodedChunk(NamedTuple):
    """Result of coding a chunk: smaller than the chunk."""

    stored: bytes | memoryview
    decoded: memoryview | None = None
    """The bytes to which it decodes, from a codec that is not exact. None: the chunk's own bytes."""


@dataclass(slots=True)
class EncodeContext:
    """What the writer knows of a chunk that it codes."""

    dtype: str
    """Dtype of the chunk's first tensor; ``uint8`` for a pack's header."""
    compress: Compress
    """Compresses a byte plane. Thread-safe."""
    rooms: Rooms
    """This thread's buffers."""
    base: memoryview | None = None
    """The previous save's chunk at this place, of equal length; None if there is none that may be a base."""
    mostly_equal: bool = False
    """Whether a delta is wanted only if most of the chunk equals its base."""
    ranges: Sequence[LossyRange] = ()
    """How each range of the chunk may be stored inexactly; empty: all of it exactly."""
    derive: Callable[[memoryview], bytes | None] | None = None
    """Returns the references to other chunks of the pack from which the chunk can be computed; None if it cannot."""
    way: Way | None = None
    """Result of ``DeltaCodec``'s sample, which ``PlaneCodec`` uses too."""
    sampled: bool = False


@dataclass(slots=True)
class DecodeContext:
    """What the reader knows of a chunk that it decodes."""

    has_base: bool
    """Whether ``into`` has the bytes of the delta's base."""
    read: Callable[[int, memoryview], None]
    """Fills memory with decoded bytes of other chunks of the pack, from an offset in the pack. They cannot be derived ones."""
    rooms: Callable[[], Rooms]
    """Returns this thread's buffers."""


class ChunkCodec:
    """One way to store a chunk. Stateless: any number of threads call it at the same time.

    A subclass sets the class attributes and both methods.
    """

    name: ClassVar[str]
    code: ClassVar[int]
    """Number in a part's chunk locations: one of ``PLUGIN_CODES`` for codecs that are not built in. It never changes."""
    exact: ClassVar[bool] = True
    """Whether decoding returns the bytes that were saved. Other codecs return what they decode to as ``EncodedChunk.decoded``."""
    portable: ClassVar[bool] = True
    """Whether the stored bytes mean the same in another pack, so that a later checkpoint may refer to them."""
    needs_base: ClassVar[bool] = False
    """Whether it stores differences from an earlier chunk."""
    relative_error: ClassVar[float] = 0.0
    """Largest error of a value, relative to its magnitude, of a codec that is not exact; at most 1."""
    label: ClassVar[str] = ""
    """How ``relight show`` names such chunks; empty: by ``name``."""

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        """Return the coded chunk; None if it does not become smaller, or the codec does not apply."""
        raise NotImplementedError

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        """Decode into memory of the chunk's length. Raise ``CorruptCheckpoint`` for malformed bytes.

        The stored bytes have been verified, and the result is verified too. Allocate no more than a few times the chunk's length.
        """
        raise NotImplementedError


class RawCodec(ChunkCodec):
    """The chunk's bytes as they are."""

    name, code, label = "raw", 0, "raw"

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk:
        """Return the chunk itself."""
        return EncodedChunk(data)

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        """Copy."""
        into[:] = stored


class PlaneCodec(ChunkCodec):
    """Byte planes of the values, compressed where a sample gains: see ``format.codecs``."""

    name, code, label = "planes", 1, "coded"

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        """See ``ChunkCodec``."""
        from relight.format import codecs, entropy

        way = context.way
        if not context.sampled or (way is not None and way.difference):
            way = codecs.choose(data, _kind(context), None, entropy.trial_of(context.compress))
        body = None if way is None else codecs.encode(data, way, None, context.rooms, context.compress)
        return None if body is None else EncodedChunk(body)

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        """See ``ChunkCodec``."""
        from relight.format import codecs

        codecs.decode(stored, into, None, context.rooms())


class DeltaCodec(ChunkCodec):
    """Byte planes of the differences from the previous save's chunk at the same place: see ``format.codecs``."""

    name, code, needs_base, label = "deltas", 1, True, "difference"

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        """See ``ChunkCodec``. None also if a sample shows that planes without a base are about as small."""
        from relight.format import codecs, entropy

        if context.base is None:
            return None
        kind, by = _kind(context), context.compress
        if context.mostly_equal:
            if codecs.unchanged(data, context.base) < UNCHANGED_MIN:
                return None
            way: Way | None = codecs.difference(kind, len(data))
            by = entropy.trial_of(by)
        else:
            way = context.way = codecs.choose(data, kind, context.base, entropy.trial_of(by))
            context.sampled = True
        if way is None or not way.difference:
            return None
        body = codecs.encode(data, way, context.base, context.rooms, by)
        return None if body is None else EncodedChunk(body)

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        """Add the differences to the base in ``into``."""
        from relight.format import codecs

        codecs.decode(stored, into, into if context.has_base else None, context.rooms())


class DerivedCodec(ChunkCodec):
    """References to float32 master weights in the same pack, of which the chunk's 16-bit weights are the rounded values."""

    name, code, portable = "derived", 2, False

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        """See ``ChunkCodec``."""
        stored = context.derive(data) if context.derive is not None else None
        return None if stored is None else EncodedChunk(stored)

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        """Round the masters."""
        from relight.format.derived import parse_derived, rounded

        kind, runs = parse_derived(stored, len(into))
        position = 0
        for offset, length in runs:
            source = memoryview(bytearray(2 * length))
            context.read(offset, source)
            rounded(kind, source, into[position : position + length])
            position += length


class LossyCodec(ChunkCodec):
    """Values in 16 or 8 bits, with a bounded error: see ``format.lossy``. ``relative_error`` is that of its coarsest way."""

    name, code, exact, relative_error = "lossy", 3, False, 1 / 254

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        """See ``ChunkCodec``."""
        if not context.ranges:
            return None
        from relight.format.lossy import encode_lossy

        inexact = encode_lossy(data, context.ranges, context.compress)
        return None if inexact is None else EncodedChunk(*inexact)

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        """See ``ChunkCodec``."""
        from relight.format.lossy import decode_lossy

        decode_lossy(stored, into)


RAW, PLANES, DELTAS, DERIVED, LOSSY = RawCodec(), PlaneCodec(), DeltaCodec(), DerivedCodec(), LossyCodec()
BUILT_IN: tuple[ChunkCodec, ...] = (RAW, PLANES, DELTAS, DERIVED, LOSSY)
_BY_CODE: Mapping[tuple[int, bool], ChunkCodec] = {(codec.code, codec.needs_base): codec for codec in BUILT_IN}


def codec_of(code: int, has_base: bool = False) -> ChunkCodec:
    """Return the codec of a chunk location. Raise ``UnsafeContent`` for a code that no codec has, or a base where none belongs."""
    built_in = _BY_CODE.get((code, has_base))
    if built_in is not None:
        return built_in
    if (code, False) in _BY_CODE:
        raise UnsafeContent(f"malformed location: codec {_BY_CODE[code, False].name} has no base")
    codec = plugin_of(code)
    if codec.needs_base != has_base:
        raise UnsafeContent(f"a chunk of codec {codec.name} {'has a' if has_base else 'lacks its'} base")
    return codec


def plugin_of(code: int) -> ChunkCodec:
    """Return an installed codec by its code. Raise ``UnsafeContent`` if there is none."""
    codec = _plugins().codes.get(code) if code in PLUGIN_CODES else None
    if codec is None:
        raise UnsafeContent(f"malformed location: no codec has code {code}")
    return codec


def plugin(name: str) -> ChunkCodec:
    """Return an installed codec by its name. Raise ``ConfigError`` if no package has it, or if it cannot be loaded."""
    plugins = _plugins()
    if name in plugins.names:
        return plugins.names[name]
    if why := plugins.broken.get(name):
        hint = "repair or update the package that registers it"
        raise ConfigError(f"codec {shown(name)} cannot be loaded: {why}", hint=hint)
    hint = f"install the package that registers it as an entry point of {GROUP}"
    raise ConfigError(f"no installed package has a codec {shown(name)}", hint=hint)


def missing_features(features: Iterable[str]) -> list[str]:
    """Return the codecs, by name, that the features of a root require and this environment lacks."""
    names = [feature.removeprefix(FEATURE) for feature in features if feature.startswith(FEATURE)]
    return [name for name in names if name not in _plugins().names]


class PluginCodec(ChunkCodec):
    """A codec of another package. What it encodes is decoded and compared before it is stored. Its exceptions become errors of Relight."""

    def __init__(self, inner: ChunkCodec) -> None:
        self.inner = inner
        for field in ("name", "code", "exact", "portable", "needs_base", "relative_error", "label"):
            setattr(self, field, getattr(inner, field))

    def encode(self, data: memoryview, context: EncodeContext) -> EncodedChunk | None:
        """See ``ChunkCodec``. Raise ``IncompatibleState`` if the codec fails, or does not return what it was given."""
        if context.base is not None:
            context.base = context.base.toreadonly()
        try:
            encoded = self.inner.encode(data.toreadonly(), context)  # some libraries write to what they compress
            if encoded is None or not 0 < len(encoded.stored) < len(data):
                return None
            decoded = memoryview(bytearray(context.base if self.needs_base and context.base is not None else len(data)))
            self.inner.decode(
                memoryview(encoded.stored), decoded, DecodeContext(self.needs_base, _no_chunk, lambda: context.rooms)
            )
            expected = data if self.exact else encoded.decoded
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        if expected is None or decoded != expected:
            raise self._failed("what it decodes is not what it encoded")
        return encoded

    def decode(self, stored: memoryview, into: memoryview, context: DecodeContext) -> None:
        """See ``ChunkCodec``. Raise ``CorruptCheckpoint`` for whatever the codec raises."""
        try:
            self.inner.decode(stored, into, context)
        except RelightError:
            raise
        except Exception as error:
            raise CorruptCheckpoint(
                f"codec {self.name} cannot decode a chunk: {type(error).__name__}: {error}",
                hint="the stored bytes are as they were committed: is this the version of the codec that wrote them?",
            ) from error

    def _failed(self, why: str) -> IncompatibleState:
        hint = "leave it out of Compact(plugin_codecs=…), and report it to its authors"
        return IncompatibleState(f"codec {self.name} cannot store a chunk: {why}", hint=hint)


def _no_chunk(offset: int, into: memoryview) -> None:
    raise NotImplementedError("a codec of another package cannot refer to other chunks")


class _Plugins(NamedTuple):
    names: dict[str, ChunkCodec]
    codes: dict[int, ChunkCodec]
    broken: dict[str, str]


@cache
def _plugins() -> _Plugins:
    """Load the installed codecs, once per process. Cost: reading the metadata of installed packages, some 10 ms."""
    from importlib.metadata import entry_points

    plugins = _Plugins({}, {}, {})
    for entry in entry_points(group=GROUP):
        try:
            codec = entry.load()()
            wrong = plugin_fault(codec, entry.name)
        except Exception as error:  # noqa: BLE001 - another package's code, whatever it raises
            codec, wrong = None, f"{type(error).__name__}: {error}"
        if codec is not None and not wrong and codec.code in plugins.codes:
            wrong = f"its code {codec.code} is also that of codec {plugins.codes[codec.code].name}"
        if wrong:
            plugins.broken[entry.name] = wrong
        else:
            plugins.names[codec.name] = plugins.codes[codec.code] = PluginCodec(codec)
    return plugins


def plugin_fault(codec: Any, name: str) -> str:
    """Return why a codec cannot be used under the name of its entry point; empty if it can."""
    if not isinstance(codec, ChunkCodec):
        return f"it is a {type(codec).__name__}, and no ChunkCodec"
    if codec.name != name or name in {built_in.name for built_in in BUILT_IN}:
        return f"its entry point is called {name}, and the codec {codec.name}"
    if type(codec.code) is not int or codec.code not in PLUGIN_CODES:
        return f"its code is {codec.code}, and not one of {PLUGIN_CODES.start} to {PLUGIN_CODES.stop - 1}"
    if not codec.portable:
        return "it is not portable, which only built-in codecs may be"
    if not 0 <= codec.relative_error <= 1 or (codec.exact and codec.relative_error):
        return "its relative_error is not between 0 and 1, or it is exact and has one"
    return ""


def _kind(context: EncodeContext) -> Any:
    from relight.format.codecs import kind_of
    from relight.format.dtypes import dtype_named

    return kind_of(dtype_named(context.dtype))
