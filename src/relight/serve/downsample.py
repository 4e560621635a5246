"""Downsampling of curves by largest-triangle-three-buckets (Steinarsson 2013), which keeps spikes and the first and last point. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def largest_triangles(x: Sequence[float], y: Sequence[float], most: int) -> Sequence[int]:
    """Return ascending indices of at most ``most`` points, at least 3. ``x`` ascends, and all numbers are finite.

    The points between the first and the last are divided into buckets. Each bucket keeps the point that forms the largest
    triangle with the point kept before it and the mean of the next bucket.
    """
    count = len(x)
    if count <= most:
        return range(count)
    width = (count - 2) / (most - 2)
    kept = [0]
    for bucket in range(most - 2):
        begin, end = int(bucket * width) + 1, int((bucket + 1) * width) + 1
        after = min(int((bucket + 2) * width) + 1, count)
        mean_x, mean_y = sum(x[end:after]) / (after - end), sum(y[end:after]) / (after - end)
        last_x, last_y = x[kept[-1]], y[kept[-1]]
        across, up = mean_x - last_x, mean_y - last_y
        kept.append(max(range(begin, end), key=lambda i: abs((x[i] - last_x) * up - (y[i] - last_y) * across)))
    return [*kept, count - 1]
