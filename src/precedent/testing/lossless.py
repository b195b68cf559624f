"""Does speculation change an answer? Asked of a chat model as its user has it: with tools, cache and drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage

from precedent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Runs:
    """What was compared: answers, and of their tokens those that had been proposed."""

    num_answers: int
    num_tokens: int
    num_accepted_tokens: int


def assert_lossless(llm: Any, *inputs: Any, **kwargs: Any) -> Runs:
    """Raise AssertionError unless every answer is the same plain, with speculation, and with its own answer cached.

    `llm` is a `ChatPrecedent` or what `bind_tools` made of it; `kwargs` go to every call. Answers are compared whole:
    text, tool calls, finish reason and number of tokens. In bfloat16 a near-tie may order differently in two forward
    passes: take float32. Raises ConfigError when sampling without a seed, where two answers differ anyway.
    """
    if not inputs:
        raise ConfigError("assert_lossless needs inputs to compare answers to")
    tokens = accepted = 0
    for number, one in enumerate(inputs, start=1):
        plain = llm.invoke(one, speculation=False, **kwargs)
        _check_repeatable(plain)
        for state in ("cold", "warm"):
            drafted = llm.invoke(one, **kwargs)
            _compare(number, state, plain, drafted)
            accepted += drafted.response_metadata["speculation"]["num_accepted_tokens"]
            tokens += drafted.usage_metadata["output_tokens"]
    return Runs(len(inputs), tokens, accepted)


def _check_repeatable(answer: Any) -> None:
    if not isinstance(answer, AIMessage) or "speculation" not in answer.response_metadata:
        raise ConfigError("assert_lossless takes a ChatPrecedent, or one with tools bound: its answers are messages")
    mode = answer.response_metadata["speculation"]["mode"]
    if mode not in ("greedy", "coupled"):
        raise ConfigError(f"answers in mode {mode!r} are drawn anew each time: set temperature=0, or a seed")


def _compare(number: int, state: str, plain: AIMessage, drafted: AIMessage) -> None:
    for name, one, other in zip(("text", "tool calls", "end", "tokens"), _facts(plain), _facts(drafted), strict=True):
        if one != other:
            raise AssertionError(
                f"speculation ({state} cache) changed the {name} of answer {number}:\n  plain:       {one!r}\n"
                f"  speculated:  {other!r}"
            )


def _facts(answer: AIMessage) -> tuple[Any, ...]:
    calls = [(call["name"], call["args"]) for call in (*answer.tool_calls, *answer.invalid_tool_calls)]
    usage: Any = answer.usage_metadata
    return answer.content, calls, answer.response_metadata["finish_reason"], usage["output_tokens"]
