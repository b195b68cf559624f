"""How many times as fast one way of decoding is as another, and the interval that so few requests leave open."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import NormalDist
from typing import NamedTuple

FEWEST_FOR_INTERVAL = 4
"""Fewest requests for an interval; of fewer, the spread is hardly known."""


class Sample(NamedTuple):
    """One request: the tokens that came out, and the seconds that they took."""

    tokens: int
    seconds: float


def speedup(mine: Sequence[Sample], plain: Sequence[Sample]) -> tuple[float, tuple[float, float] | None]:
    """The ratio of two rates in tokens per second, and its 95 % confidence interval, None if unknown.

    Compares two ways that served the same requests in the same order; 0 without tokens or time on either side. The
    rates are totals of tokens over totals of seconds. The spread of the ratio's logarithm is that of each request's
    shares in the four totals (the delta method for ratios of totals), so what makes a request slow for both ways does
    not widen the interval.
    """
    totals = [Sample(sum(one.tokens for one in side), sum(one.seconds for one in side)) for side in (mine, plain)]
    if not all(tokens > 0 and seconds > 0 for tokens, seconds in totals):
        return 0.0, None
    ratio = totals[0].tokens / totals[0].seconds / (totals[1].tokens / totals[1].seconds)
    number = len(mine)
    if number < FEWEST_FOR_INTERVAL:
        return ratio, None
    shares = [_share(one, totals[0]) - _share(other, totals[1]) for one, other in zip(mine, plain, strict=True)]
    error = sqrt(number / (number - 1) * sum(share * share for share in shares))
    reach = student_quantile(number - 1) * error
    return ratio, (exp(log(ratio) - reach), exp(log(ratio) + reach))


def _share(sample: Sample, total: Sample) -> float:
    """How far this request moves the logarithm of tokens per second."""
    return sample.tokens / total.tokens - sample.seconds / total.seconds


def student_quantile(degrees: int) -> float:
    """The 0.975 quantile of Student's t distribution, within 1 % from 3 degrees of freedom on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))
