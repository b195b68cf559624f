"""`SpeculationMiddleware`: sets the tenant, the workflow and the learning of an agent's calls."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NotRequired

from langchain_core.messages import AIMessage, ToolMessage

from precedent.errors import CacheError, ConfigError
from precedent.langchain.chat_model import ChatPrecedent
from precedent.langchain.fields import PendingCompletions
from precedent.runtime.recent import Recent

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
    from langchain.agents.middleware.types import PrivateStateAttr
    from langgraph.runtime import Runtime
except ImportError as error:
    raise ConfigError("SpeculationMiddleware is for create_agent: pip install 'precedent-llm[agents]'") from error

OPEN_RUNS = 1000
"""Most unfinished runs with completions held back; the oldest are dropped first."""

Tenant = str | Callable[["Runtime[Any]"], str]
Workflow = str | Callable[["ModelRequest[Any]"], str]
Budget = int | Callable[["ModelRequest[Any]"], int]

log = logging.getLogger(__name__)


class SpeculationState(AgentState[Any]):
    """An agent's state with the id of its run."""

    precedent_run: NotRequired[Annotated[str, PrivateStateAttr]]


def ended_well(state: AgentState[Any]) -> bool:
    """True if a run ended with an answer of the model, and no tool failed and no call was malformed."""
    messages = state["messages"]
    last = messages[-1] if messages else None
    failed = any(isinstance(message, ToolMessage) and message.status == "error" for message in messages)
    malformed = any(isinstance(message, AIMessage) and message.invalid_tool_calls for message in messages)
    return isinstance(last, AIMessage) and not last.tool_calls and not failed and not malformed


class SpeculationMiddleware(AgentMiddleware[SpeculationState, Any, Any]):
    """Middleware of `create_agent` for a `ChatPrecedent`; calls of other chat models pass unchanged.

    - `tenant`: a text, or a function of the runtime (`lambda runtime: runtime.context["org"]`) that returns a non-empty
      text, because no call may fall back to another tenant.
    - `workflow`: the calls' workflow step, or a function of the model request.
    - `budget`: the most nodes of their candidate trees, or a function of the model request.
    - `learn_from`: a function of a run's final state. Its completions are stored when it ends and this returns true;
      with None each is stored at once. A run that raises, or continues in another process, stores nothing.

        agent = create_agent(llm, tools, middleware=[SpeculationMiddleware(tenant=lambda rt: rt.context["org"])])
    """

    state_schema = SpeculationState

    def __init__(
        self,
        *,
        tenant: Tenant | None = None,
        workflow: Workflow | None = None,
        budget: Budget | None = None,
        learn_from: Callable[[AgentState[Any]], bool] | None = ended_well,
    ) -> None:
        super().__init__()
        self._tenant, self._workflow, self._budget, self._learn_from = tenant, workflow, budget, learn_from
        self._runs: Recent[str, PendingCompletions] = Recent(OPEN_RUNS)

    def before_agent(self, state: SpeculationState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Start the run."""
        if self._learn_from is None:
            return None
        run = uuid.uuid4().hex
        self._runs[run] = PendingCompletions()
        return {"precedent_run": run}

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Make the call with this run's settings."""
        return handler(self._with_settings(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Make the call with this run's settings."""
        return await handler(self._with_settings(request))

    def after_agent(self, state: SpeculationState, runtime: Runtime[Any]) -> None:
        """Store the run's completions or drop them. A cache that cannot be written does not fail the run."""
        pending = self._runs.pop(state.get("precedent_run", ""), None)
        if pending is not None and self._learn_from is not None and self._learn_from(state):
            try:
                pending.store()
            except CacheError as error:
                log.warning("the completions of a run were not stored: %s", error)

    async def aafter_agent(self, state: SpeculationState, runtime: Runtime[Any]) -> None:
        """Do the same outside the event loop, because storing embeds texts and waits for the disk."""
        await asyncio.to_thread(self.after_agent, state, runtime)

    def _with_settings(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if not isinstance(request.model, ChatPrecedent):
            return request
        settings = {
            "tenant": tenant_of_run(self._tenant, request.runtime),
            "workflow_step": self._workflow(request) if callable(self._workflow) else self._workflow,
            "max_nodes": self._budget(request) if callable(self._budget) else self._budget,
            "learning": self._runs.get(str(request.state.get("precedent_run", ""))),
        }
        chosen = {name: value for name, value in settings.items() if value is not None}
        return request.override(model_settings={**chosen, **request.model_settings})


def tenant_of_run(tenant: Tenant | None, runtime: Runtime[Any]) -> str | None:
    """A run's tenant, from the text or the function given. Raises ConfigError if the function names none."""
    if not callable(tenant):
        return tenant
    found = tenant(runtime)
    if not isinstance(found, str) or not found:
        raise ConfigError(f"the tenant of this run is {found!r}: give a non-empty text in its context")
    return found
