"""The order desk's target model: SmolLM2-135M-Instruct with the shipped adapter merged into its weights."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from safetensors.torch import load_file
from torch import Tensor

from precedent.errors import ModelLoadError
from precedent.runtime.recomputable import computed_folder
from precedent.target.load.loading import DEMO_TARGET, load_target
from precedent.target.load.source import PACKAGE, packaged_file, quiet
from precedent.text.prompt import hermes_template

NAME = "smollm2-135m-order-desk"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MERGING = 3
"""Increase it when the merged model changes, so that an older one in the user's cache folder is not used."""

_PREFIX = "base_model.model."

log = logging.getLogger(__name__)


def adapted_target(adapter: Path | None = None) -> Path:
    """As `precedent_demo.adapted_target`.

    The folder is named by the adapter's content, so that engine and caches never mistake it for the plain model.
    """
    source = adapter or Path(str(files("precedent_demo"))) / "models" / "adapter"
    if not (source / WEIGHTS).is_file():
        raise ModelLoadError(f"there is no adapter in {source}: it needs {WEIGHTS} and {CONFIG}")
    packaged_file()  # raises if the package is not installed
    folder = user_cache_path("precedent") / f"{NAME}-{_identity(source)}"

    def merge(into: Path) -> None:
        log.warning("merging the order desk's adapter into %s, once; this takes a few seconds", folder)
        model, tokenizer = load_target(DEMO_TARGET, device="cpu", dtype="bfloat16")
        model.load_state_dict(merged(model.state_dict(), source))
        # the packaged model's own template takes no tools; the adapter was trained with this one
        tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": hermes_template()}
        with quiet():
            model.save_pretrained(into)
            tokenizer.save_pretrained(into)

    try:
        return computed_folder(folder, f"merging {MERGING}", merge)
    except OSError as error:
        raise ModelLoadError(
            f"cannot store the merged {NAME} in {folder.parent} ({error.strerror or error}); "
            "free 300 MB there, or set XDG_CACHE_HOME to a writable folder"
        ) from error


def packaged_target() -> str:
    """The folder of `adapted_target()`; while it is built, the inner loops are compiled.

    On a new machine each takes half a minute of one processor.
    """
    from precedent.engine.warm_up import compile_inner_loops

    packaged_file()  # raises before anything is compiled
    with ThreadPoolExecutor(1, "precedent-compile") as pool:
        compiling = pool.submit(compile_inner_loops)
        folder = adapted_target()
        compiling.result()
    return str(folder)


def _identity(adapter: Path) -> str:
    content = sha256(f"{MERGING} {version(PACKAGE)}".encode())
    for name in (CONFIG, WEIGHTS):
        content.update((adapter / name).read_bytes())
    return content.hexdigest()[:12]


def merged(weights: dict[str, Tensor], adapter: Path) -> dict[str, Tensor]:
    """`weights` with `scaling * B @ A` of a LoRA adapter in peft's format added, in the weights' own dtype.

    Raises ModelLoadError when the adapter does not belong to these weights.
    """
    config: dict[str, Any] = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    scaling = config["lora_alpha"] / config["r"]
    changes = load_file(adapter / WEIGHTS)
    for name in sorted(changes):
        if not name.endswith(".lora_A.weight"):
            continue
        target = f"{name.removeprefix(_PREFIX).removesuffix('.lora_A.weight')}.weight"
        if target not in weights:
            raise ModelLoadError(f"the adapter in {adapter} changes {target}, which the target model does not have")
        change = changes[name.replace(".lora_A.", ".lora_B.")].float() @ changes[name].float()
        weights[target] = (weights[target].float() + scaling * change).to(torch.bfloat16)
    return weights
