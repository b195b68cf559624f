"""The order desk's operations as LangChain tools; a refusal becomes an answer (`{"error": ...}`), not an exception."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.tools import BaseTool, StructuredTool
from pydantic import ValidationError, create_model

from precedent_demo.desk import CANCEL_REASONS, OrderDesk, PolicyError

# Names and descriptions are short on purpose: every prompt starts with the system prompt and the schemas.
_TOOLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("find_customer", "Find a customer.", {"email": str}),
    ("list_orders", "List a customer's orders.", {"customer": str}),
    ("get_order", "Show an order.", {"order": str}),
    ("track_shipment", "Show where an order is.", {"order": str}),
    ("get_refund_status", "Show a refund.", {"order": str}),
    ("change_address", "Send a pending order elsewhere.", {"order": str, "address": str}),
    ("cancel_order", "Cancel a pending order.", {"order": str, "reason": Literal[CANCEL_REASONS]}),
    ("request_return", "Return a delivered item.", {"order": str, "item": str}),
    ("exchange_item", "Swap a delivered item.", {"order": str, "item": str, "option": str}),
)

READ_ONLY = ("find_customer", "list_orders", "get_order", "track_shipment", "get_refund_status")
"""The tools that change nothing."""


def make_tools(desk: OrderDesk, latency: float = 0.0) -> list[BaseTool]:
    """The nine tools of the order desk, bound to `desk`: calling one reads or changes that desk's database.

    The ones that only read answer `latency` seconds late, as tools behind a network do.
    """
    return [
        _tool(getattr(desk, name), latency if name in READ_ONLY else 0.0, name, *described)
        for name, *described in _TOOLS
    ]


def _tool(
    operation: Callable[..., dict[str, Any]], latency: float, name: str, description: str, arguments: dict[str, Any]
) -> BaseTool:
    def answer(**arguments: Any) -> str:
        time.sleep(latency)
        try:
            return json.dumps(operation(**arguments))
        except PolicyError as refusal:
            return json.dumps({"error": str(refusal)})

    schema = create_model(name, **{argument: (kind, ...) for argument, kind in arguments.items()})
    tool = StructuredTool.from_function(answer, name=name, description=description, args_schema=schema)
    tool.handle_validation_error = _wrong_arguments
    return tool


def _wrong_arguments(error: Any) -> str:
    """One short line instead of pydantic's long message, because the model has to read it."""
    if not isinstance(error, ValidationError):
        return json.dumps({"error": "wrong arguments"})
    problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return json.dumps({"error": "; ".join(problems)})
