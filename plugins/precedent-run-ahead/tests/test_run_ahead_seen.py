"""What others see of runs ahead (streams, callbacks, tools), and what starts one or keeps it from starting."""

from __future__ import annotations

import functools
import json
import threading
import time
from typing import Any

import pytest
from helpers.run_ahead_agents import (
    ASKED,
    READS,
    W7,
    W8,
    Run,
    agent_of,
    agent_on,
    in_turns,
    join_runs_ahead,
    plain,
    reading,
    saying,
)
from helpers.scripted_agents import Desk, ScriptedChat, call, last_result, script, transcript
from langchain.agents import create_agent, factory
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.config import get_config, get_stream_writer
from langgraph.runtime import get_runtime

from precedent.errors import ConfigError
from precedent_run_ahead import RunAheadMiddleware

FLAG = "precedent_run_ahead"


def test_a_run_ahead_has_the_config_and_context_of_a_real_call(run: Run) -> None:
    seen: list[Any] = []

    def act(order: str) -> None:
        config = get_config()
        seen.append((config["configurable"]["key"], get_runtime().context, config["metadata"].get(FLAG)))

    ahead = RunAheadMiddleware(["look_up"], predict=in_turns([W7]))
    agent = agent_on([reading(act)], saying(W7, W8), ahead, context_schema=dict)
    run(agent, config={"configurable": {"key": "secret"}}, context={"org": "north"})
    assert seen == [("secret", {"org": "north"}, True), ("secret", {"org": "north"}, None)]


def test_what_a_tool_streams_shows_only_if_its_result_is_used() -> None:
    made = reading(lambda order: get_stream_writer()(f"reading {order}"))
    ahead = RunAheadMiddleware([made], predict=in_turns([W8, W7]))
    assert list(agent_on([made], saying(W7), ahead).stream(ASKED, stream_mode="custom")) == ["reading W7"]


class Watching(BaseCallbackHandler):
    """Keeps what callbacks see of tools."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, str]] = []

    def on_tool_start(self, serialized: Any, input_str: str, *, metadata: Any = None, **kwargs: Any) -> None:
        self.seen.append((bool((metadata or {}).get(FLAG)), f"{input_str} {kwargs.get('inputs')}"))


def test_runs_ahead_are_flagged_in_callbacks_and_show_no_arguments(run: Run) -> None:
    watching = Watching()
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7, W8]))
    run(agent_of(Desk(), saying(W7), ahead), config={"callbacks": [watching]})
    assert [text for flag, text in watching.seen if flag and ("W7" in text or "W8" in text)] == []
    assert sorted((flag, "W7" in text) for flag, text in watching.seen) == [(False, True), *[(True, False)] * 2]


def test_redact_says_what_callbacks_see_of_arguments() -> None:
    watching = Watching()
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]), redact=lambda text: text.replace("W7", "W*"))
    agent_of(Desk(), saying(), ahead).invoke(ASKED, {"callbacks": [watching]})
    assert [(flag, "W*" in text, "W7" in text) for flag, text in watching.seen] == [(True, True, False)]


def test_the_stream_of_tool_events_shows_the_model_s_calls_alone() -> None:
    def events(*middleware: Any) -> list[Any]:
        streamed = agent_of(Desk(), saying(W7), *middleware).stream(ASKED, stream_mode="tools")
        return [(event["event"], event["tool_call_id"]) for event in streamed]

    assert events(RunAheadMiddleware(READS, predict=in_turns([W7, W8]))) == events()


def test_the_switch_stops_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]), listen=True)
    agent = agent_of(Desk(), saying(W7), ahead)
    monkeypatch.setenv("PRECEDENT_RUN_AHEAD", "off")
    agent.invoke(ASKED)
    assert ahead.ledger.counts.started == 0
    monkeypatch.setenv("PRECEDENT_RUN_AHEAD", "no")
    with pytest.raises(ConfigError, match="PRECEDENT_RUN_AHEAD='no'"):
        agent.invoke(ASKED)


def test_arguments_from_tool_output_need_the_tool_s_opt_in() -> None:
    """A tool's answer must not be able to choose what is read next."""

    def predicted(state: Any) -> list[Any]:
        shown = [last_result(state["messages"])] if len(state["messages"]) > 2 else []
        return [call("customer", customer=json.loads(text)["customer"]) for text in shown]

    for opted_in in ([], ["customer"]):
        ahead = RunAheadMiddleware(READS, predict=predicted, arguments_from_tools=opted_in)
        agent_of(Desk(), saying(W7, call("customer", customer="C7")), ahead).invoke(ASKED)
        assert ahead.ledger.counts.used == len(opted_in)


def test_a_call_starts_while_the_model_still_writes_the_next() -> None:
    """The model is held until the tool has run: only a call that starts from the stream can do that."""
    ran, pieces = threading.Event(), list[int]()

    def between() -> None:
        pieces.append(1)
        if len(pieces) == 4:  # the first call is written, the second has begun
            assert ran.wait(30)

    ahead = RunAheadMiddleware(["look_up"], listen=True)
    model = ScriptedChat(answer=saying([W7, W8]), between=between)
    create_agent(model, [reading(lambda order: ran.set())], middleware=[ahead]).invoke(ASKED)
    assert ahead.ledger.counts.by_source["stream"] == [2, 2]


def test_the_seconds_saved_are_those_of_the_very_call() -> None:
    """Not a mean: tools that were quick before may be slow now."""
    took, between, quick = list[float](), list[float](), call("look_up", order="quick")

    def act(order: str) -> str:
        begun = time.perf_counter()
        time.sleep(0.0 if order == "quick" else 0.2)
        took.append(time.perf_counter() - begun)
        return order

    def answer(messages: Any) -> AIMessage:
        if len(messages) == 7:  # three quick calls came before
            join_runs_ahead()
        between.append(time.perf_counter())
        return saying(quick, quick, quick, W7)(messages)

    ahead = RunAheadMiddleware(["look_up"], predict=in_turns([], [], [], [W7]), price=0.0)
    agent_on([reading(act)], answer, ahead).invoke(ASKED)
    assert ahead.ledger.counts.used == 1
    waited_at_most = between[-1] - between[-2]
    assert ahead.ledger.counts.seconds_saved >= took[-1] - waited_at_most


def test_a_call_that_does_not_pay_is_not_started() -> None:
    for price, expected in ((0.0, 2), (3600.0, 1)):
        ahead = RunAheadMiddleware(READS, predict=lambda state: [W7], price={"look_up": price})
        agent_of(Desk(), saying(W7), ahead).invoke(ASKED)
        assert ahead.ledger.counts.started == expected  # the first is started: nothing has been measured yet


@pytest.mark.parametrize("of", ["graph", "model"])
def test_a_tool_with_an_agent_or_a_model_inside_shows_its_steps_and_does_not_run_ahead_again(run: Run, of: str) -> None:
    words = script(AIMessage("inner words"))
    inner = agent_on([], words) if of == "graph" else ScriptedChat(answer=words)

    def act(order: str) -> str:
        found = inner.invoke({"messages": [HumanMessage(order)]} if of == "graph" else order)
        return str(found["messages"][-1].content if of == "graph" else found.content)

    made = reading(act)
    ahead = RunAheadMiddleware([made], predict=in_turns([W7], [W8]))

    def shown(middleware: Any) -> list[Any]:
        agent = agent_on([made], saying(W7, W8), middleware)
        streamed = agent.stream(ASKED, stream_mode=["updates", "messages"], subgraphs=True)
        return [
            (bool(where), mode, part[0].text if mode == "messages" else list(part)) for where, mode, part in streamed
        ]

    without = shown(RunAheadMiddleware([made]))
    assert any("inner" in part for _, mode, part in without if mode == "messages")
    assert shown(ahead) == without
    assert (ahead.ledger.counts.started, ahead.ledger.counts.used) == (1, 0)
    assert of in ahead.refused["look_up"]
    run(agent_on([made], saying(W7, W8), ahead))
    assert ahead.ledger.counts.started == 1


def test_instrumentation_around_create_agent_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    made = factory.create_agent
    monkeypatch.setattr(factory, "create_agent", functools.wraps(made)(functools.partial(made)))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    tools = list(Desk().tools().values())
    factory.create_agent(ScriptedChat(answer=saying(W7)), tools, middleware=[ahead]).invoke(ASKED)
    assert ahead.ledger.counts.used == 1


def test_a_request_that_lost_its_run_is_answered_as_ever(run: Run) -> None:
    """Middleware outside may make a new request, as LangChain's own tests do; nothing says then whose turn it is."""

    class Replacing(AgentMiddleware):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(ModelRequest(model=request.model, messages=request.messages, tools=request.tools))

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await self.wrap_model_call(request, handler)

    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    assert transcript(run(agent_of(Desk(), saying(W7), Replacing(), ahead))) == plain(saying(W7))
    assert ahead.ledger.counts.started == 0


GOSSIP = ScriptedChat(answer=saying(W8))
"""Another model, which writes a call that the agent's model does not make."""


class Composed(ScriptedChat):
    """An agent's model that asks another one before it answers."""

    def _generate(self, messages: Any, *given: Any, **named: Any) -> Any:
        list(GOSSIP.stream(messages))
        return super()._generate(messages, *given, **named)

    def _stream(self, messages: Any, *given: Any, **named: Any) -> Any:
        list(GOSSIP.stream(messages))
        yield from super()._stream(messages, *given, **named)


class Asking(AgentMiddleware):
    """Asks another model, in the same words and with the same tools, before and after the agent's."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        list(GOSSIP.bind_tools(request.tools).stream(request.messages))
        response = handler(request)
        list(GOSSIP.bind_tools(request.tools).stream(request.messages))
        return response

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        [chunk async for chunk in GOSSIP.bind_tools(request.tools).astream(request.messages)]
        response = await handler(request)
        [chunk async for chunk in GOSSIP.bind_tools(request.tools).astream(request.messages)]
        return response


@pytest.mark.parametrize("where", ["inside the agent's model", "in middleware", "in predict="])
def test_another_model_is_not_heard_as_the_agent_s(run: Run, where: str) -> None:
    desk, others = Desk(), [Asking()] if where == "in middleware" else []
    predict = (lambda state: list(GOSSIP.stream("what next?")) and []) if where == "in predict=" else None
    model = Composed if where.startswith("inside") else ScriptedChat
    ahead = RunAheadMiddleware(READS, listen=True, harmless=others, predict=predict)
    run(create_agent(model(answer=saying()), list(desk.tools().values()), middleware=[ahead, *others]))
    assert (ahead.ledger.counts.started, desk.read) == (0, [])


def test_the_agent_s_own_model_is_heard_though_it_asks_another() -> None:
    ahead = RunAheadMiddleware(READS, listen=True)
    create_agent(Composed(answer=saying(W7)), list(Desk().tools().values()), middleware=[ahead]).invoke(ASKED)
    assert ahead.ledger.counts.by_source == {"stream": [1, 1]}
