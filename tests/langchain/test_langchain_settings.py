"""Settings of the model, of the call and of its run reach the engine, tools and queries too."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.order_chat import TOKENIZER, engine_of, look_up, scripted
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel

from precedent.config import SpeculationConfig
from precedent.langchain import ChatPrecedent
from precedent_testing.scripted_engine import ScriptedEngine


def test_stop_strings_of_model_and_call_are_merged() -> None:
    model = ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, ["one two three"] * 2), stop=["three", "x"])
    assert model.invoke("hi", stop=["two", "x"]).content == "one "
    assert model.invoke("hi").content == "one two "
    assert engine_of(model).requests[0].sampling.stop == ("three", "x", "two")


def test_settings_of_the_model_and_of_the_call_reach_the_engine() -> None:
    engine = ScriptedEngine(TOKENIZER, ["a"] * 3)
    model = ChatPrecedent.from_engine(engine, temperature=0.5, top_k=9, seed=1, tenant="north", max_tokens=7)
    model.invoke("hi")
    model.invoke(
        "hi", temperature=0.25, seed=2, max_tokens=5, tenant="south", workflow_step="refund", speculation=False
    )
    model.invoke("hi", speculation={"max_nodes": 4}, drafters=["recall"], temperature=None)
    first, second, third = engine.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed) == (0.5, 9, 1)
    assert (first.tenant, first.workflow_step, first.speculation, first.sampling.max_tokens) == ("north", "", None, 7)
    assert (second.sampling.temperature, second.sampling.seed, second.sampling.max_tokens) == (0.25, 2, 5)
    assert (second.tenant, second.workflow_step) == ("south", "refund")
    assert second.speculation == SpeculationConfig(enabled=False)
    assert third.speculation == SpeculationConfig(max_nodes=4, drafters=("recall",))
    assert third.sampling.temperature == 0.5


@pytest.mark.parametrize(
    "way", ["invoke", "stream", "ainvoke", "astream", "batch", "events", "v3", "stream=True", "nested"]
)
async def test_the_runs_metadata_names_the_step_on_every_way(way: str) -> None:
    model = scripted("a")
    config: Any = {"metadata": {"lc_agent_name": "desk", "langgraph_node": "model"}}
    if way == "invoke":
        model.invoke("hi", config)
    elif way == "stream":
        list(model.stream("hi", config))
    elif way == "ainvoke":
        await model.ainvoke("hi", config)
    elif way == "astream":
        _ = [chunk async for chunk in model.astream("hi", config)]
    elif way == "batch":
        model.batch(["hi"], config)
    elif way == "events":
        _ = [event async for event in model.astream_events("hi", config, version="v2")]
    elif way == "v3":
        assert model.stream_events("hi", config, version="v3").output.content
    elif way == "stream=True":
        model.invoke("hi", config, stream=True)
    else:
        RunnableLambda(model.invoke).invoke("hi", config)
    (request,) = engine_of(model).requests
    assert request.workflow_step == "desk/model"


def test_the_models_own_metadata_counts_and_the_call_wins() -> None:
    model = ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, ["a"] * 3), metadata={"workflow_step": "west"})
    list(model.stream("hi"))
    model.invoke("hi")
    model.invoke("hi", {"metadata": {"workflow_step": "north"}}, workflow_step="south")
    assert [request.workflow_step for request in engine_of(model).requests] == ["west", "west", "south"]


def test_query_and_tools_reach_the_engine() -> None:
    model = scripted("a", "b")
    model.bind_tools([look_up]).invoke([SystemMessage("policy"), HumanMessage("where is order 1042?")])
    model.invoke("hi")
    with_tools, without = engine_of(model).requests
    assert with_tools.query == "user: where is order ?"
    assert len(with_tools.tools) == 32
    assert '"name": "look_up"' in with_tools.prompt
    assert without.tools == ""


def test_every_form_of_tool_is_shown() -> None:
    class change_address(BaseModel):
        """Change the address of an order."""

        number: str

    def refund(number: str) -> str:
        """Refund an order."""
        return number

    anthropic = {"name": "cancel", "description": "Cancel.", "input_schema": {"type": "object", "properties": {}}}
    openai = {"type": "function", "function": {"name": "close", "parameters": {}}}
    schema = {"title": "reopen", "description": "Reopen.", "type": "object", "properties": {}}
    model = scripted("a")
    model.bind_tools([look_up, change_address, refund, anthropic, openai, schema]).invoke("hi")
    prompt = engine_of(model).requests[0].prompt
    for name in ("look_up", "change_address", "refund", "cancel", "close", "reopen"):
        assert f'{{"type": "function", "function": {{"name": "{name}"' in prompt
