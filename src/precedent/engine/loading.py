"""Loads the target and the draft model that an engine's options name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from precedent.engine.options import OF_LOADING, EngineOptions
from precedent.errors import ConfigError
from precedent.target import TargetModel
from precedent.target.load.chat_template import read_chat_template
from precedent.target.load.loading import load_draft, load_target
from precedent.target.parallel.tensor_parallel import check_beside, load_divided

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadedTarget(NamedTuple):
    """A target, its tokenizer and its name, and the options that are left to be applied."""

    model: PreTrainedModel | TargetModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    options: EngineOptions


@contextmanager
def loaded_target(
    target: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, options: EngineOptions
) -> Iterator[LoadedTarget]:
    """Load a target for the body of a `with`, which builds an engine on it.

    With `tensor_parallel` the body runs in the first process only; the others follow its forwards and then end, also
    when the body raises. Raises ModelLoadError, UnsupportedError or ConfigError.
    """
    options.check()
    if options.tensor_parallel:
        chosen = {name: getattr(options, name) for name in ("bitwise", "cuda_graphs", "keep_prefixes")}
        check_beside(target, options.draft_model, **chosen)
    if not isinstance(target, str | Path):
        if tokenizer is None:
            raise ConfigError("a model object needs its tokenizer: pass tokenizer=… as well")
        yield LoadedTarget(target, tokenizer, target.config._name_or_path or type(target).__name__, options)
        return
    if tokenizer is not None:
        raise ConfigError(f"tokenizer is for a model object: {target} brings its own, leave it out")
    name, rest = str(target), _applied(options)
    if options.tensor_parallel:
        with load_divided(
            name, device=options.device, dtype=options.dtype, model_kwargs=options.model_kwargs
        ) as divided:
            if options.chat_template is not None:
                divided[1].chat_template = read_chat_template(options.chat_template)
            yield LoadedTarget(*divided, name, rest)
    else:
        loaded = load_target(
            name, device=options.device, dtype=options.dtype, model_kwargs=options.model_kwargs,
            chat_template=options.chat_template,
        )  # fmt: skip
        yield LoadedTarget(*loaded, name, rest)


def loaded_draft(
    options: EngineOptions, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """The draft model of the options, None without one. Raises what `load_draft` raises."""
    if options.draft_model is None:
        return None
    return load_draft(options.draft_model, target, tokenizer, device=options.draft_device)


def _applied(options: EngineOptions) -> EngineOptions:
    """The options without those of loading."""
    default = EngineOptions()
    return options.with_changes(**{name: getattr(default, name) for name in OF_LOADING})
