"""The known drafters: a table of the built-in ones, and the entry-point group `precedent.drafters` for others.

A factory `(parts: DrafterParts) -> Drafter | None` returns None if a part that it needs is missing (no cache, no draft
model); the drafter is then left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from precedent.cache.records import DEFAULT_MAX_INDEX_BYTES
from precedent.drafters.base import Drafter, TextCodec
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.kinds import DRAFT_MODEL, DraftKind, registered
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


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What an engine offers to a drafter's factory; `codec` is its tokenizer.

    `early_exit` says that the draft model is the target's own first layers and reads the target's keys and values.
    `device` is where the target verifies. `report` is called with every finished call to the cache. `fences` are the
    engine's. `heads` are what kinds of drafts prepared beside the target (`DraftKind.beside`), by the names of their
    drafters.
    """

    tokenizer_fingerprint: str
    executor: Executor
    cache: SpeculationCache | None = None
    draft_model: TargetModel | None = None
    codec: TextCodec | None = None
    early_exit: bool = False
    device: torch.device | None = None
    report: Report | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)
    fences: Fences = field(default_factory=Fences)


Factory = Callable[[DrafterParts], Drafter | None]


def _recall(parts: DrafterParts) -> Drafter | None:
    if parts.cache is None:
        return None
    cache = parts.cache
    drafter = RecallDrafter(
        cache,
        parts.tokenizer_fingerprint,
        parts.executor,
        max_bytes=getattr(cache, "max_index_bytes", DEFAULT_MAX_INDEX_BYTES),
        report=parts.report,
        fence=parts.fences.of(CACHE),
    )
    if hasattr(cache, "on_gone"):  # a replay's cache has only what recall needs
        cache.on_gone(drafter.erase_gone)
    return drafter


def _draft_model(parts: DrafterParts) -> Drafter | None:
    if parts.draft_model is None:
        return None
    from precedent.drafters.model.drafter import DraftModelDrafter  # here: it needs torch

    return DraftModelDrafter(parts.draft_model, early_exit=parts.early_exit, hand_to=parts.device)


BUILT_IN: Mapping[str, Factory] = {
    "recall": _recall,
    "prompt": lambda parts: PromptDrafter(),
    "prediction": lambda parts: PredictionDrafter(),
    "template": lambda parts: None if parts.codec is None else TemplateDrafter(parts.codec),
    "grammar": lambda parts: GrammarDrafter(),
    DRAFT_MODEL: _draft_model,
}


def known_drafters() -> list[str]:
    """The names of all installed drafters, sorted."""
    return sorted({*BUILT_IN, *registered()})


def load_drafters(names: Sequence[str], parts: DrafterParts) -> list[Drafter]:
    """Build the named drafters, in this order. Raises ConfigError for a name that no installed package provides."""
    made = [_factory(name, parts)(parts) for name in names]
    return [drafter for drafter in made if drafter is not None]


def kind_named(name: str) -> DraftKind | None:
    """The kind of drafts whose drafter another package registered by this name; None for any other name."""
    found = None if name in BUILT_IN else _installed(name)
    return found if isinstance(found, DraftKind) else None


def check_known(names: Iterable[str], added: Iterable[str] = ()) -> None:
    """Raise ConfigError for a name that no installed package provides and that is not among those `added`."""
    known = {*known_drafters(), *added}
    for name in names:
        if name not in known:
            raise ConfigError(_unknown(name))


def _factory(name: str, parts: DrafterParts) -> Factory:
    if name in BUILT_IN and name not in parts.heads:
        return BUILT_IN[name]
    found = _installed(name)
    if found is None:
        raise ConfigError(_unknown(name))
    return found.drafter if isinstance(found, DraftKind) else found


def _installed(name: str) -> Any:
    """What a package registered by this name; None where none did."""
    entry = registered().get(name)
    return None if entry is None else entry.load()


def _unknown(name: str) -> str:
    from precedent import DRAFTERS

    if name in DRAFTERS:
        return f"the drafter {name!r} is not installed: pip install 'precedent-llm[{DRAFTERS[name]}]'"
    return f"no drafter is called {name!r} (installed: {', '.join(known_drafters())})"
