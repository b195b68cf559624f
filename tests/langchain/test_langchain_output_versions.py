"""One message, whichever way it came, in every output version."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.call_ids import numbered
from helpers.order_chat import BROKEN, CALL, look_up, merged
from helpers.scripted_kinds import scripted
from langchain_core.messages import AIMessage, HumanMessage

from precedent.errors import ConfigError
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import chatml_tokenizer

REASONING = chatml_tokenizer(chat_template=hermes_template())
REASONING.add_tokens(["<think>", "</think>"])


@pytest.mark.parametrize("output_version", ["v0", "v1"])
@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Hello, ørder!",
        CALL,
        f"I look.\n{CALL}\n{CALL}\nDone.",
        f"{CALL}\n{BROKEN}",
        f"<think>hm</think>So.\n{CALL}",
    ],
    ids=lambda answer: answer[:14].replace("\n", " "),
)
async def test_a_merged_stream_is_what_invoke_gives_in_every_output_version(answer: str, output_version: str) -> None:
    model = scripted(answer=answer, tokenizer=REASONING, output_version=output_version).bind_tools([look_up])
    messages = [
        model.invoke("hi"),
        merged(list(model.stream("hi"))),
        await model.ainvoke("hi"),
        merged([chunk async for chunk in model.astream("hi")]),
    ]
    for name in ("content", "content_blocks", "tool_calls", "invalid_tool_calls", "additional_kwargs"):
        first, *others = [numbered(getattr(message, name)) for message in messages]
        assert others == [first] * 3, name
    if output_version == "v1":
        assert isinstance(messages[0].content, list)
        assert {one["type"] for one in messages[0].content} == {one["type"] for one in messages[0].content_blocks}


def test_blocks_of_v1_stand_in_the_order_of_the_answer() -> None:
    model = scripted(answer=f"I look.\n{CALL}\n{CALL}\nDone.", output_version="v1").bind_tools([look_up])
    blocks = model.invoke("hi").content
    assert [block["type"] for block in blocks] == ["text", "tool_call", "tool_call", "text"]
    assert [block.get("text") for block in blocks] == ["I look.", None, None, "\nDone."]
    engine: Any = model.bound.engine
    model.invoke([HumanMessage("hi"), model.invoke("hi"), HumanMessage("and?")])
    whole = engine.requests[-1].prompt
    model.invoke([HumanMessage("hi"), AIMessage(blocks), HumanMessage("and?")])
    assert engine.requests[-1].prompt == whole, "and can be said again by themselves"
    assert whole.count("10 €") == 2


def test_an_output_version_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="output_version='v9' must be 'v0' or 'v1'"):
        scripted(output_version="v9")


def test_the_provider_is_named() -> None:
    for message in (scripted().invoke("hi"), merged(list(scripted().stream("hi")))):
        assert message.response_metadata["model_provider"] == "precedent"
