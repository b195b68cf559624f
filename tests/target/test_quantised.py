"""Weights that are not dense parameters: they keep their own forward, and are known by the bytes that they store."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.packed_checkpoints import FORMATS, write_packed
from helpers.quantised import Int8Tensor, with_int8_tensors, with_packed_linears
from safetensors.torch import load_file, save_file
from torch import nn

from precedent import Engine, SpeculationCache, generate
from precedent.cache import model_fingerprint
from precedent.config import SamplingParams
from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target import TargetModel
from precedent.target.fingerprints import weights_digest
from precedent.target.load.loading import load_draft, load_target
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

KINDS = (with_int8_tensors, with_packed_linears)
PROMPT = [72, 101, 108, 108, 111]

Quantised = Callable[[Any], Any]


def tiny(quantised: Quantised, seed: int = 0) -> Any:
    return quantised(tiny_causal_lm(dtype=torch.float32, seed=seed))


def greedy(model: Any, length: int) -> list[int]:
    """Transformers' own greedy text."""
    ids = torch.tensor([PROMPT])
    return model.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("quantised", KINDS)
def test_a_model_of_packed_weights_answers_as_it_does_in_transformers(quantised: Quantised, tmp_path: Path) -> None:
    """By an engine that keeps prefixes, and by `generate`; its first layers can be its draft model."""
    ids = torch.tensor([PROMPT])
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = tiny(quantised).generate(ids, **settings)[0, len(PROMPT) :].tolist()
    with (
        SpeculationCache.open(tmp_path / "cache.db", embedder=HashEmbedder()) as cache,
        closing(Engine(tiny(quantised), byte_tokenizer(), name="packed", cache=cache, keep_prefixes=True)) as engine,
    ):
        answer = engine.submit(PROMPT, SamplingParams(max_tokens=24)).result().token_ids
        assert engine.submit(PROMPT * 40, SamplingParams(max_tokens=4), prefix_tokens=180).result().token_ids
    assert list(answer) == expected[: len(answer)]
    found = tiny(quantised).generate(ids, custom_generate=generate, **settings)[0, len(PROMPT) :].tolist()
    assert found == expected
    draft = load_draft("first-layers:1", tiny(quantised), byte_tokenizer())
    assert TargetModel(draft).vocab_size == TargetModel(tiny(quantised)).vocab_size


@pytest.mark.parametrize("quantised", KINDS)
def test_fingerprints_depend_on_the_packed_numbers(quantised: Quantised) -> None:
    def prints(seed: int) -> tuple[str, str]:
        model = tiny(quantised, seed)
        return model_fingerprint(model.config.to_dict(), model.state_dict()), weights_digest(model.state_dict())

    assert prints(0) == prints(0)
    assert all(one != other for one, other in zip(prints(0), prints(1), strict=True))


def test_only_some_layers_may_be_packed_and_the_others_keep_their_fast_products() -> None:
    model = tiny_causal_lm(dtype=torch.float32)
    down = model.get_submodule("model.layers.1.mlp.down_proj")
    assert isinstance(down, nn.Linear)
    down.weight = nn.Parameter(Int8Tensor.of(down.weight.detach()), requires_grad=False)
    TargetModel(model)
    assert type(down) is nn.Linear
    assert type(model.get_submodule("model.layers.0.mlp.down_proj")).__name__ == "PackedLinear"


@pytest.mark.parametrize("quantised", KINDS)
def test_bit_identical_answers_are_refused_by_the_layers_name(quantised: Quantised) -> None:
    with pytest.raises(UnsupportedError, match="row-wise kernels"):
        TargetModel(tiny(quantised), bitwise=True)


def test_a_checkpoint_in_blocks_of_fp8_says_that_it_is_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU transformers loads such weights dense, in twice their size, and its own message is silenced."""
    tiny_causal_lm(dtype=torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    weights, config = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].float().abs().max() / 448
        weights[name] = (weights[name].float() / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))
    model, _ = load_target(tmp_path, device="cpu")
    assert model.get_submodule("model.layers.0.mlp.up_proj").weight.dtype == torch.bfloat16
    (said,) = [text for text in caplog.messages if "dequantised" in text]
    assert "fp8" in said
    assert str(tmp_path) in said


def test_a_method_that_nothing_here_knows_is_named(tmp_path: Path) -> None:
    """Transformers leaves it out with a warning, and then lacks the weights."""
    write_packed(tmp_path, "awq", {"awq": ({"quant_method": "exl9"}, FORMATS["awq"][1])})
    with pytest.raises(ModelLoadError, match=r"does not know their quantisation, 'exl9': model\..* is missing"):
        load_target(tmp_path, device="cpu")
