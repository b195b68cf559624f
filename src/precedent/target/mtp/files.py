"""Reads the tensors of an MTP head from the files that its target was loaded from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from precedent.errors import ConfigError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def tensors_below(prefixes: tuple[str, ...], config: Any) -> dict[str, Tensor]:
    """The tensors whose names begin with one of `prefixes`, from the checkpoint that a config was loaded from.

    Raises ConfigError where there are no such files.
    """
    found: dict[str, Tensor] = {}
    for path in _files_with(prefixes, _folder(config)):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in list(file.keys()) if name.startswith(prefixes)})
    return found


def _files_with(prefixes: tuple[str, ...], folder: Path) -> Iterator[Path]:
    """The files that hold such tensors, by the index; the only file where there is no index."""
    if (folder / INDEX).is_file():
        files: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        yield from (folder / file for file in sorted({files[name] for name in files if name.startswith(prefixes)}))
    elif (folder / WHOLE).is_file():
        yield folder / WHOLE
    else:
        raise _no_files(str(folder))


def _folder(config: Any) -> Path:
    """The checkpoint's folder, or that of its download."""
    source = config._name_or_path
    if source and Path(source).is_dir():
        return Path(source)
    try:
        revision = getattr(config, "_commit_hash", None)
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise _no_files(source) from error


def _no_files(source: str) -> ConfigError:
    return ConfigError(
        f"mtp reads the safetensors files of the target, and there are none at {source!r}: load the target by the name "
        "or folder of a checkpoint that has them, or leave mtp out of the drafters"
    )
