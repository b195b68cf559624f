"""Hands the result of a run ahead over to the call that the model has made, as if the tool had answered it."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain.agents.middleware import ToolCallRequest
from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from precedent_run_ahead.actions.ledger import Ledger, Pending


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
