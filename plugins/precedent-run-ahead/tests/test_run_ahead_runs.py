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
from helpers.event_loops import time_passes
from helpers.run_ahead_agents import READS, agent_of, agent_on, join_runs_ahead, reading, saying
from helpers.scripted_agents import Desk, ScriptedChat, call, calls, last_result, script, transcript
from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware, wrap_tool_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import END, START, StateGraph

from precedent import ChatPrecedent
from precedent.cache import SpeculationCache
from precedent.errors import ConfigError
from precedent.langchain import SpeculationMiddleware
from precedent_run_ahead import RunAheadMiddleware
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

W1 = call("look_up", order="W1")


@pytest.fixture
def cache() -> Any:
    with SpeculationCache.open(embedder=HashEmbedder()) as opened:
        yield opened


def asked(order: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"Where is {order}, please?")]}


def order_in(messages: Any) -> str:
    return str(messages[0].content).split()[2].rstrip(",")


def serve(messages: Any) -> AIMessage:
    """Looks up the order that the user names, then its customer, then answers."""
    return script(
        calls(call("look_up", order=order_in(messages))),
        lambda talk: calls(call("customer", customer=json.loads(last_result(talk))["customer"])),
        AIMessage(f"{order_in(messages)} is on its way."),
    )(messages)


def desk_agent(*middleware: Any, **options: Any) -> Any:
    return agent_of(Desk(), serve, *middleware, **options)


def taught(cache: SpeculationCache, **settings: Any) -> None:
    for order in ("W1", "W2", "W3"):
        desk_agent(RunAheadMiddleware(READS, cache=cache, **settings)).invoke(asked(order))


def test_what_agents_did_is_predicted_in_the_next_run(cache: SpeculationCache) -> None:
    taught(cache)
    ahead = RunAheadMiddleware(READS, cache=cache, arguments_from_tools=["customer"], learn_from=None)
    found = desk_agent(ahead).invoke(asked("W9"))
    assert ahead.ledger.counts.by_source == {"memory": [2, 2]}
    assert transcript(found["messages"]) == transcript(desk_agent().invoke(asked("W9"))["messages"])
    careful = RunAheadMiddleware(READS, cache=cache)
    desk_agent(careful).invoke(asked("W9"))
    assert careful.ledger.counts.used == 1, "no argument comes from a tool without opt-in"


def test_predictions_come_from_the_same_tenant_alone(cache: SpeculationCache) -> None:
    taught(cache, tenant="north")
    ahead = RunAheadMiddleware(READS, cache=cache, tenant=lambda runtime: str(runtime.context["org"]))
    agent = desk_agent(ahead, context_schema=dict)
    for org, started in (("south", 0), ("north", 1)):
        agent.invoke(asked("W9"), context={"org": org})
        assert ahead.ledger.counts.started == started
    with pytest.raises(ConfigError, match="tenant"):
        agent.invoke(asked("W9"), context={"org": ""})


@pytest.mark.parametrize("end", ["a failed tool", "no answer", "switched off"])
def test_a_run_that_did_not_end_well_teaches_nothing(
    cache: SpeculationCache, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, limits = [call("look_up", wrong=1) if end == "a failed tool" else W1], list[Any]()
    if end == "no answer":
        turns, limits = [W1, call("look_up", order="W2")], [ToolCallLimitMiddleware(run_limit=1, exit_behavior="error")]
    if end == "switched off":
        monkeypatch.setenv("PRECEDENT_RUN_AHEAD", "off")
    made = reading(lambda order: order, handle_validation_error=True)
    agent = agent_on([made], saying(*turns), *limits, RunAheadMiddleware([made], cache=cache))
    with pytest.raises(Exception, match="limit") if end == "no answer" else nullcontext():
        agent.invoke(asked("W1"))
    assert cache.stats().records == 0


def test_a_path_opens_a_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from precedent.cache import speculation_cache

    monkeypatch.setattr(speculation_cache, "resolve", lambda embedder: HashEmbedder())
    desk_agent(RunAheadMiddleware(READS, cache=str(tmp_path / "cache"))).invoke(asked("W1"))
    with SpeculationCache.open(tmp_path / "cache", embedder=HashEmbedder()) as opened:
        assert opened.stats().records == 3


def test_our_own_model_is_heard_while_it_writes() -> None:
    text = '<tool_call>\n{"name": "look_up", "arguments": {"order": "W7"}}\n</tool_call>'
    engine = scripted_model_engine(lambda prompt: "It is open." if "tool_response>\n{" in prompt else text)
    ahead, tools = RunAheadMiddleware(READS), list(Desk().tools().values())
    create_agent(ChatPrecedent.from_engine(engine), tools, middleware=[SpeculationMiddleware(), ahead]).invoke(
        asked("W7")
    )
    engine.close()
    assert ahead.ledger.counts.by_source == {"stream": [1, 1]}


@pytest.mark.parametrize("end", ["cancelled", "nobody asked"])
async def test_a_call_that_hangs_ahead_is_stopped_when_its_run_ends(end: str) -> None:
    running, stopped = asyncio.Event(), asyncio.Event()

    async def act(order: str) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    ahead = RunAheadMiddleware(["look_up"], predict=lambda state: [W1])
    answer = saying(W1) if end == "cancelled" else saying()
    task = asyncio.create_task(agent_on([reading(act)], answer, ahead).ainvoke(asked("W1")))
    if end == "cancelled":
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
        assert ahead.ledger.counts.discarded == {"not asked for": 1}
    if running.is_set():
        await asyncio.wait_for(stopped.wait(), 30)
    assert ahead.ledger.counts.used == 0


class Crowd:
    """Counts how many are inside at the same time; all stay until `leave` is set."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.lock, self.leave, self.arrived = threading.Lock(), threading.Event(), threading.Event()

    def visit(self, order: str) -> str:
        """Look up."""
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.arrived.set()
        assert self.leave.wait(60)
        with self.lock:
            self.inside -= 1
        return order


class HeldChat(ScriptedChat):
    """A model that answers once it is let."""

    asking: Any
    go_on: Any

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kw: Any) -> Any:
        self.asking.set()
        await self.go_on.wait()
        return self._generate(messages)


@pytest.mark.parametrize("end", ["cancelled", "too old"])
async def test_a_synchronous_tool_keeps_its_place_until_its_thread_ends(end: str) -> None:
    """An async agent can leave such a tool behind, not stop it: `at_once` counts it until it has ended."""
    crowd, asking, go_on = Crowd(), asyncio.Event(), asyncio.Event()
    look_up = StructuredTool.from_function(crowd.visit, name="look_up")
    ahead = RunAheadMiddleware([look_up], predict=lambda state: [W1], at_once=1, time_to_live=300)
    model = HeldChat(answer=saying(), asking=asking, go_on=go_on)
    agent = create_agent(model, [look_up], middleware=[ahead])
    for _ in range(3):
        asking.clear()
        running = asyncio.create_task(agent.ainvoke(asked("W1")))
        await asking.wait()
        await asyncio.to_thread(crowd.arrived.wait, 60)
        if end == "cancelled":
            running.cancel()
        else:
            time_passes(asyncio.get_running_loop())
            go_on.set()
        await asyncio.gather(running, return_exceptions=True)
    found = crowd.most, ahead.ledger.counts.started
    crowd.leave.set()
    assert found == (1, 1)


async def test_a_tool_that_hangs_ahead_is_called_again_when_its_time_is_over() -> None:
    made: list[str] = []

    async def act(order: str) -> str:
        made.append(order)
        if len(made) == 1:
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, time_passes, loop)  # by then the model has asked for the call, or will
            await asyncio.Event().wait()
        return order

    ahead = RunAheadMiddleware(["look_up"], predict=lambda state: [] if made else [W1], time_to_live=300)
    found = await agent_on([reading(act)], saying(W1), ahead).ainvoke(asked("W1"))
    assert (found["messages"][-2].content, made) == ("W1", ["W1", "W1"])


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
    assert ahead.ledger.counts.discarded.total() == ahead.ledger.counts.started, "nothing waits any longer"


@pytest.mark.parametrize("runs", [24, pytest.param(400, marks=pytest.mark.stress)])
def test_many_runs_at_once_read_nothing_stale(runs: int) -> None:
    """Readers and writers share the middleware; a reading is of a version that was current during its call."""
    desk, wrong = Desk(), list[str]()

    @wrap_tool_call
    def watching(request: Any, handler: Any) -> Any:
        before = desk.version
        result = handler(request)
        if isinstance(result, ToolMessage) and request.tool_call["name"] in READS:
            version = json.loads(result.content)["version"]
            if not before <= version <= desk.version:
                wrong.append(f"{version} is not within {before} and {desk.version}")
        return result

    def answer(messages: Any) -> AIMessage:
        rng = random.Random(str(messages[0].content))
        names = [rng.choice(["look_up", "customer", "look_up", "change"]) for _ in range(4)]
        made = [call(name, n, **{"customer" if name == "customer" else "order": "W1"}) for n, name in enumerate(names)]
        return saying(*made)(messages)

    predicted = [W1, call("customer", customer="W1"), call("change", order="W1")]
    ahead = RunAheadMiddleware(READS, predict=lambda state: predicted, price=0.0, at_once=64, harmless=[watching])
    agent = agent_of(desk, answer, watching, ahead)
    threads = [threading.Thread(target=agent.invoke, args=(asked(f"run {n}"),)) for n in range(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert ahead.ledger.counts.by_source.keys() <= {"own"}


class Both(TypedDict):
    """The state of a graph with branches."""

    said: Annotated[list[str], add]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_branches_of_a_graph_have_results_of_their_own(way: str) -> None:
    agent = desk_agent(
        RunAheadMiddleware(READS, predict=lambda state: [call("look_up", order=order_in(state["messages"]))])
    )

    def branch(order: str) -> Any:
        async def ask(state: Both) -> Any:
            found = agent.invoke(asked(order)) if way == "sync" else await agent.ainvoke(asked(order))
            return {"said": [message.content for message in found["messages"][1:]]}

        return ask if way == "async" else lambda state: asyncio.run(ask(state))

    graph = StateGraph(Both)
    for order in ("W1", "W2", "W3"):
        graph.add_node(order, branch(order))
        graph.add_edge(START, order)
        graph.add_edge(order, END)
    compiled = graph.compile()
    found = compiled.invoke({"said": []}) if way == "sync" else asyncio.run(compiled.ainvoke({"said": []}))
    for number in range(3):
        part = " ".join(found["said"][number * 5 : number * 5 + 5])
        assert [other for other in (1, 2, 3) if f'"W{other}"' in part] == [number + 1]
