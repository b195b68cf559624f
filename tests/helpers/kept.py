"""Kept prefixes of a tiny model: keep one, find it again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from precedent.cache import SpeculationCache
from precedent.drafters import DrafterParts
from precedent.engine.kept_prefixes import KeptPrefixes
from precedent.runtime.background import AtOnce
from precedent.target import Slot, TargetModel
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
PREFIX = [random.Random(5).randrange(3, 250) for _ in range(100)]
QUESTION = list(b"where is order 17")
PROMPT = [*PREFIX, *QUESTION]


def tiny(**settings: Any) -> PreTrainedModel:
    return tiny_causal_lm("llama", **{"seed": 21, **settings})


def kept_in(
    cache: SpeculationCache, target: TargetModel, *, tokenizer: str = "tok", model: str = "m", executor: Any = None
) -> KeptPrefixes:
    return KeptPrefixes(DrafterParts(tokenizer, executor or AtOnce(), cache), target, TOKENIZER, model)


def prefilled(target: TargetModel, prompt: list[int] = PROMPT) -> Slot:
    slot = target.new_slot()
    target.prefill(slot, prompt)
    return slot


def files_of(cache: SpeculationCache) -> list[Path]:
    return sorted(cache.prefixes.path.glob("*/*"))


def keep(cache: SpeculationCache, target: TargetModel, tenant: str = "shop", **others: Any) -> Path:
    kept_in(cache, target, **others).keep(tenant, prefilled(target), len(PREFIX))
    (file,) = files_of(cache)
    return file


def restored(cache: SpeculationCache, target: TargetModel, tenant: str = "shop", **others: Any) -> Slot | None:
    """As a new process finds it."""
    return kept_in(cache, target, **others).restore(tenant, PREFIX, len(PROMPT))
