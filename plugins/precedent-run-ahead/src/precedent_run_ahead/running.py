"""Runs one call ahead, and hands its result over to an equal call that the model makes.

It runs through the agent's own chain of `wrap_tool_call`, with the run's config, out of its traces. What it answers is
caught at the place of our own middleware in the chain, since whatever stands outside of it will work on the result once
more when the real call is made.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from langchain.agents.middleware import AgentMiddleware, AgentState, ToolCallRequest
from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.messages import ToolCall, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langgraph.constants import TAG_NOSTREAM
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt.tool_node import ToolNode
from langgraph.runtime import Runtime
from langsmith.run_helpers import tracing_context
from pydantic import BaseModel, ValidationError

from precedent.cache import SpeculationCache
from precedent.errors import PrecedentError
from precedent.runtime.background import Background
from precedent.runtime.fence import Fences, Result
from precedent_run_ahead.actions.calls import Call, canonical
from precedent_run_ahead.actions.ledger import Ledger, Pending
from precedent_run_ahead.actions.price import TrackRecord, Worth
from precedent_run_ahead.marks import ReadOnlyList

FLAG = "precedent_run_ahead"
"""Key of the metadata, and tag, of everything that a run ahead shows in callbacks and traces."""

RUN_AHEAD, MEMORY, PREDICT = "running ahead", "the memory of earlier runs", "predict="
"""The aids of an agent, as `RunAheadMiddleware.degraded` names them."""

PATIENCE = 2.0
"""Seconds that an agent waits for predictions, and for its actions to be stored."""

_GRAPH_KEYS = "__pregel_"
_RUNTIME = "__pregel_runtime"

Handler = Callable[[ToolCallRequest], Any]
AsyncHandler = Callable[[ToolCallRequest], Awaitable[Any]]

Predictor = Callable[[AgentState[Any]], Sequence[ToolCall]]
"""A predictor of your own: the calls that may come next, from the state that the model is about to see."""


class Aids:
    """Does what only makes an agent faster. After a fault, its caller goes on without it."""

    def __init__(self) -> None:
        self.fences = Fences()
        self._threads = Background(2, "precedent-run-ahead")

    def run(self, act: Callable[[], Result], otherwise: Result) -> Result:
        """Do a part of running ahead that takes no time."""
        return self.fences.of(RUN_AHEAD).run(act, otherwise)

    def waited(self, name: str, work: Callable[[], Result], otherwise: Result) -> Result:
        """Do work that may take long on another thread; `otherwise` if it does."""
        fence = self.fences.of(name)

        def act() -> Result:
            job = fence.submit(self._threads, contextvars.copy_context().run, work)
            if job is not None and not wait([job], timeout=PATIENCE).done:
                fence.hangs(job)
                return otherwise
            return otherwise if job is None or job.exception() is not None else job.result()

        return fence.run(act, otherwise)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all calls share that a middleware, `own`, runs ahead; `refuse` takes a tool off its list.

    Where predictions come from, and of which tools: see `RunAheadMiddleware`.
    """

    own: AgentMiddleware[Any, Any, Any]
    allowed: ReadOnlyList
    cache: SpeculationCache | None
    predict: Predictor | None
    listen: bool | None
    ledger: Ledger
    aids: Aids
    worth: Worth
    refuse: Callable[[str, str], None]
    record: TrackRecord = field(default_factory=TrackRecord)


class NotAnAnswer(PrecedentError):
    """A run ahead did not end in a plain answer of the tool; `reason` says in what."""

    def __init__(self, reason: str, *, refuse: bool) -> None:
        super().__init__(reason)
        self.reason, self.refuse = reason, refuse


class Inside(BaseCallbackHandler):
    """Notes whether the tool runs a graph or a model of its own: a stream shows their steps and words.

    A result that ran ahead could not show them any more, so `reason` says why such a tool must not run ahead.
    """

    run_inline = True

    def __init__(self) -> None:
        self.reason: str | None = None

    def on_chain_start(self, serialized: Any, inputs: Any, *, tags: Sequence[str] | None = None, **others: Any) -> None:
        """Note a node of a graph, which LangGraph tags with its step."""
        if any(tag.startswith("graph:step:") for tag in tags or ()):
            self.reason = "it runs a graph of its own, whose steps a stream would show"

    def on_llm_start(self, serialized: Any, prompts: Any, **others: Any) -> None:
        """Note a model."""
        self.reason = self.reason or "it asks a model of its own, whose words a stream would show"

    def on_chat_model_start(self, serialized: Any, messages: Any, **others: Any) -> None:
        """Note a model."""
        self.on_llm_start(serialized, messages)


@dataclass(slots=True)
class Ahead:
    """A call that runs ahead in its agent's `chain`: our middleware's place there keeps what the call answers.

    The tool's place lets the call through only to a tool that may run ahead: `refusal` says why one may not, since
    other middleware may send the call elsewhere. `written` is what the tool streamed meanwhile.
    """

    shared: Shared
    chain: Sequence[AgentMiddleware[Any, Any, Any]]
    pending: Pending
    call: Call
    tool: BaseTool
    refusal: Callable[[BaseTool], str | None]
    state: Mapping[str, Any]
    config: RunnableConfig
    runtime: Runtime[Any]
    written: list[Any] = field(default_factory=list)
    _inside: Inside = field(default_factory=Inside)
    _found: Any = None
    _stopped: NotAnAnswer | None = None

    def start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Start the call as a task of an event loop, or on a thread of its own, which ends with the process."""
        if loop is not None:
            loop.call_soon_threadsafe(self._start_task, loop)
            return
        work = functools.partial(self._context().run, self._run)
        try:
            threading.Thread(target=work, name=self.pending.id, daemon=True).start()
        except RuntimeError:  # the process has no thread left
            self.shared.ledger.drop(self.pending, "failed")
            self.shared.ledger.ended(self.pending)

    def _start_task(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.pending.dropped:
            self.shared.ledger.ended(self.pending)
            return
        task = loop.create_task(self._arun(), context=self._context())

        def stop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        self.pending.stop = stop
        task.add_done_callback(lambda _: self.shared.ledger.ended(self.pending))

    def _run(self) -> None:
        try:
            manager = CallbackManager.configure(**self._flagged())
            shown = manager.on_tool_start({"name": self.call.name}, "", inputs={})
            with self._settling():
                node = ToolNode([self.tool], wrap_tool_call=self._wrapper(self._catch, self._let, "wrap_tool_call"))
                node.invoke(_input(self._tool_call, self.state), self._config())
            shown.on_tool_end(self._outcome())
        except Exception as error:
            self._failed_around(error)
        finally:
            self.shared.ledger.ended(self.pending)

    async def _arun(self) -> None:
        try:
            manager = AsyncCallbackManager.configure(**self._flagged())
            shown = await manager.on_tool_start({"name": self.call.name}, "", inputs={})
        except Exception as error:
            self._failed_around(error)
            return
        try:
            with self._settling():
                wrapper = self._wrapper(self._acatch, self._alet, "awrap_tool_call")
                node = ToolNode([self.tool], awrap_tool_call=wrapper)
                async with asyncio.timeout(self.shared.ledger.seconds_left(self.pending)):
                    await node.ainvoke(_input(self._tool_call, self.state), self._config())
        finally:
            await shown.on_tool_end(self._outcome())

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Run the call in here, untraced, and keep its answer, or its error in place of it."""
        begun = time.perf_counter()
        try:
            with tracing_context(enabled=False):
                yield
            answer = self._answer()
        except Exception as error:  # thrown away: the call is made again if the model asks for it
            reaches = isinstance(error, KeyError) and _GRAPH_KEYS in str(error)
            if isinstance(error, GraphBubbleUp) or reaches:
                error = NotAnAnswer("it interrupts the graph, or reads from it", refuse=True)
            if isinstance(error, NotAnAnswer) and error.refuse:
                self.shared.refuse(self.call.name, error.reason)
            self._fail(error)
        else:
            self.pending.seconds = time.perf_counter() - begun
            self.pending.result.set_result((answer, self.written))
            self.shared.worth.took(self.call.name, self.pending.seconds)

    def _answer(self) -> ToolMessage:
        """The answer. Raises NotAnAnswer for anything but a plain, good answer to this very call."""
        found = self._found
        if self._inside.reason is not None:
            raise NotAnAnswer(self._inside.reason, refuse=True)
        if self._stopped is not None:
            raise self._stopped
        if found is None:
            raise NotAnAnswer("another middleware kept the call from being made", refuse=False)
        if not isinstance(found, ToolMessage):
            raise NotAnAnswer("it returned a Command, or more than one message", refuse=True)
        if found.tool_call_id != self.pending.id:
            raise NotAnAnswer("it answers under a call id of its own", refuse=True)
        if found.status == "error":
            raise NotAnAnswer("it answered with an error", refuse=False)
        return found

    def _fail(self, error: Exception) -> None:
        self.pending.result.set_exception(error)
        self.shared.ledger.drop(self.pending, "failed")

    def _failed_around(self, error: Exception) -> None:
        """Take note of a fault outside of the tool, such as of a callback: nobody waits for the result any longer."""
        self.shared.aids.fences.of(RUN_AHEAD).fault(error)
        if not self.pending.result.done():
            self._fail(error)

    # The chain of `wrap_tool_call`

    def _wrapper(self, at_own: Any, at_tool: Any, hook: str) -> Any:
        """All of the chain's wrappers, the first outermost, with `at_own` in our place and `at_tool` innermost."""
        hooks = ("wrap_tool_call", "awrap_tool_call")
        wrapping = [m for m in self.chain if any(getattr(type(m), h) is not getattr(AgentMiddleware, h) for h in hooks)]
        wrappers = [*(at_own if m is self.shared.own else getattr(m, hook) for m in wrapping), at_tool]
        return functools.reduce(
            lambda inner, outer: lambda request, execute: outer(request, lambda changed: inner(changed, execute)),
            reversed(wrappers),
        )

    def _catch(self, request: ToolCallRequest, handler: Handler) -> Any:
        self._compared_as(request)
        self._found = handler(request)
        return self._found

    async def _acatch(self, request: ToolCallRequest, handler: AsyncHandler) -> Any:
        self._compared_as(request)
        self._found = await handler(request)
        return self._found

    def _compared_as(self, request: ToolCallRequest) -> None:
        """Middleware outside may have changed the call: it is compared as it is here, as the real one will be."""
        self._found = None
        tool = self._checked(request)
        self.pending.tool, self.pending.key = tool, key_of(tool, request.tool_call["args"])

    def _let(self, request: ToolCallRequest, handler: Handler) -> Any:
        self._hold(request)
        try:
            return handler(request)
        finally:
            self.shared.ledger.release(self.pending)

    async def _alet(self, request: ToolCallRequest, handler: AsyncHandler) -> Any:
        tool = self._hold(request)
        if _is_synchronous(tool):
            return await asyncio.wrap_future(self._on_a_thread(tool, request))
        try:
            return await handler(request)
        finally:
            self.shared.ledger.release(self.pending)

    def _on_a_thread(self, tool: BaseTool, request: ToolCallRequest) -> Future[Any]:
        """Call a synchronous tool on a thread of its own, which keeps the call's place though its task is cancelled."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        config = self._config()

        def run() -> None:
            try:
                node = ToolNode([tool], wrap_tool_call=lambda own, execute: execute(own.override(tool=tool)))
                found = node.invoke(_input(request.tool_call, request.state), config)
                found = found["messages"] if isinstance(found, dict) else found
                settle = functools.partial(answer.set_result, found[0] if len(found) == 1 else found)
            except BaseException as error:
                settle = functools.partial(answer.set_exception, error)
            self.shared.ledger.release(self.pending)
            settle()

        work = functools.partial(contextvars.copy_context().run, run)
        try:
            threading.Thread(target=work, name=self.pending.id, daemon=True).start()
        except RuntimeError:  # the process has no thread left
            self.shared.ledger.release(self.pending)
            raise
        return answer

    def _hold(self, request: ToolCallRequest) -> BaseTool:
        tool = self._checked(request)
        if not self.shared.ledger.hold(self.pending):
            self._stop("it was given up, or its earlier attempt still runs", refuse=False)
        return tool

    def _checked(self, request: ToolCallRequest) -> BaseTool:
        """Return the tool that is to be called, if it may run ahead: middleware may have put another in its place."""
        tool = request.tool
        if tool is None:
            self._stop("other middleware took its tool away", refuse=True)
        reason = self.refusal(tool)
        if reason is not None and tool is self.tool:
            self._stop(reason, refuse=False)
        if reason is not None:
            self._stop(
                f"other middleware sends its calls to {tool.name!r}, which may not run ahead: {reason}", refuse=True
            )
        return tool

    def _stop(self, reason: str, *, refuse: bool) -> NoReturn:
        """Raise NotAnAnswer, and keep it: middleware may make an answer of it."""
        self._stopped = NotAnAnswer(reason, refuse=refuse)
        raise self._stopped

    # What the tool, callbacks and traces see

    @property
    def _tool_call(self) -> dict[str, Any]:
        return {"name": self.call.name, "args": dict(self.call.arguments), "id": self.pending.id, "type": "tool_call"}

    def _config(self) -> RunnableConfig:
        """The run's config, flagged, without its callbacks and without what would reach into the running graph.

        An `interrupt()` in the tool would otherwise count among those of the model's node, or take its answer.
        """
        kept = {k: v for k, v in self.config.get("configurable", {}).items() if not k.startswith(_GRAPH_KEYS)}
        kept[_RUNTIME] = self.runtime.override(stream_writer=self.written.append)
        flagged = self._flagged()
        return {
            **self.config,
            "callbacks": [self._inside],
            "tags": flagged["inheritable_tags"],
            "metadata": flagged["inheritable_metadata"],
            "configurable": kept,
        }

    def _context(self) -> contextvars.Context:
        """The caller's context variables, with this call's config in place of the model's."""
        context = contextvars.copy_context()
        context.run(var_child_runnable_config.set, self._config())
        return context

    def _flagged(self) -> dict[str, Any]:
        return {
            "inheritable_callbacks": self.config.get("callbacks"),
            "inheritable_tags": [*(self.config.get("tags") or ()), FLAG, TAG_NOSTREAM],
            "inheritable_metadata": {**(self.config.get("metadata") or {}), FLAG: True},
        }

    def _outcome(self) -> str:
        """What callbacks and traces see of the answer: that there is one. Of the arguments they see nothing."""
        if not self.pending.result.done():
            return "stopped"
        return "failed" if self.pending.result.exception() is not None else "finished"


def _input(tool_call: Any, state: Any) -> dict[str, Any]:
    return {"__type": "tool_call_with_context", "tool_call": tool_call, "state": state}


def _is_synchronous(tool: BaseTool) -> bool:
    """Whether an event loop runs the tool on a thread, because it has no coroutine of its own."""
    own = [getattr(type(tool), name) for name in ("ainvoke", "arun", "_arun")]
    known = {getattr(kind, name) for kind in (BaseTool, StructuredTool, Tool) for name in ("ainvoke", "arun", "_arun")}
    return getattr(tool, "coroutine", None) is None and all(one in known for one in own)


def key_of(tool: BaseTool, arguments: Any) -> str | None:
    """The arguments as the tool's schema reads them, in canonical form; None if it refuses them.

    Arguments are compared as they were given where the schema is a JSON Schema (as of MCP) or pydantic's version 1, and
    where it cannot write them down without loss (a secret, an excluded field).
    """
    schema = tool.args_schema
    if not isinstance(arguments, dict):
        return None
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return canonical({"given": arguments})
    try:
        validated = schema.model_validate(arguments)
    except (ValidationError, ValueError, TypeError):
        return None
    try:
        written = validated.model_dump(mode="json", by_alias=True)
        lossless = type(validated).model_validate(written) == validated
    except (ValidationError, ValueError, TypeError):
        lossless = False
    return canonical({"read": written} if lossless else {"given": arguments})


def handed_over(request: ToolCallRequest, found: Any) -> ToolMessage:
    """The result under the call's own id; what its tool streamed is streamed now."""
    message, written = found
    adopted: ToolMessage = message.model_copy(update={"tool_call_id": request.tool_call["id"]})
    for piece in written:
        request.runtime.stream_writer(piece)
    return adopted


def show(request: ToolCallRequest, tool: BaseTool, message: ToolMessage) -> None:
    """Tell callbacks and traces of the call and its answer, as the tool itself would have."""
    run = CallbackManager.configure(*_callbacks(request, tool)).on_tool_start(**_begun(request, tool))
    run.on_tool_end(message, name=tool.name)


async def ashow(request: ToolCallRequest, tool: BaseTool, message: ToolMessage) -> None:
    """The same in an event loop."""
    run = await AsyncCallbackManager.configure(*_callbacks(request, tool)).on_tool_start(**_begun(request, tool))
    await run.on_tool_end(message, name=tool.name)


def _callbacks(request: ToolCallRequest, tool: BaseTool) -> tuple[Any, ...]:
    """The arguments with which `BaseTool.run` configures its callbacks."""
    config = request.runtime.config
    tags, metadata = config.get("tags"), config.get("metadata")
    return config.get("callbacks"), tool.callbacks, tool.verbose, tags, tool.tags, metadata, tool.metadata


def _begun(request: ToolCallRequest, tool: BaseTool) -> dict[str, Any]:
    call = request.tool_call
    about = {"serialized": {"name": tool.name, "description": tool.description}, "input_str": str(call["args"])}
    return {**about, "inputs": call["args"], "tool_call_id": call["id"]}


async def awaited(ledger: Ledger, pending: Pending) -> Any:
    """As `Ledger.wait`, in an event loop. A call that is cancelled meanwhile stops the run ahead too."""
    waiting = asyncio.wrap_future(pending.result)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # no error stays unseen
    try:
        await asyncio.wait([waiting], timeout=ledger.seconds_left(pending))
    except asyncio.CancelledError:
        ledger.lost(pending, "cancelled")
        raise
    return ledger.result_of(pending)
