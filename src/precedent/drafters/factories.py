"""How the built-in drafters are made from the parts of an engine (targets of this package's own entry points)."""

from __future__ import annotations

from precedent.cache.speculation_cache import SpeculationCache
from precedent.drafters import DrafterParts
from precedent.drafters.base import Drafter
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.templates import TemplateDrafter


def recall(parts: DrafterParts) -> Drafter | None:
    """Prior completions of the speculation cache; absent without a cache."""
    if parts.cache is None:
        return None
    cache, tokenizer, executor = parts.cache, parts.tokenizer_fingerprint, parts.executor
    if not isinstance(cache, SpeculationCache):  # whoever replays a log offers what recall needs of a cache, no more
        return RecallDrafter(cache, tokenizer, executor)
    drafter = RecallDrafter(cache, tokenizer, executor, partitions=cache.partition, max_bytes=cache.max_index_bytes)
    cache.on_forget(drafter.erase_gone)
    return drafter


def prompt(parts: DrafterParts) -> Drafter | None:
    """n-gram lookup in the live prompt and answer; always there."""
    return PromptDrafter()


def draft_model(parts: DrafterParts) -> Drafter | None:
    """A smaller causal LM; absent without one."""
    if parts.draft_model is None:
        return None
    return DraftModelDrafter(
        parts.draft_model, early_exit=parts.early_exit, laws_on=parts.device, own_stream=parts.pearl
    )


def prediction(parts: DrafterParts) -> Drafter | None:
    """The caller's own guess of the answer; always there, idle without one."""
    return PredictionDrafter()


def template(parts: DrafterParts) -> Drafter | None:
    """Premade responses and the forms of tool calls; absent without a tokenizer to write them with."""
    return None if parts.codec is None else TemplateDrafter(parts.codec)


def grammar(parts: DrafterParts) -> Drafter | None:
    """What a request's constraint forces; always there, idle where it forces nothing."""
    return GrammarDrafter()
