"""Distillation: what is learned, that a killed training ends as it would have, and that a draft knows its target."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from precedent.cache import NewCompletion
from precedent.cache.fingerprint import tokenizer_fingerprint
from precedent.cache.store import SQLiteStore
from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters.base import Drafter, DraftRequest
from precedent.drafters.draft_model import DraftModelDrafter
from precedent.engine import Engine
from precedent.errors import CacheError, ConfigError, ModelLoadError, PromptError, UnsupportedError
from precedent.target import TargetModel
from precedent.target.first_layers import first_layers
from precedent.target.loading import load_draft, load_target
from precedent.target.trained_draft import HEAD_TOKENS, draft_beside, initial_weights
from precedent.testing.draft_law import check_draft_law
from precedent.testing.drafter_contract import DrafterContract
from precedent.testing.tiny_architectures import settings_of
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent.training import distil
from precedent.training.completions import read_completions
from precedent.training.distil import Distillation, most_frequent
from precedent.training.head import OutputHead, check_head, final_hidden
from precedent.training.measure import Measurement, expected_tokens
from precedent.training.plan import Begun, Plan, Recipe
from precedent.training.prompts import read_prompts, split
from precedent.training.student import Student
from precedent.training.teacher import Author, Teacher
from precedent.training.texts import Shard, Text
from precedent.tree import ROOT, TreeBuilder

TOKENIZER = byte_tokenizer()
PROMPTS = [tuple(range(first, first + 6)) for first in range(40, 48)]
RECIPE = Recipe(
    num_layers=1, head_tokens=96, answer_tokens=12, chunk_prompts=8, rounds=2, batch_tokens=32, learning_rate=3e-3
)
PLAN = Plan(chunks=2, rollouts=1, rounds=2, steps_per_round=6)


def tiny_target(seed: int = 0) -> PreTrainedModel:
    """A random target with opinions."""
    return tiny_causal_lm(hidden_size=32, scale=1.5, seed=seed)


def trained(
    out: Path, recipe: Recipe = RECIPE, plan: Plan = PLAN, progress: Callable[..., None] = lambda *_: None
) -> Path:
    Distillation(tiny_target(), TOKENIZER, PROMPTS, recipe, out, progress=progress).run(plan)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained draft."""
    return trained(tmp_path_factory.mktemp("drafts") / "draft")


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
def test_a_killed_training_ends_as_an_uninterrupted_one(
    kill_at: tuple[str, int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distil, "CHECKPOINT_STEPS", 2)
    done = []

    def kill(phase: str, number: int, total: int, loss: float | None) -> None:
        done.append((phase, number))
        if (phase, number) == kill_at:
            raise Killed

    with pytest.raises(Killed):
        trained(tmp_path / "draft", progress=kill)
    assert not (tmp_path / "draft" / "draft.json").exists()
    (tmp_path / "draft" / "training" / "answers-0001.safetensors.partial").write_bytes(b"half")
    resumed = []
    trained(tmp_path / "draft", progress=lambda phase, number, *_: resumed.append((phase, number)))
    assert (tmp_path / "draft" / "draft.safetensors").read_bytes() == (folder / "draft.safetensors").read_bytes()
    assert len(resumed) < len(done) + len(set(resumed) - set(done))  # what was done is not done again


def test_a_folder_holds_layers_and_no_pickle(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["draft.json", "draft.safetensors"]
    names = set(load_file(folder / "draft.safetensors"))
    layer = {f"layers.0.{name}" for name in tiny_target().model.layers[0].state_dict()}
    assert names == layer | {HEAD_TOKENS}


def test_a_trained_draft_drafts_for_its_target(folder: Path) -> None:
    """Greedy text is plain decoding's, with drafts from the folder, half of the vocabulary out of its reach."""
    target, texts = tiny_target(), []
    for draft in (None, folder):
        engine = Engine.load(target, tokenizer=TOKENIZER, draft_model=draft)
        speculation = SpeculationConfig(drafters=("draft-model",))
        result = engine.submit(PROMPTS[0], SamplingParams(max_tokens=20), speculation=speculation).result()
        texts.append(result.token_ids)
        engine.close()
    assert texts[0] == texts[1]
    assert result.stats.num_draft_tokens > 0


def test_nothing_but_the_layers_is_the_drafts_own(folder: Path) -> None:
    target = tiny_target()
    draft = load_draft(folder, target, TOKENIZER)
    own = {name for name, weight in draft.named_parameters() if weight.data_ptr() not in
           {parameter.data_ptr() for parameter in target.parameters()}}  # fmt: skip
    assert own == {"lm_head.rows.weight"} | {f"model.{name}" for name in load_file(folder / "draft.safetensors")} - {
        f"model.{HEAD_TOKENS}"
    }


# The restricted head


def restricted(vocab_size: int = 16, kept: int = 6) -> tuple[TargetModel, TargetModel]:
    target = tiny_causal_lm(vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2, seed=31)
    weights = {**initial_weights(target, (0,)), HEAD_TOKENS: torch.arange(kept) * 2}
    return TargetModel(target), TargetModel(draft_beside(target, (0,), weights))


class TestRestrictedHead(DrafterContract):
    """A draft that knows some tokens alone keeps the contract of every drafter."""

    def make_drafter(self) -> Drafter:
        """Six of sixteen tokens."""
        return DraftModelDrafter(restricted()[1])


def test_the_restricted_law_is_the_full_one_on_the_tokens_that_are_known() -> None:
    target, draft = restricted()
    full = draft_beside(target.model, (0,), initial_weights(target.model, (0,)))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        found, expected = (model(tokens).logits for model in (draft.model, full))
    known = torch.arange(6) * 2
    torch.testing.assert_close(found[..., known], expected[..., known])
    assert torch.isneginf(found[..., 1::2]).all()
    assert torch.isneginf(found[..., 12:]).all()


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.8), SamplingParams(temperature=1.3, top_p=0.9)])
def test_a_restricted_draft_reports_the_law_that_it_samples_from(sampling: SamplingParams) -> None:
    _, draft = restricted()
    drafting = DraftModelDrafter(draft).begin(DraftRequest("r", (3, 1, 4), sampling, mode="traversal"))

    def drawing(builder: TreeBuilder, coins: object) -> None:
        builder.add_point(ROOT, 4, "recall")
        drafting.draw(builder, 2, coins)

    check_draft_law(drawing)


def test_the_most_frequent_tokens_are_kept_and_the_end_always() -> None:
    frequencies = torch.tensor([0.5, 3.0, 0.0, 3.0, 2.0])
    assert most_frequent(frequencies, 2, frozenset({2})).tolist() == [1, 2, 3]
    assert most_frequent(torch.zeros(4), 2, frozenset()).tolist() == [0, 1]


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
        law = target(tokens).logits[0, -4:].softmax(-1)
    known = torch.arange(259) if head_tokens is None else head_tokens
    student._optimizer.zero_grad()
    hidden = student._hidden(text.token_ids[:-1])[-4:]
    log_probs = (hidden @ target.lm_head.weight[known].T).log_softmax(-1)
    expected = -(law[:, known] * log_probs).sum() / 4
    expected.backward()
    assert loss == pytest.approx(float(expected), abs=1e-9)
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
    with pytest.raises(ModelLoadError, match="delete it, and --resume makes it again"):
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
    assert Recipe().planned(minutes=0.01, chunk_seconds=60, step_seconds=9) == Plan(1, 1, 3, 1)


# Refusals


def damaged(folder: Path) -> None:
    (folder / "draft.safetensors").write_bytes((folder / "draft.safetensors").read_bytes()[:-100])


def of_a_later_format(folder: Path) -> None:
    settings = json.loads((folder / "draft.json").read_text())
    (folder / "draft.json").write_text(json.dumps(settings | {"format": 9}))


def without_settings(folder: Path) -> None:
    (folder / "draft.json").write_text("{")


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "draft.safetensors")
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "draft.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damaged, "cannot load the draft model"),
        (of_a_later_format, "format 9, this version reads 1"),
        (without_settings, "cannot be read"),
        (without_a_weight, "mlp.up_proj.weight"),
    ],
)
def test_a_damaged_draft_is_one_clear_line(
    damage: Callable[[Path], None], says: str, folder: Path, tmp_path: Path
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    with pytest.raises(ModelLoadError, match=says) as caught:
        load_draft(tmp_path, tiny_target(), TOKENIZER)
    assert "\n" not in str(caught.value)


def test_a_draft_of_another_target_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"trained for LlamaForCausalLM and uses its embeddings"):
        load_draft(folder, tiny_target(seed=1), TOKENIZER)


def test_a_target_of_the_same_embeddings_may_use_it_and_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    load_draft(folder, target, TOKENIZER)
    assert caplog.messages == []
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.add_(0.5)
    load_draft(folder, target, TOKENIZER)
    assert ["fewer of its tokens will be accepted" in message for message in caplog.messages] == [True]


def test_precision_does_not_tell_targets_apart(folder: Path) -> None:
    assert load_draft(folder, tiny_target().to(torch.bfloat16), TOKENIZER).dtype == torch.bfloat16


def test_a_draft_is_no_target(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="give it as the draft model beside that target"):
        load_target(folder)


def test_what_was_begun_is_not_mixed_with_another_training(tmp_path: Path) -> None:
    def kill(phase: str, number: int, *_: object) -> None:
        if phase == "training":
            raise Killed

    with pytest.raises(Killed):
        trained(tmp_path, progress=kill)
    with pytest.raises(ConfigError, match="another head_tokens"):
        trained(tmp_path, replace(RECIPE, head_tokens=64))
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


# Prompts and completions


def test_prompts_of_every_kind_of_file(tmp_path: Path) -> None:
    def written(name: str, *records: object) -> Path:
        text = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write(text)
        return tmp_path / name

    def texts(path: Path) -> list[str]:
        return [TOKENIZER.decode(prompt) for prompt in read_prompts(path, TOKENIZER, 400)[0]]

    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert texts(written("a.txt", "one", "two", "", "one")) == [asked.format("one"), asked.format("two")]
    assert texts(written("b.jsonl.gz", {"turns": ["one", "more"]}, {"prompt": "two"})) == [
        asked.format("one"), asked.format("two"),
    ]  # fmt: skip
    user, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    both = texts(written("c.jsonl", {"messages": [user, answer, user, answer]}))
    assert both[0] == asked.format("user")
    assert both[1].startswith(asked.format("user") + "assistant<|im_end|>\n<|im_start|>user")
    assert texts(written("d.jsonl", {"messages": [user]})) == [asked.format("user")]
    assert texts(written("e.jsonl", {"messages": [user, answer, user], "response": answer})) == [both[1]]
    assert read_prompts(written("f.txt", "short", "long" * 99), TOKENIZER, 60)[1] == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("x" * 99, "all 1 are longer than 60 tokens"),
        ('{"prompt": "a"}\n{"turns": []}', "no question"),
    ],
)
def test_a_file_without_prompts_says_so(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / ("prompts.jsonl" if text.startswith("{") else "prompts.txt")
    path.write_text(text)
    with pytest.raises(PromptError, match=says):
        read_prompts(path, TOKENIZER, 60)


def test_held_out_prompts_are_not_learned_and_stay_the_same() -> None:
    prompts = [(number,) for number in range(40)]
    learned, held_out = split(prompts, 3)
    assert (len(learned), len(held_out)) == (36, 4)
    assert sorted(learned + held_out) == prompts
    assert split(prompts, 3) == (learned, held_out)
    assert split(prompts, 4) != (learned, held_out)
    with pytest.raises(PromptError, match="one prompt is too few"):
        split(prompts[:1], 0)


def test_completions_of_one_tenant_behind_what_was_asked(tmp_path: Path) -> None:
    store, fingerprint = SQLiteStore.open(tmp_path / "cache"), tokenizer_fingerprint(TOKENIZER)
    for tenant, query, answer in [("shop", "old", "first"), ("other", "secret", "hidden"), ("shop", "new", "second")]:
        ids = tuple(TOKENIZER.encode(answer))
        store.insert(NewCompletion(ids, fingerprint, "m", tenant, query), None, None)
    store.close()
    texts = read_completions(tmp_path / "cache", TOKENIZER, "shop", 5)
    assert [TOKENIZER.decode(text.token_ids) for text in texts] == [
        f"<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n{answer}"
        for query, answer in [("new", "secon"), ("old", "first")]
    ]
    assert [text.num_answer_tokens for text in texts] == [5, 5]
    with pytest.raises(CacheError, match="no completions of tenant 'nobody'"):
        read_completions(tmp_path / "cache", TOKENIZER, "nobody", 5)


def test_stored_completions_are_learned_from(tmp_path: Path) -> None:
    completions = [Text((5, 6, 7, 8, 9), 3)]
    run = Distillation(
        tiny_target(), TOKENIZER, PROMPTS, RECIPE, tmp_path / "draft", completions=completions
    ).run(Plan(1, 1, 1, 1))  # fmt: skip
    assert run.num_tokens == 8 * 12 + 3


# The report


def answered(target: PreTrainedModel) -> list[Text]:
    author = Author(target, TOKENIZER, 1.0)
    texts = author.texts(PROMPTS[:2], [1, 2], 9)
    author.close()
    return texts


def test_a_target_accepts_all_of_itself() -> None:
    target = tiny_target()
    report = Measurement(target, answered(target)).report("itself", target)
    assert report.acceptance == pytest.approx(1.0)
    assert (report.agreement, report.positions, report.prompts) == (1.0, 18, 2)


def test_acceptance_is_one_minus_total_variation() -> None:
    target, texts = tiny_target(), answered(tiny_target())
    draft = first_layers(target, 1)
    found = Measurement(target, texts, temperature=0.7).report("early exit", draft)
    overlaps, agreed = [], []
    for text in texts:
        tokens = torch.tensor([text.token_ids[:-1]])
        with torch.no_grad():
            rows = [model(tokens).logits[0, -text.num_answer_tokens :] for model in (target, draft)]
        laws = [(each / 0.7).softmax(-1) for each in rows]
        overlaps += (1 - 0.5 * (laws[0] - laws[1]).abs().sum(-1)).tolist()
        agreed += (rows[0].argmax(-1) == rows[1].argmax(-1)).tolist()
    assert found.acceptance == pytest.approx(float(np.mean(overlaps)), abs=1e-9)
    assert found.agreement == pytest.approx(float(np.mean(agreed)))


def test_expected_tokens_of_chains() -> None:
    """Draw after draw is accepted with the product of the acceptances on the way."""
    assert expected_tokens([np.full(50, 0.5)], 3) == pytest.approx([1, 1.5, 1.75, 1.875])
    assert expected_tokens([np.array([1.0, 0.0, 1.0])], 2) == pytest.approx([1, 1.5, 1.5])
    assert expected_tokens([np.array([0.5])], 2) == pytest.approx([1, 1.5, 1.5])
