"""What Precedent's torch target asks for on a CPU: faster modules, attention of few rows, all layers in one call."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from precedent.runtime.patched_modules import is_swapped
from precedent.target.bitwise import MOST_ROWS, refusal
from precedent.target.kv.layer_kinds import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    attention_kinds,
)
from precedent.target.kv.rows import RowMasks
from precedent.target.kv.shape import KVShape
from precedent.target.quantised import QuantisedWeight, is_quantised
from precedent.target.runner import Runner
from precedent.target.support import Backend, ModelSupport, Reader, TargetOptions
from precedent_cpu.all_layers import all_layers
from precedent_cpu.fused_layer import FusedLayer, fuse_layers
from precedent_cpu.linear import PackedLinear, pack_linears
from precedent_cpu.norm import fuse_norms
from precedent_cpu.row_attention import fits
from precedent_cpu.row_layer import row_attention, sight_of


class CpuSupport(ModelSupport):
    """Kernels for models whose weights are on a CPU, in bfloat16, float32 or quantised; others stay as they are."""

    def prepare(self, model: PreTrainedModel, *, bitwise: bool) -> None:
        """Replace linear layers, norms and decoder layers where they fit."""
        pack_linears(model, copies=not bitwise)
        if is_quantised(model):
            from precedent_cpu.quantised_linear import pack_quantised  # here, and below: most models are not

            pack_quantised(model)
        fuse_norms(model)
        fuse_layers(model)

    def quantised_kinds(self) -> Set[str]:
        """All types for which there are kernels."""
        from precedent_cpu.codes import FORMATS

        return FORMATS.keys()

    def quantised_layer(self, module: nn.Module, weights: Sequence[QuantisedWeight]) -> nn.Module | None:
        """What multiplies with the codes of such weights, once `prepare` has laid them out."""
        from precedent_cpu.quantised_linear import layer_over

        return layer_over(module, weights)

    def quantised_reader(self, folder: Path, config: PreTrainedConfig, quantization: str | None) -> Reader | None:
        """What reads the codes of GPTQ, AWQ, compressed-tensors and torchao, or makes codes of ordinary numbers."""
        from precedent_cpu.quantised_checkpoint import reader_of

        return reader_of(folder, config, quantization)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, masks: RowMasks, index: int, scaling: float | None
    ) -> Tensor | None:
        """Attention that rounds a row identically in a tree and alone; None where these inputs do not allow it."""
        sight = sight_of(masks, index) if query.is_cpu and fits(query, key, value) else None
        return None if sight is None else row_attention(query, key, value, sight, scaling)

    def bitwise(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Collection[int] | None:
        """Let the kernels for few rows do all the work. Raises UnsupportedError for a model that also needs others.

        Layers over quantised weights use no other kernels anyway, so there it only limits a forward to `MOST_ROWS`.
        """
        if options.cuda_graphs or runner.device.type != "cpu":
            return None
        widen(runner.model)
        check_fit(runner.model, packed=runner.packed)
        return ()

    def backend(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Backend | None:
        """All layers in one call, for models that consist of nothing else; not where forwards have a fixed size."""
        return None if options.cuda_graphs else all_layers(runner, kv_shape)


SUPPORT = CpuSupport()


def widen(model: PreTrainedModel) -> None:
    """Let the kernels for few rows do all the work up to `MOST_ROWS` rows, even where others would be faster."""
    for module in model.modules():
        if isinstance(module, PackedLinear) and module.few_rows:
            module.few_rows = max(module.few_rows, MOST_ROWS)
        fused: FusedLayer | None = getattr(module, "fused", None)
        if fused is not None:
            layer: Any = module
            layer.fused = fused._replace(few_rows=max(fused.few_rows, MOST_ROWS))


def check_fit(model: PreTrainedModel, *, packed: bool) -> None:
    """Raise UnsupportedError for a model that needs more than the kernels for few rows, and say which part does.

    `packed` says that the model uses our attention; a layer with its own attention cannot be fused.
    """
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    fused = sum(is_swapped(module) and hasattr(module, "fused") for module in model.modules())
    others = sorted(attention_kinds(config) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if others:
        raise refusal(model, f"it has {', '.join(others)} layers, which have no row-wise kernels")
    if not packed:
        raise refusal(model, f"it does not use our attention ({config._attn_implementation})")
    if fused < layers:
        where = f"on {model.device.type} in {str(model.dtype).removeprefix('torch.')}"
        raise refusal(model, f"{layers - fused} of its {layers} layers have no row-wise kernels {where}")
    for name, module in model.named_modules():
        weights = next(module.parameters(recurse=False), None) is not None or hasattr(module, "quantised")
        if weights and not _by_rows(module):
            raise refusal(model, f"{name} ({type(module).__name__}) has no row-wise kernels")


def _by_rows(module: nn.Module) -> bool:
    """Whether a module with weights of its own computes row by row, or only looks rows up."""
    if isinstance(module, PackedLinear):
        return module.few_rows >= MOST_ROWS
    if hasattr(module, "quantised"):
        return getattr(module, "packed", None) is not None
    return isinstance(module, nn.Embedding) or is_swapped(module)
