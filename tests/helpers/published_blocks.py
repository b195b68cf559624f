"""Tiny random DFlash drafts as their makers publish them: names of tensors, fields of configs; and the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.published_heads import (
    COVERED,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    VOCAB,
    Formula,
    Randoms,
    Weights,
    renumbering,
)

DIM, MASK = 16, 258

ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 5, "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}, "dtype": "bfloat16", "eos_token_id": 151645,
    "head_dim": DIM, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
    "intermediate_size": INNER, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 64,
    "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": HEADS, "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS, "num_target_layers": 3, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.57.1",
    "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
"""SpecForge's configs/qwen3-8b-dflash.json, with the settings that z-lab's published configs add."""

SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "aux_hidden_state_layer_ids": [1, 3], "block_size": 5,
    "draft_vocab_size": len(COVERED), "dtype": "float32", "mask_token_id": MASK, "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/a-llama"},
    },
    "speculators_model_type": "dflash", "speculators_version": "0.9.0", "target_hidden_size": None,
    "transformer_layer_config": {
        "attention_bias": False, "head_dim": DIM, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "max_position_embeddings": 64, "model_type": "qwen3", "num_attention_heads": HEADS, "num_hidden_layers": 2,
        "num_key_value_heads": KV_HEADS, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "vocab_size": VOCAB,
    },
    "transformers_version": "5.19.0",
}  # fmt: skip
"""What `speculators` writes; tests/speculators compares it with the library itself."""

FORMS = {"z-lab": ZLAB, "speculators": SPECULATORS}


def block_weights(config: dict[str, Any], covered: Sequence[int] | None = None, seed: int = 0) -> Weights:
    """A draft's tensors under the names that its makers publish; with a head of its own for the tokens `covered`."""
    inside, random = config.get("transformer_layer_config") or config, Randoms(seed)
    weights: Weights = {"fc.weight": random(HIDDEN, 2 * HIDDEN)}
    weights |= {"hidden_norm.weight": random.norm(), "norm.weight": random.norm()}
    for number in range(inside["num_hidden_layers"]):
        layer = f"layers.{number}."
        weights |= random.products(layer, DIM, HIDDEN)
        weights |= {f"{layer}self_attn.{name}_norm.weight": random.norm(DIM) for name in ("q", "k")}
        weights |= random.gated(layer)
        weights |= {f"{layer}{name}.weight": random.norm() for name in ("input_layernorm", "post_attention_layernorm")}
    if covered is None:
        return weights
    return weights | {"lm_head.weight": 3 * random(len(covered), HIDDEN)} | renumbering(covered)


class BlockFormula(Formula):
    """A draft written out (2602.06036, section 3): the rows of a block see each other and the fused states before."""

    dim = DIM

    @torch.inference_mode()
    def block(self, text: Sequence[int]) -> Tensor:
        """Logits of the positions behind a text, over the rows of the head, `[block_size - 1, num_head_tokens]`."""
        fused = self.normed(self._product(self.states(text)[:-1], "fc"), "hidden_norm")
        table: Any = self._target.get_input_embeddings()
        hidden = table.weight[torch.tensor([text[-1], *[MASK] * (self._config["block_size"] - 1)])]
        for number in range(self._inside["num_hidden_layers"]):
            kinds = self._inside.get("layer_types") or ["full_attention"] * (number + 1)
            name, mask = f"layers.{number}.", self._seen(kinds[number], len(fused))
            read = self.normed(hidden, f"{name}input_layernorm")
            hidden = self.gated(name, hidden + self.attended(name, read, torch.cat([fused, read]), mask))
        head: Any = self._target.get_output_embeddings()
        rows = self._weights.get("lm_head.weight", head.weight)
        return self.normed(hidden, "norm")[1:] @ rows.T

    def _seen(self, kind: str, length: int) -> Tensor | None:
        """Which keys the rows of a block see: all, or in a window those before them that are near."""
        if kind == "full_attention":
            return None
        places = torch.arange(length + self._config["block_size"])
        distance = places[length:, None] - places
        return (distance >= 0) & (distance < self._inside["sliding_window"])
