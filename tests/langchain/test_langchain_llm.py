"""PrecedentLLM: a text goes to the model as it is, and comes back continued, on every way in."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler

from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer


def scripted(*answers: str, **engine: Any) -> PrecedentLLM:
    return PrecedentLLM.from_engine(ScriptedEngine(chatml_tokenizer(), answers, **engine))


class Heard(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)


async def test_every_way_gives_one_text() -> None:
    def model() -> PrecedentLLM:
        return scripted(" Paris.", max_burst=2)

    assert model().invoke("The capital of France is") == " Paris."
    assert await model().ainvoke("The capital of France is") == " Paris."
    assert "".join(model().stream("The capital of France is")) == " Paris."
    assert "".join([text async for text in model().astream("The capital of France is")]) == " Paris."


async def test_handlers_hear_every_text_once() -> None:
    for way in ("stream", "astream"):
        heard = Heard()
        model = scripted("one two", max_burst=3)
        if way == "stream":
            list(model.stream("hi", {"callbacks": [heard]}))
        else:
            _ = [text async for text in model.astream("hi", {"callbacks": [heard]})]
        assert "".join(heard.tokens) == "one two"


def test_the_prompt_is_no_chat() -> None:
    model = scripted("a")
    model.invoke("Once upon a time")
    assert model.engine.requests[0].prompt == "Once upon a time"


def test_several_texts_run_together_and_stay_in_order() -> None:
    engine: Any = ScriptedEngine(chatml_tokenizer(), lambda prompt: prompt.upper(), pace=0.001)
    model = PrecedentLLM.from_engine(engine)
    result = model.generate(["a", "b", "c"], stop=["X"])
    assert [found[0].text for found in result.generations] == ["A", "B", "C"]
    info = result.generations[0][0].generation_info
    assert (info["finish_reason"], info["completion_tokens"], info["speculation"]["lossless"]) == ("stop", 2, True)
    assert engine.requests[0].sampling.stop == ("X",)


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_settings_and_the_runs_step_reach_the_engine(way: str) -> None:
    model = scripted("a", "b")
    config: Any = {"metadata": {"workflow_step": "north"}}
    if way == "invoke":
        model.invoke("hi", config, temperature=0.5, logprobs=True)
    else:
        list(model.stream("hi", config, temperature=0.5))
    assert (model.engine.requests[0].workflow_step, model.engine.requests[0].sampling.temperature) == ("north", 0.5)


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"tools": [{}]}, UnsupportedError, "tools cannot be given to a text completion: use ChatPrecedent"),
        ({"temprature": 1}, ConfigError, "takes no 'temprature'"),
    ],
)
def test_what_only_a_chat_can_do_is_refused(kwargs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        scripted("a").invoke("hi", **kwargs)


def test_leaving_a_stream_cancels() -> None:
    model = scripted("x" * 3000, max_burst=1, pace=0.001)
    for _ in model.stream("hi", max_tokens=2000):
        break
    (request,) = model.engine.requests
    assert request.ended.wait(10)
    assert request.cancelled


def test_it_counts_tokens_and_shares_the_engine_with_a_chat_model() -> None:
    model = scripted("a", "b")
    assert model.get_token_ids("ab") == chatml_tokenizer().encode("ab")
    assert ChatPrecedent.from_engine(model.engine).engine is model.engine
