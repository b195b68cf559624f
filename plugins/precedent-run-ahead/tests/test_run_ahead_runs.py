"""Runs ahead in whole applications: learned from earlier runs, in parallel, in branches, cancelled."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from contextlib import nullcontext
from operator import add
from typing import Annotated, Any, TypedDict

import pytest
from helpers.run_ahead_agents import join_runs_ahead
from helpers.scripted_agents import Desk, ScriptedChat, call, calls, last_result, script, transcript
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolCallLimitMiddleware, wrap_tool_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, tool
from langgraph.graph import END, START, StateGraph

from precedent.cache import SpeculationCache
from precedent.errors import ConfigError
from precedent.langchain import SpeculationMiddleware
from precedent_run_ahead import RunAheadMiddleware
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

READS = ("look_up", "customer")


@pytest.fixture
def cache() -> Any:
    with SpeculationCache.open(embedder=HashEmbedder()) as opened:
        yield opened


def asked(order: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"Where is {order}, please?")]}


def serve(messages: Any) -> AIMessage:
    """Looks up the order that the user names, then its customer, then answers."""
    order = str(messages[0].content).split()[2].rstrip(",")
    return script(
        calls(call("look_up", order=order)),
        lambda talk: calls(call("customer", customer=json.loads(last_result(talk))["customer"])),
        AIMessage(f"{order} is on its way."),
    )(messages)


def desk_agent(ahead: Any, desk: Desk | None = None, answer: Any = serve, **options: Any) -> Any:
    tools = list((desk or Desk()).tools().values())
    return create_agent(ScriptedChat(answer=answer), tools, middleware=[ahead] if ahead else [], **options)


def test_what_agents_did_is_predicted_in_the_next_run(cache: SpeculationCache) -> None:
    learning = RunAheadMiddleware(READS, cache=cache)
    for order in ("W1", "W2", "W3"):
        desk_agent(learning).invoke(asked(order))
    ahead = RunAheadMiddleware(READS, cache=cache, arguments_from_tools=["customer"], learn_from=None)
    found = desk_agent(ahead).invoke(asked("W9"))
    assert ahead.ledger.counts.by_source == {"memory": [2, 2]}
    assert transcript(found["messages"]) == transcript(desk_agent(None).invoke(asked("W9"))["messages"])


def test_memory_does_not_take_arguments_from_tools_without_opt_in(cache: SpeculationCache) -> None:
    for order in ("W1", "W2", "W3"):
        desk_agent(RunAheadMiddleware(READS, cache=cache)).invoke(asked(order))
    ahead = RunAheadMiddleware(READS, cache=cache)
    desk_agent(ahead).invoke(asked("W9"))
    assert ahead.ledger.counts.used == 1


def test_predictions_come_from_the_same_tenant_alone(cache: SpeculationCache) -> None:
    def of_context(runtime: Any) -> str:
        return str(runtime.context["org"])

    agents = [RunAheadMiddleware(READS, cache=cache, tenant=of_context) for _ in range(2)]
    for order in ("W1", "W2", "W3"):
        desk_agent(agents[0], context_schema=dict).invoke(asked(order), context={"org": "north"})
    for org, started in (("south", 0), ("north", 1)):
        agents[1].ledger.counts.started = 0
        desk_agent(agents[1], context_schema=dict).invoke(asked("W9"), context={"org": org})
        assert agents[1].ledger.counts.started == started
    with pytest.raises(ConfigError, match="tenant"):
        desk_agent(agents[1], context_schema=dict).invoke(asked("W9"), context={"org": ""})


@pytest.mark.parametrize("end", ["a failed tool", "no answer", "switched off"])
def test_a_run_that_did_not_end_well_teaches_nothing(
    cache: SpeculationCache, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(order: str) -> str:
        """Look up."""
        return order

    made = StructuredTool.from_function(look_up, handle_validation_error=True)
    right, wrong = call("look_up", order="W1"), call("look_up", wrong=1)
    answer = script(calls(wrong if end == "a failed tool" else right), AIMessage(""))
    limits = list[Any]()
    if end == "no answer":
        answer = script(calls(right, call("look_up", order="W2")))
        limits = [ToolCallLimitMiddleware(run_limit=1, exit_behavior="error")]
    if end == "switched off":
        monkeypatch.setenv("PRECEDENT_RUN_AHEAD", "off")
    ahead = RunAheadMiddleware([made], cache=cache)
    agent = create_agent(ScriptedChat(answer=answer), [made], middleware=[*limits, ahead])
    with pytest.raises(Exception, match="limit") if end == "no answer" else nullcontext():
        agent.invoke(asked("W1"))
    assert cache.stats().records == 0


def test_a_path_opens_a_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from precedent.cache import speculation_cache

    monkeypatch.setattr(speculation_cache, "resolve", lambda embedder: HashEmbedder())
    ahead = RunAheadMiddleware(READS, cache=str(tmp_path / "cache"))
    desk_agent(ahead).invoke(asked("W1"))
    with SpeculationCache.open(tmp_path / "cache", embedder=HashEmbedder()) as opened:
        assert opened.stats().records == 3


def test_our_own_model_is_heard_while_it_writes(cache: SpeculationCache) -> None:
    from precedent import ChatPrecedent

    text = '<tool_call>\n{"name": "look_up", "arguments": {"order": "W7"}}\n</tool_call>'
    engine = scripted_model_engine(lambda prompt: "It is open." if "tool_response>\n{" in prompt else text)
    ahead = RunAheadMiddleware(READS)
    llm = ChatPrecedent.from_engine(engine)
    agent = create_agent(llm, list(Desk().tools().values()), middleware=[SpeculationMiddleware(), ahead])
    agent.invoke(asked("W7"))
    engine.close()
    assert ahead.ledger.counts.by_source == {"stream": [1, 1]}


class Both(TypedDict):
    """The state of a graph with two branches."""

    said: Annotated[list[str], add]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_branches_of_a_graph_have_results_of_their_own(way: str) -> None:
    desk = Desk()
    ahead = RunAheadMiddleware(
        READS, predict=lambda state: [call("look_up", order=str(state["messages"][0].content).split()[2].rstrip(","))]
    )
    agent = desk_agent(ahead, desk)

    def branch(order: str) -> Any:
        def ask(state: Both) -> Any:
            return {"said": [message.content for message in agent.invoke(asked(order))["messages"][1:]]}

        async def aask(state: Both) -> Any:
            found = await agent.ainvoke(asked(order))
            return {"said": [message.content for message in found["messages"][1:]]}

        return ask if way == "sync" else aask

    graph = StateGraph(Both)
    for order in ("W1", "W2", "W3"):
        graph.add_node(order, branch(order))
        graph.add_edge(START, order)
        graph.add_edge(order, END)
    compiled = graph.compile()
    found = compiled.invoke({"said": []}) if way == "sync" else asyncio.run(compiled.ainvoke({"said": []}))
    for number in range(3):
        part = " ".join(found["said"][number * 5 : number * 5 + 5])
        assert f'"W{number + 1}"' in part
        assert not any(f'"W{other + 1}"' in part for other in range(3) if other != number)


def hanging() -> tuple[asyncio.Event, asyncio.Event, Any]:
    """A tool that ends only by being cancelled, behind the events that say it runs and has stopped."""
    running, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def look_up(order: str) -> str:
        """Look up."""
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return order

    return running, stopped, look_up


async def test_a_cancelled_run_stops_what_ran_ahead() -> None:
    running, stopped, look_up = hanging()
    ahead = RunAheadMiddleware([look_up], predict=lambda state: [call("look_up", order="W1")])
    model = ScriptedChat(answer=script(calls(call("look_up", order="W1")), AIMessage("ok")))
    task = asyncio.create_task(create_agent(model, [look_up], middleware=[ahead]).ainvoke(asked("W1")))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(stopped.wait(), 30)
    assert ahead.ledger.counts.used == 0


async def test_what_nobody_asked_for_is_stopped_at_the_end_of_the_run() -> None:
    running, stopped, look_up = hanging()
    ahead = RunAheadMiddleware([look_up], predict=lambda state: [call("look_up", order="W1")])
    model = ScriptedChat(answer=script(AIMessage("ok")))
    await create_agent(model, [look_up], middleware=[ahead]).ainvoke(asked("W1"))
    if running.is_set():
        await asyncio.wait_for(stopped.wait(), 30)
    assert ahead.ledger.counts.discarded == {"not asked for": 1}


class Crowd:
    """Counts how many are inside at the same time; all stay until `leave` is set."""

    def __init__(self) -> None:
        self.entered = self.inside = self.most = 0
        self.lock, self.leave, self.arrived = threading.Lock(), threading.Event(), threading.Event()

    def visit(self) -> None:
        with self.lock:
            self.entered += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.arrived.set()
        assert self.leave.wait(60)
        with self.lock:
            self.inside -= 1


class OwnRun(BaseTool):
    """A synchronous tool of one's own class."""

    name: str = "look_up"
    description: str = "Look up."
    crowd: Any

    def _run(self, order: str) -> str:
        self.crowd.visit()
        return order


def function_tool(crowd: Crowd) -> BaseTool:
    def look_up(order: str) -> str:
        """Look up."""
        crowd.visit()
        return order

    return StructuredTool.from_function(look_up)


def impatient(crowd: Crowd) -> AgentMiddleware:
    """Middleware that gives a call up, and tries once more, while its tool still runs."""

    class Impatient(AgentMiddleware):
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            for _ in range(2):
                waiting = asyncio.ensure_future(handler(request))
                await asyncio.to_thread(crowd.arrived.wait, 60)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            return ToolMessage("given up", tool_call_id=request.tool_call["id"])

    return Impatient()


@pytest.mark.parametrize("end", ["cancelled", "too old", "given up by other middleware"])
@pytest.mark.parametrize(
    "make", [function_tool, lambda crowd: OwnRun(crowd=crowd)], ids=["function", "class of its own"]
)
async def test_a_synchronous_tool_keeps_its_place_until_its_thread_ends(make: Any, end: str) -> None:
    """An async agent can leave such a tool behind, not stop it: `at_once` counts it until it has ended."""
    crowd, asking, answer = Crowd(), asyncio.Event(), asyncio.Event()
    look_up = make(crowd)

    async def hold() -> None:
        asking.set()
        await answer.wait()

    others = [impatient(crowd)] if end == "given up by other middleware" else []
    ahead = RunAheadMiddleware(
        [look_up], predict=lambda state: [call("look_up", order="W1")], at_once=1, harmless=others,
        time_to_live=0.2 if end == "too old" else 30.0,
    )  # fmt: skip
    agent = create_agent(HeldChat(answer=script(AIMessage("ok")), hold=hold), [look_up], middleware=[ahead, *others])
    for _ in range(3):
        asking.clear()
        running = asyncio.create_task(agent.ainvoke(asked("W1")))
        await asking.wait()
        await asyncio.to_thread(crowd.arrived.wait, 60)
        if end == "cancelled":
            running.cancel()
        else:
            await asyncio.sleep(0.3)
            answer.set()
        await asyncio.gather(running, return_exceptions=True)
    found = crowd.most, ahead.ledger.counts.started
    crowd.leave.set()
    assert found == (1, 1)


class HeldChat(ScriptedChat):
    """A model that answers once it is let."""

    hold: Any

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kw: Any) -> Any:
        await self.hold()
        return self._generate(messages)


async def test_a_tool_that_hangs_ahead_is_called_again_when_its_time_is_over() -> None:
    number = 0

    @tool
    async def look_up(order: str) -> str:
        """Look up."""
        nonlocal number
        number += 1
        if number == 1:
            await asyncio.Event().wait()
        return order

    ahead = RunAheadMiddleware([look_up], predict=lambda state: [call("look_up", order="W1")] if not number else [],
                               time_to_live=0.2)  # fmt: skip
    model = ScriptedChat(answer=script(calls(call("look_up", order="W1")), AIMessage("ok")))
    found = await create_agent(model, [look_up], middleware=[ahead]).ainvoke(asked("W1"))
    assert found["messages"][-2].content == "W1"
    assert number == 2


def test_an_abandoned_stream_leaves_no_result_behind() -> None:
    ahead = RunAheadMiddleware(READS, predict=lambda state: [call("customer", customer="C1")])
    stream = desk_agent(ahead).stream(asked("W1"), stream_mode="updates")
    for update in stream:
        if "model" in update:
            break
    stream.close()
    del stream, update
    join_runs_ahead()
    gc.collect()
    desk_agent(ahead).invoke(asked("W2"))
    assert ahead.ledger.counts.used == 0
    assert not ahead.ledger._waiting


@pytest.mark.parametrize("runs", [24, pytest.param(400, marks=pytest.mark.stress)])
def test_many_runs_at_once_read_nothing_stale(runs: int) -> None:
    """Readers and writers share the middleware; a reading is of a version that was current during its call."""
    desk, wrong = Desk(), list[str]()

    @wrap_tool_call
    def watching(request: Any, handler: Any) -> Any:
        before = desk.version
        result = handler(request)
        if isinstance(result, ToolMessage) and request.tool_call["name"] in READS and "flag" not in result.content:
            version = json.loads(result.content)["version"]
            if not before <= version <= desk.version:
                wrong.append(f"{version} is not within {before} and {desk.version}")
        return result

    def answer(messages: Any) -> AIMessage:
        rng = random.Random(str(messages[0].content))
        names = [rng.choice(["look_up", "customer", "look_up", "change"]) for _ in range(4)]
        made = [call(name, n, **{"customer" if name == "customer" else "order": "W1"}) for n, name in enumerate(names)]
        return script(*(calls(one) for one in made), AIMessage("done"))(messages)

    predicted = [call("look_up", order="W1"), call("customer", customer="W1"), call("change", order="W1")]
    ahead = RunAheadMiddleware(READS, predict=lambda state: predicted, price=0.0, at_once=64, harmless=[watching])
    agent = create_agent(ScriptedChat(answer=answer), list(desk.tools().values()), middleware=[watching, ahead])
    threads = [threading.Thread(target=agent.invoke, args=(asked(f"run {n}"),)) for n in range(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert ahead.ledger.counts.by_source.keys() <= {"own"}
