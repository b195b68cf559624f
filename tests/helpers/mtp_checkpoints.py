"""Tiny checkpoints that carry an MTP head, under the names that the makers of each family publish."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from helpers.saved_models import saved
from precedent.target.load.loading import load_target
from precedent_testing.sweep import in_float64, tiny_model

LIKE_DEEPSEEK = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
LIKE_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

Weights = dict[str, Tensor]


def checkpoint(folder: Path, model_type: str, *, seed: int = 0) -> Path:
    """A random model of this type with a random head, in one file, as its makers would have written it."""
    model = tiny_model(model_type)
    saved(folder, model)
    add_head(folder, head_weights(model, folder, seed))
    return folder


def loaded(folder: Path) -> PreTrainedModel:
    """The checkpoint's model in float64, which only the plain experts compute in."""
    model, _ = load_target(folder, device="cpu", dtype="float64")
    model.config._experts_implementation = "eager"
    return model


def head_weights(model: PreTrainedModel, folder: Path, seed: int = 0) -> Weights:
    """A head's tensors under published names: a copy of the model's last attention layer, disturbed, and the rest."""
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(seed)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    last = max(index for index, kind in enumerate(kinds) if kind == "full_attention")
    stored = load_file(folder / "model.safetensors")

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64) * size[-1] ** -0.5

    size, prefix, layer = config.hidden_size, f"model.layers.{last}.", layer_prefix(model)
    inside = {name.removeprefix(prefix): weight for name, weight in stored.items() if name.startswith(prefix)}
    weights = {layer + name: weight + 0.1 * random(*weight.shape) for name, weight in inside.items()}
    projection, *norms = around(model)
    weights[projection] = random(size, 2 * size)
    return weights | {name: 0.5 * random(size) * size**0.5 + norm_weight(model) for name in norms}


def layer_prefix(model: PreTrainedModel) -> str:
    if model.config.model_type in LIKE_DEEPSEEK:
        return f"model.layers.{model.config.num_hidden_layers}."
    return "mtp.layers.0."


def around(model: PreTrainedModel) -> list[str]:
    """The projection, the norms of embedding and hidden state, and the norm behind the layer."""
    if model.config.model_type in LIKE_DEEPSEEK:
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        return [f"{layer_prefix(model)}{name}.weight" for name in names]
    return [f"mtp.{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]


def norm_weight(model: PreTrainedModel) -> float:
    """What a norm's weight is around: Qwen's begin at zero and are added to one."""
    return 1.0 if model.config.model_type in LIKE_DEEPSEEK else 0.0


def add_head(folder: Path, weights: Weights, *, shards: bool = False) -> None:
    """Write a head into a checkpoint: into its file, or into a shard of its own with an index."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    whole = {name: weight.contiguous() for name, weight in (stored | weights).items()}
    if not shards:
        save_file(whole, path, metadata={"format": "pt"})
        return
    path.unlink()
    parts = {"model-00001-of-00002.safetensors": stored, "model-00002-of-00002.safetensors": weights}
    for name, part in parts.items():
        save_file({key: weight.contiguous() for key, weight in part.items()}, folder / name, metadata={"format": "pt"})
    places = {key: name for name, part in parts.items() for key in part}
    index: dict[str, Any] = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Reference:
    """A head written out: equations 21 to 23 of 2412.19437 over whole texts, without any cache.

    `hidden(ids)` is what the target's last layer gives, `step(hidden, ids)` the head's logits and its output before
    and after its norm, all for every position. Layers are transformers' own, in an untouched copy of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.plain, self._layer = (in_float64(loaded(folder)) for _ in range(2))
        self._weights = load_file(next(folder.glob("*2-of-00002.safetensors"), folder / "model.safetensors"))
        self._names, prefix = around(self.plain), layer_prefix(self.plain)
        inside = {name.removeprefix(prefix): self._weights[name] for name in self._weights if name.startswith(prefix)}
        base: Any = self._layer.base_model
        layer = next(each for each in reversed(base.layers) if hasattr(each, "self_attn"))
        layer.load_state_dict(_with_stacked_experts({n: w for n, w in inside.items() if prefix + n not in self._names}))
        base.layers = torch.nn.ModuleList([layer])
        layer.self_attn.layer_idx = 0
        base.norm = torch.nn.Identity()
        base.config.num_hidden_layers = 1
        if getattr(base.config, "layer_types", None):
            base.config.layer_types = ["full_attention"]

    @torch.inference_mode()
    def hidden(self, ids: list[int]) -> Tensor:
        """`[tokens, hidden_size]`, after the final norm."""
        states: Tensor = self.plain.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        return states[0]

    @torch.inference_mode()
    def step(self, hidden: Tensor, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, and the layer's output before and after the norm, for `ids[i]` beside `hidden[i]`."""
        projection, embedding_norm, hidden_norm, norm = self._names
        embedded = self.plain.get_input_embeddings()(torch.tensor([ids]))
        both = torch.cat([self._normed(embedded, embedding_norm), self._normed(hidden[None], hidden_norm)], dim=-1)
        fused = both @ self._weights[projection].T
        output: Tensor = self._layer.base_model(inputs_embeds=fused, use_cache=False).last_hidden_state
        normed = self._normed(output, norm)
        head: Any = self.plain.get_output_embeddings()
        return head(normed)[0], output[0], normed[0]

    def draws(self, ids: list[int], count: int) -> list[int]:
        """The most probable tokens, one after the other, as a head with this text drafts them."""
        hidden, after, drawn = self.hidden(ids)[:-1], ids[1:], list[int]()
        feeds_back_normed = self.plain.config.model_type in LIKE_QWEN
        for _ in range(count):
            logits, output, normed = self.step(hidden, after)
            drawn.append(int(logits[-1].argmax()))
            hidden = torch.cat([hidden, (normed if feeds_back_normed else output)[-1:]])
            after = [*after, drawn[-1]]
        return drawn

    def _normed(self, states: Tensor, name: str) -> Tensor:
        config: Any = self.plain.config
        root = (states.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return states * root * (self._weights[name] + 1.0 - norm_weight(self.plain))


def _with_stacked_experts(weights: Weights) -> Weights:
    """The experts' tensors in one, as transformers keeps them."""
    found = {name: weight for name, weight in weights.items() if ".experts." not in name}
    count = len({name.split(".")[2] for name in weights if ".experts." in name})
    if count:
        experts = [[weights[f"mlp.experts.{i}.{side}_proj.weight"] for side in ("gate", "up")] for i in range(count)]
        down = [weights[f"mlp.experts.{i}.down_proj.weight"] for i in range(count)]
        found["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in experts])
        found["mlp.experts.down_proj"] = torch.stack(down)
    return found


def rewritten(folder: Path, other: Path, change: Callable[[Weights], Weights], **settings: Any) -> Path:
    """A copy of a checkpoint in one file, with changed tensors and settings."""
    shutil.copytree(folder, other)
    save_file(change(load_file(folder / "model.safetensors")), other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text()) | settings
    (other / "config.json").write_text(json.dumps(config))
    return other
