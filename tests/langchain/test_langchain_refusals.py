"""Settings, calls and tools that cannot be are refused in one line before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.order_chat import engine_of, look_up, scripted
from pydantic import BaseModel, create_model

from precedent.errors import ConfigError, ContextOverflowError, GenerationError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent


@pytest.mark.parametrize(
    ("tenant", "said"),
    [
        ("", "must be a non-empty text"),
        (7, r"must be a (non-empty )?text"),
        ("x" * 201, "give at most 200"),
        ("a\nb", "not printable"),
    ],
)
def test_a_tenant_that_cannot_be_one_is_refused(tenant: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"tenant=.*{said}"):
        scripted("a").invoke("hi", tenant=tenant)
    with pytest.raises(ConfigError, match=rf"tenant=.*({said}|should be a valid string)"):
        ChatPrecedent(model="m", tenant=tenant)


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"temprature": 1}, ConfigError, "takes no 'temprature'; known: "),
        ({"xyz": 1}, ConfigError, "known: temperature"),
        ({"temperature": -1}, ConfigError, "temperature=-1 must be 0"),
        ({"speculation": "on"}, ConfigError, "speculation='on' is neither True"),
        ({"speculation": {"max_node": 4}}, ConfigError, "no setting 'max_node'; known: "),
        ({"model": "other"}, UnsupportedError, "model='other' is not loaded, and a call loads nothing"),
        ({"response_format": {"type": "xml"}}, ConfigError, "response_format=.* is neither a class nor a dict"),
        ({"strict": "very"}, ConfigError, "strict='very' must be 'auto', True or False"),
        ({"tool_choice": "any"}, ConfigError, "tool_choice='any' forces a call, but no tool is bound"),
        ({"n": 2}, UnsupportedError, "n=2 is not supported"),
    ],
)
async def test_a_bad_call_is_refused_before_anything_runs(kwargs: Any, error: type[Exception], said: str) -> None:
    model = scripted("a")
    for attempt in (lambda: model.invoke("hi", **kwargs), lambda: list(model.stream("hi", **kwargs))):
        with pytest.raises(error, match=said):
            attempt()
    with pytest.raises(error, match=said):
        await model.ainvoke("hi", **kwargs)
    assert engine_of(model).requests == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temprature": 1}, "ChatPrecedent takes no 'temprature'; known: "),
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be a number in"),
        ({"stop": [""]}, "stop holds an empty string"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ChatPrecedent(model="m", **settings)
    assert "\n" not in str(caught.value)


def test_one_tool_in_two_forms_is_shown_once_and_two_of_one_name_are_refused() -> None:
    class close(BaseModel):
        """Close an order."""

        number: str

    other = create_model("close", __doc__="Close an order.", number=(int, ...))
    model = scripted("a")
    model.bind_tools([close, look_up, close.model_json_schema()]).invoke("hi")
    prompt = engine_of(model).requests[0].prompt
    assert [prompt.count(f'"name": "{name}"') for name in ("close", "look_up")] == [1, 1]
    assert prompt.index("look_up") > prompt.index("close"), "in the order in which they were bound"
    with pytest.raises(PromptError, match="tool 'close' is bound twice"):
        model.bind_tools([close, other])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            {"title": "order", "type": "object", "properties": {"a": {"type": "text"}}},
            "tool 'order' has no valid JSON Schema",
        ),
        ({"description": "Search."}, "has no name|cannot be shown"),
        (3, r"tool number 1 cannot be shown to the model \(.*\): give a function"),
    ],
)
def test_a_bad_tool_is_refused_by_name(bad: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        scripted("a").bind_tools([bad])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "model is missing: give a Hugging Face id or a folder as model=…"),
        ({"model": 3}, "model=3 must be a text"),
        ({"model": "m", "temperature": "warm"}, "temperature='warm' must be 0"),
        ({"model": "m", "drafters": ["recall", 3]}, r"drafters=\['recall', 3\] must be a list of names"),
        ({"model": "m", "drafters": "recall"}, "drafters='recall'"),
        ({"model": "m", "speculation": "off"}, "speculation='off' is neither True, False"),
        ({"model": "m", "tenant": ""}, "tenant='' must be a non-empty text"),
    ],
)
def test_a_wrong_field_is_one_line_before_anything_is_loaded(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        ChatPrecedent(**fields)
    assert "\n" not in str(refused.value)


def test_drafters_of_a_call_are_a_list_which_may_be_empty() -> None:
    model = scripted("a", "b")
    with pytest.raises(ConfigError, match=r"drafters='recall' must be a list of names: \['recall'\]"):
        model.invoke("hi", drafters="recall")
    model.invoke("hi", drafters=[])
    assert engine_of(model).requests[0].speculation.drafters == ()


def test_no_messages_and_a_prompt_that_is_too_long() -> None:
    with pytest.raises(PromptError, match="message list is empty"):
        scripted("a").invoke([])
    with pytest.raises(ContextOverflowError, match="the context 20"):
        scripted("a", context_length=20).invoke("a long question")


async def test_an_error_of_the_engine_reaches_the_caller() -> None:
    with pytest.raises(GenerationError, match="0 answers"):
        scripted().invoke("hi")
    with pytest.raises(GenerationError, match="0 answers"):
        await scripted().ainvoke("hi")
