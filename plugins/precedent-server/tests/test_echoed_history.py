"""Second turns as real clients send them: echoed keys, loose forms, and the items of Responses."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from precedent_testing.scripted_model import scripted_tokenizer

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {"number": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"number": "7"}'}}
USER = {"role": "user", "content": "Where is 7?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sent"}
PROPER = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]


def called(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]}  # type: ignore[dict-item]


def said(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [CALL], **more}


SAME: dict[str, list[dict[str, Any]]] = {
    "no content": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "null content": [USER, said(content=None), RESULT],
    "an empty list as content": [USER, said(content=[]), RESULT],
    "nulls everywhere": [USER, said(refusal=None, audio=None, reasoning=None), RESULT | {"name": None}],
    "the tool's name": [USER, said(), RESULT | {"name": "look_up"}],
    "no id": [
        USER, {"role": "assistant", "tool_calls": [{"function": CALL["function"]}]},
        {"role": "tool", "content": "sent"},
    ],
    "an index": [USER, said(tool_calls=[{**CALL, "index": 0}]), RESULT],
    "arguments as an object": [USER, called(arguments={"number": "7"}), RESULT],
    "reasoning": [USER, said(reasoning="Hm.", reasoning_details=[{"type": "reasoning.text"}]), RESULT],
    "cache control": [USER | {"cache_control": {"type": "ephemeral"}}, said(), RESULT],
    "cache control on a part": [
        {"role": "user", "content": [{"type": "text", "text": "Where is 7?", "cache_control": {"type": "ephemeral"}}]},
        said(), RESULT,
    ],
    "provider's fields": [USER, said(provider_specific_fields={"a": 1}, function_call=None), RESULT],
    "another provider's thoughts": [USER, said(content=[{"type": "thinking", "thinking": "x"}]), RESULT],
    "a function call": [
        USER, {"role": "assistant", "function_call": CALL["function"]},
        {"role": "function", "name": "look_up", "content": "sent"},
    ],
    "calls of a user": [USER | {"tool_calls": []}, said(), RESULT],
}  # fmt: skip


@pytest.fixture
def asked(serve: Any) -> Any:
    """Posts a body, and returns the answer and the prompt that the model got."""
    prompts = list[str]()
    client = serve(lambda prompt: prompts.append(prompt) or "x", tokenizer=copy.deepcopy(scripted_tokenizer()))

    async def post(path: str, **body: Any) -> tuple[Any, str]:
        answer = await client.post(
            path, json={"model": "scripted", "max_tokens" if path != RESPONSES else "max_output_tokens": 9, **body}
        )
        return answer, prompts[-1] if prompts else ""

    post.client = client  # type: ignore[attr-defined]
    return post


@pytest.mark.parametrize("form", SAME)
async def test_a_history_in_any_form_makes_the_same_prompt(asked: Any, form: str) -> None:
    _, proper = await asked(CHAT, messages=PROPER, tools=[TOOL])
    answer, prompt = await asked(CHAT, messages=SAME[form], tools=[TOOL])
    assert answer.status_code == 200, answer.text
    assert prompt == proper


@pytest.mark.parametrize("arguments", [None, "", " ", "null", "{}"])
async def test_a_call_without_arguments_has_none(asked: Any, arguments: Any) -> None:
    answer, prompt = await asked(CHAT, messages=[USER, called(arguments=arguments), RESULT], tools=[TOOL])
    assert answer.status_code == 200, answer.text
    assert '{"name": "look_up", "arguments": {}}' in prompt


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"number": "7', '<tool_call>\n{"name": "look_up", "arguments": {"number": "7<|im_end|>'),
        ("{'number': 7}", '<tool_call>\n{"name": "look_up", "arguments": {\'number\': 7}<|im_end|>'),
        ("[7]", "[7]<|im_end|>"),
        ('<tool_call>\n{"name": "look_up"', '<tool_call>\n{"name": "look_up"<|im_end|>'),
        ("NaN", "NaN<|im_end|>"),
    ],
)
async def test_broken_arguments_go_back_as_the_text_that_the_model_wrote(
    asked: Any, arguments: str, shown: str
) -> None:
    messages = [USER, called(arguments=arguments), RESULT | {"content": "these arguments are no JSON"}]
    answer, prompt = await asked(CHAT, messages=messages, tools=[TOOL])
    assert answer.status_code == 200, answer.text
    assert shown in prompt
    items = [
        {"role": "user", "content": "Where is 7?"},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": arguments, "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c1", "output": "these arguments are no JSON"},
    ]
    answer, of_items = await asked(RESPONSES, input=items, tools=[{"type": "function", **FUNCTION}])
    assert answer.status_code == 200, answer.text
    assert of_items == prompt


async def test_a_refusal_is_what_the_assistant_said(asked: Any) -> None:
    for message in (
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
    ):
        answer, prompt = await asked(CHAT, messages=[USER, message, USER])
        assert answer.status_code == 200, answer.text
        assert "assistant\nI cannot.<|im_end|>" in prompt
    item = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    assert (await asked(RESPONSES, input=[USER, item, USER]))[1] == prompt


async def test_items_of_other_providers_tools_are_ignored(asked: Any) -> None:
    items = [
        USER,
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"role": "assistant", "content": "No."},
    ]
    answer, prompt = await asked(RESPONSES, input=[*items, USER])
    assert answer.status_code == 200, answer.text
    assert prompt == (await asked(RESPONSES, input=[items[0], items[2], USER]))[1]


async def test_items_become_turns(asked: Any) -> None:
    """What a client sends back: its own words, the model's thoughts, texts and calls, and results."""
    output = {"type": "function_call_output", "call_id": "c1", "output": "sent"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where is 7?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        *({"type": "function_call", "call_id": one, **CALL["function"]} for one in ("c1", "c2")),
        *(output, output | {"call_id": "c2", "output": "lost"}),
    ]
    calls = [CALL, CALL | {"id": "c2"}]
    messages = [
        {"role": "system", "content": "Be brief."}, USER,
        said(content="I look.", reasoning_content="Look.", tool_calls=calls),
        RESULT, RESULT | {"tool_call_id": "c2", "content": "lost"},
    ]  # fmt: skip
    answer, prompt = await asked(
        RESPONSES, input=items, instructions="Be brief.", tools=[{"type": "function", **FUNCTION}]
    )
    assert answer.status_code == 200, answer.text
    assert prompt == (await asked(CHAT, messages=messages, tools=[TOOL]))[1]


async def test_what_is_ignored_is_counted(asked: Any) -> None:
    async def count() -> int:
        metrics = (await asked.client.get("/metrics")).text
        return int(re.search(r"^precedent:ignored_message_parts_total (\d+)$", metrics, re.MULTILINE)[1])  # type: ignore[index]

    before = await count()
    await asked(CHAT, messages=PROPER, tools=[TOOL])
    assert await count() == before == 0
    await asked(
        CHAT,
        messages=[USER | {"cache_control": {}}, said(reasoning="x", colour="red", size=None), RESULT],
        tools=[TOOL],
    )
    assert await count() == 3
    await asked(RESPONSES, input=[{"type": "web_search_call"}, USER])
    assert await count() == 4


async def test_a_null_in_a_schema_stays(asked: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x", None], "default": None}}}
    function = {"name": "f", "parameters": parameters}
    for path, body in (
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": function}]}),
        (RESPONSES, {"input": "hi", "tools": [{"type": "function", **function}]}),
    ):
        assert '"enum": ["x", null], "default": null' in (await asked(path, **body))[1]


async def test_earlier_thoughts_reach_the_prompt(serve: Any) -> None:
    tokenizer = copy.deepcopy(scripted_tokenizer())
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    prompts = list[str]()
    client = serve(lambda prompt: prompts.append(prompt) or "x", tokenizer=tokenizer)
    said = {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."}
    messages = [{"role": "user", "content": "Hello?"}, said, {"role": "user", "content": "And you?"}]
    answer = await client.post("/v1/chat/completions", json={"model": "scripted", "messages": messages})
    assert answer.status_code == 200, answer.text
    assert "<think>A greeting.</think>Hi." in prompts[0]
