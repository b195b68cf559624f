"""`ChatPrecedent` on a scripted engine: one message, whichever way it comes, and what it says of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.call_ids import numbered
from helpers.order_chat import BROKEN, CALL, TOKENIZER, look_up, merged
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from precedent.langchain import ChatPrecedent
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

REASONING = chatml_tokenizer(chat_template=hermes_template())
REASONING.add_tokens(["<think>", "</think>"])


def scripted(*answers: str, tokenizer: Any = TOKENIZER, tools: Any = (look_up,), **settings: Any) -> Any:
    fields = {"output_version": settings.pop("output_version", None)}
    engine: Any = ScriptedEngine(tokenizer, answers, **settings)
    model = ChatPrecedent.from_engine(engine, **fields)
    return model.bind_tools(list(tools)) if tools else model


def comparable(message: BaseMessage) -> dict[str, Any]:
    """A message without what differs by run: ids, and the classes of chunks."""
    assert isinstance(message, AIMessage)
    fields = ("content", "content_blocks", "tool_calls", "invalid_tool_calls", "usage_metadata", "additional_kwargs")
    told = {name: numbered(getattr(message, name)) for name in fields}
    return told | {"metadata": dict(message.response_metadata)}


@pytest.mark.parametrize("output_version", ["v0", "v1"])
@pytest.mark.parametrize("max_burst", [1, 7, 1000])
@pytest.mark.parametrize(
    "answer",
    [
        *("", "Hello, ørder!", CALL, f"I look.\n{CALL}\n{CALL}\nDone.", f"{CALL}\n{BROKEN}"),
        *("<tool_call>nonsense</tool_call>", f"<think>hm</think>So.\n{CALL}"),
    ],
    ids=lambda answer: str(answer)[:14].replace("\n", " "),
)
async def test_invoke_and_stream_sync_and_async_give_one_message(
    answer: str, max_burst: int, output_version: str
) -> None:
    def model() -> Any:
        how: dict[str, Any] = {"seed": 1, "max_burst": max_burst, "output_version": output_version}
        return scripted(answer, tokenizer=REASONING, **how)

    first, *others = [
        comparable(model().invoke("hi")),
        comparable(merged(list(model().stream("hi")))),
        comparable(await model().ainvoke("hi")),
        comparable(merged([chunk async for chunk in model().astream("hi")])),
    ]
    assert others == [first] * 3
    if output_version == "v1":
        assert {one["type"] for one in first["content"]} == {one["type"] for one in first["content_blocks"]}


def test_without_tools_a_call_is_text() -> None:
    assert scripted(CALL, tools=()).invoke("hi").content == CALL
    assert scripted(CALL, tools=()).bind_tools([look_up], tool_choice="none").invoke("hi").content == CALL


def test_a_call_is_streamed_while_it_is_written_and_the_figures_come_last() -> None:
    chunks = list(scripted(f"I look.\n{CALL}", max_burst=1).stream("hi"))
    first, *pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert (first["name"], first["args"], first["index"]) == ("look_up", "", 0)
    assert str(first["id"]).startswith("call_")
    assert {(piece["name"], piece["id"], piece["index"]) for piece in pieces} == {(None, None, 0)}
    assert "".join(piece["args"] or "" for piece in pieces) == '{"number": "10 €"}'
    assert len(pieces) > 10, "one for each token, or nearly"
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert all(not chunk.response_metadata and chunk.usage_metadata is None for chunk in chunks[:-1])
    assert chunks[-1].content == ""


def test_usage_and_response_metadata() -> None:
    message = scripted("Hello", max_burst=2, seed=3, tools=()).invoke("hi")
    usage, metadata = message.usage_metadata, message.response_metadata
    assert usage["output_tokens"] == 6, "five bytes and the end token"
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_token_details"] == {"cache_read": 3}
    assert (metadata["model_name"], metadata["model_provider"]) == ("scripted", "precedent")
    figures = metadata["speculation"]
    assert (metadata["finish_reason"], figures["lossless"], figures["mode"]) == ("stop", True, "greedy")
    assert figures["num_steps"] + figures["num_accepted_tokens"] == 6
    assert figures["tokens_per_step"] == round(6 / figures["num_steps"], 3)
    assert usage["output_token_details"] == {"accepted_prediction": figures["num_accepted_tokens"]}
    assert figures["accepted_by_source"] == {"recall": figures["num_accepted_tokens"]}
    json.dumps(metadata)
    cut = scripted("Hello", tools=()).invoke("hi", max_tokens=2)
    assert (cut.content, cut.response_metadata["finish_reason"]) == ("He", "length")


def test_blocks_of_v1_stand_in_the_order_of_the_answer() -> None:
    model = scripted(*[f"I look.\n{CALL}\n{CALL}\nDone."] * 4, output_version="v1")
    answer = model.invoke("hi")
    assert [block["type"] for block in answer.content] == ["text", "tool_call", "tool_call", "text"]
    assert [block.get("text") for block in answer.content] == ["I look.", None, None, "\nDone."]
    prompts = []
    for said in (answer, AIMessage(answer.content)):
        model.invoke([HumanMessage("hi"), said, HumanMessage("and?")])
        prompts.append(model.bound.engine.requests[-1].prompt)
    assert prompts[0] == prompts[1], "and can be said again by themselves"
    assert prompts[0].count("10 €") == 2


def test_event_streams_keep_parallel_calls_apart() -> None:
    stream = scripted(f"I look.\n{CALL}\n{CALL}", max_burst=1).stream_events("hi", version="v3")
    assert [(call["name"], call["args"]) for call in stream.output.tool_calls] == [("look_up", {"number": "10 €"})] * 2
    assert stream.output.text == "I look."
