"""Core without the packages of kernels: the same texts by torch's own operators, and what to install for the rest."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import random_ids, random_tree
from helpers.packages import hide_packages

from precedent import __version__
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import ConfigError
from precedent.target import TargetModel, support
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


def wide(dtype: torch.dtype = torch.float32) -> Any:
    """A model whose layers the kernels for CPUs would take."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "intermediate_size": 128}
    return tiny_causal_lm(dtype=dtype, **sizes)


def texts(target: TargetModel) -> list[tuple[int, ...]]:
    with closing(Engine(target, byte_tokenizer(), name="tiny")) as engine:
        prompts = [random_ids(seed, 40) for seed in (1, 2)]
        running = [engine.submit(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
        return [one.result().token_ids for one in running]


def test_without_packages_every_module_is_torchs_own_and_texts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("precedent_cpu")
    with_kernels = TargetModel(wide())
    expected = texts(with_kernels)
    hide_packages(monkeypatch)
    target = TargetModel(wide())
    assert target.runner.packed
    assert not target.runner.backends
    assert {type(module).__module__.split(".")[0] for module in target.model.modules()} == {"torch", "transformers"}
    assert not any(hasattr(type(module), "swapped_from") for module in target.model.modules())
    assert texts(target) == expected


@pytest.mark.gpu
def test_on_cuda_without_packages_a_tree_is_scored_as_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own attention with a mask, one tree and several at a time."""
    hide_packages(monkeypatch)
    target, cpu = TargetModel(wide().cuda()), TargetModel(wide())
    trees = [random_tree(seed, 7) for seed in (1, 2)]
    logits = []
    for each in (target, cpu):
        slots = [each.new_slot() for _ in trees]
        for number, slot in enumerate(slots):
            each.prefill(slot, random_ids(number, 30))
        logits.append([rows.cpu() for rows in each.score(list(zip(slots, trees, strict=True)))])
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    assert texts(target) == texts(cpu)


@pytest.mark.parametrize(
    ("options", "package"),
    [({"bitwise": True}, "precedent-cpu"), ({"cuda_graphs": True}, r"precedent-llm\[cuda\]")],
    ids=["bitwise", "cuda_graphs"],
)
def test_an_option_without_its_package_says_what_to_install(
    options: dict[str, bool], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_packages(monkeypatch)
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}=True is not available: pip install '{package}'"):
        TargetModel(wide(), **options)


def installed_beside(metadata: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[support.ModelSupport, ...]:
    """The supports found where a package with these requirements names one that cannot be imported."""
    written = folder / "precedent_odd-9.9.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: precedent-odd\nVersion: 9.9\n{metadata}")
    (written / "entry_points.txt").write_text("[precedent.models]\nodd = precedent_odd:SUPPORT\n")
    monkeypatch.syspath_prepend(str(folder))
    support.installed.cache_clear()
    try:
        return support.installed()
    finally:
        support.installed.cache_clear()


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ("", ["the models of precedent_odd:SUPPORT are not available: ModuleNotFoundError"]),
        (
            "Requires-Dist: numpy\nRequires-Dist: precedent-llm==9.9\n",
            [
                f"precedent-odd 9.9 is made for precedent-llm 9.9, and {__version__} is installed",
                f"pip install 'precedent-llm=={__version__}' 'precedent-odd=={__version__}'",
            ],
        ),
    ],
    ids=["not importable", "for another version"],
)
def test_a_package_that_does_not_fit_is_left_out_with_the_reason(
    metadata: str, says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Models run without it: a package that only makes them faster never fails a request."""
    names = {type(each).__name__ for each in installed_beside(metadata, tmp_path, monkeypatch)}
    assert all(said in caplog.text for said in says)
    assert names >= {"CpuSupport"}
