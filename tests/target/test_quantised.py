"""Weights that are not dense parameters: they keep their own forward, and are known by the bytes that they store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.quantised import Int8Tensor, with_int8_tensors, with_packed_linears
from safetensors.torch import load_file, save_file
from torch import nn

from precedent import Engine, SpeculationCache, generate
from precedent.cache import model_fingerprint
from precedent.config import SamplingParams
from precedent.errors import UnsupportedError
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
def test_a_model_of_packed_weights_answers_as_it_does_in_transformers(quantised: Quantised) -> None:
    expected = greedy(tiny(quantised), 24)
    engine = Engine(tiny(quantised), byte_tokenizer(), name="packed")
    try:
        answers = [engine.submit(PROMPT, SamplingParams(max_tokens=24)).result() for _ in range(2)]
    finally:
        engine.close()
    assert [list(answer.token_ids) for answer in answers] == [expected[: len(answer.token_ids)] for answer in answers]
    assert len(answers[0].token_ids) > 0


@pytest.mark.parametrize("quantised", KINDS)
def test_transformers_generate_takes_it(quantised: Quantised) -> None:
    model, ids = tiny(quantised), torch.tensor([PROMPT])
    found = model.generate(ids, custom_generate=generate, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert found[0, len(PROMPT) :].tolist() == greedy(tiny(quantised), 12)


@pytest.mark.parametrize("quantised", KINDS)
def test_fingerprints_depend_on_the_packed_numbers(quantised: Quantised) -> None:
    def prints(seed: int) -> tuple[str, str]:
        model = tiny(quantised, seed)
        return model_fingerprint(model.config.to_dict(), model.state_dict()), weights_digest(model.state_dict())

    assert prints(0) == prints(0)
    assert all(one != other for one, other in zip(prints(0), prints(1), strict=True))


@pytest.mark.parametrize("quantised", KINDS)
def test_prefixes_are_kept_for_it(quantised: Quantised, tmp_path: Path) -> None:
    cache = SpeculationCache.open(tmp_path / "cache.db", embedder=HashEmbedder())
    engine = Engine(tiny(quantised), byte_tokenizer(), name="packed", cache=cache, keep_prefixes=True)
    try:
        answer = engine.submit(PROMPT * 40, SamplingParams(max_tokens=4), prefix_tokens=180).result()
        assert answer.token_ids
    finally:
        engine.close()
        cache.close()


@pytest.mark.parametrize("quantised", KINDS)
def test_its_first_layers_can_be_its_draft_model(quantised: Quantised) -> None:
    model = tiny(quantised)
    draft = load_draft("first-layers:1", model, byte_tokenizer())
    assert TargetModel(draft).vocab_size == TargetModel(model).vocab_size


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
    names = in_blocks_of_fp8(tmp_path)
    model, _ = load_target(tmp_path, device="cpu")
    assert model.get_submodule("model.layers.0.mlp.up_proj").weight.dtype == torch.bfloat16
    (said,) = [text for text in caplog.messages if "dequantised" in text]
    assert "fp8" in said
    assert str(tmp_path) in said
    assert names


def in_blocks_of_fp8(folder: Path) -> list[str]:
    """Store the matrices of a folder's layers in FP8, with a scale for each block; returns their names."""
    weights = load_file(folder / "model.safetensors")
    names = [name for name in weights if name.endswith("_proj.weight")]
    for name in names:
        scale = weights[name].float().abs().max() / 448
        weights[name] = (weights[name].float() / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return names
