"""An exit: it learns the written loss, what runs is what was learned, and the layers are the target's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.enumeration import check_drawn_step
from helpers.hybrids import prefilled
from helpers.killed import check_killed_training
from helpers.tiny_draft import PROMPTS, tiny_target
from torch import Tensor

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.target.load.first_layers import exits_early, first_layers
from precedent.target.load.loading import load_target
from precedent.tree import ROOT, TreeBuilder
from precedent_drafts.borrowed import HEAD_TOKENS
from precedent_drafts.early_exit import ADAPTER, ExitAdapter, exit_beside
from precedent_drafts.training.block_lessons import BlockLesson, BlockTeacher
from precedent_drafts.training.exit_student import ExitStudent
from precedent_drafts.training.exit_training import ExitRecipe, ExitTraining
from precedent_drafts.training.lesson_plan import LessonPlan
from precedent_drafts.training.measure import Measurement
from precedent_drafts.training.teacher import Author
from precedent_drafts.training.texts import Text
from precedent_testing.draft_distribution import check_draft_distribution
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
RECIPE = ExitRecipe(
    layer=2, width=24, head_tokens=96, answer_tokens=12, chunk_prompts=8, batch_texts=4, learning_rate=3e-3
)
PLAN = LessonPlan(chunks=2, completions=0, steps=6)
TEXT = Text((5, 6, 7, 30, 31, 5, 9, 200, 7, 8), 7, (True, True, True, False, True, True, True))
PROMPT = [1, 2, 1, 0]


def train(out: Path, recipe: ExitRecipe = RECIPE, plan: float | LessonPlan = PLAN, **settings: Any) -> Any:
    return ExitTraining(tiny_target(), TOKENIZER, PROMPTS, recipe, out, **settings).run(plan).draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained exit."""
    out = tmp_path_factory.mktemp("drafts") / "exit"
    train(out)
    return out


def random_weights(hidden_size: int, width: int = 8, scale: float = 0.4, seed: int = 0) -> dict[str, Tensor]:
    """An adapter with strong opinions."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: weight.shape for name, weight in ExitAdapter(hidden_size, width).state_dict().items()}
    return {
        ADAPTER + name: torch.randn(shape, generator=generator, dtype=torch.float64) * scale + (name == "norm.weight")
        for name, shape in shapes.items()
    }


# Learning


def lessons_of(target: Any, layer: int) -> list[BlockLesson]:
    return list(BlockTeacher(target, (layer,), 0).shard([TEXT, Text((40, 41, 42, 43), 2)]).lessons)


@pytest.mark.parametrize("layerwise", [0.0, 0.7])
def test_the_gradient_is_that_of_divergence_and_distance(layerwise: float) -> None:
    """Against autograd on the target's own forward, written out: cross-entropy, and distance of final hidden states."""
    target, ids = tiny_target(), torch.tensor([1, 5, 7, 30, 31, 200])
    student = ExitStudent(target, ids, 16, layerwise, 1e-3)
    weights = random_weights(32, 16)
    student.adapter.load_state_dict({name.removeprefix(ADAPTER): weight for name, weight in weights.items()})
    loss = student.learn(lessons_of(target, 2))
    found = {name: parameter.grad.clone() for name, parameter in student.adapter.named_parameters()}  # type: ignore[union-attr]
    student._learned.forget_gradients()
    terms = []
    for text, learned in ((TEXT, (3, 4, 5, 7, 8, 9)), (Text((40, 41, 42, 43), 2), (2, 3))):
        with torch.no_grad():
            run = target(torch.tensor([text.token_ids]), output_hidden_states=True)
        for token in learned:
            entered, wanted = run.hidden_states[2][0, token - 1], run.hidden_states[-1][0, token - 1]
            normed = entered * (entered.square().mean() + 1e-6).rsqrt() * student.adapter.norm.weight
            gated = torch.nn.functional.silu(student.adapter.gate_proj.weight @ normed)
            gated = student.adapter.down_proj.weight @ (gated * (student.adapter.up_proj.weight @ normed))
            hidden = target.model.norm(entered + student.adapter.map_proj.weight @ normed + gated)
            crossed = -(
                run.logits[0, token - 1].softmax(-1)[ids] * (target.lm_head.weight[ids] @ hidden).log_softmax(-1)
            )
            terms.append(crossed.sum() + layerwise * (hidden - wanted).square().sum() / wanted.square().sum())
    expected = torch.stack(terms).mean()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-9)
    for name, parameter in student.adapter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-12)


def test_training_raises_acceptance(tmp_path: Path) -> None:
    """Against the same layers without an adapter, of held-out answers."""
    target = tiny_target()
    author = Author(target, TOKENIZER, 1.0)
    measurement = Measurement(target, author.texts(PROMPTS, range(900, 908), 12))
    author.close()
    recipe = replace(RECIPE, head_tokens=0, learning_rate=1e-2)
    trained = train(tmp_path / "exit", recipe, LessonPlan(6, 0, 60))
    before, after = (measurement.report("draft", draft).acceptance for draft in (first_layers(target, 2), trained))
    assert after > before + 0.05


@pytest.mark.parametrize("kill_at", [("answers", 1), ("training", 3), ("training", 6)])
def test_a_killed_training_ends_as_an_uninterrupted_one(kill_at: tuple[str, int], folder: Path, tmp_path: Path) -> None:
    check_killed_training(train, kill_at, folder, tmp_path / "draft", "draft.json", "draft.safetensors")


def test_it_says_what_it_will_cost_before_it_starts(tmp_path: Path) -> None:
    """Before the first step."""
    said: list[str] = []
    train(tmp_path / "draft", plan=0.001, announce=said.append, progress=lambda phase, *_: said.append(phase))
    assert said.index("training") > next(place for place, line in enumerate(said) if line.startswith("about "))


@pytest.mark.parametrize("change", [{"layer": 0}, {"width": 0}, {"layerwise": -1.0}, {"temperature": 0.0}])
def test_recipes_out_of_range_are_refused(change: dict[str, Any]) -> None:
    """By the name of the setting."""
    with pytest.raises(ConfigError, match=next(iter(change))):
        ExitRecipe(**change)


def test_an_exit_stands_before_the_targets_last_layer(tmp_path: Path) -> None:
    """Behind the last one there would be nothing to save."""
    with pytest.raises(ConfigError, match="layer=3: an exit of this target stands behind layer 1 to 2"):
        train(tmp_path, replace(RECIPE, layer=3))


# What was trained


def test_what_is_trained_is_what_runs(folder: Path) -> None:
    """The folder's draft gives the rows that training computed from the layer's outputs."""
    target = tiny_target()
    draft = load_draft(folder, target, TOKENIZER)
    lesson = lessons_of(target, 2)[0]
    adapted: Any = draft.base_model.norm
    known: Any = draft.lm_head
    with torch.no_grad():
        rows = adapted(lesson.states) @ target.lm_head.weight[known.token_ids].T
        logits = draft(torch.tensor([TEXT.token_ids[:-1]])).logits[0, -7:]
    torch.testing.assert_close(logits[:, known.token_ids], rows)


def test_an_untrained_exit_is_the_first_layers() -> None:
    """A new adapter changes nothing."""
    target = tiny_target()
    student = ExitStudent(target, torch.arange(259), 16, 1.0, 1e-3)
    draft = exit_beside(target, 2, {**student.weights(), HEAD_TOKENS: torch.arange(259)})
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        assert torch.equal(draft(tokens).logits, first_layers(target, 2)(tokens).logits)


def test_it_shares_the_targets_keys_and_values(folder: Path) -> None:
    """An engine sets nothing aside for it; the text is plain decoding's, greedy and with a seed."""
    target = tiny_target()
    draft = load_draft(folder, target, TOKENIZER)
    assert exits_early(TargetModel(draft), TargetModel(target))
    names = {name for name, _ in target.named_parameters()}
    own = {weight.data_ptr() for weight in draft.parameters()} - {weight.data_ptr() for weight in target.parameters()}
    assert len(own) == 5 + 1  # the adapter and the rows of the head
    assert names == {name for name, _ in target.named_parameters()}
    for sampling in (SamplingParams(max_tokens=24), SamplingParams(temperature=0.9, seed=4, max_tokens=24)):
        texts, reserved = [], []
        for given in (None, draft):
            engine = Engine(target, TOKENIZER, name="tiny", draft_model=given, cost=CostCurve())
            speculation = SpeculationConfig(drafters=("draft-model",))
            reserved.append(engine._kv_bytes(50, 24, speculation, engine._drafters_named(("draft-model",))))
            result = engine.submit(PROMPTS[0], sampling, speculation=speculation).result()
            texts.append(result.token_ids)
            engine.close()
        assert texts[0] == texts[1]
        assert result.stats.drafted_by_source["draft-model"] > 0
        assert reserved[0] == reserved[1]


# Sampling, enumerated


@cache
def pair(head: tuple[int, ...] = (0, 1, 2)) -> tuple[TargetModel, TargetModel]:
    """A target of three tokens, and an exit with opinions of its own."""
    model = tiny_causal_lm(vocab_size=3, hidden_size=16, num_hidden_layers=3, scale=0.3, seed=4)
    weights = {**random_weights(16), HEAD_TOKENS: torch.tensor(head)}
    return TargetModel(model), TargetModel(exit_beside(model, 2, weights))


@cache
def next_token(after: tuple[int, ...]) -> Tensor:
    """The target's own distribution behind the prompt and these tokens."""
    with torch.inference_mode():
        return pair()[0].model(torch.tensor([[*PROMPT, *after]])).logits[0, -1].softmax(-1)


def drawn_below(fixed: tuple[int, ...], head: tuple[int, ...] = (0, 1, 2)) -> Callable[[TreeBuilder, Rng], None]:
    target, draft = pair(head)

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        slot = prefilled(target, PROMPT)
        asked = Request("r", tuple(PROMPT), SamplingParams(temperature=1.0), mode="traversal", target_slot=lambda: slot)
        for token in fixed:
            builder.add_fixed(ROOT, token, "recall")
        DraftModelDrafter(draft, early_exit=True).begin(asked).draw(builder, 2, rng)

    return drawing


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize(("fixed", "head"), [((), (0, 1, 2)), ((1,), (0, 1, 2)), ((2,), (0, 2))])
def test_a_sampled_step_is_exact(mode: str, fixed: tuple[int, ...], head: tuple[int, ...]) -> None:
    """Every tree that an exit draws, and every verdict on it."""
    check_drawn_step(next_token, drawn_below(fixed, head), mode)


def test_samples_carry_the_distribution_they_were_sampled_from() -> None:
    """Beside a cached sibling."""
    check_draft_distribution(drawn_below((1,)))


# Refusals


def test_another_target_is_refused_by_name(folder: Path) -> None:
    """As for every trained draft; and an exit is no target."""
    with pytest.raises(ModelLoadError, match="was trained for LlamaForCausalLM and uses its embeddings"):
        load_draft(folder, tiny_target(seed=1), TOKENIZER)
    with pytest.raises(ModelLoadError, match="give it as the draft model beside the target that it was"):
        load_target(folder)


def test_weights_that_do_not_fit_are_refused() -> None:
    """Missing or misshapen ones, in one line."""
    target = tiny_target()
    with pytest.raises(ModelLoadError, match="do not fit: 'gate_proj"):
        exit_beside(target, 1, {})
    with pytest.raises(ModelLoadError, match="size mismatch") as caught:
        exit_beside(target, 1, random_weights(16))
    assert "\n" not in str(caught.value)


def test_a_target_without_a_final_norm_is_refused(tmp_path: Path) -> None:
    """Where the adapter would have no place."""
    target = tiny_target()
    target.model.norm = None
    with pytest.raises(UnsupportedError, match="no final `norm`"):
        exit_beside(target, 1, random_weights(32))


def test_lessons_may_stay_for_other_trainings(folder: Path, tmp_path: Path) -> None:
    """One that reads the same of the same texts reads nothing, and learns the same; another layer is read anew."""
    phases: list[str] = []

    def train_beside(name: str, recipe: ExitRecipe) -> None:
        train(tmp_path / name, recipe, lessons=tmp_path / "lessons", progress=lambda phase, *_: phases.append(phase))

    train_beside("first", RECIPE)
    assert phases.count("answers") == 2
    train_beside("second", RECIPE)
    assert phases.count("answers") == 2
    for name in ("first", "second"):
        assert (tmp_path / name / "draft.safetensors").read_bytes() == (folder / "draft.safetensors").read_bytes()
    train_beside("third", replace(RECIPE, layer=1))
    assert phases.count("answers") == 4
