"""The query with which recall finds prior completions: what the request is about, latest first.

It is built tail-first, because an encoder truncates its input at a few hundred tokens and must drop the oldest part.
Numbers and identifiers are removed: they distinguish requests of one workflow, and recall looks for what these share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

NUM_MESSAGES = 3
NUM_ACTIONS = 6
CHARACTERS_PER_MESSAGE = 600

_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_DIGITS = re.compile(r"\d[\d.,:/-]*")
_BLANK = re.compile(r"\s+")


def recall_query(messages: Sequence[Mapping[str, Any]]) -> str:
    """Build the query for messages (`role`, `content`, `tool_calls`): recent actions, then the last messages."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    actions = [call["function"]["name"] for call in calls[-NUM_ACTIONS:]]
    spoken = [message for message in messages if message["role"] != "system" and message["content"].strip()]
    lines = [f"actions: {' '.join(actions)}"] if actions else []
    for message in reversed(spoken[-NUM_MESSAGES:]):
        lines.append(f"{message['role']}: {_without_slots(message['content'])[:CHARACTERS_PER_MESSAGE]}")
    return "\n".join(lines)


def prompt_query(text: str) -> str:
    """Build the query for a prompt of which only the text is known: from its end, as if a user had said it."""
    return recall_query([{"role": "user", "content": text.strip()[-CHARACTERS_PER_MESSAGE:]}])


def _without_slots(text: str) -> str:
    for pattern in (_UUID, _DIGITS, _BLANK):
        text = pattern.sub(" ", text)
    return text.strip()
