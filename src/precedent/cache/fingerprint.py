"""Fingerprints of tokenizers, models, tools and prompts: records of things with equal fingerprints are compatible.

Every function takes plain data, or an object that it only asks for data, so no model library is imported here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from precedent.runtime.stored_tensors import stored_tensors

LENGTH = 32
"""Hexadecimal digits of a fingerprint (128 bits)."""

VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""Keys of a model's configuration that say where and how it was loaded, not which model it is."""

SAMPLED_WEIGHTS = 4
SAMPLED_VALUES = 8


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Fingerprint of a Hugging Face tokenizer: its vocabulary with added tokens, and its merges.

    Two tokenizers with equal fingerprints give the same ids to the same text. Padding, truncation and the chat template
    do not count.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return _fingerprint({"vocabulary": vocabulary, "merges": _merges(tokenizer)})


def _merges(tokenizer: Any) -> list[list[str]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str()).get("model", {}).get("merges") or []
    return [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in merges]


def model_fingerprint(config: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """Fingerprint of a model: configuration, all weights' names and shapes, and a few values of a few weights.

    `config` is `model.config.to_dict()`, `weights` is `model.state_dict()` or any mapping of names to tensors. The
    place from which the model was loaded does not count; its dtype counts if the sampled values differ.
    """
    kept = {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}
    shapes = [[name, list(getattr(weights[name], "shape", ()))] for name in sorted(weights)]
    return _fingerprint({"config": kept, "shapes": shapes, "values": _some_values(weights)})


def _some_values(weights: Mapping[str, Any]) -> list[list[list[float]]]:
    names = sorted(weights)
    chosen = names[:: max(1, len(names) // SAMPLED_WEIGHTS)]
    return [[_first_values(part) for part in stored_tensors(weights[name])] for name in chosen]


def _first_values(stored: Any) -> list[float]:
    """The first values of a plain tensor; none where it is elsewhere, or has a type without them."""
    try:
        values: list[float] = stored.reshape(-1)[:SAMPLED_VALUES].tolist()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return []
    return values


def tools_fingerprint(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Fingerprint of a set of tool schemas, whatever their order; empty without tools."""
    if not tools:
        return ""
    return _fingerprint(sorted(_canonical(tool) for tool in tools))


def prompt_fingerprint(prompt_ids: Sequence[int]) -> str:
    """Fingerprint of a prompt's token ids."""
    return hashlib.sha256(np.asarray(prompt_ids, dtype="<i8").tobytes()).hexdigest()[:LENGTH]


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:LENGTH]


def _canonical(value: Any) -> str:
    # ASCII output: a lone surrogate in a schema or a vocabulary has no UTF-8 form
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
