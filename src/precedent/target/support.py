"""The entry-point group `precedent.models`: packages that run models which core does not, or run core's models faster.

Each entry names an instance of a `ModelSupport` subclass. A package that brings a back end of its own (llama.cpp, an
encoder-decoder model) implements `recognises` and `load`; one that extends the torch target (kernels, layers with a
state) implements only the hooks below them. Everything that a package leaves out does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from precedent import OPTIONS, __version__
from precedent.errors import ConfigError, UnsupportedError
from precedent.target.kv.layer_kinds import COMPRESSED, OF_A_PACKAGE, REWINDABLE, check_type, is_stateful, layers_of
from precedent.target.kv.shape import ObserverLayer, StateShape

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

    from precedent.target.contract import Target
    from precedent.target.kv.cache import Arena
    from precedent.target.kv.rows import ForwardPass, RowMasks
    from precedent.target.kv.shape import KVShape
    from precedent.target.quantised import QuantisedWeight
    from precedent.target.runner import Runner
    from precedent.verify import Pending

__all__ = ["ModelSource", "ModelSupport", "TargetOptions"]

GROUP = "precedent.models"

Reader = Callable[[Mapping[str, Any]], "PreTrainedModel | None"]
"""Loads a model with some arguments of `from_pretrained`; None where that is left to transformers."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a target is made of, before any weight is read.

    `place` is a folder, a GGUF file or an id of the hub, None for a `model` that is loaded already. `config` is what
    its files say, None where transformers does not know the architecture. `generation_config` is what a GGUF file, or
    the program that keeps it, recommends.
    """

    place: str | Path | None
    config: PreTrainedConfig | None = None
    model: PreTrainedModel | None = None
    generation_config: GenerationConfig | None = None


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How a target is made; the fields mean what they mean in `EngineOptions`."""

    device: str | None = None
    dtype: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold a token of the hub
    bitwise: bool = False
    cuda_graphs: object = False
    """True, or the settings of the package that makes the graphs."""

    backend: str | None = None
    n_gpu_layers: int | None = None


class LayerState:
    """How the layers of a model run and what they remember; this one: attention that keeps all keys and values.

    `ModelSupport.layer_state` returns others, for kinds of layers that core does not know.
    """

    kinds: Set[str] = frozenset()
    """Kinds of layers that it runs beyond core's, by transformers' names."""

    observer_layer: type[ObserverLayer] = ObserverLayer
    """What transformers' modules find in the cache for each layer while the model is observed."""

    state = StateShape()
    """What the layers remember before the model was observed."""

    packs: bool | None = None
    """Whether several sequences fit in one forward: None where the model's class says that it takes our attention."""

    why_irregular: str | None = None
    """Why its forwards have no fixed size and rows cannot round alike, on any device; None where kernels decide."""

    stateful: bool = False
    """Whether the layers have a state that has to be observed. transformers computes them in float32."""

    def adapt(self, model: PreTrainedModel) -> str | None:
        """Prepare a model's modules; returns why it follows single paths and no trees, None if it follows trees."""
        return None

    def running(self, forward: ForwardPass) -> AbstractContextManager[object]:
        """Announce a forward to the model's modules."""
        return nullcontext()

    def masks(self, kinds: set[str]) -> dict[str, str | None]:
        """For each kind of mask that the model's forward takes, the kind of attention it is for, None for no mask."""
        return {kind: kind for kind in kinds}


class Backend:
    """Computes the rows of some forwards in place of the model's own forward, with the same result up to rounding."""

    settled = True
    """Whether the time of the last forward is what such a forward will take again; False where this backend refused
    rows that it may take another time."""

    arena: Arena | None = None
    """The memory in which all sequences lie where the rows are computed in forwards of fixed size."""

    cuda_graphs_beside: object = None
    """The option `cuda_graphs` of a draft model that runs beside the target."""

    def logits(self, forward: ForwardPass) -> Tensor | None:
        """Logits `[rows, vocab_size]`; the keys and values are written. None for rows that it does not support."""
        raise NotImplementedError

    def fill(self, forward: ForwardPass) -> bool:
        """Write the keys and values only; False for rows that it does not support."""
        return self.logits(forward) is not None


class ModelSupport:
    """What a package of the group `precedent.models` brings. Override some of the methods; the others do nothing."""

    def recognises(self, source: ModelSource, options: TargetOptions) -> bool:
        """Whether `load` makes the target of this source. Called before any weight is read; must be quick.

        Raises UnsupportedError for a source of its kind that cannot be a target, or not with these options.
        """
        return False

    def load(self, source: ModelSource, options: TargetOptions) -> Target:
        """Make the target of a source that `recognises` accepted.

        Raises ModelLoadError for weights that cannot be read, UnsupportedError, naming the option or the model, for
        what this back end cannot do.
        """
        raise NotImplementedError(f"{type(self).__name__} recognises a source and does not load it")

    def prepare(self, model: PreTrainedModel, *, bitwise: bool) -> None:
        """Replace modules of a model of the torch target by faster ones, before it is examined."""

    def quantised_kinds(self) -> Set[str]:
        """Types of GGUF tensors (Q4_K) that `quantised_layer` computes with."""
        return frozenset()

    def quantised_layer(self, module: nn.Module, weights: Sequence[QuantisedWeight]) -> nn.Module | None:
        """What computes a layer on a CPU with weights that stay where they are stored; None for an unknown module.

        `module` is a linear layer or an embedding, of one weight, or a mixture's experts: gates, ups, then downs.
        Raises ModelLoadError, naming the tensor, for experts of other shapes.
        """
        return None

    def quantised_reader(self, folder: Path, config: PreTrainedConfig, quantization: str | None) -> Reader | None:
        """What loads a checkpoint on a CPU with linear layers that stay as its quantiser stored them.

        With `quantization`, one whose weights are ordinary, which are quantised in this way. None for others.
        """
        return None

    def layer_state(self, config: Any) -> LayerState | None:
        """How to run the layers of a text model's config; None for layers that this package does not know."""
        return None

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

    def verify_ahead(self, pending: Sequence[Pending]) -> None:
        """Set `Pending.ahead` of a step's trees whose verdicts are found faster together than row by row."""

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


def support_for(source: ModelSource, options: TargetOptions | None = None) -> ModelSupport | None:
    """The package that makes the target of a source; None where the torch target does.

    Raises UnsupportedError for a source that no installed package can run, saying which package brings it.
    """
    options = options or TargetOptions()
    found = next((each for each in installed() if each.recognises(source, options)), None)
    if found is None and getattr(source.config, "is_encoder_decoder", False):
        raise _lacking(source.config, "is an encoder-decoder model, which needs")
    return found


def quantised_kinds() -> frozenset[str]:
    """Types of GGUF tensors that stay in their file on a CPU."""
    return frozenset[str]().union(*(each.quantised_kinds() for each in installed()))


def quantised_layer(module: nn.Module, weights: Sequence[QuantisedWeight]) -> nn.Module | None:
    """What computes a layer with quantised weights (`ModelSupport.quantised_layer`); None if nothing does."""
    found = (each.quantised_layer(module, weights) for each in installed())
    return next((layer for layer in found if layer is not None), None)


def quantised_reader(folder: Path, config: Any, quantization: str | None = None) -> Reader | None:
    """What loads a checkpoint of quantised linear layers (`ModelSupport.quantised_reader`); None if nothing does."""
    found = (each.quantised_reader(folder, config, quantization) for each in installed())
    return next((read for read in found if read is not None), None)


def layer_state_of(config: Any) -> LayerState:
    """How the layers of a model run.

    Raises UnsupportedError, naming the layer kind, for layers that cannot be rewound to any earlier token, and for
    those of a package that is not installed.
    """
    if getattr(config, "is_encoder_decoder", False):
        check_type(config.model_type)
        raise UnsupportedError(
            f"{config.model_type} is an encoder-decoder model, which only Engine and PrecedentLLM take"
        )
    text, kinds = layers_of(config)
    if getattr(text, "ple_layer_ids", None):
        raise UnsupportedError(
            f"{text.model_type} has n-gram embeddings (ple_layer_ids), which look back along one path of tokens only"
        )
    if kinds & COMPRESSED:
        raise UnsupportedError(
            f"{text.model_type} has {', '.join(sorted(kinds & COMPRESSED))} layers, which store one compressed key for "
            "several tokens: a rejected draft cannot be taken out of it, and candidate trees would need one per branch"
        )
    found = next((state for each in installed() if (state := each.layer_state(text)) is not None), LayerState())
    others = sorted(kinds - REWINDABLE - found.kinds)
    lacking = sorted(OF_A_PACKAGE.intersection(others))
    if lacking:
        raise _lacking(config, f"has {', '.join(lacking)} layers, which need")
    if kinds <= REWINDABLE and is_stateful(text):
        others = ["recurrent"]
    if others:
        raise UnsupportedError(
            f"{text.model_type} has {', '.join(others)} layers, which cannot be rewound after a rejected draft; "
            "give a model of another kind (docs/reference/models.md lists those that work)"
        )
    return found


def _lacking(config: Any, needs: str) -> UnsupportedError:
    """The error for a model that precedent-models would run, by the name of its class."""
    named = getattr(config, "architectures", None) or ()
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    name = named[0] if named else getattr(found, "__name__", config.model_type)
    return UnsupportedError(f"{name} {needs} a package: pip install '{OPTIONS['models']}'")


def check_loadable(config: Any) -> None:
    """Raise UnsupportedError, with the reason, for a model that can be neither target nor draft model."""
    if support_for(ModelSource(None, config)) is None:
        layer_state_of(config)


def check_version(package: Distribution | None) -> None:
    """Raise ConfigError for a package that pins another version of precedent-llm than this one."""
    if package is None:
        return
    for requirement in package.requires or ():
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
