"""Conversations of the environment's expert, as the token ids that a model sees at inference.

A conversation excludes its head (the system turn with the tool schemas), which is the same for all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from precedent.text.prompt import Message, render_prompt
from precedent_demo.conversation import SYSTEM_PROMPT
from precedent_demo.customer import Customer
from precedent_demo.desk import OrderDesk
from precedent_demo.expert import Expert, Said, outcome
from precedent_demo.requests import Call, Request
from precedent_demo.tools import make_tools
from precedent_demo.workflows import SPLITS, generate_requests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUESTS_PER_DATABASE = 40


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids after the head, and which of them the assistant wrote (including `<|im_end|>`)."""

    token_ids: tuple[int, ...]
    written: tuple[bool, ...]


def expert_messages(request: Request, desk: OrderDesk, rng: random.Random) -> list[Message]:
    """The conversation of customer and expert as template messages, without the system message."""
    own, customer = desk.copy(), Customer(request)
    messages: list[Message] = [{"role": "user", "content": customer.opening}]
    talk = Expert(request.goal, rng).turns()
    result: Any = None
    while True:
        try:
            turn = talk.send(result)
        except StopIteration:
            own.close()
            return messages
        if isinstance(turn, Said):
            result = customer.reply(turn.text)
            messages.append({"role": "assistant", "content": turn.text})
            messages += [{"role": "user", "content": result}] if result else []
        else:
            result = outcome(turn, own)
            messages.append({"role": "assistant", "content": "", "tool_calls": [_as_made(turn)]})
            messages.append({"role": "tool", "content": json.dumps(result)})


def _as_made(call: Call) -> dict[str, Any]:
    return {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


@lru_cache(maxsize=1)
def tool_schemas() -> tuple[dict[str, Any], ...]:
    """The tools in the form in which `create_agent` gives them to a chat model."""
    desk = OrderDesk.from_seed(0)
    try:
        return tuple(convert_to_openai_tool(tool) for tool in make_tools(desk))
    finally:
        desk.close()


class Encoder:
    """Turns messages into the ids that `precedent.text.prompt.render_prompt` gives at inference.

    `head` is the system turn with the tool schemas, `short_head` the system turn without them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self._generation = tuple(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
        self.head, self.short_head = self._head_of(tool_schemas()), self._head_of(())

    def _head_of(self, tools: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        user = self._tokenizer.encode("<|im_start|>user", add_special_tokens=False)
        prompt = self._prompt([{"role": "user", "content": "x"}], tools)
        return tuple(prompt[: max(i for i in range(len(prompt)) if prompt[i : i + len(user)] == user)])

    def _prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        return render_prompt(self._tokenizer, [{"role": "system", "content": SYSTEM_PROMPT}, *messages], tools)

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """A whole conversation; it ends with the `<|im_end|>` of the last turn of the assistant."""
        prompt = self._prompt(messages, tool_schemas())
        last = max(i for i, token in enumerate(prompt[: -len(self._generation)]) if token == self._end)
        token_ids = prompt[len(self.head) : last + 1]
        return Conversation(tuple(token_ids), self.written(token_ids))

    def written(self, token_ids: Sequence[int]) -> tuple[bool, ...]:
        """Which tokens after the head the assistant wrote, including the ends of its turns."""
        return tuple(self._written(token_ids))

    def _written(self, token_ids: Sequence[int]) -> Iterator[bool]:
        inside = False
        for position, token in enumerate(token_ids):
            opened = tuple(token_ids[max(0, position - len(self._generation)) : position]) == self._generation
            inside = opened or inside
            yield inside
            inside = inside and token != self._end


def conversations(encoder: Encoder, set_name: str, seed: int) -> Iterator[Conversation]:
    """Endless conversations, on a new database after every `REQUESTS_PER_DATABASE` requests."""
    for number in count(seed * 100_000):
        desk, rng = OrderDesk.from_seed(number, SPLITS[set_name]), random.Random(f"expert {set_name} {number}")
        requests = generate_requests(set_name, number, desk)
        for _ in range(REQUESTS_PER_DATABASE):
            yield encoder.conversation(expert_messages(next(requests), desk, rng))
        desk.close()
