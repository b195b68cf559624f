"""PrecedentLLM: a text goes to the model as it is, and comes back continued, on every way in."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler

from precedent.errors import UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer


class Heard(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_text_is_continued_on_every_way_with_the_settings_and_the_runs_step(way: str) -> None:
    engine: Any = ScriptedEngine(chatml_tokenizer(), [" Paris."], max_burst=2)
    model, heard = PrecedentLLM.from_engine(engine), Heard()
    config: Any = {"metadata": {"workflow_step": "north"}, "callbacks": [heard]}
    given = "The capital of France is", config
    if way == "invoke":
        text = model.invoke(*given, temperature=0.5)
    elif way == "ainvoke":
        text = await model.ainvoke(*given, temperature=0.5)
    elif way == "stream":
        text = "".join(model.stream(*given, temperature=0.5))
    else:
        text = "".join([text async for text in model.astream(*given, temperature=0.5)])
    assert text == " Paris."
    assert "".join(heard.tokens) == (text if way.endswith("stream") else "")
    (request,) = engine.requests
    assert request.prompt == "The capital of France is", "the prompt is no chat"
    assert (request.workflow_step, request.sampling.temperature) == ("north", 0.5)


async def test_several_texts_run_together_and_stay_in_order() -> None:
    engine: Any = ScriptedEngine(chatml_tokenizer(), lambda prompt: prompt.upper(), pace=0.001)
    model = PrecedentLLM.from_engine(engine, logprobs=True)
    for result in (model.generate(["a", "b", "c"], stop=["X"]), await model.agenerate(["a", "b", "c"])):
        assert [found[0].text for found in result.generations] == ["A", "B", "C"]
        info = result.generations[0][0].generation_info
        assert info is not None
        assert (info["finish_reason"], info["completion_tokens"], info["speculation"]["lossless"]) == ("stop", 2, True)
        assert len(info["logprobs"]["content"]) == 2
    assert engine.requests[0].sampling.stop == ("X",)
    assert ChatPrecedent.from_engine(model.engine).engine is model.engine


def test_prefixes_are_kept_for_chats_alone() -> None:
    with pytest.raises(UnsupportedError, match="keep_prefixes=True is for chat models"):
        PrecedentLLM(model="m", keep_prefixes=True, speculation_cache="orders")
