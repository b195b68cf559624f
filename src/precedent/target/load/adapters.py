"""PEFT adapters, in folders or on the hub: each is loaded with its base model and merged into its weights."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from precedent.errors import ModelLoadError
from precedent.runtime.plain_values import in_one_line
from precedent.target.load.quiet import quiet
from precedent.target.load.source import ADAPTER_CONFIG, find_source, is_adapter


def with_base(source: str | Path) -> tuple[str | Path, Path | None]:
    """A model's source; for an adapter's folder that of its base model, and the folder. Raises ModelLoadError."""
    if not isinstance(source, Path) or not is_adapter(source):
        return source, None
    base = base_of(source)
    if importlib.util.find_spec("peft") is None:
        raise _to_merge(
            source, f"{source} holds an adapter for {base}, and peft is not installed: pip install peft, or"
        )
    return find_source(base), source


def base_of(adapter: Path) -> str:
    """The name of an adapter's base model. Raises ModelLoadError if its folder does not say it."""
    try:
        base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{adapter / ADAPTER_CONFIG} cannot be read ({error}): copy the adapter again") from error
    if not isinstance(base, str) or not base:
        raise _to_merge(adapter, f"{adapter} holds an adapter without a base model;")
    return base


def tokenizer_source(source: str | Path, adapter: Path | None) -> str | Path:
    """Where the tokenizer is: in the adapter's folder if it has one, else with the base model."""
    return adapter if adapter is not None and (adapter / "tokenizer_config.json").is_file() else source


def merged(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """The base model with an adapter merged into its weights. Raises ModelLoadError where that is impossible."""
    from peft import PeftModel

    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about how peft uses it
            wrapped: Any = PeftModel.from_pretrained(base, str(adapter))
            found: PreTrainedModel = wrapped.merge_and_unload().eval().requires_grad_(False)
    except Exception as error:  # peft raises all kinds for an adapter that does not fit, or cannot be merged
        why = f"the adapter in {adapter} cannot be merged when it is loaded ({in_one_line(error)});"
        raise _to_merge(adapter, why) from error
    return found


def _to_merge(adapter: Path, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{why} merge it: with the package peft, PeftModel.from_pretrained(BASE, {str(adapter)!r}).merge_and_unload()"
        ".save_pretrained(FOLDER); save the tokenizer there too, and give that folder"
    )
