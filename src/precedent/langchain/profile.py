"""LangChain's profile of a model (its inputs, outputs and abilities), the same before the weights are loaded and after.

Files are read and nothing is downloaded: the config, the chat template, and whether the tokenizer has ChatML's tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from langchain_core.language_models import ModelProfile

from precedent.errors import ConfigError, ModelLoadError
from precedent.grammar import is_installed
from precedent.text.prompt import CHATML, hermes_template, knows_chatml
from precedent.text.tool_formats import format_of_template
from precedent.text.tool_formats.formats import REASONING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.engine.engine import Engine

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"

_Known = tuple[int, str, bool]
"""Context length, the chat template for calls with tools, and whether the tokenizer has ChatML's tokens."""


def _profile(context_length: int, template: str, has_chatml: bool) -> ModelProfile:
    """The profile of a model that is asked with tools by its own template or by the shipped one."""
    own = re.search(r"\btools\b", template) is not None
    form = format_of_template(template if own else hermes_template())
    takes_tools = own or has_chatml
    held = is_installed() and not (form is not None and form.channels)  # no grammar constrains answers in channels
    found = {
        "text_inputs": True,
        **dict.fromkeys(("image_inputs", "pdf_inputs", "audio_inputs", "video_inputs"), False),
        "text_outputs": True,
        **dict.fromkeys(("image_outputs", "audio_outputs", "video_outputs"), False),
        "temperature": True,
        **dict.fromkeys(("max_input_tokens", "max_output_tokens"), context_length),
        "tool_calling": takes_tools,
        "structured_output": held,
        "tool_choice": takes_tools and held and form is not None and form.arguments == "json",
        "reasoning_output": any(tags.close in template for tags in REASONING),
    }
    return cast("ModelProfile", found)


def profile_of_engine(engine: Engine) -> ModelProfile:
    """The profile of a running engine."""
    tokenizer = engine.tokenizer
    return _profile(engine.context_length, _with_tools(tokenizer.chat_template), knows_chatml(tokenizer))


def profile_of_weights(model: Any, tokenizer: PreTrainedTokenizerBase) -> ModelProfile:
    """The profile of a transformers model that was handed over."""
    from precedent.target.kv.layer_kinds import context_length

    length = context_length(model.config.get_text_config())
    return _profile(length, _with_tools(tokenizer.chat_template), knows_chatml(tokenizer))


def profile_of_files(
    name: str, model_kwargs: Mapping[str, Any] | None = None, chat_template: str | Path | None = None
) -> ModelProfile | None:
    """The profile of the packaged model, a folder, a GGUF file, or a Hugging Face id that was downloaded before.

    `model_kwargs` are arguments of `from_pretrained`; a `chat_template` replaces the model's own. An adapter has the
    profile of its base model. None if the files are not here, or cannot be read.
    """
    from precedent.target.load.chat_template import read_chat_template

    try:
        length, template, has_chatml = _known(name, model_kwargs or {})
        return _profile(length, template if chat_template is None else read_chat_template(chat_template), has_chatml)
    except (ModelLoadError, ConfigError, OSError, ValueError):  # loading the model says what is wrong
        return None


def _known(name: str, model_kwargs: Mapping[str, Any]) -> _Known:
    from huggingface_hub import snapshot_download

    from precedent.target.load.source import base_of_adapter, gguf_file, is_adapter

    if (file := gguf_file(name, model_kwargs, download=False)) is not None:
        return _of_gguf(file, file.stat().st_mtime_ns)
    folder = Path(name).expanduser()
    if not ((folder / CONFIG).is_file() or is_adapter(folder)):
        where = {key: model_kwargs[key] for key in ("revision", "cache_dir") if model_kwargs.get(key) is not None}
        downloaded = snapshot_download(name, local_files_only=True, **where)
        folder = Path(downloaded, model_kwargs.get("subfolder") or "")
    if not is_adapter(folder):
        return _of_folder(folder, (folder / CONFIG).stat().st_mtime_ns)
    base = _known(base_of_adapter(folder), {})
    return (base[0], *_tokenizer_in(folder)) if (folder / TOKENIZER_CONFIG).is_file() else base


@lru_cache(maxsize=64)
def _of_folder(folder: Path, changed: int) -> _Known:
    from transformers import AutoConfig

    from precedent.target.kv.layer_kinds import context_length
    from precedent.target.load.source import quiet

    with quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return context_length(config.get_text_config()), *_tokenizer_in(folder)


def _tokenizer_in(folder: Path) -> tuple[str, bool]:
    files = [folder / name for name in (TOKENIZER_CONFIG, "added_tokens.json", "tokenizer.json")]
    texts = [file.read_text("utf-8") if file.is_file() else "{}" for file in files]
    config = json.loads(texts[0])
    template = config.get("chat_template") if isinstance(config, dict) else None
    if (own := folder / "chat_template.jinja").is_file():
        named = {file.stem: file.read_text("utf-8") for file in folder.glob("additional_chat_templates/*.jinja")}
        template = {"default": own.read_text("utf-8"), **named}
    return _with_tools(template), any(json.dumps(CHATML) in text for text in texts)


def _with_tools(template: Any) -> str:
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return str(template or "")


@lru_cache(maxsize=64)
def _of_gguf(file: Path, changed: int) -> _Known:
    from precedent.target.load.gguf_header import read_header

    header = read_header(file)
    length = header.get(f"{header.get('general.architecture')}.context_length")
    if not isinstance(length, int):
        raise ModelLoadError(f"{file} does not say its context length")
    has_chatml = CHATML in header.get("tokenizer.ggml.tokens", ())
    return length, str(header.get("tokenizer.chat_template", "")), has_chatml
