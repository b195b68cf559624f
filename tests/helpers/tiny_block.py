"""A tiny target with a random block draft, whose weights make it opinionated enough for tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from precedent.target import TargetModel
from precedent_drafts.block_draft import BlockDraft, BlockSettings, new_block_draft
from precedent_drafts.block_drafter import BlockModel
from precedent_drafts.fingerprints import embeddings_fingerprint, layers_fingerprint, name_of
from precedent_testing.tiny_models import tiny_causal_lm


def settings_for(target: PreTrainedModel, num_head_tokens: int, **changes: Any) -> BlockSettings:
    """A block of four positions over two of the target's layers, or over none if they say `condition="none"`."""
    given: dict[str, Any] = {
        "reads": () if changes.get("condition") == "none" else (1, 3), "intermediate_size": 64,
        "num_heads": 4, "num_kv_heads": 2,
        "head_dim": target.config.hidden_size // 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "num_layers": 2,
        "block_size": 4, "context_tokens": 24, "markov_rank": 6,
    }  # fmt: skip
    given = {"hidden_size": target.config.hidden_size} | given
    return BlockSettings(
        target=name_of(target), embeddings=embeddings_fingerprint(target), layers=layers_fingerprint(target),
        num_head_tokens=num_head_tokens, **(given | changes),
    )  # fmt: skip


def tiny_block_draft(
    target: PreTrainedModel, token_ids: Sequence[int] | None = None, seed: int = 0, **changes: Any
) -> BlockDraft:
    """A random draft with strong opinions, its Markov term included."""
    ids = torch.tensor(range(target.config.vocab_size) if token_ids is None else token_ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = new_block_draft(target, settings_for(target, ids.numel(), **changes), ids, target.dtype)
        with torch.no_grad():
            for name, weight in draft.own_weights().items():
                if "norm" not in name:
                    weight.copy_(torch.randn(weight.shape) * (1.0 if "markov" in name or "confidence" in name else 0.3))
    return draft.requires_grad_(False)


@cache
def tiny_pair(vocab_size: int = 259, **changes: Any) -> tuple[TargetModel, BlockModel]:
    """A random Llama of three layers in float64 and its block draft."""
    target = TargetModel(tiny_causal_lm(vocab_size=vocab_size, scale=1.5))
    return target, BlockModel(tiny_block_draft(target.model, **changes), target)
