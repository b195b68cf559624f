"""Loads the target and the drafts that an engine's options name, and prepares the drafts beside the target."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from precedent.drafters.registry import DRAFT_MODEL, DraftKind, kind_named, kind_of, load_draft
from precedent.engine.options import BACKENDS, OF_LOADING, EngineOptions
from precedent.errors import ConfigError, UnsupportedError
from precedent.target import Target, TargetModel
from precedent.target.load.first_layers import exits_early
from precedent.target.load.loading import load_beside, load_target, load_tokenizer, recommended
from precedent.target.load.source import gguf_file
from precedent.target.model import target_of
from precedent.target.support import ModelSource, TargetOptions, missing, support_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


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
    name, default = str(target), EngineOptions()
    applied = options.with_changes(**{option: getattr(default, option) for option in OF_LOADING})
    wanted = TargetOptions(
        options.device, options.dtype, options.model_kwargs or {}, options.bitwise, options.cuda_graphs,
        options.backend, options.n_gpu_layers,
    )  # fmt: skip
    file = gguf_file(name, options.model_kwargs)
    source = ModelSource(file or name)
    support = support_for(source, wanted)
    if support is not None:
        for option in ("quantization", "accurate"):
            if value := getattr(options, option):
                raise UnsupportedError(f"{option}={value!r} is not available for {name}: leave it out")
        tokenizer = load_tokenizer(name, options.chat_template)
        if file is not None:
            source = replace(source, generation_config=recommended(name, file, tokenizer))
        return LoadedTarget(support.load(source, wanted), tokenizer, name, applied)
    if options.backend not in (None, "auto", BACKENDS[0]):
        raise missing("llama.cpp", f"backend={options.backend!r}")
    if options.n_gpu_layers:
        log.warning("n_gpu_layers=%d is ignored: llama.cpp does not compute %s", options.n_gpu_layers, name)
    by_us = [option for option in OF_LOADING if option not in ("backend", "n_gpu_layers")]
    loaded = load_target(name, **{option: getattr(options, option) for option in by_us})
    return LoadedTarget(*loaded, name, applied)


def loaded_draft(
    options: EngineOptions, target: PreTrainedModel | Target, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """The draft model of the options, None without one.

    Raises what `load_draft` raises, and UnsupportedError for one that is made of its target's layers, or reads them,
    beside a target of another program.
    """
    draft = options.draft_model
    if draft is None:
        return None
    model = target.model if isinstance(target, Target) else target
    if model is not None:
        return load_draft(draft, model, tokenizer, device=options.draft_device)
    assert isinstance(target, Target)
    return load_beside(draft, target.vocab_size, tokenizer, device=options.draft_device)


@dataclass(frozen=True, slots=True)
class DraftModels:
    """The models that draft beside an engine's target: a draft model, which may be the target's first layers.

    A draft of another `kind` is neither: it is among `heads`, which read what the target computes, by the name of its
    drafter.
    """

    draft: TargetModel | None = None
    early_exit: bool = False
    kind: DraftKind | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def beside(cls, target: Target, draft_model: PreTrainedModel | None, drafters: Iterable[str]) -> Self:
        """Prepare the models of these drafters. Raises what `draft_for` and `DraftKind.beside` raise."""
        if not isinstance(target, TargetModel):
            if any(kind_named(name) is not None for name in drafters):
                target.keep_hidden_states()  # raises UnsupportedError
            return cls(None if draft_model is None else TargetModel(draft_model))
        kind = None if draft_model is None else kind_of(draft_model)
        models = cls(*draft_for(target, draft_model)) if kind is None else cls(kind=kind)
        heads: dict[str, Any] = {}
        for name in models.named(drafters):
            found = kind if kind is not None and kind.name == name else kind_named(name)
            head = None if found is None else found.beside(target, draft_model if found is kind else None)
            if head is not None:
                heads[name] = head
        return cls(models.draft, models.early_exit, kind, heads)

    def named(self, drafters: Iterable[str]) -> list[str]:
        """The names of drafters, with that of the draft model's own kind in place of `draft-model`."""
        own = DRAFT_MODEL if self.kind is None else self.kind.name
        return list(dict.fromkeys(own if name == DRAFT_MODEL else name for name in drafters))


def draft_for(target: TargetModel, model: PreTrainedModel | None) -> tuple[TargetModel | None, bool]:
    """The draft model, and whether it is the target's own first layers (`exits_early`); (None, False) without one.

    If the target runs in forwards of fixed size, so does a draft model on the same kind of device: its forwards are the
    shortest, so launching their operations one by one costs it most. A draft that cannot runs without graphs, and the
    log says why; its tokens are the same. An early exit reads the target's arena, and also runs without graphs.
    """
    if model is None:
        return None, False
    draft = target_of(model)
    assert isinstance(draft, TargetModel)
    if draft.encodes_prompt and not target.encodes_prompt:
        raise UnsupportedError(
            f"the encoder-decoder model {model.config.model_type} drafts only for a target of its kind: give a "
            "decoder-only draft model"
        )
    early = exits_early(draft, target)
    graphs = next((each.cuda_graphs_beside for each in target.runner.backends if each.cuda_graphs_beside), None)
    if graphs is not None and not early and draft.device.type == target.device.type:
        try:
            draft.run_as_graphs(graphs)
        except UnsupportedError as error:
            log.warning("the draft model runs without graphs: %s", error)
    return draft, early
