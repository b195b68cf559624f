"""Speed-ups with intervals: what so few requests say of a ratio, and what they leave open."""

from __future__ import annotations

import random
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from precedent_demo.speedup import FEWEST_FOR_INTERVAL, Sample, speedup, student_quantile

SAMPLES = st.builds(Sample, st.integers(1, 500), st.floats(1e-3, 1e3))


@pytest.mark.parametrize("degrees", [3, 5, 14, 1000])
def test_quantiles_are_those_of_the_t_distribution(degrees: int) -> None:
    assert student_quantile(degrees) == pytest.approx(student.ppf(0.975, degrees), rel=0.01)


def test_the_ratio_is_that_of_the_totals_and_few_requests_have_no_interval() -> None:
    ratio, interval = speedup([Sample(10, 1.0), Sample(30, 1.0)], [Sample(10, 4.0), Sample(10, 4.0)])
    assert (ratio, interval) == (pytest.approx((40 / 2) / (20 / 8)), None)
    nothing, something = [Sample(0, 0.0)] * 5, [Sample(5, 1.0)] * 5
    assert speedup(nothing, something) == speedup(something, nothing) == (0.0, None)


@given(st.lists(SAMPLES, min_size=FEWEST_FOR_INTERVAL, max_size=12), st.floats(0.1, 10))
def test_long_and_short_requests_leave_no_doubt_where_each_gains_alike(plain: list[Sample], factor: float) -> None:
    _, interval = speedup([Sample(one.tokens, one.seconds / factor) for one in plain], plain)
    assert interval == pytest.approx((factor, factor))


@pytest.mark.parametrize("number", [4, 12])
def test_nineteen_of_twenty_intervals_hold_the_truth(number: int) -> None:
    chance, held, rounds = random.Random(number), 0, 1500
    for _ in range(rounds):
        sizes = [chance.randint(60, 200) for _ in range(number)]
        plain = [Sample(size, size * exp(chance.gauss(0, 0.05))) for size in sizes]
        mine = [Sample(size, size / 2 * exp(chance.gauss(0, 0.2))) for size in sizes]
        low, high = speedup(mine, plain)[1] or (0.0, 0.0)
        held += low <= 2 * exp((0.05**2 - 0.2**2) / 2) <= high
    assert 0.91 < held / rounds < 0.98
