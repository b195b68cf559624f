"""A prediction and templates on their way from the caller through the chat model and the engine to the tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from langchain_core.tools import tool
from torch import Tensor

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import ConfigError
from precedent.langchain import ChatPrecedent
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
    for speculation in (only("prediction"), None):
        got = engine.submit(PROMPT, SAMPLING, speculation=speculation, prediction=expected.token_ids).result()
        assert got.token_ids == expected.token_ids
        assert got.stats.num_steps <= 8
    got = engine.submit(PROMPT, SAMPLING, speculation=only("prediction"), prediction=expected.token_ids).result()
    assert got.stats.accepted_by_source == {"prediction": got.stats.num_accepted_tokens}
    assert got.stats.num_accepted_tokens >= 40


@pytest.mark.parametrize("change", ["edited", "unknown tokens", "another text", "empty"])
def test_a_wrong_prediction_costs_time_and_never_text(engine: Engine, change: str) -> None:
    expected = engine.submit(PROMPT, SAMPLING, speculation=PLAIN).result()
    ids = list(expected.token_ids)
    prediction: str | list[int] = {
        "edited": [*ids[:10], 65, 66, *ids[13:30], *ids[35:]],
        "unknown tokens": [*ids[:5], 2**31 - 1, 100_000, -7, *ids[5:]],
        "another text": "Order 17 was sent on Monday.",
        "empty": "",
    }[change]
    got = engine.submit(PROMPT, SAMPLING, speculation=only("prediction"), prediction=prediction).result()
    assert got.token_ids == expected.token_ids
    if change == "edited":
        assert got.stats.num_accepted_tokens >= 25


def test_a_text_becomes_the_ids_of_a_whole_answer(engine: Engine) -> None:
    """The end token belongs to a predicted text: the step that saves the last forward."""
    seen = []

    class Watching:
        name = "watching"

        def begin(self, request: Any) -> Any:
            seen.append(request)
            raise RuntimeError("seen enough")

        def close(self) -> None:
            """Nothing to release."""

    engine.add_drafter(Watching())
    asked = {"speculation": only("watching"), "prediction": "ab", "templates": ["x {y}"]}
    engine.submit(PROMPT, SAMPLING, **asked).result()  # goes on without the drafter that fails
    tokenizer = engine.tokenizer
    assert seen[0].prediction == (*tokenizer.encode("ab", add_special_tokens=False), tokenizer.eos_token_id)
    assert seen[0].templates == (Template.parse("x {y}"),)


def test_templates_are_drafted_from_and_change_nothing(engine: Engine) -> None:
    """A template made of the answer's own bytes, with a hole in the middle."""
    expected = engine.submit(PROMPT, SAMPLING, speculation=PLAIN).result()
    template = Template.parse("an order {order_id} and some words that the model never says")
    got = engine.submit(PROMPT, SAMPLING, speculation=only("template"), templates=[template]).result()
    assert got.token_ids == expected.token_ids
    assert got.stats.num_draft_tokens > 0


def test_a_template_that_cannot_be_read_is_refused_before_any_work(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="no text of its own"):
        engine.submit(PROMPT, SAMPLING, templates=["{all}"])


def test_forced_tokens_are_drafted_through_the_engines_loop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constraint that repeats `abc` after every third byte: two thirds of the answer need no forward of their own."""

    class Abc:
        def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
            masked = torch.full_like(row, -torch.inf)
            allowed = self.forced(output_ids)[:1] or range(65, 91)
            masked[list(allowed)] = row[list(allowed)]
            return masked

        def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
            return ((), (97, 98, 99), (98, 99), (99,))[len(output_ids) % 4]

    monkeypatch.setattr("precedent.engine.engine.constraints_for", lambda *_: Abc())
    expected = engine.submit(PROMPT, SAMPLING, speculation=PLAIN).result()
    got = engine.submit(PROMPT, SAMPLING, speculation=only("grammar")).result()
    assert got.token_ids == expected.token_ids
    assert got.stats.num_steps <= 24
    assert got.stats.accepted_by_source["grammar"] == got.stats.num_accepted_tokens >= 24


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


@pytest.mark.parametrize(
    "prediction", [7, {"type": "image", "content": "x"}, {"content": 7}, {"content": [7]}, {}, ["x"]]
)
def test_a_prediction_in_another_form_is_refused_in_one_line(prediction: Any) -> None:
    model, engine = scripted()
    with pytest.raises(ConfigError, match="neither a text nor") as refused:
        model.invoke("Hello", prediction=prediction)
    assert "\n" not in str(refused.value)
    assert engine.requests == []


def test_bound_tools_and_premade_responses_become_templates() -> None:
    model, engine = scripted(templates=["Document {document_id} is open."])
    model.invoke("Hello")
    model.bind_tools([open_document]).invoke("Hello")
    model.bind_tools([open_document], templates=[]).invoke("Hello")
    model.bind_tools([open_document], tool_choice="none").invoke("Hello", templates=Templates(["Bye."]))
    premade = "Document {document_id} is open."
    call = Template(("<tool_call>\n" + '{"name": "open_document", "arguments": {"document_id": "',)).text
    texts = [[template.text for template in request.templates] for request in engine.requests]
    assert texts[0] == [premade]
    assert texts[1][0] == premade
    assert texts[1][1].startswith(call)
    assert len(texts[2]) == 1
    assert texts[3] == ["Bye."]


def test_bad_templates_are_refused_when_the_model_is_made() -> None:
    with pytest.raises(ConfigError, match="nothing between the holes"):
        scripted(templates=["Hello {a}{b}"])


def test_answer_caches_tell_models_with_other_templates_apart() -> None:
    parameters = [scripted(templates=each)[0]._identifying_params["templates"] for each in (None, ["Bye {x}."])]
    assert json.dumps(parameters) == '[[], ["Bye {x}."]]'


def test_an_empty_list_of_drafters_asks_for_none() -> None:
    model, engine = scripted(drafters=("prompt",))
    model.invoke("Hello", drafters=())
    model.invoke("Hello")
    assert [request.speculation.drafters for request in engine.requests if request.speculation] == [(), ("prompt",)]
