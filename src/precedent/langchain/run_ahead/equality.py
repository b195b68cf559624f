"""Two calls of a tool are equal if its schema reads the same arguments from them."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import BaseTool
from pydantic import BaseModel, ValidationError

from precedent.actions.calls import canonical


def key_of(tool: BaseTool, arguments: Any) -> str | None:
    """The arguments as the tool's schema reads them, in canonical form; None if it refuses them.

    A tool whose schema is a JSON Schema (as of MCP) gets its arguments as they are, so they are compared as they are.
    """
    schema = tool.args_schema
    if not isinstance(arguments, dict):
        return None
    if schema is None or isinstance(schema, dict):
        return canonical(arguments)
    try:
        if issubclass(schema, BaseModel):
            return canonical(schema.model_validate(arguments).model_dump(mode="json"))
        return canonical(schema.parse_obj(arguments).dict())
    except (ValidationError, ValueError, TypeError):
        return None
