"""What LangChain asks about the model: parameters of traces and caches, and counts of tokens."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.order_chat import TOKENIZER, engine_of, look_up, scripted
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage

from precedent.langchain import ChatPrecedent
from precedent_testing.scripted_engine import ScriptedEngine


def test_parameters_for_tracing_and_caches() -> None:
    model = ChatPrecedent(model="m", temperature=0.5, max_tokens=9, stop=["a"])
    params = model._get_ls_params(stop=["b"])
    assert (params["ls_provider"], params["ls_model_name"], params["ls_stop"]) == ("precedent", "m", ["a", "b"])
    assert (params["ls_temperature"], params["ls_max_tokens"]) == (0.5, 9)
    assert model._llm_type == "precedent-chat"
    assert ChatPrecedent(model_name="m").model == model.model_name == "m"


@pytest.mark.parametrize(
    "other",
    [
        *({"model": "n"}, {"seed": 1}, {"dtype": "float32"}, {"temperature": 1.0}, {"stop": ["x"]}, {"tenant": "t"}),
        *({"model_kwargs": {"revision": "v2"}}, {"strict_tools": False}, {"logprobs": True}),
    ],
)
def test_an_answer_cache_keeps_different_models_apart(other: dict[str, Any]) -> None:
    one, two = (ChatPrecedent(**{"model": "m", **changes}) for changes in ({}, other))
    assert one._get_llm_string() != two._get_llm_string()
    assert one._get_llm_string() == ChatPrecedent(model="m")._get_llm_string()


def test_an_answer_cache_does_not_mix_up_two_engines_of_one_name() -> None:
    cache = InMemoryCache()
    models = [ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, [text]), cache=cache) for text in ("one", "two")]
    assert [model.invoke("hi").content for model in models] == ["one", "two"]
    assert models[0].invoke("hi").content == "one", "this one comes from the cache: the script is used up"


def test_tokens_are_counted_by_the_models_own_tokenizer_and_template() -> None:
    model = scripted("a")
    assert model.get_token_ids("ab<|im_end|>") == TOKENIZER.encode("ab<|im_end|>")
    count = model.get_num_tokens_from_messages([HumanMessage("where?")])
    model.invoke("where?")
    assert count == len(engine_of(model).requests[0].prompt_ids)
    assert model.get_num_tokens_from_messages([HumanMessage("where?")], tools=[look_up]) > count
