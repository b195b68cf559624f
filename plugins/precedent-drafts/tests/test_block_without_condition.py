"""A block draft that reads no target (SpecDec, 2203.16487): its own layers over the tokens, and what that spares."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.tiny_block import settings_for, tiny_block_draft, tiny_pair
from helpers.tiny_draft import PROMPTS, tiny_target
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter
from precedent.drafters.request import Request
from precedent.errors import ModelLoadError
from precedent.target import Slot, TargetModel
from precedent_drafts.block_draft import BlockDraft, load_block_draft, save_block_draft
from precedent_drafts.block_drafter import BlockDrafter
from precedent_drafts.block_model import BlockModel
from precedent_drafts.training.block_lessons import BlockTeacher
from precedent_drafts.training.block_recipe import BlockRecipe
from precedent_drafts.training.block_student import BlockStudent, block_rows, blocks_of
from precedent_drafts.training.block_training import BlockTraining
from precedent_drafts.training.lesson_plan import LessonPlan
from precedent_drafts.training.texts import Text
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
RECIPE = BlockRecipe(
    num_layers=1, condition="none", block_size=3, head_tokens=96, markov_rank=8, context_tokens=8, answer_tokens=12,
    chunk_prompts=8, batch_texts=4, anchors=6, learning_rate=3e-3,
)  # fmt: skip
TEXT = Text((5, 6, 7, 30, 31, 5, 9, 200, 7, 8), 7)


def written_out(draft: BlockDraft, text: Sequence[int]) -> Tensor:
    """All rows at once: each token of the text sees those before it, and every row of the block sees all."""
    tokens = [*text, *[draft.inputs.mask_id] * draft.settings.block_size]
    count, hidden, dim = len(tokens), draft.inputs(torch.tensor(tokens)), draft.settings.head_dim
    seen = torch.tril(torch.ones(count, count)).bool()
    seen[len(text) - 1 :] = True
    turns = draft.model.rotary_emb(hidden[None], position_ids=torch.arange(count)[None])
    cos, sin = (turn[0, :, None] for turn in turns)

    def turned(rows: Tensor) -> Tensor:
        heads = rows.view(count, -1, dim)
        return heads * cos + torch.cat([-heads[..., dim // 2 :], heads[..., : dim // 2]], -1) * sin

    for layer in draft.model.layers:
        attention, before = layer.self_attn, layer.input_layernorm(hidden)
        parts = [turned(attention.q_proj(before)), turned(attention.k_proj(before)), attention.v_proj(before)]
        query, key, value = (part.view(count, -1, dim).transpose(0, 1) for part in parts)
        groups = draft.settings.num_heads // draft.settings.num_kv_heads
        wide = (part.repeat_interleave(groups, 0) for part in (key, value))
        read = scaled_dot_product_attention(query, *wide, attn_mask=seen).transpose(0, 1).flatten(1)
        hidden = hidden + attention.o_proj(read)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    found: Tensor = draft.head(draft.model.norm(hidden))[len(text) :]
    return found


def request_on(slot: Slot, sampling: SamplingParams | None = None) -> Request:
    context = (*slot.token_ids, slot.pending)
    return Request("r", context, sampling or SamplingParams(), target_slot=lambda: slot)


def test_a_block_is_what_the_formula_says_step_after_step() -> None:
    """Behind a prompt of which it sees the end, and after commits of any size, for two requests in one forward."""
    target, model = tiny_pair(condition="none")
    choose = random.Random(3)
    slots = [prefilled(target, random_ids(seed, count)) for seed, count in ((1, 60), (2, 1))]
    places = [model.place_beside(lambda slot=slot: slot, len(slot.token_ids) + 1) for slot in slots]  # type: ignore[misc]
    assert [place.first for place in places] == [35, 0]
    for step in range(3):
        filled = model.fill([(place, slot.pending) for place, slot in zip(places, slots, strict=True)])
        for place, slot, block in zip(places, slots, filled, strict=True):
            with torch.inference_mode():
                expected = written_out(model.draft, [*slot.token_ids, slot.pending][place.first :])
            torch.testing.assert_close(block.logits.double(), expected[:, :-1], rtol=0, atol=1e-4)
            torch.testing.assert_close(block.confidence.double(), expected[:, -1].sigmoid(), rtol=0, atol=1e-4)
            tree = random_tree(step, 3)
            target.score([(slot, tree)])
            target.commit(slot, tree, tree.path_to(choose.randrange(3)), choose.randrange(250))


def test_what_is_trained_is_what_runs() -> None:
    """The rows of several blocks of one text are those that the runtime computes behind each anchor."""
    target = tiny_target()
    draft = tiny_block_draft(target, hidden_size=32, head_dim=8, condition="none")
    lesson = BlockTeacher(target, (), 24).shard([TEXT]).lessons[0]
    assert lesson.states.shape == (9, 0)
    blocks = blocks_of(lesson, draft, 4, 0.0, np.random.default_rng(1))
    with torch.no_grad():
        rows = draft.head(block_rows(draft, lesson.read_ids, blocks.tokens, blocks.starts)[:, 1:])
        for start, found in zip(blocks.starts.tolist(), rows, strict=True):
            torch.testing.assert_close(found, written_out(draft, TEXT.token_ids[: start + 1]), rtol=0, atol=1e-6)


def test_its_layers_learn_from_the_text_too() -> None:
    """The gradient reaches what the layers make of the text, not only of the block."""
    target, ids = tiny_target(), torch.arange(259)
    student = BlockStudent(
        target, settings_for(target, 259, hidden_size=32, head_dim=8, condition="none"), ids, (0, 2), 1e-3
    )
    lesson = BlockTeacher(target, (), 24).shard([TEXT]).lessons[0]
    blocks = blocks_of(lesson, student.draft, 4, 0.0, np.random.default_rng(1))
    kept = [
        tuple(part.detach().requires_grad_(True) for part in pair)
        for pair in student.draft.keys_and_values(lesson.read_ids, 0)
    ]
    student.draft.keys_and_values = lambda *_: kept  # type: ignore[method-assign]
    student.loss(lesson, blocks).backward()
    assert all(float(part.grad.abs().sum()) > 0 for pair in kept for part in pair if part.grad is not None)
    assert all(part.grad is not None for pair in kept for part in pair)


def test_a_draft_is_trained_saved_and_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside its target; beside another one of the same embeddings with a warning, since it reads no layers."""
    train = BlockTraining(tiny_target(), TOKENIZER, PROMPTS, RECIPE, tmp_path / "draft")
    draft = train.run(LessonPlan(2, 0, 4)).draft
    assert isinstance(draft, BlockDraft)
    assert (draft.settings.condition, draft.settings.reads, draft.fusion) == ("none", (), None)
    target = tiny_target()
    load_block_draft(tmp_path / "draft", target)
    assert caplog.messages == []
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.add_(0.5)
    load_block_draft(tmp_path / "draft", target)
    assert "fewer of its tokens will be accepted" in caplog.messages[0]


def test_the_target_keeps_nothing_for_it() -> None:
    """No outputs of layers beside the keys and values."""
    model = tiny_causal_lm()
    target = TargetModel(model)
    before = target.kv_shape
    BlockModel(tiny_block_draft(model, condition="none"), target)
    assert target.kv_shape == before
    BlockModel(tiny_block_draft(model), target)
    assert target.kv_shape != before


@cache
def place_of(prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = tiny_pair(condition="none")
    slot = prefilled(target, list(prompt)) if prompt else target.new_slot()
    return lambda: slot


class TestBlockWithoutCondition(DrafterContract):
    """The contract of every drafter."""

    vocab_size = 259

    def make_drafter(self) -> Drafter:
        """A random draft of a tiny Llama."""
        return BlockDrafter(tiny_pair(condition="none")[1])

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(request.prompt_ids))


@pytest.mark.parametrize("changes", [{"condition": "words"}, {"condition": "none", "reads": (1,)}, {"reads": ()}])
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, object]) -> None:
    """What is read follows from the condition."""
    with pytest.raises(ModelLoadError, match="condition"):
        settings_for(tiny_causal_lm(), 259, **changes)


def test_a_saved_draft_says_its_condition(tmp_path: Path) -> None:
    """And has no fusion among its weights."""
    target = tiny_causal_lm()
    save_block_draft(tmp_path, tiny_block_draft(target, condition="none"), torch.float64)
    loaded = load_block_draft(tmp_path, target)
    assert loaded.settings.condition == "none"
    assert not [name for name in loaded.own_weights() if name.startswith("fusion")]
