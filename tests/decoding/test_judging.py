"""On a GPU a step reads once: the same verdicts as without, however many sequences, and nothing else waits."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from precedent import judging
from precedent import target_rows as rows_module
from precedent.config import SamplingParams, SpeculationConfig
from precedent.constraints import RowShaper, constraints_for
from precedent.cost_curve import CostCurve
from precedent.decode import step
from precedent.drafters.base import DraftRequest
from precedent.drafters.prompt import PromptDrafter
from precedent.drafting import Draft
from precedent.errors import GenerationError
from precedent.grammar import GrammarConstraint
from precedent.grammar import constraint as constraint_module
from precedent.grammar.matching import Words
from precedent.plan import Plan
from precedent.planner import Planner
from precedent.sampling import CounterCoins, categorical_rows
from precedent.sequence import DecodingSequence, entropy_coins
from precedent.target import TargetModel
from precedent.target.host_waits import HostWaits
from precedent.target.static_runner import StaticSettings
from precedent.target_rows import TargetRows
from precedent.testing.operations import Operations
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.tree import ROOT, CandidateTree, Drawn, TreeBuilder
from precedent.verify import ahead as ahead_module
from precedent.verify import verify
from precedent.verify.ahead import Scored, Unread, VerdictsAhead, computed_alike, read_together

VOCABULARY = 40
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7]
"""Repeats itself, so that the prompt drafter has something to propose."""


def mixed_tree(seed: int) -> CandidateTree:
    """Draws with exclusions and points below one another and beside one another."""
    generator, builder = torch.Generator().manual_seed(seed), TreeBuilder()
    point = builder.add_point(ROOT, int(torch.randint(VOCABULARY, (1,), generator=generator)), "cache")
    builder.add_point(point, 3, "cache")
    node = ROOT
    for _ in range(3):
        law = Drawn(torch.rand(VOCABULARY, generator=generator).softmax(0), builder.children(node))
        node = builder.add_draw(node, int(torch.multinomial(law.probs(), 1, generator=generator)), law, "draft")
    return builder.build()


def target_rows(tree: CandidateTree, seed: int) -> TargetRows:
    logits = torch.randn(len(tree) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2)
    return TargetRows(logits, tree, SAMPLED, at_once=True)


def points_alone(seed: int) -> CandidateTree:
    """A chain and its siblings, as memory proposes them."""
    generator, builder, node = torch.Generator().manual_seed(seed), TreeBuilder(), ROOT
    for _ in range(4):
        likely, other = torch.randperm(6, generator=generator)[:2].tolist()
        builder.add_point(node, other, "cache")
        node = builder.add_point(node, likely, "cache")
    return builder.build()


def read_ahead(scored: Sequence[Scored]) -> int:
    """Let all of them know their verdicts; returns how many were computed together."""
    groups = [VerdictsAhead(together) for together in computed_alike(scored)]
    read_together(groups)
    return len(groups)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_verdicts_read_together_are_those_of_the_same_coins(mode: str) -> None:
    """Many trees, several at once, of draws and points and of points alone; paths of all lengths occur."""
    lengths = set()
    for start in range(0, 120, 3):
        numbers = range(start, start + 3)
        trees = [points_alone(start), mixed_tree(start + 1), mixed_tree(start + 2)]
        modes = [mode, *sorted(ahead_module.LAZY)]
        scored = [
            Scored(tree, target_rows(tree, number), CounterCoins(7, number), its)
            for number, tree, its in zip(numbers, trees, modes, strict=True)
        ]
        assert read_ahead(scored) == 1
        for number, tree, found in zip(numbers, trees, scored, strict=True):
            verdict = found.verdict()
            expected = verify(tree, target_rows(tree, number), found.mode, CounterCoins(7, number))
            assert verdict == expected, "as the reference"
            lengths.add(len(verdict.path))
    assert {0, 1, 2} <= lengths


def test_rows_of_different_laws_are_not_computed_together() -> None:
    """Greedy ones have no law: theirs go together, whatever else was asked for."""
    tree = points_alone(0)
    logits = torch.randn(len(tree) + 1, VOCABULARY)
    asked = [(SAMPLED, "traversal"), (SamplingParams(temperature=0.5), "topdown"), (SamplingParams(), "greedy")]
    asked += [(SamplingParams(top_k=3), "greedy"), (SAMPLED, "topdown")]
    asked += [(replace(SAMPLED, seed=seed), "coupled") for seed in (1, 2)]
    scored = [
        Scored(tree, TargetRows(logits, tree, params, at_once=True), CounterCoins(1, 1), mode) for params, mode in asked
    ]
    groups = [[asked.index((each.rows._params, each.mode)) for each in group] for group in computed_alike(scored)]
    assert sorted(groups) == [[0, 4], [1], [2, 3], [5, 6]]
    read_ahead(scored)
    for each, (params, mode) in zip(scored, asked, strict=True):
        assert each.verdict() == verify(tree, TargetRows(logits, tree, params), mode, CounterCoins(1, 1))


def test_no_more_is_computed_together_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "MOST_AT_ONCE", 20 * VOCABULARY)
    trees = [points_alone(number) for number in range(5)]
    scored = [Scored(tree, target_rows(tree, 0), CounterCoins(1, i), "traversal") for i, tree in enumerate(trees)]
    assert [len(group) for group in computed_alike(scored)] == [2, 2, 1]
    assert read_ahead(scored) == 3
    for i, each in enumerate(scored):
        assert each.verdict() == verify(each.tree, target_rows(each.tree, 0), "traversal", CounterCoins(1, i))


@pytest.mark.parametrize(
    ("mode", "tree", "most"),
    [
        ("greedy", points_alone(0), 20),
        ("traversal", points_alone(0), 20),
        ("traversal", mixed_tree(1), 70),
        ("topdown", mixed_tree(1), 60),
    ],
    ids=["greedy", "points", "draws", "draws, eager"],
)
def test_as_many_operations_for_many_sequences_as_for_one(mode: str, tree: CandidateTree, most: int) -> None:
    """Launching is what a small operation costs on a GPU: 20 of them take a hundredth of a step."""
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.7)

    def operations(count: int) -> int:
        trees = [tree] * count
        rows = [TargetRows(torch.randn(len(tree) + 1, VOCABULARY), tree, params, at_once=True) for tree in trees]
        scored = [Scored(tree, its, CounterCoins(1, 1), mode) for tree, its in zip(trees, rows, strict=True)]
        with Operations() as counting:
            read_ahead(scored)
        return len(counting.launched)

    assert operations(8) <= operations(1) + 2 <= most


def test_tokens_of_all_rows_are_those_of_one_row_after_the_other() -> None:
    """Rows that sum to anything, with nothing in front, behind, or but in one place; coins at both ends."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(200, 30, generator=generator)
    weights[torch.rand(200, 30, generator=generator) < 0.5] = 0.0
    weights[:, :3], weights[::2, -4:], weights[:, 7] = 0.0, 0.0, 0.1
    weights[0] = 0.0
    weights[0, 11] = 1e-9
    coins = CounterCoins(3, 0)
    uniforms = torch.tensor([coins.uniform(row, "x") for row in range(200)], dtype=torch.float64)
    expected = [coins.categorical(row, number, "x") for number, row in enumerate(weights)]
    assert categorical_rows(weights, uniforms).tolist() == expected
    for uniform in (0.0, 1.0 - 2.0**-53):
        found = categorical_rows(weights, torch.full((200,), uniform, dtype=torch.float64))
        assert weights.gather(1, found[:, None]).gt(0).all(), "a token without mass is never drawn"


def test_a_row_that_cannot_be_sampled_fails_when_the_walk_comes_to_it() -> None:
    tree = mixed_tree(1)
    logits = torch.randn(len(tree) + 1, VOCABULARY)
    logits[0, 3] = torch.nan
    for params, mode in ((SAMPLED, "traversal"), (SamplingParams(), "greedy")):
        scored = Scored(tree, TargetRows(logits, tree, params, at_once=True), CounterCoins(1, 1), mode)
        read_ahead([scored])
        with pytest.raises(GenerationError, match="NaN"):
            scored.verdict()


def sequences(
    target: TargetModel, sampling: SamplingParams, count: int, num_tokens: int | None = None
) -> list[DecodingSequence]:
    """Prefilled, with drafts from their own prompts."""
    found = []
    for number in range(count):
        slot = target.new_slot()
        target.prefill(slot, [*PROMPT[number:], 12 + number, *PROMPT])
        mode = "greedy" if sampling.greedy else "traversal" if sampling.seed is None else "coupled"
        request = DraftRequest("test", tuple(PROMPT), sampling, mode=mode, end_token_ids=frozenset({0}))
        found.append(
            DecodingSequence(
                slot=slot, sampling=sampling, speculation=SpeculationConfig(), mode=mode,
                coins_of=entropy_coins(number), end_token_ids=frozenset({0}), max_tokens=40,
                draftings={"prompt": PromptDrafter().begin(request)}, num_tokens=num_tokens,
            )
        )  # fmt: skip
    return found


def played(target: TargetModel, sampling: SamplingParams) -> tuple[list[list[int]], int]:
    """The texts of three sequences that are decoded together, and how many nodes were proposed."""
    running, planner = sequences(target, sampling, 3), Planner(CostCurve())
    for _ in range(6):
        assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]
        step([sequence for sequence in running if not sequence.finished], target, planner)
    return [sequence.output_ids for sequence in running], sum(one.stats.num_draft_tokens for one in running)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(judging, "on_accelerator", lambda logits: True)


def static_target(device: str = "cpu") -> TargetModel:
    model = tiny_causal_lm(dtype=torch.float64).to(device)
    return TargetModel(model, static=StaticSettings(arena_tokens=4096, capture=device == "cuda"))


def likely_above(target: TargetModel, num_tokens: int) -> None:
    """Give the ids that no tokenizer has by far the largest logits or the smallest, half of the time each."""
    with torch.no_grad():
        target.model.get_output_embeddings().weight[num_tokens:] *= 50.0


class EvenIds:
    """A grammar of one rule: even and odd ids in turns."""

    def allowed(self) -> Words:
        return np.full(8, 0x55555555 << self._taken % 2, dtype=np.uint32).view(np.int32)

    def __init__(self) -> None:
        self._taken = 0

    def advance(self, token_ids: Sequence[int]) -> int:
        for number, token in enumerate(token_ids):
            if token % 2 != self._taken % 2:
                return number
            self._taken += 1
        return len(token_ids)

    def go_back(self, num_tokens: int) -> None:
        self._taken -= num_tokens

    def forced(self) -> list[int]:
        return []


def constraints() -> RowShaper:
    """A grammar, a bias and all penalties."""
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={4: 1, 5: -1}
    )
    found = constraints_for(params, PROMPT, GrammarConstraint(EvenIds(), [0]))
    assert found is not None
    return found


def test_constrained_texts_do_not_hang_on_how_rows_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a text is where its grammar allows it."""
    target, texts = static_target(), []
    for at_once in (False, True):
        if at_once:
            as_on_a_gpu(monkeypatch)
        running, planner = sequences(target, SamplingParams(), 3), Planner(CostCurve())
        for sequence in running:
            sequence.shape = constraints()
        for _ in range(6):
            step([sequence for sequence in running if not sequence.finished], target, planner)
            assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]
        texts.append([sequence.output_ids for sequence in running])
    for one, other in zip(*texts, strict=True):
        common = min(len(one), len(other))
        assert one[:common] == other[:common]
        assert common >= 6
        assert all(token % 2 == place % 2 for place, token in enumerate(one))


@pytest.fixture(autouse=True)
def masks_are_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "BESIDE_A_FORWARD", math.inf)


@pytest.mark.parametrize("mode", ["greedy", "traversal", "topdown", "coupled"])
def test_verdicts_are_the_same_when_masks_take_long(mode: str) -> None:
    """Then rows are computed where the walk comes."""
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.9, seed=3)
    for until in (math.inf, -math.inf):
        for seed in range(30):
            tree = mixed_tree(seed) if seed % 2 and mode in ahead_module.LAZY else points_alone(seed)
            logits = torch.randn(len(tree) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(2)
            rows = TargetRows(logits, tree, params, (), constraints(), at_once=True, until=until)
            assert rows.compute_together() is (until > 0)
            reference = TargetRows(logits, tree, params, (), constraints())
            expected = verify(tree, reference, mode, CounterCoins(7, seed))
            if rows.compute_together():
                scored = Scored(tree, rows, CounterCoins(7, seed), mode)
                read_ahead([scored])
                assert scored.verdict() == expected
            else:
                assert verify(tree, rows, mode, CounterCoins(7, seed)) == expected


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(temperature=0.3, seed=5)],
    ids=["greedy", "sampled", "seeded"],
)
@pytest.mark.parametrize("num_tokens", [None, 200], ids=["", "a head wider than the tokenizer"])
@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
def test_a_step_of_several_sequences_reads_once(
    sampling: SamplingParams, num_tokens: int | None, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, verification and commit of three sequences, trees and all; the reading itself is the one wait."""
    as_on_a_gpu(monkeypatch)
    target, planner = static_target(), Planner(CostCurve())
    if num_tokens is not None:
        likely_above(target, num_tokens)
    running, proposed = sequences(target, sampling, 3, num_tokens), 0
    for sequence in running if constrained else ():
        sequence.shape = constraints()
    for _ in range(4):
        with torch.inference_mode(), HostWaits() as waits:
            step(running, target, planner)
        assert waits.names == ["resolve_neg"], "one list is read"
        assert all(sequence.error is None for sequence in running)
        assert num_tokens is None or max(max(sequence.output_ids) for sequence in running) < num_tokens
        proposed = sum(sequence.stats.num_draft_tokens for sequence in running)
    assert proposed > 0


def test_texts_do_not_hang_on_how_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy texts are those of the lazy way, as far as both came: a planner goes by the clock."""
    target = static_target()
    lazily, _ = played(target, SamplingParams())
    as_on_a_gpu(monkeypatch)
    together, proposed = played(target, SamplingParams())
    for one, other in zip(lazily, together, strict=True):
        common = min(len(one), len(other))
        assert one[:common] == other[:common]
        assert common >= 6
    assert proposed > 0


def test_one_sequence_that_cannot_be_judged_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    target = static_target()
    running = sequences(target, SamplingParams(temperature=0.5), 2)
    monkeypatch.setattr(running[0], "mode", "traversal:plan=wrong")
    step(running, target, Planner(CostCurve()))
    assert "plan=wrong" in str(running[0].error)
    assert running[1].error is None
    assert running[1].output_ids


def test_of_sequences_weighed_together_only_the_one_whose_draft_has_no_law_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_a_gpu(monkeypatch)
    builder = TreeBuilder()
    builder.add_draw(ROOT, 1, Drawn(torch.tensor([0.5, 0.5])), "draft of another vocabulary")
    target = static_target()
    running = sequences(target, SamplingParams(temperature=0.5), 3)
    drafts = [Draft(sequence, Plan(), points_alone(0)) for sequence in running]
    drafts[1].tree = builder.build()
    judgements = judging.judge_all(drafts, [torch.randn(len(draft.tree) + 1, VOCABULARY) for draft in drafts])
    assert [judgement.draft for judgement in judgements] == [drafts[0], drafts[2]]
    assert [sequence.error is None for sequence in running] == [True, False, True]
    assert all(judgement.decide()[2].next_token in range(VOCABULARY) for judgement in judgements)


@pytest.mark.parametrize("bitwise", [True, False])
def test_seeded_rows_are_made_into_laws_one_by_one_where_bits_must_not_hang_on_how_many(
    bitwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cumulative sum over several rows at once may be cut otherwise than one over a row alone."""
    shapes: list[int] = []
    law_of = rows_module.probs_of

    def noted(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        shapes.append(logits.dim())
        return law_of(logits, params)

    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(rows_module, "probs_of", noted)
    target, seeded = static_target(), SamplingParams(temperature=0.3, seed=3, top_p=0.9)
    running = sequences(target, seeded, 1)[0]
    running.mode, running.stats.bitwise = "coupled", bitwise
    step([running], target, Planner(CostCurve()))
    assert running.error is None
    assert set(shapes) == {1 if bitwise else 2}


def test_masks_have_two_milliseconds_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step, however many trees it has: the later ones do with a walk from row to row."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(judging, "BESIDE_A_FORWARD", 2e-3)
    clock = iter([0.0, *[1e-3] * 9, *[3e-3] * 99])
    monkeypatch.setattr(judging, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(constraint_module, "perf_counter", lambda: next(clock))
    running = sequences(static_target(), SamplingParams(), 3)
    for sequence in running:
        sequence.shape = constraints()
    drafts = [Draft(sequence, Plan(), points_alone(0)) for sequence in running]
    judgements = judging.judge_all(drafts, [torch.randn(9, VOCABULARY) for _ in drafts])
    assert [judgement.scored is not None for judgement in judgements] == [True, False, False]
    assert all(judgement.decide()[2].next_token in range(VOCABULARY) for judgement in judgements)


@pytest.mark.parametrize("mode", ["greedy", "traversal", "coupled"])
def test_what_a_step_computed_goes_with_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of all rows are large, on a GPU most of all: they cannot wait for the garbage collector."""
    as_on_a_gpu(monkeypatch)
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.8, seed=1)
    running, gone = sequences(static_target(), params, 2), []
    for sequence in running:
        sequence.mode = mode
    monkeypatch.setattr(rows_module, "probs_of", noting(rows_module.probs_of, gone))
    gc.collect()
    gc.disable()
    try:
        trees = [mixed_tree(1) if mode == "traversal" else points_alone(1) for _ in running]
        drafts = [Draft(sequence, Plan(), tree) for sequence, tree in zip(running, trees, strict=True)]
        logits = [torch.randn(len(tree) + 1, VOCABULARY) for tree in trees]
        gone += [weakref.ref(each) for each in logits]
        judgements = judging.judge_all(drafts, logits)
        decided = [judgement.decide() for judgement in judgements]
        del judgements, logits, decided
        assert len(gone) == 2 + (mode != "greedy")
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_laws_go_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and tokens are all that is kept: `MOST_AT_ONCE` bounds what several groups take, one after the other."""
    gone: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(rows_module, "probs_of", noting(rows_module.probs_of, gone))
    trees = [mixed_tree(1), mixed_tree(2)]
    scored = [Scored(tree, target_rows(tree, 0), CounterCoins(1, 1), "traversal") for tree in trees]
    ahead = VerdictsAhead(scored)
    assert [each() for each in gone] == [None]
    read_together([ahead])
    assert all(0 <= each.verdict().next_token < VOCABULARY for each in scored)


def noting(law_of: Callable[..., torch.Tensor], made: list[weakref.ref[torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """The same, with a weak reference to each result."""

    def noted(*given: object) -> torch.Tensor:
        found = law_of(*given)
        made.append(weakref.ref(found))
        return found

    return noted


@pytest.mark.gpu
@pytest.mark.parametrize("constrained", [False, True], ids=["", "constrained"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.3)], ids=["greedy", "sampled"])
def test_on_cuda_a_step_waits_once(
    sampling: SamplingParams, constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA raises an error at any wait but the one read, for graphs that are replayed."""

    def allowed(read: Callable[[Sequence[Unread]], None]) -> Callable[[Sequence[Unread]], None]:
        def reading(pending: Sequence[Unread]) -> None:
            torch.cuda.set_sync_debug_mode("default")
            read(pending)
            torch.cuda.set_sync_debug_mode("error")

        return reading

    target, planner = static_target("cuda"), Planner(CostCurve())
    for _ in range(3):  # every size that comes has been captured
        played(target, sampling)
    running = sequences(target, sampling, 3)
    for sequence in running if constrained else ():
        sequence.shape = constraints()
    monkeypatch.setattr(judging, "read_together", allowed(read_together))
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            step(running, target, planner)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(sequence.error is None for sequence in running), [sequence.error for sequence in running]
