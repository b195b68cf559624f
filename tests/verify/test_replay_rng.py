"""The replay itself: every outcome once, with its exact probability."""

from __future__ import annotations

import pytest
import torch

from precedent_testing.replay_rng import ReplayRng, enumerate_outcomes


def test_a_random_number_that_is_asked_for_twice_is_refused() -> None:
    """Counter-based numbers would be the same twice, which independent branches would hide."""
    with pytest.raises(AssertionError, match="asked for twice"):
        list(enumerate_outcomes(lambda rng: (rng.bernoulli(0.5, 0, "x"), rng.bernoulli(0.5, 0, "x"))))


def test_outcomes_have_their_exact_probabilities() -> None:
    """A coin and a die: every outcome once, probabilities multiplied, impossible branches left out."""

    def run(rng: ReplayRng) -> tuple[bool, int]:
        heads = rng.bernoulli(0.25, 0, "coin")
        return heads, rng.categorical(torch.tensor([1.0, 0.0, 3.0] if heads else [1.0, 0.0, 0.0]), 0, "die")

    outcomes = {outcome: probability for probability, outcome in enumerate_outcomes(run)}  # type: ignore[arg-type]
    assert outcomes == {(True, 0): 0.0625, (True, 2): 0.1875, (False, 0): 0.75}


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(probability: float) -> None:
    with pytest.raises(AssertionError, match=r"is outside \[0, 1\]"):
        ReplayRng().bernoulli(probability, 0, "x")


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -0.1], [float("nan"), 1.0]])
def test_what_is_no_distribution_is_refused(weights: list[float]) -> None:
    with pytest.raises(AssertionError, match="are not a distribution"):
        ReplayRng().categorical(torch.tensor(weights), 0, "x")
