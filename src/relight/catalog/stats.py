"""Numbers about a tensor's values, without torch: min, max, mean, norm, how many are not finite."""

from __future__ import annotations

from typing import Any

from relight.errors import ConfigError


def tensor_stats(dtype: str, data: memoryview) -> dict[str, Any]:
    """``min``, ``max``, ``mean``, ``norm``, ``nonfinite`` of the elements; empty for kinds without an order. Needs numpy."""
    try:
        import numpy as np
    except ImportError:
        raise ConfigError("statistics need numpy", hint="pip install 'relight[torch]', or numpy alone") from None
    values: Any
    if dtype == "bfloat16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif dtype in _FLOAT8:
        values = _float8_table(*_FLOAT8[dtype])[np.frombuffer(data, "u1")]
    elif dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64"):
        values = np.frombuffer(data, np.dtype(dtype))
    else:
        return {}
    if not values.size:
        return {}
    wide = values.astype("f8")
    finite = np.isfinite(wide)
    held = wide[finite]
    if not held.size:
        return {"nonfinite": int(wide.size)}
    return {
        "min": float(held.min()),
        "max": float(held.max()),
        "mean": float(held.mean()),
        "norm": float(np.sqrt((held**2).sum())),
        "nonfinite": int(wide.size - held.size),
    }


_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, False, True),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, False),
    "float8_e5m2fnuz": (5, 2, 16, False, False),
}


def _float8_table(exponent_bits: int, mantissa_bits: int, bias: int, has_inf: bool, only_top_nan: bool) -> Any:
    """All 256 values of an 8-bit float."""
    import numpy as np

    table = np.empty(256, "f8")
    top = (1 << exponent_bits) - 1
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code >> mantissa_bits) & top, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            value = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        last = exponent == top and mantissa == (1 << mantissa_bits) - 1
        if has_inf and exponent == top:
            value = sign * np.inf if mantissa == 0 else np.nan
        elif (only_top_nan and last) or (not has_inf and not only_top_nan and code == 0x80):
            value = np.nan
        table[code] = value
    return table
