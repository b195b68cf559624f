"""Each token of a streamed answer with its source: together they are the answer as the model wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precedent.decoding.sequence import Emission
from precedent.text.answers import AnswerSyntax
from precedent.text.assembly import TextAssembler
from precedent_server.answers import SourceTexts
from precedent_testing.tiny_models import byte_tokenizer

HELLO = [{"role": "user", "content": "Hello?"}]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
OPTIONS = {"include_usage": True, "include_sources": True}


async def streamed(client: Any, **more: Any) -> list[Any]:
    body = {"model": "scripted", "messages": HELLO, "temperature": 0, "stream": True, "stream_options": OPTIONS}
    answer = await client.post("/v1/chat/completions", json={**body, **more})
    assert answer.status_code == 200, answer.text
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def sources_of(chunks: list[Any], index: int = 0) -> list[Any]:
    mine = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
    return [pair for chunk in mine for pair in chunk["sources"]]


def text_of(chunks: list[Any], index: int = 0) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_sources_name_the_drafters(serve: Any) -> None:
    text, guess = "The order is sent on Monday, and arrives on Thursday.", "The order is sent on Friday, or"
    chunks = await streamed(serve([text]), prediction={"type": "content", "content": guess})
    names = [source for _, source in sources_of(chunks)]
    speculation = next(chunk["speculation"] for chunk in chunks if chunk["choices"] and "speculation" in chunk)
    assert names.count("prediction") == speculation["accepted_by_source"]["prediction"] > 3
    assert "target" in names
    plain = await streamed(serve([text]), speculation=False)
    assert {source for _, source in sources_of(plain)} == {"target"}


async def test_what_a_stop_string_cuts_off_is_not_told_and_markup_is(serve: Any) -> None:
    chunks = await streamed(serve(["one.. two. three"]), stop=". t")
    assert "".join(piece for piece, _ in sources_of(chunks)) == text_of(chunks) == "one."
    chunks = await streamed(serve([f"Let me see.{CALL}"]), tools=[TOOL])
    assert "".join(piece for piece, _ in sources_of(chunks)) == f"Let me see.{CALL}"


async def test_several_answers_have_their_own_sources_and_none_are_told_unless_asked_for(serve: Any) -> None:
    chunks = await streamed(serve(["one", "two"]), n=2)
    for index in range(2):
        assert "".join(piece for piece, _ in sources_of(chunks, index)) == text_of(chunks, index)
    assert sorted(text_of(chunks, index) for index in range(2)) == ["one", "two"]
    assert not any("sources" in chunk for chunk in await streamed(serve(["x"]), stream_options={"include_usage": True}))


TOKENIZER = byte_tokenizer((("a", "b"), ("ab", "c"), (".", ".")))
SYNTAX = AnswerSyntax(TOKENIZER, (), (), None, None, frozenset())


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30), st.data())
def test_whatever_the_tokens_are_the_texts_are_the_answer(tokens: list[int], data: st.DataObject) -> None:
    """Half characters, special tokens, stop strings across tokens; cut into any emissions."""
    stop = data.draw(st.sampled_from([(), ("..",), ("bc", "é"), (".a",)]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=5)))
    assembler, texts = TextAssembler(TOKENIZER, stop), SourceTexts(SYNTAX)
    written, told = "", []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        text, kept = assembler.push(tokens[start:end])
        ids = tuple(tokens[start : start + kept])
        over = assembler.stopped or end == len(tokens)
        text += assembler.flush() if over else ""
        written += text
        told += texts.push(Emission(text, ids, tuple(str(token) for token in ids)))
        assert "".join(piece for piece, _ in told) == written[: len("".join(piece for piece, _ in told))]
        if over:
            break
    told += texts.finish()
    assert "".join(piece for piece, _ in told) == written


@pytest.mark.parametrize("text", ["Good morning, Zoë! 🙂", "x", ""])
async def test_sources_are_the_answer_token_by_token(serve: Any, text: str) -> None:
    client = serve(lambda prompt: text)
    chunks = await streamed(client, prediction={"type": "content", "content": text[:8]} if text else None)
    assert all("sources" in chunk for chunk in chunks)
    told = sources_of(chunks)
    assert "".join(piece for piece, _ in told) == text_of(chunks) == text
    assert len(told) == chunks[-1]["usage"]["completion_tokens"] - 1  # without the end token
    assert "\N{REPLACEMENT CHARACTER}" not in json.dumps(told, ensure_ascii=False)
