"""GGUF files as models, run as they are: the same numbers as dequantised, and every way in which a file can be bad."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from helpers.packages import hide_packages
from helpers.saved_models import logits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from precedent import Engine
from precedent.cache import model_fingerprint
from precedent.config import SamplingParams
from precedent.errors import ConfigError, ModelLoadError, PrecedentError, UnsupportedError
from precedent.target import TargetModel
from precedent.target.fingerprints import weights_digest
from precedent.target.load.loading import load_config, load_draft, load_target, load_tokenizer
from precedent.target.quantised import is_quantised
from precedent_cpu.quantised_linear import QuantisedEmbedding, QuantisedLinear, shapes_of_experts
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TEXT = "order 66 is  12\nno"
TOKENIZER = byte_tokenizer((("t", "h"),))
WIDE = {"hidden_size": 64, "intermediate_size": 96}
FOR_K = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


def tiny(model_type: str = "llama", seed: int = 0, **settings: Any) -> PreTrainedModel:
    return tiny_causal_lm(model_type, seed=seed, dtype=torch.float32, vocab_size=260, **settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER)


def is_tiny(model: PreTrainedModel, seed: int = 0) -> bool:
    return torch.equal(logits_of(model), logits_of(tiny(seed=seed)))


def test_a_gguf_file_is_the_model_that_was_written(
    file: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said, and nothing written."""
    model, tokenizer = load_target(file)
    assert model.dtype == torch.float32
    assert is_tiny(model)
    assert tokenizer(TEXT).input_ids == TOKENIZER(TEXT).input_ids
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 1024)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelname != "INFO"]
    assert list(file.parent.iterdir()) == [file]


def test_the_end_tokens_of_a_turn_and_of_a_message_are_read_with_that_of_the_text(tmp_path: Path) -> None:
    """A Gemma-style file ends a text with one token and a turn with another."""
    fields = {"tokenizer__ggml__eot_token_id": 97, "tokenizer__ggml__eom_token_id": 98}
    model, tokenizer = load_target(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, **fields))
    assert model.generation_config.eos_token_id == [97, 98, tokenizer.eos_token_id]


def test_a_file_without_the_ending_is_known_by_its_content_also_as_a_draft_model(file: Path) -> None:
    """As Ollama keeps them: sha256-…, without an ending."""
    file = file.rename(file.with_name("sha256-0123"))
    assert is_tiny(load_target(file)[0])
    assert is_tiny(load_draft(str(file), tiny(seed=2), TOKENIZER))


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Q8_0", WIDE),
    "llama tied": ("llama", "Q5_1", {**WIDE, "tie_word_embeddings": True}),
    "llama K": ("llama", "Q4_K", FOR_K),
    "qwen2": ("qwen2", "Q4_0", WIDE),
    "qwen3": ("qwen3", "Q4_1", {**WIDE, "head_dim": 32}),
    "gemma3": ("gemma3_text", "Q6_K", {**FOR_K, "head_dim": 64, "sliding_window": 16, "tie_word_embeddings": True}),
    "qwen3moe": ("qwen3_moe", "IQ4_NL", {**WIDE, **MOE, "head_dim": 32}),
}


@pytest.fixture(params=ARCHITECTURES)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, PreTrainedModel, str]:
    """A file of some architecture in blocks of some type."""
    model_type, kind, sizes = ARCHITECTURES[request.param]
    model = tiny(model_type, **sizes)
    architecture = request.param.partition(" ")[0]
    return write_gguf(tmp_path / "model.gguf", model, TOKENIZER, architecture=architecture, kind=kind), model, kind


def test_quantised_matrices_stay_in_the_file_and_compute_what_dequantised_ones_do(
    written: tuple[Path, PreTrainedModel, str],
) -> None:
    """Also after a copy; beside them, everything is in float32."""
    file, original, kind = written
    model, _ = load_target(file)
    dense = load_target(file, dtype="float32")[0]
    expected = logits_of(dense)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(copy.deepcopy(model)), expected, rtol=1e-4, atol=1e-4)
    assert not is_quantised(dense)
    linears = [module for module in original.modules() if type(module) in (nn.Linear, nn.Embedding)]
    linears += [original.get_input_embeddings()] if type(original.get_input_embeddings()) is not nn.Embedding else []
    found = [module for module in model.modules() if isinstance(module, QuantisedLinear | QuantisedEmbedding)]
    experts = sum(3 * shapes["up"][0] for shapes in map(shapes_of_experts, original.modules()) if shapes)
    assert len(found) == len(linears) + experts
    assert {module.quantised.kind for module in found} == {kind}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    tied = model.get_input_embeddings().quantised is model.get_output_embeddings().quantised
    assert tied == original.config.tie_word_embeddings
    for (name, one), other in zip(original.state_dict().items(), dense.state_dict().values(), strict=True):
        if one.dim() == 1 or kind in ("Q8_0", "Q5_1"):
            assert (one - other).abs().max() <= 0.05 * one.abs().max(), name


def test_an_engine_answers_as_over_dequantised_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its first layers as the draft model, and without kernels."""
    file = write_gguf(tmp_path / "model.gguf", tiny(**WIDE), TOKENIZER, kind="Q8_0")

    def answer(dtype: str | None, draft_model: str | None) -> tuple[int, ...]:
        with closing(Engine.load(file, dtype=dtype, device="cpu", draft_model=draft_model)) as engine:
            return tuple(engine.submit([72, 101, 108], SamplingParams(max_tokens=12)).result().token_ids)

    assert answer(None, None) == answer(None, "first-layers:2") == answer("float32", None)
    hide_packages(monkeypatch)
    assert answer(None, None) == answer("float32", None)


def test_fingerprints_are_those_of_the_numbers(tmp_path: Path) -> None:
    def prints(seed: int) -> tuple[str, ...]:
        file = write_gguf(tmp_path / f"{seed}.gguf", tiny(seed=seed, **WIDE), TOKENIZER, kind="Q8_0")
        model = load_target(file)[0]
        weights = TargetModel(model).weights()
        return model_fingerprint(model.config.to_dict(), weights), weights_digest(weights)

    assert prints(0) == prints(0)
    assert all(one != other for one, other in zip(prints(0), prints(1), strict=True))


def test_first_layers_share_the_weights_of_the_file(tmp_path: Path) -> None:
    target, _ = load_target(write_gguf(tmp_path / "model.gguf", tiny(**WIDE), TOKENIZER, kind="Q8_0"))
    draft = load_draft("first-layers:1", target, TOKENIZER)
    assert draft.model.layers[0] is target.model.layers[0]
    with pytest.raises(UnsupportedError, match="draft_device='meta': the target's quantised weights"):
        load_draft("first-layers:1", target, TOKENIZER, device="meta")
    assert TargetModel(draft).vocab_size == 260


def test_a_model_cannot_be_saved_without_its_weights(tmp_path: Path) -> None:
    model, _ = load_target(write_gguf(tmp_path / "model.gguf", tiny(**WIDE), TOKENIZER, kind="Q8_0"))
    with pytest.raises(Exception, match=r"GgufWeight|QuantisedWeight|quantised"):
        model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(("kind", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_a_file_that_is_not_quantised_has_ordinary_weights_of_its_own_dtype(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, kind=kind)
    model, _ = load_target(file)
    assert model.dtype == load_config(file).dtype == dtype
    assert not is_quantised(model)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, tiny().model.layers[1].mlp.up_proj.weight.to(dtype))


def test_types_that_are_not_run_as_they_are_become_ordinary_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said what they take: all experts of a layer where one of their matrices is of such a type."""
    kinds = {"ffn_down": "IQ2_XS", "attn_q": "BF16", "": "Q4_K"}
    model, _ = load_target(write_gguf(tmp_path / "model.gguf", tiny(**FOR_K), TOKENIZER, kind=kinds))
    layer = model.model.layers[0]
    assert layer.mlp.down_proj.weight.dtype == layer.self_attn.q_proj.weight.dtype == torch.float32
    assert isinstance(layer.mlp.up_proj, QuantisedLinear)
    assert "weights of type IQ2_XS are dequantised and take 0.0 GB of memory" in caplog.text
    mixture = tiny("qwen3_moe", **{**FOR_K, **MOE, "moe_intermediate_size": 256, "head_dim": 64})
    kinds = {"0.ffn_up_exps": "IQ2_XS", "": "Q4_K"}
    model, _ = load_target(write_gguf(tmp_path / "moe.gguf", mixture, TOKENIZER, architecture="qwen3moe", kind=kinds))
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float32
    assert isinstance(model.model.layers[1].mlp.experts.gate[3], QuantisedLinear)
    assert "moe.gguf: weights of type IQ2_XS, Q4_K are dequantised" in caplog.text


def test_factors_of_rotary_frequencies_are_applied(tmp_path: Path) -> None:
    """Llama 3.1's scaling is a tensor of its own."""
    plain = tiny().model.rotary_emb.inv_freq
    factors = torch.linspace(1, 8, len(plain))
    file = write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, more={"rope_freqs.weight": factors})
    torch.testing.assert_close(load_target(file)[0].model.rotary_emb.inv_freq, plain / factors)


def test_tensors_that_do_not_belong_to_the_model_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = {f"blk.{number}.of_the_future.weight": torch.ones(4) for number in range(5)}
    assert is_tiny(load_target(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, more=more))[0])
    assert f"model.gguf: {', '.join(sorted(more)[:4])} do not belong to this model" in caplog.messages


def test_scaling_of_rotary_embeddings_is_read_from_the_header(tmp_path: Path) -> None:
    """Of Gemma's layers, by those that see everything."""
    fields = {"rope__scaling__factor": 8.0, "rope__scaling__original_context_length": 256}

    def config(model: Any, architecture: str, kind: str) -> Any:
        given = {f"{architecture}__{name}": value for name, value in {**fields, "rope__scaling__type": kind}.items()}
        file = write_gguf(
            tmp_path / f"{architecture}-{kind}.gguf", model, TOKENIZER, architecture=architecture, **given
        )
        return load_config(file).rope_parameters

    linear = config(tiny("gemma3_text"), "gemma3", "linear")
    assert linear["full_attention"] | {"rope_type": "linear", "factor": 8.0} == linear["full_attention"]
    assert linear["sliding_attention"]["rope_type"] == "default"
    yarn = config(tiny("qwen2"), "qwen2", "yarn")
    assert yarn | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256} == yarn
    assert config(tiny(), "llama", "none")["rope_type"] == "default"
    with pytest.raises(UnsupportedError, match="scales rotary embeddings by 'longrope'"):
        config(tiny(), "llama", "longrope")


def test_config_and_tokenizer_are_read_without_weights(file: Path) -> None:
    assert load_config(file).num_hidden_layers == 3
    assert load_tokenizer(file)(TEXT).input_ids == TOKENIZER(TEXT).input_ids


def test_a_model_in_parts_is_read_from_all_of_them(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, parts=3)
    second = first.with_name("model-00002-of-00003.gguf")
    assert is_tiny(load_target(first)[0])
    assert is_tiny(load_target(second)[0])
    renamed = first.rename(tmp_path / "first.gguf")
    with pytest.raises(ModelLoadError, match=r"one part of a model in 3 files: keep them together"):
        load_target(renamed)
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00003\.gguf is missing"):
        load_target(second)
    renamed.rename(first)
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.gguf is missing"):
        load_target(first)


def test_settings_of_transformers_that_a_file_cannot_have_are_refused(file: Path) -> None:
    assert load_target(file, model_kwargs={"attn_implementation": "eager"})[0].config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match="model_kwargs cannot hold 'quantization_config' for a GGUF file"):
        load_target(file, model_kwargs={"quantization_config": {}})
    assert is_tiny(load_target(file, model_kwargs={"device_map": "cpu"})[0])
    with pytest.raises(UnsupportedError, match="a GGUF file is loaded to one device"):
        load_target(file, model_kwargs={"device_map": {"": "cpu"}})


def test_a_name_that_counts_no_parts_is_that_of_a_whole_file(file: Path, tmp_path: Path) -> None:
    assert is_tiny(load_target(shutil.copy(file, tmp_path / "tiny-00001-of-00000.gguf"))[0])


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3"]),
        ("gpt-2", ["a", "Ġ123"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3"]),
        ("of-the-future", ["a", "Ġ123"]),
    ],
)
def test_text_is_split_as_the_model_was_trained_or_it_is_said(
    pre: str, parts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, pre=pre))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 123")
    assert [part for part, _ in split] == parts
    assert any(pre in text for text in caplog.messages) == (pre == "of-the-future")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "model.gguf",
            b"version https://git-lfs.github.com/spec/v1",
            r"begins with b'version https://git-lfs.*lfs pull",
        ),
        ("model.gguf", b"", "begins with b''; download it again"),
        ("vocabulary.gguf", b"GGUF\3" + bytes(19), "holds no tensors, as files of a vocabulary alone"),
        ("notes.txt", b"something else", "is a file; give the folder"),
    ],
)
def test_a_file_without_a_model_is_refused(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=says):
        load_target(file)


def test_a_folder_of_gguf_files_is_told_from_a_model_folder(file: Path) -> None:
    (file.parent / "a-mmproj.gguf").symlink_to(file)
    with pytest.raises(ModelLoadError, match=r"give the file itself, '.*/model\.gguf'"):
        load_target(file.parent)


def test_a_file_that_is_not_there_is_not_asked_of_the_hub() -> None:
    with pytest.raises(ModelLoadError, match=r"there is no file 'models/q4\.gguf'"):
        load_target("models/q4.gguf")


def refused(file: Path) -> str:
    """One clear line, and nothing written."""
    before = sorted(file.parent.rglob("*"))
    with pytest.raises(PrecedentError) as caught:
        load_target(file)
    assert sorted(file.parent.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_layers_that_nothing_here_runs_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package runs every architecture that GGUF files have; here, none is installed."""
    hide_packages(monkeypatch)
    fields = {"mamba__ssm__conv_kernel": 4, "mamba__ssm__state_size": 8, "mamba__ssm__inner_size": 16}
    file = write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, architecture="mamba", **fields)
    assert "linear_attention layers, which need a package: pip install" in refused(file)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architecture": "frobnicator"}, "architecture frobnicator is not supported"),
        ({"split__count": 3}, "one part of a model in 3 files"),
        ({"llama__block_count": 4}, "lacks the tensor blk.3."),
        ({"llama__embedding_length": 64}, "the tensor .* has the shape"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fields: Any, says: str, tmp_path: Path) -> None:
    assert re.search(says, refused(write_gguf(tmp_path / "model.gguf", tiny(), TOKENIZER, **fields)))


def test_a_missing_reader_is_named_before_the_work_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    assert "needs another package; run: pip install -U gguf" in refused(file)


def test_headers_are_not_read_by_the_slow_reader(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes ten seconds for a real vocabulary, each time a config or tokenizer is read."""
    monkeypatch.delattr(gguf.GGUFReader, "__init__")
    assert load_target(file)[1].vocab_size > 0


def test_a_transformers_that_reads_such_files_wrongly_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precedent.target.load.gguf.transformers.__version__", "5.17.0")
    assert "needs transformers 5.18 or newer" in refused(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny(), TOKENIZER).read_bytes()


@settings(max_examples=25)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_short_is_refused_wherever(
    share: float, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.gguf"
    file.write_bytes(whole[: int(share * len(whole))])
    said = refused(file)
    assert "cut short or damaged" in said or "no GGUF file" in said


@given(at=st.integers(4, 3000), byte=st.integers(0, 255))
def test_a_damaged_header_is_one_line_or_a_model(
    at: int, byte: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Names, sizes and kinds stand there; whatever is read of them, nothing but our own errors comes out."""
    folder = tmp_path_factory.mktemp("damaged")
    file = folder / "model.gguf"
    file.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    with contextlib.suppress(PrecedentError):
        assert load_config(file).model_type


def test_a_draft_trained_for_the_dequantised_model_drafts_for_the_file(tmp_path: Path) -> None:
    """Its embeddings are the file's, and its head some of their rows."""
    drafts = pytest.importorskip("precedent_drafts.heads")
    file = write_gguf(tmp_path / "model.gguf", tiny(**WIDE), TOKENIZER, kind="Q8_0")
    target, dense = load_target(file)[0], load_target(file, dtype="float32")[0]
    ids, hidden = torch.tensor([3, 5, 250]), torch.randn(2, 64)
    heads = [drafts.RestrictedHead.of(model.get_output_embeddings(), ids)(hidden) for model in (target, dense)]
    tables = [drafts.RawEmbeddings(model.get_input_embeddings())(ids) for model in (target, dense)]
    assert torch.equal(*heads)
    assert torch.equal(*tables)
    prints = pytest.importorskip("precedent_drafts.fingerprints")
    for fingerprint in (prints.embeddings_fingerprint, prints.layers_fingerprint):
        assert fingerprint(target) == fingerprint(dense) != fingerprint(tiny(seed=1, **WIDE))
