"""Element types: name, size in bytes, and the name in safetensors."""

from __future__ import annotations

from typing import NamedTuple

from relight.errors import UnsafeContent


class DType(NamedTuple):
    """An element type. ``safetensors`` is None if that format has no name for it: the pack's header then has ``U8``."""

    name: str
    itemsize: int
    safetensors: str | None


_TABLE: tuple[tuple[str, int, str | None], ...] = (
    ("float64", 8, "F64"),
    ("float32", 4, "F32"),
    ("float16", 2, "F16"),
    ("bfloat16", 2, "BF16"),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("float8_e8m0fnu", 1, "F8_E8M0"),
    ("float8_e4m3fnuz", 1, None),
    ("float8_e5m2fnuz", 1, None),
    ("float4_e2m1fn_x2", 1, None),
    ("int64", 8, "I64"),
    ("int32", 4, "I32"),
    ("int16", 2, "I16"),
    ("int8", 1, "I8"),
    ("uint64", 8, "U64"),
    ("uint32", 4, "U32"),
    ("uint16", 2, "U16"),
    ("uint8", 1, "U8"),
    ("bool", 1, "BOOL"),
    ("complex128", 16, None),
    ("complex64", 8, "C64"),
    ("complex32", 4, None),
    ("bits8", 1, None),
    ("bits16", 2, None),
    ("bits1x8", 1, None),
    ("bits2x4", 1, None),
    ("bits4x2", 1, None),
    *((f"int{bits}", 1, None) for bits in range(1, 8)),
    *((f"uint{bits}", 1, None) for bits in range(1, 8)),
)

DTYPES: dict[str, DType] = {name: DType(name, size, foreign) for name, size, foreign in _TABLE}


def dtype_named(name: str) -> DType:
    """Return the element type with this name. Raise ``UnsafeContent`` if the format has none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsafeContent(
            f"unknown dtype {name[:40]!r}", hint="a newer Relight or another program wrote it"
        ) from None
