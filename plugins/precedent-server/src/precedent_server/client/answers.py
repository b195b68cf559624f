"""What answers carry beyond OpenAI's keys, put where `ChatPrecedent` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import OutputTokenDetails

PROVIDER = "precedent"


def complete(message: BaseMessage, answer: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Add to a message what `answer` (a completion or a chunk) and `said` (its message or delta) have of ours."""
    message.response_metadata["model_provider"] = PROVIDER
    if answer.get("speculation") is not None:
        message.response_metadata["speculation"] = answer["speculation"]
    if said.get("reasoning_content"):
        message.additional_kwargs["reasoning_content"] = said["reasoning_content"]
    if isinstance(message, AIMessage) and message.usage_metadata is not None:
        _count_predictions(message, answer.get("usage") or {})


def _count_predictions(message: AIMessage, usage: Mapping[str, Any]) -> None:
    accepted = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens")
    counted: Any = message.usage_metadata
    if accepted is not None:
        details = {**counted.get("output_token_details", {}), "accepted_prediction": accepted}
        counted["output_token_details"] = cast("OutputTokenDetails", details)


def drop_none(found: dict[str, Any] | None, name: str) -> None:
    """Remove an entry that says nothing, as OpenAI's `"logprobs": null`."""
    if found is not None and found.get(name) is None:
        found.pop(name, None)
