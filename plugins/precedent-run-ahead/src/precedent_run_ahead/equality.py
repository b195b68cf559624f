"""Two calls of a tool are equal if its schema reads the same arguments from them."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import BaseTool
from pydantic import BaseModel, ValidationError

from precedent_run_ahead.actions.calls import canonical


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
