"""Structured output is whole and strictly read, or refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from helpers.refunds import DICT, GIVEN, METHODS, TOKENIZER, Refund, RefundV1, answering, text_of
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk
from pydantic import BaseModel, field_validator

from precedent.errors import PrecedentError
from precedent.langchain.answer_parser import AnswerParser

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1")


def streamed(runnable: Any) -> tuple[list[Any], Exception | None]:
    """What a stream gave, and how it ended."""
    found: list[Any] = []
    try:
        for one in runnable.stream("hi"):
            found.append(one)
    except Exception as error:
        return found, error
    return found, None


# What max_tokens cuts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Refund, RefundV1, DICT])
async def test_an_answer_that_max_tokens_cut_is_an_error_wherever_it_was_cut(schema: Any, method: str) -> None:
    """After every token: never half of a number, never an object without a field, never None."""
    text = text_of(method, schema, **GIVEN)
    for most in range(1, len(TOKENIZER.encode(text)) + 1, 7):
        runnable = answering(text, max_tokens=most).with_structured_output(schema, method=method)
        with pytest.raises(OutputParserException, match=rf"cut after {most} tokens: .* max_tokens=") as refused:
            runnable.invoke("hi")
        assert isinstance(refused.value, PrecedentError)
        assert "\n" not in str(refused.value)
        _, ended = streamed(runnable)
        assert isinstance(ended, OutputParserException)
    with pytest.raises(OutputParserException, match="max_tokens="):
        await runnable.ainvoke("hi")
    with pytest.raises(OutputParserException, match="max_tokens="):
        _ = [one async for one in runnable.astream("hi")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Refund, DICT])
async def test_include_raw_reports_a_cut_answer_and_never_shows_half_of_it(schema: Any, method: str) -> None:
    text = text_of(method, schema, **GIVEN)
    for most in range(1, len(TOKENIZER.encode(text)) + 1, 11):
        runnable = answering(text, max_tokens=most).with_structured_output(schema, method=method, include_raw=True)
        chunks, ended = streamed(runnable)
        awaited = [one async for one in runnable.astream("hi")]
        assert ended is None
        assert not any(one.get("parsed") for one in chunks)
        for found in (runnable.invoke("hi"), sum(chunks[1:], chunks[0]), sum(awaited[1:], awaited[0])):
            assert found["parsed"] is None
            assert isinstance(found["parsing_error"], OutputParserException)
            assert "max_tokens=" in str(found["parsing_error"])
            assert found["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schema", [Refund, RefundV1, DICT])
async def test_a_whole_answer_streams_as_it_comes_and_ends_with_what_invoke_gives(schema: Any, method: str) -> None:
    runnable = answering(text_of(method, schema, **GIVEN)).with_structured_output(schema, method=method)
    found, ended = streamed(runnable)
    whole = runnable.invoke("hi")
    assert ended is None
    assert found[-1] == whole == (GIVEN if schema is DICT else schema(**GIVEN))
    assert len(found) > 3, "parts of it came before"
    assert all(one != other for one, other in itertools.pairwise(found))
    assert [one async for one in runnable.astream("hi")][-1] == await runnable.ainvoke("hi") == whole


@pytest.mark.parametrize("method", METHODS)
def test_include_raw_streams_the_message_and_then_what_it_says(method: str) -> None:
    runnable = answering(text_of(method, Refund, **GIVEN)).with_structured_output(
        Refund, method=method, include_raw=True
    )
    *messages, last = runnable.stream("hi")
    assert len(messages) > 3
    assert last == {"parsed": Refund(**GIVEN), "parsing_error": None}
    assert sum(messages[1:], messages[0])["raw"].content == runnable.invoke("hi")["raw"].content


@pytest.mark.parametrize("method", METHODS)
def test_answers_in_blocks_are_read_as_well(method: str) -> None:
    model = answering(text_of(method, Refund, **GIVEN), output_version="v1")
    runnable = model.with_structured_output(Refund, method=method)
    assert [*runnable.stream("hi")][-1] == runnable.invoke("hi") == Refund(**GIVEN)


# What is no data


def parser(tool: str | None = None, schema_class: Any = None) -> AnswerParser:
    return AnswerParser(tool=tool, schema_class=schema_class)


@pytest.mark.parametrize(
    "text",
    ["", '{"a": 1', '{"a": 1}}', '```json\n{"a": 1}\n```', "{'a': 1}", '{"a": NaN}', "[" * 5000, f"[{'9' * 5000}]"],
    ids=lambda text: text[:12],
)
def test_json_is_read_strictly(text: str) -> None:
    with pytest.raises(OutputParserException, match=r"the answer is not JSON \(.*\); the answer: ") as refused:
        parser().invoke(AIMessage(text))
    assert refused.value.llm_output == text
    assert len(str(refused.value)) < 1000


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_all_json_is_read(value: Any) -> None:
    assert parser().invoke(AIMessage(json.dumps(value))) == value
    assert parser().parse(f" {json.dumps(value)}\n") == value


@given(st.text(), st.integers(0, 30))
def test_no_prefix_of_an_answer_passes_for_the_whole(note: str, cut: int) -> None:
    whole = json.dumps({"order": "1", "amount": 12, "note": note})
    with pytest.raises(OutputParserException):
        parser(schema_class=Refund).invoke(AIMessage(whole[: -1 - cut]))


def test_an_answer_without_the_call_is_an_error() -> None:
    with pytest.raises(OutputParserException, match=r"the answer holds no call of 'Refund'; the answer: 'No\.'"):
        parser("Refund").invoke(AIMessage("No."))
    broken = {"name": "Refund", "args": '{"order"', "id": "1", "error": None, "type": "invalid_tool_call"}
    with pytest.raises(OutputParserException, match="holds a broken call of 'Refund'"):
        parser("Refund").invoke(AIMessage("", invalid_tool_calls=[broken]))


class Picky(BaseModel):
    """Refuses in words of its own."""

    order: str

    @field_validator("order")
    @classmethod
    def _known(cls, order: str) -> str:
        if order != "A17":
            raise ValueError(f"there is no order {order}")
        return order


@pytest.mark.parametrize(
    ("schema", "given", "said"),
    [
        (Refund, {"order": "1"}, "the answer does not fit Refund: amount is missing; the answer:"),
        (Refund, {"order": 1, "amount": "x"}, r"order must be a text \(and 1 more\)"),
        (Refund, [1], "the answer does not fit Refund: it must be a dict"),
        (RefundV1, {"order": "1", "amount": "x"}, "amount must be a whole number"),
        (Picky, {"order": "B1"}, "order is refused: there is no order B1"),
    ],
)
def test_an_answer_that_does_not_fit_its_class_is_said_in_our_words(schema: Any, given: Any, said: str) -> None:
    with pytest.raises(OutputParserException, match=said) as refused:
        parser(schema_class=schema).invoke(AIMessage(json.dumps(given)))
    assert "validation error" not in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_a_stop_string_inside_of_the_answer_does_not_make_it_valid() -> None:
    """The answer ended by itself, but it is no JSON."""
    runnable = answering(text_of("json_schema", DICT, **GIVEN), stop=["1200"]).with_structured_output(DICT)
    with pytest.raises(OutputParserException, match="the answer is not JSON"):
        runnable.invoke("hi")


def test_chunks_of_any_size_stream_alike() -> None:
    """The parser itself, on chunks as LangChain hands them on."""
    text = json.dumps(GIVEN)
    for size in (1, 2, 7, 100):
        chunks = [AIMessageChunk(content=text[at : at + size]) for at in range(0, len(text), size)]
        assert list(parser().transform(iter(chunks)))[-1] == GIVEN
        assert list(parser().transform(iter(text[at : at + size] for at in range(0, len(text), size))))[-1] == GIVEN
        with pytest.raises(OutputParserException):
            list(parser().transform(iter(chunks[:-1] or [AIMessageChunk(content="")])))
