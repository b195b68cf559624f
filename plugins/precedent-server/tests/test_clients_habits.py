"""What clients send beside the question: earlier thoughts, `strict: false`, wrong roles in items."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from precedent_testing.scripted_model import scripted_tokenizer

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


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


@pytest.mark.parametrize(("strict", "held"), [(True, True), (None, True), (False, False)])
async def test_a_schema_that_is_not_strict_asks_for_some_object(serve: Any, strict: bool | None, held: bool) -> None:
    client = serve(['{"other": 1}'], may_stray=True)
    described = {"name": "person", "schema": SCHEMA, **({} if strict is None else {"strict": strict})}
    response_format = {"type": "json_schema", "json_schema": described}
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200}
    answer = await client.post("/v1/chat/completions", json={**body, "response_format": response_format})
    assert (answer.json()["choices"][0]["message"]["content"] != '{"other": 1}') is held


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]}),
        ("/v1/completions", {"prompt": "Hi."}),
    ],
)
@pytest.mark.parametrize("token", ["", "x", "1.5"])
async def test_a_bias_of_no_token_is_refused(client: Any, path: str, asked: dict[str, Any], token: str) -> None:
    answer = await client.post(path, json={"model": "scripted", **asked, "logit_bias": {token: 1}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias"), answer.text


@pytest.mark.parametrize("role", [None, "tool", "nobody", ["user"]])
async def test_a_wrong_role_of_an_item_is_told_in_the_words_of_its_route(client: Any, role: Any) -> None:
    asked = {"model": "scripted", "input": [{"role": "user", "content": "Hi."}, {"role": role, "content": "Hi."}]}
    error = (await client.post("/v1/responses", json=asked)).json()["error"]
    assert error["param"] == "input"
    assert error["message"].startswith("input[1].role must be one of assistant, system, developer, user")
