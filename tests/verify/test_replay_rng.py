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
