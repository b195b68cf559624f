"""Reads the tensors of an MTP head from the files that its target was loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from precedent.errors import ConfigError
from precedent.target.checkpoint import INDEX, WHOLE, safetensors_in


def tensors_below(prefixes: tuple[str, ...], config: Any) -> dict[str, Tensor]:
    """The tensors whose names begin with one of `prefixes`, from the checkpoint that a config was loaded from.

    Raises ConfigError where there are no such files.
    """
    folder = _folder(config)
    if not ((folder / INDEX).is_file() or (folder / WHOLE).is_file()):
        raise _no_files(str(folder))
    return safetensors_in(folder, prefixes)


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
