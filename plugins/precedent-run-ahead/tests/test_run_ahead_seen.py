"""What others see of runs ahead (streams, callbacks, tools), and what starts one or keeps it from starting."""

from __future__ import annotations

import functools
import json
import threading
import time
from typing import Any

import pytest
from helpers.run_ahead_agents import ASKED, READS, W7, W8, Run, agent_of, in_turns, plain
from helpers.scripted_agents import Desk, ScriptedChat, call, calls, last_result, script, transcript
from langchain.agents import create_agent, factory
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import StructuredTool
from langgraph.config import get_stream_writer

from precedent.errors import ConfigError
from precedent_run_ahead import RunAheadMiddleware
from precedent_run_ahead.running import FLAG


def test_a_run_ahead_has_the_config_and_context_of_a_real_call(run: Run) -> None:
    from langgraph.config import get_config
    from langgraph.runtime import get_runtime

    seen: list[Any] = []

    def look_up(order: str) -> str:
        """Look up."""
        config = get_config()
        seen.append((config["configurable"]["key"], get_runtime().context, config["metadata"].get(FLAG)))
        return order

    made = StructuredTool.from_function(look_up)
    ahead = RunAheadMiddleware([made], predict=in_turns([W7]))
    answer = script(calls(W7), calls(W8), AIMessage("ok"))
    agent = create_agent(ScriptedChat(answer=answer), [made], middleware=[ahead], context_schema=dict)
    run(agent, config={"configurable": {"key": "secret"}}, context={"org": "north"})
    assert seen == [("secret", {"org": "north"}, True), ("secret", {"org": "north"}, None)]


def test_what_a_tool_streams_shows_only_if_its_result_is_used() -> None:
    def look_up(order: str) -> str:
        """Look up."""
        get_stream_writer()(f"reading {order}")
        return order

    made = StructuredTool.from_function(look_up)
    ahead = RunAheadMiddleware([made], predict=in_turns([W8, W7]))
    agent = create_agent(ScriptedChat(answer=script(calls(W7), AIMessage("ok"))), [made], middleware=[ahead])
    assert list(agent.stream(ASKED, stream_mode="custom")) == ["reading W7"]


class Watching(BaseCallbackHandler):
    """Keeps what callbacks see of tools."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, str, str]] = []

    def on_tool_start(self, serialized: Any, input_str: str, *, metadata: Any = None, **kwargs: Any) -> None:
        text = f"{input_str} {kwargs.get('inputs')}"
        self.seen.append((bool((metadata or {}).get(FLAG)), str(serialized["name"]), text))


def test_runs_ahead_are_flagged_in_callbacks_and_show_no_arguments(run: Run) -> None:
    watching = Watching()
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7, W8]))
    run(agent_of(Desk(), script(calls(W7), AIMessage("ok")), ahead), config={"callbacks": [watching]})
    flagged = [text for flag, _, text in watching.seen if flag]
    ordinary = [text for flag, _, text in watching.seen if not flag]
    assert len(flagged) == 2
    assert not any("W7" in text or "W8" in text for text in flagged)
    assert len(ordinary) == 1
    assert "W7" in ordinary[0]


def test_redact_says_what_callbacks_see_of_arguments() -> None:
    watching = Watching()
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]), redact=lambda text: text.replace("W7", "W*"))
    agent_of(Desk(), script(AIMessage("ok")), ahead).invoke(ASKED, {"callbacks": [watching]})
    assert [(flag, "W*" in text, "W7" in text) for flag, _, text in watching.seen] == [(True, True, False)]


def test_the_stream_of_tool_events_shows_the_model_s_calls_alone() -> None:
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7, W8]))
    answer = script(calls(W7), AIMessage("ok"))

    def events(agent: Any) -> list[Any]:
        return [(event["event"], event["tool_call_id"]) for event in agent.stream(ASKED, stream_mode="tools")]

    assert events(agent_of(Desk(), answer, ahead)) == events(agent_of(Desk(), answer))


def test_the_switch_stops_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]), listen=True)
    agent = agent_of(Desk(), script(calls(W7), AIMessage("ok")), ahead)
    monkeypatch.setenv("PRECEDENT_RUN_AHEAD", "off")
    agent.invoke(ASKED)
    assert ahead.ledger.counts.started == 0
    monkeypatch.setenv("PRECEDENT_RUN_AHEAD", "no")
    with pytest.raises(ConfigError, match="PRECEDENT_RUN_AHEAD='no'"):
        agent.invoke(ASKED)


def test_arguments_from_tool_output_need_the_tool_s_opt_in() -> None:
    """A tool's answer must not be able to choose what is read next."""
    wanted = call("customer", customer="C7")

    def predicted(state: Any) -> list[Any]:
        return [call("customer", customer=json.loads(last_result(state["messages"]))["customer"])] if len(
            state["messages"]) > 2 else []  # fmt: skip

    answer = script(calls(W7), calls(wanted), AIMessage("ok"))
    for opted_in in ([], ["customer"]):
        ahead = RunAheadMiddleware(READS, predict=predicted, arguments_from_tools=opted_in)
        agent_of(Desk(), answer, ahead).invoke(ASKED)
        assert ahead.ledger.counts.used == len(opted_in)


def test_a_call_starts_while_the_model_still_writes_the_next() -> None:
    """The model is held until the tool has run: only a call that starts from the stream can do that."""
    ran = threading.Event()

    def look_up(order: str) -> str:
        """Look up."""
        ran.set()
        return order

    made = StructuredTool.from_function(look_up)
    pieces: list[int] = []

    def between() -> None:
        pieces.append(1)
        if len(pieces) == 4:  # the first call is written, the second has begun
            assert ran.wait(30)

    ahead = RunAheadMiddleware([made], listen=True)
    model = ScriptedChat(answer=script(calls(W7, W8), AIMessage("ok")), between=between)
    create_agent(model, [made], middleware=[ahead]).invoke(ASKED)
    assert ahead.ledger.counts.by_source["stream"] == [2, 2]


def test_the_seconds_saved_are_those_of_the_very_call() -> None:
    """Not a mean: tools that were quick when memory was filled may be slow now."""
    took: list[float] = []
    between: list[float] = []
    done = threading.Event()

    def look_up(order: str) -> str:
        """Look up."""
        begun = time.perf_counter()
        time.sleep(0.2)
        took.append(time.perf_counter() - begun)
        return order

    def answer(messages: Any) -> AIMessage:
        between.append(time.perf_counter())
        if len(between) == 1:
            assert done.wait(30)
            between[0] = time.perf_counter()
            return calls(W7)
        return AIMessage("ok")

    made = StructuredTool.from_function(look_up)
    ahead = RunAheadMiddleware([made], predict=in_turns([W7]))
    ended = ahead.ledger.ended
    ahead.ledger.ended = lambda pending: (ended(pending), done.set())[0]  # type: ignore[method-assign]
    for _ in range(5):
        ahead._worth.tools.observe("look_up", 0.0)
    create_agent(ScriptedChat(answer=answer), [made], middleware=[ahead]).invoke(ASKED)
    assert ahead.ledger.counts.used == 1
    waited_at_most = between[1] - between[0]
    assert ahead.ledger.counts.seconds_saved >= took[0] - waited_at_most


def test_a_call_that_does_not_pay_is_not_started() -> None:
    answer = script(calls(W7), AIMessage("ok"))
    for price, expected in ((0.0, 2), (3600.0, 1)):
        ahead = RunAheadMiddleware(READS, predict=lambda state: [W7], price={"look_up": price})
        agent_of(Desk(), answer, ahead).invoke(ASKED)
        assert ahead.ledger.counts.started == expected  # the first is started: nothing has been measured yet


def inner_agent() -> Any:
    """An agent that answers at once."""
    return create_agent(ScriptedChat(answer=script(AIMessage("inner words"))), [])


@pytest.mark.parametrize(
    ("inner", "of"), [(inner_agent, "graph"), (lambda: ScriptedChat(answer=script(AIMessage("inner words"))), "model")]
)
def test_a_tool_with_an_agent_or_a_model_inside_shows_its_steps_and_does_not_run_ahead_again(
    run: Run, inner: Any, of: str
) -> None:
    asked = inner()

    def look_up(order: str) -> str:
        """Look up."""
        found = asked.invoke({"messages": [HumanMessage(order)]} if of == "graph" else order)
        return str(found["messages"][-1].content if of == "graph" else found.content)

    made = StructuredTool.from_function(look_up)
    answer = script(calls(W7), calls(W8), AIMessage("ok"))
    ahead = RunAheadMiddleware([made], predict=in_turns([W7], [W8]))

    def shown(*middleware: Any) -> list[Any]:
        agent = create_agent(ScriptedChat(answer=answer), [made], middleware=middleware)
        streamed = agent.stream(ASKED, stream_mode=["updates", "messages"], subgraphs=True)
        return [
            (bool(where), mode, part[0].text if mode == "messages" else list(part)) for where, mode, part in streamed
        ]

    without = shown(RunAheadMiddleware([made]))
    assert any("inner" in part for _, mode, part in without if mode == "messages")
    assert shown(ahead) == without
    assert (ahead.ledger.counts.started, ahead.ledger.counts.used) == (1, 0)
    assert of in ahead.refused["look_up"]
    run(create_agent(ScriptedChat(answer=answer), [made], middleware=[ahead]))
    assert ahead.ledger.counts.started == 1


def test_instrumentation_around_create_agent_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    made = factory.create_agent
    monkeypatch.setattr(factory, "create_agent", functools.wraps(made)(functools.partial(made)))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    tools = list(Desk().tools().values())
    factory.create_agent(ScriptedChat(answer=script(calls(W7), AIMessage("ok"))), tools, middleware=[ahead]).invoke(
        ASKED
    )
    assert ahead.ledger.counts.used == 1


def test_a_request_that_lost_its_run_is_answered_as_ever(run: Run) -> None:
    """Middleware outside may make a new request, as LangChain's own tests do; nothing says then whose turn it is."""

    class Replacing(AgentMiddleware):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(ModelRequest(model=request.model, messages=request.messages, tools=request.tools))

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(ModelRequest(model=request.model, messages=request.messages, tools=request.tools))

    ahead, answer = RunAheadMiddleware(READS, predict=in_turns([W7])), script(calls(W7), AIMessage("ok"))
    assert transcript(run(agent_of(Desk(), answer, Replacing(), ahead))) == plain(answer)
    assert ahead.ledger.counts.started == 0


def gossip() -> ScriptedChat:
    """Another model, which writes a call that the agent's model does not make."""
    return ScriptedChat(answer=script(calls(W8)))


class Composed(ScriptedChat):
    """An agent's model that asks another one before it answers."""

    other: Any

    def _generate(self, messages: Any, *given: Any, **named: Any) -> Any:
        list(self.other.stream(messages))
        return super()._generate(messages, *given, **named)

    def _stream(self, messages: Any, *given: Any, **named: Any) -> Any:
        list(self.other.stream(messages))
        yield from super()._stream(messages, *given, **named)


class Asking(AgentMiddleware):
    """Asks another model, in the same words and with the same tools, before or after the agent's."""

    def __init__(self, other: Any, when: str) -> None:
        super().__init__()
        self.other, self.when = other, when

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        if self.when == "before":
            list(self.other.bind_tools(request.tools).stream(request.messages))
        response = handler(request)
        if self.when == "after":
            list(self.other.bind_tools(request.tools).stream(request.messages))
        return response

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        if self.when == "before":
            [chunk async for chunk in self.other.bind_tools(request.tools).astream(request.messages)]
        response = await handler(request)
        if self.when == "after":
            [chunk async for chunk in self.other.bind_tools(request.tools).astream(request.messages)]
        return response


@pytest.mark.parametrize(
    "where", ["inside the agent's model", "in middleware before", "in middleware after", "in predict="]
)
def test_another_model_is_not_heard_as_the_agent_s(run: Run, where: str) -> None:
    desk, answer = Desk(), script(AIMessage("ok"))
    others, predict = [], None
    model = ScriptedChat(answer=answer)
    if where.startswith("inside"):
        model = Composed(answer=answer, other=gossip())
    elif where.startswith("in middleware"):
        others = [Asking(gossip(), where.rsplit(" ", 1)[-1])]
    else:
        predict = lambda state: list(gossip().stream("what next?")) and []  # noqa: E731
    ahead = RunAheadMiddleware(READS, listen=True, harmless=others, predict=predict)
    agent = create_agent(model, list(desk.tools().values()), middleware=[ahead, *others])
    run(agent)
    assert (ahead.ledger.counts.started, desk.read) == (0, [])


def test_the_agent_s_own_model_is_heard_though_it_asks_another() -> None:
    ahead = RunAheadMiddleware(READS, listen=True)
    model = Composed(answer=script(calls(W7), AIMessage("ok")), other=gossip())
    create_agent(model, list(Desk().tools().values()), middleware=[ahead]).invoke(ASKED)
    assert ahead.ledger.counts.by_source == {"stream": [1, 1]}
