"""Multimodal checkpoints and adapters used as text models."""

from __future__ import annotations

import json
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
)

from precedent import Engine
from precedent.config import SamplingParams
from precedent.errors import ModelLoadError
from precedent.target.load.loading import load_target
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

SHAPE = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 256,
}  # fmt: skip
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PROMPT = [72, 101, 108, 108, 111]


def config_of(kind: str) -> Any:
    if kind == "llava":
        return LlavaConfig(
            text_config=LlamaConfig(**SHAPE), vision_config=CLIPVisionConfig(**VISION), image_token_index=258
        )
    if kind == "mistral3":
        vision = AutoConfig.for_model("pixtral", **VISION, head_dim=8)
        text = MistralConfig(**SHAPE, head_dim=12)
        return AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, image_token_index=258)
    text = {**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 14}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision)


def saved(kind: str, folder: Path) -> Any:
    """A random model of a multimodal class, in a folder with its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config_of(kind), dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["llava", "mistral3", "qwen2_vl"])
def test_the_language_model_answers_as_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path)
    ids = torch.tensor([PROMPT])
    expected = whole.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(PROMPT) :].tolist()
    model, tokenizer = load_target(tmp_path, device="cpu")
    with closing(Engine(model, tokenizer, name=kind)) as engine:
        found = list(engine.submit(PROMPT, SamplingParams(max_tokens=12)).result().token_ids)
    assert found == expected[: len(found)]
    assert len(found) > 1
    towers = [name for name, _ in model.named_parameters() if "vision" in name]
    assert not towers or kind == "qwen2_vl", "a tower for images takes no memory"


def test_an_adapter_is_loaded_with_its_base_and_merged(adapter: Path) -> None:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about how peft uses it
        wrapped = peft.PeftModel.from_pretrained(tiny_causal_lm(dtype=torch.float32), str(adapter)).eval()
    model, tokenizer = load_target(adapter, device="cpu")
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, wrapped(input_ids=ids).logits, rtol=1e-3, atol=1e-3)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
    assert tokenizer("hi").input_ids == byte_tokenizer()("hi").input_ids
    assert precedent("doctor", adapter) == 0


def test_an_adapter_that_cannot_be_merged_says_how_to_do_it(adapter: Path, tmp_path: Path) -> None:
    """Without a base, with one that it does not fit, and with an adapter in its place."""
    tiny_causal_lm(dtype=torch.float32, hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "base")
    config = adapter / "adapter_config.json"
    for base in (str(tmp_path / "base"), None, "", str(adapter)):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))
        with pytest.raises(ModelLoadError, match="merge it: "):
            load_target(adapter, device="cpu")
