"""Which back end an engine gets, and what each refuses; without llama.cpp."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.llama_context import FakeContext
from helpers.model_stores import OllamaStore
from transformers import PreTrainedConfig

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, GenerationError, ModelLoadError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.target.load.loading import load_tokenizer
from precedent_llama_cpp.context import has_amx
from precedent_llama_cpp.target import LlamaTarget
from precedent_replay.step_times import compared
from precedent_testing.local_models import local_models
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

VOCABULARY = 260


def tiny_file(folder: Path, **settings: Any) -> Path:
    model = tiny_causal_lm(dtype=torch.float32, vocab_size=VOCABULARY, max_position_embeddings=256)
    return write_gguf(folder / "tiny.gguf", model, byte_tokenizer((("t", "h"),)), **settings)


@pytest.fixture
def without_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)


@pytest.fixture
def of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A llama-cpp-python whose llama.cpp was built for a GPU, and ends where it would load a file."""

    def refuse() -> None:
        raise ModelLoadError("asked llama.cpp")

    api = SimpleNamespace(llama_supports_gpu_offload=lambda: True, llama_model_default_params=refuse)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(__version__="0.3.36", llama_cpp=api))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", api)


@pytest.mark.usefixtures("of_a_gpu")
def test_layers_on_a_gpu_are_said_once(tmp_path: Path) -> None:
    settings = {"model_kwargs": {"n_gpu_layers": 5}, "backend": "llama.cpp"}
    with pytest.raises(ModelLoadError, match=r"asked llama\.cpp"):
        Engine.load(tiny_file(tmp_path), **settings)
    with pytest.raises(ConfigError, match="n_gpu_layers is given twice"):
        Engine.load(tiny_file(tmp_path), n_gpu_layers=3, **settings)


@pytest.mark.usefixtures("without_llama")
def test_without_llama_cpp_the_choice_is_ours_or_says_what_to_install(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tiny_file(tmp_path)
    with closing(Engine.load(file, backend="auto", n_gpu_layers=7)) as engine:
        assert isinstance(engine.target, TargetModel)
    assert "n_gpu_layers=7 is ignored" in caplog.text
    with pytest.raises(UnsupportedError, match=r"needs llama-cpp-python 0\.3\.36"):
        Engine.load(file, backend="llama.cpp")


def test_another_version_of_llama_cpp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__version__="0.2.0", llama_cpp=None)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    with pytest.raises(UnsupportedError, match=r"knows llama-cpp-python 0\.3\.36, and this is 0\.2\.0"):
        Engine.load(tiny_file(tmp_path), backend="llama.cpp")


@pytest.mark.usefixtures("of_a_gpu")
def test_auto_is_llama_cpp_on_a_gpu_and_only_for_gguf_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"asked llama\.cpp"):
        Engine.load(tiny_file(tmp_path), backend="auto")
    folder = tmp_path / "folder"
    tiny_causal_lm(dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with closing(Engine.load(folder, backend="auto")) as engine:
        assert isinstance(engine.target, TargetModel)
    with pytest.raises(UnsupportedError, match="runs GGUF files"):
        Engine.load(folder, backend="llama.cpp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bitwise": True}, "bitwise=True does not work"),
        ({"cuda_graphs": True}, "cuda_graphs=True does not work"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' does not work"),
        ({"device": "cuda"}, "n_gpu_layers"),
        ({"quantization": "int8"}, "quantization='int8' is not available"),
        ({"accurate": True}, "accurate=True is not available"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        Engine.load(tiny_file(tmp_path), backend="llama.cpp", **options)


def test_options_that_nothing_would_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend='vulkan' is not one of precedent, llama\.cpp, auto"):
        Engine.load(tiny_file(tmp_path), backend="vulkan")
    with pytest.raises(ConfigError, match="model_kwargs must be a dict"):
        Engine.load(tiny_file(tmp_path), model_kwargs="n_ctx=512")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"n_gpu_layers is for llama\.cpp"):
        ChatPrecedent(model=str(tiny_file(tmp_path)), n_gpu_layers=3).invoke("Hello.")


def test_tokenizers_of_architectures_that_transformers_does_not_know_are_read(tmp_path: Path) -> None:
    known = load_tokenizer(tiny_file(tmp_path))
    unknown = load_tokenizer(tiny_file(tmp_path, architecture="internlm2"))
    assert unknown("the theatre, 42 times").input_ids == known("the theatre, 42 times").input_ids
    assert unknown.eos_token == known.eos_token


def test_the_list_of_local_models_says_which_back_end_runs_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = SimpleNamespace(llama_supports_gpu_offload=lambda: False)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(__version__="0.3.36", llama_cpp=api))
    store = OllamaStore(tmp_path / "ollama")
    for name, settings in (("known", {}), ("unknown", {"architecture": "internlm2"})):
        (tmp_path / name).mkdir()
        store.add(f"registry.ollama.ai/library/{name}/latest", tiny_file(tmp_path / name, **settings))
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {one.name: one for one in local_models() if one.name.startswith("ollama:")}
    assert {name: one.backend for name, one in found.items()} == {
        "ollama:known:latest": "precedent", "ollama:unknown:latest": "llama.cpp",
    }  # fmt: skip
    assert found["ollama:unknown:latest"].size


@pytest.mark.parametrize("said", ["AMX_INT8 = 1 | REPACK = 1", "REPACK = 1"])
def test_kernels_that_crash_are_known_by_what_llama_cpp_says(said: str) -> None:
    assert has_amx(SimpleNamespace(llama_print_system_info=said.encode)) == ("AMX" in said)


def test_a_conversation_of_most_of_the_context_goes_on_where_it_was() -> None:
    target = LlamaTarget(FakeContext(1024, vocab_size=VOCABULARY), PreTrainedConfig())
    sampling, prompt = SamplingParams(max_tokens=4, temperature=0.0), [place % 200 for place in range(600)]
    with closing(Engine(target, byte_tokenizer(), name="it")) as engine:
        assert not engine.submit(prompt, sampling, tenant="other").result().cached_prompt_tokens
        for longer in (0, 40):
            found = engine.submit([*prompt, *range(longer)], sampling).result()
        assert found.cached_prompt_tokens >= 599


def test_a_full_context_forgets_the_oldest_conversations_only() -> None:
    target = LlamaTarget(FakeContext(1024, vocab_size=VOCABULARY), PreTrainedConfig())
    sampling, plain = SamplingParams(max_tokens=4, temperature=0.0), SpeculationConfig(enabled=False)
    with closing(Engine(target, byte_tokenizer(), speculation=plain, name="it")) as engine:

        def cached(tenant: str, length: int) -> int:
            return engine.submit([*range(5, 5 + length)], sampling, tenant=tenant).result().cached_prompt_tokens

        for tenant in ("first", "second", "third", "fourth"):
            assert not cached(tenant, 240)
        assert not cached("fifth", 250)
        assert cached("fourth", 245) > 200
        assert not cached("first", 240)


def test_steps_of_more_rows_than_fit_are_not_timed_and_others_are() -> None:
    target = LlamaTarget(FakeContext(256), PreTrainedConfig())
    (found,) = compared([target], "it", [1, 4], 16)
    assert found["rows"]
    with pytest.raises(GenerationError, match="computing 300 rows"):
        compared([target], "it", [1, 300], 16)


def test_a_draft_model_drafts_for_a_target_without_a_model_of_torch() -> None:
    target = LlamaTarget(FakeContext(vocab_size=VOCABULARY), PreTrainedConfig())
    draft = tiny_causal_lm(dtype=torch.float32, vocab_size=VOCABULARY + 12)
    speculation = SpeculationConfig(drafters=("draft-model",))
    with closing(Engine(target, byte_tokenizer(), draft_model=draft, speculation=speculation, name="it")) as engine:
        engine.planner.cost = CostCurve()
        found = engine.submit([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0)).result()
        plain = engine.submit(
            [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0), speculation=SpeculationConfig(enabled=False)
        ).result()
    assert found.token_ids == plain.token_ids
    assert found.stats.num_draft_tokens
    with pytest.raises(UnsupportedError, match="shares its target's layers"):
        Engine(target, byte_tokenizer(), draft_model="first-layers:1", name="it")
