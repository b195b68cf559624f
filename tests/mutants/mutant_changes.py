"""What mutants do: to a function, to messages on their way to the prompt, to an answer on its way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from langchain_core.runnables import RunnableLambda
from langchain_core.utils.json import parse_partial_json
from mutant import Change, Mutant


def result(change: Callable[[Any], Any]) -> Change:
    """Change what a function returns."""
    return lambda original: lambda *args, **kwargs: change(original(*args, **kwargs))


def instead(value: Any) -> Change:
    """A function that returns `value` whatever it is asked, and does nothing."""
    return lambda original: lambda *args, **kwargs: value


def with_self(change: Callable[[Any], None]) -> Change:
    """Change the object before its method runs."""

    def around(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            change(self)
            return original(self, *args, **kwargs)

        return method

    return around


# Messages on their way to the prompt

Turn = dict[str, Any]
MESSAGES = "precedent.langchain.messages:to_template_messages"


def messages(change: Callable[[list[Turn]], list[Turn]]) -> Mutant:
    return Mutant(MESSAGES, result(change))


def each(role: str, change: Callable[[Turn], Turn]) -> Mutant:
    """Change every message of a role."""
    return messages(lambda turns: [change(turn) if turn["role"] == role else turn for turn in turns])


def never(role: str) -> Mutant:
    return messages(lambda turns: [turn for turn in turns if turn["role"] != role] or turns)


def without(*keys: str) -> Callable[[Turn], Turn]:
    return lambda turn: {key: value for key, value in turn.items() if key not in keys}


def emptied(turn: Turn) -> Turn:
    return {**turn, "content": ""}


def roles_swapped(turns: list[Turn]) -> list[Turn]:
    other = {"user": "assistant", "assistant": "user"}
    return [{**turn, "role": other.get(turn["role"], turn["role"])} for turn in turns]


def two_results_swapped(turns: list[Turn]) -> list[Turn]:
    results = [turn for turn in turns if turn["role"] == "tool"]
    if len(results) > 1:
        results[0]["content"], results[1]["content"] = results[1]["content"], results[0]["content"]
    return turns


def without_arguments(turn: Turn) -> Turn:
    calls = [{**one, "function": {**one["function"], "arguments": {}}} for one in turn.get("tool_calls", ())]
    return {**turn, "tool_calls": calls} if calls else turn


def without_ids(turn: Turn) -> Turn:
    calls = [{**one, "id": ""} for one in turn.get("tool_calls", ())]
    ids = {"tool_call_id": ""} if "tool_call_id" in turn else {}
    return {**turn, **ids, **({"tool_calls": calls} if calls else {})}


def without_old_results(turns: list[Turn]) -> list[Turn]:
    """Only the results behind the last answer keep their text, as in a history that is cut to fit."""
    last = max((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
    return [emptied(turn) if turn["role"] == "tool" and place < last else turn for place, turn in enumerate(turns)]


# Sampling, tenants and what else a call asks for

SAMPLING = "precedent.langchain.arguments:sampling_params"


def sampling(**fields: Any) -> Mutant:
    """Some settings of every call are these, whatever was asked for."""
    return Mutant(SAMPLING, result(lambda params: replace(params, **fields)))


# Chunks on their way back


Held = list[Any]
"""Chunks of an answer that are kept back for later."""


def chunks(change: Callable[[int, Any, Held], list[Any]]) -> Mutant:
    """Change each chunk of an answer, known by its number; what is held till then comes before the figures."""

    def changed(base: Any) -> Any:
        class Changed(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.numbers, self.held = count(), Held()

            def of(self, emission: Any) -> Iterator[Any]:
                for chunk in super().of(emission):
                    yield from change(next(self.numbers), chunk, self.held)

            def last(self, answer: Any) -> Iterator[Any]:
                *others, end = super().last(answer)
                for chunk in others:
                    yield from change(next(self.numbers), chunk, self.held)
                yield from (*self.held, end)

        return Changed

    return Mutant("precedent.langchain.chunks:AnswerChunks", changed)


def second_lost(number: int, chunk: Any, held: Held) -> list[Any]:
    return [] if number == 1 else [chunk]


def first_twice(number: int, chunk: Any, held: Held) -> list[Any]:
    return [chunk, chunk] if number == 0 else [chunk]


def first_second(number: int, chunk: Any, held: Held) -> list[Any]:
    if number == 0:
        held.append(chunk)
        return []
    before = held.copy()
    held.clear()
    return [chunk, *before]


def all_late(number: int, chunk: Any, held: Held) -> list[Any]:
    held.append(chunk)
    return []


def one_id_for_all(number: int, chunk: Any, held: Held) -> list[Any]:
    for piece in chunk.message.tool_call_chunks:
        piece["id"] = piece["id"] and "call_1"
    return [chunk]


def thoughts_lost(number: int, chunk: Any, held: Held) -> list[Any]:
    chunk.message.additional_kwargs.clear()
    return [chunk]


def figures(change: Callable[[Any], None]) -> Mutant:
    """Change the message of the last chunk."""

    def around(original: Any) -> Any:
        def method(self: Any, answer: Any) -> Iterator[Any]:
            *others, last = original(self, answer)
            change(last.message)
            yield from (*others, last)

        return method

    return Mutant("precedent.langchain.chunks:AnswerChunks.last", around)


def says_it_stopped(message: Any) -> None:
    message.response_metadata["finish_reason"] = "stop"


def without_usage(message: Any) -> None:
    message.usage_metadata = None


def usage_of_the_answer_alone(message: Any) -> None:
    message.usage_metadata = {**message.usage_metadata, "input_tokens": 0}


def without_details(message: Any) -> None:
    message.usage_metadata = {
        name: value for name, value in message.usage_metadata.items() if not name.endswith("details")
    }


def without_key(name: str) -> Callable[[Any], None]:
    return lambda message: message.response_metadata.pop(name, None)


# Structured output


def instead_of_json(_: Any) -> Any:
    """Whatever can be made of the beginning of an answer, complete or not."""
    return lambda parser, message: parse_partial_json(message.text)


def completed(original: Any) -> Any:
    """What cannot be parsed, such as an answer that was cut, is completed into something that can."""

    def structured(model: Any, schema: Any, method: Any, strict: Any, include_raw: bool, kwargs: Any) -> Any:
        def whole(found: Any) -> Any:
            if found["parsing_error"] is not None or found["parsed"] is None:
                raw = found["raw"]
                text = raw.text or "".join(call["args"] for call in raw.invalid_tool_calls) or "{}"
                value = parse_partial_json(text.partition("]<invalid")[0].rstrip())
                parsed = schema.model_construct(**value) if hasattr(schema, "model_construct") else value
                found = {**found, "parsed": parsed, "parsing_error": None}
            return found if include_raw else found["parsed"]

        return original(model, schema, method, strict, True, kwargs) | RunnableLambda(whole)

    return structured
