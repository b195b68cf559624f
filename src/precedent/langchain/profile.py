"""LangChain's profile of a model (its inputs, outputs and abilities), from the model's files on this machine."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import ModelProfile

from precedent.grammar import is_installed
from precedent.text.tool_formats.reasoning import REASONING

if TYPE_CHECKING:
    from precedent.engine.engine import Engine

TEXT_ONLY = ModelProfile(
    text_inputs=True,
    image_inputs=False,
    pdf_inputs=False,
    audio_inputs=False,
    video_inputs=False,
    text_outputs=True,
    image_outputs=False,
    audio_outputs=False,
    video_outputs=False,
    temperature=True,
)


def profile_of_engine(engine: Engine) -> ModelProfile:
    """The profile of a running engine."""
    return _profile(engine.context_length, str(engine.tokenizer.chat_template or ""))


def profile_of_files(name: str) -> ModelProfile | None:
    """The profile of a model's folder or of a downloaded Hugging Face id; None if its files are not here."""
    folder = _folder(name)
    return None if folder is None else _read(folder)


def _folder(name: str) -> Path | None:
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # neither a folder nor an id, for instance a custom name
        return None
    return Path(found).parent if isinstance(found, str) else None


@lru_cache(maxsize=64)
def _read(folder: Path) -> ModelProfile | None:
    config = _json(folder / "config.json")
    length = config.get("text_config", config).get("max_position_embeddings")
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8") if template.is_file() else _json(folder / "tokenizer_config.json")
    return _profile(int(length), str(text)) if length else None


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


def _profile(context_length: int, template: str) -> ModelProfile:
    profile = ModelProfile(**TEXT_ONLY)
    profile["max_input_tokens"] = profile["max_output_tokens"] = context_length
    profile["tool_calling"] = "tools" in template or "<|im_end|>" in template
    profile["structured_output"] = is_installed()
    profile["tool_choice"] = profile["tool_calling"] and is_installed()
    profile["reasoning_output"] = any(tags.close in template for tags in REASONING)
    return profile
