"""`Engine.health()`: an engine that fails requests, or whose thread does not advance, and how it recovers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers.small_engines import PLAIN, PROMPT

from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.engine.health import EngineHealth, is_internal
from precedent.errors import GenerationError, GrammarError, RequestCancelled
from precedent.planning.costs import CostCurve
from precedent.runtime.fence import Fences
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

ASKED = SamplingParams(max_tokens=2)


class Tried:
    """An engine with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.model = tiny_causal_lm("llama", seed=21, num_hidden_layers=2)
        fences = Fences(lambda: self.now)
        self.engine = Engine(self.model, byte_tokenizer(), name="tiny", cost=CostCurve(), fences=fences)

    def answer(self, number: int = 1, **settings: Any) -> None:
        for _ in range(number):
            self.engine.submit(PROMPT, ASKED, speculation=PLAIN, **settings).result()

    def fail(self, number: int) -> None:
        head = self.model.get_output_embeddings().weight
        healthy = head.detach().clone()
        with torch.no_grad():
            head.fill_(torch.nan)
        for _ in range(number):
            with pytest.raises(GenerationError):
                self.answer()
        with torch.no_grad():
            head.copy_(healthy)


@pytest.fixture
def tried() -> Any:
    made = Tried()
    yield made
    made.engine.close()


def test_an_engine_that_answers_is_ok(tried: Tried) -> None:
    assert tried.engine.health() == EngineHealth()
    tried.answer(3)
    assert tried.engine.health().status == "ok"


def test_internal_errors_of_the_last_minute_are_a_reason(tried: Tried) -> None:
    tried.fail(2)
    assert tried.engine.health().status == "ok", "two may be chance"
    tried.fail(1)
    found = tried.engine.health()
    assert found.status == "failing"
    assert found.failing == "3 of the 3 requests of the last minute ended in internal errors"
    tried.now += 61.0
    assert tried.engine.health().status == "ok"


def test_a_few_errors_among_many_answers_are_none(tried: Tried) -> None:
    tried.fail(3)
    tried.answer(13)
    assert tried.engine.health().status == "ok"


def test_what_a_caller_causes_is_no_internal_error(tried: Tried) -> None:
    """Cancelled requests, and grammars and constraints that cannot be kept, say nothing about the engine."""
    for _ in range(4):
        generation = tried.engine.submit(PROMPT, SamplingParams(max_tokens=500), speculation=PLAIN)
        generation.cancel()
        with pytest.raises(RequestCancelled):
            generation.result()
    assert tried.engine.health().status == "ok"
    assert not is_internal(GrammarError("every token is masked"))
    assert is_internal(GenerationError("the model's logits hold NaN"))


def test_a_thread_that_does_not_advance_is_a_reason_until_it_does(tried: Tried) -> None:
    score, in_a_step, go_on = tried.engine.target.score, threading.Event(), threading.Event()

    def held_up(*args: Any, **settings: Any) -> Any:
        in_a_step.set()
        assert go_on.wait(60.0)
        return score(*args, **settings)

    tried.engine.target.score = held_up  # type: ignore[method-assign]
    running = tried.engine.submit(PROMPT, ASKED, speculation=PLAIN)
    assert in_a_step.wait(60.0)
    assert tried.engine.health().status == "ok"
    threading.Event().wait(0.02)
    found = tried.engine.health(stalled_seconds=0.01)
    assert "has not advanced for" in found.failing
    go_on.set()
    running.result()
    tried.answer()
    threading.Event().wait(0.02)
    assert tried.engine.health(stalled_seconds=0.01).status == "ok", "an idle engine is not stalled"


def test_a_closed_engine_is_not_healthy(tried: Tried) -> None:
    tried.engine.close()
    assert tried.engine.health().failing == "the engine is closed"
