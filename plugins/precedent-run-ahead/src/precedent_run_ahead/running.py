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
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from langchain.agents.middleware import AgentMiddleware, ToolCallRequest
from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler, CallbackManager
from langchain_core.messages import ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langgraph.constants import TAG_NOSTREAM
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt.tool_node import ToolNode
from langgraph.runtime import Runtime
from langsmith.run_helpers import tracing_context
from pydantic import BaseModel, ValidationError

from precedent.errors import PrecedentError
from precedent_run_ahead.actions.calls import Call, canonical
from precedent_run_ahead.actions.ledger import Ledger, Pending
from precedent_run_ahead.recording import Redact

FLAG = "precedent_run_ahead"
"""Key of the metadata, and tag, of everything that a run ahead shows in callbacks and traces."""

_GRAPH_KEYS = "__pregel_"
_RUNTIME = "__pregel_runtime"

Handler = Callable[[ToolCallRequest], Any]
AsyncHandler = Callable[[ToolCallRequest], Awaitable[Any]]
Chain = Sequence[AgentMiddleware[Any, Any, Any]]
Refusal = Callable[[BaseTool], str | None]


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
        self._model()

    def on_chat_model_start(self, serialized: Any, messages: Any, **others: Any) -> None:
        """Note a model."""
        self._model()

    def _model(self) -> None:
        self.reason = self.reason or "it asks a model of its own, whose words a stream would show"


@dataclass(slots=True)
class Ahead:
    """A call that is to run ahead; `written` is what the tool streamed meanwhile.

    `refusal` says why it may not run ahead with another tool, to which the agent's middleware sends it.
    """

    pending: Pending
    call: Call
    tool: BaseTool
    refusal: Refusal
    state: Mapping[str, Any]
    config: RunnableConfig
    runtime: Runtime[Any]
    written: list[Any] = field(default_factory=list)
    inside: Inside = field(default_factory=Inside)

    @property
    def tool_call(self) -> dict[str, Any]:
        """The call as a tool node takes it."""
        return {
            "name": self.call.name,
            "args": dict(self.call.arguments),
            "id": self.pending.id,
            "type": "tool_call",
        }

    def own_config(self) -> RunnableConfig:
        """The run's config, flagged, without its callbacks and without what would reach into the running graph.

        An `interrupt()` in the tool would otherwise count among those of the model's node, or take its answer.
        """
        kept = {k: v for k, v in self.config.get("configurable", {}).items() if not k.startswith(_GRAPH_KEYS)}
        kept[_RUNTIME] = self.runtime.override(stream_writer=self.written.append)
        return {
            **self.config,
            "callbacks": [self.inside],
            "tags": [*(self.config.get("tags") or ()), FLAG, TAG_NOSTREAM],
            "metadata": {**(self.config.get("metadata") or {}), FLAG: True},
            "configurable": kept,
        }

    def own_context(self) -> contextvars.Context:
        """The caller's context variables, with this call's config in place of the model's."""
        context = contextvars.copy_context()
        context.run(var_child_runnable_config.set, self.own_config())
        return context


@dataclass(frozen=True, slots=True)
class Runner:
    """Starts calls ahead.

    `took` is told how long a tool took, `refuse` which tool must not run ahead again, `fault` what failed around one.
    """

    ledger: Ledger
    own: AgentMiddleware[Any, Any, Any]
    redact: Redact | None
    took: Callable[[str, float], None]
    refuse: Callable[[str, str], None]
    fault: Callable[[Exception], None]

    def start(self, ahead: Ahead, chain: Chain) -> None:
        """Start a call on a thread of its own, which ends with the process."""
        work = functools.partial(ahead.own_context().run, self._run, ahead, chain)
        try:
            threading.Thread(target=work, name=ahead.pending.id, daemon=True).start()
        except RuntimeError:  # the process has no thread left
            self.ledger.drop(ahead.pending, "failed")
            self.ledger.ended(ahead.pending)

    def start_task(self, loop: asyncio.AbstractEventLoop, ahead: Ahead, chain: Chain) -> None:
        """Start a call as a task of an event loop, from its own thread or another."""
        begin = functools.partial(self._begin, loop, ahead, chain)
        if _is_running(loop):
            begin()
        else:
            loop.call_soon_threadsafe(begin)

    def _begin(self, loop: asyncio.AbstractEventLoop, ahead: Ahead, chain: Chain) -> None:
        pending = ahead.pending
        if pending.dropped:
            self.ledger.ended(pending)
            return
        task = loop.create_task(self._arun(ahead, chain), context=ahead.own_context())
        pending.stop = functools.partial(_cancel, loop, task)
        task.add_done_callback(functools.partial(self._ended, pending))

    def _ended(self, pending: Pending, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step ends here alone."""
        self.ledger.ended(pending)

    def _run(self, ahead: Ahead, chain: Chain) -> None:
        manager, caught = CallbackManager.configure(**_flagged(ahead.config)), _Caught(ahead, self.ledger)
        try:
            shown = manager.on_tool_start({"name": ahead.call.name}, self._shown(ahead), inputs={})
            with self._settling(ahead, caught):
                wrapper = composed(chain, self.own, caught.wrap, caught.call, "wrap_tool_call")
                node = ToolNode([ahead.tool], wrap_tool_call=wrapper)
                node.invoke(_input(ahead.tool_call, ahead.state), ahead.own_config())
            shown.on_tool_end(_outcome(ahead.pending))
        except Exception as error:
            self._failed_around(ahead, error)
        finally:
            self.ledger.ended(ahead.pending)

    async def _arun(self, ahead: Ahead, chain: Chain) -> None:
        manager, caught = AsyncCallbackManager.configure(**_flagged(ahead.config)), _Caught(ahead, self.ledger)
        try:
            shown = await manager.on_tool_start({"name": ahead.call.name}, self._shown(ahead), inputs={})
        except Exception as error:
            self._failed_around(ahead, error)
            return
        try:
            with self._settling(ahead, caught):
                wrapper = composed(chain, self.own, caught.awrap, caught.acall, "awrap_tool_call")
                node = ToolNode([ahead.tool], awrap_tool_call=wrapper)
                async with asyncio.timeout(self.ledger.seconds_left(ahead.pending)):
                    await node.ainvoke(_input(ahead.tool_call, ahead.state), ahead.own_config())
        finally:
            await shown.on_tool_end(_outcome(ahead.pending))

    @contextmanager
    def _settling(self, ahead: Ahead, caught: _Caught) -> Iterator[None]:
        """Runs the call in here, untraced, and keeps its answer, or its error in place of it."""
        begun = time.perf_counter()
        try:
            with tracing_context(enabled=False):
                yield
            if ahead.inside.reason is not None:
                raise NotAnAnswer(ahead.inside.reason, refuse=True)
            answer = caught.answer()
        except Exception as error:  # thrown away: the call is made again if the model asks for it
            self._failed(ahead, error)
        else:
            ahead.pending.seconds = time.perf_counter() - begun
            ahead.pending.result.set_result((answer, ahead.written))
            self.took(ahead.call.name, ahead.pending.seconds)

    def _failed(self, ahead: Ahead, error: Exception) -> None:
        """Keep the error in place of a result; a tool that reaches for the graph is refused from now on."""
        reaches = isinstance(error, KeyError) and _GRAPH_KEYS in str(error)
        if isinstance(error, GraphBubbleUp) or reaches:
            error = NotAnAnswer("it interrupts the graph, or reads from it", refuse=True)
        if isinstance(error, NotAnAnswer) and error.refuse:
            self.refuse(ahead.call.name, error.reason)
        ahead.pending.result.set_exception(error)
        self.ledger.drop(ahead.pending, "failed")

    def _failed_around(self, ahead: Ahead, error: Exception) -> None:
        """Take note of a fault outside of the tool, such as of `redact`: nobody waits for the result any longer."""
        self.fault(error)
        if not ahead.pending.result.done():
            ahead.pending.result.set_exception(error)
            self.ledger.drop(ahead.pending, "failed")

    def _shown(self, ahead: Ahead) -> str:
        """What callbacks and traces see of the arguments: nothing, unless `redact` says what may be seen."""
        return "" if self.redact is None else self.redact(canonical(ahead.call.arguments) or "")


class _Caught:
    """One run ahead in the agent's chain: in our middleware's place it keeps what the call answers there.

    In the tool's place it lets the call through only to a tool that may run ahead as well.
    """

    def __init__(self, ahead: Ahead, ledger: Ledger) -> None:
        self._ahead, self._ledger = ahead, ledger
        self._found: Any = None
        self._stopped: NotAnAnswer | None = None

    def wrap(self, request: ToolCallRequest, handler: Handler) -> Any:
        self._at(request)
        self._found = handler(request)
        return self._found

    async def awrap(self, request: ToolCallRequest, handler: AsyncHandler) -> Any:
        self._at(request)
        self._found = await handler(request)
        return self._found

    def _at(self, request: ToolCallRequest) -> None:
        """Middleware outside may have changed the call: it is compared as it is here, as the real one will be."""
        self._found = None
        tool = self._checked(request)
        self._ahead.pending.tool, self._ahead.pending.key = tool, key_of(tool, request.tool_call["args"])

    def call(self, request: ToolCallRequest, handler: Handler) -> Any:
        self._hold(request)
        try:
            return handler(request)
        finally:
            self._ledger.release(self._ahead.pending)

    async def acall(self, request: ToolCallRequest, handler: AsyncHandler) -> Any:
        tool = self._hold(request)
        if _is_synchronous(tool):
            return await asyncio.wrap_future(self._on_a_thread(tool, request))
        try:
            return await handler(request)
        finally:
            self._ledger.release(self._ahead.pending)

    def _on_a_thread(self, tool: BaseTool, request: ToolCallRequest) -> Future[Any]:
        """Call a synchronous tool on a thread of its own, which keeps the call's place though its task is cancelled."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        config = self._ahead.own_config()

        def run() -> None:
            try:
                node = ToolNode([tool], wrap_tool_call=lambda own, execute: execute(own.override(tool=tool)))
                found = node.invoke(_input(request.tool_call, request.state), config)
            except BaseException as error:
                self._ledger.release(self._ahead.pending)
                answer.set_exception(error)
            else:
                self._ledger.release(self._ahead.pending)
                found = found["messages"] if isinstance(found, dict) else found
                answer.set_result(found[0] if len(found) == 1 else found)

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(run,), name=self._ahead.pending.id, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has no thread left
            self._ledger.release(self._ahead.pending)
            raise
        return answer

    def _hold(self, request: ToolCallRequest) -> BaseTool:
        tool = self._checked(request)
        if not self._ledger.hold(self._ahead.pending):
            self._stop(NotAnAnswer("it was given up, or its earlier attempt still runs", refuse=False))
        return tool

    def _checked(self, request: ToolCallRequest) -> BaseTool:
        """Return the tool that is to be called, if it may run ahead: middleware may have put another in its place."""
        tool = request.tool
        if tool is None:
            self._stop(NotAnAnswer("other middleware took its tool away", refuse=True))
        reason = self._ahead.refusal(tool)
        if reason is not None and tool is self._ahead.tool:
            self._stop(NotAnAnswer(reason, refuse=False))
        if reason is not None:
            moved = f"other middleware sends its calls to {tool.name!r}, which may not run ahead: {reason}"
            self._stop(NotAnAnswer(moved, refuse=True))
        return tool

    def _stop(self, error: NotAnAnswer) -> NoReturn:
        """Raise the error, and keep it: middleware may make an answer of it."""
        self._stopped = error
        raise error

    def answer(self) -> ToolMessage:
        """The answer. Raises NotAnAnswer for anything but a plain, good answer to this very call."""
        found, own_id = self._found, self._ahead.pending.id
        if self._stopped is not None:
            raise self._stopped
        if found is None:
            raise NotAnAnswer("another middleware kept the call from being made", refuse=False)
        if not isinstance(found, ToolMessage):
            raise NotAnAnswer("it returned a Command, or more than one message", refuse=True)
        if found.tool_call_id != own_id:
            raise NotAnAnswer("it answers under a call id of its own", refuse=True)
        if found.status == "error":
            raise NotAnAnswer("it answered with an error", refuse=False)
        return found


def composed(chain: Chain, own: AgentMiddleware[Any, Any, Any], at_own: Any, at_tool: Any, hook: str) -> Any:
    """All `wrap_tool_call` of an agent, the first outermost, with `at_own` in the place of our middleware's.

    `at_tool` stands innermost, around the tool itself.
    """
    hooks = ("wrap_tool_call", "awrap_tool_call")
    wrapping = [m for m in chain if any(getattr(type(m), h) is not getattr(AgentMiddleware, h) for h in hooks)]
    wrappers = [*(at_own if m is own else getattr(m, hook) for m in wrapping), at_tool]
    return functools.reduce(lambda inner, outer: _around(outer, inner), reversed(wrappers))


def _around(outer: Any, inner: Any) -> Any:
    return lambda request, execute: outer(request, lambda changed: inner(changed, execute))


def _input(tool_call: Any, state: Any) -> dict[str, Any]:
    return {"__type": "tool_call_with_context", "tool_call": tool_call, "state": state}


def _is_synchronous(tool: BaseTool) -> bool:
    """Whether an event loop runs the tool on a thread, because it has no coroutine of its own."""
    own = [getattr(type(tool), name) for name in ("ainvoke", "arun", "_arun")]
    known = {getattr(kind, name) for kind in (BaseTool, StructuredTool, Tool) for name in ("ainvoke", "arun", "_arun")}
    return getattr(tool, "coroutine", None) is None and all(one in known for one in own)


def _flagged(config: RunnableConfig) -> dict[str, Any]:
    return {
        "inheritable_callbacks": config.get("callbacks"),
        "inheritable_tags": [*(config.get("tags") or ()), FLAG, TAG_NOSTREAM],
        "inheritable_metadata": {**(config.get("metadata") or {}), FLAG: True},
    }


def _outcome(pending: Pending) -> str:
    """What callbacks and traces see of the answer: that there is one."""
    if not pending.result.done():
        return "stopped"
    return "failed" if pending.result.exception() is not None else "finished"


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread is running the loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Cancel a task from any thread; of a loop that is closed there is nothing left to cancel."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)


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
    written = _written(validated)
    return canonical({"given": arguments} if written is None else {"read": written})


def _written(validated: BaseModel) -> Any:
    """Validated arguments as JSON values; None where these would not be read back as the same arguments."""
    try:
        written = validated.model_dump(mode="json", by_alias=True)
        return written if type(validated).model_validate(written) == validated else None
    except (ValidationError, ValueError, TypeError):
        return None


def handed_over(request: ToolCallRequest, found: Any) -> ToolMessage:
    """The result under the call's own id; what its tool streamed is streamed now."""
    message, written = found
    adopted: ToolMessage = message.model_copy(update={"tool_call_id": request.tool_call["id"]})
    for piece in written:
        request.runtime.stream_writer(piece)
    return adopted


def show(request: ToolCallRequest, tool: BaseTool, message: ToolMessage) -> None:
    """Tell callbacks and traces of the call and its answer, as the tool itself would have."""
    run = CallbackManager.configure(*_callbacks(request, tool)).on_tool_start(*_asked(tool, request), **_with(request))
    run.on_tool_end(message, name=tool.name)


async def ashow(request: ToolCallRequest, tool: BaseTool, message: ToolMessage) -> None:
    """The same in an event loop."""
    manager = AsyncCallbackManager.configure(*_callbacks(request, tool))
    run = await manager.on_tool_start(*_asked(tool, request), **_with(request))
    await run.on_tool_end(message, name=tool.name)


def _callbacks(request: ToolCallRequest, tool: BaseTool) -> tuple[Any, ...]:
    """The arguments with which `BaseTool.run` configures its callbacks."""
    config = request.runtime.config
    tags, metadata = config.get("tags"), config.get("metadata")
    return config.get("callbacks"), tool.callbacks, tool.verbose, tags, tool.tags, metadata, tool.metadata


def _asked(tool: BaseTool, request: ToolCallRequest) -> tuple[dict[str, Any], str]:
    return {"name": tool.name, "description": tool.description}, str(request.tool_call["args"])


def _with(request: ToolCallRequest) -> dict[str, Any]:
    call = request.tool_call
    return {"inputs": call["args"], "tool_call_id": call["id"]}


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
