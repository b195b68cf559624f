"""Finds the decoder layers of a model that `row_layer` can compute, and swaps their classes for fused ones.

A layer qualifies if it has Llama's or Gemma's parts (norms, attention with rotary embeddings, a gated linear unit) and
agrees with `row_layer` on random inputs, whatever its class is called: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3 and
similar models. What they differ in is told by small tables here (`NORMS`, `GATES`), by trying their norms, and by the
terms with which they call attention. Modules, parameters and names stay the same. Anything unusual (many rows, a hook,
replaced modules, training) goes through the model's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from precedent.errors import UnsupportedError
from precedent.runtime.compiled import Int64s
from precedent.runtime.patched_modules import is_swapped, swapped_class
from precedent.target.attention import NAME, Terms, TermsObserver
from precedent.target.kv.rows import RowMasks, running_forward
from precedent_cpu.kernel_code import LANES
from precedent_cpu.linear import PackedLinear
from precedent_cpu.norm import epsilon_of, offset_of
from precedent_cpu.row_attention import VECTORS, Sight
from precedent_cpu.row_layer import LayerShape, Part, RowLayers, job_of, row_layers_of
from precedent_cpu.row_products import barrier, fits

CHECKED_ROWS = 3
"""Rows of random numbers on which a layer must agree with `row_layer`."""

TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}
"""Largest difference that rounding may cause, relative to what the layer adds to its input."""

TOLERANCE_OF_QUANTISED = 0.01
"""The same where inputs of products are quantised: a number between two codes may be rounded to the other one."""

MOST_QUANTISED_ROWS = 1 << 20
"""Quantised layers compute prompts, too, and so round every row alike."""

NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", None, "pre_feedforward_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
"""Names of a layer's norms: before and after attention, before and after the gated linear unit.

Llama and Gemma, VaultGemma, Gemma 2 and 3.
"""

_SLOPE = 2 * math.sqrt(2 / math.pi)
GATES: dict[tuple[float, float], Callable[[Tensor], Tensor]] = {
    (1.0, 0.0): silu,
    (_SLOPE, 0.044715 * _SLOPE): partial(gelu, approximate="tanh"),
}
"""Activations of the gated linear unit, by the slope and the cubic term of `layer_work.gated_kernel`."""

_ATTENTION, _HEAD_NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")
_GATED = ("gate_proj", "up_proj", "down_proj")


class Watched:
    """What must not change: the children of `parents`, and hooks (none), methods and parameters of `members`.

    Everything that the parts `beside` watch is watched as well.
    """

    def __init__(self, parents: Sequence[nn.Module], members: Sequence[nn.Module], beside: Sequence[Watched] = ()):
        self._families = [(cast(dict[str, Any], parent._modules), tuple(parent.children())) for parent in parents]
        self._hooks = [hooks for member in members for hooks in (member._forward_hooks, member._forward_pre_hooks)]
        self._attributes = list(map(vars, members))
        self._parameters: list[tuple[dict[str, Any], str]] = [
            (cast(dict[str, Any], member._parameters), name)
            for member in members
            for name, _ in member.named_parameters(recurse=False)
        ]
        for part in beside:
            self._families += part._families
            self._hooks += part._hooks
            self._attributes += part._attributes
            self._parameters += part._parameters
        self._places = self._now()

    def untouched(self) -> bool:
        """Whether everything is unchanged: no module was replaced or hooked, no parameter moved."""
        if any(self._hooks) or any("forward" in attributes for attributes in self._attributes):
            return False
        if any(tuple(family.values()) != members for family, members in self._families):
            return False
        return self._now() == self._places

    def _now(self) -> tuple[int, ...]:
        """Addresses of the parameters; for biases, which are copied, their version too."""
        try:
            found = [group[name] for group, name in self._parameters]
            biases = [group[name]._version for group, name in self._parameters if name == "bias"]
            return (*map(Tensor.data_ptr, found), *biases)
        except (KeyError, TypeError):  # a parameter was removed
            return ()


class FusedLayer(NamedTuple):
    """What a swapped layer holds: its job for `row_layer`, and the tensors that the job points to."""

    job: Int64s
    shape: LayerShape
    dtype: torch.dtype
    tensors: Sequence[object]
    watched: Watched
    few_rows: int
    layer_idx: int
    quantised: int

    def takes(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> bool:
        """Whether shapes and dtypes are those that the job was made for."""
        expected = (1, hidden.shape[1], self.shape.dim)
        return (
            hidden.dtype == self.dtype
            and hidden.shape == (1, hidden.shape[1], self.shape.hidden)
            and hidden.is_cpu
            and all(turn.shape == expected and turn.dtype == self.dtype for turn in turns)
        )


def fuse_layers(model: nn.Module) -> int:
    """Let every CPU decoder layer that agrees with `row_layer` use it; returns how many were newly fused.

    A layer that is fused already is examined again if something in it was moved or replaced since.
    """
    count = 0
    for module in model.modules():
        layer: Any = module
        if is_swapped(layer) and hasattr(layer, "fused") and not layer.fused.watched.untouched():
            layer.__class__ = type(layer).swapped_from
        fused = _fused(layer) if not is_swapped(layer) and _looks_right(layer) else None
        if fused is not None:
            original: Any = type(layer)
            layer.fused, layer.__class__ = fused, swapped_class(original, _forward)
            count += 1
    return count


def _looks_right(module: nn.Module) -> bool:
    """Whether a module has the parts of such a layer, and no others with parameters."""
    if _norm_names(module) is None:
        return False
    attention, gated = module.get_submodule("self_attn"), module.get_submodule("mlp")
    within = {name for name, child in attention.named_children() if _has_weights(child)}
    linears = [getattr(gated, name, None) for name in _GATED] + [getattr(attention, name, None) for name in _ATTENTION]
    return (
        within in ({*_ATTENTION}, {*_ATTENTION, *_HEAD_NORMS})
        and {name for name, child in gated.named_children() if _has_weights(child)} == {*_GATED}
        and len({type(linear) for linear in linears}) == 1
        and all(isinstance(linear, PackedLinear) or _is_quantised(linear) for linear in linears)
        and isinstance(getattr(attention, "layer_idx", None), int)
    )


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(hasattr(each, "quantised") for each in module.modules())


def _norm_names(layer: nn.Module) -> tuple[str | None, ...] | None:
    """The names of a layer's norms, those of its heads last; None if it has other parts."""
    children = {name for name, _ in layer.named_children()}
    found = next((names for names in NORMS if children == {"self_attn", "mlp", *filter(None, names)}), None)
    if found is None:
        return None
    attention = layer.get_submodule("self_attn")
    return *found, *(f"self_attn.{name}" if hasattr(attention, name) else None for name in _HEAD_NORMS)


@torch.inference_mode()
def _fused(layer: nn.Module) -> FusedLayer | None:
    """What `row_layer` needs of a layer; None if the layer computes something else on some random rows."""
    try:
        shape = _shape_of(layer)
        if shape is None:
            return None
        inputs = _random_rows(layer, shape)
        expected, terms = _output_and_terms(layer, *inputs)
        constants = _constants_of(layer, terms)
        if constants is None:
            return None
        fused = _kept(layer, shape, constants)
        return fused if _agrees(fused, *inputs, expected) else None
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # an unusual layer: it stays as it is


def _shape_of(layer: nn.Module) -> LayerShape | None:
    """The sizes of a layer; None if `row_layer` does not support them, or the weights."""
    linears, tensors = _linears(layer), [norm.weight for norm in _norms(layer) if norm is not None]
    query, key, gate = linears[0], linears[1], linears[4]
    attention: Any = layer.get_submodule("self_attn")
    dim, dtype = int(attention.head_dim), tensors[0].dtype
    shape = LayerShape(query.in_features, gate.out_features, query.out_features // dim, key.out_features // dim, dim)
    weights = [linear.weight for linear in linears if isinstance(linear, PackedLinear)]
    permuted = any(getattr(linear, "order", None) is not None for linear in linears)
    right = (
        barrier()
        and not permuted
        and (dtype in TOLERANCE if weights else dtype == torch.float32)
        and all(map(fits, weights))
        and all(tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous() for tensor in (*weights, *tensors))
        and dim % (VECTORS * LANES) == 0
        and shape.hidden % LANES == shape.inner % LANES == 0
    )
    return shape if right else None


def _constants_of(layer: nn.Module, terms: Terms | None) -> tuple[float, ...] | None:
    """`layer_work.CONSTANTS` of a layer; None if its activation, a norm or its attention is of another kind."""
    if terms is None or terms.scaling is None or terms.sinks is not None:
        return None
    offsets = {offset_of(norm) for norm in _norms(layer) if norm is not None}
    gate = _gate_of(layer.get_submodule("mlp"))
    if len(offsets) != 1 or gate is None:
        return None
    offset = offsets.pop()
    return None if offset is None else (terms.scaling, terms.softcap or 0.0, offset, *gate)


def _gate_of(gated: Any) -> tuple[float, float] | None:
    """Which of `GATES` a gated linear unit has; None for another."""
    numbers = torch.linspace(-8.0, 8.0, 129)
    found = gated.act_fn(numbers)
    return next((gate for gate, known in GATES.items() if torch.allclose(found, known(numbers), atol=1e-6)), None)


def _norms(layer: nn.Module) -> list[Any]:
    """The norms of a layer that has `_norm_names`, None where it has none."""
    names = _norm_names(layer)
    assert names is not None
    return [None if name is None else layer.get_submodule(name) for name in names]


def _linears(layer: nn.Module) -> list[Any]:
    names = [f"self_attn.{name}" for name in _ATTENTION] + [f"mlp.{name}" for name in _GATED]
    return [layer.get_submodule(name) for name in names]


def _is_quantised(linear: Any) -> bool:
    """Whether a module is a `QuantisedLinear` that is packed."""
    return getattr(linear, "numbers", None) is not None


def _kept(layer: nn.Module, shape: LayerShape, constants: tuple[float, ...]) -> FusedLayer:
    parents, linears = (layer, layer.get_submodule("self_attn"), layer.get_submodule("mlp")), _linears(layer)
    watched = Watched(parents, [child for parent in parents for child in parent.children()])
    norms = [None if norm is None else (norm.weight.detach(), epsilon_of(norm)) for norm in _norms(layer)]
    tensors, attention = [norm[0] for norm in norms if norm is not None], cast(Any, parents[1])
    weights: list[Any]
    biases: list[Tensor | None]
    quantised = 0
    if _is_quantised(linears[0]):
        weights, biases, few_rows = [linear.numbers for linear in linears], [None] * len(linears), MOST_QUANTISED_ROWS
        quantised = 2 if linears[0].accurate else 1
    else:
        weights = [linear.weight.detach() for linear in linears]
        biases = [None if linear.bias is None else linear.bias.detach().float() for linear in linears]
        few_rows = min(linear.few_rows for linear in linears)
    dtype = tensors[0].dtype
    job = job_of(shape, dtype, constants, weights, biases, norms, quantised)
    return FusedLayer(
        job, shape, dtype, [*weights, *biases, *tensors], watched, few_rows, attention.layer_idx, quantised
    )


def _forward(original: Any, layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = None if args else _run(layer, hidden_states, **kwargs)
    if found is not None:
        return found
    forward = running_forward()
    if forward is not None and forward.by_rows:
        raise UnsupportedError(
            f"bitwise=True: layer {layer.fused.layer_idx} was changed, moved or hooked since the engine was made, and "
            "would round differently; undo that, or load the model again"
        )
    return original.forward(layer, hidden_states, *args, **kwargs)


def _run(
    layer: Any,
    hidden: Tensor,
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **others: Any,
) -> Tensor | None:
    """The layer's output; None if its own modules must compute it."""
    fused: FusedLayer = layer.fused
    forward, rows = running_forward(), hidden.shape[1]
    if forward is None or past_key_values is not forward.cache or not isinstance(attention_mask, RowMasks):
        return None
    if rows > fused.few_rows or torch.is_grad_enabled() or layer.training or position_embeddings is None:
        return None
    if not (fused.takes(hidden, position_embeddings) and fused.watched.untouched()):
        return None
    row_layers = row_layers_of(attention_mask, fused.shape, hidden.dtype, quantised=fused.quantised)
    if row_layers is None or row_layers.rows != rows:
        return None
    room = attention_mask.forward.room_in_layer(fused.layer_idx)
    return row_layers.layer(fused.job, hidden, position_embeddings, room)


def _random_rows(layer: nn.Module, shape: LayerShape) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Inputs `[1, rows, hidden]` and rotary cosines and sines `[1, rows, dim]`, in the layer's dtype."""
    dtype = next(norm.weight.dtype for norm in _norms(layer) if norm is not None)
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(1, CHECKED_ROWS, shape.hidden, generator=generator) / 64).to(dtype)  # the sum dominates
    angles = 6.0 * torch.rand(1, CHECKED_ROWS, shape.dim // 2, generator=generator).repeat(1, 1, 2)
    return hidden, (angles.cos().to(dtype), angles.sin().to(dtype))


def _output_and_terms(layer: nn.Module, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Terms | None]:
    """The layer's own output, and the terms with which it calls attention; None if it does not call ours."""
    attention: Any = layer.get_submodule("self_attn")
    chosen, observer = attention.config._attn_implementation, TermsObserver()
    attention.config._attn_implementation = NAME
    try:
        positions = torch.arange(CHECKED_ROWS)[None]
        output = layer(hidden, attention_mask=observer, position_ids=positions, position_embeddings=turns)
    finally:
        attention.config._attn_implementation = chosen
    return output, observer.terms


def _agrees(fused: FusedLayer, hidden: Tensor, turns: tuple[Tensor, Tensor], expected: Tensor) -> bool:
    """Whether `row_layer` adds to these rows what the layer does, up to rounding."""
    shape, dtype = fused.shape, hidden.dtype
    kv = torch.empty(2, 1, shape.kv_heads, CHECKED_ROWS, shape.dim, dtype=dtype)
    sight = Sight(np.tri(CHECKED_ROWS, dtype=np.bool_), CHECKED_ROWS)
    rows = RowLayers(shape, dtype, [Part(CHECKED_ROWS, 0, sight)], quantised=fused.quantised)
    found = rows.layer(fused.job, hidden, turns, [(kv[0], kv[1])])
    added = (expected.double() - hidden.double()).norm()
    tolerance = TOLERANCE_OF_QUANTISED if fused.quantised else TOLERANCE[dtype]
    return bool((found.double() - expected.double()).norm() <= tolerance * added)
