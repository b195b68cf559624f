"""Attention over committed prefixes and candidate trees, behind transformers' attention interface.

`precedent` attention differs from transformers' `sdpa` in three ways. It serves rows of several sequences in one
forward, each with its own keys. With grouped key/value heads and a mask, `sdpa` copies keys and values once per group;
here the query heads of a group become extra query rows, so the KV cache is read in place. And it supports attention
sinks and capped scores, which `sdpa` does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from precedent.errors import UnsupportedError
from precedent.target import support
from precedent.target.kv.rows import ForwardPass, RowMasks, Rule, RunningForward, running_forward

NAME = "precedent"

FOLDED_ROWS = 64
"""Up to this many rows, query heads are folded into rows: keys are read once. Above it the mask would grow too big."""

SCORES_AT_ONCE = 1 << 24
"""Scores `[heads, rows, keys]` that `written_out` holds at a time."""

REFUSED = ("position_bias", "sinks", "indices", "block_indices")
"""Attention terms that some architectures pass and that this module does not compute."""


class Terms(NamedTuple):
    """What some architectures add to plain attention: a scale, a cap on scores, a learned sink per head `[heads]`."""

    scaling: float | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention supports these terms."""
        return self.softcap is None and self.sinks is None


class TermsObserver:
    """Passed as a layer's mask, notes the terms with which the layer calls attention. Each row sees those before it."""

    terms: Terms | None = None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMasks | RunningForward | TermsObserver | Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, `query [batch, heads, rows, dim]`, `key/value [batch, kv_heads, keys, dim]`.

    Returns `[batch, rows, heads, dim]` and no weights. Raises UnsupportedError for unsupported terms.
    """
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{type(module).__name__} attends with {name}, which is not supported")
    terms = Terms(scaling, softcap, s_aux)
    if isinstance(attention_mask, RunningForward):
        if not terms.plain:
            caps = f"{type(module).__name__} caps its scores or has sinks"
            raise UnsupportedError(f"{caps}, which fixed-size forwards do not support")
        return attention_mask.attend(query, key, scaling), None
    if isinstance(attention_mask, RowMasks):
        return _of_each_sequence(query, key, value, attention_mask, terms), None
    if isinstance(attention_mask, TermsObserver):
        attention_mask.terms, attention_mask = terms, None
    if terms.plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, 0.0, scaling, is_causal)
    causal = attention_mask is None and query.shape[2] > 1 and is_causal is not False
    return written_out(query, key, value, attention_mask, causal, terms).transpose(1, 2).contiguous(), None


def _of_each_sequence(query: Tensor, key: Tensor, value: Tensor, masks: RowMasks, terms: Terms) -> Tensor:
    forward, parts = masks.forward, []
    for index, (start, stop) in enumerate(forward.spans):
        part = query if len(forward.spans) == 1 else query[:, :, start:stop]
        by_kernels = _by_kernels(part, key, value, masks, index, terms)
        parts.append(_by_torch(part, key, value, masks, index, terms) if by_kernels is None else by_kernels)
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


def _by_kernels(query: Tensor, key: Tensor, value: Tensor, masks: RowMasks, index: int, terms: Terms) -> Tensor | None:
    """Attention of few rows by the kernels of an installed package; None where none computes it."""
    if not (terms.plain and query.shape[2] <= FOLDED_ROWS):
        return None
    keys, values = masks.forward.keys_and_values(index, key, value, 0)
    packages = support.installed()
    found = (each.attention(query, keys, values, masks, index, terms.scaling) for each in packages)
    return next((attended for attended in found if attended is not None), None)


def _by_torch(query: Tensor, key: Tensor, value: Tensor, masks: RowMasks, index: int, terms: Terms) -> Tensor:
    """One sequence's rows `[1, heads, rows, dim]` over its keys; returns `[1, rows, heads, dim]`."""
    (_, heads, rows, _), kv_heads = query.shape, key.shape[1]
    first, _, causal = masks.visible(index)
    folds = terms.plain and rows <= FOLDED_ROWS
    keys, values = masks.forward.keys_and_values(index, key, value, first)
    mask = masks.additive(index, query, heads // kv_heads if folds else 1)
    mask = None if mask is None else mask[None, None]
    if not terms.plain:
        return written_out(query, keys, values, mask, causal, terms).transpose(1, 2)
    settings: dict[str, Any] = {"attn_mask": mask, "scale": terms.scaling}
    if causal:
        settings |= {"is_causal": True, "enable_gqa": heads > kv_heads}
    elif folds:
        query = query.reshape(1, kv_heads, heads // kv_heads * rows, -1)
    else:
        query = query.reshape(kv_heads, heads // kv_heads, rows, -1)
        keys, values = (each[0, :, None].expand(-1, query.shape[1], -1, -1) for each in (keys, values))
    return scaled_dot_product_attention(query, keys, values, **settings).reshape(1, heads, rows, -1).transpose(1, 2)


def written_out(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, terms: Terms) -> Tensor:
    """Attention with capped scores or sinks, `[batch, heads, rows, dim]`, a bounded number of scores at a time.

    `mask` is additive or boolean, `[batch or 1, heads or 1, rows, keys]`. Scores are at least float32. A sink is an
    extra score per head that takes its share of the softmax and adds no value (gpt-oss).
    """
    rows, num_keys = query.shape[2], keys.shape[2]
    if causal:
        mask = torch.ones((rows, num_keys), dtype=torch.bool, device=query.device).tril()[None, None]
    step = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * num_keys))
    masks = [None if mask is None else mask[:, :, start : start + step] for start in range(0, rows, step)]
    parts = [
        _weighted(part, keys, values, part_mask, terms)
        for part, part_mask in zip(query.split(step, dim=2), masks, strict=True)
    ]
    return torch.cat(parts, dim=2)


def _weighted(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, terms: Terms) -> Tensor:
    batch, heads, rows, dim = query.shape
    precision = torch.promote_types(query.dtype, torch.float32)
    folded = query.reshape(batch, keys.shape[1], -1, dim)
    scores = (folded @ keys.transpose(2, 3)).reshape(batch, heads, rows, -1).to(precision)
    scores = scores * (dim**-0.5 if terms.scaling is None else terms.scaling)
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if terms.sinks is not None:
        sinks = terms.sinks.to(precision).reshape(1, heads, 1, 1).expand(batch, heads, rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype)
    return (weights.reshape(batch, keys.shape[1], -1, keys.shape[2]) @ values).reshape(batch, heads, rows, -1)


def row_masks(
    *,
    mask_function: Rule,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device,
    **kwargs: Any,
) -> RowMasks | RunningForward | Tensor | None:
    """The mask of one kind of layer, as transformers asks for it: ours in our own forwards, `sdpa`'s otherwise."""
    forward = running_forward()
    if forward is None:
        return sdpa_mask(mask_function=mask_function, local_size=local_size, use_vmap=use_vmap, device=device, **kwargs)
    if use_vmap:
        raise UnsupportedError("the model combines causal attention with a mask of its own, which a tree cannot follow")
    if isinstance(forward, ForwardPass):
        return RowMasks(forward, mask_function, local_size, device)
    forward.check_rule(mask_function)
    return forward


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, row_masks)
