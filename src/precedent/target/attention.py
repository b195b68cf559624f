"""Attention over a committed prefix and a candidate tree, behind transformers' attention interface.

`precedent` differs from transformers' `sdpa` in one thing: with grouped key/value heads and a mask, `sdpa` copies keys
and values once per group; here the query heads of a group become extra query rows, which reads the KV cache in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from precedent.tree import CandidateTree

NAME = "precedent"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, `query [batch, heads, rows, dim]`, `key/value [batch, kv_heads, keys, dim]`.

    Returns `[batch, rows, heads, dim]` and no weights. With a mask or a single row, groups are folded into rows.
    """
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    causal = attention_mask is None and rows > 1 and is_causal is not False
    if causal:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
    else:
        folded = query.reshape(batch, key.shape[1], groups * rows, -1)
        mask = attention_mask if attention_mask is None or groups == 1 else attention_mask.repeat(1, 1, groups, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        attended = attended.reshape(batch, heads, rows, -1)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_tree_attention(model: PreTrainedModel) -> None:
    """Switch a model from transformers' `sdpa` to `precedent`; `eager` stays, for it takes 4D masks as well."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def tree_mask(
    tree: CandidateTree, prefix_length: int, dtype: torch.dtype | None, device: torch.device
) -> Tensor | None:
    """The mask for the pending token and a tree behind it, `[1, 1, num_nodes + 1, prefix_length + num_nodes + 1]`.

    Every row sees the whole prefix, the pending token, its ancestors and itself. Boolean, or additive in `dtype` for
    attention implementations that add their mask. None when there is nothing to hide (an empty tree).
    """
    rows = len(tree) + 1
    if rows == 1:
        return None
    mask = torch.ones((rows, prefix_length + rows), dtype=torch.bool)
    mask[0, prefix_length + 1 :] = False
    mask[1:, prefix_length + 1 :] = torch.from_numpy(tree.ancestors)
    if dtype is not None:
        additive = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        return additive.to(device)[None, None]
    return mask.to(device)[None, None]


def tree_positions(tree: CandidateTree, prefix_length: int, device: torch.device) -> Tensor:
    """Position ids of the pending token and the nodes, `[1, num_nodes + 1]`: prefix length + depth."""
    depths = torch.zeros(len(tree) + 1, dtype=torch.long)
    depths[1:] = torch.from_numpy(tree.depths)
    return (depths + prefix_length).to(device)[None]
