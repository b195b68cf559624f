"""Kinds of drafts of other packages: heads and drafts that read what their target computes.

A package registers a kind in the entry-point group `precedent.drafters` as it registers a drafter, under the name of
the drafter that it makes. `draft-model` names whatever draft an engine was given, of any kind.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from precedent.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from precedent.drafters.base import Drafter
    from precedent.drafters.registry import DrafterParts
    from precedent.target import TargetModel

GROUP = "precedent.drafters"

DRAFT_MODEL = "draft-model"
"""The drafter of the draft model that an engine was given."""

log = logging.getLogger(__name__)


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


def registered() -> dict[str, EntryPoint]:
    """What installed packages registered beside the built-in drafters, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


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
        kind = kind_of(source)
        if kind is None:
            return load_model(spec, target, tokenizer, device=device, source=source)
        draft = kind.load(source, target)
        place = draft.device if device is None else device_named(device, "draft_device")
        if place != draft.device and kind_of(draft) is not None:
            raise ConfigError(f"the draft {spec} runs beside its target, on {draft.device}: leave out draft_device")
        return copied_to(draft, place)
