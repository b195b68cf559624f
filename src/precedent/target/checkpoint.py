"""Reads a checkpoint's folder: its config, and its tensors from one file, from shards, or from torch's own format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
OLDER = "pytorch_model.bin"

ALL = ("",)
"""The prefix of every name."""


def config_in(folder: Path) -> dict[str, Any] | None:
    """What `config.json` says; None where there is no such file, or no settings in it."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def safetensors_files(folder: Path, prefixes: tuple[str, ...] = ALL) -> list[Path]:
    """The files that may hold tensors whose names begin with a prefix; by the index, or the only file. May be none."""
    if (folder / INDEX).is_file():
        places: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / file for file in sorted({places[name] for name in places if name.startswith(prefixes)})]
    return [folder / WHOLE] if (folder / WHOLE).is_file() else []


def safetensors_in(folder: Path, prefixes: tuple[str, ...] = ALL) -> dict[str, Tensor]:
    """The tensors whose names begin with one of the prefixes, from safetensors files."""
    return {name: file.get_tensor(name) for name, file in _named(folder, prefixes) if name.startswith(prefixes)}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, those of `pytorch_model.bin` where it has no safetensors files. May be none."""
    if not safetensors_files(folder) and (folder / OLDER).is_file():
        loaded: dict[str, Tensor] = torch.load(folder / OLDER, map_location="cpu", weights_only=True)
        return loaded
    return safetensors_in(folder)


def tensor_names(folder: Path) -> frozenset[str]:
    """The names of a folder's tensors."""
    return frozenset(name for name, _ in _named(folder)) or frozenset(tensors_in(folder))


def _named(folder: Path, prefixes: tuple[str, ...] = ALL) -> Iterator[tuple[str, Any]]:
    """Each tensor's name, with the open file that holds it."""
    for path in safetensors_files(folder, prefixes):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file) for name in file.keys())  # noqa: SIM118 - it is no mapping
