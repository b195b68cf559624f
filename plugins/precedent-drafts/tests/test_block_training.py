"""Training a block draft: what is learned is what runs, the loss is the written one, and a killed training resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.killed import check_killed_training
from helpers.tiny_block import settings_for, tiny_block_draft
from helpers.tiny_draft import PROMPTS, tiny_target
from safetensors.torch import load_file

from precedent.errors import ConfigError, ModelLoadError
from precedent.target import TargetModel
from precedent_drafts.block_draft import BlockDraft, load_block_draft
from precedent_drafts.block_model import BlockModel
from precedent_drafts.training.block_lessons import BlockLesson, BlockShard, BlockTeacher
from precedent_drafts.training.block_measure import BlockMeasurement, matched_tokens
from precedent_drafts.training.block_recipe import BlockRecipe
from precedent_drafts.training.block_student import BlockStudent, block_rows, blocks_of, initial_layers
from precedent_drafts.training.block_training import BlockTraining
from precedent_drafts.training.lesson_plan import BegunLessons, LessonPlan
from precedent_drafts.training.teacher import Author
from precedent_drafts.training.texts import Text
from precedent_testing.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
RECIPE = BlockRecipe(
    num_layers=1, num_reads=2, block_size=3, head_tokens=96, markov_rank=8, context_tokens=8, answer_tokens=12,
    chunk_prompts=8, batch_texts=4, anchors=6, learning_rate=3e-3,
)  # fmt: skip
PLAN = LessonPlan(chunks=2, completions=2, steps=6)
TEXT = Text((5, 6, 7, 30, 31, 5, 9, 200, 7, 8), 7, (True, True, True, False, True, True, True))


def train(out: Path, recipe: BlockRecipe = RECIPE, plan: float | LessonPlan = PLAN, **settings: Any) -> BlockDraft:
    return BlockTraining(tiny_target(), TOKENIZER, PROMPTS, recipe, out, **settings).run(plan).draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained draft."""
    out = tmp_path_factory.mktemp("drafts") / "block"
    train(out)
    return out


def lesson_of(context_tokens: int = 8) -> tuple[Any, BlockLesson]:
    target = tiny_target()
    return target, BlockTeacher(target, (1, 3), context_tokens).shard([TEXT]).lessons[0]


def test_what_is_trained_is_what_runs() -> None:
    """The rows of several blocks of one text equal those that the runtime computes behind each anchor."""
    target, lesson = lesson_of(context_tokens=24)
    draft = tiny_block_draft(target, hidden_size=32, head_dim=8)
    wrapped = TargetModel(target)
    model = BlockModel(draft, wrapped)
    blocks = blocks_of(lesson, draft, 4, 0.0, np.random.default_rng(1))
    with torch.no_grad():
        rows = block_rows(draft, lesson.states, blocks.tokens, blocks.starts)[:, 1:]
        expected = draft.head.rows(rows)
    for tokens, start, found in zip(blocks.tokens.tolist(), blocks.starts.tolist(), expected, strict=True):
        slot = wrapped.new_slot()
        wrapped.prefill(slot, TEXT.token_ids[: lesson.first + start + 1])
        assert slot.pending == tokens[0]
        (block,) = model.fill([(model.place_beside(lambda slot=slot: slot, 3), tokens[0])])  # type: ignore[misc]
        torch.testing.assert_close(block.logits.double(), found, rtol=0, atol=1e-4)


def test_blocks_learn_only_the_targets_words() -> None:
    """A block ends before the first token that is not learned, and at the end of the text."""
    target, lesson = lesson_of()
    assert lesson.anchors == [2, 3, 4, 6, 7, 8]
    draft = tiny_block_draft(target, hidden_size=32, head_dim=8)
    blocks = blocks_of(lesson, draft, 9, 0.0, np.random.default_rng(1))
    mask = draft.inputs.mask_id
    assert bool((blocks.tokens[:, 1:] == mask).all())
    assert blocks.tokens[:, 0].tolist() == [TEXT.token_ids[int(start) + lesson.first] for start in blocks.starts]
    by_start = {int(start) + lesson.first: place for place, start in enumerate(blocks.starts)}
    assert sorted(by_start) == [2, 3, 4, 6, 7, 8]
    assert blocks.counts[by_start[2]].tolist() == [True, True, True, False]
    assert blocks.counts[by_start[7]].tolist() == [True, True, False, False]
    assert blocks.before[by_start[2]].tolist() == [7, 30, 31, 5]
    assert blocks.rows[by_start[2]].tolist() == [0, 1, 2, 3]


def test_some_blocks_are_partly_known() -> None:
    """Known positions hold the true token and are not learned."""
    target, lesson = lesson_of()
    draft = tiny_block_draft(target, hidden_size=32, head_dim=8)
    blocks = blocks_of(lesson, draft, 9, 1.0, np.random.default_rng(1))
    known = blocks.tokens[:, 1:] != draft.inputs.mask_id
    assert known.any()
    assert not known.all()
    ids = torch.tensor([*TEXT.token_ids, *[0] * 9])
    places = blocks.starts[:, None] + lesson.first + 1 + torch.arange(4)
    assert torch.equal(blocks.tokens[:, 1:][known], ids[places][known])
    assert bool(blocks.counts.any(1).all())


def test_the_loss_is_the_written_one() -> None:
    """Half the cross-entropy and half the total variation to the target's own logits, faded by depth."""
    target, lesson = lesson_of()
    ids = torch.tensor([5, 6, 8, 30, 31, 200])
    settings = settings_for(target, ids.numel(), hidden_size=32, head_dim=8)
    student = BlockStudent(target, settings, ids, (0, 2), 1e-3)
    with torch.no_grad():
        student.draft.markov.right.normal_()
    blocks = blocks_of(lesson, student.draft, 6, 0.0, np.random.default_rng(2))
    with torch.no_grad():
        found = float(student.loss(lesson, blocks))
        true = target(torch.tensor([TEXT.token_ids])).logits[0].softmax(-1)
        hidden = block_rows(student.draft, lesson.states, blocks.tokens, blocks.starts)[:, 1:]
        total = weight = torch.zeros((), dtype=torch.float64)
        for block, start in enumerate(blocks.starts.tolist()):
            for depth in range(4):
                if not blocks.counts[block, depth]:
                    continue
                place = lesson.first + start + depth  # the token before the position
                column = ids.tolist().index(TEXT.token_ids[place]) if TEXT.token_ids[place] in ids.tolist() else 6
                bias = student.draft.markov.left[column] @ student.draft.markov.right
                draft = (target.lm_head.weight[ids] @ hidden[block, depth] + bias).softmax(-1)
                wanted = true[place]
                full = torch.zeros(259, dtype=torch.float64)
                full[ids] = draft
                varied = 0.5 * (full - wanted).abs().sum()
                crossed = -(wanted[ids] * draft.log()).sum()
                sure = student.draft.head.confidence(hidden[block, depth]).sigmoid()
                doubt = -((1 - varied) * sure.log() + varied * (1 - sure).log()).sum()
                fading = torch.exp(torch.tensor(-depth / 4.0, dtype=torch.float64))
                total = total + fading * (0.5 * crossed + 0.5 * varied + 0.1 * doubt)
                weight = weight + fading
    assert found == pytest.approx(float(total / weight), abs=1e-6)


def test_training_raises_acceptance(tmp_path: Path) -> None:
    """Of held-out answers: more of each block, and more tokens per step."""
    target = tiny_target()
    author = Author(target, TOKENIZER, 1.0)
    texts = author.texts(PROMPTS, range(900, 908), 12)
    author.close()
    recipe = replace(RECIPE, head_tokens=0, learning_rate=1e-2)
    train(tmp_path / "before", recipe, LessonPlan(2, 0, 1))
    train(tmp_path / "after", recipe, LessonPlan(6, 0, 60))
    before, after = (
        BlockMeasurement(tiny_target(), load_block_draft(tmp_path / name, tiny_target()), texts).report(name)
        for name in ("before", "after")
    )
    assert after.positions == before.positions == sum(text.num_answer_tokens for text in texts)
    assert after.acceptance[0] > before.acceptance[0] + 0.05
    assert after.tokens_per_step >= before.tokens_per_step


@pytest.mark.parametrize("kill_at", [("answers", 1), ("training", 3), ("training", 6)])
def test_a_killed_training_ends_as_an_uninterrupted_one(kill_at: tuple[str, int], folder: Path, tmp_path: Path) -> None:
    check_killed_training(train, kill_at, folder, tmp_path / "draft", "model.safetensors", "config.json")


def test_another_training_in_the_folder_is_refused(tmp_path: Path) -> None:
    """With the first difference by name; and a plan of a chain draft is no plan of a block draft."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, progress=stop)
    with pytest.raises(ConfigError, match="has another block_size"):
        train(tmp_path, replace(RECIPE, block_size=4))
    (tmp_path / "training" / "plan.json").write_text('{"recipe": {"rounds": 3}}', encoding="utf-8")
    with pytest.raises(ConfigError, match="is no plan for a block draft"):
        BegunLessons.read(tmp_path / "training", "block draft")


def test_it_says_what_it_will_cost_before_it_starts(tmp_path: Path) -> None:
    """Once, before the first step; a resumed training said it already."""
    said: list[str] = []

    def first_step(phase: str, number: int, total: int, loss: float | None) -> None:
        if phase == "training":
            said.append(phase)

    train(tmp_path / "draft", plan=0.001, announce=said.append, progress=first_step)
    assert said[0].startswith("about ")
    assert "answers of the target" in said[0]
    assert "MB" in said[0]
    assert said[1] == "training"


def test_lessons_are_read_back(tmp_path: Path) -> None:
    """With the text's marks, and damage is named."""
    shard = BlockTeacher(tiny_target(), (1, 3), 8).shard([TEXT, Text((1, 2, 3), 2)])
    shard.save(tmp_path / "shard.safetensors")
    again = BlockShard.load(tmp_path / "shard.safetensors")
    assert [lesson.text for lesson in again.lessons] == [TEXT, Text((1, 2, 3), 2)]
    assert again.num_tokens == 6 + 2
    for one, other in zip(shard.lessons, again.lessons, strict=True):
        assert torch.equal(one.states, other.states)
        assert torch.equal(one.hidden, other.hidden)
    (tmp_path / "shard.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelLoadError, match="--resume rewrites it"):
        BlockShard.load(tmp_path / "shard.safetensors")


def test_a_draft_begins_with_the_targets_layers() -> None:
    """Those whose shapes fit, evenly spaced."""
    target = tiny_target()
    settings = settings_for(target, 259, hidden_size=32, head_dim=8)
    draft = BlockStudent(target, settings, torch.arange(259), (0, 2), 1e-3).draft
    first: Any = draft.model.layers[0]
    assert torch.equal(first.mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight)
    assert [initial_layers(count, 30) for count in (1, 2, 3)] == [(0,), (0, 29), (0, 15, 29)]
    assert RECIPE.reads(30) == (15, 27)
    assert BlockRecipe().reads(30) == (15, 21, 27)
    assert BlockRecipe().reads(3) == (2, 3)


def test_a_draft_is_trained_on(folder: Path, tmp_path: Path) -> None:
    """It starts with the other draft's weights and head; another shape and a folder without a draft are refused."""
    on = replace(RECIPE, start=str(folder), learning_rate=1e-9, head_tokens=40)
    train(tmp_path / "on", on, LessonPlan(1, 0, 1))
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "on"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-7)
    with pytest.raises(ModelLoadError, match="do not fit its config"):
        train(tmp_path / "other", replace(on, markov_rank=4), LessonPlan(1, 0, 1))
    with pytest.raises(ConfigError, match="reads other layers than"):
        train(tmp_path / "reads", replace(on, num_reads=1), LessonPlan(1, 0, 1))
    with pytest.raises(ConfigError, match="must be ends or a block draft's folder"):
        replace(on, start="first")


def test_the_matched_path_of_a_tree() -> None:
    """As many tokens of the answer as hang below each other."""
    from precedent.drafters.base import Candidates

    tree = Candidates.of("t", [(5, -1, 0.5, 0), (6, -1, 0.5, 0), (7, 1, 0.5, 0), (8, 2, 0.5, 0)])
    assert [matched_tokens(tree, answer) for answer in ((6, 7, 8, 9), (6, 8), (7,), ())] == [3, 1, 0, 0]


@pytest.mark.parametrize("change", [{"block_size": 17}, {"iterations": 9}, {"anchors": 0}, {"proposes": "words"}])
def test_recipes_out_of_range_are_refused(change: dict[str, Any]) -> None:
    """By the name of the setting."""
    with pytest.raises(ConfigError, match=next(iter(change))):
        BlockRecipe(**change)
