"""Weights are let go for everyone, and loaded again by the next call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.order_chat import TOKENIZER
from helpers.scripted_kinds import scripted
from helpers.small_engines import load_by

from precedent.engine.engine import Engine
from precedent.errors import UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_model import scripted_model_engine
from precedent_testing.tiny_models import tiny_causal_lm


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Every model that was loaded: a tiny one, for whatever name."""
    loaded: list[weakref.ref[Any]] = []

    def load(target: Any, *_: Any, **__: Any) -> Engine:
        engine = scripted_model_engine(lambda prompt: f"from {target}")
        loaded.append(weakref.ref(engine.target.model))
        return engine

    load_by(monkeypatch, load)
    return loaded


def test_unload_frees_the_weights_for_everyone_and_the_next_call_loads_them_again(
    loads: list[weakref.ref[Any]],
) -> None:
    model, twin, other = ChatPrecedent(model="a"), ChatPrecedent(model="a", seed=1), PrecedentLLM(model="b")
    assert model.invoke("hi").text == twin.invoke("hi").text == "from a"
    other.invoke("hi")
    assert len(loads) == 2, "the twins share theirs"
    twin.unload()
    gc.collect()
    assert [one() is None for one in loads] == [True, False]
    assert model.invoke("hi").text == "from a"
    assert twin.invoke("hi").text == "from a"
    assert len(loads) == 3, "loaded once again"
    for one in (model, other):
        one.unload()
        one.unload()  # nothing is there any more, which harms nobody
    assert [one() is None for one in loads] == [True] * 3


def test_of_a_model_that_was_handed_over_the_engine_goes_and_the_weights_stay() -> None:
    weights = tiny_causal_lm("llama", vocab_size=len(TOKENIZER))
    chat, text = (kind.from_model(weights, TOKENIZER, max_tokens=4) for kind in (ChatPrecedent, PrecedentLLM))
    for model in (chat, text):
        model.unload()  # nothing is there yet, which harms nobody
        said, engine = _text(model.invoke("hi")), weakref.ref(model.engine)
        model.unload()
        gc.collect()
        assert engine() is None
        assert _text(model.invoke("hi")) == said
    assert weights(torch.tensor([[1]])).logits.shape == (1, 1, len(TOKENIZER)), "still its owner's"


def test_an_engine_that_was_handed_over_is_its_owners_to_close() -> None:
    with pytest.raises(UnsupportedError, match=r"close that one with engine.close\(\)"):
        scripted().unload()


def test_an_engine_that_was_closed_is_not_shared_any_more(loads: list[weakref.ref[Any]]) -> None:
    first = ChatPrecedent(model="a")
    engine = first.engine
    engine.close()
    assert ChatPrecedent(model="a").invoke("hi").text == "from a"
    assert len(loads) == 2


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text
