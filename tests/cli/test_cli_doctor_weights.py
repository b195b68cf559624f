"""`precedent doctor` and loading agree on a model's weight files: what one finds, the other refuses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.saved_models import assert_one_clear_line
from safetensors.torch import load_file, save_file

from precedent.errors import ModelLoadError
from precedent.target.load.loading import load_target
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 590736\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several files, with their index."""
    tiny_causal_lm(dtype=torch.float32).save_pretrained(tmp_path / "model", max_shard_size="200KB")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    assert len(shards(tmp_path / "model")) > 1
    return tmp_path / "model"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def with_a_damaged_header(folder: Path) -> None:
    content = bytearray(shards(folder)[0].read_bytes())
    content[8] = 0
    shards(folder)[0].write_bytes(bytes(content))


def with_a_tensor_elsewhere(folder: Path) -> None:
    weights = load_file(shards(folder)[0])
    weights.pop(min(weights))
    save_file(weights, shards(folder)[0], metadata={"format": "pt"})


def without_weights(folder: Path) -> None:
    for file in (*shards(folder), folder / "model.safetensors.index.json"):
        file.unlink()


def under_other_names(folder: Path) -> None:
    without_weights(folder)
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")


def configured(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda folder: shards(folder)[0].unlink(), "names model-00001"),
    "a pointer": (lambda folder: shards(folder)[-1].write_text(POINTER), "pointer of git LFS"),
    "a short file": (
        lambda folder: shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:-1000]),
        "is cut short or damaged",
    ),
    "a damaged header": (with_a_damaged_header, "is cut short or damaged"),
    "a tensor elsewhere": (with_a_tensor_elsewhere, "does not hold it"),
    "no weights": (without_weights, "holds no weights"),
    "other names": (under_other_names, "consolidated.safetensors is not one that transformers looks for"),
    "too few layers": (
        lambda folder: configured(folder, num_hidden_layers=4),
        "the config has 4 layers and the weights",
    ),
    "layers that would be left out": (lambda folder: configured(folder, num_hidden_layers=2), "more layers than"),
    "a config that is cut": (lambda folder: (folder / "config.json").write_text("{oops"), "cannot load the"),
    "an unknown architecture": (lambda folder: configured(folder, model_type="nonesuch"), "nonesuch"),
}


def examined(folder: Path) -> tuple[int, list[str]]:
    """Exit status of the doctor, and what it says where something needed is missing."""
    report = folder.with_name("report.json")
    status = precedent("doctor", folder, "--json", report)
    findings = json.loads(report.read_text())["findings"]
    return status, [one["finding"] for one in findings if one["state"] == "no" and one["needed"]]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_the_doctor_and_refused_at_load(fault: str, folder: Path) -> None:
    spoil, said = FAULTS[fault]
    spoil(folder)
    status, findings = examined(folder)
    assert status == 1
    assert any(said in finding for finding in findings)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load_target(folder)
    assert_one_clear_line(caught.value)


@pytest.mark.parametrize("share", [0.1, 0.99])
def test_so_is_a_gguf_file_that_is_cut_short(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    model, tokenizer = tiny_causal_lm(vocab_size=260, dtype=torch.float32), byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "model.gguf", model, tokenizer)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    status, (finding,) = examined(file)
    assert status == 1
    assert "download it again" in finding
    file.write_text(POINTER)
    assert examined(file)[0] == 1


def test_a_missing_package_of_the_quantiser_is_named(folder: Path) -> None:
    if importlib.util.find_spec("hqq") is not None:
        pytest.skip("the package is installed")
    configured(folder, quantization_config={"quant_method": "hqq"})
    status, findings = examined(folder)
    assert status == 1
    assert any("pip install hqq" in finding for finding in findings)


def test_an_error_of_transformers_is_shown_whole(folder: Path) -> None:
    """Its first line ends before it says anything."""
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="sentencepiece or tiktoken") as caught:
        load_target(folder)
    assert_one_clear_line(caught.value)
