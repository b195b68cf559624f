"""The order desk's operations as LangChain tools; a refusal becomes an answer (`{"error": ...}`), not an exception."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.tools import BaseTool, StructuredTool
from pydantic import BaseModel, ValidationError

from precedent_demo.desk import OrderDesk, PolicyError


class Email(BaseModel):
    """Arguments that identify a customer by e-mail address."""

    email: str


class Customer(BaseModel):
    """Arguments that identify a customer by number."""

    customer: str


class Order(BaseModel):
    """Arguments that identify an order by number."""

    order: str


class NewAddress(Order):
    """Arguments of a change of address."""

    address: str


class Cancellation(Order):
    """Arguments of a cancellation; the reasons are desk.CANCEL_REASONS."""

    reason: Literal["ordered by mistake", "no longer needed"]


class OrderItem(Order):
    """Arguments that identify one item of an order."""

    item: str


class Exchange(OrderItem):
    """Arguments of an exchange."""

    option: str


# Names and descriptions are short on purpose: every prompt starts with the system prompt and the schemas.
_TOOLS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("find_customer", Email, "Find a customer."),
    ("list_orders", Customer, "List a customer's orders."),
    ("get_order", Order, "Show an order."),
    ("track_shipment", Order, "Show where an order is."),
    ("get_refund_status", Order, "Show a refund."),
    ("change_address", NewAddress, "Send a pending order elsewhere."),
    ("cancel_order", Cancellation, "Cancel a pending order."),
    ("request_return", OrderItem, "Return a delivered item."),
    ("exchange_item", Exchange, "Swap a delivered item."),
)

READ_ONLY = ("find_customer", "list_orders", "get_order", "track_shipment", "get_refund_status")
"""The tools that change nothing."""


def make_tools(desk: OrderDesk, latency: float = 0.0) -> list[BaseTool]:
    """The nine tools of the order desk, bound to `desk`: calling one reads or changes that desk's database.

    The ones that only read answer `latency` seconds late, as tools behind a network do.
    """
    late = dict.fromkeys(READ_ONLY, latency)
    return [_tool(_after(late.get(name, 0.0), getattr(desk, name)), name, *rest) for name, *rest in _TOOLS]


def _after(seconds: float, operation: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def late(**arguments: Any) -> dict[str, Any]:
        time.sleep(seconds)
        return operation(**arguments)

    return late if seconds else operation


def _tool(operation: Callable[..., dict[str, Any]], name: str, schema: type[BaseModel], description: str) -> BaseTool:
    def answer(**arguments: Any) -> str:
        try:
            return json.dumps(operation(**arguments))
        except PolicyError as refusal:
            return json.dumps({"error": str(refusal)})

    tool = StructuredTool.from_function(answer, name=name, description=description, args_schema=schema)
    tool.handle_validation_error = _wrong_arguments
    return tool


def _wrong_arguments(error: Any) -> str:
    """One short line instead of pydantic's long message, because the model has to read it."""
    if not isinstance(error, ValidationError):
        return json.dumps({"error": "wrong arguments"})
    problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return json.dumps({"error": "; ".join(problems)})
