"""The order desk's pair of models, an engine on it for one mode at a time, and conversations on held-out requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property

from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.generation import GenerationResult
from precedent.engine.options import EngineOptions
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.target.load.loading import load_draft, load_target
from precedent_demo import (
    MAX_TOKENS_PER_TURN,
    adapted_target,
    draft_folder,
    make_database,
    make_requests,
    run_request,
)

DRAFT, WITH_CACHE = ("draft-model",), ("recall", "prompt", "template", "draft-model")
WARMING = 15
LONG = 1e5
"""Milliseconds that a step of the target is said to take, beside which a sample of the draft model costs nothing."""


class Desk:
    """Both models, loaded once, and a cache of the target's answers to set A.

    To every engine a step takes `LONG` however wide it is, so each proposes as much as it may, and no clock decides how
    many steps an answer takes.
    """

    def __init__(self) -> None:
        self.model, self.tokenizer = load_target(str(adapted_target()))
        self._draft = load_draft(str(draft_folder()), self.model, self.tokenizer)

    @cached_property
    def cache(self) -> SpeculationCache:
        """A cache in memory with the target's answers to the first requests of set A."""
        cache, desk = SpeculationCache.open(None), make_database(0)
        with self.engine("auto", WITH_CACHE, cache, write_back=True) as (engine, _):
            for request in make_requests("A")[:WARMING]:
                run_request(self.chat_model(engine, 0.0), request, desk)
        return cache

    @contextmanager
    def engine(
        self, mode: str, drafters: tuple[str, ...], cache: SpeculationCache | None = None, *, write_back: bool = False
    ) -> Iterator[tuple[Engine, list[GenerationResult]]]:
        """An engine for one mode, and the results of its requests as they end."""
        ended: list[GenerationResult] = []
        speculation = SpeculationConfig(drafters=drafters, mode=mode, write_back=write_back)
        options = EngineOptions(draft_model=self._draft, cache=cache, speculation=speculation)
        engine = Engine(
            self.model,
            self.tokenizer,
            options,
            name="order-desk",
            cost=CostCurve.through({1: LONG}),
            on_result=lambda prompt_ids, result: ended.append(result),
        )
        with closing(engine):
            yield engine, ended

    def chat_model(self, engine: Engine, temperature: float) -> ChatPrecedent:
        """The chat model of the desk's agents."""
        return ChatPrecedent.from_engine(engine, temperature=temperature, max_tokens=MAX_TOKENS_PER_TURN)

    def served(self, engine: Engine, temperature: float, requests: int) -> list[bool]:
        """Serve the first held-out requests (set B); returns whether each was solved."""
        desk, chat_model = make_database(0), self.chat_model(engine, temperature)
        wanted = make_requests("B", full=True)[:requests]
        return [run_request(chat_model, request, desk).solved_by_model for request in wanted]
