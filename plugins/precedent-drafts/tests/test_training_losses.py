"""What each kind of draft learns: the written loss, against autograd, and what was trained is what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.conditioned import random_conditioned
from helpers.hybrids import prefilled
from helpers.tiny_block import settings_for, tiny_block_draft
from helpers.tiny_draft import PROMPTS, tiny_target, train_tiny
from torch import Tensor
from torch.nn.functional import silu, smooth_l1_loss

from precedent.drafters import load_draft
from precedent.target import TargetModel
from precedent.target.load.first_layers import base_of, first_layers
from precedent.tree import EMPTY_TREE
from precedent_drafts.block_drafter import BlockModel
from precedent_drafts.heads import HEAD_TOKENS, reading_hidden_states
from precedent_drafts.trained import (
    TOKEN_GUIDED,
    exit_beside,
)
from precedent_drafts.training.blocks import BlockRecipe, BlockStudent, block_rows, blocks_of
from precedent_drafts.training.chains import (
    ChainRecipe,
    ChainStudent,
    ConditionedRecipe,
    ConditionedStudent,
    ExitRecipe,
    ExitStudent,
    entries_of,
)
from precedent_drafts.training.lessons import Lesson, Teacher, Text
from precedent_drafts.training.training import Plan, Student
from precedent_testing.tiny_models import byte_tokenizer

TEXT = Text((5, 6, 7, 30, 31, 5, 9, 200, 7, 8), 7, (True, True, True, False, True, True, True))
OTHER = Text((40, 41, 42, 43), 2)
IDS = torch.tensor([1, 5, 7, 8, 9, 30, 31, 200])


def lessons_of(target: Any, reads: Sequence[int] | None = (), context_tokens: int = 8) -> Sequence[Lesson]:
    return Teacher(target, reads, context_tokens).shard([TEXT, OTHER]).lessons


def lesson_of(target: Any, reads: Sequence[int] | None = (), context_tokens: int = 8) -> Lesson:
    return lessons_of(target, reads, context_tokens)[0]


def opinionated(student: Student, scale: float = 0.3) -> None:
    """Let the weights of a student differ from those with which it begins."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in student.by_name.items():
            if "norm" not in name and not name.startswith("layers."):
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * scale)


def check_gradients(student: Student, lessons: Sequence[Lesson], expected: Any, rtol: float = 1e-7) -> None:
    """Raise AssertionError unless loss and gradients are those of `expected`, a function to a traced loss."""
    loss = student.learn(lessons, 0)
    found = {name: weight.grad.clone() for name, weight in student.by_name.items() if weight.grad is not None}
    student.optimizer.zero_grad(set_to_none=True)
    written = expected()
    written.backward()
    assert loss == pytest.approx(float(written.detach()), abs=1e-9)
    for name, weight in student.by_name.items():
        torch.testing.assert_close(found[name], weight.grad, rtol=rtol, atol=1e-8)


# Chains and exits


@pytest.mark.parametrize("head_tokens", [None, IDS])
def test_a_chain_learns_the_forward_divergence(head_tokens: Tensor | None) -> None:
    """On the whole vocabulary with the target's own logits; every token to learn weighs the same.

    The draft sees less context than the target.
    """
    target = tiny_target()
    student = ChainStudent(target, head_tokens, ChainRecipe(layers=1, context_tokens=2))
    known = torch.arange(259) if head_tokens is None else head_tokens

    def expected() -> Tensor:
        terms = []
        for text, first, learned in ((TEXT, 1, (3, 4, 5, 7, 8, 9)), (OTHER, 0, (2, 3))):
            with torch.no_grad():
                distributions = target(torch.tensor([text.token_ids])).logits[0].softmax(-1)
            log_probs = (student.hidden(text.token_ids[first:-1]) @ target.lm_head.weight[known].T).log_softmax(-1)
            terms += [-(distributions[token - 1, known] * log_probs[token - 1 - first]).sum() for token in learned]
        return torch.stack(terms).mean()

    check_gradients(student, lessons_of(target), expected)


def test_an_exit_learns_divergence_and_distance() -> None:
    """Cross-entropy, and distance of final hidden states."""
    target = tiny_target()
    student = ExitStudent(target, IDS, ExitRecipe(exit_layer=2, exit_width=16))
    opinionated(student)

    def expected() -> Tensor:
        terms, adapter = [], student.adapter
        for text, learned in ((TEXT, (3, 4, 5, 7, 8, 9)), (OTHER, (2, 3))):
            with torch.no_grad():
                run = target(torch.tensor([text.token_ids]), output_hidden_states=True)
            for token in learned:
                entered, wanted = run.hidden_states[2][0, token - 1], run.hidden_states[-1][0, token - 1]
                normed = entered * (entered.square().mean() + 1e-6).rsqrt() * adapter.norm.weight
                gated = silu(adapter.gate_proj.weight @ normed) * (adapter.up_proj.weight @ normed)
                changed = entered + adapter.map_proj.weight @ normed + adapter.down_proj.weight @ gated
                hidden = target.model.norm(changed)
                probs, log_probs = run.logits[0, token - 1].softmax(-1)[IDS], target.lm_head.weight[IDS] @ hidden
                crossed = -(probs * log_probs.log_softmax(-1)).sum()
                terms.append(crossed + (hidden - wanted).square().sum() / wanted.square().sum())
        return torch.stack(terms).mean()

    check_gradients(student, Teacher(target, (2,)).shard([TEXT, OTHER]).lessons, expected)


def test_an_untrained_exit_is_the_first_layers_and_a_trained_one_runs_as_it_was_trained(tmp_path: Any) -> None:
    """A new adapter changes nothing; the folder's draft gives the rows that training computed."""
    target, tokens = tiny_target(), torch.tensor([[3, 1, 4, 1, 5]])
    student = ExitStudent(target, None, ExitRecipe(exit_layer=2, exit_width=16))
    with torch.inference_mode():
        draft = exit_beside(target, 2, {**student.weights(), HEAD_TOKENS: torch.arange(259)})
        assert torch.equal(draft(tokens).logits, first_layers(target, 2)(tokens).logits)
    recipe = ExitRecipe(exit_layer=2, exit_width=16, head_tokens=96, answer_tokens=12, chunk_prompts=8)
    train_tiny(tmp_path, recipe, Plan(1, 0, 2), prompts=PROMPTS)
    loaded: Any = load_draft(tmp_path, target, byte_tokenizer())
    known = loaded.lm_head.token_ids
    with torch.no_grad():
        rows = loaded.base_model.norm(lesson_of(target, (2,), 0).states) @ target.lm_head.weight[known].T
        torch.testing.assert_close(loaded(torch.tensor([TEXT.token_ids[:-1]])).logits[0, -7:, known], rows)


# Chains that read their target


def conditioned(target: Any, **settings: Any) -> ConditionedStudent:
    """A student whose fusion has opinions."""
    student = ConditionedStudent(target, IDS, ConditionedRecipe(layers=2, fusion=TOKEN_GUIDED, **settings))
    opinionated(student)
    return student


def test_passes_of_a_conditioned_chain_are_its_draws() -> None:
    """Pass after pass gives the logits that the runtime computes draw after draw, given the same tokens."""
    target = tiny_target()
    student = conditioned(target, passes=3)
    with torch.no_grad():
        outputs = student.outputs(entries_of(lesson_of(target, None)))
    wrapped, committed = TargetModel(target), 3  # tokens; the entry that predicts the next one is number 1
    draft = random_conditioned(target, (0, 2), TOKEN_GUIDED, student.weights())
    head = reading_hidden_states(draft, wrapped, feeds_back_normed=True)
    slot, drafted = prefilled(wrapped, list(TEXT.token_ids[:committed])), head.new_slot()
    head.bind(drafted, lambda: slot)
    head.prefill(drafted, TEXT.token_ids[1:committed])
    for number in range(3):
        row = head.plain_step(drafted)[0][IDS]
        expected = outputs[number][committed - 2 + number] @ target.lm_head.weight[IDS].T
        torch.testing.assert_close(row.double(), expected.detach(), rtol=0, atol=1e-4)
        head.commit(drafted, EMPTY_TREE, (), TEXT.token_ids[committed + number])


# Block drafts

SHAPE = {"hidden_size": 32, "head_dim": 8}


@pytest.mark.parametrize("condition", ["target", "none"])
def test_blocks_are_trained_as_they_run(condition: str) -> None:
    """The rows of several blocks of one text equal those that the runtime computes behind each anchor."""
    target = tiny_target()
    draft = tiny_block_draft(target, condition=condition, **SHAPE)
    lesson = lesson_of(target, draft.settings.reads, 24)
    wrapped = TargetModel(target)
    model = BlockModel(draft, wrapped)
    blocks = blocks_of(lesson, draft, 4, 0.0, np.random.default_rng(1))
    read = lesson.states if draft.settings.reads else lesson.read_ids
    with torch.no_grad():
        expected = draft.head.rows(block_rows(draft, read, blocks.tokens, blocks.starts)[:, 1:])
    for tokens, start, found in zip(blocks.tokens.tolist(), blocks.starts.tolist(), expected, strict=True):
        slot = prefilled(wrapped, list(TEXT.token_ids[: lesson.first + start + 1]))
        assert slot.pending == tokens[0]
        (block,) = model.fill([(model.place_beside(lambda slot=slot: slot, 3), tokens[0])])  # type: ignore[misc]
        torch.testing.assert_close(block.logits.double(), found, rtol=0, atol=1e-4)


def test_blocks_learn_only_the_targets_words() -> None:
    """A block ends before the first token that is not learned, and at the end of the text."""
    target = tiny_target()
    lesson, draft = lesson_of(target, (1, 3)), tiny_block_draft(target, **SHAPE)
    assert lesson.anchors == [2, 3, 4, 6, 7, 8]
    blocks = blocks_of(lesson, draft, 9, 0.0, np.random.default_rng(1))
    assert bool((blocks.tokens[:, 1:] == draft.inputs.mask_id).all())
    assert blocks.tokens[:, 0].tolist() == [TEXT.token_ids[int(start) + lesson.first] for start in blocks.starts]
    by_start = {int(start) + lesson.first: place for place, start in enumerate(blocks.starts)}
    assert sorted(by_start) == [2, 3, 4, 6, 7, 8]
    assert blocks.counts[by_start[2]].tolist() == [True, True, True, False]
    assert blocks.counts[by_start[7]].tolist() == [True, True, False, False]
    assert blocks.before[by_start[2]].tolist() == [7, 30, 31, 5]
    assert blocks.rows[by_start[2]].tolist() == [0, 1, 2, 3]


def outputs_one_by_one(student: ConditionedStudent, draft: Any, entries: Any, number: int) -> list[Tensor]:
    """Every entry of every pass, each from a forward of its own over what drafting would have read."""
    found: list[Tensor] = []
    for done in range(number):
        rows = []
        for place in range(len(entries.states)):
            states = entries.states.clone()
            for back in range(min(done, place)):  # the entry's own state is of the pass before, and so on
                states[place - back] = found[done - 1 - back][place - back - 1].detach()
            fused = student.inputs.fusion(student.inputs.embeddings(entries.token_ids), states)[: place + 1]
            rows.append(base_of(draft)(inputs_embeds=fused[None], use_cache=False)[0][0, -1])
        found.append(torch.stack(rows))
    return found


@pytest.mark.parametrize("mask_top_k", [0, 6])
def test_a_conditioned_chain_learns_the_written_loss(mask_top_k: int) -> None:
    """On forwards of single entries: mean over passes of divergence and smooth L1, masked, over all texts."""
    target = tiny_target()
    student, lessons = conditioned(target, passes=3, mask_top_k=mask_top_k), lessons_of(target, None)
    counts = [0] * 3

    def expected() -> Tensor:
        losses = [torch.zeros((), dtype=torch.float64)] * 3
        for lesson, text in zip(lessons, (TEXT, OTHER), strict=True):
            entries = entries_of(lesson)
            outputs, counted = outputs_one_by_one(student, student.model, entries, 3), entries.learned
            with torch.no_grad():
                probs = target(torch.tensor([text.token_ids])).logits[0, 1:-1].softmax(-1)
            for number, rows in enumerate(outputs):
                logits = rows @ target.lm_head.weight[IDS].T
                if number:
                    before = outputs[number - 1] @ target.lm_head.weight[IDS].T
                    likely = torch.tensor([
                        not mask_top_k or int(entries.next_ids[place]) in IDS[before[place].topk(mask_top_k).indices]
                        for place in range(len(rows))
                    ])  # fmt: skip
                    after = torch.tensor([False, *counted[:-1].tolist()])
                    counted = entries.learned & after & likely
                counts[number] += int(counted.sum())
                crossed = -(probs[:, IDS] * logits.log_softmax(-1)).sum(-1)
                distance = smooth_l1_loss(rows, entries.wanted, reduction="none").mean(-1)
                losses[number] = losses[number] + (crossed + distance)[counted].sum()
        return sum(loss / count / 3 for loss, count in zip(losses, counts, strict=True))  # type: ignore[return-value]

    check_gradients(student, lessons, expected, rtol=1e-6)
    assert counts == [8, 5, 2] if not mask_top_k else counts[2] > 0 and sum(counts) < 15


@pytest.mark.parametrize("condition", ["target", "none"])
def test_a_block_draft_learns_the_written_loss(condition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the cross-entropy and half the total variation to the target's own logits, faded by depth.

    The gradient reaches what the layers make of the text, not only of the block; the confidence's reaches itself alone.
    """
    target = tiny_target()
    settings = settings_for(target, IDS.numel(), condition=condition, **SHAPE)
    monkeypatch.setattr(BlockRecipe, "settings", lambda *_: settings)  # of a shape that no recipe has
    student = BlockStudent(target, BlockRecipe(layers=2), IDS)
    lesson = lesson_of(target, settings.reads)
    with torch.no_grad():
        student.draft.markov.right.normal_()
        student.draft.head.confidence.weight.normal_()
    blocks = blocks_of(lesson, student.draft, 6, 0.0, np.random.default_rng(2))
    read = lesson.states if settings.reads else lesson.read_ids
    kept = [
        tuple(part.detach().requires_grad_(True) for part in pair) for pair in student.draft.keys_and_values(read, 0)
    ]
    student.draft.keys_and_values = lambda *_: kept  # type: ignore[method-assign,assignment,return-value]
    reached = [*student.by_name.values(), *(part for pair in kept for part in pair)]
    loss = student.loss(lesson, blocks)
    found = torch.autograd.grad(loss, reached, materialize_grads=True)
    assert all(float(part.abs().sum()) > 0 for part in found[-2 * len(kept) :])
    with torch.no_grad():
        true = target(torch.tensor([TEXT.token_ids])).logits[0].softmax(-1)
    hidden = block_rows(student.draft, read, blocks.tokens, blocks.starts)[:, 1:]
    total = weight = torch.zeros((), dtype=torch.float64)
    for block, start in enumerate(blocks.starts.tolist()):
        for depth in blocks.counts[block].nonzero()[:, 0].tolist():
            place = lesson.first + start + depth  # the token before the position
            column = IDS.tolist().index(TEXT.token_ids[place]) if TEXT.token_ids[place] in IDS.tolist() else 8
            bias = student.draft.markov.left[column] @ student.draft.markov.right
            draft = (target.lm_head.weight[IDS] @ hidden[block, depth] + bias).softmax(-1)
            unknown = 1 - true[place][IDS].sum()
            varied = 0.5 * ((draft - true[place][IDS]).abs().sum() + unknown)
            crossed = -(true[place][IDS] * draft.log()).sum()
            sure = student.draft.head.confidence(hidden[block, depth].detach()).sigmoid()
            rejected = varied.detach()
            doubt = -((1 - rejected) * sure.log() + rejected * (1 - sure).log()).sum()
            fading = torch.exp(torch.tensor(-depth / 4.0, dtype=torch.float64))
            total = total + fading * (0.5 * crossed + 0.5 * varied + 0.1 * doubt)
            weight = weight + fading
    assert float(loss.detach()) == pytest.approx(float((total / weight).detach()), abs=1e-6)
    for part, written in zip(found, torch.autograd.grad(total / weight, reached, materialize_grads=True), strict=True):
        torch.testing.assert_close(part, written, rtol=1e-5, atol=1e-7)


def test_texts_weigh_the_same_and_known_positions_of_a_block_are_not_learned() -> None:
    """Known positions hold the true token; a block that is known altogether learns its first position."""
    target = tiny_target()
    student = BlockStudent(target, BlockRecipe(layers=1, block_size=4), torch.arange(259))
    lessons = lessons_of(target, student.draft.settings.reads)
    alone = [student.learn([lesson], 0) for lesson in lessons]  # of all blocks of a text, in whichever order
    assert student.learn(lessons, 0) == pytest.approx(sum(alone) / 2)
    blocks = blocks_of(lessons[0], student.draft, 9, 1.0, np.random.default_rng(1))
    known = blocks.tokens[:, 1:] != student.draft.inputs.mask_id
    ids = torch.tensor([*TEXT.token_ids, *[0] * 9])
    places = blocks.starts[:, None] + lessons[0].first + 1 + torch.arange(4)
    assert 0 < int(known.sum()) < known.numel()
    assert torch.equal(blocks.tokens[:, 1:][known], ids[places][known])
    assert bool(blocks.counts.any(1).all())
    assert not bool((blocks.counts & known)[:, 1:].any())
