"""The models that draft beside an engine's target: a draft model, and heads that read what the target computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from precedent.drafters.kinds import DRAFT_MODEL, DraftKind, kind_of
from precedent.drafters.registry import kind_named
from precedent.target import Target, TargetModel
from precedent.target.load.first_layers import draft_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class DraftModels:
    """The draft model, and whether it is the target's first layers.

    A draft of another `kind` is none of these: it is among `heads`, by the name of its drafter.
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
            return cls()
        kind = None if draft_model is None else kind_of(draft_model)
        models = cls(*draft_for(target, draft_model)) if kind is None else cls(kind=kind)
        heads: dict[str, Any] = {}
        for name in models.named(drafters):
            found = kind if kind is not None and kind.name == name else kind_named(name)
            if found is not None:
                heads[name] = found.beside(target, draft_model if found is kind else None)
        heads = {name: head for name, head in heads.items() if head is not None}
        return cls(models.draft, models.early_exit, kind, heads)

    def named(self, drafters: Iterable[str]) -> list[str]:
        """The names of drafters, with that of the draft model's own kind in place of `draft-model`."""
        own = DRAFT_MODEL if self.kind is None else self.kind.name
        return list(dict.fromkeys(own if name == DRAFT_MODEL else name for name in drafters))
