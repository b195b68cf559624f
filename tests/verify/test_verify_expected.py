"""Expected-value helpers against the tables of the papers they come from."""

from __future__ import annotations

import pytest

from precedent.verify.expected import (
    best_length,
    best_tree_tokens,
    expected_tokens,
    expected_tree_tokens,
    operations,
    speedup,
)


@pytest.mark.parametrize(
    ("acceptance", "length", "ops", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_leviathans_table_1(acceptance: float, length: int, ops: float, speed: float) -> None:
    """2211.17192, table 1: a draft model that costs nothing."""
    assert operations(acceptance, length, 0.0) == pytest.approx(ops, abs=0.005)
    assert speedup(acceptance, length, 0.0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    ("acceptance", "cost", "length", "gain"),
    [
        (0.8, 0.05, 8, 3.092080),
        (0.9, 0.05, 13, 4.674134),
        (0.8, 0.1, 6, 2.469640),
        (0.7, 0.05, 6, 2.352938),
        (0.5, 0.05, 3, 1.630435),
        (0.8, 0.01, 14, 4.231647),
    ],
)
def test_the_best_length_of_a_chain(acceptance: float, cost: float, length: int, gain: float) -> None:
    assert best_length(acceptance, cost) == length
    assert speedup(acceptance, length, cost) == pytest.approx(gain, abs=5e-7)


def test_drafting_pays_exactly_when_acceptance_exceeds_cost() -> None:
    """Leviathan et al., corollary 3.9."""
    assert best_length(0.3, 0.31) == 0
    assert best_length(0.3, 0.29) == 1


def test_certain_acceptance_yields_every_token() -> None:
    assert expected_tokens(1.0, 7) == 8.0
    assert expected_tokens(0.0, 7) == 1.0


def test_sequoias_dynamic_programme() -> None:
    """Golden values for acceptance by rank (.6, .2, .1, .05)."""
    best = best_tree_tokens((0.6, 0.2, 0.1, 0.05), 64)
    golden = {1: 1.0, 2: 1.6, 4: 2.176, 8: 2.7456, 16: 3.30936, 32: 3.8684896, 64: 4.42011776}
    assert {size: best[size - 1] for size in golden} == pytest.approx(golden, abs=1e-9)


def test_a_trees_worth_is_the_sum_of_path_products() -> None:
    """Root's children .5 and .2, below the first .4, below that .5."""
    assert expected_tree_tokens((-1, -1, 0, 2), (0.5, 0.2, 0.4, 0.5)) == pytest.approx(0.5 + 0.2 + 0.2 + 0.1)
