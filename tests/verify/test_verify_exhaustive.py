"""Six hundred larger random trees for every mode and setting: an hour's worth of doubt in some minutes.

The small sizes of the same statements run in `make test` (test_verify_distribution, _coupled);
these in `make test-exhaustive`.
"""

from __future__ import annotations

import pytest
import torch
from helpers.enumeration import exact_step, toy_rows
from helpers.known_weights import WAYS, verifier_of
from helpers.random_trees import Problem, random_problem, toy_model

from precedent.sampling.rng import CounterRng
from precedent.tree import EMPTY_TREE
from precedent.verify import prepare, verify
from precedent_testing.replay_rng import ReplayRng, enumerate_outcomes

EXACT = 1e-12
FIRST, COUNT, BLOCK = 20_000, 600, 40
BLOCKS = pytest.mark.parametrize("block", range(FIRST, FIRST + COUNT, BLOCK))
EXACT_MATCH = ("greedy", "coupled")
REJECTION_MODES = ("traversal", "topdown")

pytestmark = pytest.mark.exhaustive


def problems(block: int, max_trees: int) -> list[Problem]:
    """The problems of one block, with up to `max_trees` trees each."""
    return [random_problem(seed, max_trees=max_trees) for seed in range(block, block + BLOCK)]


@BLOCKS
def test_both_rejection_modes_keep_the_distribution_row_by_row_and_ahead(block: int) -> None:
    """What runs on a GPU, in float64 on a CPU, accepts as many; lazy tests accept no less than eager ones."""
    for problem in problems(block, 1024):
        accepted: list[float] = []
        for mode in REJECTION_MODES:
            by_row, ahead = (exact_step(problem.target, problem.draft, verifier_of(mode, way)) for way in WAYS)
            assert by_row.total_variation(problem.target) < EXACT, problem
            assert ahead.total_variation(problem.target) < EXACT, problem
            assert ahead.expected_accepted == pytest.approx(by_row.expected_accepted, abs=1e-9), problem
            accepted.append(by_row.expected_accepted)
        assert accepted[0] >= accepted[1] - EXACT, problem


@BLOCKS
@pytest.mark.parametrize("mode", EXACT_MATCH)
def test_exact_match_commits_the_text_of_plain_decoding_on_every_tree(mode: str, block: int) -> None:
    """Greedy decoding's, or that of the seed's noise; and no accepted path could have gone on."""
    for problem in problems(block, 256):
        for _, tree in enumerate_outcomes(problem.draft):
            verdict = verify(tree, toy_rows(problem.target, tree, problem.seed), mode, ReplayRng())
            committed = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
            for length, token in enumerate(committed):
                row, before = problem.target, tuple(committed[:length])
                plain = toy_rows(lambda path, before=before, row=row: row(before), EMPTY_TREE, problem.seed, length)
                assert token == (plain.argmax(-1) if mode == "greedy" else plain.coupled(-1)), problem
            end = verdict.path[-1] if verdict.path else -1
            assert (end, verdict.next_token) not in set(zip(tree.parents, tree.token_ids, strict=True))


@BLOCKS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_float32_rows_keep_the_distribution_up_to_rounding(mode: str, block: int) -> None:
    """The work is done in the rows' dtype."""
    for problem in problems(block, 81):
        single: dict[tuple[int, ...], torch.Tensor] = {}

        def target(path: tuple[int, ...], problem=problem, single=single) -> torch.Tensor:
            return single.setdefault(path, problem.target(path).float())

        assert exact_step(target, problem.draft, mode).total_variation(problem.target) < 2e-6, problem


@BLOCKS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_temperature_zero_rows_accept_exactly_the_greedy_path(mode: str, block: int) -> None:
    """One-hot rows, whatever was sampled: the verdict of greedy decoding, under all random numbers."""
    for problem in problems(block, 81):
        model = toy_model((problem.seed, "greedy"), problem.vocab_size)

        def one_hot(path: tuple[int, ...], model=model) -> torch.Tensor:
            return torch.eye(model(path).numel(), dtype=torch.float64)[int(model(path).argmax())]

        for _, tree in enumerate_outcomes(problem.draft):
            rows = toy_rows(one_hot, tree)
            greedy = verify(tree, rows, "greedy", CounterRng(0, 0))
            verdicts = {verdict for _, verdict in enumerate_outcomes(prepare(tree, rows, mode))}
            assert verdicts == {greedy}, problem
