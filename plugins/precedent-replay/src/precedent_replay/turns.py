"""Assistant turns as token ids: the prompt, the answer, and the recall query.

Prompts are written in ChatML with Hermes tool calls. Each message is encoded once and cached, because thousands of
prompts start with the same policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from precedent.cache import Completion, prompt_fingerprint, tools_fingerprint
from precedent.text.query import recall_query
from precedent.text.traces import Message, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEMBERED_MESSAGES = 20_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One recorded answer, end token included, and its prompt; `tools` is the fingerprint of the tools."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    query: str = ""
    calls_tools: bool = False
    tools: str = ""

    @property
    def completion(self) -> Completion:
        """What a pool keeps: the answer without its prompt, since all prompts of a log would not fit in memory."""
        prompt = prompt_fingerprint(self.prompt_ids)
        return Completion(self.token_ids, "", "", query=self.query, prompt_fingerprint=prompt, tools=self.tools)


class TurnReader:
    """Splits trajectories into turns, with the ids of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encode = lru_cache(REMEMBERED_MESSAGES)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
        )
        ends = self._encode("<|im_end|>")
        self.end_token_id = ends[0] if len(ends) == 1 else int(tokenizer.eos_token_id or 0)

    def turns(self, trajectory: Trajectory) -> Iterator[Turn]:
        """The assistant turns, in order."""
        ids = [*self._encode(_head(trajectory))]
        plain, tools = list[Message](), tools_fingerprint(trajectory.tools)
        for place, message in enumerate(trajectory.messages):
            body = message_text(message)
            if message["role"] == "assistant":
                answered = not trajectory.only_last or place == len(trajectory.messages) - 1
                answer = (*self._encode(body), self.end_token_id)
                ids += self._encode("<|im_start|>assistant\n")
                if answered and body and plain:
                    yield Turn(tuple(ids), answer, recall_query(plain), bool(message.get("tool_calls")), tools)
                ids += [*answer, *self._encode("\n")]
            else:
                ids += self._encode(f"<|im_start|>{message['role']}\n{body}<|im_end|>\n")
            plain.append({**message, "content": _content(message)})


def _head(trajectory: Trajectory) -> str:
    """The tool schemas, as a Hermes template lists them first."""
    if not trajectory.tools:
        return ""
    schemas = "\n".join(json.dumps(tool) for tool in trajectory.tools)
    return f"<|im_start|>system\n<tools>\n{schemas}\n</tools><|im_end|>\n"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def message_text(message: Mapping[str, Any]) -> str:
    """A message's content and tool calls as one text."""
    calls = [_call_text(call) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (_content(message), *calls) if part)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {written}}}\n</tool_call>'
