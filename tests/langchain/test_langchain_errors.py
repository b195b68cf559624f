"""Errors of a call are LangChain's as well as ours, and say where what belongs to the run goes."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.order_chat import TOKENIZER
from helpers.scripted_kinds import HALF, MODELS, scripted
from langchain_core import exceptions as theirs

from precedent import errors
from precedent.errors import ConfigError, ContextOverflowError, PromptError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.langchain import exceptions as of_both
from precedent_testing.scripted_engine import ScriptedEngine

# What belongs to the run


@MODELS
@pytest.mark.parametrize("name", ["metadata", "tags", "callbacks", "run_name", "run_id"])
async def test_what_belongs_to_the_run_is_refused_in_a_call_with_where_it_goes(kind: Any, name: str) -> None:
    said = rf"a call takes no '{name}': it belongs to the run: write config=\{{\"{name}\": …\}}"
    model = scripted(kind)
    for ask in (
        lambda: model.invoke("hi", **{name: None}),
        lambda: model.invoke("hi", **{name: {"a": "b"}}),
        lambda: list(model.stream("hi", **{name: {"a": "b"}})),
        lambda: model.batch(["hi"], **{name: {"a": "b"}}),
        lambda: model.bind(**{name: {"a": "b"}}).invoke("hi"),
    ):
        with pytest.raises(ConfigError, match=said):
            ask()
    with pytest.raises(ConfigError, match=said):
        await model.ainvoke("hi", **{name: {"a": "b"}})
    with pytest.raises(ConfigError, match=said):
        await model.abatch(["hi"], **{name: {"a": "b"}})
    with pytest.raises(ConfigError, match=said):
        _ = [one async for one in model.astream("hi", **{name: {"a": "b"}})]
    assert model.engine.requests == []


# LangChain's own errors


@MODELS
def test_errors_of_a_call_are_langchains_as_well(kind: Any) -> None:
    with pytest.raises(theirs.ContextOverflowError) as overflow:
        kind.from_engine(ScriptedEngine(TOKENIZER, ["x"], context_length=5)).invoke("a long question")
    assert isinstance(overflow.value, ContextOverflowError)
    for call in ({"temperature": "warm"}, {"stop": [3]}, {"config": {"metadata": {"workflow_step": 3}}}):
        for ask in (scripted(kind).invoke, lambda *said, **call: list(scripted(kind).stream(*said, **call))):
            with pytest.raises(theirs.ModelInvalidRequestError) as wrong:
                ask("hi", **call)
            assert isinstance(wrong.value, ConfigError)
    with pytest.raises(theirs.ModelInvalidRequestError) as unsupported:
        scripted(kind).invoke("hi", n=2)
    assert isinstance(unsupported.value, UnsupportedError)
    with pytest.raises(theirs.ModelInvalidRequestError) as prompt:
        scripted(kind).invoke(HALF)
    assert isinstance(prompt.value, PromptError)


async def test_so_are_those_of_streams_and_awaited_calls() -> None:
    model = ChatPrecedent.from_engine(ScriptedEngine(TOKENIZER, ["x"], context_length=5))
    with pytest.raises(theirs.ContextOverflowError):
        list(model.stream("a long question"))
    with pytest.raises(theirs.ContextOverflowError):
        await model.ainvoke("a long question")
    with pytest.raises(theirs.ContextOverflowError):
        _ = [one async for one in model.astream("a long question")]


def test_a_model_that_cannot_be_loaded_was_not_found(tmp_path: Any) -> None:
    with pytest.raises(theirs.ModelNotFoundError) as missing:
        ChatPrecedent(model=str(tmp_path / "nothing")).invoke("hi")
    assert isinstance(missing.value, errors.ModelLoadError)


def test_every_error_of_both_kinds_says_what_ours_says() -> None:
    for ours, both in of_both._BOTH.items():
        assert issubclass(both, ours)
        assert issubclass(both, theirs.LangChainException)
        with pytest.raises(both, match=r"^what was wrong$") as raised, of_both.of_both_kinds():
            raise ours("what was wrong")
        assert raised.value.__cause__ is None
    with pytest.raises(errors.GenerationError), of_both.of_both_kinds():
        raise errors.GenerationError("of ours alone")
