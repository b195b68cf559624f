"""Results of runs ahead in agents: used for equal calls alone, void after changes, never in anybody else's hands."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from helpers.run_ahead_agents import ASKED, CHANGE, READS, W7, W8, Run, agent_of, in_turns, join_runs_ahead, plain
from helpers.scripted_agents import Desk, ScriptedChat, call, calls, script, transcript
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, wrap_tool_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool, ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from precedent_run_ahead import RunAheadMiddleware

CUSTOMER = call("customer", customer="W7")


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
    desk, answer = Desk(), script(*(calls(*turn) for turn in turns), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns(predicted))
    assert transcript(run(agent_of(desk, answer, ahead))) == plain(answer)
    assert (ahead.ledger.counts.used, ahead.ledger.counts.discarded) == (used, discarded)
    reads = sum(one["name"] in READS for turn in turns for one in turn)
    assert len(desk.read) == reads + sum(discarded.values()), "what was used is not read again"


def test_a_change_and_a_read_in_one_answer_leave_no_stale_result() -> None:
    """One at a time: the reading comes after the change, so it must not be the one from before."""
    answer = script(calls(CHANGE, W7), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    one_by_one = {"config": {"max_concurrency": 1}}
    found = agent_of(Desk(), answer, ahead).invoke(ASKED, **one_by_one)["messages"]
    assert transcript(found) == plain(answer, **one_by_one)


def test_nothing_starts_while_a_change_of_another_run_is_in_flight() -> None:
    changing, go_on = threading.Event(), threading.Event()

    @tool
    def change(order: str) -> str:
        """Change."""
        changing.set()
        assert go_on.wait(30)
        return "changed"

    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    reads = list(Desk().tools().values())[:2]

    def chosen(messages: Any) -> AIMessage:
        turns = [calls(CHANGE)] if messages[0].content == "change it" else [calls(W7)]
        return script(*turns, AIMessage("done"))(messages)

    agent = create_agent(ScriptedChat(answer=chosen), [*reads, change], middleware=[ahead])
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


def test_void_is_for_changes_outside_of_the_agent(run: Run) -> None:
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))

    def voiding(messages: Any) -> AIMessage:
        ahead.ledger.void()
        return script(calls(W7), AIMessage("open"))(messages)

    run(agent_of(Desk(), voiding, ahead))
    assert ahead.ledger.counts.used == 0


@pytest.mark.parametrize("how", ["raises", "says so", "wrong arguments"])
def test_an_error_of_a_run_ahead_is_thrown_away_and_the_call_is_made_again(run: Run, how: str) -> None:
    read: list[str] = []

    def look_up(order: str) -> str:
        """Look up."""
        read.append(order)
        if len(read) == 1 and how != "wrong arguments":
            raise ToolException("down") if how == "says so" else ConnectionError("down")
        return f"{order} is open"

    made = StructuredTool.from_function(look_up, handle_tool_error=True)
    predicted = call("look_up", wrong="W7") if how == "wrong arguments" else W7
    ahead = RunAheadMiddleware([made], predict=in_turns([predicted]))
    agent = create_agent(ScriptedChat(answer=script(calls(W7), AIMessage("ok"))), [made], middleware=[ahead])
    found = run(agent)
    assert found[-2].content == "W7 is open"
    assert found[-2].status == "success"
    assert ahead.ledger.counts.used == 0


def test_a_tool_that_always_fails_fails_as_it_would(run: Run) -> None:
    made = StructuredTool.from_function(lambda order: 1 / 0, name="look_up", description="Look up.")
    ahead = RunAheadMiddleware([made], predict=in_turns([W7]))
    agent = create_agent(ScriptedChat(answer=script(calls(W7), AIMessage("ok"))), [made], middleware=[ahead])
    with pytest.raises(ZeroDivisionError):
        run(agent)


def test_a_command_found_at_run_time_is_thrown_away_and_the_tool_refused(run: Run) -> None:
    def look_up(order: str) -> Any:
        """Look up."""
        return Command(update={"messages": [ToolMessage("moved", tool_call_id=W7["id"])]})

    made = StructuredTool.from_function(look_up)
    ahead = RunAheadMiddleware([made], predict=lambda state: [W7])
    agent = create_agent(ScriptedChat(answer=script(calls(W7), AIMessage("ok"))), [made], middleware=[ahead])
    found = run(agent)
    assert [message.content for message in found[-2:]] == ["moved", "ok"]
    assert (ahead.ledger.counts.started, ahead.ledger.counts.used) == (1, 0)
    assert "Command" in ahead.refused["look_up"]
    run(agent)
    assert ahead.ledger.counts.started == 1


def test_an_interrupt_in_a_tool_asks_once_and_is_answered_once(run: Run) -> None:
    asked: list[str] = []

    def look_up(order: str) -> str:
        """Look up."""
        asked.append(order)
        return f"{order}: {interrupt('may I?')}"

    made = StructuredTool.from_function(look_up)
    ahead = RunAheadMiddleware([made], predict=in_turns([W7]))
    answer = script(calls(W7), AIMessage("ok"))
    agent = create_agent(ScriptedChat(answer=answer), [made], middleware=[ahead], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    run(agent, config=config)
    assert len(agent.get_state(config).interrupts) == 1
    found = run(agent, Command(resume="yes"), config=config)
    assert [message.content for message in found[-2:]] == ["W7: yes", "ok"]
    assert "graph" in ahead.refused["look_up"]


def test_a_resumed_graph_starts_without_pending_results(run: Run) -> None:
    @tool
    def ask(question: str) -> str:
        """Ask somebody."""
        return str(interrupt(question))

    desk = Desk()
    answer = script(calls(call("ask", question="now?")), calls(W7), AIMessage("ok"))
    ahead = RunAheadMiddleware([*READS, "ask"], predict=in_turns([W7]))
    tools = [*desk.tools().values(), ask]
    agent = create_agent(ScriptedChat(answer=answer), tools, middleware=[ahead], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    run(agent, config=config)
    assert "ask" not in ahead.refused
    run(agent, Command(resume="yes"), config=config)
    assert ahead.ledger.counts.used == 0
    assert desk.read == [("look_up", "W7"), ("look_up", "W7")]


def test_a_result_does_not_pass_from_one_run_to_another() -> None:
    desk, answer = Desk(), script(AIMessage("nothing"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    agent_of(desk, answer, ahead).invoke(ASKED)
    agent_of(desk, script(calls(W7), AIMessage("ok")), ahead).invoke({"messages": [AIMessage("hi"), HumanMessage("?")]})
    assert ahead.ledger.counts.used == 0


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_other_middleware_works_on_the_call_and_its_result_once(place: str) -> None:
    """It sees a run ahead as it sees any call; what it does to a result is done once to the one that is used."""
    seen: list[str] = []

    @wrap_tool_call
    def marking(request: Any, handler: Any) -> Any:
        seen.append(request.tool_call["args"]["order"])
        changed = request.override(tool_call={**request.tool_call, "args": {"order": "W9"}})
        result = handler(changed)
        return result.model_copy(update={"content": f"[{result.content}]"})

    def found(*middleware: Any) -> Any:
        return agent_of(Desk(), script(calls(W7), AIMessage("ok")), *middleware).invoke(ASKED)["messages"]

    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]), harmless=[marking])
    order = [marking, ahead] if place == "outside" else [ahead, marking]
    assert transcript(found(*order)) == transcript(found(marking))
    assert ahead.ledger.counts.used == 1


@pytest.mark.parametrize("listed", [True, False], ids=["to a listed tool", "to an unlisted tool"])
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_call_that_other_middleware_sends_to_another_tool_runs_once(run: Run, place: str, listed: bool) -> None:
    """A run ahead goes where the real call goes, if that tool may run ahead as well; the tool is called once."""
    ran: list[tuple[str, bool]] = []
    asked = threading.Event()

    def other(order: str) -> str:
        """Do something else."""
        ran.append(("other", asked.is_set()))
        return f"other {order}"

    def look_up(order: str) -> str:
        """Look up."""
        ran.append(("look_up", asked.is_set()))
        return order

    tools = [StructuredTool.from_function(one) for one in (look_up, other)]

    class Rerouting(AgentMiddleware):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(tool=tools[1]))

        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(tool=tools[1]))

    def answer(messages: Any) -> AIMessage:
        asked.set()
        return script(calls(W7), AIMessage("ok"))(messages)

    rerouting = Rerouting()
    allow = ["look_up", "other"] if listed else ["look_up"]
    ahead = RunAheadMiddleware(allow, predict=in_turns([W7]), harmless=[rerouting])
    order = [rerouting, ahead] if place == "outside" else [ahead, rerouting]
    found = run(create_agent(ScriptedChat(answer=answer), tools, middleware=order))
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

    answer = script(calls(W7), calls(W7, call("customer", customer="C7")), AIMessage("ok"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7], [call("customer", customer="C7")]), harmless=[changing])
    middleware = [ahead, changing]
    one_by_one = {"max_concurrency": 1}
    agent = create_agent(ScriptedChat(answer=answer), list(tools.values()), middleware=middleware)
    found = agent.invoke(ASKED, one_by_one)["messages"]
    assert json.loads(found[-2].content)["version"] == 2
    assert ahead.ledger.counts.used == 0


def test_a_result_that_other_middleware_made_another_call_s_is_not_used() -> None:
    """The real call is held where our middleware stands until the run ahead, which is still outside of it, goes on."""
    go_on, read = threading.Event(), list[str]()

    def look_up(order: str) -> str:
        """Look up."""
        read.append(order)
        return order

    made = StructuredTool.from_function(look_up)

    @wrap_tool_call
    def rewriting(request: Any, handler: Any) -> Any:
        if request.tool_call["id"].startswith("run-ahead"):
            assert go_on.wait(30)
            return handler(request.override(tool_call={**request.tool_call, "args": {"order": "W9"}}))
        threading.Timer(0.2, go_on.set).start()
        return handler(request)

    ahead = RunAheadMiddleware([made], predict=in_turns([W7]), harmless=[rewriting])
    answer = script(calls(W7), AIMessage("ok"))
    found = create_agent(ScriptedChat(answer=answer), [made], middleware=[rewriting, ahead]).invoke(ASKED)["messages"]
    assert found[-2].content == "W7"
    assert ahead.ledger.counts.used == 0
