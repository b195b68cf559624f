"""Loads the target and the draft model that an engine's options name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from precedent.drafters.kinds import load_draft
from precedent.engine.options import OF_LOADING, EngineOptions
from precedent.errors import ConfigError, UnsupportedError
from precedent.target import Target
from precedent.target.load.loading import load_target, load_tokenizer
from precedent.target.load.source import gguf_file
from precedent.target.support import ModelSource, TargetOptions, support_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadedTarget(NamedTuple):
    """A target, its tokenizer and its name, and the options that are left to be applied."""

    model: PreTrainedModel | Target
    tokenizer: PreTrainedTokenizerBase
    name: str
    options: EngineOptions


def loaded_target(
    target: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, options: EngineOptions
) -> LoadedTarget:
    """Load a target, or name one that is loaded. Raises ModelLoadError, UnsupportedError or ConfigError."""
    options.check()
    if not isinstance(target, str | Path):
        if tokenizer is None:
            raise ConfigError("a model object needs its tokenizer: pass tokenizer=… as well")
        return LoadedTarget(target, tokenizer, target.config._name_or_path or type(target).__name__, options)
    if tokenizer is not None:
        raise ConfigError(f"tokenizer is for a model object: {target} brings its own, leave it out")
    name = str(target)
    source, wanted = ModelSource(gguf_file(name) or name), target_options(options)
    support = support_for(source, wanted)
    if support is not None:
        tokenizer = load_tokenizer(name, options.chat_template)
        return LoadedTarget(support.load(source, wanted), tokenizer, name, _applied(options))
    loaded = load_target(
        name,
        device=options.device,
        dtype=options.dtype,
        model_kwargs=options.model_kwargs,
        chat_template=options.chat_template,
    )
    return LoadedTarget(*loaded, name, _applied(options))


def loaded_draft(
    options: EngineOptions, target: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """The draft model of the options, None without one. Raises what `load_draft` raises."""
    if options.draft_model is None:
        return None
    if target is None:
        raise UnsupportedError(
            f"draft_model={options.draft_model!r} needs a target that transformers loads: leave it out"
        )
    return load_draft(options.draft_model, target, tokenizer, device=options.draft_device)


def target_options(options: EngineOptions) -> TargetOptions:
    """Those of an engine's options that decide how its target is made."""
    return TargetOptions(
        options.device, options.dtype, options.model_kwargs or {}, options.bitwise, options.cuda_graphs
    )


def _applied(options: EngineOptions) -> EngineOptions:
    """The options without those of loading."""
    default = EngineOptions()
    return options.with_changes(**{name: getattr(default, name) for name in OF_LOADING})
