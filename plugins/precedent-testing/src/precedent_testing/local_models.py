"""The models that are on this machine under the names of Ollama, LM Studio and the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from precedent.cli.doctor_checks import bytes_per_token, kinds_in_use
from precedent.errors import PrecedentError
from precedent.runtime.plain_values import in_one_line
from precedent.target.kv.layer_kinds import UNLIMITED, context_length
from precedent.target.load.gguf import open_gguf
from precedent.target.load.loading import auto_class, load_config
from precedent.target.load.source import LM_STUDIO, OLLAMA, stored_model
from precedent.target.load.stores import StoredModel, choose, is_model, listed, lm_studio_names, ollama_names
from precedent.target.load.weight_files import quant_method
from precedent.target.support import ModelSource, TargetOptions, check_loadable, support_for

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
"""Files of weights; a folder's first kind counts."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: bytes of its weights, and of memory with a KV cache of `context` tokens.

    `backend` computes it, by default; None where nothing here does, and `refusal` says why.
    """

    name: str
    size: int | None = None
    quantization: str = ""
    context: int | None = None
    memory: int | None = None
    backend: str | None = None
    refusal: str | None = None


def local_models(context: int | None = None) -> Iterator[LocalModel]:
    """Examine all models by their files; `context` replaces the lengths that stores and configs say."""
    of_stores = [*(OLLAMA + name for name in ollama_names()), *(LM_STUDIO + name for name in lm_studio_names())]
    for name, path in [*((name, None) for name in of_stores), *_hub_models()]:
        try:
            stored = stored_model(name) if path is None else StoredModel(name, path)
            assert stored is not None
            yield _examined(name, stored.file, context or stored.context)
        except Exception as error:  # a config may raise anything; the others are listed nevertheless
            yield LocalModel(name, refusal=in_one_line(error))


def _hub_models() -> Iterator[tuple[str, Path]]:
    """All models in the hub's cache: the names of GGUF files with their paths, and ids with their folders."""
    for repository in listed(Path(constants.HF_HUB_CACHE), "models--*"):
        name = repository.name.removeprefix("models--").replace("--", "/")
        with suppress(LocalEntryNotFoundError, HFValidationError):
            folder = Path(snapshot_download(name, local_files_only=True))
            files = {file.relative_to(folder).as_posix(): file for file in listed(folder, "**/*.gguf")}
            for file in filter(is_model, files):
                quant = re.split(r"[-.]", re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file))[-1]
                yield (f"hf:{name}:{quant}" if choose(files, quant) == file else str(files[file])), files[file]
            if (folder / "config.json").is_file():
                yield name, folder


def _examined(name: str, path: Path, context: int | None) -> LocalModel:
    auto = support_for(ModelSource(path), TargetOptions(backend="auto")) if path.is_file() else None
    by = "precedent" if auto is None else "llama.cpp"
    try:
        config = load_config(path)
    except PrecedentError:
        if auto is None:
            raise
        kinds = kinds_in_use(open_gguf(path), torch.device("cpu"))
        return LocalModel(name, sum(one.stored for one in kinds), kinds[0].kind, backend=by)
    if path.is_dir():
        files = next(filter(None, (list(path.glob(pattern)) for pattern in WEIGHTS)), [])
        size = held = sum(file.stat().st_size for file in files)
        kind = quant_method(config) or str(config.dtype or "").removeprefix("torch.")
    else:
        kinds = kinds_in_use(open_gguf(path), torch.device("cpu"))
        size, held, kind = sum(one.stored for one in kinds), sum(one.held for one in kinds), kinds[0].kind
    longest = context_length(config.get_text_config())
    tokens = context or (None if longest == UNLIMITED else longest)
    per_token = bytes_per_token(config)
    memory = None if tokens is None or per_token is None else held + tokens * per_token
    if auto is None:
        try:
            auto_class(config)
            check_loadable(config)
        except PrecedentError as error:
            return LocalModel(name, size, kind, tokens, memory, refusal=str(error))
    return LocalModel(name, size, kind, tokens, memory, by)
