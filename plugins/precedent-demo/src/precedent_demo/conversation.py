"""Runs conversations between a LangChain agent on the order desk and a scripted customer.

The model chooses every call and every word of the assistant. The customer answers each turn without a call. The
conversation ends when the customer has nothing more to say, or after `MAX_TURNS` turns of the assistant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, AgentState, InputAgentState, hook_config
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage
from langgraph.runtime import Runtime

from precedent_demo.desk import OrderDesk
from precedent_demo.requests import Customer, Request
from precedent_demo.tools import make_tools

SYSTEM_PROMPT = (
    "You serve the customers of an order desk. Find an order by its number, or by the customer's email. "
    "Look at an order before you change it: only pending orders can be cancelled or sent elsewhere, and delivered "
    "items can be returned or exchanged while returns are open. Ask for a yes before you change anything. "
    "Answer in one or two short sentences."
)
MAX_TOKENS_PER_TURN = 80  # pass this to the chat model: a small one may not stop by itself
MAX_TURNS = 14
NODES_PER_TURN = 4  # turn check before the model, model, turn check after it, tools


@dataclass(frozen=True, slots=True)
class Transcript:
    """One finished request: every message, every row of the database afterwards, and whether the request was fulfilled.

    `gold_reached` says whether the database equals, row by row, one on which exactly the request's calls were made.
    `facts_told` says whether the assistant's words contain all facts that the request asks for.
    """

    request: Request
    messages: tuple[AnyMessage, ...]
    state: dict[str, list[tuple[Any, ...]]]
    gold_reached: bool
    facts_told: bool

    @property
    def answers(self) -> list[AIMessage]:
        """The assistant's turns in order, with text, tool_calls, usage_metadata and response_metadata."""
        return _answers(self.messages)

    @property
    def solved_by_model(self) -> bool:
        """True if the database is as it should be and the customer was told all facts."""
        return self.gold_reached and self.facts_told


class CustomerInTheLoop(AgentMiddleware[AgentState[Any], None, Any]):
    """Lets the customer answer each turn without a call, and ends the run when the customer is done."""

    def __init__(self, customer: Customer) -> None:
        super().__init__()
        self._customer = customer

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: AgentState[Any], runtime: Runtime[None]) -> dict[str, Any] | None:
        """End the run after `MAX_TURNS` turns, because a model may call tools forever."""
        return {"jump_to": "end"} if len(_answers(state["messages"])) >= MAX_TURNS else None

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: AgentState[Any], runtime: Runtime[None]) -> dict[str, Any] | None:
        """Continue with the customer's reply to a turn without a call."""
        answer = _answers(state["messages"])[-1]
        if answer.tool_calls:
            return None
        reply = self._customer.reply(answer.text)
        return None if reply is None else {"messages": [HumanMessage(reply)], "jump_to": "model"}


def run_request(
    chat_model: BaseChatModel,
    request: Request,
    desk: OrderDesk,
    *,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    tool_latency: float = 0.0,
) -> Transcript:
    """Serve one request with a LangChain agent on a copy of `desk`; the model generates every assistant turn.

    `middleware` stands behind the customer's own, and reading takes `tool_latency` seconds. `desk` itself does not
    change. Errors of the chat model propagate.
    """
    customer = Customer(request)
    opening: InputAgentState = {"messages": [HumanMessage(customer.opening)]}
    loop = [CustomerInTheLoop(customer), *middleware]
    limit = NODES_PER_TURN * (MAX_TURNS + 1)
    with closing(desk.copy()) as own:
        tools = make_tools(own, tool_latency)
        agent = create_agent(chat_model, tools, system_prompt=SYSTEM_PROMPT, middleware=loop, name="order-desk")
        messages: list[AnyMessage] = agent.invoke(opening, config={"recursion_limit": limit})["messages"]
        state = own.state()
    told = " ".join(answer.text for answer in _answers(messages))
    reached, facts = state == gold_state(request, desk), all(fact in told for fact in request.facts)
    return Transcript(request, tuple(messages), state, reached, facts)


def gold_state(request: Request, desk: OrderDesk) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of a copy of `desk` on which exactly the request's calls were made."""
    with closing(desk.copy()) as gold:
        tools = {tool.name: tool for tool in make_tools(gold)}
        for call in request.calls:
            tools[call.name].invoke(dict(call.arguments))
        return gold.state()


def _answers(messages: Sequence[BaseMessage]) -> list[AIMessage]:
    return [message for message in messages if isinstance(message, AIMessage)]
