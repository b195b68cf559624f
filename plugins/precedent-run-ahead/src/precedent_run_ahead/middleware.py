"""`RunAheadMiddleware`: the hooks of `create_agent` in which calls start ahead, and in which their results are used."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse, ToolCallRequest
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.config import get_config
from langgraph.runtime import Runtime

from precedent.cache import SpeculationCache
from precedent.errors import ConfigError
from precedent.langchain.arguments import DEFAULT_TENANT
from precedent.langchain.middleware import Tenant, ended_well, tenant_of_run
from precedent.runtime.process import Lock
from precedent.runtime.recent import Recent
from precedent_run_ahead.actions.ledger import Lane, Ledger, Pending
from precedent_run_ahead.actions.price import Price, Worth
from precedent_run_ahead.beside import (
    Agent,
    Harmless,
    bound_to_its_agent,
    invocation_stops,
    might_block,
    under_approval,
)
from precedent_run_ahead.marks import ReadOnlyList, Tools, lost_mark, unfit
from precedent_run_ahead.running import MEMORY, Aids, Predictor, Shared, ashow, awaited, handed_over, key_of, show
from precedent_run_ahead.turn import Answered, Turn

RUN = "precedent_run_ahead"
"""Key of the run's id in the agent's state."""

SWITCH = "PRECEDENT_RUN_AHEAD"
"""Environment variable that stops all running ahead in a running process: `off`, or `on` (the default)."""

OPEN_RUNS = 1000
"""Most unfinished runs whose decisions are held back; the oldest are dropped first."""

log = logging.getLogger("precedent.run_ahead")

Writer = Callable[[Any], None]


class RunAheadState(AgentState[Any]):
    """An agent's state with the id of its run."""

    precedent_run_ahead: NotRequired[Annotated[str, PrivateStateAttr]]


@dataclass(slots=True)
class RunDecisions:
    """The answers of one run and the seconds that its calls took, by call id, until the run has ended well."""

    answers: list[Answered] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class RunAheadMiddleware(AgentMiddleware[RunAheadState, Any, Any]):
    """Starts the agent's next tool calls before the model asks for them; a result is used only for an equal call.

    `allow` names the tools that only read (those marked by `read_only` are on the list too, and with `trust_hints`
    those of which an MCP server says so), `arguments_from_tools` the ones whose arguments may come from another tool's
    output. Predictions come from the model's own stream, from the `cache`'s earlier runs of the same `tenant`, and from
    `predict(state)`. A call starts if its probability times the seconds that it saves exceeds its `price`. At most
    `at_once` run at a time, `most_per_run` in a run, and a result may be used for `time_to_live` seconds. `harmless`
    names other middleware that never blocks a call. `listen` makes a model stream, by default only ours. A fault of all
    this fails and delays no run: after three within a minute the part that failed is switched off for a while, and
    `degraded` names it.

    Raises UnsupportedError for a tool that cannot run ahead, ConfigError for another wrong setting.
    """

    state_schema = RunAheadState

    def __init__(
        self,
        allow: Tools = (),
        *,
        cache: SpeculationCache | str | Path | None = None,
        predict: Predictor | None = None,
        tenant: Tenant = DEFAULT_TENANT,
        arguments_from_tools: Tools = (),
        trust_hints: bool = False,
        harmless: Harmless = (),
        price: Price = None,
        at_once: int = 4,
        most_per_run: int = 100,
        time_to_live: float = 30.0,
        listen: bool | None = None,
        learn_from: Callable[[AgentState[Any]], bool] | None = ended_well,
    ) -> None:
        super().__init__()
        opened = SpeculationCache.open(cache) if isinstance(cache, str | Path) else cache
        self._allowed = ReadOnlyList(allow, arguments_from_tools, trust_hints=trust_hints)
        self._cache, self._learn_from, self._given_tenant, self._harmless = opened, learn_from, tenant, tuple(harmless)
        self._worth, self._aids = Worth(price), Aids()
        self._lock, self._runs = Lock(), Recent[str, RunDecisions](OPEN_RUNS)
        self._lanes: weakref.WeakKeyDictionary[Writer, dict[str, Lane]] = weakref.WeakKeyDictionary()
        self._refused: dict[str, str] = {}
        self._struck: set[str] = set()
        self.ledger = Ledger(at_once=at_once, most_per_run=most_per_run, time_to_live=time_to_live)
        """The pending results; `ledger.counts` says what became of them, `ledger.void()` voids them all."""
        self._shared = Shared(
            self, self._allowed, opened, predict, listen, self.ledger, self._aids, self._worth, self._strike
        )

    @property
    def degraded(self) -> tuple[str, ...]:
        """What is switched off after faults: running ahead, the memory of earlier runs, or `predict=`."""
        return self._aids.fences.degraded()

    @property
    def faults(self) -> dict[str, int]:
        """The number of faults of each, if there were any. Runs went on without it."""
        return self._aids.fences.faults()

    @property
    def refused(self) -> dict[str, str]:
        """The listed tools that do not run ahead, and why; `*` stands for all of them."""
        return dict(self._refused)

    def before_agent(self, state: RunAheadState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Start the run."""
        run = uuid.uuid4().hex
        if self._cache is not None and self._learn_from is not None and not switched_off():
            self._runs[run] = RunDecisions()
        return {RUN: run}

    @bound_to_its_agent
    def wrap_model_call(
        self,
        agent: Agent,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        """Start what may come next, and ask the model meanwhile."""
        turn = self._turn(agent, request, None)
        if turn is None:
            return handler(request)
        with self._discarding(turn.lane):
            turn.consider(turn.predictions())
            with turn.listening():
                response = handler(request)
        return self._answered(turn, response)

    @bound_to_its_agent
    async def awrap_model_call(
        self,
        agent: Agent,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """Start what may come next, and ask the model meanwhile."""
        turn = self._turn(agent, request, asyncio.get_running_loop())
        if turn is None:
            return await handler(request)
        with self._discarding(turn.lane):
            turn.consider(await asyncio.to_thread(turn.predictions))
            with turn.listening():
                response = await handler(request)
        return self._answered(turn, response)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Hand over the result of an equal call that ran ahead; else make the call."""
        tool = self._listed(request)
        if tool is None:
            with self.ledger.change():
                return handler(request)
        with self._discarding(self._lane(request)) as lane:
            pending, begun = self._taken(lane, tool, request), time.perf_counter()
            found = None if pending is None else self.ledger.wait(pending)
            message = self._handed_over(request, pending, found, begun)
            if message is not None:
                show(request, tool, message)
                return message
            begun = time.perf_counter()
            return self._made(request, handler(request), begun)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """Hand over the result of an equal call that ran ahead; else make the call."""
        tool = self._listed(request)
        if tool is None:
            with self.ledger.change():
                return await handler(request)
        with self._discarding(self._lane(request)) as lane:
            pending, begun = self._taken(lane, tool, request), time.perf_counter()
            found = None if pending is None else await awaited(self.ledger, pending)
            message = self._handed_over(request, pending, found, begun)
            if message is not None:
                await ashow(request, tool, message)
                return message
            begun = time.perf_counter()
            return self._made(request, await handler(request), begun)

    def after_agent(self, state: RunAheadState, runtime: Runtime[Any]) -> None:
        """Throw away what nobody asked for, and store the run if it ended well."""
        run = str(state.get(RUN, ""))
        self.ledger.discard(self._lane_of(runtime.stream_writer, run), "not asked for")
        decisions = self._runs.pop(run, None)
        if decisions is not None and not switched_off():
            tenant = self._tenant(runtime)
            self._aids.waited(MEMORY, lambda: self._store(decisions, state, tenant), None)

    def _store(self, decisions: RunDecisions, state: RunAheadState, tenant: str) -> None:
        cache, learn_from = self._cache, self._learn_from
        if cache is not None and learn_from is not None and learn_from(state):
            for answer in decisions.answers:
                cache.insert(answer.record(decisions.seconds, tenant))

    async def aafter_agent(self, state: RunAheadState, runtime: Runtime[Any]) -> None:
        """Do the same outside the event loop, because storing embeds texts and waits for the disk."""
        await asyncio.to_thread(self.after_agent, state, runtime)

    def _tenant(self, runtime: Runtime[Any]) -> str:
        return tenant_of_run(self._given_tenant, runtime) or DEFAULT_TENANT

    def _turn(self, agent: Agent, request: ModelRequest[Any], loop: asyncio.AbstractEventLoop | None) -> Turn | None:
        """A model call that something may run ahead of; None where nothing may, and after a fault.

        Other middleware may have made a new request, which does not say to which run it belongs.
        """
        if switched_off() or request.runtime is None or RUN not in request.state:
            return None
        lane = self._lane_of(request.runtime.stream_writer, str(request.state.get(RUN, "")))
        tenant, config = self._tenant(request.runtime), get_config()

        def refusal(tool: BaseTool) -> str | None:
            return self._refusal(agent, config, tool)

        def made() -> Turn:
            return Turn(self._shared, agent, request, config, lane, tenant, loop, refusal)

        return self._aids.run(made, None)

    def _refusal(self, agent: Agent, config: RunnableConfig, tool: BaseTool) -> str | None:
        """Return why a tool may not run ahead in this run of the agent, and say so once if it was meant to."""
        if not self._allowed.holds(tool):
            lost = lost_mark(tool)
            return "it is not on the list" if lost is None else self._refuse(tool.name, lost)
        if tool.name in self._refused:
            return self._refused[tool.name]
        for reason in might_block(agent, self, self._harmless):
            return self._refuse("*", reason)
        stops = invocation_stops(config)
        if stops is not None:
            return self._refuse("*", stops)
        if under_approval(agent, tool.name):
            return self._refuse(tool.name, "a person decides about its calls (HumanInTheLoopMiddleware)")
        found = unfit(tool)
        return None if found is None else self._refuse(tool.name, found)

    def _refuse(self, name: str, reason: str) -> str:
        """Keep why a tool may not run ahead, and say it once."""
        if self._refused.get(name) != reason:
            self._refused[name] = reason
            log.warning("%s not run ahead: %s", "tools do" if name == "*" else f"the tool {name!r} does", reason)
        return reason

    def _strike(self, name: str, reason: str) -> None:
        """Take a tool off the list that turned out to do more than read: its calls void results from now on."""
        self._struck.add(name)
        self._refuse(name, reason)
        self.ledger.void()

    def _answered(self, turn: Turn, response: ModelResponse[Any]) -> ModelResponse[Any]:
        """Learn from the model's answer, and return it."""
        messages = response.result if isinstance(response, ModelResponse) else [response]
        calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
        run = str(turn.request.state.get(RUN, ""))

        def learn() -> None:
            turn.answered(calls)
            if run in self._runs:
                self._runs[run].answers.append(Answered(turn.messages, tuple(calls), tuple(turn.request.tools)))

        self._aids.run(learn, None)
        return response

    def _listed(self, request: ToolCallRequest) -> BaseTool | None:
        """The call's tool if it only reads; None for every call that may change something."""
        tool = request.tool
        listed = tool is not None and self._allowed.holds(tool) and tool.name not in self._struck
        return tool if listed else None

    def _lane(self, request: ToolCallRequest) -> Lane:
        return self._lane_of(request.runtime.stream_writer, _run_of(request))

    def _lane_of(self, writer: Writer, run: str) -> Lane:
        """The lane of a run, known by its invocation's stream writer and the id in its state.

        A graph that was interrupted keeps its state and its run's id, but is resumed in another invocation, which has
        another stream writer: so a resumed graph starts without pending results, and those of an invocation that is
        over are let go.
        """
        with self._lock:
            lanes = self._lanes.setdefault(writer, {})
            if run not in lanes:
                alive = weakref.ref(writer)
                lanes[run] = Lane(over=lambda: alive() is None)
            return lanes[run]

    def _taken(self, lane: Lane, tool: BaseTool, request: ToolCallRequest) -> Pending | None:
        if switched_off():
            return None
        return self._aids.run(lambda: self.ledger.take(lane, tool, key_of(tool, request.tool_call["args"])), None)

    def _handed_over(
        self, request: ToolCallRequest, pending: Pending | None, found: Any, begun: float
    ) -> ToolMessage | None:
        """The result of a call that was taken, as the answer to this one; None if there is none."""
        message = None if found is None else self._aids.run(lambda: handed_over(request, found), None)
        if pending is not None and message is not None:
            self.ledger.used(pending, pending.seconds - (time.perf_counter() - begun))
            self._took(request, pending.seconds)
        elif pending is not None:
            self.ledger.lost(pending, "failed")
        return message

    def _made(self, request: ToolCallRequest, result: Any, begun: float) -> Any:
        """Learn from a call that was made as ever."""
        seconds, name = time.perf_counter() - begun, request.tool_call["name"]
        if not isinstance(result, ToolMessage):
            self._strike(name, "it returned a Command, or more than one message")
        elif result.status != "error":
            self._worth.took(name, seconds)
            self._took(request, seconds)
        return result

    def _took(self, request: ToolCallRequest, seconds: float) -> None:
        if (run := _run_of(request)) in self._runs:
            self._runs[run].seconds[request.tool_call["id"] or ""] = seconds

    @contextmanager
    def _discarding(self, lane: Lane) -> Iterator[Lane]:
        """Throws a run's results away when its model or its tool fails or is cancelled: it may end there."""
        try:
            yield lane
        except BaseException:
            self.ledger.discard(lane, "cancelled")
            raise


def _run_of(request: ToolCallRequest) -> str:
    return str(request.state.get(RUN, "")) if isinstance(request.state, dict) else ""


def switched_off() -> bool:
    """Whether `SWITCH` is off. Raises ConfigError for another value than on and off."""
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise ConfigError(f"{SWITCH}={switch!r} is neither 'on' nor 'off'")
    return switch == "off"
