"""The order desk's operations as LangChain tools; a refusal is an answer (`{"error": ...}`), never an exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.tools import BaseTool, StructuredTool
from pydantic import BaseModel, ValidationError

from precedent_demo.desk import OrderDesk, PolicyError


class CustomerEmail(BaseModel):
    """Arguments that name a customer by e-mail."""

    email: str


class CustomerId(BaseModel):
    """Arguments that name a customer by id."""

    customer_id: str


class OrderId(BaseModel):
    """Arguments that name an order."""

    order_id: str


class NewAddress(OrderId):
    """Arguments of a change of address."""

    street: str
    city: str
    zip: str


class Cancellation(OrderId):
    """Arguments of a cancellation; the reasons are desk.CANCEL_REASONS."""

    reason: Literal["ordered by mistake", "no longer needed"]


class OrderItem(OrderId):
    """Arguments that name one item of an order."""

    item_id: str


class Exchange(OrderItem):
    """Arguments of an exchange."""

    new_item_id: str


# Descriptions are short on purpose: system prompt and schemas stand in front of every prompt.
_TOOLS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("find_customer", CustomerEmail, "Find a customer's id, name and address."),
    ("list_orders", CustomerId, "List the orders of a customer."),
    ("get_order", OrderId, "Show status, items, total and address of an order."),
    ("track_shipment", OrderId, "Show where a shipped order is."),
    ("get_refund_status", OrderId, "Show the refund of an order."),
    ("change_address", NewAddress, "Send a pending order to a new address."),
    ("cancel_order", Cancellation, "Cancel a pending order."),
    ("request_return", OrderItem, "Return an item of a delivered order."),
    ("exchange_item", Exchange, "Swap an item of a delivered order for another option."),
)


def make_tools(desk: OrderDesk) -> list[BaseTool]:
    """The nine tools of the order desk, bound to `desk`: calling one reads or changes that desk's database."""
    return [_tool(getattr(desk, name), name, schema, description) for name, schema, description in _TOOLS]


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
    """One short line instead of pydantic's page: the model has to read it."""
    if not isinstance(error, ValidationError):
        return json.dumps({"error": "wrong arguments"})
    problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return json.dumps({"error": "; ".join(problems)})
