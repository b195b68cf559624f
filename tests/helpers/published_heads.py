"""Tiny random EAGLE-3 heads and DFlash drafts as their makers publish them, and their formulas written out.

Sizes are scaled down; everything else is what SafeAILab, SpecForge, z-lab and `speculators` write.
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
from precedent_drafts.heads import HeadModel
from precedent_drafts.published import published_draft
from precedent_testing.tiny_models import tiny_causal_lm

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK_DIM, VOCAB, MASK = 48, 40, 4, 2, 12, 16, 259, 258

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


def _of_speculators(kind: str, tokens: int, layers: dict[str, Any], **own: Any) -> dict[str, Any]:
    """What `speculators` writes; tests/speculators reads what the library itself writes."""
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
    return {
        "draft_vocab_size": len(COVERED), "dtype": "float32",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/a-llama"},
        },
        "speculators_model_type": kind, "speculators_version": "0.9.0", "target_hidden_size": None,
        "transformer_layer_config": {
            "attention_bias": False, "hidden_size": HIDDEN, "intermediate_size": INNER, "max_position_embeddings": 64,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, **layers,
        },
        "transformers_version": "5.19.0", **own,
    }  # fmt: skip


SPECULATORS = _of_speculators(
    "eagle3", 3, {"head_dim": DIM, "model_type": "llama", "num_hidden_layers": 1}, architectures=["Eagle3DraftModel"],
    eagle_aux_hidden_state_layer_ids=[1, 2, 3], embed_requires_grad=False, fc_norm=False, norm_before_fc=False,
    norm_before_residual=True, norm_output=False,
)  # fmt: skip

ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 5, "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}, "dtype": "bfloat16", "eos_token_id": 151645,
    "head_dim": BLOCK_DIM, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
    "intermediate_size": INNER, "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 64,
    "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": HEADS, "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS, "num_target_layers": 3, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.57.1",
    "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
"""SpecForge's configs/qwen3-8b-dflash.json, with the settings that z-lab's published configs add."""

DFLASH = _of_speculators(
    "dflash", 4, {"head_dim": BLOCK_DIM, "model_type": "qwen3", "num_hidden_layers": 2},
    architectures=["DFlashDraftModel"], aux_hidden_state_layer_ids=[1, 3], block_size=5, mask_token_id=MASK,
    sample_from_anchor=False, sliding_window_non_causal=False,
)  # fmt: skip

FORMS = {"SafeAILab": SAFEAILAB, "SpecForge": SPECFORGE, "speculators": SPECULATORS}
BLOCK_FORMS = {"z-lab": ZLAB, "speculators": DFLASH}

Weights = dict[str, Tensor]


def with_layers(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A config whose layers have other settings, wherever its format keeps them."""
    name = "transformer_layer_config"
    return config | ({name: config[name] | settings} if name in config else settings)


class _Random:
    """Tensors of a draft, opinionated enough for tests, under the names that its makers publish."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.inside = config.get("transformer_layer_config") or config
        self.hidden, self.weights = int(self.inside["hidden_size"]), Weights()

    def __call__(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator, dtype=torch.float64) * size[-1] ** -0.5

    def norm(self, size: int | None = None) -> Tensor:
        return 1.0 + 0.3 * self(size or self.hidden) * (size or self.hidden) ** 0.5

    def layer(self, name: str, width: int, dim: int, *norms: str) -> None:
        """A decoder layer whose attention reads `width` numbers, with further norms of the hidden size."""
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.weights[f"{name}self_attn.{part}_proj.weight"] = self(rows * dim, width)
        self.weights[f"{name}self_attn.o_proj.weight"] = self(self.hidden, HEADS * dim)
        for part in ("gate", "up"):
            self.weights[f"{name}mlp.{part}_proj.weight"] = self(INNER, self.hidden)
        self.weights[f"{name}mlp.down_proj.weight"] = self(self.hidden, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm", *norms):
            self.weights[f"{name}{norm}.weight"] = self.norm()
        if self.inside.get("model_type") == "qwen3":
            self.weights |= {f"{name}self_attn.{part}_norm.weight": self.norm(dim) for part in ("q", "k")}

    def head(self, covered: Sequence[int]) -> Weights:
        """With a head for some of the target's tokens."""
        marked = torch.zeros(self.inside["vocab_size"], dtype=torch.bool)
        marked[list(covered)] = True
        offsets = torch.tensor(list(covered)) - torch.arange(len(covered))
        return self.weights | {"lm_head.weight": 3 * self(len(covered), self.hidden), "d2t": offsets, "t2d": marked}


def random_weights(config: dict[str, Any], covered: Sequence[int] = COVERED, seed: int = 0) -> Weights:
    """The tensors of an EAGLE head."""
    made = _Random(config, seed)
    first = "midlayer." if made.inside is config else "layers.0."
    made.layer(first, 2 * made.hidden, DIM, "hidden_norm")
    for number in range(1, made.inside["num_hidden_layers"]):
        made.layer(f"layers.{number}.", made.hidden, DIM)
    read = (config.get("target_hidden_size") or made.hidden) * 3
    made.weights |= {"fc.weight": made(made.hidden, read), "norm.weight": made.norm()}
    if config.get("norm_before_fc"):
        made.weights["input_norm.weight"] = made.norm(read)
    if config.get("fc_norm"):
        made.weights |= {f"fc_norm.{number}.weight": made.norm(read // 3) for number in range(3)}
    return made.head(covered)


def block_weights(config: dict[str, Any], covered: Sequence[int] | None = None, seed: int = 0) -> Weights:
    """The tensors of a DFlash draft; with a head of its own for the tokens `covered`."""
    made = _Random(config, seed)
    made.weights = {
        "fc.weight": made(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": made.norm(),
        "norm.weight": made.norm(),
    }
    for number in range(made.inside["num_hidden_layers"]):
        made.layer(f"layers.{number}.", HIDDEN, BLOCK_DIM)
    return made.weights if covered is None else made.head(covered)


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


class _Formula:
    """The parts of a draft's layers written out over whole texts, without any cache."""

    def __init__(self, config: dict[str, Any], weights: Weights, target: PreTrainedModel, reads: Sequence[int]) -> None:
        self._config, self._weights, self._target, self._reads = config, weights, target, tuple(reads)
        self._inside = config.get("transformer_layer_config") or config
        own = weights.get("embed_tokens.weight")
        self._table = target.get_input_embeddings().weight if own is None else own  # type: ignore[union-attr]

    @torch.inference_mode()
    def states(self, ids: Sequence[int]) -> Tensor:
        """What the draft reads of a text: the outputs of layers side by side, from transformers itself."""
        output = self._target(input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        return torch.cat([output.hidden_states[number][0] for number in self._reads], -1)

    def _attended(self, name: str, read: Tensor, behind: Tensor | None, **mask: Any) -> Tensor:
        """Attention of the rows `read` over those `behind` them and themselves."""
        both = read if behind is None else torch.cat([behind, read])
        dim = self._inside.get("head_dim", DIM)
        heads = {
            part: (rows @ self._weights[f"{name}self_attn.{part}_proj.weight"].T)
            .view(len(rows), -1, dim)
            .transpose(0, 1)
            for part, rows in (("q", read), ("k", both), ("v", both))
        }
        for part in ("q", "k"):
            if f"{name}self_attn.{part}_norm.weight" in self._weights:
                heads[part] = self._normed(heads[part], f"{name}self_attn.{part}_norm")
            heads[part] = self._turned(heads[part], len(both) - heads[part].shape[1])
        wide = [heads[part].repeat_interleave(HEADS // KV_HEADS, 0) for part in ("k", "v")]
        seen = scaled_dot_product_attention(heads["q"], *wide, **mask)
        return seen.transpose(0, 1).flatten(1) @ self._weights[f"{name}self_attn.o_proj.weight"].T

    def _mlp(self, name: str, hidden: Tensor) -> Tensor:
        inner = self._normed(hidden, f"{name}post_attention_layernorm")
        gate, up, down = (self._weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return hidden + (silu(inner @ gate.T) * (inner @ up.T)) @ down.T

    def _turned(self, rows: Tensor, first: int) -> Tensor:
        theta, dim = (self._inside.get("rope_parameters") or self._inside).get("rope_theta", 10000.0), rows.shape[-1]
        angles = torch.arange(first, first + rows.shape[1])[:, None] / theta ** (torch.arange(0, dim, 2) / dim)
        cos, sin = (part.repeat(1, 2).double() for part in (angles.cos(), angles.sin()))
        left, right = rows.chunk(2, -1)
        return rows * cos + torch.cat([-right, left], -1) * sin

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        epsilon = self._inside.get("rms_norm_eps", 1e-6)
        return rows * (rows.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * self._weights[f"{name}.weight"]


class EagleFormula(_Formula):
    """An EAGLE head (2503.01840, section 3.1).

    `step(states, ids)` gives the logits over the target's vocabulary and what is fed back, for every position.
    """

    def fused(self, states: Tensor) -> Tensor:
        weights = self._weights
        if "input_norm.weight" in weights:
            states = self._normed(states, "input_norm")
        if "fc_norm.0.weight" in weights:
            parts = states.chunk(3, -1)
            states = torch.cat([self._normed(part, f"fc_norm.{n}") for n, part in enumerate(parts)], -1)
        return states @ weights["fc.weight"].T

    @torch.inference_mode()
    def step(self, fused: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits `[tokens, vocab_size]` and what a next draw reads, for `ids[i]` beside `fused[i]`."""
        embedded, hidden = self._table[torch.tensor(list(ids))].detach(), fused
        for number in range(self._inside["num_hidden_layers"]):
            hidden = self._layer(number, embedded, hidden)
        normed = self._normed(hidden, "norm")
        kept = normed @ self._weights["lm_head.weight"].T
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
        residual, read = hidden, self._normed(hidden, f"{name}input_layernorm") if number else hidden
        if number == 0:
            states = self._normed(hidden, f"{name}hidden_norm")
            residual = states if self._config.get("norm_before_residual") else hidden
            read = torch.cat([self._normed(embedded, f"{name}input_layernorm"), states], -1)
        return self._mlp(name, residual + self._attended(name, read, None, is_causal=True))


class BlockFormula(_Formula):
    """A DFlash draft (2602.06036, section 3): the rows of a block see each other and the fused states before."""

    @torch.inference_mode()
    def block(self, text: Sequence[int]) -> Tensor:
        """Logits of the positions behind a text, over the rows of the head, `[block_size - 1, num_head_tokens]`."""
        fused = self._normed(self.states(text)[:-1] @ self._weights["fc.weight"].T, "hidden_norm")
        size, count = self._config["block_size"], self._inside["num_hidden_layers"]
        hidden = self._table[torch.tensor([text[-1], *[MASK] * (size - 1)])]
        kinds = self._inside.get("layer_types") or ["full_attention"] * count
        for number in range(count):
            name = f"layers.{number}."
            read, mask = self._normed(hidden, f"{name}input_layernorm"), self._seen(kinds[number], len(fused))
            hidden = self._mlp(name, hidden + self._attended(name, read, fused, attn_mask=mask))
        head: Any = self._target.get_output_embeddings()
        return self._normed(hidden, "norm")[1:] @ self._weights.get("lm_head.weight", head.weight).T

    def _seen(self, kind: str, length: int) -> Tensor | None:
        """Which keys the rows of a block see: all, or in a window those before them that are near."""
        if kind == "full_attention":
            return None
        places = torch.arange(length + self._config["block_size"])
        distance = places[length:, None] - places
        return (distance >= 0) & (distance < self._inside["sliding_window"])


def small_target(model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    """A target with as many layers as the usual ones that heads read need."""
    return tiny_causal_lm(model_type, **{"scale": 1.5, "num_hidden_layers": 7, **settings})


def eagle_pair(folder: Path, **settings: Any) -> tuple[TargetModel, HeadModel]:
    """A target and the head in a folder, ready to draft."""
    target = TargetModel(small_target(**settings))
    draft = published_draft(folder)
    assert draft is not None
    return target, eagle_beside(load_eagle(draft, target.model), target)
