"""The order desk's adapter: what it is trained on, the loss, checkpoints, and how it gets into the target's weights."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("precedent_demo")
pytest.importorskip("peft")

import peft

from precedent.engine.generation import GenerationResult
from precedent.errors import ModelLoadError
from precedent.target.load.loading import load_target
from precedent.text.prompt import Message, render_prompt
from precedent_demo import SYSTEM_PROMPT, adapted, make_database
from precedent_demo.adapted import adapted_target
from precedent_demo.training import adapter, batches, checkpoints, compare, draft, logs
from precedent_demo.training.batches import padded
from precedent_demo.training.loss import Head, loss_of
from precedent_demo.training.trajectories import Encoder, conversations, expert_messages, tool_schemas
from precedent_demo.workflows import generate_requests
from precedent_drafts.training.lessons import Text
from precedent_drafts.training.prompts import read_prompts
from precedent_testing.scripted_model import scripted_model_engine
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers

POOL = 4


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(byte_tokenizer())


# --- data -----------------------------------------------------------------------------------------------------------


def dialogues(number: int) -> list[list[Message]]:
    desk = make_database(0, split="train")
    requests = generate_requests("train", 0, desk)
    return [expert_messages(request, desk, random.Random(1)) for request in islice(requests, number)]


def prompt_ids(messages: Sequence[Message]) -> list[int]:
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return render_prompt(byte_tokenizer(), [system, *messages], tool_schemas())


def test_training_sees_the_ids_of_inference_and_is_judged_by_the_turns_of_the_assistant_alone(encoder: Encoder) -> None:
    """Each turn's prompt, as rendered for a model, is what stands before its tokens in the training data."""
    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    for messages in dialogues(6):
        conversation = encoder.conversation(messages)
        ids = [*encoder.head, *conversation.token_ids]
        written = [False] * len(encoder.head) + list(conversation.written)
        expected = [False] * len(ids)
        for position, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = prompt_ids(messages[:position])
                assert ids[: len(prompt)] == prompt
                stop = ids.index(end, len(prompt)) + 1
                expected[len(prompt) : stop] = [True] * (stop - len(prompt))
        assert written == expected
        assert ids[-1] == end


def test_every_pool_has_its_own_conversations_and_a_restart_finds_the_next_batch(encoder: Encoder) -> None:
    found = list(islice(batches.batches(encoder, "train", 2500, pool_size=POOL), 6))
    assert len({batch.pool for batch in found}) > 1
    later = next(batches.batches(encoder, "train", 2500, found[-2].pool, found[-2].number + 1, pool_size=POOL))
    assert torch.equal(later.token_ids, found[-1].token_ids)
    assert all(batch.num_tokens <= 2500 or len(batch.token_ids) == 1 for batch in found)
    texts = {tuple(row.tolist()) for batch in found for row in batch.token_ids}
    assert len(texts) == sum(len(batch.token_ids) for batch in found)


# --- loss -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_plain_forwards_over_whole_conversations(encoder: Encoder) -> None:
    model = tiny_causal_lm()
    several = list(islice(conversations(encoder, "train", 0), 3))
    loss, hits = loss_of(model, Head(encoder.head, 1), padded(several))
    losses, right = [], []
    for one in several:
        ids = torch.tensor([[*encoder.head, *one.token_ids]])
        logits = model(ids).logits[0, len(encoder.head) - 1 : -1]
        mask = torch.tensor(one.written)
        wanted = torch.tensor(one.token_ids)[mask]
        losses.append(cross_entropy(logits[mask].float(), wanted, reduction="none"))
        right.append(logits[mask].argmax(-1) == wanted)
    assert loss.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)
    assert hits == pytest.approx(torch.cat(right).float().mean().item())


def test_a_head_is_computed_again_only_after_its_lifetime(encoder: Encoder) -> None:
    model, head = tiny_causal_lm(), Head(encoder.head[:20], 2)
    first = head.cache(model.get_decoder(), 1).layers[0].keys.clone()
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.k_proj.weight.mul_(2)
    assert torch.equal(head.cache(model.get_decoder(), 1).layers[0].keys, first)
    assert not torch.equal(head.cache(model.get_decoder(), 1).layers[0].keys, first)


# --- a run ----------------------------------------------------------------------------------------------------------


def trainer(folder: Path, *more: str, head_lifetime: int = adapter.HEAD_LIFETIME) -> adapter.Trainer:
    settings = ["--minutes", "1000", "--out", str(folder), "--batch-tokens", "1000", "--rate", "0.02", *more]
    options = adapter.options_of(settings)
    model = tiny_causal_lm(dtype=torch.float32)
    return adapter.Trainer(model, byte_tokenizer(), options, pool_size=POOL, head_lifetime=head_lifetime)


class Stopped(Exception):
    """A kill, as far as a test can make one."""


def run(one: adapter.Trainer, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Train for that many steps and stop without a word; the losses on the way."""
    losses: list[float] = []

    def report(loss: float, hits: float, rate: float) -> None:
        losses.append(loss)
        if len(losses) == steps:
            raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(one, "_report", report)
        with pytest.raises(Stopped):
            one.run()
    return losses


def weights(one: adapter.Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in one.parameters.items()}


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = 1  # a resumed run computes the head at its first step
    whole = trainer(tmp_path / "whole", head_lifetime=at_once)
    expected = run(whole, 3, monkeypatch)
    first = trainer(tmp_path / "parts", head_lifetime=at_once)
    losses = run(first, 1, monkeypatch)
    first.save()
    second = trainer(tmp_path / "parts", "--resume", head_lifetime=at_once)
    losses += run(second, 2, monkeypatch)
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(second)[name], value, rtol=1e-3, atol=1e-5)


def test_training_lowers_the_loss_and_leaves_the_target_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tmp_path)
    frozen = {k: v.clone() for k, v in one.model.state_dict().items() if "lora" not in k}
    losses = run(one, 9, monkeypatch)
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert all(torch.equal(value, one.model.state_dict()[name]) for name, value in frozen.items())


def test_without_resume_a_checkpoint_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tmp_path)
    run(one, 1, monkeypatch)
    one.save()
    assert (tmp_path / checkpoints.CHECKPOINT).is_file()
    assert not list(tmp_path.glob("*.partial"))
    changed = {name for name, value in weights(trainer(tmp_path)).items() if "lora_B" in name and value.any()}
    assert not changed
    assert any(value.any() for name, value in weights(trainer(tmp_path, "--resume")).items() if "lora_B" in name)


# --- the draft model ------------------------------------------------------------------------------------------------


def test_a_draft_learns_from_whole_conversations_of_the_target_behind_the_head() -> None:
    turns: list[tuple[tuple[int, ...], GenerationResult]] = []
    engine = scripted_model_engine(
        lambda prompt: "May I have your email?", on_result=lambda prompt, result: turns.append((prompt, result))
    )
    texts = draft.conversations(engine, turns, 2)
    head = Encoder(engine.tokenizer).head
    assert len(texts) == 2
    for text in texts:
        assert text.token_ids[: text.num_context_tokens] == head
        said = engine.tokenizer.decode(text.token_ids[len(head) :])
        assert said.startswith("<|im_start|>user")
        assert said.count("May I have your email?<|im_end|>") >= 2, "all turns, the last one's answer as well"
    engine.close()


def test_logs_are_read_as_prompts(tmp_path: Path) -> None:
    """What `measure-draft` makes of them: every turn of the assistant, behind the tools."""
    file = tmp_path / "desk.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in islice(logs.logged("A", 0), 3)), encoding="utf-8")
    prompts, left_out = read_prompts(file, byte_tokenizer(), 100_000)
    head = Encoder(byte_tokenizer()).head
    assert left_out == 0
    assert len(prompts) >= 6
    assert all(prompt[: len(head)] == head for prompt in prompts)


@pytest.mark.parametrize("arm", compare.ARMS)
def test_what_can_be_compared_has_a_recipe(arm: str) -> None:
    """All with one size of head."""
    kind, settings = compare.ARMS[arm]
    recipe, training = compare.made(kind, settings)
    assert recipe.head_tokens == compare.COMMON["head_tokens"]
    assert callable(training)


def test_a_compared_draft_is_trained_for_a_time_and_not_again(tmp_path: Path) -> None:
    """As many steps as fit, by a trial that leaves nothing; a folder that is there is left alone."""
    comparison = compare.Comparison.__new__(compare.Comparison)
    comparison._model, comparison._tokenizer = tiny_causal_lm(dtype=torch.float32), byte_tokenizer()
    comparison._texts = [Text(tuple(range(first, first + 20)), 8) for first in range(40, 60)]
    comparison._options = argparse.Namespace(out=tmp_path, minutes=0.002)
    comparison.train("exit-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exit-2", "lessons"]
    steps = json.loads((tmp_path / "exit-2" / "steps.json").read_text())["steps"]
    assert steps >= 1
    written = (tmp_path / "exit-2" / "draft.safetensors").read_bytes()
    comparison.train("exit-2")
    assert (tmp_path / "exit-2" / "draft.safetensors").read_bytes() == written


# --- what is shipped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most_megabytes"), [("adapter", 12), ("draft", 16)])
def test_shipped_weights_are_small_and_hold_no_pickle(name: str, most_megabytes: int) -> None:
    folder = Path(adapted.__file__).parent / "models" / name
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert {Path(file).suffix for file in files} == {".safetensors", ".json", ".md"}
    assert sum(files.values()) <= most_megabytes * 10**6


def test_the_shipped_adapter_fits_the_packaged_model() -> None:
    """By its config alone: the model itself is not there on every machine that tests."""
    config = json.loads((Path(adapted.__file__).parent / "models" / "adapter" / adapted.CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("smollm2-135m-instruct", adapter.RANK)


# --- the adapted target ---------------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the place of the packaged target, and an empty cache folder."""
    folder = tmp_path / "plain-model"
    tiny_causal_lm(dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(adapted, "demo_folder", lambda: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "precedent").mkdir()
    return folder


def trained(folder: Path, seed: int) -> Path:
    """An adapter with something in it, as peft writes it."""
    torch.manual_seed(seed)
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(tiny_causal_lm(dtype=torch.bfloat16), settings).save_pretrained(folder)
    return folder


def test_the_adapted_target_computes_what_peft_computes(plain: Path, tmp_path: Path) -> None:
    source = trained(tmp_path / "adapter", seed=1)
    folder = adapted_target(source)
    model, tokenizer = load_target(folder, device="cpu")
    expected = peft.PeftModel.from_pretrained(load_target(plain, device="cpu")[0], source).merge_and_unload()
    ids = torch.tensor([tokenizer.encode("Where is my order?")])
    assert (model(ids).logits - load_target(plain, device="cpu")[0](ids).logits).abs().max() > 0.05
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0.02, atol=0.02)


def test_a_merged_model_is_kept_and_another_adapter_gets_its_own(plain: Path, tmp_path: Path) -> None:
    first, second = trained(tmp_path / "one", seed=1), trained(tmp_path / "two", seed=2)
    folder = adapted_target(first)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert adapted_target(first) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert adapted_target(second) != folder
    assert plain not in (folder, adapted_target(second))


def test_a_missing_adapter_and_one_for_another_model_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no adapter in"):
        adapted_target(tmp_path)
    larger = peft.get_peft_model(tiny_causal_lm(num_hidden_layers=5), peft.LoraConfig(r=2, target_modules="all-linear"))
    larger.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelLoadError, match="which the target model does not have"):
        adapted_target(tmp_path / "other")
