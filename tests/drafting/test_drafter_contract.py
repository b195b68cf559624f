"""The contract of every drafter, for those of core and for the shipped adversaries of tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor, full_like, inf

from precedent.cache import Completion, SpeculationCache
from precedent.config import SamplingParams
from precedent.drafters import Drafter, Request
from precedent.drafters.base import NODE, Candidates
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.drafters.sessions import Matching, begin_all, end_all, match_together
from precedent.drafters.templates import TemplateDrafter
from precedent.runtime.background import AtOnce
from precedent.runtime.fence import Fences
from precedent.target import Slot, TargetModel
from precedent.target.load.first_layers import first_layers
from precedent.text.templates import Template
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.drafters import OracleDrafter, RandomDrafter
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import tiny_causal_lm

TINY = {"vocab_size": 16, "num_hidden_layers": 3, "hidden_size": 16, "seed": 31}


class LetterCodec:
    """Token 5 is "a", 6 is "b", and so on; 2 ends an answer."""

    end_token_id = 2

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 5 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token - 5 + ord("a")) for token in token_ids)


class Phrases:
    """A constraint that forces two tokens of three."""

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        forced = self.forced(output_ids)
        if not forced:
            return row
        masked = full_like(row, -inf)
        masked[forced[0]] = row[forced[0]]
        return masked

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        return ((5,), (), (7, 5))[len(output_ids) % 3]


SHAPE = Phrases()


def recalling() -> Drafter:
    cache = SpeculationCache.open(embedder=HashEmbedder())
    for tokens in ([5, 6, 7, 8, 9, 10, 2], [5, 6, 7, 8, 9, 5, 11, 12, 2], [3, 4, 5, 6, 13, 14, 2]):
        cache.insert(Completion(tuple(tokens), "tok", "model", query="contract"))
    return RecallDrafter(cache, "tok", AtOnce())


@cache
def early_exit() -> tuple[TargetModel, TargetModel]:
    model = tiny_causal_lm("llama", **TINY)
    return TargetModel(model), TargetModel(first_layers(model, 2))


@cache
def place_of(prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = early_exit()
    slot = target.new_slot()
    if prompt:
        target.prefill(slot, list(prompt))
    return lambda: slot


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt": PromptDrafter,
    "prediction": PredictionDrafter,
    "template": lambda: TemplateDrafter(LetterCodec(), ["abc{x}eab"]),
    "grammar": GrammarDrafter,
    "recall": recalling,
    "draft model": lambda: DraftModelDrafter(TargetModel(tiny_causal_lm("llama", **TINY))),
    "early exit": lambda: DraftModelDrafter(early_exit()[1], early_exit=True),
    "random": lambda: RandomDrafter(2),
    "oracle": lambda: OracleDrafter([*DrafterContract.output, 3, 4, 1]),
}

ASKED: dict[str, Any] = {
    "prediction": {"prediction": (5, 6, 11, 8, 9, 5, 6, 7, 2)},
    "template": {"templates": (Template.parse("ab{y}de", {"y": ["c", "f"]}),)},
    "grammar": {"shape": SHAPE},
}
"""What a request brings for a drafter."""


@pytest.mark.parametrize("name", DRAFTERS)
class TestDrafters(DrafterContract):
    """Every drafter keeps it."""

    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self.name = name
        if name == "grammar":
            self.output = (5, 6, 7, 5, 8, 7, 5, 9, 7)

    def make_drafter(self) -> Drafter:
        return DRAFTERS[self.name]()

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        request = super().make_request(prompt_ids)
        asked = {"target_slot": place_of(request.prompt_ids)} if self.name == "early exit" else {}
        return replace(request, **ASKED.get(self.name, asked))


class Faulty:
    """A drafter, and its own session, that fails at one thing."""

    def __init__(self, at: str) -> None:
        self.at, self.ended = at, False

    def begin(self, request: Request) -> Any:
        self._fail_at("begin")
        return object() if self.at == "no session" else self

    def match(self, budget: int) -> Candidates:
        self._fail_at("match")
        return Candidates("x", np.zeros(budget + 1, NODE)) if self.at == "too many" else Candidates("x")

    def committed(self, token_ids: Sequence[int]) -> None:
        pass

    def end(self) -> None:
        self.ended = True
        self._fail_at("end")

    def _fail_at(self, stage: str) -> None:
        if self.at == stage:
            raise ValueError("boom")


def test_sessions_begin_match_and_end_whatever_another_does() -> None:
    drafters: Any = {at: Faulty(at) for at in ("begin", "no session", "match", "too many", "end", "nothing")}
    fences, request = Fences(), Request("test", (5,), SamplingParams())
    sessions = begin_all(drafters, request, fences)
    matching = Matching(sessions, 8, None)
    match_together([matching])
    end_all(sessions, fences)
    assert list(sessions) == ["match", "too many", "end", "nothing"]
    assert (list(matching.failed), len(matching.candidates)) == (["match", "too many"], 2)
    assert all(session.ended for session in sessions.values())
    assert fences.faults() == {"begin": 1, "no session": 1, "end": 1}
