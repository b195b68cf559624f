"""Calls of tools under a grammar, in every form: forced, allowed, beside JSON and behind reasoning."""

from __future__ import annotations

import json

import pytest
from helpers.grammars import (
    CALL,
    CONTROLLED,
    END,
    ENDS,
    HERMES,
    LLAMA_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    PLAIN,
    TOOLS,
    allowed,
    constraint,
    refusal,
)

from precedent.grammar import ANY_OBJECT, Answer, CallForm, JsonSchema, Reasoning, Tool

BOTH = pytest.mark.parametrize("tokenizer", [PLAIN, CONTROLLED], ids=["as text", "as control tokens"])
OTHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BARE = '{"name": "get_days", "arguments": {"days": 3}}'


@BOTH
def test_forced_calls(tokenizer) -> None:
    several, one = Answer(form=HERMES, tools=TOOLS), Answer(form=HERMES, tools=TOOLS, parallel=False)
    assert refusal(several, CALL, tokenizer) is None
    assert refusal(several, f"{CALL}\n{OTHER}", tokenizer) is None
    assert refusal(one, CALL, tokenizer) is None
    assert allowed(constraint(one, tokenizer), tokenizer.encode(CALL), tokenizer) == set(ENDS)
    assert refusal(several, "", tokenizer) == END
    assert refusal(several, "Sure.", tokenizer) == ""
    assert refusal(several, CALL.replace("3", "10"), tokenizer) == CALL.partition("3")[0] + "1"
    assert refusal(several, OTHER.replace("Oslo", "Bonn"), tokenizer) == OTHER.partition("Oslo")[0]


@BOTH
def test_calls_that_the_model_may_make_in_its_text(tokenizer) -> None:
    free, one = (Answer(form=HERMES, tools=TOOLS, text=True, parallel=parallel) for parallel in (True, False))
    for text in ("", "Hi there.", "1 < 2, <tool", CALL, f"Hi. {CALL}\n{OTHER}", f"{CALL} and then {OTHER} done."):
        assert refusal(free, text, tokenizer) is None
    assert refusal(free, "Hi. <tool_call>x", tokenizer) == "Hi. <tool_call>"
    assert refusal(free, CALL.replace("3", '"3"'), tokenizer) == CALL.partition("3")[0]
    assert refusal(one, f"Hi. {CALL}", tokenizer) is None
    assert allowed(constraint(one, tokenizer), tokenizer.encode(f"Hi. {CALL}"), tokenizer) == set(ENDS)


@BOTH
def test_reasoning_comes_first_and_may_say_anything(tokenizer) -> None:
    thought = "<think>\nWhich tool? a {call}\n</think>\n\n"
    forced = Answer(form=HERMES, tools=TOOLS, reasoning=Reasoning())
    assert refusal(forced, thought + CALL, tokenizer) is None
    assert refusal(forced, CALL, tokenizer) is None
    assert refusal(forced, thought + "Hi", tokenizer) == thought
    begun = Answer(form=HERMES, tools=TOOLS, text=True, reasoning=Reasoning(begun=True))
    assert refusal(begun, "Hm.</think>Hi.", tokenizer) is None
    assert refusal(begun, "Hm.", tokenizer) == END
    assert refusal(begun, f"Hm.</think>\n\n{CALL}", tokenizer) is None
    content = Answer(content=JsonSchema.of({"const": "x"}), reasoning=Reasoning())
    assert refusal(content, f'{thought}"x"', tokenizer) is None
    assert refusal(content, thought, tokenizer) == END


def test_a_call_is_forced_inside_text_but_not_inside_reasoning() -> None:
    """One automaton: what a marker means depends on the node's own path."""
    begun = Answer(form=HERMES, tools=TOOLS, text=True, reasoning=Reasoning(begun=True))
    assert refusal(begun, "Say <tool_call>x here.</think>Hi.") is None
    assert refusal(begun, "Say</think> <tool_call>x") == "Say</think> <tool_call>"


@BOTH
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MISTRAL, f"[TOOL_CALLS][{BARE}, {BARE}]"),
        (MISTRAL_ARGS, '[TOOL_CALLS]get_days[ARGS]{"days": 3}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'),
        (LLAMA_JSON, '{"name": "get_days", "parameters": {"days": 3}}'),
    ],
    ids=lambda value: value.name if isinstance(value, CallForm) else "",
)
def test_other_forms_of_calls(tokenizer, form: CallForm, text: str) -> None:
    forced, free = Answer(form=form, tools=TOOLS), Answer(form=form, tools=TOOLS, text=True)
    assert refusal(forced, text, tokenizer) is None
    assert refusal(free, text, tokenizer) is None
    assert refusal(free, "No call.", tokenizer) is None
    assert refusal(free, text.replace("get_", "set_"), tokenizer) == text.partition("get_")[0]
    if not form.whole_answers:
        assert refusal(free, f"Hi. {text}", tokenizer) is None


def test_names_that_json_or_a_grammar_would_misread() -> None:
    tool = Tool('say "hi"/\\{é}', ANY_OBJECT)
    name = json.dumps(tool.name, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>'
    assert refusal(Answer(form=HERMES, tools=(tool,)), text) is None
