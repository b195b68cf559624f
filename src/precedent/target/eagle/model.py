"""An EAGLE-3 head ready to draft: its target keeps the outputs of the layers that it reads."""

from __future__ import annotations

from torch import Tensor

from precedent.target.eagle.head import EagleHead
from precedent.target.head_model import HeadModel
from precedent.target.kv.cache import KVCache
from precedent.target.model import TargetModel


def eagle_beside(head: EagleHead, target: TargetModel) -> HeadModel:
    """A head as a draft model; the target keeps the outputs of layers from now on.

    Raises UnsupportedError, naming why, where they cannot be kept.
    """
    outputs = target.keep_layer_outputs(head.settings.reads)

    def read(kv: KVCache, first: int, end: int) -> Tensor:
        fused: Tensor = head.fusion(outputs.of(kv, first, end))
        return fused

    return HeadModel(head, read, feeds_back_normed=head.settings.norm_output)
