"""Quantiles of the Gamma distribution, which describes the belief about a failure rate."""

from __future__ import annotations

import math

_ROUNDS = 100
_EXACT, _NEAR = 1e-12, 1e-9


def below(shape: float, x: float) -> float:
    """Return the share of a Gamma(shape, 1) below ``x``: the regularised lower incomplete gamma function (DLMF 8.11.4
    and 8.9.2)."""
    if x <= 0:
        return 0.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for n in range(1, _ROUNDS * 30):
            term *= x / (shape + n)
            total += term
            if term < total * _EXACT:
                break
        return min(1.0, front * total)
    b, c, d = x + 1 - shape, 1e300, 1 / (x + 1 - shape)
    h = d
    for n in range(1, _ROUNDS * 30):
        an = -n * (n - shape)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= c * d
        if abs(c * d - 1) < _EXACT:
            break
    return max(0.0, 1 - front * h)


def quantile(shape: float, share: float) -> float:
    """Return the quantile of a Gamma(shape, 1), by bisection of its logarithm."""
    low, high = -700.0, math.log(shape + 40 * math.sqrt(shape) + 40)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if high - low < _NEAR:
            break
        low, high = (middle, high) if below(shape, math.exp(middle)) < share else (low, middle)
    return math.exp((low + high) / 2)
