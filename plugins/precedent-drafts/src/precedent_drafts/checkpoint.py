"""Reads the config and the tensors of a checkpoint's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from precedent.target.load.weight_files import OLDER, safetensors_files

CONFIG = "config.json"


def config_in(folder: Path) -> dict[str, Any] | None:
    """What `config.json` says; None where there is no such file, or no settings in it."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def safetensors_in(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """The tensors whose names begin with one of the prefixes, from safetensors files."""
    found = dict[str, Tensor]()
    for path in safetensors_files(folder, prefixes):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefixes)}  # noqa: SIM118
    return found


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, those of `pytorch_model.bin` where it has no safetensors files. May be none."""
    if not safetensors_files(folder) and (folder / OLDER).is_file():
        loaded: dict[str, Tensor] = torch.load(folder / OLDER, map_location="cpu", weights_only=True)
        return loaded
    return safetensors_in(folder)
