"""A chain that reads its target: passes, masks and loss are the written ones, and what is trained is what runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conditioned import random_conditioned
from helpers.killed import check_killed_training
from helpers.tiny_draft import PROMPTS, tiny_target
from torch import Tensor
from torch.nn.functional import silu, smooth_l1_loss

from precedent.errors import ConfigError, UnsupportedError
from precedent.target import TargetModel
from precedent.target.load.first_layers import base_of
from precedent.tree import EMPTY_TREE
from precedent_drafts.conditioned import TOKEN_GUIDED, TokenGuidedFusion, conditioned_beside, fusion_of
from precedent_drafts.head import reading_hidden_states
from precedent_drafts.trained import draft_beside, initial_weights
from precedent_drafts.training.block_lessons import BlockLesson, BlockTeacher
from precedent_drafts.training.conditioned_student import (
    ConditionedStudent,
    Passes,
    check_passes,
    entries_of,
    reached_next,
    seen_in_pass,
)
from precedent_drafts.training.conditioned_training import ConditionedRecipe, ConditionedTraining
from precedent_drafts.training.lesson_plan import LessonPlan
from precedent_drafts.training.measure import Measurement
from precedent_drafts.training.teacher import Author
from precedent_drafts.training.texts import Text
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
RECIPE = ConditionedRecipe(
    num_layers=1, fusion=TOKEN_GUIDED, passes=2, mask_top_k=3, head_tokens=96, answer_tokens=12, chunk_prompts=8,
    batch_texts=4, context_tokens=8, learning_rate=3e-3,
)  # fmt: skip
PLAN = LessonPlan(chunks=2, completions=0, steps=6)
TEXT = Text((5, 6, 7, 30, 31, 5, 9, 200, 7, 8), 7, (True, True, True, False, True, True, True))
IDS = torch.tensor([1, 5, 7, 8, 9, 30, 31, 200])


def train(out: Path, recipe: ConditionedRecipe = RECIPE, plan: float | LessonPlan = PLAN, **settings: Any) -> Any:
    return ConditionedTraining(tiny_target(), TOKENIZER, PROMPTS, recipe, out, **settings).run(plan).draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained draft."""
    out = tmp_path_factory.mktemp("drafts") / "conditioned"
    train(out)
    return out


def lesson_of(target: Any) -> BlockLesson:
    return BlockTeacher(target, None, 8).shard([TEXT]).lessons[0]


def student_of(target: Any, passes: Passes, layers: tuple[int, ...] = (0, 2)) -> ConditionedStudent:
    """A student whose fusion has opinions."""
    student = ConditionedStudent(target, layers, IDS, TOKEN_GUIDED, passes, 1e-3)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in student._inputs.fusion.named_parameters():
            if "norm" not in name:
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.3)
    return student


# Passes


def test_an_entry_sees_what_drafting_left_behind_it() -> None:
    """In pass 2: two entries back and further as pass 0 left them, one back as pass 1 did, and itself."""
    seen = seen_in_pass(2, 4).reshape(4, 3, 4)
    assert seen[3].tolist() == [[True, True, False, False], [False, False, True, False], [False, False, False, True]]
    assert seen[1].tolist() == [[False] * 4, [True, False, False, False], [False, True, False, False]]
    assert torch.equal(seen_in_pass(0, 3), torch.tril(torch.ones(3, 3)).bool())


def test_a_token_counts_where_a_draft_could_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """If its predecessor counted in the pass before, and the pass before had it among the likeliest."""
    learned = torch.tensor([False, True, True, True, False, True, True])
    second = reached_next(learned, learned)
    assert second.tolist() == [False, False, True, True, False, False, True]
    assert reached_next(learned, second).tolist() == [False, False, False, True, False, False, False]
    student, hits = student_of(tiny_target(), Passes(3, 2, 0.0)), iter([[True, False, True, True], [False, True]])
    monkeypatch.setattr(student, "_among_likeliest", lambda rows, next_ids: torch.tensor(next(hits)))
    entries = entries_of(lesson_of(tiny_target()))
    masks = student.masks(entries, [torch.zeros(8, 32, dtype=torch.float64)] * 3)
    assert [mask.nonzero()[:, 0].tolist() for mask in masks] == [[1, 2, 3, 5, 6, 7], [2, 6, 7], [7]]


def test_entries_pair_a_state_with_the_token_behind_it() -> None:
    """And predict the token after that; what is learned is marked at the predicted token."""
    lesson = lesson_of(tiny_target())
    entries = entries_of(lesson)
    assert lesson.first == 0
    assert entries.token_ids.tolist() == list(TEXT.token_ids[1:-1])
    assert entries.next_ids.tolist() == list(TEXT.token_ids[2:])
    assert entries.learned.tolist() == [False, True, True, True, False, True, True, True]
    assert torch.equal(entries.states, lesson.states[:-1])
    assert torch.equal(entries.wanted[1:], lesson.hidden[:7])
    assert torch.equal(entries.log_total[1:], lesson.log_total)


def outputs_one_by_one(student: ConditionedStudent, entries: Any, number: int) -> list[Tensor]:
    """Every entry of every pass, each from a forward of its own over what drafting would have read."""
    found: list[Tensor] = []
    for done in range(number):
        rows = []
        for place in range(len(entries.states)):
            states = entries.states.clone()
            for back in range(min(done, place)):  # the entry's own state is of the pass before, and so on
                states[place - back] = found[done - 1 - back][place - back - 1].detach()
            embedded = student._inputs.embeddings(entries.token_ids)
            fused = student._inputs.fusion(embedded, states)[: place + 1]
            rows.append(base_of(student._model)(inputs_embeds=fused[None], use_cache=False)[0][0, -1])
        found.append(torch.stack(rows))
    return found


@pytest.mark.parametrize("mask_top_k", [0, 6])
def test_the_gradient_is_that_of_the_written_loss(mask_top_k: int) -> None:
    """Against autograd on forwards of single entries: mean over passes of divergence and smooth L1, masked."""
    target = tiny_target()
    student = student_of(target, Passes(3, mask_top_k, 0.7))
    entries = entries_of(lesson_of(target))
    loss = student.learn([lesson_of(target)])
    found = {name: weight.grad.clone() for name, weight in student._learned.by_name.items() if weight.grad is not None}
    student._learned.forget_gradients()
    outputs = outputs_one_by_one(student, entries, 3)
    with torch.no_grad():
        probs = target(torch.tensor([TEXT.token_ids])).logits[0, 1:-1].softmax(-1)
    total, counted = torch.zeros((), dtype=torch.float64), entries.learned
    for number, rows in enumerate(outputs):
        logits = rows @ target.lm_head.weight[IDS].T
        if number:
            before = outputs[number - 1] @ target.lm_head.weight[IDS].T
            places = [
                place for place in range(1, 8)
                if entries.learned[place] and counted[place - 1] and (not mask_top_k or int(entries.next_ids[place])
                in IDS[before[place].topk(mask_top_k).indices].tolist())
            ]  # fmt: skip
            counted = torch.tensor([place in places for place in range(8)])
        assert bool(counted.any())
        crossed = -(probs[:, IDS] * logits.log_softmax(-1)).sum(-1)
        distance = smooth_l1_loss(rows, entries.wanted, reduction="none").mean(-1)
        total = total + (crossed + 0.7 * distance)[counted].mean() / 3
    total.backward()
    counts = [int(mask.sum()) for mask in student.masks(entries, outputs)]
    assert counts == [6, 4, 2] if not mask_top_k else sum(counts) < 12
    assert loss == pytest.approx(float(total.detach()), abs=1e-9)
    for name, weight in student._learned.by_name.items():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-6, atol=1e-8)


def test_the_fusion_is_the_written_one() -> None:
    """`W [e; f] + D silu(U [norm f; e])`."""
    torch.manual_seed(0)
    fusion = TokenGuidedFusion(4).double()
    with torch.no_grad():
        fusion.down_proj.weight.normal_()
        fusion.norm.weight.uniform_(0.5, 2.0)
    embedded, hidden = torch.randn(2, 4, dtype=torch.float64)
    normed = hidden / (hidden.square().mean() + 1e-6).sqrt() * fusion.norm.weight
    expected = fusion.map_proj.weight @ torch.cat([embedded, hidden])
    expected = expected + fusion.down_proj.weight @ silu(fusion.up_proj.weight @ torch.cat([normed, embedded]))
    torch.testing.assert_close(fusion(embedded, hidden), expected)


def test_a_new_fusion_reads_the_token_alone() -> None:
    """So training starts from what the same layers draft without the target."""
    target = tiny_target()
    fusion = fusion_of(TOKEN_GUIDED, 32)
    weights = initial_weights(target, (0,))
    draft, plain = conditioned_beside(target, (0,), fusion, weights), draft_beside(target, (0,), weights)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    draft.get_input_embeddings().give([torch.randn(5, 32, dtype=torch.float64)])  # type: ignore[union-attr,operator]
    with torch.no_grad():
        torch.testing.assert_close(draft(tokens).logits, plain(tokens).logits)


def test_what_is_trained_is_what_runs() -> None:
    """Pass after pass gives the logits that the runtime computes draw after draw, given the same tokens."""
    target = tiny_target()
    student = student_of(target, Passes(3, 0, 1.0))
    entries = entries_of(lesson_of(target))
    with torch.no_grad():
        outputs = student.outputs(entries)
    wrapped = TargetModel(target)
    draft = random_conditioned(target, student.initial_layers, TOKEN_GUIDED, student.weights())
    head = reading_hidden_states(draft, wrapped, feeds_back_normed=True)
    slot, drafted = wrapped.new_slot(), head.new_slot()
    head.bind(drafted, lambda: slot)
    committed = 3  # tokens; the entry that predicts the next one is number 1
    wrapped.prefill(slot, TEXT.token_ids[:committed])
    head.prefill(drafted, TEXT.token_ids[1:committed])
    for number in range(3):
        row = head.plain_step(drafted)[0][IDS]
        expected = outputs[number][committed - 2 + number] @ target.lm_head.weight[IDS].T
        torch.testing.assert_close(row.double(), expected.detach(), rtol=0, atol=1e-4)
        head.commit(drafted, EMPTY_TREE, (), TEXT.token_ids[committed + number])


# The training


def test_training_raises_acceptance(tmp_path: Path) -> None:
    """Of the first sample and of later ones."""
    target = tiny_target()
    author = Author(target, TOKENIZER, 1.0)
    texts = author.texts(PROMPTS[:4], range(900, 904), 12)
    author.close()
    recipe = replace(RECIPE, head_tokens=0, learning_rate=1e-2)
    before, after = (
        Measurement(tiny_target(), texts).report(name, train(tmp_path / name, recipe, plan))
        for name, plan in (("before", LessonPlan(2, 0, 1)), ("after", LessonPlan(4, 0, 30)))
    )
    assert after.acceptance > before.acceptance + 0.05
    assert len(after.acceptance_by_draw) == 6
    assert after.acceptance_by_draw[1] > before.acceptance_by_draw[1]


@pytest.mark.parametrize("kill_at", [("answers", 1), ("training", 3), ("training", 6)])
def test_a_killed_training_ends_as_an_uninterrupted_one(kill_at: tuple[str, int], folder: Path, tmp_path: Path) -> None:
    check_killed_training(train, kill_at, folder, tmp_path / "draft", "draft.json", "draft.safetensors")


@pytest.mark.parametrize(
    "change", [{"passes": 0}, {"fusion": "loud"}, {"mask_top_k": -1}, {"feature": -1.0}, {"mask_top_k": 3, "passes": 1}]
)
def test_recipes_out_of_range_are_refused(change: dict[str, Any]) -> None:
    """By the name of the setting."""
    with pytest.raises(ConfigError, match=next(iter(change))):
        ConditionedRecipe(**change)


def test_a_target_with_windows_is_refused() -> None:
    """The passes' masks are made by hand, for full attention."""
    with pytest.raises(UnsupportedError, match="is trained on full attention alone"):
        check_passes(tiny_causal_lm("gemma3_text"))
