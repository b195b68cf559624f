"""Drafters: who proposes. Built-in ones and others' are found alike, by the entry-point group `precedent.drafters`.

An entry point is a factory `(parts: DrafterParts) -> Drafter | None`; None means that a part it needs is absent (no
cache, no draft model), so the drafter does not take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from precedent.drafters.base import (
    Candidates,
    Drafter,
    Drafting,
    DraftRequest,
    DraftsAhead,
    DrawsRunnersUp,
    DrawsTogether,
)
from precedent.drafters.codec import TextCodec
from precedent.errors import ConfigError
from precedent.plain_values import nearest

if TYPE_CHECKING:
    import torch

    from precedent.cache import SpeculationCache
    from precedent.target import TargetModel

GROUP = "precedent.drafters"

__all__ = [
    "Candidates",
    "DraftRequest",
    "Drafter",
    "DrafterParts",
    "Drafting",
    "DraftsAhead",
    "DrawsRunnersUp",
    "DrawsTogether",
    "TextCodec",
    "check_known",
    "known_drafters",
    "load_drafters",
]


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What an engine has to offer to a drafter; `codec` is its tokenizer.

    `early_exit` says that the draft model is the target's own first layers and stores nothing that the target does not,
    `pearl` that it is to draw while the target scores; `device` is where the target verifies.
    """

    tokenizer_fingerprint: str
    executor: Executor
    cache: SpeculationCache | None = None
    draft_model: TargetModel | None = None
    codec: TextCodec | None = None
    early_exit: bool = False
    pearl: bool = False
    device: torch.device | None = None


def known_drafters() -> list[str]:
    """Names of all installed drafters."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_drafters(names: Sequence[str], parts: DrafterParts) -> list[Drafter]:
    """Build the named drafters, in this order. Raises ConfigError for a name that nothing installed provides."""
    drafters = []
    for name in names:
        found = next(iter(entry_points(group=GROUP, name=name)), None)
        if found is None:
            raise ConfigError(_unknown(name))
        drafter = found.load()(parts)
        if drafter is not None:
            drafters.append(drafter)
    return drafters


def check_known(names: Iterable[str], added: Iterable[str] = ()) -> None:
    """Raise ConfigError for a name that nothing installed provides and that is not `added` to an engine."""
    known = {*known_drafters(), *added}
    for name in names:
        if name not in known:
            raise ConfigError(_unknown(name))


def _unknown(name: str) -> str:
    known = known_drafters()
    near = nearest(name, known)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"no drafter is called {name!r}{hint} (installed: {', '.join(known) or 'none'})"
