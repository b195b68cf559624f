"""Checkpoints whose linear layers are quantised: packed by a quantiser, or made while an ordinary one is loaded."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.packed_checkpoints import FORMATS, write_packed
from helpers.saved_models import logits_of, saved
from safetensors.torch import load_file, save_file

from precedent import Engine
from precedent.config import SamplingParams
from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.target.fingerprints import weights_digest
from precedent.target.load.loading import load_draft, load_target
from precedent.target.quantised import is_quantised
from precedent_cpu.quantised_linear import QuantisedLinear
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(5)
def test_packed_codes_are_read_as_their_format_defines_them(name: str, tmp_path: Path) -> None:
    """Without the quantiser's package; to the bit where a zero point is one of the codes."""
    expected = write_packed(tmp_path, name)
    model, _ = load_target(tmp_path, device="cpu")
    for path, module in model.named_modules():
        if path.endswith("_proj"):
            assert isinstance(module, QuantisedLinear), path
            found = torch.from_numpy(module.quantised.dequantised(slice(None)))
            torch.testing.assert_close(found, expected.get_parameter(f"{path}.weight"), rtol=0, atol=1e-6)
            part = torch.from_numpy(module.quantised.dequantised(slice(5, 17)))
            assert torch.equal(part, found[5:17])
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=1e-4, atol=1e-4)
    assert not isinstance(model.lm_head, QuantisedLinear)
    assert weights_digest(model.state_dict()) == weights_digest(load_target(tmp_path, device="cpu")[0].state_dict())


@pytest.mark.parametrize(
    ("part", "spoil", "says"),
    [
        (
            "qweight",
            lambda tensor: tensor[:-1],
            r"mlp\.up_proj\.qweight .* has the shape \(7, 96\), .* needs \(8, 96\)",
        ),
        ("scales", lambda tensor: tensor[:, :-1], r"0\.mlp\.up_proj\.scales .* has the shape \(2, 95\)"),
        ("scales", lambda tensor: tensor * float("nan"), r"0\.mlp\.up_proj\.scales .* not finite"),
        ("g_idx", lambda tensor: tensor * 0, r"0\.mlp\.up_proj\.g_idx .* does not put the inputs into groups"),
    ],
)
def test_a_damaged_part_is_named(part: str, spoil: Any, says: str, tmp_path: Path) -> None:
    write_packed(tmp_path, "gptq")
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.0.mlp.up_proj.{part}"
    tensors[name] = spoil(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=says):
        logits_of(load_target(tmp_path, device="cpu")[0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_causal_lm(dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
    return saved(tmp_path / "plain", model)


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.005), ("int4", 0.075)])
def test_a_checkpoint_is_quantised_while_it_is_loaded(quantization: str, error: float, folder: Path) -> None:
    """Its layers as it was asked; embeddings, head and what depends on bits most in eight bits, its norms not."""
    plain = load_target(folder, device="cpu", dtype="float32")[0]
    model, _ = load_target(folder, device="cpu", quantization=quantization)
    assert model.dtype == torch.float32
    for path, module in model.named_modules():
        if hasattr(module, "quantised"):
            ends = path.endswith(("lm_head", "embed_tokens", "v_proj", "down_proj"))
            assert module.quantised.kind == ("int8" if ends else quantization)
            found, expected = (
                module.quantised.dequantised(slice(32)),
                plain.get_parameter(f"{path}.weight")[:32].numpy(),
            )
            assert abs(found - expected).max() <= (0.005 if ends else error) * abs(expected).max(), path
    assert sum(hasattr(module, "quantised") for module in model.modules()) == 3 * 7 + 2
    assert (logits_of(model) - logits_of(plain)).norm() / logits_of(plain).norm() < 5 * error
    drafts = pytest.importorskip("precedent_drafts.fingerprints")
    for fingerprint in (drafts.embeddings_fingerprint, drafts.layers_fingerprint):  # those for one fit the other
        assert fingerprint(model) == fingerprint(plain)


def test_it_is_an_engines_option_and_a_draft_models_target(folder: Path) -> None:
    sampling = SamplingParams(max_tokens=8)
    with closing(Engine.load(folder, device="cpu", quantization="int8")) as engine:
        answer = engine.submit([72, 101, 108], sampling).result().token_ids
        assert is_quantised(engine.target.model)
    with closing(Engine.load(folder, device="cpu", quantization="int8", draft_model="first-layers:1")) as engine:
        assert engine.submit([72, 101, 108], sampling).result().token_ids == answer


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantised_too(quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    folder = saved(tmp_path, tiny_causal_lm("qwen3_moe", dtype=torch.bfloat16, **sizes))
    plain = load_target(folder, device="cpu", dtype="float32")[0]
    model = load_target(folder, device="cpu", quantization=quantization)[0]
    assert {module.quantised.kind for module in model.model.layers[1].mlp.experts.gate} == {quantization}
    assert not any("experts" in name for name, _ in model.named_parameters())
    error = (logits_of(model) - logits_of(plain)).norm() / logits_of(plain).norm()
    assert 0 < error < {"int8": 0.03, "int4": 0.4}[quantization]


def test_a_draft_model_may_be_quantised_or_keep_its_dtype_beside_a_quantised_target(
    folder: Path, tmp_path: Path
) -> None:
    target, tokenizer = load_target(folder, device="cpu", quantization="int8")
    assert load_draft(folder, target, tokenizer).dtype == torch.bfloat16
    write_packed(tmp_path / "awq", "awq")
    assert is_quantised(load_draft(tmp_path / "awq", tiny_causal_lm(), tokenizer))


def gguf(folder: Path) -> Path:
    from precedent_testing.tiny_gguf import write_gguf

    tokenizer = byte_tokenizer((("t", "h"),))
    return write_gguf(folder / "model.gguf", tiny_causal_lm(dtype=torch.float32, vocab_size=260), tokenizer)


def packed(folder: Path) -> Path:
    write_packed(folder, "awq")
    return folder


def with_experts(folder: Path) -> Path:
    model = tiny_causal_lm("mixtral", dtype=torch.bfloat16, num_local_experts=4, hidden_size=64)
    return saved(folder, model)


@pytest.mark.parametrize(
    ("make", "settings", "error", "says"),
    [
        (gguf, {}, UnsupportedError, r"model\.gguf: it is quantised already"),
        (packed, {}, UnsupportedError, "it is quantised already"),
        (with_experts, {}, UnsupportedError, r"not available for mixtral: model\.layers\.0\.mlp\."),
        (None, {"quantization": "int3"}, ConfigError, "quantization='int3' is not one of int8, int4"),
        (None, {"dtype": "bfloat16"}, UnsupportedError, "leave dtype='bfloat16' out"),
        (None, {"device": "meta"}, UnsupportedError, "is for a CPU, and the device is meta"),
        (
            None,
            {"model_kwargs": {"max_memory": {}}},
            UnsupportedError,
            "cannot be given with model_kwargs 'max_memory'",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(
    make: Any, settings: dict[str, Any], error: type[Exception], says: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        load_target(make(tmp_path) if make else folder, **{"device": "cpu", "quantization": "int8", **settings})


def test_an_adapter_of_a_packed_checkpoint_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `precedent doctor`, too."""
    pytest.importorskip("peft")
    write_packed(tmp_path / "base", "awq")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    with pytest.raises(ModelLoadError, match="cannot be merged into its base model's weights in awq"):
        load_target(tmp_path, device="cpu")
    assert precedent("doctor", tmp_path, "--device", "cpu") == 1
    assert "cannot be merged into its base model's weights in awq" in " ".join(capsys.readouterr().out.split())


def test_a_format_that_nothing_here_reads_is_left_to_transformers(tmp_path: Path) -> None:
    write_packed(tmp_path, "awq")
    config = tmp_path / "config.json"
    found = json.loads(config.read_text())
    found["quantization_config"]["version"] = "gemv_fast"
    config.write_text(json.dumps(found))
    with pytest.raises(ModelLoadError, match="AWQ quantized model"):
        load_target(tmp_path, device="cpu")
