"""The entry-point group `precedent.models`: packages that run models which core does not, or run core's models faster.

Each entry names an instance of a `ModelSupport` subclass. A package that brings a back end of its own (llama.cpp, an
encoder-decoder model) implements `recognises` and `load`; one that extends the torch target (kernels, layers with a
state) implements only the hooks below them. Everything that a package leaves out does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent import OPTIONS, __version__
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from precedent.target.kv.arena import KVArena
    from precedent.target.kv.rows import Forward
    from precedent.target.kv.shape import KVShape
    from precedent.target.kv.visibility import RowMasks
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
    cuda_graphs: object = False
    """True, or the settings of the package that makes the graphs."""


class Backend:
    """Computes the rows of some forwards in place of the model's own forward, with the same result up to rounding."""

    settled = True
    """Whether the time of the last forward is what such a forward will take again; False where this backend refused
    rows that it may take another time."""

    arena: KVArena | None = None
    """The memory in which all sequences lie where the rows are computed in forwards of fixed size."""

    cuda_graphs_beside: object = None
    """The option `cuda_graphs` of a draft model that runs beside the target."""

    def logits(self, forward: Forward) -> Tensor | None:
        """Logits `[rows, vocab_size]`; the keys and values are written. None for rows that it does not support."""
        raise NotImplementedError

    def fill(self, forward: Forward) -> bool:
        """Write the keys and values only; False for rows that it does not support."""
        return self.logits(forward) is not None


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

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, masks: RowMasks, index: int, scaling: float | None
    ) -> Tensor | None:
        """Attention of the rows of sequence `index`, `query [1, heads, rows, dim]`, as `[1, rows, heads, dim]`.

        `key` and `value` `[1, kv_heads, keys, dim]` hold the sequence's prefix and its new rows. None where this
        package does not compute it faster than torch.
        """
        return None

    def bitwise(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Collection[int] | None:
        """Let the rows of an examined model round alike, whatever is computed beside them.

        Returns the lengths of texts at which this is to be tested (those at which sums are split), beside a short one;
        None where this package has no such kernels for the device. Raises UnsupportedError, naming the model and the
        reason, for a model that needs more than they compute.
        """
        return None

    def backend(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Backend | None:
        """Return what computes some forwards of an examined model; None where it does not fit.

        Raises UnsupportedError, naming the model and the reason, where an option demands it.
        """
        return None


@cache
def installed() -> tuple[ModelSupport, ...]:
    """The installed packages of the group, sorted by name.

    One that cannot be imported, or was built for another version of this package, is left out with a warning.
    """
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            check_version(entry.dist)
            found.append(entry.load())
        except Exception as error:  # whatever a package's import raises
            log.warning("the models of %s are not available: %s: %s", entry.value, type(error).__name__, error)
    return tuple(found)


def check_version(package: Distribution | None) -> None:
    """Raise ConfigError for a package that pins another version of precedent-llm than this one."""
    for requirement in () if package is None else package.requires or ():
        name, _, pinned = requirement.partition("==")
        if name.strip() == "precedent-llm" and pinned and pinned != __version__:
            own = f"precedent-llm=={__version__}"
            raise ConfigError(
                f"{package.name} {package.version} is made for precedent-llm {pinned}, and {__version__} is installed: "
                f"pip install '{own}' '{package.name}=={__version__}'"
            )


def missing(option: str, asked: str) -> ConfigError:
    """The error for an option that no installed package computes, which says what brings it."""
    return ConfigError(f"{asked} is not available: pip install '{OPTIONS[option]}'")
