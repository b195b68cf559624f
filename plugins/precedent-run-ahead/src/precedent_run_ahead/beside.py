"""What stands beside this middleware in its agent, and which of it might keep a call from being made.

`create_agent` tells a middleware nothing about the others, so they are read from its frame while it puts the agent
together (decision 0038). Whatever might block a call must be known to be harmless, or be declared so by its user.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain.agents import factory
from langchain.agents import middleware as langchains
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware, ToolCallLimitMiddleware
from langchain_core.runnables import RunnableConfig

from precedent.errors import UnsupportedError
from precedent.langchain.middleware import SpeculationMiddleware

_LANGCHAINS = (
    "ContextEditingMiddleware",
    "ModelCallLimitMiddleware",
    "ModelFallbackMiddleware",
    "ModelRetryMiddleware",
    "TodoListMiddleware",
    "ToolErrorMiddleware",
    "ToolRetryMiddleware",
)
HARMLESS = (SpeculationMiddleware, *(getattr(langchains, name) for name in _LANGCHAINS if hasattr(langchains, name)))
"""Middleware that lets every tool call through. Exactly these classes: a subclass may do anything."""

MODEL_HOOKS = ("wrap_model_call", "awrap_model_call")
HOOKS = ("wrap_tool_call", "awrap_tool_call", "after_model", "aafter_model", *MODEL_HOOKS)
"""Hooks that could keep a call from being made: around the tool, or between the model's answer and the tool."""

STOPS = "the run stops at interrupt_before or interrupt_after, where somebody may decide about its calls"

Harmless = Sequence[AgentMiddleware[Any, Any, Any] | type]


@dataclass(frozen=True, slots=True)
class Agent:
    """What `create_agent` was given: the middleware in its order, and the nodes that it stops before or after."""

    middleware: tuple[AgentMiddleware[Any, Any, Any], ...]
    interrupts: bool


def agent_under_construction() -> Agent | None:
    """The agent that a caller up the stack is putting together with `create_agent`; None if there is none."""
    frame, create = sys._getframe(1), inspect.unwrap(factory.create_agent)  # instrumentation wraps it
    while frame is not None:
        if frame.f_code is create.__code__:
            given: Mapping[str, Any] = frame.f_locals
            stops = bool(given.get("interrupt_before") or given.get("interrupt_after"))
            return Agent(tuple(given["middleware"]), stops)
        frame = frame.f_back  # type: ignore[assignment]  # the outermost frame has no caller
    return None


def might_block(agent: Agent, own: AgentMiddleware[Any, Any, Any], harmless: Harmless) -> Iterator[str]:
    """Why no tool of the agent may run ahead, a reason each."""
    if agent.interrupts:
        yield STOPS
    for one in agent.middleware:
        if one is own or type(one) in (*HARMLESS, HumanInTheLoopMiddleware, ToolCallLimitMiddleware):
            continue
        hooks = [hook for hook in HOOKS if _overrides(one, hook)]
        if hooks and not any(one is each or type(one) is each for each in harmless):
            yield f"{one.name} has {hooks[0]} and might block a call: if it never does, say harmless=[{one.name}]"


def invocation_stops(config: RunnableConfig) -> str | None:
    """Return why nothing may run ahead in an invocation that was told to stop before or after its nodes.

    LangGraph tells a node nothing of it, so it is read from the loop that runs the node, as the config refers to it.
    """
    call = config.get("configurable", {}).get("__pregel_call")
    loop = getattr(getattr(call, "keywords", {}).get("schedule_task"), "__self__", None)
    try:
        return STOPS if loop.interrupt_before or loop.interrupt_after else None  # type: ignore[union-attr]
    except AttributeError:
        return "this version of LangGraph does not show whether the invocation stops before its tools"


def others_speak(agent: Agent, own: AgentMiddleware[Any, Any, Any]) -> bool:
    """Whether middleware behind ours may ask models of its own, which nobody could tell from the agent's."""
    behind = agent.middleware[agent.middleware.index(own) + 1 :]
    return any(_overrides(one, hook) for one in behind if type(one) not in HARMLESS for hook in MODEL_HOOKS)


def _overrides(middleware: AgentMiddleware[Any, Any, Any], hook: str) -> bool:
    return getattr(type(middleware), hook) is not getattr(AgentMiddleware, hook)


def under_approval(agent: Agent, name: str) -> bool:
    """Whether a person decides about the tool's calls."""
    asking = [one for one in agent.middleware if isinstance(one, HumanInTheLoopMiddleware)]
    return any(one.interrupt_on.get(name) for one in asking)


def over_limit(agent: Agent, name: str, state: Mapping[str, Any], made: Sequence[str]) -> bool:
    """Whether a call limit might block one more call of the tool, after the calls `made` in this answer."""
    limits = [one for one in agent.middleware if isinstance(one, ToolCallLimitMiddleware)]
    for limit in (one for one in limits if one.tool_name in (None, name)):
        more = sum(limit.tool_name in (None, called) for called in made) + 1
        for most, key in ((limit.thread_limit, "thread_tool_call_count"), (limit.run_limit, "run_tool_call_count")):
            if most is not None and state.get(key, {}).get(limit.tool_name or "__all__", 0) + more > most:
                return True
    return False


class bound_to_its_agent:  # a decorator
    """A hook that gets the `Agent` as its first argument: `create_agent` takes it, and it is bound to that agent.

    Outside of `create_agent` nothing says what might block a call, so the hook raises UnsupportedError when called.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self.__doc__ = hook.__doc__

    def __get__(self, own: Any, kind: type | None = None) -> Any:
        if own is None:
            return self
        agent = agent_under_construction()

        def bound(*arguments: Any) -> Any:
            if agent is None:
                raise UnsupportedError(
                    "RunAheadMiddleware does not know its agent: give it to langchain's create_agent(middleware=[…]), "
                    "where it sees what else might block a call"
                )
            return self._hook(own, agent, *arguments)

        return bound
