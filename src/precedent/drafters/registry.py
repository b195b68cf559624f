"""The known drafters: a table of the built-in ones, and the entry-point group `precedent.drafters` for others.

A factory `(parts: DrafterParts) -> Drafter | None` returns None if a part that it needs is missing (no cache, no draft
model); the drafter is then left out.

Packages register there, under the name of the drafter that it makes, a kind of drafts as well: heads and drafts that
read what their target computes. `draft-model` names whatever draft an engine was given, of any kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from precedent.cache.records import DEFAULT_MAX_INDEX_BYTES
from precedent.drafters.base import Drafter
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.recall.drafter import CACHE, RecallDrafter, Report
from precedent.drafters.templates import TemplateDrafter
from precedent.errors import ConfigError
from precedent.runtime.fence import Fences
from precedent.text.codec import TokenizerCodec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from precedent.cache import SpeculationCache
    from precedent.target import TargetModel


GROUP = "precedent.drafters"

DRAFT_MODEL = "draft-model"
"""The drafter of the draft model that an engine was given."""

log = logging.getLogger(__name__)


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
    codec: TokenizerCodec | None = None
    early_exit: bool = False
    device: torch.device | None = None
    report: Report | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)
    fences: Fences = field(default_factory=Fences)


@runtime_checkable
class DraftKind(Protocol):
    """Drafts of one kind. `name` is that of their drafter; what `beside` returns is that drafter's own."""

    name: str

    def recognises(self, source: object, target: PreTrainedConfig | None = None) -> str | None:
        """Say what is at a name, in a folder, or in a loaded model, if it is of this kind; None for anything else.

        Beside a target's text config, what is said is for users, and weights are not read: raises what loading would,
        as far as the config tells. There, `source` None asks what the target's own checkpoint carries.
        """

    def load(self, source: str | Path, target: PreTrainedModel) -> PreTrainedModel:
        """Load what was recognised, beside its target. Raises ModelLoadError or UnsupportedError, saying why not."""

    def beside(self, target: TargetModel, draft: PreTrainedModel | None) -> Any:
        """Prepare a draft, before the target's first slot exists, and let the target keep what the draft reads.

        `draft` is None where the engine was given none of this kind; returns None where that leaves nothing to draft
        with. Raises what says why the target cannot keep it.
        """

    def drafter(self, parts: DrafterParts) -> Drafter | None:
        """The drafter for `parts.heads[name]`, which `beside` returned; None leaves it out."""


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


def registered() -> dict[str, EntryPoint]:
    """What installed packages registered beside the built-in drafters, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


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
    entry = registered().get(name)
    return None if entry is None else entry.load()


def _unknown(name: str) -> str:
    from precedent import DRAFTERS

    if name in DRAFTERS:
        return f"the drafter {name!r} is not installed: pip install 'precedent-llm[{DRAFTERS[name]}]'"
    return f"no drafter is called {name!r} (installed: {', '.join(known_drafters())})"


def draft_kinds() -> list[DraftKind]:
    """The kinds that installed packages bring. A package that cannot be imported is left out, and the log says so."""
    found = []
    for entry in registered().values():
        try:
            loaded = entry.load()
        except Exception as error:
            log.warning("the drafter %r cannot be loaded and is left out: %r", entry.name, error)
            continue
        if isinstance(loaded, DraftKind):
            found.append(loaded)
    return found


def kind_of(source: object) -> DraftKind | None:
    """The kind of a draft, by its name, folder or model; None for a model by itself.

    Raises UnsupportedError, naming it, for a draft of a kind that no package reads.
    """
    return next((kind for kind in draft_kinds() if kind.recognises(source) is not None), None)


def load_draft(
    spec: str | Path | PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str | None = None,
) -> PreTrainedModel:
    """Load a draft of any kind: what installed packages read, or what `target.load.loading.load_draft` does.

    Raises what that raises, ConfigError for a draft that must stay on its target's device, and ModelLoadError for one
    that was trained for another target.
    """
    from precedent.target.load.loading import FIRST_LAYERS, copied_to, device_named
    from precedent.target.load.loading import load_draft as load_model
    from precedent.target.load.source import explained, find_source

    if not isinstance(spec, str | Path):
        return (
            spec if device is None and kind_of(spec) is not None else load_model(spec, target, tokenizer, device=device)
        )
    if str(spec).startswith(FIRST_LAYERS):
        return load_model(spec, target, tokenizer, device=device)
    source = find_source(spec)
    with explained(spec, "the draft model"):
        kind = None if source.file is not None else kind_of(source.place)
        if kind is None:
            return load_model(spec, target, tokenizer, device=device, source=source)
        draft = kind.load(source.place, target)
        place = draft.device if device is None else device_named(device, "draft_device")
        if place != draft.device and kind_of(draft) is not None:
            raise ConfigError(f"the draft {spec} runs beside its target, on {draft.device}: leave out draft_device")
        return copied_to(draft, place)
