"""The median and 95th percentile of measured times."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p95, interpolated; (0, 0) without values."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]
