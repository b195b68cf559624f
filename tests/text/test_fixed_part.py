"""The fixed beginning of a chat prompt: what the system turn and the tools give, whatever is asked."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from precedent.text.prompt import FixedPart, render_prompt
from precedent.text.template_settings import TemplateSettings
from precedent_testing.tiny_models import CHATML, byte_tokenizer

SYSTEM = {"role": "system", "content": "You look after orders. Be brief."}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look an order up.", "parameters": {}}}]
MERGES = (("r", "\u010a"), ("\u010a", "\u010a"), ("\u010a", "A"), ("\u010a", "h"))
"""Tokens that join the end of a turn's head with what is asked."""


def told(question: str) -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": question}]


def fixed(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], tools: list[Any], part: FixedPart | None = None
) -> str:
    """The fixed beginning's text."""
    prompt = render_prompt(tokenizer, messages, tools)
    length = (part or FixedPart(tokenizer)).length(prompt, messages, tools)
    return tokenizer.decode(prompt[:length])


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=2, max_size=4))
def test_it_is_the_same_whatever_is_asked_or_nothing(questions: list[str]) -> None:
    """Also where the tokenizer joins the first letters of a question with what stands before them."""
    for tokenizer in TOKENIZERS:
        part = FixedPart(tokenizer)
        found = {fixed(tokenizer, told(question), [], part) for question in questions}
        assert len(found - {""}) <= 1
        assert all(SYSTEM["content"] in text for text in found - {""})


TOKENIZERS = (byte_tokenizer(), byte_tokenizer(MERGES))


def test_another_system_turn_tool_or_setting_has_another() -> None:
    part = FixedPart(byte_tokenizer())
    part._tokenizer.chat_template = "{{ mood }}" + CHATML
    system, settings = [SYSTEM, {"role": "user", "content": "x"}], (TemplateSettings({"mood": "m"}),)
    prompts = [
        (system, [], ()),
        ([{**SYSTEM, "content": "Other."}, system[1]], [], ()),
        (system, [], settings),
        ([system[1]], [], ()),
    ]
    rendered = [render_prompt(part._tokenizer, messages, tools, chosen) for messages, tools, chosen in prompts]
    lengths = [part.length(prompt, *one) for prompt, one in zip(rendered, prompts, strict=True)]
    assert len({tuple(prompt[:length]) for prompt, length in zip(rendered, lengths, strict=True)}) == 4
    assert part.length(rendered[1], *prompts[0]) == 0, "a prompt that does not begin so"


def test_it_follows_a_template_that_writes_something_else() -> None:
    """A date, say."""
    tokenizer = byte_tokenizer()
    part = FixedPart(tokenizer)
    for day in ("1", "1", "2"):
        tokenizer.chat_template = f"today is day {day}. {CHATML}"
        assert fixed(tokenizer, told("when"), [], part).startswith(f"today is day {day}.")


def test_a_template_that_refuses_a_mere_question_has_no_fixed_part() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages|length < 3 %}{{ raise_exception('say more') }}{% endif %}" + CHATML
    talk = [*told("x"), {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    assert fixed(tokenizer, talk, []) == ""
