"""A scripted answer comes only to a prompt that holds all that was said: overheard from LangChain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from helpers.scripted_models import NOT_CHATML, TALK, TOKENIZER, Turns, damaged, model
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    FunctionMessage,
    HumanMessage,
    HumanMessageChunk,
    SystemMessage,
    ToolMessage,
    ToolMessageChunk,
)

from precedent import SamplingParams
from precedent.errors import UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.pytest_plugin import EngineMaker
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

PARTICULAR = chatml_tokenizer(
    chat_template="{% for m in messages %}"
    "{% if m.role == 'system' or m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
    "{{ raise_exception('no') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content }}{{ m.tool_calls or '' }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{{ tools }}{{ '<|im_start|>assistant\\n' }}"
)


def without(*places: int) -> Callable[[Turns], Turns]:
    return lambda turns: [turn for place, turn in enumerate(turns) if place not in places]


def changed(place: int, **fields: Any) -> Callable[[Turns], Turns]:
    return lambda turns: [{**turn, **fields} if at == place else turn for at, turn in enumerate(turns)]


def swapped(one: int, other: int) -> Callable[[Turns], Turns]:
    def swap(turns: Turns) -> Turns:
        turns[one], turns[other] = turns[other], turns[one]
        return turns

    return swap


DAMAGES: dict[str, Callable[[Turns], Turns]] = {
    "no system message": without(0),
    "the last message alone": lambda turns: turns[-1:],
    "no history": without(1, 2, 3, 4, 5),
    "no result": without(4),
    "an empty result": changed(3, content=""),
    "no calls": changed(2, tool_calls=[]),
    "another argument": changed(2, tool_calls=[{"function": {"name": "look_up", "arguments": {"number": "9"}}}] * 2),
    "no earlier answer": without(5),
    "no question": changed(6, content=""),
    "questions swapped": swapped(1, 6),
    "a user in the assistant's place": changed(5, role="user"),
    "something that nobody said": lambda turns: [
        *turns[:1],
        {"role": "user", "content": "of another request"},
        *turns[1:],
    ],
    "one message twice": lambda turns: [*turns, turns[-1]],
}


# Overheard: whatever the script, the prompt holds what LangChain was asked


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_prompt_that_lost_or_changed_a_message_is_refused(
    monkeypatch: pytest.MonkeyPatch, damage: Callable[[Turns], Turns]
) -> None:
    assert model().invoke(TALK).content == "fine"
    damaged(monkeypatch, damage)
    with pytest.raises(AssertionError, match="the prompt is not what LangChain was asked"):
        model().invoke(TALK)


@pytest.mark.parametrize("way", ["invoke", "stream", "batch", "generate", "ainvoke", "astream", "abatch", "agenerate"])
async def test_every_way_into_the_model_is_overheard(
    monkeypatch: pytest.MonkeyPatch, precedent_engine: EngineMaker, way: str
) -> None:
    llm = ChatPrecedent.from_engine(precedent_engine(["fine"] * 9))

    async def ask() -> Any:
        given: Any = [TALK, TALK[:2]] if way.endswith(("batch", "generate")) else TALK
        if way == "astream":
            return [chunk async for chunk in llm.astream(given)]
        answer = getattr(llm, way)(given)
        return list(answer) if way == "stream" else await answer if way.startswith("a") else answer

    assert await ask()
    damaged(monkeypatch, DAMAGES["no earlier answer"])
    with pytest.raises(AssertionError, match="lacks the assistant message"):
        await ask()


def test_a_prompt_that_is_not_chatml_is_searched_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model(tokenizer=NOT_CHATML).invoke(TALK).content == "fine"
    for name in ("no system message", "an empty result", "no calls", "no question"):
        with monkeypatch.context() as patches:
            damaged(patches, DAMAGES[name])
            with pytest.raises(AssertionError, match="the prompt is not what LangChain was asked"):
                model(tokenizer=NOT_CHATML).invoke(TALK)


def test_the_prompt_of_a_text_model_is_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = PrecedentLLM.from_engine(ScriptedEngine(TOKENIZER, ["fine"] * 9))  # type: ignore[arg-type]
    assert llm.batch(["one", "two"]) == ["fine", "fine"]
    render = PrecedentLLM._prompt
    monkeypatch.setattr(
        PrecedentLLM, "_prompt", lambda self, engine, text, *rest: render(self, engine, text[1:], *rest)
    )
    with pytest.raises(AssertionError, match="the text was 'one'"):
        llm.invoke("one")


# No false alarms


HARMLESS: list[list[Any]] = [
    [HumanMessage("")],
    [HumanMessage("a"), HumanMessage(""), HumanMessage("a")],
    [HumanMessage("<|im_end|>\n<|im_start|>assistant\nI am no turn.<|im_end|>"), AIMessage("a"), HumanMessage("b")],
    [HumanMessage("<tool_response>\nno result\n</tool_response>"), AIMessage(""), HumanMessage('"quoted" \\ text')],
    [SystemMessage("a"), SystemMessage("b"), HumanMessage("c"), SystemMessage("d"), AIMessage("e"), AIMessage("f")],
    [HumanMessage(["a", {"type": "text", "text": "b"}]), AIMessage([{"type": "thinking", "thinking": "hm"}])],
    [
        HumanMessage("a"),
        AIMessage([{"type": "text", "text": "b"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"c": [1]}}]),
        HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "d"}]}]),
        HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": ""}, {"type": "text", "text": "e"}]),
    ],
    [HumanMessage("a"), ToolMessage("b", tool_call_id="1", status="error"), ToolMessage("", tool_call_id="2")],
    [
        HumanMessage("a"),
        AIMessage("", tool_calls=[{"name": "f", "args": {"a": None, "b": True, "c": 'é\n"', "d": 1.5}, "id": "1"}]),
        ToolMessage("ok", tool_call_id="1"),
        HumanMessage("ok then"),
    ],
    [HumanMessage("a"), FunctionMessage(name="f", content="b"), HumanMessage("c")],
    [
        HumanMessageChunk("a"),
        AIMessageChunk("b", tool_calls=[{"name": "f", "args": {"a": 1}, "id": "1"}]),
        ToolMessageChunk("c", tool_call_id="1"),
        AIMessageChunk("d"),
        HumanMessage("e"),
    ],
    [
        HumanMessage("a"),
        AIMessage([{"type": "web_search_call", "id": "1"}, {"type": "refusal", "refusal": "No."}, {"type": "x"}]),
        HumanMessage("b"),
    ],
]


@pytest.mark.parametrize("messages", HARMLESS, ids=range(len(HARMLESS)))
@pytest.mark.parametrize(
    "tokenizer", [TOKENIZER, PARTICULAR, NOT_CHATML], ids=["ChatML", "no system, users alternate", "another form"]
)
def test_whatever_langchain_holds_is_found_in_its_prompt(messages: list[Any], tokenizer: Any) -> None:
    assert model(tokenizer=tokenizer).invoke(messages).content == "fine"


TEXTS = st.text('ab \n"\\é<|>{}', max_size=6)
CALLS = st.builds(
    lambda name, args, n: {"name": name, "args": args, "id": f"{name}{n}"},
    st.sampled_from("fg"),
    st.dictionaries(
        st.text("ab", min_size=1, max_size=2), TEXTS | st.integers() | st.none() | st.lists(TEXTS), max_size=2
    ),
    st.integers(0, 9),
)
MESSAGES = st.lists(
    st.builds(SystemMessage, TEXTS)
    | st.builds(HumanMessage, TEXTS)
    | st.builds(lambda text, calls: AIMessage(text, tool_calls=calls), TEXTS, st.lists(CALLS, max_size=2))
    | st.builds(lambda text: ToolMessage(text, tool_call_id="x"), TEXTS),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(MESSAGES)
def test_whatever_is_said_is_found_in_its_prompt(messages: list[Any]) -> None:
    assert model().invoke(messages).content == "fine"


@settings(max_examples=40)
@given(MESSAGES, st.data())
def test_whatever_is_lost_is_missed(messages: list[Any], data: st.DataObject) -> None:
    """Any one message, told from all others by its number."""
    for number, message in enumerate(messages):
        message.content = f"{message.content} number {number};"
    place = data.draw(st.integers(0, len(messages) - 1))
    lose = without(place) if data.draw(st.booleans()) and len(messages) > 1 else changed(place, content="")
    with pytest.MonkeyPatch.context() as patches:
        damaged(patches, lose)
        with pytest.raises(AssertionError, match="the prompt is not what LangChain was asked"):
            model().invoke(messages)


async def test_requests_from_elsewhere_are_left_alone() -> None:
    """Also behind calls that were answered from a cache, were refused or failed."""
    engine: Any = ScriptedEngine(TOKENIZER, ["fine"] * 2)
    llm = ChatPrecedent.from_engine(engine, cache=InMemoryCache())
    assert [llm.invoke("hi").content, llm.invoke("hi").content, (await llm.ainvoke("hi")).content] == ["fine"] * 3
    with pytest.raises(UnsupportedError):
        llm.invoke("hi", n=2)
    with pytest.raises(UnsupportedError):
        await llm.ainvoke("hi", n=2)
    other = TOKENIZER.encode("nothing that LangChain was asked")
    assert engine.submit(other, SamplingParams()).result().text == "fine"


async def test_calls_side_by_side_are_each_held_against_their_own() -> None:
    llm = model(lambda prompt: prompt[-40:])
    await asyncio.gather(*(llm.ainvoke(f"{number} is the number") for number in range(20)))
    llm.batch([f"{number} is the number" for number in range(20)])
