"""Results of runs ahead in agents: used for equal calls alone, void after changes, never in anybody else's hands.

Also what others see of runs ahead (streams, callbacks, tools), and what starts one.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from helpers.run_ahead_agents import (
    ASKED,
    CHANGE,
    READS,
    W7,
    W8,
    Run,
    agent_of,
    agent_on,
    in_turns,
    join_runs_ahead,
    once,
    plain,
    reading,
    saying,
)
from helpers.scripted_agents import Desk, ScriptedChat, call, last_result, script, transcript
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, wrap_tool_call
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool, ToolException
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config, get_stream_writer
from langgraph.runtime import get_runtime
from langgraph.types import Command, interrupt

from precedent.errors import ConfigError
from precedent_run_ahead import RunAheadMiddleware

FLAG = "precedent_run_ahead"
CUSTOMER = call("customer", customer="W7")
ONE_BY_ONE = {"max_concurrency": 1}
THREAD = {"configurable": {"thread_id": "1"}}


@pytest.mark.parametrize(
    ("turns", "predicted", "used", "discarded"),
    [
        ([[W7]], [W7], 1, {}),
        ([[W8]], [W7, CUSTOMER], 0, {"not asked for": 2}),
        ([[W8, W7, CUSTOMER, call("look_up", 2, order="W7")]], [W7, W8], 2, {}),
        ([[W8], [W7]], [W7], 1, {}),
        ([[CHANGE], [W7]], [W7], 0, {"changed": 1}),
    ],
    ids=["right", "wrong", "several at once", "right in a later turn", "a change before"],
)
def test_a_result_is_used_for_an_equal_call_alone(
    run: Run, turns: Any, predicted: Any, used: int, discarded: dict[str, int]
) -> None:
    desk, answer = Desk(), saying(*turns)
    ahead = RunAheadMiddleware(READS, predict=in_turns(predicted))
    began = once(lambda: len(desk.read) >= len(predicted), answer)
    assert transcript(run(agent_of(desk, began, ahead))) == plain(answer)
    join_runs_ahead()  # what nobody asked for may still be running when the agent ends
    assert (ahead.ledger.counts.used, ahead.ledger.counts.discarded) == (used, discarded)
    reads = sum(one["name"] in READS for turn in turns for one in turn)
    assert len(desk.read) == reads + sum(discarded.values()), "what was used is not read again"


def test_a_change_and_a_read_in_one_answer_leave_no_stale_result() -> None:
    """One at a time: the reading comes after the change, so it must not be the one from before."""
    answer, ahead = saying([CHANGE, W7]), RunAheadMiddleware(READS, predict=in_turns([W7]))
    found = agent_of(Desk(), answer, ahead).invoke(ASKED, ONE_BY_ONE)["messages"]
    assert transcript(found) == plain(answer, config=ONE_BY_ONE)


@pytest.mark.parametrize("how", ["raises", "says so", "wrong arguments"])
def test_an_error_of_a_run_ahead_is_thrown_away_and_the_call_is_made_again(run: Run, how: str) -> None:
    read: list[str] = []

    def act(order: str) -> str:
        read.append(order)
        if len(read) == 1 and how != "wrong arguments":
            raise ToolException("down") if how == "says so" else ConnectionError("down")
        return f"{order} is open"

    predicted = call("look_up", wrong="W7") if how == "wrong arguments" else W7
    ahead = RunAheadMiddleware(["look_up"], predict=in_turns([predicted]))
    found = run(agent_on([reading(act, handle_tool_error=True)], saying(W7), ahead))
    assert (found[-2].content, found[-2].status) == ("W7 is open", "success")
    assert ahead.ledger.counts.used == 0


def test_a_command_found_at_run_time_is_thrown_away_and_the_tool_refused(run: Run) -> None:
    made = reading(lambda order: Command(update={"messages": [ToolMessage("moved", tool_call_id=W7["id"])]}))
    ahead = RunAheadMiddleware([made], predict=lambda state: [W7])
    agent = agent_on([made], saying(W7), ahead)
    assert [message.content for message in run(agent)[-2:]] == ["moved", "ok"]
    run(agent)
    assert (ahead.ledger.counts.started, ahead.ledger.counts.used) == (1, 0)
    assert "Command" in ahead.refused["look_up"]


def test_an_interrupt_in_a_tool_asks_once_and_is_answered_once(run: Run) -> None:
    made = reading(lambda order: f"{order}: {interrupt('may I?')}")
    ahead = RunAheadMiddleware([made], predict=in_turns([W7]))
    agent = agent_on([made], saying(W7), ahead, checkpointer=InMemorySaver())
    run(agent, config=THREAD)
    assert len(agent.get_state(THREAD).interrupts) == 1
    found = run(agent, Command(resume="yes"), config=THREAD)
    assert [message.content for message in found[-2:]] == ["W7: yes", "ok"]
    assert "graph" in ahead.refused["look_up"]


def test_a_resumed_graph_starts_without_pending_results(run: Run) -> None:
    desk, ask = Desk(), reading(lambda order: str(interrupt(order)), "ask")
    ahead = RunAheadMiddleware([*READS, "ask"], predict=in_turns([W7]))
    answer = once(lambda: desk.read, saying(call("ask", order="now?"), W7))
    agent = agent_on([*desk.tools().values(), ask], answer, ahead, checkpointer=InMemorySaver())
    run(agent, config=THREAD)
    assert "ask" not in ahead.refused
    run(agent, Command(resume="yes"), config=THREAD)
    assert ahead.ledger.counts.used == 0
    assert desk.read == [("look_up", "W7"), ("look_up", "W7")]


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_other_middleware_works_on_the_call_and_its_result_once(place: str) -> None:
    """It sees a run ahead as it sees any call; what it does to a result is done once to the one that is used."""

    @wrap_tool_call
    def marking(request: Any, handler: Any) -> Any:
        result = handler(request.override(tool_call={**request.tool_call, "args": {"order": "W9"}}))
        return result.model_copy(update={"content": f"[{result.content}]"})

    desk, ahead = Desk(), RunAheadMiddleware(READS, predict=in_turns([W7]), harmless=[marking])
    order = [marking, ahead] if place == "outside" else [ahead, marking]
    found = agent_of(desk, once(lambda: desk.read, saying(W7)), *order).invoke(ASKED)["messages"]
    assert transcript(found) == transcript(agent_of(Desk(), saying(W7), marking).invoke(ASKED)["messages"])
    assert ahead.ledger.counts.used == 1


class Rerouting(AgentMiddleware):
    """Sends every call to another tool."""

    def __init__(self, tool: Any) -> None:
        super().__init__()
        self.tool = tool

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(tool=self.tool))

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(tool=self.tool))


@pytest.mark.parametrize("listed", [True, False], ids=["to a listed tool", "to an unlisted tool"])
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_call_that_other_middleware_sends_to_another_tool_runs_once(run: Run, place: str, listed: bool) -> None:
    """A run ahead goes where the real call goes, if that tool may run ahead as well; the tool is called once."""
    ran: list[tuple[str, bool]] = []
    asked = threading.Event()

    def tool(name: str) -> StructuredTool:
        return reading(lambda order: ran.append((name, asked.is_set())) or f"{name} {order}", name)  # type: ignore[func-returns-value]

    tools = [tool("look_up"), tool("other")]
    rerouting = Rerouting(tools[1])
    allow = ["look_up", "other"] if listed else ["look_up"]
    ahead = RunAheadMiddleware(allow, predict=in_turns([W7]), harmless=[rerouting])
    order = [rerouting, ahead] if place == "outside" else [ahead, rerouting]
    answer = once(lambda: ran or not listed, lambda messages: asked.set() or saying(W7)(messages))  # type: ignore[func-returns-value]
    found = run(agent_on(tools, answer, *order))
    join_runs_ahead()
    assert found[-2].content == "other W7"
    assert [name for name, _ in ran] == ["other"]
    assert ahead.ledger.counts.used == listed
    if not listed:
        assert ran == [("other", True)]
        assert "'other'" in ahead.refused["look_up"]


def test_a_call_that_is_sent_to_an_unlisted_tool_counts_as_a_change() -> None:
    """Nobody knows what that tool did: what was read before it is void."""
    tools = Desk().tools()

    @wrap_tool_call
    def changing(request: Any, handler: Any) -> Any:
        return handler(request.override(tool=tools["change"]) if request.tool.name == "look_up" else request)

    customer = call("customer", customer="C7")
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7], [customer]), harmless=[changing])
    agent = agent_on(list(tools.values()), saying(W7, [W7, customer]), ahead, changing)
    found = agent.invoke(ASKED, ONE_BY_ONE)["messages"]
    assert json.loads(found[-2].content)["version"] == 2
    assert ahead.ledger.counts.used == 0


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
    turns, pause = in_turns([W7], [W8]), threading.Event()

    def predict(state: Any) -> list[dict[str, Any]]:
        """The second call once it is known what is inside the first, whose thread may be late."""
        found = turns(state)
        for _ in range(1000 if found == [W8] and not ahead.refused else 0):
            if ahead.refused or pause.wait(0.01):
                break
        return found

    ahead = RunAheadMiddleware([made], predict=predict)

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


def test_nothing_starts_while_a_change_of_another_run_is_in_flight() -> None:
    changing, go_on = threading.Event(), threading.Event()

    def change(order: str) -> str:
        changing.set()
        assert go_on.wait(30)
        return "changed"

    def chosen(messages: Any) -> AIMessage:
        return saying(CHANGE if messages[0].content == "change it" else W7)(messages)

    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    agent = agent_on([*list(Desk().tools().values())[:2], reading(change, "change")], chosen, ahead)
    other = threading.Thread(target=agent.invoke, args=({"messages": [HumanMessage("change it")]},))
    other.start()
    assert changing.wait(30)
    started = ahead.ledger.counts.started
    agent.invoke(ASKED)
    assert ahead.ledger.counts.started == started
    go_on.set()
    other.join()
    agent.invoke(ASKED)
    assert ahead.ledger.counts.used == 1


def test_a_tool_that_always_fails_fails_as_it_would(run: Run) -> None:
    ahead = RunAheadMiddleware(["look_up"], predict=in_turns([W7]))
    with pytest.raises(ZeroDivisionError):
        run(agent_on([reading(lambda order: 1 / 0)], saying(W7), ahead))


def test_a_result_that_other_middleware_made_another_call_s_is_not_used() -> None:
    """The real call is held where our middleware stands until the run ahead, which is still outside of it, goes on."""
    go_on = threading.Event()

    @wrap_tool_call
    def rewriting(request: Any, handler: Any) -> Any:
        if request.tool_call["id"].startswith("run-ahead"):
            assert go_on.wait(30)
            return handler(request.override(tool_call={**request.tool_call, "args": {"order": "W9"}}))
        threading.Timer(0.2, go_on.set).start()
        return handler(request)

    ahead = RunAheadMiddleware(["look_up"], predict=in_turns([W7]), harmless=[rewriting])
    found = agent_on([reading(lambda order: order)], saying(W7), rewriting, ahead).invoke(ASKED)["messages"]
    assert found[-2].content == "W7"
    assert ahead.ledger.counts.used == 0
