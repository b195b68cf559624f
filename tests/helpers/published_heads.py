"""Tiny random EAGLE-3 heads as their makers publish them: names of tensors, fields of configs; and the formula.

Sizes are scaled down; everything else is what SafeAILab, SpecForge and `speculators` write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from precedent.target import TargetModel
from precedent_drafts.eagle import eagle_beside, load_eagle
from precedent_drafts.head import HeadModel
from precedent_drafts.published import published_draft
from precedent_testing.tiny_models import tiny_causal_lm

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 48, 40, 4, 2, 12, 259

COVERED = tuple(range(0, 250, 2))
"""The target's tokens that a head of a reduced vocabulary covers."""

SAFEAILAB: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": INNER, "max_position_embeddings": 64,
    "model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "use_cache": True, "vocab_size": VOCAB, "draft_vocab_size": len(COVERED),
}  # fmt: skip
"""The config beside SafeAILab's training code, and of its heads."""

SPECFORGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "draft_vocab_size": len(COVERED),
    "eos_token_id": 151645, "head_dim": DIM, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
    "intermediate_size": INNER, "max_position_embeddings": 64, "model_type": "llama", "num_attention_heads": HEADS,
    "num_hidden_layers": 1, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "vocab_size": VOCAB,
}  # fmt: skip
"""SpecForge's configs/qwen3-235B-A22B-eagle3.json."""

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"], "draft_vocab_size": len(COVERED), "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "embed_requires_grad": False, "fc_norm": False,
    "norm_before_fc": False, "norm_before_residual": True, "norm_output": False,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/a-llama"},
    },
    "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "target_hidden_size": None,
    "transformer_layer_config": {
        "attention_bias": False, "head_dim": DIM, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "max_position_embeddings": 64, "model_type": "llama", "num_attention_heads": HEADS, "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "vocab_size": VOCAB,
    },
    "transformers_version": "5.19.0",
}  # fmt: skip
"""What `speculators` writes; tests/speculators compares it with the library itself."""

FORMS = {"SafeAILab": SAFEAILAB, "SpecForge": SPECFORGE, "speculators": SPECULATORS}

Weights = dict[str, Tensor]


class Randoms:
    """Random tensors of a seed, opinionated enough for tests."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator, dtype=torch.float64) * size[-1] ** -0.5

    def norm(self, size: int = HIDDEN) -> Tensor:
        return 1.0 + 0.3 * self(size) * size**0.5

    def products(self, layer: str, dim: int, width: int, hidden: int = HIDDEN) -> Weights:
        """The projections of attention, which reads rows of `width` numbers."""
        return {
            f"{layer}self_attn.{name}_proj.weight": self(*size)
            for name, *size in (
                ("q", HEADS * dim, width),
                ("k", KV_HEADS * dim, width),
                ("v", KV_HEADS * dim, width),
                ("o", hidden, HEADS * dim),
            )
        }

    def gated(self, layer: str, hidden: int = HIDDEN) -> Weights:
        """The three products of the part behind attention."""
        sizes = (("gate", INNER, hidden), ("up", INNER, hidden), ("down", hidden, INNER))
        return {f"{layer}mlp.{name}_proj.weight": self(*size) for name, *size in sizes}


def renumbering(covered: Sequence[int], vocab: int = VOCAB) -> Weights:
    """How a head of fewer tokens names those of its target."""
    marked = torch.zeros(vocab, dtype=torch.bool)
    marked[list(covered)] = True
    return {"d2t": torch.tensor(list(covered)) - torch.arange(len(covered)), "t2d": marked}


def random_weights(config: dict[str, Any], covered: Sequence[int] = COVERED, seed: int = 0) -> Weights:
    """A head's tensors under the names that its makers publish."""
    inside = config.get("transformer_layer_config") or config
    first, hidden = ("layers.0." if inside is not config else "midlayer."), inside["hidden_size"]
    random, weights = Randoms(seed), Weights()
    for number in range(inside["num_hidden_layers"]):
        layer = first if number == 0 else f"layers.{number}."
        weights |= random.products(layer, DIM, hidden * (2 if number == 0 else 1), hidden) | random.gated(layer, hidden)
        for name in ("input_layernorm", "post_attention_layernorm", *["hidden_norm"] * (number == 0)):
            weights[f"{layer}{name}.weight"] = random.norm(hidden)
        if inside.get("model_type") == "qwen3":
            weights |= {f"{layer}self_attn.{name}_norm.weight": random.norm(DIM) for name in ("q", "k")}
    read = (config.get("target_hidden_size") or hidden) * 3
    weights |= {
        "fc.weight": random(hidden, read),
        "norm.weight": random.norm(hidden),
        "lm_head.weight": 3 * random(len(covered), hidden),
    }
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = random.norm(read)
    if config.get("fc_norm"):
        weights |= {f"fc_norm.{number}.weight": random.norm(read // 3) for number in range(3)}
    return weights | renumbering(covered, inside["vocab_size"])


def write_head(folder: Path, config: dict[str, Any], weights: Weights, *, older: bool = False) -> Path:
    """A folder with a config and tensors, in `pytorch_model.bin` where `older`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if older:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        whole = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Formula:
    """A draft written out over whole texts, without any cache; `dim` is the width of its heads."""

    dim = DIM

    def __init__(self, config: dict[str, Any], weights: Weights, target: PreTrainedModel, reads: Sequence[int]) -> None:
        self._config, self._weights, self._target, self._reads = config, weights, target, tuple(reads)
        self._inside = config.get("transformer_layer_config") or config

    @torch.inference_mode()
    def states(self, ids: Sequence[int]) -> Tensor:
        """What the draft reads of a text: the outputs of layers side by side, from transformers itself."""
        output = self._target(input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        return torch.cat([output.hidden_states[number][0] for number in self._reads], -1)

    def attended(self, name: str, read: Tensor, keys: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """What rows `read` take from `keys`, whose last ones they are."""
        heads = {}
        for part, rows in (("q", read), ("k", keys), ("v", keys)):
            heads[part] = (
                self._product(rows, f"{name}self_attn.{part}_proj").view(len(rows), -1, self.dim).transpose(0, 1)
            )
            if f"{name}self_attn.{part}_norm.weight" in self._weights:
                heads[part] = self.normed(heads[part], f"{name}self_attn.{part}_norm")
            if part != "v":
                heads[part] = self._turned(heads[part], len(keys) - len(rows))
        wide = [heads[part].repeat_interleave(HEADS // KV_HEADS, 0) for part in ("k", "v")]
        seen = scaled_dot_product_attention(heads["q"], *wide, attn_mask=mask, is_causal=causal)
        return self._product(seen.transpose(0, 1).flatten(1), f"{name}self_attn.o_proj")

    def gated(self, name: str, hidden: Tensor) -> Tensor:
        """The part of a layer behind attention, added."""
        inner = self.normed(hidden, f"{name}post_attention_layernorm")
        gate, up = (self._product(inner, f"{name}mlp.{part}_proj") for part in ("gate", "up"))
        return hidden + self._product(silu(gate) * up, f"{name}mlp.down_proj")

    def normed(self, rows: Tensor, name: str) -> Tensor:
        epsilon = self._inside.get("rms_norm_eps", 1e-6)
        return rows * (rows.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * self._weights[f"{name}.weight"]

    def _product(self, rows: Tensor, name: str) -> Tensor:
        return rows @ self._weights[f"{name}.weight"].T

    def _turned(self, rows: Tensor, first: int) -> Tensor:
        theta = (self._inside.get("rope_parameters") or self._inside).get("rope_theta", 10000.0)
        places = torch.arange(first, first + rows.shape[1])[:, None]
        angles = places / theta ** (torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = (part.repeat(1, 2).double() for part in (angles.cos(), angles.sin()))
        left, right = rows.chunk(2, -1)
        return rows * cos + torch.cat([-right, left], -1) * sin


class EagleFormula(Formula):
    """A head written out (2503.01840, section 3.1).

    `step(states, ids)` gives the logits over the target's vocabulary and what is fed back, for every position.
    """

    def fused(self, states: Tensor) -> Tensor:
        if "input_norm.weight" in self._weights:
            states = self.normed(states, "input_norm")
        if "fc_norm.0.weight" in self._weights:
            parts = states.chunk(3, -1)
            states = torch.cat([self.normed(part, f"fc_norm.{n}") for n, part in enumerate(parts)], -1)
        return self._product(states, "fc")

    @torch.inference_mode()
    def step(self, fused: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits `[tokens, vocab_size]` and what a next draw reads, for `ids[i]` beside `fused[i]`."""
        table: Any = self._weights.get("embed_tokens.weight", self._target.get_input_embeddings().weight)  # type: ignore[union-attr]
        embedded, hidden = table[torch.tensor(list(ids))].detach(), fused
        for number in range(self._inside["num_hidden_layers"]):
            hidden = self._layer(number, embedded, hidden)
        normed = self.normed(hidden, "norm")
        kept = self._product(normed, "lm_head")
        logits = kept.new_full((len(kept), self._inside["vocab_size"]), -torch.inf)
        logits[:, torch.arange(kept.shape[1]) + self._weights.get("d2t", 0)] = kept
        return logits, normed if self._config.get("norm_output") else hidden

    def draws(self, ids: list[int], count: int) -> list[int]:
        """The most probable tokens, one after the other, as a head with this text drafts them."""
        fused, after, drawn = self.fused(self.states(ids)[:-1]), ids[1:], list[int]()
        for _ in range(count):
            logits, output = self.step(fused, after)
            drawn.append(int(logits[-1].argmax()))
            fused, after = torch.cat([fused, output[-1:]]), [*after, drawn[-1]]
        return drawn

    def _layer(self, number: int, embedded: Tensor, hidden: Tensor) -> Tensor:
        first = "midlayer." if "midlayer.hidden_norm.weight" in self._weights else "layers.0."
        name = first if number == 0 else f"layers.{number}."
        residual, read = hidden, self.normed(hidden, f"{name}input_layernorm") if number else hidden
        if number == 0:
            states = self.normed(hidden, f"{name}hidden_norm")
            residual = states if self._config.get("norm_before_residual") else hidden
            read = torch.cat([self.normed(embedded, f"{name}input_layernorm"), states], -1)
        return self.gated(name, residual + self.attended(name, read, read, None, causal=True))


def small_target(model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    """A target with as many layers as the usual ones that heads read need."""
    return tiny_causal_lm(model_type, **{"scale": 1.5, "num_hidden_layers": 7, **settings})


def eagle_pair(folder: Path, **settings: Any) -> tuple[TargetModel, HeadModel]:
    """A target and the head in a folder, ready to draft."""
    target = TargetModel(small_target(**settings))
    draft = published_draft(folder)
    assert draft is not None
    return target, eagle_beside(load_eagle(draft, target.model), target)
