"""A prediction and templates on their way from the caller through the chat model and the engine to the tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.tools import tool

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import ConfigError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.planning.costs import CostCurve
from precedent.text.prompt import hermes_template
from precedent.text.templates import Template, Templates
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPT = list(b"look up order 17, then order 18, then order 19")
SAMPLING = SamplingParams(max_tokens=48)
PLAIN = SpeculationConfig(enabled=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A tiny model in float64, for which width is free."""
    running = Engine.load(tiny_causal_lm("llama", seed=21), tokenizer=byte_tokenizer())
    running.planner.cost = CostCurve()
    yield running
    running.close()


def only(name: str) -> SpeculationConfig:
    return SpeculationConfig(drafters=(name,))


def test_a_right_prediction_takes_few_steps_and_is_credited(engine: Engine) -> None:
    expected = engine.submit(PROMPT, SAMPLING, speculation=PLAIN).result()
    for speculation in (None, only("prediction")):
        got = engine.submit(PROMPT, SAMPLING, speculation=speculation, prediction=expected.token_ids).result()
        assert got.token_ids == expected.token_ids
        assert got.stats.num_steps <= 8
    assert got.stats.accepted_by_source == {"prediction": got.stats.num_accepted_tokens}
    assert got.stats.num_accepted_tokens >= 40


@pytest.mark.parametrize("change", ["edited", "unknown tokens", "another text", "empty", "template"])
def test_a_wrong_guess_costs_time_and_never_text(engine: Engine, change: str) -> None:
    expected = engine.submit(PROMPT, SAMPLING, speculation=PLAIN).result()
    ids = list(expected.token_ids)
    guess: dict[str, Any] = {
        "edited": {"prediction": [*ids[:10], 65, 66, *ids[13:30], *ids[35:]]},
        "unknown tokens": {"prediction": [*ids[:5], 2**31 - 1, 100_000, -7, *ids[5:]]},
        "another text": {"prediction": "Order 17 was sent on Monday."},
        "empty": {"prediction": ""},
        "template": {"templates": [Template.parse("an order {order_id} and some words that the model never says")]},
    }[change]
    got = engine.submit(PROMPT, SAMPLING, speculation=only(min(guess).rstrip("s")), **guess).result()
    assert got.token_ids == expected.token_ids
    assert (got.stats.num_draft_tokens > 0) is (change != "empty")
    if change == "edited":
        assert got.stats.num_accepted_tokens >= 25


def test_what_cannot_be_read_is_refused_before_any_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no text of its own"):
        engine.submit(PROMPT, SAMPLING, templates=["{all}"])
    monkeypatch.setenv("PRECEDENT_SPECULATION", "of")
    with pytest.raises(ConfigError, match="PRECEDENT_SPECULATION='of' is neither 'on' nor 'off'"):
        PrecedentLLM.from_engine(engine).invoke("hi")


@tool
def open_document(document_id: str) -> str:
    """Open a document."""
    return document_id


def scripted(**settings: Any) -> tuple[ChatPrecedent, ScriptedEngine]:
    engine = ScriptedEngine(chatml_tokenizer(chat_template=hermes_template()), lambda prompt: "Done.")
    return ChatPrecedent.from_engine(engine, **settings), engine  # type: ignore[arg-type]  # behaves like one


@pytest.mark.parametrize(
    "prediction",
    [
        "Done.",
        {"type": "content", "content": "Done."},
        {"content": "Done."},
        {"type": "content", "content": [{"type": "text", "text": "Do"}, {"type": "text", "text": "ne."}]},
    ],
)
def test_a_prediction_reaches_the_engine_in_every_form(prediction: Any) -> None:
    model, engine = scripted()
    model.invoke("Hello", prediction=prediction)
    model.bind(prediction=prediction).invoke("Hello")
    list(model.bind_tools([open_document], prediction=prediction).stream("Hello"))
    model.invoke("Hello", prediction=None)
    assert [request.prediction for request in engine.requests] == ["Done.", "Done.", "Done.", None]


@pytest.mark.parametrize("prediction", [7, {"type": "image", "content": "x"}, {"content": [7]}, {}, ["x"]])
def test_a_prediction_in_another_form_is_refused_in_one_line(prediction: Any) -> None:
    model, engine = scripted()
    with pytest.raises(ConfigError, match="neither a text nor") as refused:
        model.invoke("Hello", prediction=prediction)
    assert "\n" not in str(refused.value)
    assert engine.requests == []


def test_bound_tools_and_premade_responses_become_templates() -> None:
    premade = "Document {document_id} is open."
    model, engine = scripted(templates=[premade])
    model.invoke("Hello")
    model.bind_tools([open_document]).invoke("Hello")
    model.bind_tools([open_document], templates=[]).invoke("Hello")
    model.bind_tools([open_document], tool_choice="none").invoke("Hello", templates=Templates(["Bye."]))
    texts = [[template.text for template in request.templates] for request in engine.requests]
    call = Template(("<tool_call>\n" + '{"name": "open_document", "arguments": {"document_id": "',)).text
    assert texts[0] == [premade]
    assert texts[1][0] == premade
    assert texts[1][1].startswith(call)
    assert texts[2] == texts[1][1:]
    assert texts[3] == ["Bye."]
    with pytest.raises(ConfigError, match="nothing between the holes"):
        scripted(templates=["Hello {a}{b}"])
