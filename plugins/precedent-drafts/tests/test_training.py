"""The contract of every training: it raises acceptance, survives a kill, and refuses what does not fit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from helpers.conditioned import opinionated_weights, random_conditioned
from helpers.tiny_architectures import settings_of
from helpers.tiny_draft import PLAN, PROMPTS, RECIPE, tiny_target, train_tiny
from safetensors.torch import load, save
from transformers import PreTrainedModel

from precedent.cache import Completion, SQLiteStore, tokenizer_fingerprint
from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import Drafter, load_draft
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.engine.engine import Engine
from precedent.errors import CacheError, ConfigError, ModelLoadError, PromptError, UnsupportedError
from precedent.target import TargetModel
from precedent.target.load.first_layers import base_of, first_layers
from precedent.target.load.loading import load_target
from precedent_cpu.quantised_linear import QuantisedLinear
from precedent_drafts.heads import HEAD_TOKENS
from precedent_drafts.trained import TOKEN_GUIDED, draft_beside, initial_weights
from precedent_drafts.training.blocks import BlockRecipe
from precedent_drafts.training.chains import ConditionedRecipe, ExitRecipe
from precedent_drafts.training.lessons import Author, OutputHead, Reader, Text, check_trainable
from precedent_drafts.training.measure import Measurement
from precedent_drafts.training.prompts import read_completions, read_prompts, split
from precedent_drafts.training.training import Plan, Recipe
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
COMMON: dict[str, Any] = {"head_tokens": 96, "answer_tokens": 12, "chunk_prompts": 8, "learning_rate": 3e-3}
SHAPE = {"layers": 1, "context_tokens": 8} | COMMON
BLOCK = BlockRecipe(block_size=3, **SHAPE)
RECIPES: dict[str, Recipe] = {
    "chain": RECIPE,
    "exit": ExitRecipe(exit_layer=2, exit_width=24, batch_texts=4, **COMMON),
    "conditioned": ConditionedRecipe(fusion=TOKEN_GUIDED, passes=2, mask_top_k=3, **SHAPE),
    "block": BLOCK,
    "block without condition": replace(BLOCK, condition="none"),
}
PLANS = dict.fromkeys(RECIPES, Plan(chunks=2, completions=2, steps=6)) | {"chain": PLAN}
EACH = pytest.mark.parametrize("name", RECIPES)

FolderOf = Callable[[str], Path]


class Killed(BaseException):
    """Stands for a signal that nobody handles."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder of a trained draft of a kind."""
    out = tmp_path_factory.mktemp("drafts")

    @cache
    def trained(name: str) -> Path:
        train_tiny(out / name, RECIPES[name], PLANS[name])
        return out / name

    return trained


def answered(target: PreTrainedModel, number: int = 8) -> list[Text]:
    author = Author(target, TOKENIZER, 1.0)
    texts = author.texts(PROMPTS[:number], range(900, 900 + number), 12)
    author.close()
    return texts


def untrained(name: str, target: PreTrainedModel, folder: Path) -> PreTrainedModel:
    if name == "chain":
        return draft_beside(target, (0,), {**initial_weights(target, (0,)), HEAD_TOKENS: torch.arange(259)})
    if name == "exit":
        return first_layers(target, 2)
    return train_tiny(folder, replace(RECIPES[name], head_tokens=0), Plan(2, 0, 1), target).draft


@EACH
@pytest.mark.sampled(5)
def test_training_raises_acceptance(name: str, tmp_path: Path) -> None:
    """Of held-out answers; of a conditioned chain also that of later samples."""
    train_and_compare(name, tiny_target(), tmp_path)


@pytest.mark.gpu
@EACH
def test_on_cuda_training_raises_acceptance_and_the_draft_drafts(name: str, tmp_path: Path) -> None:
    train_and_compare(name, tiny_target().to("cuda"), tmp_path)
    check_that_it_drafts(tiny_target().to("cuda"), tmp_path / "draft")


def train_and_compare(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    measurement = Measurement(target, answered(target))
    plan = Plan(2, 0, 50, rounds=2, rollouts=1) if name == "chain" else Plan(3, 0, 50)
    recipe = replace(RECIPES[name], head_tokens=0, learning_rate=3e-3 if name == "chain" else 1e-2)
    trained = train_tiny(tmp_path / "draft", recipe, plan, target)
    before, after = (
        measurement.report("draft", draft) for draft in (untrained(name, target, tmp_path / "before"), trained.draft)
    )
    assert trained.num_tokens == plan.chunks * 8 * 12
    assert after["positions"] == 8 * 12
    first = [float(np.ravel(each["acceptance"])[0]) for each in (before, after)]
    assert first[1] > first[0] + 0.05
    if name == "conditioned":
        later = [each["acceptance_by_draw"][1] for each in (before, after)]
        assert later[1] > later[0]


@pytest.mark.parametrize(
    ("name", "phase", "number"),
    [
        ("chain", "rollouts", 0), ("chain", "training", 9), ("exit", "answers", 8), ("conditioned", "training", 3),
        ("block", "training", 3),
        pytest.param("exit", "training", 6, marks=pytest.mark.exhaustive),
        pytest.param("block without condition", "training", 6, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
@pytest.mark.sampled(5)
def test_a_killed_training_ends_as_an_uninterrupted_one(
    name: str, phase: str, number: int, folder_of: FolderOf, tmp_path: Path
) -> None:
    """With the same bytes, and nothing that was done is done again."""
    done, resumed, out = list[tuple[str, int]](), list[tuple[str, int]](), tmp_path / "draft"

    def kill(at: str, count: int, *_: object) -> None:
        done.append((at, count))
        if (at, count) == (phase, number):
            raise Killed

    with pytest.raises(Killed):
        train_tiny(out, RECIPES[name], PLANS[name], progress=kill, checkpoint_steps=2)
    assert [path.name for path in out.iterdir()] == ["training"]
    (out / "training" / "answers-0001.safetensors.partial").write_bytes(b"half")
    train_tiny(
        out, RECIPES[name], PLANS[name], progress=lambda at, count, *_: resumed.append((at, count)), checkpoint_steps=2
    )
    assert [path.name for path in out.iterdir()] == [path.name for path in folder_of(name).iterdir()]
    assert all(path.read_bytes() == (folder_of(name) / path.name).read_bytes() for path in out.iterdir())
    assert len(resumed) < len(done) + len(set(resumed) - set(done))


def test_what_was_begun_is_not_mixed_with_another_training(tmp_path: Path) -> None:
    """Another kind, setting, target or texts: the first difference is named."""

    def kill(phase: str, *_: object) -> None:
        if phase == "training":
            raise Killed

    with pytest.raises(Killed):
        train_tiny(tmp_path, progress=kill)
    for says, given in (
        ("kind", {"recipe": RECIPES["exit"]}),
        ("head_tokens", {"recipe": replace(RECIPE, head_tokens=64)}),
        ("texts", {"prompts": PROMPTS[:3]}),
        ("target", {"target": tiny_target(seed=1)}),
    ):
        with pytest.raises(ConfigError, match=f"has another {says}"):
            train_tiny(tmp_path, **given)  # type: ignore[arg-type]
    (tmp_path / "training" / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        train_tiny(tmp_path)


def test_it_says_what_it_will_cost_before_it_starts(tmp_path: Path) -> None:
    said: list[str] = []
    train_tiny(tmp_path, RECIPE, 0.0005, announce=said.append, progress=lambda phase, *_: said.append(phase))
    cost = next(place for place, line in enumerate(said) if line.startswith("about "))
    assert "answers of the target" in said[cost]
    assert f"MB in {tmp_path / 'training'} until it ends" in said[cost]
    assert said.index("training") > cost


def test_targets_that_cannot_have_such_drafts_are_refused(tmp_path: Path) -> None:
    """Logits that are more than a head's, an exit behind the last layer, and masks that are made by hand."""
    target = tiny_target()
    with pytest.raises(ConfigError, match="not smaller than its target of 3"):
        train_tiny(tmp_path, replace(RECIPE, layers=3))
    with pytest.raises(ConfigError, match="exit_layer=3: an exit of this target stands behind layer 1 to 2"):
        train_tiny(tmp_path, replace(RECIPES["exit"], exit_layer=3))  # type: ignore[call-arg]
    with pytest.raises(UnsupportedError, match="is trained on full attention alone"):
        RECIPES["conditioned"].teacher(tiny_causal_lm("gemma3_text"))
    target.lm_head.register_forward_hook(lambda module, inputs, logits: logits**3)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM does more to its logits"):
        train_tiny(tmp_path, target=target)


# What is read of the target


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere2", "granite"])
def test_the_head_and_the_texts_are_read_as_the_model_does(architecture: str) -> None:
    """Also where logits are scaled or capped behind the head, and behind a beginning that was read before.

    Longer, shorter, equal and other texts come one after the other; the last also learns from what is shared.
    """
    model = tiny_causal_lm(architecture, **settings_of(architecture))
    check_trainable(model)
    reader, start = Reader(model), [3, 1, 4, 1, 5, 9, 2, 6]
    for tail, count in (([5, 3], 2), ([5, 3, 8, 9], 3), ([5, 3, 8, 9], 3), ([], 1), ([7], 9), ([5, 3, 8], 1)):
        ids = torch.tensor([[*start, *tail]])
        with torch.no_grad():
            expected = base_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0, -count:]
            logits = model(ids).logits[0, -count:]
        found = reader.last([*start, *tail], count)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(OutputHead(model, torch.float64)(found), logits)


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
    ("name", "text", "says"),
    [
        ("prompts.txt", "", "it is empty"),
        ("prompts.txt", "x" * 99, "all 1 are longer than 60 tokens"),
        ("prompts.jsonl", '{"prompt": "a"}\n{"turns": []}', "not a question"),
    ],
)
def test_a_file_without_prompts_says_so(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PromptError, match=says):
        read_prompts(tmp_path / name, TOKENIZER, 60)


def test_held_out_prompts_are_not_learned_and_stay_the_same() -> None:
    prompts = [(number,) for number in range(40)]
    learned, held_out = split(prompts, 3)
    assert (len(learned), len(held_out)) == (36, 4)
    assert sorted(learned + held_out) == prompts
    assert split(prompts, 3) == (learned, held_out)
    assert split(prompts, 4) != (learned, held_out)
    with pytest.raises(PromptError, match="one prompt is too few"):
        split(prompts[:1], 0)


def test_completions_of_one_tenant_are_learned_from(tmp_path: Path) -> None:
    """Behind what was asked."""
    store, fingerprint = SQLiteStore.open(tmp_path / "cache"), tokenizer_fingerprint(TOKENIZER)
    for tenant, query, answer in [("shop", "old", "first"), ("other", "secret", "hidden"), ("shop", "new", "second")]:
        ids = tuple(TOKENIZER.encode(answer))
        store.insert(Completion(ids, fingerprint, "m", tenant, query), None, None)
    store.close()
    texts = read_completions(tmp_path / "cache", TOKENIZER, "shop", 5)
    assert [TOKENIZER.decode(text.token_ids) for text in texts] == [
        f"<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n{answer}"
        for query, answer in [("new", "secon"), ("old", "first")]
    ]
    assert [text.num_answer_tokens for text in texts] == [5, 5]
    with pytest.raises(CacheError, match="no completions of tenant 'nobody'"):
        read_completions(tmp_path / "cache", TOKENIZER, "nobody", 5)
    assert train_tiny(tmp_path / "draft", plan=Plan(1, 1, 1), completions=texts).num_tokens == 8 * 12 + 10


# A trained draft in its folder


def test_a_trained_draft_drafts_for_its_target(folder_of: FolderOf) -> None:
    """Greedy text is plain decoding's, with drafts from the folder, half of the vocabulary out of its reach."""
    check_that_it_drafts(tiny_target(), folder_of("chain"))


def check_that_it_drafts(target: PreTrainedModel, folder: Path) -> None:
    texts = []
    for draft in (None, folder):
        engine = Engine.load(target, tokenizer=TOKENIZER, draft_model=draft)
        speculation = SpeculationConfig(drafters=("draft-model",))
        result = engine.submit(PROMPTS[0], SamplingParams(max_tokens=20), speculation=speculation).result()
        texts.append(result.token_ids)
        engine.close()
    assert texts[0] == texts[1]
    assert result.stats.num_draft_tokens > 0


@EACH
@pytest.mark.sampled(3)
def test_a_draft_is_quantised_in_its_file_and_drafts_beside_a_quantised_target(name: str, tmp_path: Path) -> None:
    """It is trained for the dequantised file; beside either its weights are those of its own file."""
    from precedent_testing.tiny_gguf import write_gguf

    model, tokenizer = tiny_causal_lm(hidden_size=32, vocab_size=260, scale=1.5), byte_tokenizer((("t", "h"),))
    file, folder, texts = write_gguf(tmp_path / "model.gguf", model, tokenizer, kind="Q8_0"), tmp_path / "draft", []
    dense = load_target(file, device="cpu", dtype="float32")[0]
    train_tiny(folder, RECIPES[name], PLANS[name], dense)
    stored = load(next(folder.glob("[dm]*.safetensors")).read_bytes())
    matrices = {
        key: weight for key, weight in stored.items() if key.endswith("_proj.weight") and not weight.shape[1] % 32
    }
    assert {weight.dtype for weight in matrices.values()} == {torch.int8}
    unpacked: Any = load_draft(folder, dense, tokenizer)
    draft: Any = load_draft(folder, load_target(file, device="cpu")[0], tokenizer)
    kinds = {place: module.quantised for place, module in draft.named_modules() if isinstance(module, QuantisedLinear)}
    own = [place for place, weight in kinds.items() if weight.kind == "int8"]
    assert own
    for place in own:
        found = torch.from_numpy(kinds[place].dequantised(slice(kinds[place].out_features)))
        assert torch.equal(found, unpacked.get_submodule(place).weight), place
    for draft_model in (None, folder):
        with closing(Engine.load(file, device="cpu", draft_model=draft_model)) as engine:
            result = engine.submit(PROMPTS[0], SamplingParams(max_tokens=20)).result()
            texts.append(result.token_ids)
    assert texts[0] == texts[1]


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


# Refusals


def test_a_damaged_draft_is_one_clear_line(folder_of: FolderOf, tmp_path: Path) -> None:
    good = {path.name: path.read_bytes() for path in (folder_of("chain")).iterdir()}
    whole, settings = good["draft.safetensors"], good["draft.json"]
    torn = {name: weight for name, weight in load(whole).items() if name != "layers.0.mlp.up_proj.weight"}
    for number, (changed, says) in enumerate(
        (
            ({"draft.safetensors": whole[:-100]}, "cannot load the draft model"),
            ({"draft.json": settings.replace(b'"format": 1', b'"format": 9')}, "has format 9, this version reads 1"),
            ({"draft.json": b"{"}, "cannot be read"),
            ({"draft.safetensors": save(torn)}, "mlp.up_proj.weight"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        for name, content in (good | changed).items():
            (tmp_path / str(number) / name).write_bytes(content)
        with pytest.raises(ModelLoadError, match=says) as caught:
            load_draft(tmp_path / str(number), tiny_target(), TOKENIZER)
        assert "\n" not in str(caught.value)


def test_a_draft_of_another_target_is_refused_by_name(folder_of: FolderOf) -> None:
    with pytest.raises(ModelLoadError, match=r"trained for LlamaForCausalLM and uses its embeddings"):
        load_draft(folder_of("chain"), tiny_target(seed=1), TOKENIZER)


def test_a_target_of_the_same_embeddings_may_use_it_and_is_told(
    folder_of: FolderOf, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target()
    load_draft(folder_of("chain"), target, TOKENIZER)
    assert caplog.messages == []
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.add_(0.5)
    load_draft(folder_of("chain"), target, TOKENIZER)
    assert ["fewer of its tokens will be accepted" in message for message in caplog.messages] == [True]


# Drafts that read hidden states


def test_engines_that_share_a_draft_do_not_mix_their_states() -> None:
    """What one thread hands in, another does not read."""
    model = tiny_causal_lm("llama", vocab_size=16, hidden_size=16)
    weights = opinionated_weights(model, 2, TOKEN_GUIDED, range(16))
    inputs: Any = random_conditioned(model, (2,), TOKEN_GUIDED, weights).get_input_embeddings()
    tokens, states = torch.tensor([[3, 4]]), torch.ones(2, 16, dtype=torch.float64)
    with torch.no_grad():
        bare = inputs(tokens)
        other = Thread(target=lambda: inputs.give([5 * states]))
        other.start()
        other.join()
        assert torch.equal(inputs(tokens), bare)
        inputs.give([states])
        assert not torch.equal(inputs(tokens), bare)
        inputs.give([])
        assert torch.equal(inputs(tokens), bare)
