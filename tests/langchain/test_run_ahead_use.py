"""Results of runs ahead in agents: used for equal calls alone, void after changes, never in anybody else's hands."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.scripted_agents import Desk, ScriptedChat, call, calls, last_result, script, transcript
from langchain.agents import create_agent
from langchain.agents.middleware import ToolRetryMiddleware, wrap_tool_call
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool, ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from precedent.errors import ConfigError
from precedent.langchain import RunAheadMiddleware
from precedent.langchain.run_ahead.running import FLAG

W7, W8 = call("look_up", order="W7"), call("look_up", order="W8")
CHANGE = call("change", order="W7")
ASKED = {"messages": [HumanMessage("W7, please")]}
READS = ("look_up", "customer")

Run = Callable[..., list[Any]]


def in_turns(*predicted: list[dict[str, Any]]) -> Callable[[Any], list[dict[str, Any]]]:
    """A predictor: which calls it names follows from how many answers the state holds."""

    def predict(state: Any) -> list[dict[str, Any]]:
        given = sum(isinstance(message, AIMessage) for message in state["messages"])
        return predicted[given] if given < len(predicted) else []

    return predict


@pytest.fixture(params=["sync", "async", "stream", "astream"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run an agent in one of four ways; returns the messages at its end."""

    def last(states: list[Any]) -> list[Any]:
        return states[-1]["messages"]

    async def streamed(agent: Any, asked: Any, **options: Any) -> list[Any]:
        return [state async for state in agent.astream(asked, stream_mode="values", **options)]

    ways: dict[str, Run] = {
        "sync": lambda agent, asked=ASKED, **options: agent.invoke(asked, **options)["messages"],
        "async": lambda agent, asked=ASKED, **options: asyncio.run(agent.ainvoke(asked, **options))["messages"],
        "stream": lambda agent, asked=ASKED, **o: last(list(agent.stream(asked, stream_mode="values", **o))),
        "astream": lambda agent, asked=ASKED, **options: last(asyncio.run(streamed(agent, asked, **options))),
    }
    return ways[request.param]


def agent_of(desk: Desk, answer: Any, *middleware: Any, **options: Any) -> Any:
    return create_agent(ScriptedChat(answer=answer), list(desk.tools().values()), middleware=middleware, **options)


def plain(answer: Any, **options: Any) -> list[Any]:
    """The messages of the same agent without the middleware."""
    found: list[Any] = agent_of(Desk(), answer).invoke(ASKED, **options)["messages"]
    return transcript(found)


def test_a_predicted_call_is_answered_by_its_run_ahead(run: Run) -> None:
    desk, answer = Desk(), script(calls(W7), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    assert transcript(run(agent_of(desk, answer, ahead))) == plain(answer)
    assert desk.read == [("look_up", "W7")]
    assert ahead.ledger.counts.used == 1


def test_a_wrong_prediction_changes_nothing(run: Run) -> None:
    desk, answer = Desk(), script(calls(W8), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7, call("customer", customer="W7")]))
    assert transcript(run(agent_of(desk, answer, ahead))) == plain(answer)
    counts = ahead.ledger.counts
    assert (counts.started, counts.used, counts.discarded) == (2, 0, {"not asked for": 2})


def test_several_calls_of_one_answer_each_get_their_own(run: Run) -> None:
    made = [W8, W7, call("customer", customer="W7"), call("look_up", 2, order="W7")]
    desk, answer = Desk(), script(calls(*made), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7, W8]))
    assert transcript(run(agent_of(desk, answer, ahead))) == plain(answer)
    assert ahead.ledger.counts.used == 2
    assert sorted(desk.read) == sorted([("look_up", "W7"), ("look_up", "W8"), ("customer", "W7"), ("look_up", "W7")])


def test_a_result_waits_for_a_later_turn(run: Run) -> None:
    desk, answer = Desk(), script(calls(W8), calls(W7), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    assert transcript(run(agent_of(desk, answer, ahead))) == plain(answer)
    assert ahead.ledger.counts.used == 1


def test_a_change_voids_what_was_read_before_it(run: Run) -> None:
    desk, answer = Desk(), script(calls(CHANGE), calls(W7), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    found = run(agent_of(desk, answer, ahead))
    assert json.loads(found[-2].content)["version"] == 1
    assert transcript(found) == plain(answer)
    assert ahead.ledger.counts.discarded == {"changed": 1}


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
    def look_up(order: str) -> str:
        """Look up."""
        raise ConnectionError("down")

    made = StructuredTool.from_function(look_up)
    ahead = RunAheadMiddleware([made], predict=in_turns([W7]))
    agent = create_agent(ScriptedChat(answer=script(calls(W7), AIMessage("ok"))), [made], middleware=[ahead])
    with pytest.raises(ConnectionError, match="down"):
        run(agent)


class Amount(BaseModel):
    """Arguments that may be written in more than one way."""

    order: str
    number: int = 1


@pytest.mark.parametrize(
    ("predicted", "made", "equal"),
    [
        ({"order": "W7"}, {"order": "W7", "number": 1}, True),
        ({"number": "2", "order": "W7"}, {"order": "W7", "number": 2}, True),
        ({"order": "W7", "unknown": 5}, {"order": "W7"}, True),
        ({"order": "W7"}, {"order": "w7"}, False),
        ({"order": "W7"}, {"order": "W7 "}, False),
        ({"order": "W7", "number": 1}, {"order": "W7", "number": 2}, False),
    ],
)
def test_arguments_are_compared_as_the_schema_reads_them(predicted: Any, made: Any, equal: bool) -> None:
    look_up = StructuredTool.from_function(lambda order, number=1: f"{number} {order}", name="look_up",
                                           description="Look up.", args_schema=Amount)  # fmt: skip
    ahead = RunAheadMiddleware([look_up], predict=in_turns([call("look_up", **predicted)]))
    answer = script(calls(call("look_up", **made)), AIMessage("ok"))
    with_it = create_agent(ScriptedChat(answer=answer), [look_up], middleware=[ahead]).invoke(ASKED)
    without = create_agent(ScriptedChat(answer=answer), [look_up]).invoke(ASKED)
    assert ahead.ledger.counts.used == equal
    assert transcript(with_it["messages"]) == transcript(without["messages"])


def test_a_json_schema_s_arguments_are_compared_as_they_are() -> None:
    schema = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    look_up = StructuredTool(name="look_up", description="Look up.", args_schema=schema, func=lambda order: order)
    ahead = RunAheadMiddleware([look_up], predict=in_turns([W7]))
    answer = script(calls(W7), calls(W8), AIMessage("ok"))
    create_agent(ScriptedChat(answer=answer), [look_up], middleware=[ahead]).invoke(ASKED)
    assert ahead.ledger.counts.used == 1


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
    with_change = ahead.ledger.counts.started
    run(agent)
    assert ahead.ledger.counts.started == with_change


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
    asking, answer = (
        call("ask", question="now?"),
        script(calls(call("ask", question="now?")), calls(W7), AIMessage("ok")),
    )
    ahead = RunAheadMiddleware([*READS, "ask"], predict=in_turns([W7]))
    tools = [*desk.tools().values(), ask]
    agent = create_agent(ScriptedChat(answer=answer), tools, middleware=[ahead], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    run(agent, config=config)
    assert asking["name"] not in ahead.refused
    run(agent, Command(resume="yes"), config=config)
    assert ahead.ledger.counts.used == 0
    assert desk.read == [("look_up", "W7"), ("look_up", "W7")]


def test_a_result_does_not_pass_from_one_run_to_another() -> None:
    desk, answer = Desk(), script(AIMessage("nothing"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    agent_of(desk, answer, ahead).invoke(ASKED)
    agent_of(desk, script(calls(W7), AIMessage("ok")), ahead).invoke({"messages": [AIMessage("hi"), HumanMessage("?")]})
    assert ahead.ledger.counts.used == 0


def test_a_retry_outside_works_on_the_result_as_on_any_other(run: Run) -> None:
    desk, answer = Desk(), script(calls(W7), AIMessage("open"))
    ahead = RunAheadMiddleware(READS, predict=in_turns([W7]))
    assert transcript(run(agent_of(desk, answer, ToolRetryMiddleware(max_retries=1), ahead))) == plain(answer)
    assert ahead.ledger.counts.used == 1


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


def test_a_predictor_that_fails_does_not_fail_the_run() -> None:
    ahead = RunAheadMiddleware(READS, predict=lambda state: 1 / 0)  # type: ignore[arg-type,return-value]
    found = agent_of(Desk(), script(calls(W7), AIMessage("ok")), ahead).invoke(ASKED)
    assert found["messages"][-1].content == "ok"


def test_a_call_that_does_not_pay_is_not_started() -> None:
    answer = script(calls(W7), AIMessage("ok"))
    for price, expected in ((0.0, 2), (3600.0, 1)):
        ahead = RunAheadMiddleware(READS, predict=lambda state: [W7], price={"look_up": price})
        agent_of(Desk(), answer, ahead).invoke(ASKED)
        assert ahead.ledger.counts.started == expected  # the first is started: nothing has been measured yet
