"""Distillation: what is learned, and that a killed training ends as it would have ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.tiny_architectures import settings_of
from helpers.tiny_draft import PLAN, PROMPTS, RECIPE, tiny_target, train_tiny
from safetensors.torch import load_file

from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent_drafts.borrowed import HEAD_TOKENS
from precedent_drafts.trained import draft_beside, initial_weights
from precedent_drafts.training.distil import Distillation, most_frequent
from precedent_drafts.training.head import OutputHead, Reader, check_head, final_hidden
from precedent_drafts.training.measure import Measurement
from precedent_drafts.training.schedule import Begun, Recipe, Schedule
from precedent_drafts.training.student import Student
from precedent_drafts.training.teacher import Author, Teacher
from precedent_drafts.training.texts import Shard, Text
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained draft."""
    return train_tiny(tmp_path_factory.mktemp("drafts") / "draft")


class Killed(BaseException):
    """Stands for a signal that nobody handles."""


def test_distillation_raises_acceptance(tmp_path: Path) -> None:
    target = tiny_target()
    author = Author(target, TOKENIZER, 1.0)
    measurement = Measurement(target, author.texts(PROMPTS, range(900, 908), 12))
    author.close()
    head = {HEAD_TOKENS: torch.arange(259)}
    before = draft_beside(target, (0,), {**initial_weights(target, (0,)), **head})
    recipe = replace(RECIPE, head_tokens=0)
    run = Distillation(target, TOKENIZER, PROMPTS, recipe, tmp_path / "draft").run(replace(PLAN, steps_per_round=40))
    untrained, distilled = (measurement.report("draft", draft).acceptance for draft in (before, run.draft))
    assert run.num_tokens == 2 * 8 * 12
    assert distilled > untrained + 0.05


@pytest.mark.parametrize(
    "kill_at", [("answers", 1), ("training", 3), ("training", 6), ("rollouts", 0), ("training", 9), ("training", 12)]
)
def test_a_killed_training_ends_as_an_uninterrupted_one(kill_at: tuple[str, int], folder: Path, tmp_path: Path) -> None:
    done = []

    def kill(phase: str, number: int, total: int, loss: float | None) -> None:
        done.append((phase, number))
        if (phase, number) == kill_at:
            raise Killed

    with pytest.raises(Killed):
        train_tiny(tmp_path / "draft", progress=kill, checkpoint_steps=2)
    assert not (tmp_path / "draft" / "draft.json").exists()
    (tmp_path / "draft" / "training" / "answers-0001.safetensors.partial").write_bytes(b"half")
    resumed = []
    train_tiny(tmp_path / "draft", progress=lambda *said: resumed.append(said[:2]), checkpoint_steps=2)
    assert (tmp_path / "draft" / "draft.safetensors").read_bytes() == (folder / "draft.safetensors").read_bytes()
    assert len(resumed) < len(done) + len(set(resumed) - set(done))  # what was done is not done again


def test_the_most_frequent_tokens_are_kept_and_the_end_always() -> None:
    frequencies = torch.tensor([0.5, 3.0, 0.0, 3.0, 2.0])
    assert most_frequent(frequencies, 2, frozenset({2})).tolist() == [1, 2, 3]
    assert most_frequent(torch.zeros(4), 2, frozenset()).tolist() == [0, 1]


def test_a_draft_is_trained_on_from_another_one(folder: Path, tmp_path: Path) -> None:
    """It begins with that draft's layers, as many, beside a target of the same embeddings."""
    recipe = replace(RECIPE, start=str(folder))
    further = Distillation(tiny_target(), TOKENIZER, PROMPTS, recipe, tmp_path / "second")
    begun = further._student(further._collect(1)).weights()
    before = load_file(folder / "draft.safetensors")
    layers = [name for name in before if name.startswith("layers.")]
    assert layers
    assert all(torch.equal(begun[name].float(), before[name].float()) for name in layers)
    with pytest.raises(ConfigError, match="has 1 layers, not 2"):
        replace(recipe, num_layers=2).initial_layers(4)
    with pytest.raises(ModelLoadError, match="uses its embeddings"):
        Distillation(tiny_target(seed=9), TOKENIZER, PROMPTS, recipe, tmp_path / "third")


# Learning


@pytest.mark.parametrize("head_tokens", [None, torch.tensor([1, 5, 7, 30, 31, 200])])
def test_the_gradient_is_that_of_the_forward_divergence(head_tokens: torch.Tensor | None) -> None:
    """Against autograd, on the whole vocabulary with the target's own logits, written the slow way."""
    target, text = tiny_target(), Text((5, 6, 7, 30, 31, 5), 4)
    lesson = Teacher(target).shard([text]).lessons[0]
    student = Student(target, (1,), head_tokens, 1e-3)
    loss = student._learn(lesson, 4, 512)
    found = [parameter.grad.clone() for parameter in student._layers.parameters()]
    tokens = torch.tensor([text.token_ids[:-1]])
    with torch.no_grad():
        distribution = target(tokens).logits[0, -4:].softmax(-1)
    known = torch.arange(259) if head_tokens is None else head_tokens
    student._learned.forget_gradients()
    hidden = student._hidden(text.token_ids[:-1])[-4:]
    log_probs = (hidden @ target.lm_head.weight[known].T).log_softmax(-1)
    expected = -(distribution[:, known] * log_probs).sum() / 4
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-9)
    for gradient, parameter in zip(found, student._layers.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere2", "granite", "qwen3"])
def test_the_head_is_the_models_own(architecture: str) -> None:
    """Also where logits are scaled or capped behind it."""
    model = tiny_causal_lm(architecture, **settings_of(architecture))
    tokens = torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        torch.testing.assert_close(OutputHead(model, torch.float64)(final_hidden(model, tokens)), expected)
    check_head(model)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_a_text_is_read_the_same_behind_a_beginning_that_was_read_before(architecture: str) -> None:
    """Longer, shorter, equal and other texts one after the other; the last also learns from what is shared."""
    model = tiny_causal_lm(architecture, **settings_of(architecture))
    reader = Reader(model)
    head = [3, 1, 4, 1, 5, 9, 2, 6]
    for tail, count in (([5, 3], 2), ([5, 3, 8, 9], 3), ([5, 3, 8, 9], 3), ([], 1), ([7], 9), ([5, 3, 8], 1)):
        text = [*head, *tail]
        expected = final_hidden(model, torch.tensor(text))[-count:]
        torch.testing.assert_close(reader.last(text, count), expected)


def test_a_model_that_does_more_to_its_logits_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    target.lm_head.register_forward_hook(lambda module, inputs, logits: logits**3)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM does more to its logits"):
        Distillation(target, TOKENIZER, PROMPTS, RECIPE, tmp_path)


def test_a_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    texts = [Text((5, 6, 7, 8), 2), Text((9, 9, 1), 1)]
    shard = Teacher(tiny_target()).shard(texts)
    shard.save(tmp_path / "shard.safetensors")
    read = Shard.load(tmp_path / "shard.safetensors")
    assert [lesson.text for lesson in read.lessons] == texts
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(read.lessons, shard.lessons, strict=True))
    assert float(read.frequencies.sum()) == pytest.approx(3.0, abs=1e-4)  # each position gives away one
    (tmp_path / "shard.safetensors").write_bytes(b"half")
    with pytest.raises(ModelLoadError, match="delete it, and --resume rewrites it"):
        Shard.load(tmp_path / "shard.safetensors")


@pytest.mark.parametrize(
    ("start", "count", "chosen"),
    [("ends", 2, (0, 29)), ("ends", 3, (0, 14, 29)), ("first", 2, (0, 1)), ("last", 1, (29,))],
)
def test_the_layers_with_which_it_begins(start: str, count: int, chosen: tuple[int, ...]) -> None:
    assert Recipe(num_layers=count, start=start).initial_layers(30) == chosen


def test_minutes_become_a_plan() -> None:
    """Collecting and training together take the time that was given."""
    plan = Recipe(rounds=3).planned(minutes=10, chunk_seconds=5, step_seconds=0.5)
    assert plan.chunks * 5 + 2 * plan.rollouts * 5 + plan.steps * 0.5 == pytest.approx(600, abs=5)
    assert Recipe().planned(minutes=0.01, chunk_seconds=60, step_seconds=9) == Schedule(1, 1, 1, 3, 1)
    assert Recipe().planned(minutes=1, chunk_seconds=90, step_seconds=1).steps == 33  # of 33 seconds that are its share


def test_what_was_begun_is_not_mixed_with_another_training(tmp_path: Path) -> None:
    def kill(phase: str, number: int, *_: object) -> None:
        if phase == "training":
            raise Killed

    with pytest.raises(Killed):
        train_tiny(tmp_path, progress=kill)
    with pytest.raises(ConfigError, match="another head_tokens"):
        train_tiny(tmp_path, replace(RECIPE, head_tokens=64))
    with pytest.raises(ConfigError, match="another prompts"):
        Distillation(tiny_target(), TOKENIZER, PROMPTS[:3], RECIPE, tmp_path).run(PLAN)
    with pytest.raises(ConfigError, match="another target"):
        Distillation(tiny_target(seed=1), TOKENIZER, PROMPTS, RECIPE, tmp_path).run(PLAN)
    (tmp_path / "training" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        Begun.read(tmp_path / "training")


@pytest.mark.parametrize(
    "settings", [{"num_layers": 4}, {"start": "middle"}, {"temperature": 0.0}, {"head_tokens": -1}, {"rounds": 0}]
)
def test_a_recipe_out_of_range_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Recipe(**settings)


def test_a_draft_must_be_smaller_than_its_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not smaller than its target of 3"):
        Distillation(tiny_target(), TOKENIZER, PROMPTS, replace(RECIPE, num_layers=3), tmp_path)
