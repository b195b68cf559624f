"""Results of runs ahead in agents: used for equal calls alone, void after changes, never in anybody else's hands."""

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
    plain,
    reading,
    saying,
)  # fmt: skip
from helpers.scripted_agents import Desk, call, transcript
from langchain.agents.middleware import AgentMiddleware, wrap_tool_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool, ToolException
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from precedent_run_ahead import RunAheadMiddleware

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
    assert transcript(run(agent_of(desk, answer, ahead))) == plain(answer)
    assert (ahead.ledger.counts.used, ahead.ledger.counts.discarded) == (used, discarded)
    reads = sum(one["name"] in READS for turn in turns for one in turn)
    assert len(desk.read) == reads + sum(discarded.values()), "what was used is not read again"


def test_a_change_and_a_read_in_one_answer_leave_no_stale_result() -> None:
    """One at a time: the reading comes after the change, so it must not be the one from before."""
    answer, ahead = saying([CHANGE, W7]), RunAheadMiddleware(READS, predict=in_turns([W7]))
    found = agent_of(Desk(), answer, ahead).invoke(ASKED, ONE_BY_ONE)["messages"]
    assert transcript(found) == plain(answer, config=ONE_BY_ONE)


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


def test_a_tool_that_always_fails_fails_as_it_would(run: Run) -> None:
    ahead = RunAheadMiddleware(["look_up"], predict=in_turns([W7]))
    with pytest.raises(ZeroDivisionError):
        run(agent_on([reading(lambda order: 1 / 0)], saying(W7), ahead))


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
    answer = saying(call("ask", order="now?"), W7)
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

    def found(*middleware: Any) -> Any:
        return transcript(agent_of(Desk(), saying(W7), *middleware).invoke(ASKED)["messages"])

    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]), harmless=[marking])
    assert found(*([marking, ahead] if place == "outside" else [ahead, marking])) == found(marking)
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
    found = run(agent_on(tools, lambda messages: asked.set() or saying(W7)(messages), *order))  # type: ignore[func-returns-value]
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
