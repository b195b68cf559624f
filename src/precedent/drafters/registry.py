"""The known drafters: a table of the built-in ones, and the entry-point group `precedent.drafters` for others.

A factory `(parts: DrafterParts) -> Drafter | None` returns None if a part that it needs is missing (no cache, no draft
model); the drafter is then left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from precedent.drafters.base import Drafter
from precedent.drafters.codec import TextCodec
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.recall.drafter import CACHE, RecallDrafter, Report
from precedent.drafters.templates import TemplateDrafter
from precedent.errors import ConfigError
from precedent.runtime.fence import Fences

if TYPE_CHECKING:
    import torch

    from precedent.cache import SpeculationCache
    from precedent.target import TargetModel
    from precedent.target.block.model import BlockModel
    from precedent.target.head_model import HeadModel

GROUP = "precedent.drafters"


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What an engine offers to a drafter's factory; `codec` is its tokenizer.

    `early_exit` says that the draft model is the target's own first layers and reads the target's keys and values;
    `draws_ahead` that it draws while the target scores. `device` is where the target verifies. `report` is called with
    every finished call to the cache. `fences` are the engine's. `head` is the MTP head of the target's checkpoint,
    `block` the block draft, `eagle` the EAGLE head.
    """

    tokenizer_fingerprint: str
    executor: Executor
    cache: SpeculationCache | None = None
    draft_model: TargetModel | None = None
    codec: TextCodec | None = None
    early_exit: bool = False
    draws_ahead: bool = False
    device: torch.device | None = None
    report: Report | None = None
    head: HeadModel | None = None
    block: BlockModel | None = None
    eagle: HeadModel | None = None
    fences: Fences = field(default_factory=Fences)


Factory = Callable[[DrafterParts], Drafter | None]


def _recall(parts: DrafterParts) -> Drafter | None:
    if parts.cache is None:
        return None
    cache, tokenizer, executor = parts.cache, parts.tokenizer_fingerprint, parts.executor
    if not hasattr(cache, "partition"):  # a replay's cache has only what recall needs
        return RecallDrafter(cache, tokenizer, executor, report=parts.report, fence=parts.fences.of(CACHE))
    drafter = RecallDrafter(
        cache,
        tokenizer,
        executor,
        partitions=cache.partition,
        max_bytes=cache.max_index_bytes,
        report=parts.report,
        fence=parts.fences.of(CACHE),
    )
    cache.on_gone(drafter.erase_gone)
    return drafter


def _draft_model(parts: DrafterParts) -> Drafter | None:
    if parts.draft_model is None:
        return None
    from precedent.drafters.model.conditioned import ConditionedDrafter  # here: they need torch
    from precedent.drafters.model.drafter import DraftModelDrafter
    from precedent.target.head_model import HeadModel

    if isinstance(parts.draft_model, HeadModel):
        return ConditionedDrafter(parts.draft_model)
    return DraftModelDrafter(
        parts.draft_model, early_exit=parts.early_exit, hand_to=parts.device, own_stream=parts.draws_ahead
    )


def _mtp(parts: DrafterParts) -> Drafter | None:
    if parts.head is None:  # nobody names it by default, so leaving it out would ignore what was asked for
        raise ConfigError(
            "this engine keeps no hidden states, which mtp reads: name mtp among the drafters of its own speculation "
            "settings, EngineOptions(speculation=SpeculationConfig(drafters=(..., 'mtp'))), not only in a request's"
        )
    from precedent.drafters.model.mtp import MtpDrafter  # here: it needs torch

    return MtpDrafter(parts.head)


def _block(parts: DrafterParts) -> Drafter | None:
    if parts.block is None:
        return None
    from precedent.drafters.model.block import BlockDrafter  # here: it needs torch

    return BlockDrafter(parts.block)


def _eagle(parts: DrafterParts) -> Drafter | None:
    if parts.eagle is None:
        return None
    from precedent.drafters.model.eagle import EagleDrafter  # here: it needs torch

    return EagleDrafter(parts.eagle)


BUILT_IN: Mapping[str, Factory] = {
    "recall": _recall,
    "prompt": lambda parts: PromptDrafter(),
    "prediction": lambda parts: PredictionDrafter(),
    "template": lambda parts: None if parts.codec is None else TemplateDrafter(parts.codec),
    "grammar": lambda parts: GrammarDrafter(),
    "draft-model": _draft_model,
    "block-draft": _block,
    "eagle": _eagle,
    "mtp": _mtp,
}


def known_drafters() -> list[str]:
    """The names of all installed drafters, sorted."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def load_drafters(names: Sequence[str], parts: DrafterParts) -> list[Drafter]:
    """Build the named drafters, in this order. Raises ConfigError for a name that no installed package provides."""
    made = [_factory(name)(parts) for name in names]
    return [drafter for drafter in made if drafter is not None]


def check_known(names: Iterable[str], added: Iterable[str] = ()) -> None:
    """Raise ConfigError for a name that no installed package provides and that is not among those `added`."""
    known = {*known_drafters(), *added}
    for name in names:
        if name not in known:
            raise ConfigError(_unknown(name))


def _factory(name: str) -> Factory:
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        raise ConfigError(_unknown(name))
    factory: Factory = found.load()
    return factory


def _unknown(name: str) -> str:
    return f"no drafter is called {name!r} (installed: {', '.join(known_drafters())})"
