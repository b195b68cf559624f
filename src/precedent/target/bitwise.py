"""Logits that do not depend on what is computed beside them, to the last bit: what it takes, and a proof at load.

A greedy text in bfloat16 hangs on rounding, and rounding on the order of sums. The kernels of few rows (`row_products`,
`cpu_norm`, `row_attention`, `row_layer`, `row_forward`) compute a row alike whether it stands alone, in a candidate
tree, in a piece of a prompt or beside other requests. So a model that goes through nothing else, never more than
`MOST_ROWS` rows at a time, stores and says the same bits whatever was drafted, reused or answered at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precedent.errors import UnsupportedError
from precedent.target.cpu_layer import FusedLayer
from precedent.target.cpu_linear import FEW_ROWS, PackedLinear
from precedent.target.support import FULL_ATTENTION, attention_kinds
from precedent.target.swapped import is_swapped
from precedent.tree import EMPTY_TREE, ROOT, TreeBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precedent.target.model import Slot, TargetModel

MOST_ROWS = FEW_ROWS
"""Rows of one forward, prompts included: the most that the kernels of few rows take."""

_TRIED = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8)
"""Token ids of the proof, brought into the vocabulary: a prompt, then the path of a tree."""

_PATH = 3


def widen(model: PreTrainedModel) -> None:
    """Let the kernels of few rows do all the work up to `MOST_ROWS`, also where others would be faster."""
    for module in model.modules():
        if isinstance(module, PackedLinear) and module.few_rows:
            module.few_rows = max(module.few_rows, MOST_ROWS)
        fused: FusedLayer | None = getattr(module, "fused", None)
        if fused is not None:
            layer: Any = module
            layer.fused = fused._replace(few_rows=max(fused.few_rows, MOST_ROWS))


def check_fit(model: PreTrainedModel, *, packed: bool) -> None:
    """Raise UnsupportedError for a model that goes through other arithmetic than that of few rows, and say where.

    `packed` says that its attention is ours; with attention of its own no layer runs in one piece.
    """
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    fused = sum(is_swapped(module) and hasattr(module, "fused") for module in model.modules())
    others = sorted(attention_kinds(config) - {FULL_ATTENTION})
    if others:
        raise _refusal(model, f"it has {', '.join(others)} layers, and a window changes how a row is summed")
    if not packed:
        raise _refusal(model, f"its attention is not ours ({config._attn_implementation})")
    if fused < layers:
        where = f"on {model.device.type} in {str(model.dtype).removeprefix('torch.')}"
        raise _refusal(model, f"{layers - fused} of its {layers} layers have no arithmetic by rows {where}")
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None and not _by_rows(module):
            raise _refusal(model, f"{name} ({type(module).__name__}) has no arithmetic by rows")


def prove(target: TargetModel) -> None:
    """Score a tree beside another request and decode its path plainly, prompts computed in three ways: equal bits.

    Raises UnsupportedError where they are not.
    """
    tokens = [token % target.vocab_size for token in _TRIED]
    prompt, path = tokens[:-_PATH], tokens[-_PATH:]
    whole, pieces, decoded = (target.new_slot() for _ in range(3))
    target.prefill(whole, prompt)
    target.prefill(pieces, prompt[:5])
    target.prefill(pieces, prompt)
    target.prefill(decoded, prompt[:1])
    _decode(target, decoded, prompt[1:])
    builder, node = TreeBuilder(), ROOT
    for token in path:
        builder.add_point(node, (token + 1) % target.vocab_size, "proof")
        node = builder.add_point(node, token, "proof")
    tree = builder.build()
    scored, plain = target.score([(whole, tree), (pieces, tree)]), _decode(target, decoded, path)
    if not all(torch.equal(rows[::2], plain) for rows in scored):
        raise _refusal(target.model, "a scored tree and plain decoding round otherwise on this machine")


def _decode(target: TargetModel, slot: Slot, path: list[int]) -> Tensor:
    """Logits of plain decoding along `path`, `[1 + len(path), vocab_size]`; its last token is pending afterwards."""
    rows = []
    for token in path:
        rows.append(target.plain_step(slot))
        target.commit(slot, EMPTY_TREE, (), token)
    rows.append(target.plain_step(slot))
    target.discard(slot)
    return torch.cat(rows)


def _by_rows(module: nn.Module) -> bool:
    """Whether a module with weights of its own computes by rows, or only looks them up."""
    if isinstance(module, PackedLinear):
        return module.few_rows >= MOST_ROWS
    return isinstance(module, nn.Embedding) or is_swapped(module)


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"bitwise=True is not to be had with this {model.config.model_type}: {reason}. It takes a CPU, bfloat16 or "
        "float32, and layers made as Llama's are (Llama, Mistral, Qwen 2 and 3, SmolLM); without it, float32 leaves "
        "only differences of rounding far below any likelihood that matters"
    )
