"""Tiny random DFlash drafts as their makers publish them: names of tensors, fields of configs; and the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from helpers.published_heads import COVERED, Weights

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, MASK = 48, 40, 4, 2, 16, 259, 258

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
    generator = torch.Generator().manual_seed(seed)
    inside = config.get("transformer_layer_config") or config

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64) * size[-1] ** -0.5

    def norm(size: int = HIDDEN) -> Tensor:
        return 1.0 + 0.3 * random(size) * size**0.5

    weights: Weights = {"fc.weight": random(HIDDEN, 2 * HIDDEN), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for number in range(inside["num_hidden_layers"]):
        layer = f"layers.{number}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{layer}self_attn.{name}_proj.weight"] = random(rows * DIM, HIDDEN)
        weights[f"{layer}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * DIM)
        for name in ("q", "k"):
            weights[f"{layer}self_attn.{name}_norm.weight"] = norm(DIM)
        for name in ("gate", "up"):
            weights[f"{layer}mlp.{name}_proj.weight"] = random(INNER, HIDDEN)
        weights[f"{layer}mlp.down_proj.weight"] = random(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = norm()
    if covered is None:
        return weights
    marked = torch.zeros(VOCAB, dtype=torch.bool)
    marked[list(covered)] = True
    offsets = torch.tensor(list(covered)) - torch.arange(len(covered))
    return weights | {"lm_head.weight": 3 * random(len(covered), HIDDEN), "d2t": offsets, "t2d": marked}


class BlockFormula:
    """A draft written out (2602.06036, section 3): the rows of a block see each other and the fused states before."""

    def __init__(self, config: dict[str, Any], weights: Weights, target: PreTrainedModel, reads: Sequence[int]) -> None:
        self._config, self._weights, self._target, self._reads = config, weights, target, tuple(reads)
        self._inside = config.get("transformer_layer_config") or config

    @torch.inference_mode()
    def block(self, text: Sequence[int]) -> Tensor:
        """Logits of the positions behind a text, over the rows of the head, `[block_size - 1, num_head_tokens]`."""
        output = self._target(input_ids=torch.tensor([list(text)]), output_hidden_states=True, use_cache=False)
        states = torch.cat([output.hidden_states[number][0, :-1] for number in self._reads], -1)
        fused = self._normed(states @ self._weights["fc.weight"].T, "hidden_norm")
        table: Any = self._target.get_input_embeddings()
        size = self._config["block_size"]
        hidden = table.weight[torch.tensor([text[-1], *[MASK] * (size - 1)])]
        for number in range(self._inside["num_hidden_layers"]):
            kinds = self._inside.get("layer_types") or ["full_attention"] * (number + 1)
            hidden = self._layer(f"layers.{number}.", hidden, fused, self._seen(kinds[number], len(fused)))
        head: Any = self._target.get_output_embeddings()
        rows = self._weights.get("lm_head.weight", head.weight)
        return self._normed(hidden, "norm")[1:] @ rows.T

    def _seen(self, kind: str, length: int) -> Tensor | None:
        """Which keys the rows of a block see: all, or in a window those before them that are near."""
        if kind == "full_attention":
            return None
        places = torch.arange(length + self._config["block_size"])
        distance = places[length:, None] - places
        return (distance >= 0) & (distance < self._inside["sliding_window"])

    def _layer(self, name: str, hidden: Tensor, fused: Tensor, mask: Tensor | None) -> Tensor:
        read = self._normed(hidden, f"{name}input_layernorm")
        both = torch.cat([fused, read])
        heads = {
            part: (rows @ self._weights[f"{name}self_attn.{part}_proj.weight"].T)
            .view(len(rows), -1, DIM)
            .transpose(0, 1)
            for part, rows in (("q", read), ("k", both), ("v", both))
        }
        for part in ("q", "k"):
            normed = self._normed(heads[part], f"{name}self_attn.{part}_norm")
            heads[part] = self._turned(normed, len(both) - normed.shape[1])
        wide = [heads[part].repeat_interleave(HEADS // KV_HEADS, 0) for part in ("k", "v")]
        seen = scaled_dot_product_attention(heads["q"], *wide, attn_mask=mask).transpose(0, 1).flatten(1)
        hidden = hidden + seen @ self._weights[f"{name}self_attn.o_proj.weight"].T
        inner = self._normed(hidden, f"{name}post_attention_layernorm")
        gate, up, down = (self._weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return hidden + (silu(inner @ gate.T) * (inner @ up.T)) @ down.T

    def _turned(self, rows: Tensor, first: int) -> Tensor:
        theta = (self._inside.get("rope_parameters") or self._inside)["rope_theta"]
        angles = torch.arange(first, first + rows.shape[1])[:, None] / theta ** (torch.arange(0, DIM, 2) / DIM)
        cos, sin = (part.repeat(1, 2).double() for part in (angles.cos(), angles.sin()))
        left, right = rows.chunk(2, -1)
        return rows * cos + torch.cat([-right, left], -1) * sin

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        return rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self._weights[f"{name}.weight"]
