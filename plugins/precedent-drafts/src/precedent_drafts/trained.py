"""Drafts that `precedent train-draft` writes beside one target: chains, exits, and chains that read their target.

A folder holds `draft.json`, which names its target, and `draft.safetensors`: the weights of its own modules and, if the
head covers only the most frequent tokens, their ids. Embeddings, final norm and head are the target's.

- A chain is a few layers between the target's embeddings and head.
- An exit is the target's first layers, an adapter, and the target's final norm and head (FREE, 2310.05424). It stores
  the keys and values that the target stores there, so it reads the target's KV cache as `first-layers:N` does.
- A chain that reads its target has a fusion before its layers (EAGLE, 2401.15077). At position i it reads the embedding
  of token i + 1 and the target's final hidden state of token i, and predicts token i + 2; behind the committed text its
  own output takes the place of the hidden state.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.target.load.first_layers import base_of, first_layers, frame_of, layers_of, whole
from precedent.target.quantised import is_quantised
from precedent_drafts.eight_bits import packed, quantise_linears, unpacked
from precedent_drafts.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent_drafts.heads import HEAD_TOKENS, GivenStates, check_on_one_device, restrict_head

SETTINGS_FILE, WEIGHTS_FILE = "draft.json", "draft.safetensors"

FORMAT = 1
"""Increase it whenever an older version of this file could not read the folder."""

ADAPTER, FUSION = "adapter.", "fusion."
"""How the names of an adapter's and a fusion's weights begin in a draft's folder."""

LINEAR, TOKEN_GUIDED = "linear", "token-guided"
"""How a draft fuses its inputs: EAGLE's linear map, or GRIFFIN's with a correction (2502.11018)."""

EPSILON = 1e-6

Weights = Mapping[str, Tensor]

Settings = TypeVar("Settings")

log = logging.getLogger(__name__)


# Files that are whole or absent, whatever ends their writer


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; the file there takes the place of `path` at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    partial.replace(path)


def save_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_tensors(path: Path, tensors: Weights, **metadata: str) -> None:
    """Write tensors as safetensors, with texts beside them."""
    with replacing(path) as partial:
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(kept, partial, {"format": "pt"} | metadata)


def read_as(made: type[Settings], path: Path, /, **expected: Any) -> Settings:
    """The settings in a JSON file. Raises ModelLoadError if it is damaged or does not have the `expected` values."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, value in expected.items():
            if found[name] != value:
                raise ModelLoadError(f"{path} has {name} {found[name]}, this version reads {value}; train it again")
        return made(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error!r}); train it again") from error


# Folders


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Which target a draft belongs to, and its shape.

    `embeddings` is the fingerprint of the target's embeddings and head, without which the weights are useless; `layers`
    is that of its layers. Beside a model with the same embeddings but other layers the draft works, but fewer of its
    tokens are accepted. Training began from the target's layers `initial_layers`; `num_head_tokens` None means the
    whole vocabulary. With `exit_layer` it is an exit behind that layer of the target, counted from 1; with `fusion` its
    layers also read the target's hidden states.
    """

    target: str
    embeddings: str
    layers: str
    initial_layers: tuple[int, ...]
    num_head_tokens: int | None = None
    exit_layer: int | None = None
    fusion: str | None = None
    format: int = FORMAT

    @classmethod
    def of(cls, target: PreTrainedModel, **settings: Any) -> Self:
        """The settings of a draft of this target."""
        fingerprints = embeddings_fingerprint(target), layers_fingerprint(target)
        return cls(name_of(target), *fingerprints, **({"initial_layers": ()} | settings))

    @property
    def kind(self) -> str:
        """What the folder holds, in words."""
        if self.exit_layer is not None:
            return f"an exit behind layer {self.exit_layer}"
        return "a chain" if self.fusion is None else "a chain that reads its target"


def save_draft(folder: Path, settings: DraftSettings, weights: Weights) -> None:
    """Write a draft's folder; `draft.json` is written last, so an incomplete folder is not taken for a draft."""
    save_tensors(folder / WEIGHTS_FILE, packed(weights))
    save_json(folder / SETTINGS_FILE, dataclasses.asdict(settings))


def holds_draft(place: str | Path) -> bool:
    """Whether `place` is a folder of a trained draft model."""
    return (Path(place).expanduser() / SETTINGS_FILE).is_file()


def read_settings(folder: Path) -> DraftSettings:
    """The content of `draft.json`. Raises ModelLoadError if this version does not understand it."""
    return read_as(DraftSettings, folder / SETTINGS_FILE, format=FORMAT)


def load_weights(folder: Path, target: PreTrainedModel) -> tuple[DraftSettings, dict[str, Tensor]]:
    """The content of a draft's folder. Raises ModelLoadError, naming both, if it uses another target's embeddings."""
    settings, name = read_settings(folder), name_of(target)
    if settings.embeddings != embeddings_fingerprint(target):
        raise ModelLoadError(
            f"the draft model {folder} was trained for {settings.target} and uses its embeddings, which differ from "
            f"those of {name}; give {settings.target} as the target, or train a draft for {name} with precedent "
            "train-draft"
        )
    return settings, unpacked(load_file(folder / WEIGHTS_FILE))


def load_trained(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Load a draft beside its target. Raises ModelLoadError, naming both, if it belongs to another target."""
    settings, weights = load_weights(folder, target)
    if settings.layers != layers_fingerprint(target):
        log.warning(
            "the draft model %s was trained for %s; %s has different layers: fewer of its tokens will be accepted",
            folder, settings.target, name_of(target),
        )  # fmt: skip
    if settings.exit_layer is not None:
        draft = exit_beside(target, settings.exit_layer, weights)
    elif settings.fusion is not None:
        draft = conditioned_beside(target, settings.initial_layers, settings.fusion, weights)
    else:
        draft = draft_beside(target, settings.initial_layers, weights)
    return draft.requires_grad_(False)  # including the target's own modules, which need no gradients either


def _filled(module: nn.Module, weights: Weights, prefix: str, place: torch.device, dtype: torch.dtype) -> Any:
    """A module on the meta device, with its weights from those below `prefix`. Raises ModelLoadError if they misfit."""
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    try:
        module.to(dtype).to_empty(device=place).load_state_dict(own)
    except RuntimeError as error:
        raise ModelLoadError(
            f"the weights {prefix}* of the draft model do not fit: {' '.join(str(error).split())}"
        ) from error
    return module.eval()


# Chains


def draft_beside(
    target: PreTrainedModel, initial_layers: Sequence[int], weights: Weights, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A draft model from its own weights and the target's embeddings and head, on the target's device.

    `dtype` None is the target's. Raises ModelLoadError if a weight is missing or has another shape, UnsupportedError if
    layers cannot be set between the target's embeddings and head.
    """
    draft = frame_of(target, initial_layers)
    for number, index in enumerate(initial_layers):
        layer, original = base_of(draft).layers[number], layers_of(target)[index]
        place = next(original.parameters()).device
        _filled(layer, weights, f"layers.{number}.", place, dtype or target.dtype)
        if is_quantised(target):
            quantise_linears(layer)
        for name, buffer in original.named_buffers():
            layer.get_buffer(name).copy_(buffer)
    if HEAD_TOKENS in weights:
        restrict_head(draft, target, weights[HEAD_TOKENS])
    return whole(draft, target)


def initial_layers(count: int, of: int) -> tuple[int, ...]:
    """The layers with which training begins, of a target with so many: evenly spaced from first to last."""
    return tuple(round(place * (of - 1) / max(1, count - 1)) for place in range(count))


def initial_weights(target: PreTrainedModel, initial_layers: Sequence[int]) -> dict[str, Tensor]:
    """The weights with which training begins: those of some of the target's layers, not copied."""
    layers = layers_of(target)
    return {
        f"layers.{place}.{name}": tensor
        for place, index in enumerate(initial_layers)
        for name, tensor in layers[index].state_dict().items()
    }


# Exits


class ExitAdapter(nn.Module):
    """Adds to a layer's output a linear map and a gated unit of its norm; with new weights it changes nothing.

    `width` is the size of the gated unit. It looks at one token at a time and stores nothing.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.map_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.map_proj.weight)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to the same shape."""
        normed = self.norm(hidden)
        gated: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        mapped: Tensor = self.map_proj(normed)
        return hidden + mapped + gated


class AdaptedNorm(nn.Module):
    """Stands where a model has its final norm: the adapter, then that norm."""

    def __init__(self, adapter: ExitAdapter, norm: nn.Module) -> None:
        super().__init__()
        self.adapter, self.norm = adapter, norm

    def forward(self, hidden: Tensor) -> Tensor:
        """The last layer's output to final hidden states."""
        found: Tensor = self.norm(self.adapter(hidden))
        return found


def check_exits(target: PreTrainedModel) -> None:
    """Raise UnsupportedError unless a target has `layers`, a final `norm` behind them, and is whole on one device."""
    layers_of(target)
    if not isinstance(getattr(base_of(target), "norm", None), nn.Module):
        raise UnsupportedError(f"{name_of(target)} has no final `norm`, before which an exit puts its adapter")
    check_on_one_device(target, "an exit")


def exit_beside(target: PreTrainedModel, layer: int, weights: Weights) -> PreTrainedModel:
    """The exit behind the target's layer `layer`, counted from 1, in the target's dtype.

    Raises ModelLoadError for weights that do not fit, UnsupportedError for a target without a place for an exit.
    """
    check_exits(target)
    gate = weights.get(f"{ADAPTER}gate_proj.weight", torch.empty(0))
    with torch.device("meta"):
        adapter = ExitAdapter(target.config.get_text_config().hidden_size, gate.shape[0])
    draft = first_layers(target, layer)
    base: Any = base_of(draft)
    adapter = _filled(adapter, weights, ADAPTER, target.device, target.dtype)
    if is_quantised(target):
        quantise_linears(adapter)
    base.norm = AdaptedNorm(adapter, base.norm).eval()
    if HEAD_TOKENS in weights:
        restrict_head(draft, target, weights[HEAD_TOKENS])
    return draft


# Chains that read their target


class LinearFusion(nn.Module):
    """`W [e; f]` of an embedding e and a hidden state f; with new weights it is e."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.map_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        with torch.no_grad():
            self.map_proj.weight.copy_(torch.eye(hidden_size, 2 * hidden_size))

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Both `[..., hidden_size]` to one."""
        found: Tensor = self.map_proj(torch.cat([embedded, hidden], dim=-1))
        return found


class TokenGuidedFusion(LinearFusion):
    """`W [e; f] + D silu(U [norm f; e])`: the token corrects what a drafted hidden state got wrong."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.up_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Both `[..., hidden_size]` to one."""
        guided: Tensor = self.up_proj(torch.cat([self.norm(hidden), embedded], dim=-1))
        corrected: Tensor = self.down_proj(nn.functional.silu(guided))
        return super().forward(embedded, hidden) + corrected


class ConditionedInputs(GivenStates):
    """Replaces the embeddings of a draft that reads its target."""

    def __init__(self, embeddings: nn.Module, fusion: LinearFusion) -> None:
        super().__init__(embeddings)
        self.fusion = fusion

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The fusion of both inputs, in its dtype."""
        dtype = self.fusion.map_proj.weight.dtype
        found: Tensor = self.fusion(embedded.to(dtype), states.to(dtype))
        return found


def fusion_of(kind: str, hidden_size: int) -> LinearFusion:
    """A fusion with new weights, of torch's global generator. Raises ModelLoadError for an unknown kind."""
    fusions = {LINEAR: LinearFusion, TOKEN_GUIDED: TokenGuidedFusion}
    if kind not in fusions:
        raise ModelLoadError(f"the draft fuses its inputs in a way that this version does not know: {kind!r}")
    return fusions[kind](hidden_size)


def reads_hidden_states(model: Any) -> bool:
    """Whether a draft model reads its target's hidden states."""
    return isinstance(model, PreTrainedModel) and isinstance(model.get_input_embeddings(), ConditionedInputs)


def conditioned_beside(
    target: PreTrainedModel,
    initial_layers: Sequence[int],
    fusion: str,
    weights: Weights,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A draft from the weights of its layers and its fusion, with the target's embeddings and head.

    Raises what `draft_beside` and `fusion_of` do, and UnsupportedError for a target that is spread over devices.
    """
    check_on_one_device(target, "a draft that reads hidden states")
    draft = draft_beside(target, initial_layers, weights, dtype)
    with torch.device("meta"):
        made = fusion_of(fusion, target.config.get_text_config().hidden_size)
    made = _filled(made, weights, FUSION, target.device, dtype or target.dtype)
    base: Any = base_of(draft)
    base.embed_tokens = ConditionedInputs(base.embed_tokens, made).eval()
    return draft
