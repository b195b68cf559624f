"""The text that recall embeds: the latest first, and nothing that only tells two like requests apart."""

from __future__ import annotations

from typing import Any

from precedent.text.query import CHARACTERS_PER_MESSAGE, prompt_query, recall_query


def turn(role: str, content: str, *calls: str) -> dict[str, Any]:
    return {"role": role, "content": content, "tool_calls": [{"function": {"name": name}} for name in calls]}


def test_the_latest_message_comes_first_and_old_ones_are_left_out() -> None:
    messages = [turn("system", "policy"), *(turn("user", f"message {letter}") for letter in "abcd")]
    assert recall_query(messages) == "user: message d\nuser: message c\nuser: message b"


def test_recent_actions_lead() -> None:
    names = ["open", "find", "look_up", "change", "refund", "close", "thank"]
    messages = [turn("user", "hi"), turn("assistant", "", *names), turn("tool", "done")]
    assert recall_query(messages) == f"actions: {' '.join(names[1:])}\ntool: done\nuser: hi"


def test_identifiers_and_numbers_are_removed() -> None:
    one = turn("user", "order #W2378156 of 2026-01-05, 3f2c9a10-1111-4222-8333-abcdefabcdef,  total 17.50 €")
    other = turn("user", "order #W99 of 2025-12-31, 00000000-1111-4222-8333-000000000000, total 1,200.99 €")
    assert recall_query([one]) == recall_query([other]) == "user: order #W of , total €".replace(" of ,", " of ,")


def test_a_long_tool_result_does_not_push_out_the_question() -> None:
    query = recall_query([turn("user", "the question"), turn("tool", "row " * 5000)])
    assert query.endswith("user: the question")
    assert len(query) < CHARACTERS_PER_MESSAGE + 50


def test_a_bare_prompt_is_asked_by_its_end() -> None:
    """However long it is, and without numbers: as the same words from a user."""
    assert prompt_query("policy " * 500 + "where is order 1042? ").endswith("where is order ?")
    assert len(prompt_query("policy " * 500)) < CHARACTERS_PER_MESSAGE + 50
    assert prompt_query("where is it") == recall_query([turn("user", "where is it")])
    assert prompt_query(" ") == ""
