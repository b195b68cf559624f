"""What a run's metadata says of a call, for models in this process and behind a server alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precedent.errors import ConfigError
from precedent.runtime.plain_values import check_plain, shown


def run_metadata(model: Any, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A run's metadata, overridden by the model's own, as LangChain merges them."""
    return {**(metadata or {}), **(model.metadata or {})}


def workflow_step_of(metadata: Mapping[str, Any] | None) -> str | None:
    """The workflow step that a run's metadata names.

    LangChain's agents and graphs set `lc_agent_name` and `langgraph_node`, which together name the step.
    """
    metadata = metadata or {}
    step = metadata.get("workflow_step") or "/".join(
        str(metadata[key]) for key in ("lc_agent_name", "langgraph_node") if metadata.get(key)
    )
    return checked_text("workflow_step", step) if step else None


def checked_text(key: str, value: Any) -> str:
    """The value, which must be a non-empty text. Raises ConfigError."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}={shown(value)} must be a non-empty text")
    check_plain(key, value)
    return value
