"""Block drafts, trained here or published as DFlash: what a block believes, the candidates that it gives, refusals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.published_heads import (
    BLOCK_FORMS,
    COVERED,
    DFLASH,
    ZLAB,
    BlockFormula,
    block_weights,
    with_layers,
    write_head,
)
from helpers.small_engines import PROMPT, AlwaysOpen
from helpers.tiny_block import settings_for, tiny_block_draft, tiny_pair
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams
from precedent.drafters import Drafter, Request, load_draft
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, ModelLoadError
from precedent.planning.costs import CostCurve
from precedent.target import Slot, TargetModel
from precedent_drafts.block_draft import BlockDraft, load_block_draft, save_block_draft
from precedent_drafts.block_drafter import BlockDrafter, BlockModel, best_first
from precedent_drafts.training.blocks import block_rows
from precedent_drafts.training.lessons import Teacher, Text
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

Floats = NDArray[np.float64]


# The best tree of a block


def paths_of(first: Floats, steps: Floats, ends: NDArray[np.bool_], budget: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for depth, choice, parent in zip(*(each.tolist() for each in best_first(first, steps, ends, budget)), strict=True):
        paths.append((choice,) if parent < 0 else (*paths[parent], choice))
        assert len(paths[-1]) == depth + 1
    return paths


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 7, 30, 500])
def test_the_tree_holds_the_likeliest_paths(seed: int, budget: int) -> None:
    """Against brute force, in the order of their probability, whatever ends where; parents come first."""
    random = np.random.default_rng(seed)
    first, steps = random.dirichlet([0.4] * 4), random.dirichlet([0.4] * 4, size=(3, 4))
    ends, known = random.random((4, 4)) < 0.2, dict[tuple[int, ...], float]()
    for path in (path for length in range(1, 5) for path in product(range(4), repeat=length)):
        if not any(ends[depth, choice] for depth, choice in enumerate(path[:-1])):
            later = (steps[depth - 1, path[depth - 1], path[depth]] for depth in range(1, len(path)))
            known[path] = float(np.prod([first[path[0]], *later]))
    assert paths_of(first, steps, ends, budget) == sorted(known, key=lambda path: -known[path])[:budget]


# What a block believes


@torch.inference_mode()
def expected_rows(
    target: TargetModel, draft: BlockDraft, tokens: Sequence[int], text: Sequence[int], first: int = 0
) -> Tensor:
    """The rows of a block behind a text from its token `first` on, as training computes them, `[block_size, width]`."""
    teacher = Teacher(target.model, draft.settings.reads, len(text))
    states = teacher.shard([Text((*text, 0), 1)]).lessons[0].states[:-1]
    rows = block_rows(draft, states[first:], torch.tensor([list(tokens)]), torch.tensor([len(states) - first]))
    found: Tensor = draft.head(rows[0, 1:])
    return found


def masked(draft: BlockDraft, text: Sequence[int]) -> list[int]:
    return [text[-1], *[draft.inputs.mask_id] * draft.settings.block_size]


def published(
    form: str, windows: dict[str, Any], folder: Path
) -> tuple[TargetModel, BlockModel, Callable[..., Tensor]]:
    """A published draft beside its target, and its makers' formula."""
    config = with_layers(BLOCK_FORMS[form], windows)
    weights = block_weights(config, COVERED if form == "speculators" else None)
    target = TargetModel(tiny_causal_lm(scale=1.5, num_hidden_layers=4))
    model = BlockModel(load_draft(write_head(folder, config, weights), target.model, byte_tokenizer()), target)  # type: ignore[arg-type]
    assert model.token_ids.tolist() == list(COVERED if form == "speculators" else range(259))
    formula = BlockFormula(config, weights, tiny_causal_lm(scale=1.5, num_hidden_layers=4), (1, 3))
    return target, model, lambda text, first: formula.block(text)


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "use_sliding_window": True}


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["", "a window"])
@pytest.mark.parametrize("form", ["trained", *BLOCK_FORMS])
def test_a_block_is_what_the_formula_says_step_after_step(form: str, windows: dict[str, Any], tmp_path: Path) -> None:
    """Behind prompts of any length and after commits of any size, for several requests in one forward."""
    if form == "trained":
        if windows:
            pytest.skip("those that are trained here have no windows")
        target, model = tiny_pair()

        def formula(text: Sequence[int], first: int) -> Tensor:
            return expected_rows(target, model.draft, masked(model.draft, text), text, first)[:, :-1]
    else:
        target, model, formula = published(form, windows, tmp_path)  # type: ignore[assignment]
    choose = random.Random(3)
    shortest = 2 if form == "trained" else 1  # training knows no block behind a single token
    slots = [prefilled(target, random_ids(seed, count)) for seed, count in ((1, 60), (2, shortest), (3, 9))]
    places = [model.place_beside(lambda slot=slot: slot, len(slot.token_ids) + 1) for slot in slots]  # type: ignore[misc]
    assert [place.first for place in places] == [35 if form == "trained" else 0, 0, 0]
    for step in range(3):
        filled = model.fill([(place, slot.pending) for place, slot in zip(places, slots, strict=True)])
        for place, slot, block in zip(places, slots, filled, strict=True):
            expected = formula([*slot.token_ids, slot.pending], place.first)
            torch.testing.assert_close(block.logits.double(), expected, rtol=0, atol=1e-4)
            tree = random_tree(step, 3)
            target.score([(slot, tree)])
            target.commit(slot, tree, tree.path_to(choose.randrange(3)), choose.randrange(250))


def test_further_iterations_fill_in_what_is_surest() -> None:
    """The second forward knows the surest half of the block; each row is of the last forward that masked it."""
    target, model = tiny_pair()
    again = BlockModel(tiny_block_draft(target.model, iterations=2), target)
    slot = prefilled(target, random_ids(7, 20))
    text = [*slot.token_ids, slot.pending]
    once = expected_rows(target, model.draft, masked(model.draft, text), text)[:, :-1]
    surest = set(once.softmax(-1).max(-1).values.topk(2).indices.tolist())
    row = masked(model.draft, text)
    for k in surest:
        row[k + 1] = int(once[k].argmax())
    twice = expected_rows(target, model.draft, row, text)[:, :-1]
    expected = torch.stack([once[k] if k in surest else twice[k] for k in range(4)])
    (found,) = again.fill([(again.place_beside(lambda: slot, len(text)), text[-1])])
    torch.testing.assert_close(found.logits.double(), expected, rtol=0, atol=1e-4)


# Candidates


def request_on(slot: Slot, num_tokens: int | None = None) -> Request:
    context = (*slot.token_ids, slot.pending)
    return Request("r", context, SamplingParams(), target_slot=lambda: slot, num_tokens=num_tokens)


def test_candidates_are_tokens_that_head_and_tokenizer_cover(tmp_path: Path) -> None:
    """Rows of a reduced head stand for the tokens that d2t names; padding ids are never proposed."""
    target, model, _ = published("speculators", {}, tmp_path)
    slot = prefilled(target, random_ids(4, 20))
    candidates = BlockDrafter(model).begin(request_on(slot)).match(12)
    assert len(candidates) == 12
    assert set(candidates.token_ids) <= set(COVERED)
    target, model = tiny_pair()
    candidates = BlockDrafter(model).begin(request_on(prefilled(target, random_ids(9, 20)), num_tokens=5)).match(64)
    assert len(candidates) > 0
    assert max(candidates.token_ids) < 5


@cache
def place_of(condition: str, prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = tiny_pair(condition=condition)
    slot = prefilled(target, list(prompt)) if prompt else target.new_slot()
    return lambda: slot


@pytest.mark.parametrize("condition", ["target", "none"])
class TestBlockDrafter(DrafterContract):
    """The contract of every drafter, for drafts that read their target and for those that read tokens alone."""

    vocab_size = 259

    @pytest.fixture(autouse=True)
    def _conditioned(self, condition: str) -> None:
        self.condition = condition

    def make_drafter(self) -> Drafter:
        return BlockDrafter(tiny_pair(condition=self.condition)[1])

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(self.condition, request.prompt_ids))


# Folders


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_causal_lm(scale=1.5)


def test_a_folder_is_a_draft_model(model: PreTrainedModel, tmp_path: Path) -> None:
    """What is saved is loaded, in eight bits, by the same name as any draft model."""
    draft = tiny_block_draft(model, range(0, 259, 2))
    save_block_draft(tmp_path, draft, torch.float64)
    again = load_draft(tmp_path, model, byte_tokenizer())
    assert again.settings == draft.settings  # type: ignore[union-attr]
    for name, weight in load_block_draft(tmp_path, model).own_weights().items():
        expected = draft.own_weights()[name]
        torch.testing.assert_close(weight, expected, rtol=0, atol=0.005 * float(expected.abs().max()))
    engine = Engine(model, byte_tokenizer(), name="tiny", cost=CostCurve(), draft_model=tmp_path)
    engine.planner.gates["block-draft"] = AlwaysOpen()
    assert engine.submit(PROMPT, SamplingParams(max_tokens=8)).result().stats.drafted_by_source["block-draft"] > 0
    engine.close()


def test_a_draft_of_tokens_alone_says_so_and_fits_other_layers(
    model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no fusion, the target keeps nothing for it, and another target of the same embeddings is a warning."""
    target = TargetModel(model)
    before = target.kv_shape
    save_block_draft(tmp_path, tiny_block_draft(model, condition="none"), torch.float64)
    loaded = load_block_draft(tmp_path, model)
    assert (loaded.settings.condition, loaded.settings.reads, loaded.fusion) == ("none", (), None)
    assert not [name for name in loaded.own_weights() if name.startswith("fusion")]
    BlockModel(loaded, target)
    assert target.kv_shape == before
    assert caplog.messages == []
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.5)
    load_block_draft(tmp_path, model)
    assert "fewer of its tokens will be accepted" in caplog.messages[0]
    BlockModel(tiny_block_draft(model), target)
    assert target.kv_shape != before


def test_whole_heads_are_the_target_s_own_and_rotary_embeddings_stay_wide(tmp_path: Path) -> None:
    """No second copy of the largest matrix; and frequencies in bfloat16 would be wrong after some tokens."""
    model = tiny_causal_lm(dtype=torch.bfloat16)
    draft: Any = load_draft(write_head(tmp_path, ZLAB, block_weights(ZLAB)), model, byte_tokenizer())
    assert draft.dtype == torch.bfloat16
    assert draft.head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert draft.model.rotary_emb.inv_freq.dtype == torch.float32


def test_drafts_that_do_not_fit_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    """Another target's embeddings or layers, a torn file, another format, and settings that nothing supports."""
    save_block_draft(tmp_path, tiny_block_draft(model), torch.float64)
    deeper = tiny_causal_lm(scale=1.5)
    with torch.no_grad():
        next(deeper.base_model.layers.parameters()).add_(1.0)
    with pytest.raises(ModelLoadError, match="uses its embeddings, which differ"):
        load_draft(tmp_path, tiny_causal_lm(seed=5), byte_tokenizer())
    with pytest.raises(ModelLoadError, match="reads the layers of"):
        load_draft(tmp_path, deeper, byte_tokenizer())
    config = tmp_path / "config.json"
    good = config.read_text(encoding="utf-8")
    for old, new, says in (
        ('"format": 1', '"format": 2', "has format 2"),
        ('"markov_rank": 6', '"markov_rank": 7', r"do not fit its config: markov"),
        ('"num_head_tokens": 259', '"num_head_tokens": 200', r"do not fit its config: head.token_ids"),
        ('"block_size": 4', '"block_size": 40', "must lie between 2 and 16"),
        ('"reads": [', '"read": [', "cannot be read"),
        ('"condition": "target"', '"condition": "none"', "does not fit the condition none"),
        ('"condition": "target"', '"condition": "words"', "must be target or none"),
    ):
        assert old in good
        config.write_text(good.replace(old, new), encoding="utf-8")
        with pytest.raises(ModelLoadError, match=says):
            load_draft(tmp_path, model, byte_tokenizer())
    with pytest.raises(ModelLoadError, match="condition"):
        settings_for(model, 259, reads=())
    with pytest.raises(ConfigError, match="has the layers 1 to 3"):
        BlockModel(tiny_block_draft(model, reads=(2, 9)), TargetModel(model))
    with pytest.raises(ConfigError, match="block-draft reads the layers of its target"):
        BlockDrafter(tiny_pair()[1]).begin(Request("r", (1, 2, 3), SamplingParams()))
    folder = write_head(tmp_path / "published", DFLASH, block_weights(DFLASH, COVERED))
    with pytest.raises(ConfigError, match="runs beside its target, on cpu: leave out draft_device"):
        load_draft(folder, tiny_causal_lm(), byte_tokenizer(), device="meta")
