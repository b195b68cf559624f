"""The order desk's adapter: what it is trained on, its loss, and how it gets into the target's weights."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("peft")

import peft

from precedent.errors import ModelLoadError
from precedent.target.load.loading import load_target
from precedent.text.prompt import render_prompt
from precedent_demo import SYSTEM_PROMPT, adapted, adapted_target, logs, make_database, train_adapter
from precedent_demo.train_adapter import Encoder, batches, loss_of
from precedent_demo.workflows import generate_requests
from precedent_drafts.training.prompts import read_prompts
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(byte_tokenizer())


def test_training_sees_the_ids_of_inference_and_is_judged_by_the_turns_of_the_assistant_alone(encoder: Encoder) -> None:
    """Each turn's prompt, as rendered for a model, is what stands before its tokens in the training data."""
    tokenizer, desk = byte_tokenizer(), make_database(0, split="train")
    end, system = tokenizer.convert_tokens_to_ids("<|im_end|>"), {"role": "system", "content": SYSTEM_PROMPT}
    for request in islice(generate_requests("train", 0, desk), 6):
        messages = logs.expert_messages(request, desk, random.Random(1))
        conversation = encoder.conversation(messages)
        ids = [*encoder.head, *conversation.token_ids.tolist()]
        expected = [False] * len(ids)
        for position, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = render_prompt(tokenizer, [system, *messages[:position]], logs.tool_schemas())
                assert ids[: len(prompt)] == prompt
                stop = ids.index(end, len(prompt)) + 1
                expected[len(prompt) : stop] = [True] * (stop - len(prompt))
        assert [False] * len(encoder.head) + conversation.written.tolist() == expected
        assert ids[-1] == end


def test_the_loss_is_that_of_plain_forwards_over_whole_conversations(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_adapter, "CONVERSATIONS_PER_STEP", 2)
    model, losses = tiny_causal_lm(), []
    batch = next(batches(encoder, "train"))
    for row, written in zip(batch.token_ids, batch.written, strict=True):
        ids = torch.cat([torch.tensor(encoder.head), row])[None]
        logits = model(ids).logits[0, len(encoder.head) - 1 : -1]
        losses.append(cross_entropy(logits[written].float(), row[written], reduction="none"))
    assert loss_of(model, encoder.head, batch).item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)


def test_training_lowers_the_loss_and_leaves_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_adapter, "CONVERSATIONS_PER_STEP", 1)
    model = tiny_causal_lm(dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained, losses = train_adapter.train(model, byte_tokenizer(), 6, rate=0.03)
    assert losses[-1] < 0.95 * losses[0]
    with trained.disable_adapter():
        after = trained.base_model.model.state_dict().items()
        plain = {name.replace(".base_layer", ""): value for name, value in after}
    assert all(torch.equal(value, plain[name]) for name, value in before.items())


def test_logs_are_read_as_prompts(tmp_path: Path, encoder: Encoder) -> None:
    """What `measure-draft` makes of them: every turn of the assistant, after the tools."""
    file = tmp_path / "desk.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in islice(logs.logged("A", 0), 3)), encoding="utf-8")
    prompts, left_out = read_prompts(file, byte_tokenizer(), 100_000)
    assert left_out == 0
    assert len(prompts) >= 6
    assert all(list(prompt[: len(encoder.head)]) == encoder.head for prompt in prompts)


@pytest.mark.parametrize(("name", "most_megabytes"), [("adapter", 12), ("draft", 16)])
def test_shipped_weights_are_small_and_hold_no_pickle(name: str, most_megabytes: int) -> None:
    folder = Path(adapted.__file__).parent / "models" / name
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert {Path(file).suffix for file in files} == {".safetensors", ".json", ".md"}
    assert sum(files.values()) <= most_megabytes * 10**6


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the place of the packaged target, and an empty cache folder."""
    folder = tmp_path / "plain-model"
    tiny_causal_lm(dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(adapted, "load_target", lambda name, **settings: load_target(folder, **settings))
    monkeypatch.setattr(adapted, "version", lambda package: "1.0")
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
    model, tokenizer = load_target(adapted_target(source), device="cpu")
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
    assert adapted_target(second) not in (folder, plain)


def test_a_missing_adapter_and_one_for_another_model_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no adapter in"):
        adapted_target(tmp_path)
    larger = peft.get_peft_model(tiny_causal_lm(num_hidden_layers=5), peft.LoraConfig(r=2, target_modules="all-linear"))
    larger.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelLoadError, match="which the target model does not have"):
        adapted_target(tmp_path / "other")
