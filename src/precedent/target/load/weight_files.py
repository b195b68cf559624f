"""Files of weights, from their headers: whether they are complete, and how they are quantised."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

INDEX, WHOLE, OLDER = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"

LFS = b"version https://git-lfs"
"""How the text begins that git leaves in place of a large file which was not fetched."""

OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OF_THE_MODEL = re.compile(r"(?:model\.|language_model\.)*layers\.")
"""Names of the layers of a language model, and not of a tower or a draft head beside it."""

_OF_AN_MTP_HEAD = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.")
"""Modules of a layer that is a draft head, stored behind the model's own layers."""

_FETCH = "get all of its files again, or give another model"
_POINTER = "run `git lfs pull` there, or `hf download` the model"


def safetensors_files(folder: Path, prefixes: tuple[str, ...] = ("",)) -> list[Path]:
    """The files that may hold tensors whose names begin with a prefix; by the index, or the only file. May be none."""
    if (folder / INDEX).is_file():
        places: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / file for file in sorted({places[name] for name in places if name.startswith(prefixes)})]
    return [folder / WHOLE] if (folder / WHOLE).is_file() else []


def tensor_names(folder: Path) -> frozenset[str]:
    """The names of a folder's tensors, in whichever format."""
    found = set[str]()
    for path in safetensors_files(folder):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    if not found and (folder / OLDER).is_file():
        return frozenset(torch.load(folder / OLDER, map_location="meta", weights_only=True))
    return frozenset(found)


def faults_of(folder: Path, config: Any = None) -> list[str]:
    """List what is wrong with the weight files of a folder; empty if they fit each other and the config."""
    try:
        return list(_faults(folder, config))
    except OSError as error:
        return [f"cannot read the weights in {folder}: {error.strerror or error}"]


def _faults(folder: Path, config: Any) -> Iterator[str]:
    index, found, parts = folder / INDEX, set[str](), dict[str, set[str]]()
    if index.is_file():
        try:
            for name, part in json.loads(index.read_bytes())["weight_map"].items():
                parts.setdefault(str(part), set()).add(str(name))
        except (ValueError, TypeError, KeyError, AttributeError):
            yield f"{index.name} in {folder} cannot be read as an index of tensors: {_POINTER}"
            return
    elif whole := next((name for name in (WHOLE, OLDER) if (folder / name).is_file()), None):
        parts[whole] = set()
    elif not (folder / f"{OLDER}.index.json").is_file():
        others = sorted({file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern)})
        beside = f" ({', '.join(others[:3])} is not one that transformers looks for)" if others else ""
        yield f"{folder} holds no weights{beside}: {_FETCH}"
    for part, expected in sorted(parts.items()):
        found |= expected
        if not (folder / part).is_file():
            yield f"{index.name} names {part}, which is not in {folder}: {_FETCH}"
            continue
        names, fault = _tensors_in(folder / part)
        yield from fault
        found |= names
        missing = sorted(expected - names)
        if missing and not fault and part.endswith(".safetensors"):
            yield f"{index.name} places {missing[0]} in {part}, which does not hold it: {_FETCH}"
    yield from _layers(found, config, folder)


def pointer_fault(file: Path) -> str | None:
    """The fault of a file that git LFS did not fetch; None for any other. Raises OSError."""
    with file.open("rb") as content:
        if content.read(len(LFS)) != LFS:
            return None
    return f"{file} is a pointer of git LFS and not the file itself: {_POINTER}"


def _tensors_in(file: Path) -> tuple[set[str], list[str]]:
    """The names of a file's tensors, and what is wrong with the file. Names are read from safetensors files alone."""
    if (fault := pointer_fault(file)) is not None:
        return set(), [fault]
    if file.suffix != ".safetensors":
        return set(), []
    try:
        with safe_open(file, framework="pt") as tensors:
            return set(tensors.keys()), []
    except SafetensorError as error:
        return set(), [f"{file} is cut short or damaged ({error}): {_FETCH}"]


def _layers(names: set[str], config: Any, folder: Path) -> Iterator[str]:
    """A fault where config and files have different numbers of layers."""
    expected = None if config is None else getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(expected, int):
        return
    found = {int(match[1]) for name in names if (match := _LAYER.search(name))}
    left_over = layers_left_over({name for name in names if _OF_THE_MODEL.match(name)}, config)
    if found and len(found) < expected:
        yield f"the config has {expected} layers and the weights in {folder} have {len(found)}: {_FETCH}"
    elif left_over:
        yield too_many(folder, left_over, expected)


def too_many(folder: object, left_over: int, expected: int) -> str:
    """The fault of weights with more layers than their config, which transformers would leave out silently."""
    return (
        f"the weights in {folder} have {left_over} more layers than its config.json says ({expected}): correct "
        "num_hidden_layers, or get its files again"
    )


def layers_left_over(unexpected: set[str], config: Any) -> int:
    """How many layers of a checkpoint a model of this config does not have, beside those of a draft head."""
    kept = int(getattr(config.get_text_config(), "num_hidden_layers", 0) or 0)
    layers = [(int(match[1]), name) for name in unexpected if (match := _LAYER.search(name))]
    heads = {layer for layer, name in layers if _OF_AN_MTP_HEAD.search(name)}
    return len({layer for layer, _ in layers if layer >= kept} - heads)


UNPACKED_BY_FIRST_FORWARD = "compressed-tensors"
"""The method whose package unpacks all weights at the first forward."""

log = logging.getLogger(__name__)


def quant_method(config: Any) -> str | None:
    """The method with which a checkpoint's weights are quantised, as its config names it; None if they are not."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    found = settings.get("quant_method") if isinstance(settings, Mapping) else getattr(settings, "quant_method", None)
    return str(getattr(found, "value", found) or "unknown")


def is_dense(weight: Any) -> bool:
    """Whether a weight is a plain tensor of floating-point numbers, and not packed by a quantiser."""
    plain = isinstance(weight, Tensor) and type(weight) in (Tensor, nn.Parameter)
    return plain and weight.is_floating_point() and weight.dtype.itemsize > 1


def say_if_dense(model: nn.Module, method: str, source: object) -> None:
    """Log a warning if the weights of a quantised checkpoint do not stay packed in memory."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    dense = all(is_dense(getattr(linear, "weight", None)) for linear in linears)
    if not dense and method != UNPACKED_BY_FIRST_FORWARD:
        return
    size = 2 * sum(linear.in_features * linear.out_features for linear in linears)
    how = "were dequantised when they were loaded" if dense else "are unpacked by its package at the first forward"
    log.warning("the %s weights in %s %s: they take %.1f GB of memory", method, source, how, size / 1e9)
