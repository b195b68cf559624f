"""What a verdict says on trees small enough to check by hand, in every lossless mode; which modes there are."""

from __future__ import annotations

import pytest
import torch
from helpers.enumeration import toy_rows
from helpers.known_weights import WAYS, verifier_of
from helpers.random_trees import always, random_problem, toy_model
from torch import Tensor

from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.loop import DecodeLoop, loop_class
from precedent.errors import ConfigError
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import EMPTY_TREE, ROOT, Sampled, TreeBuilder, chain
from precedent.verify import LOSSLESS, Verdict, prepare, verify
from precedent.verify.exact_match import exact_match
from precedent_testing.replay_rng import ReplayRng, enumerate_outcomes

REJECTION_MODES = ("traversal", "topdown")
BOTH_WAYS = pytest.mark.parametrize("way", WAYS)


class NotedRows(TargetRows):
    """Rows that note for which nodes they are asked."""

    def __init__(self, *settings: object) -> None:
        super().__init__(*settings)  # type: ignore[arg-type]
        self.asked: list[int] = []

    def probs(self, node: int) -> Tensor:
        self.asked.append(node)
        return super().probs(node)


@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_tree_of_fixed_candidates_asks_for_visited_rows_only(mode: str) -> None:
    """A softmax over the whole tree is what rows one by one are there to avoid."""
    builder = TreeBuilder()
    for path in ((0, 0, 0), (1, 1, 1), (2, 2, 2)):
        node = ROOT
        for token in path:
            node = builder.add_fixed(node, token, "test")
    tree = builder.build()
    certain = torch.tensor([0.0, 1.0, 0.0]).log().expand(len(tree) + 1, -1)
    rows = NotedRows(certain, tree, SamplingParams(temperature=1.0))
    assert prepare(tree, rows, mode)(CounterRng(1, 0)) == Verdict((3, 4, 5), 1, "bonus")
    assert sorted(rows.asked) == [ROOT, 3, 4, 5]


@pytest.mark.parametrize("seeds", [40, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_greedy_equals_argmax_decoding_on_every_tree(seeds: int) -> None:
    """Whatever was proposed, the committed tokens are those of plain greedy decoding, and as many as the tree holds."""
    for seed in range(seeds):
        problem = random_problem(seed, max_trees=16)
        for _, tree in enumerate_outcomes(problem.draft):
            verdict = verify(tree, toy_rows(problem.target, tree), "greedy", ReplayRng())
            committed = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
            expected: list[int] = []
            while len(expected) < len(committed):
                expected.append(int(problem.target(tuple(expected)).argmax()))
            assert committed == expected
            end = verdict.path[-1] if verdict.path else ROOT
            assert (end, verdict.next_token) not in set(zip(tree.parents, tree.token_ids, strict=True))


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_temperature_zero_rows_accept_exactly_the_greedy_path(mode: str, way: str) -> None:
    """With one-hot rows the rejection modes and greedy agree, on sampled and on fixed candidates."""
    target, compared = toy_model("any", 4), 0

    def one_hot(path: tuple[int, ...]) -> Tensor:
        return torch.eye(4, dtype=torch.float64)[int(target(path).argmax())]

    for seed in range(20):
        problem = random_problem(seed, max_trees=16)
        if problem.vocab_size == 4:
            for _, tree in enumerate_outcomes(problem.draft):
                rows = toy_rows(one_hot, tree)
                greedy = verify(tree, rows, "greedy", ReplayRng())
                assert [verdict for _, verdict in enumerate_outcomes(verifier_of(mode, way)(tree, rows))] == [greedy]
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("mode", LOSSLESS)
def test_the_empty_tree_is_plain_decoding(mode: str) -> None:
    """No candidates: one bonus token from the target's row."""
    target = toy_model("plain", 3)
    for probability, verdict in enumerate_outcomes(prepare(EMPTY_TREE, toy_rows(target, EMPTY_TREE), mode)):
        assert verdict.path == ()
        assert verdict.kind == "bonus"
        assert verdict.num_accepted == 0
        expected = 1.0 if mode in ("greedy", "coupled") else float(target(())[verdict.next_token])
        assert probability == pytest.approx(expected)


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_verification_writes_to_none_of_its_inputs(mode: str, way: str) -> None:
    """Logits and draft rows are views into the models' buffers."""
    logits, draft_row = torch.tensor([0.2, 0.5, 0.3]).log().repeat(4, 1), torch.tensor([0.6, 0.2, 0.2])
    builder = TreeBuilder()
    builder.add_sampled(ROOT, 0, Sampled(draft_row), "a")
    builder.add_sampled(ROOT, 1, Sampled(draft_row, (0,), draft_row > 0.1), "a")
    builder.add_fixed(ROOT, 2, "b")
    tree = builder.build()
    rows = TargetRows(logits, tree, SamplingParams(temperature=1.0))
    probs = torch.stack([rows.probs(node) for node in range(ROOT, len(tree))])
    before = logits.clone(), draft_row.clone()
    for _ in enumerate_outcomes(verifier_of(mode, way)(tree, rows)):
        pass
    assert torch.equal(logits, before[0])
    assert torch.equal(draft_row, before[1])
    assert torch.equal(torch.stack([rows.probs(node) for node in range(ROOT, len(tree))]), probs)


@BOTH_WAYS
@pytest.mark.parametrize("mode", REJECTION_MODES)
def test_a_masked_token_is_never_accepted_even_if_its_draft_distribution_is_wrong(mode: str, way: str) -> None:
    """Probability 0 under the target (a grammar mask) stays 0: fixed, sampled, or not even possible as a sample."""
    row = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for distribution in (Sampled(torch.tensor([1.0, 0.0])), Sampled(torch.tensor([0.0, 1.0]))):
        builder = TreeBuilder()
        builder.add_sampled(ROOT, 0, distribution, "draft")
        tree = builder.build()
        decide = verifier_of(mode, way)(tree, toy_rows(always(row), tree))
        assert [verdict for _, verdict in enumerate_outcomes(decide)] == [Verdict((), 1, "recovered")]
    fixed = chain([0])
    decide = verifier_of(mode, way)(fixed, toy_rows(always(row), fixed))
    assert [verdict for _, verdict in enumerate_outcomes(decide)] == [Verdict((), 1, "recovered")]
    assert exact_match(fixed, lambda node: 1) == Verdict((), 1, "recovered")


# Which modes there are


def test_a_mode_or_a_loop_that_is_not_installed_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precedent.runtime.plugins.entry_points", lambda **_: ())
    hint = r"pip install 'precedent-llm\[research\]'"
    with pytest.raises(ConfigError, match=f"mode='lossy_typical:delta=0.3' cannot verify; .*{hint}"):
        SpeculationConfig(mode="lossy_typical:delta=0.3")
    with pytest.raises(ConfigError, match=f"loop='pearl' is not installed .*{hint}"):
        loop_class("pearl")
    assert loop_class(None) is DecodeLoop


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    """Equal logits must not depend on what was proposed."""
    tree = chain([1, 1])
    rows = toy_rows(lambda path: torch.tensor([0.0, 0.5, 0.5, 0.0]), tree)
    assert verify(tree, rows, "greedy", ReplayRng()) == Verdict((0, 1), 1, "bonus")


def test_an_unknown_mode_is_refused_by_name() -> None:
    """No silent fallback to another verifier."""
    with pytest.raises(ConfigError, match=r"mode='tokenwise'.*traversal"):
        verify(EMPTY_TREE, toy_rows(toy_model(0, 2), EMPTY_TREE), "tokenwise", ReplayRng())
