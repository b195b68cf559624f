"""Fake chat models of LangChain's, and the records that they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

CALL = {"name": "look_up", "args": {"order": "A 1"}, "id": "call-1", "type": "tool_call"}


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def says(*answers: AIMessage | str) -> GenericFakeChatModel:
    """A chat model that gives these answers one after the other."""
    return GenericFakeChatModel(messages=iter(answers))
