"""`ChatPrecedent` on a scripted engine: invoke, stream and their async forms give one message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.call_ids import numbered
from helpers.order_chat import BROKEN, CALL, TOKENIZER, look_up, merged, scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage


def comparable(message: BaseMessage) -> dict[str, Any]:
    """A message without what differs by run: ids, and the classes of chunks."""
    assert isinstance(message, AIMessage)
    metadata = dict(message.response_metadata)
    fields = ("content", "tool_calls", "invalid_tool_calls", "usage_metadata", "additional_kwargs")
    return {name: numbered(getattr(message, name)) for name in fields} | {"metadata": metadata}


async def all_four(answer: str, seed: int, max_burst: int, **kwargs: Any) -> list[dict[str, Any]]:
    """One answer by invoke, stream, ainvoke and astream, under the same bursts."""

    def runnable() -> Any:
        model = scripted(answer, seed=seed, max_burst=max_burst)
        return model.bind_tools([look_up]) if kwargs.get("tools", True) else model

    streamed = merged([chunk async for chunk in runnable().astream("hi")])
    return [
        comparable(runnable().invoke("hi")),
        comparable(merged(list(runnable().stream("hi")))),
        comparable(await runnable().ainvoke("hi")),
        comparable(streamed),
    ]


ANSWERS = [
    "",
    "Hello, ørder!",
    CALL,
    f"I look.\n{CALL}\n{CALL}\nDone.",
    f"{CALL}\n{BROKEN}",
    "<tool_call>nonsense</tool_call>",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("max_burst", [1, 7, 1000])
async def test_invoke_and_stream_sync_and_async_give_one_message(answer: str, max_burst: int) -> None:
    first, *others = await all_four(answer, seed=1, max_burst=max_burst)
    assert others == [first] * 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([CALL, BROKEN, "text", "\n", "é", "<tool_call>"]), max_size=5), st.integers(0, 2**32))
def test_no_burst_pattern_changes_text_or_calls(parts: list[str], seed: int) -> None:
    answer = "".join(parts)
    texts = []
    for max_burst in (1, 9):
        message = merged(list(scripted(answer, seed=seed, max_burst=max_burst).bind_tools([look_up]).stream("hi")))
        calls = numbered([*message.tool_calls, *message.invalid_tool_calls])
        texts.append((message.content, calls, message.usage_metadata))
    assert texts[0][:2] == texts[1][:2]
    assert texts[0][2]["output_tokens"] == texts[1][2]["output_tokens"] == len(TOKENIZER.encode(answer)) + 1


def test_text_and_calls_of_an_answer() -> None:
    message = scripted(f"I look.\n{CALL}").bind_tools([look_up]).invoke("where is it?")
    assert message.content == "I look."
    (call,) = message.tool_calls
    assert (call["name"], call["args"], call["type"]) == ("look_up", {"number": "10 €"}, "tool_call")
    assert call["id"].startswith("call_")
    assert message.invalid_tool_calls == []


def test_a_call_that_was_cut_off_is_never_repaired_into_a_valid_one() -> None:
    message = merged(list(scripted(BROKEN).bind_tools([look_up]).stream("hi")))
    assert message.tool_calls == []
    (invalid,) = message.invalid_tool_calls
    assert (invalid["name"], invalid["args"]) == ("look_up", '{"number": "10"]<invalid>')
    assert "not a tool call" in message.response_metadata["tool_call_errors"][0]


def test_without_tools_a_call_is_text() -> None:
    assert scripted(CALL).invoke("hi").content == CALL
    assert scripted(CALL).bind_tools([look_up], tool_choice="none").invoke("hi").content == CALL


def test_a_call_is_streamed_while_it_is_written_and_the_figures_come_last() -> None:
    chunks = list(scripted(f"I look.\n{CALL}", max_burst=1).bind_tools([look_up]).stream("hi"))
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
    message = scripted("Hello", max_burst=2, seed=3).invoke("hi")
    usage, metadata = message.usage_metadata, message.response_metadata
    assert usage is not None
    assert usage["output_tokens"] == 6, "five bytes and the end token"
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_token_details"] == {"cache_read": 3}
    assert (metadata["model_name"], metadata["finish_reason"]) == ("scripted", "stop")
    figures = metadata["speculation"]
    assert figures["lossless"] is True
    assert figures["mode"] == "greedy"
    assert figures["num_steps"] + figures["num_accepted_tokens"] == 6
    assert figures["tokens_per_step"] == round(6 / figures["num_steps"], 3)
    assert usage["output_token_details"] == {"accepted_prediction": figures["num_accepted_tokens"]}
    assert figures["accepted_by_source"] == {"recall": figures["num_accepted_tokens"]}
    json.dumps(metadata)


def test_max_tokens_ends_with_length() -> None:
    message = scripted("Hello").invoke("hi", max_tokens=2)
    assert (message.content, message.response_metadata["finish_reason"]) == ("He", "length")


@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_content_blocks_of_stream_and_invoke_agree(output_version: str) -> None:
    def blocks(stream: bool) -> Any:
        model = scripted(f"I look.\n{CALL}\n{CALL}").model_copy(update={"output_version": output_version})
        bound = model.bind_tools([look_up])
        return (merged(list(bound.stream("hi"))) if stream else bound.invoke("hi")).content_blocks

    call = ("tool_call", None, {"number": "10 €"})
    kinds = [
        [(block["type"], block.get("text"), block.get("args")) for block in blocks(stream)] for stream in (True, False)
    ]
    assert kinds[0] == kinds[1] == [("text", "I look.", None), call, call]


def test_event_streams_keep_parallel_calls_apart() -> None:
    stream = scripted(f"I look.\n{CALL}\n{CALL}", max_burst=1).bind_tools([look_up]).stream_events("hi", version="v3")
    assert [(call["name"], call["args"]) for call in stream.output.tool_calls] == [("look_up", {"number": "10 €"})] * 2
    assert stream.output.text == "I look."
