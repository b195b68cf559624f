"""The entry-point group `precedent.models`: packages that run models which core does not, or run core's models faster.

Each entry names an instance of a `ModelSupport` subclass. A package that brings a back end of its own (llama.cpp, an
encoder-decoder model) implements `recognises` and `load`; one that extends the torch target (kernels, layers with a
state) implements only the hooks below them. Everything that a package leaves out does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from precedent.target.kv.rows import Forward
    from precedent.target.kv.shape import KVShape
    from precedent.target.model import TargetModel
    from precedent.target.runner import Runner

GROUP = "precedent.models"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a target is made of, before any weight is read.

    `place` is a folder, a GGUF file or an id of the hub, None for a `model` that is loaded already. `config` is what
    its files say, None where transformers does not know the architecture.
    """

    place: str | Path | None
    config: PreTrainedConfig | None = None
    model: PreTrainedModel | None = None


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How a target is made; the fields mean what they mean in `EngineOptions`."""

    device: str | None = None
    dtype: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold a token of the hub
    bitwise: bool = False
    cuda_graphs: bool = False


class Backend(Protocol):
    """Computes the rows of a forward in place of the model's own forward, where it can."""

    settled: bool
    """Whether the time of the last forward is what such a forward will take again."""

    def logits(self, forward: Forward) -> Tensor | None:
        """Logits `[rows, vocab_size]`; the keys and values are written. None for rows that it does not support."""

    def fill(self, forward: Forward) -> bool:
        """Write the keys and values only; False for rows that it does not support."""


class ModelSupport:
    """What a package of the group `precedent.models` brings. Override some of the methods; the others do nothing."""

    def recognises(self, source: ModelSource, options: TargetOptions) -> bool:
        """Whether `load` makes the target of this source. Called before any weight is read; must be quick."""
        return False

    def load(self, source: ModelSource, options: TargetOptions) -> TargetModel:
        """Make the target of a source that `recognises` accepted.

        Raises ModelLoadError for weights that cannot be read, UnsupportedError, naming the option or the model, for
        what this back end cannot do.
        """
        raise NotImplementedError(f"{type(self).__name__} recognises a source and does not load it")

    def prepare(self, model: PreTrainedModel, *, bitwise: bool) -> None:
        """Replace modules of a model of the torch target by faster ones, before it is examined."""

    def backend(self, runner: Runner, kv_shape: KVShape) -> Backend | None:
        """Return what computes some forwards of an examined model; None where it does not fit."""
        return None


@cache
def installed() -> tuple[ModelSupport, ...]:
    """The installed packages of the group, sorted by name. One that cannot be imported is left out with a warning."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            found.append(entry.load())
        except Exception as error:  # whatever a package's import raises
            log.warning("the models of %s are not available: %s: %s", entry.value, type(error).__name__, error)
    return tuple(found)
