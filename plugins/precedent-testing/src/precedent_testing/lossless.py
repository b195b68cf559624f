"""Checks that speculation changes no answer of a chat model, as configured with its tools, cache and drafters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage

from precedent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Runs:
    """What was compared: the number of answers, their tokens, and how many of these were accepted proposals."""

    num_answers: int
    num_tokens: int
    num_accepted_tokens: int


def assert_lossless(llm: Any, *inputs: Any, **kwargs: Any) -> Runs:
    """Raise AssertionError unless plain decoding, speculation, and speculation with the answer cached all agree.

    `llm` is a `ChatPrecedent`, or one with tools bound; `kwargs` go to every call. Answers are compared in full:
    text, tool calls, finish reason and number of tokens. In bfloat16 a near-tie may be ordered differently in two
    forward passes, so use float32. Raises ConfigError for unseeded sampling, where two answers differ anyway.
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
        raise ConfigError("assert_lossless takes a ChatPrecedent, or one with tools bound, whose answers are messages")
    mode = answer.response_metadata["speculation"]["mode"]
    if mode not in ("greedy", "coupled"):
        raise ConfigError(f"answers in mode {mode!r} are sampled anew each time: set temperature=0, or a seed")


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
