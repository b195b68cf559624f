"""Ids of tool calls: no two calls ever share one, and the prompt does not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.format_models import MODELS, TOKENIZERS, TOOLS
from helpers.order_chat import CALL, look_up, merged, scripted
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from precedent.cache import SpeculationCache
from precedent.langchain import ChatPrecedent
from precedent.langchain.messages import to_template_messages
from precedent.text.prompt import render_prompt
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine


def test_every_call_has_an_id_of_its_own() -> None:
    model = scripted(*[f"{CALL}\n{CALL}"] * 12).bind_tools([look_up])
    answers: list[Any] = model.batch(["hi"] * 3)
    for settings in ({}, {"seed": 7, "temperature": 1.0}, {"tenant": "another"}):
        answers += [model.invoke("hi", **settings), model.invoke("hi", **settings)]
        answers.append(merged(list(model.stream("hi", **settings))))
    ids = [str(call["id"]) for answer in answers for call in answer.tool_calls]
    assert len(set(ids)) == len(ids) == 24
    assert all(call_id.startswith("call_") for call_id in ids)


def conversation(name: Callable[[str], str], order: tuple[str, ...] = ("1", "2", "3")) -> list[dict[str, Any]]:
    """Two calls at once, then a third; `order` is that of their results."""

    def called(*numbers: str) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": "look_up", "args": {"number": n}, "id": name(n)} for n in numbers])

    def results(numbers: tuple[str, ...]) -> list[BaseMessage]:
        return [ToolMessage(f'"result {number}"', tool_call_id=name(number)) for number in numbers]

    return to_template_messages(
        [HumanMessage("hi"), called("1", "2"), *results(order[:2]), called("3"), *results(order[2:])]
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_does_not_depend_on_the_ids(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ways: list[Callable[[str], str]] = [
        lambda number: f"call_{number}",
        lambda number: f"chatcmpl-tool-{number * 20}",
        lambda number: f"Abcd{number * 5}",  # nine letters and digits, as Mistral's templates want them
        lambda number: "",  # a client that lost them: results are in the order of the calls
        lambda number: "always the same",
    ]
    prompts = [render_prompt(tokenizer, conversation(way), TOOLS) for way in ways]
    assert prompts == [prompts[0]] * len(ways)
    if name == "mistral":  # its template prints the id of a call and of its result
        mixed = render_prompt(tokenizer, conversation(ways[0], order=("2", "1", "3")), TOOLS)
        text = tokenizer.decode(mixed)
        printed = [text.split(f'"number": "{n}"')[1].split('"id": "')[1][:9] for n in "123"]
        assert len(set(printed)) == 3
        assert [text.split(f'"result {n}"')[1].split('"call_id": "')[1][:9] for n in "123"] == printed


def test_the_history_that_a_template_prints_ids_of_still_gets_the_drafts_of_an_earlier_run() -> None:
    """Two runs of one agent have calls with different ids; recall drafts the second run's answer all the same."""
    answer = "The order 1042 was sent to the new address, and the refund is on its way to the customer."
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = scripted_model_engine([answer, answer], tokenizer=TOKENIZERS["mistral"], cache=cache)
        model = ChatPrecedent.from_engine(engine, temperature=0.0).bind_tools(TOOLS)
        first, second = (
            model.invoke(
                [
                    HumanMessage("hi"),
                    AIMessage("", tool_calls=[{"name": "look_up", "args": {"number": "1042"}, "id": call_id}]),
                    ToolMessage('"sent"', tool_call_id=call_id),
                ]
            )
            for call_id in ("call_0a1b2c3d", "call_9f8e7d6c")
        )
        engine.close()
    assert first.text == second.text == answer
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_token_details"]["cache_read"] >= first.usage_metadata["input_tokens"] - 1
    assert second.response_metadata["speculation"]["num_accepted_tokens"] > len(answer) // 2
