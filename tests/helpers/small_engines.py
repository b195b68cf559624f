"""Engines on a tiny model in float64 for which width is free, and caches that mislead them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from precedent.cache import Completion, SpeculationCache
from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.planning.gate import Gate
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PLAIN = SpeculationConfig(enabled=False, write_back=False)
PROMPT = list(b"look up order 17, then order 18, then order 19")


class AlwaysOpen(Gate):
    """Lets every step draw, whatever it costs."""

    def decide(self, wanted: int, open_mass: float = 1.0, *, beside: bool = False) -> int:
        """Four draws."""
        return 4


def make_engine(cache: SpeculationCache | None = None, **settings: object) -> Engine:
    """An engine on a tiny float64 model, for which width is free."""
    engine = Engine.load(tiny_causal_lm("llama", seed=21), tokenizer=byte_tokenizer(), cache=cache, **settings)
    engine.planner.cost = CostCurve()
    return engine


def load_by(patch: pytest.MonkeyPatch, load: Callable[..., object]) -> None:
    """Let `load` take the place of reading weights, for whoever asks for an engine."""
    patch.setattr(Engine, "load", load)


def poison(cache: SpeculationCache, engine: Engine, answer: tuple[int, ...], query: str = "order") -> None:
    """Completions that begin like the answer and then go wrong: other tokens, padding, tokens that do not exist."""
    for cut, wrong in ((1, 65), (3, 7), (5, 258), (7, 399), (9, 2**31 - 1), (11, 66)):
        tokens = (*answer[:cut], wrong, *answer[cut + 1 :])
        cache.insert(Completion(token_ids=tokens, tokenizer=engine.tokenizer_fingerprint, model="another", query=query))
