"""Fits turns to a tool format's template: call ids by place, one call per turn, broken calls as text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from precedent.text.tool_formats import ToolFormat
from precedent.text.tool_formats.json_text import ARGUMENTS, unsealed

Message = dict[str, Any]
CALL_TEXT = "call_text"
"""Message key for the text of broken calls, which is appended to the content when the prompt is rendered."""


def fitted(messages: Sequence[Message], form: ToolFormat | None) -> list[Message]:
    """Turn `invalid_calls` back into text, and fit the messages to what the format's template accepts."""
    turns = [_with_broken_calls(message, form) for message in messages]
    turns = _with_ids_by_place(turns, form.id_length if form else None)
    if form is None:
        return turns
    if form.one_call_per_turn:
        turns = _one_call_a_turn(turns)
    if form.reasoning_key != "reasoning_content":
        turns = [_with_reasoning_under(turn, form.reasoning_key) for turn in turns]
    return turns


def _with_broken_calls(message: Message, form: ToolFormat | None) -> Message:
    if "invalid_calls" not in message:
        return message
    separator = form.separator if form else "\n"
    turn = {key: value for key, value in message.items() if key != "invalid_calls"}
    turn[CALL_TEXT] = separator.join(_broken_text(call, form) for call in message["invalid_calls"])
    return turn


def _broken_text(call: Message, form: ToolFormat | None) -> str:
    """The text that the model wrote: all of it, or the opening that was parsed followed by the unparsed rest."""
    text, mark = unsealed(call["args"])
    if mark != ARGUMENTS or not call["name"] or form is None:
        return text
    return f"{form.around_arguments(call['name'])[0]}{text}"


def _one_call_a_turn(messages: Sequence[Message]) -> list[Message]:
    """Split parallel calls into one turn each, followed by its own result."""
    turns: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if len(message.get("tool_calls") or ()) < 2:
            turns.append(message)
            continue
        results = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        turns += _split(message, results)
    return turns


def _split(message: Message, results: list[Message]) -> list[Message]:
    turns: list[Message] = []
    rest = list(results)
    for number, call in enumerate(message["tool_calls"]):
        said = message if number == 0 else {"role": "assistant", "content": ""}
        turns.append({**said, "tool_calls": [call]})
        answers = [result for result in rest if result.get("tool_call_id") == call.get("id")][:1] or rest[:1]
        turns += answers
        rest = [result for result in rest if not any(result is answer for answer in answers)]
    return turns + rest


def _with_ids_by_place(messages: Sequence[Message], length: int | None) -> list[Message]:
    """Replace the ids of calls by ones that follow from the call's place in the conversation.

    Ids are random, and a template may print them: prompts of equal conversations would differ at every call. A result
    belongs to the call with its id; if several calls of a turn share it, or none has it, to the next one without a
    result.
    """
    turns: list[Message] = []
    ids: dict[str, str] = {}
    open_calls: list[tuple[str, str]] = []
    number = 0
    for message in messages:
        turn = dict(message)
        if message.get("tool_calls"):
            turn["tool_calls"], open_calls = [], []
            for call in message["tool_calls"]:
                new = _id_at(number, call["function"]["name"], length)
                turn["tool_calls"].append({**call, "id": new})
                open_calls.append((str(call.get("id")), new))
                number += 1
            ids |= open_calls
        elif message["role"] == "tool":
            given = str(message.get("tool_call_id"))
            answered = next((call for call in open_calls if call[0] == given), None)
            if answered is None and given not in ids:
                answered = open_calls[0] if open_calls else (given, _id_at(number, message.get("name"), length))
            if answered in open_calls:
                open_calls.remove(answered)
            turn["tool_call_id"] = ids[given] if answered is None else answered[1]
        turns.append(turn)
    return turns


def _id_at(number: int, name: Any, length: int | None) -> str:
    """The id of a call by its place: of `length` letters and digits, or in the form that Kimi's models write."""
    if length is None:
        return f"functions.{name}:{number}"
    return hashlib.sha256(str(number).encode()).hexdigest()[:length]


def _with_reasoning_under(turn: Message, key: str) -> Message:
    """Move reasoning to the template's own key. Beside a call it takes either reasoning or text, so both are joined."""
    thoughts = turn.get("reasoning_content")
    if not thoughts:
        return turn
    if turn.get("tool_calls") and turn["content"]:
        return {**turn, key: f"{thoughts}\n\n{turn['content']}", "content": ""}
    return {**turn, key: thoughts}
