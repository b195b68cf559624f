"""Which tools run ahead: those on the list, of those the ones that fit, and in which company."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from helpers.run_ahead_agents import ASKED, W7, WAYS, agent_of, agent_on, reading, saying, way
from helpers.scripted_agents import Desk, call, transcript
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    ToolRetryMiddleware,
    wrap_model_call,
    wrap_tool_call,
)
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, InjectedStore, ToolRuntime
from langgraph.types import Command, interrupt

from precedent.errors import ConfigError, UnsupportedError
from precedent_run_ahead import RunAheadMiddleware, read_only


def run(ahead: RunAheadMiddleware, *others: Any, desk: Desk | None = None, tools: Any = None, **options: Any) -> Any:
    """An agent's run with this middleware last."""
    tools = list((desk or Desk()).tools().values()) if tools is None else tools
    agent = agent_on(tools, saying(W7), *others, ahead, **options)
    return agent.invoke(ASKED, {"configurable": {"thread_id": "1"}})


def predicting(*allow: Any, **settings: Any) -> RunAheadMiddleware:
    """The middleware with a predictor that knows the script's first answer."""
    return RunAheadMiddleware(allow, predict=lambda state: [W7] if len(state["messages"]) == 1 else [], **settings)


def started(ahead: RunAheadMiddleware) -> int:
    return ahead.ledger.counts.started


def test_only_a_tool_on_the_list_runs_ahead_listed_as_an_object_or_by_its_name() -> None:
    tools = Desk().tools()
    counts = []
    for allowed in (tools["look_up"], "look_up", tools["customer"], Desk().tools()["look_up"]):
        ahead = predicting(allowed)
        run(ahead, tools=list(tools.values()))
        counts.append(started(ahead))
    assert counts == [1, 1, 0, 0]
    with pytest.raises(ConfigError, match="names of tools, got 7"):
        RunAheadMiddleware([7])  # type: ignore[list-item]


@read_only
@tool
def above(order: str) -> str:
    """Look up."""
    return order


@tool
@read_only
def below(order: str) -> str:
    """Look up."""
    return order


@read_only(arguments_from_tools=True)
@tool
def open_to_tools(order: str) -> str:
    """Look up."""
    return order


@read_only
class OwnClass(BaseTool):
    """A tool of one's own class."""

    name: str = "own_class"
    description: str = "Look up."

    def _run(self, order: str) -> str:
        return order


@pytest.mark.parametrize("marked", [above, below, open_to_tools, OwnClass()], ids=lambda one: one.name)
def test_the_decorator_puts_a_tool_on_the_list(marked: BaseTool) -> None:
    wanted = call(marked.name, order="W7")
    ahead = RunAheadMiddleware(predict=lambda state: [wanted])
    agent_on([marked], saying(wanted), ahead).invoke(ASKED)
    assert ahead.ledger.counts.used == 1


@pytest.mark.parametrize("key", ["readOnlyHint", "read_only_hint", "__precedent_read_only__", "READ_ONLY"])
def test_an_mcp_server_s_hint_counts_only_where_hints_are_trusted_and_passes_for_no_mark(key: str) -> None:
    careful, trusting = predicting(), predicting(trust_hints=True)
    for ahead in (careful, trusting):
        run(ahead, tools=[reading(Desk().look_up, metadata={key: True})])
    assert (started(careful), started(trusting)) == (0, key in ("readOnlyHint", "read_only_hint"))


def with_state(order: str, state: Annotated[dict, InjectedState]) -> str: ...
def with_store(order: str, store: Annotated[Any, InjectedStore()]) -> str: ...
def with_runtime(order: str, runtime: ToolRuntime) -> str: ...
def with_maybe(order: str, runtime: ToolRuntime | None = None) -> str: ...
def with_deep(order: str, state: list[Annotated[dict, InjectedState]] | None = None) -> str: ...
def with_call_id(order: str, number: Annotated[str, InjectedToolCallId]) -> str: ...
def to_command(order: str) -> Command: ...
def to_commands(order: str) -> str | Command[Any]: ...


UNFIT = [with_state, with_store, with_runtime, with_maybe, with_deep, with_call_id, to_command, to_commands]


@pytest.mark.parametrize("function", UNFIT, ids=lambda one: one.__name__)
@pytest.mark.parametrize("wrapped", [lambda one: one, functools.partial], ids=["plain", "partial"])
def test_a_tool_that_takes_more_than_arguments_or_commands_is_refused_by_name(
    function: Callable[..., Any], wrapped: Callable[..., Any]
) -> None:
    made = StructuredTool.from_function(function, name=function.__name__, description="A tool.")
    made.func = wrapped(function)
    with pytest.raises(UnsupportedError, match=function.__name__):
        RunAheadMiddleware([made])


def test_other_tools_that_do_not_fit_are_refused_by_name() -> None:
    """A schema of its own does not hide what a function takes."""
    schema = Desk().tools()["look_up"].args_schema
    hiding = StructuredTool.from_function(with_runtime, name="hiding", description="A tool.", args_schema=schema)
    for made, says in ((reading(Desk().look_up, return_direct=True), r"look_up.*directly"), (hiding, "hiding")):
        with pytest.raises(UnsupportedError, match=says):
            RunAheadMiddleware([made])


def test_a_tool_that_is_listed_by_its_name_is_refused_when_it_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    def look_up(order: str, state: Annotated[dict, InjectedState]) -> str:
        """Look up."""
        return f"{order} of {len(state['messages'])}"

    ahead = predicting("look_up")
    with caplog.at_level(logging.WARNING):
        run(ahead, tools=[look_up])
    assert (started(ahead), ahead.refused.keys()) == (0, {"look_up"})
    assert "'look_up'" in caplog.text


@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_a_tool_under_human_approval_does_not_run_ahead_and_others_do(mode: Any) -> None:
    desk, ahead, other = Desk(), predicting("look_up"), predicting("look_up")
    asking = [HumanInTheLoopMiddleware({name: True}, interrupt_mode=mode) for name in ("look_up", "change")]
    assert run(ahead, asking[0], desk=desk, checkpointer=InMemorySaver())["__interrupt__"]
    assert (started(ahead), desk.read) == (0, [])
    assert "person" in ahead.refused["look_up"]
    run(other, asking[1], checkpointer=InMemorySaver())
    assert started(other) == 1


STOPS = [{"interrupt_before": ["tools"]}, {"interrupt_after": ["model"]}]


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("how", [*WAYS, "of the agent", "set on the agent", "in a graph"])
def test_nothing_runs_ahead_in_an_invocation_that_stops_for_somebody(how: str, stop: dict[str, Any]) -> None:
    """The next invocation of the same agent, without a stop, runs ahead as ever."""
    desk, ahead = Desk(), predicting("look_up")
    agent = agent_of(desk, saying(W7), ahead, checkpointer=InMemorySaver())
    threads = [{"configurable": {"thread_id": str(number)}} for number in range(2)]
    if how == "of the agent":
        run(ahead, desk=desk, checkpointer=InMemorySaver(), **stop)
    elif how == "set on the agent":
        agent.copy({f"{name}_nodes": nodes for name, nodes in stop.items()}).invoke(ASKED, threads[0])
    elif how == "in a graph":
        outer = StateGraph(MessagesState)
        outer.add_node("desk", lambda state: agent.invoke(state, **stop))
        outer.add_edge(START, "desk")
        outer.compile(checkpointer=InMemorySaver()).invoke(ASKED, threads[0])
    else:
        way(how)(agent, config=threads[0], **stop)
    assert (started(ahead), desk.read) == (0, [])
    assert "interrupt_before" in ahead.refused["*"]
    agent.invoke(ASKED, threads[1])
    assert ahead.ledger.counts.used == 1


def test_nothing_runs_ahead_in_a_graph_that_shows_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A LangGraph that keeps its loop elsewhere leads to a warning, not to a call that somebody wanted to see first."""
    from langgraph.pregel import _runner

    monkeypatch.setattr(_runner, "CONFIG_KEY_CALL", "__moved")
    ahead = predicting("look_up")
    run(ahead)
    assert started(ahead) == 0
    assert "LangGraph" in ahead.refused["*"]


@wrap_model_call
def approving(request: Any, handler: Any) -> Any:
    """Lets somebody decide about the calls of an answer."""
    response = handler(request)
    if response.result[0].tool_calls:
        interrupt("may I?")
    return response


@wrap_tool_call
def guard(request: Any, handler: Any) -> Any:
    """Might block."""
    return handler(request)


class AfterModel(AgentMiddleware):
    """Might block."""

    def after_model(self, state: Any, runtime: Any) -> None:
        return None


class LaxRetry(ToolRetryMiddleware):
    """May do anything, whatever it is derived from."""


@pytest.mark.parametrize("inside", [False, True])
def test_nothing_runs_ahead_beside_a_model_call_that_may_be_interrupted(inside: bool) -> None:
    desk, ahead = Desk(), predicting("look_up")
    order = [ahead, approving] if inside else [approving, ahead]
    agent = agent_of(desk, saying(W7), *order, checkpointer=InMemorySaver())
    assert agent.invoke(ASKED, {"configurable": {"thread_id": "1"}})["__interrupt__"]
    assert (started(ahead), desk.read) == (0, [])


@pytest.mark.parametrize("other", [guard, AfterModel(), LaxRetry()], ids=["wrap_tool_call", "after_model", "subclass"])
def test_nothing_runs_ahead_beside_middleware_that_might_block_a_call(other: Any) -> None:
    careful, told = predicting("look_up"), predicting("look_up", harmless=[other])
    of_class = predicting("look_up", harmless=[type(other)])
    for ahead in (careful, told, of_class):
        run(ahead, other)
    assert (started(careful), started(told), started(of_class)) == (0, 1, 1)
    assert other.name in careful.refused["*"]


@pytest.mark.parametrize(
    "other", [ToolRetryMiddleware(), TodoListMiddleware(), ModelCallLimitMiddleware(run_limit=9)], ids=lambda o: o.name
)
def test_middleware_that_is_known_to_be_harmless_is_no_hindrance(other: Any) -> None:
    ahead = predicting("look_up")
    run(ahead, other)
    assert ahead.ledger.counts.used == 1


@pytest.mark.parametrize("limit", [1, 0])
@pytest.mark.parametrize("of", ["look_up", None])
def test_a_call_over_a_limit_does_not_run_ahead(limit: int, of: str | None) -> None:
    limits = ToolCallLimitMiddleware(tool_name=of, run_limit=limit)
    desk, ahead = Desk(), predicting("look_up")
    found = run(ahead, limits, desk=desk)
    assert (started(ahead), len(desk.read)) == (limit, limit)
    alone = agent_of(Desk(), saying(W7), limits).invoke(ASKED)
    assert transcript(found["messages"]) == transcript(alone["messages"])


def test_outside_of_create_agent_it_says_that_it_does_not_know_its_agent() -> None:
    with pytest.raises(UnsupportedError, match="create_agent"):
        predicting("look_up").wrap_model_call(None, None)


@wrap_model_call
def without_tools(request: Any, handler: Any) -> Any:
    """Takes a tool away."""
    return handler(request.override(tools=[one for one in request.tools if one.name != "look_up"]))


@pytest.mark.parametrize("behind", [False, True])
def test_middleware_that_may_take_a_tool_or_a_call_away_must_be_declared(behind: bool) -> None:
    careful, told = predicting("look_up"), predicting("look_up", harmless=[without_tools])
    for ahead in (careful, told):
        agent_of(Desk(), saying(), *([ahead, without_tools] if behind else [without_tools, ahead])).invoke(ASKED)
    assert told.refused == {}
    assert (started(careful), started(told)) == (0, behind), "in front it has taken the tool away"
    assert not behind or "without_tools" in careful.refused["*"]
