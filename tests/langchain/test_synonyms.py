"""The tables of what users of other chat models write: every entry works, or says exactly what to write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scripted_kinds import asked

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain.arguments import FOR_CHAT, OF_THE_CALL
from precedent.langchain.fields import OF_THE_ENGINE
from precedent.langchain.synonyms import HARMLESS, HINTS, IDLE, OF_LOADING, SAME
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

QWEN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)
FIELDS = set(ChatPrecedent.model_fields)
SAMPLES: dict[str, Any] = {
    "model": "scripted",
    "draft_model": "first-layers:2",
    "dtype": "float32",
    "max_tokens": 7,
    "stop": ["STOP"],
    "reasoning": False,
    "response_format": {"type": "json_object"},
}


def scripted(template: str | None = None, **fields: Any) -> ChatPrecedent:
    tokenizer = chatml_tokenizer(chat_template=template or hermes_template())
    engine: Any = ScriptedEngine(tokenizer, lambda prompt: "an answer, STOP, and more", may_stray=True)
    return ChatPrecedent.from_engine(engine, **fields)


def refused(said: str, error: type[Exception] = ConfigError, /, **arguments: Any) -> None:
    """In the constructor and in a call."""
    for ask in (lambda: ChatPrecedent(**{"model": "m", **arguments}), lambda: scripted().invoke("hi", **arguments)):
        with pytest.raises(error, match=said):
            ask()


@pytest.mark.parametrize("name", SAME)
def test_a_synonym_does_what_our_name_does_or_belongs_elsewhere(name: str) -> None:
    ours, value = SAME[name], SAMPLES[SAME[name]]
    if ours in FIELDS:
        assert (
            getattr(ChatPrecedent(**{"model": "m", name: value} if ours != "model" else {name: value}), ours) == value
        )
        with pytest.raises(ConfigError, match=f"{ours}= and {name}= mean the same: give one of the two"):
            ChatPrecedent(**{"model": "m", ours: value, name: value})
    else:
        with pytest.raises(ConfigError, match=rf"takes no '{name}': it belongs in a call: write bind\({name}=…\)"):
            ChatPrecedent(**{"model": "m", name: value})
    if ours in OF_THE_ENGINE:
        with pytest.raises(ConfigError, match=rf"takes no '{name}': it belongs in the constructor: .*{name}=…"):
            scripted().invoke("hi", **{name: value})
        return
    results = []
    for written in (ours, name):
        model = scripted(QWEN)
        model.invoke("hi", **{written: "json" if written == "format" else value})
        results.append((asked(model).sampling, asked(model).prompt, asked(model).grammar))
    assert results[0] == results[1]


def test_values_are_taken_in_the_forms_of_other_chat_models() -> None:
    model = scripted()
    model.invoke("hi", format={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert "integer" in str(asked(model).grammar)
    model.invoke("hi", format="")
    assert asked(model).grammar is None
    assert ChatPrecedent(model="m", reasoning={"effort": "low"}).reasoning == "low"
    made = ChatPrecedent(model=Path("folder"), device=torch.device("cuda", 1), torch_dtype=torch.bfloat16)
    assert (made.model, made.device, made.dtype) == ("folder", "cuda:1", "bfloat16")
    assert [ChatPrecedent(model="m", device=number).device for number in (0, -1)] == ["cuda:0", "cpu"]
    assert [ChatPrecedent(model="m", dtype=name).dtype for name in ("half", "float")] == ["float16", "float32"]


NUMBERS: list[tuple[str, Any, str, Any]] = [
    ("temperature", " 7e-1 ", "temperature", 0.7),
    *((name, "0.9", name, 0.9) for name in ("top_p", "min_p", "repetition_penalty")),
    *((name, "-1", name, -1.0) for name in ("frequency_penalty", "presence_penalty")),
    ("top_k", "40", "top_k", 40),
    ("top_k", 40.0, "top_k", 40),
    ("top_k", "-1", "top_k", 0),
    ("seed", "12345678901234567890", "seed", 12345678901234567890),
    ("seed", -1, "seed", None),
    ("seed", "-1", "seed", None),
    ("num_predict", "7", "max_tokens", 7),
    ("max_new_tokens", 7.0, "max_tokens", 7),
]


@pytest.mark.parametrize(("name", "given", "ours", "meant"), NUMBERS, ids=str)
def test_numbers_mean_what_they_mean_elsewhere(name: str, given: Any, ours: str, meant: Any) -> None:
    for fields, call in (({name: given}, {}), ({"seed": 3}, {name: given})):
        model = scripted(**fields)
        model.invoke("hi", **call)
        assert getattr(asked(model).sampling, ours) == meant


def test_values_that_are_none_and_answers_without_a_limit_are_refused_by_name() -> None:
    for name in (*(name for name, ours in SAME.items() if ours == "max_tokens"), "max_tokens"):
        for value in (-1, -2, "-1"):
            refused("without a limit: write max_tokens=", **{name: value})
    for name in ("temperature", "top_p", "top_k", "seed", "num_predict"):
        for value in ("warm", "", "nan", "0.5.1", "inf", [1], True):
            refused(f"^{SAME.get(name, name)}=", **{name: value})


# Where names belong


def of_the_constructor(kind: Any = ChatPrecedent, /, **arguments: Any) -> str:
    """What the constructor says of arguments that it refuses."""
    with pytest.raises(ConfigError) as refusal:
        kind(model="m", **arguments)
    return str(refusal.value)


def of_a_call(error: type[Exception] = ConfigError, kind: Any = ChatPrecedent, /, **arguments: Any) -> str:
    engine: Any = ScriptedEngine(chatml_tokenizer(), ["x"])
    with pytest.raises(error) as refusal:
        kind.from_engine(engine).invoke("hi", **arguments)
    return str(refusal.value)


def test_arguments_of_from_pretrained_go_into_model_kwargs() -> None:
    for name in OF_LOADING:
        assert PrecedentLLM(model="m", model_kwargs={"a": 1}, **{name: "x"}).model_kwargs == {"a": 1, name: "x"}
        assert ChatPrecedent(model="m", **{name: None}).model_kwargs is None
        said = of_the_constructor(model_kwargs={name: 1}, **{name: "x"})
        assert said == f"{name}= is also in model_kwargs=: give it once"
        with pytest.raises(ConfigError, match="model_kwargs cannot be set for a model object"):
            ChatPrecedent.from_model(object(), object(), **{name: "x"})
    for name in ("temperature", "stop", "tools"):
        said = of_the_constructor(model_kwargs={name: 1})
        assert f"model_kwargs says how weights are loaded: write {name}=" in said


def test_a_name_is_refused_where_it_does_not_belong_with_the_place_where_it_does() -> None:
    for name in (*OF_THE_ENGINE, *OF_LOADING, "streaming"):
        assert f"a call takes no '{name}': it belongs in the constructor" in of_a_call(**{name: "x"})
    for name in sorted(set(OF_THE_CALL) - FIELDS):
        said = of_the_constructor(**{name: "x"})
        assert re.search(rf"ChatPrecedent takes no '{name}': (it belongs in a call|write bind_tools)", said)
    for name in FOR_CHAT:
        said = of_the_constructor(PrecedentLLM, **{name: True})
        assert re.search(f"PrecedentLLM takes no '{name}': .* use ChatPrecedent", said)
        if name in OF_THE_CALL:
            said = of_a_call(UnsupportedError, PrecedentLLM, **{name: True})
            assert f"{name} cannot be given to a text completion" in said
    for name in IDLE:  # LangChain gives them to every chat model
        ChatPrecedent(model="m", **{name: "x"})
        assert f"a call takes no '{name}': it means nothing" in of_a_call(**{name: "x"})


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_nothing_is_taken_and_everything_else_of_it_refused(name: str) -> None:
    for value in (None, *HARMLESS[name]):
        ChatPrecedent(model="m", **{name: value})
        model = scripted()
        model.invoke("hi", **{name: value})
        assert asked(model).sampling == SamplingParams()
    refused(re.escape(f"{name}=7 is not supported: {HINTS[name]}"), UnsupportedError, **{name: 7})


def test_a_hint_says_what_to_write_and_names_only_what_there_is() -> None:
    assert HINTS.keys() >= {"n_batch", "use_mmap", "lora_path", "grammar", "system", "headers"}
    known = {*FIELDS, *OF_THE_CALL, *OF_LOADING, "base_url", "config"}
    for name, hint in HINTS.items():
        if name not in HARMLESS:
            assert f"a call takes no {name!r}: {hint}" in of_a_call(**{name: "x"})
            if name not in FIELDS:  # some belong to LangChain's constructor, and in a call to the run
                assert f"ChatPrecedent takes no {name!r}: {hint}" in of_the_constructor(**{name: "x"})
        assert set(re.findall(r"(\w+)=", hint)) <= known, hint
        called = set(re.findall(r"(\w+)\(", hint)) - {"BitsAndBytesConfig", "ChatPrecedentServer"}
        assert all(hasattr(ChatPrecedent, method) for method in called), hint


def test_every_name_has_one_meaning() -> None:
    ours = FIELDS | set(OF_THE_CALL)
    for names in (SAME.keys() - {"model_name"}, OF_LOADING, IDLE):
        assert not set(names) & ours
        assert not set(names) & HINTS.keys()
    assert set(SAME.values()) <= ours
    assert set(HARMLESS) <= HINTS.keys()


def test_an_answer_cache_is_not_a_cache_to_draft_from(tmp_path: Path) -> None:
    with SpeculationCache.open() as cache:
        for wrong in ("orders.db", tmp_path / "orders.db", cache):
            with pytest.raises(ConfigError, match="for a cache to draft from write speculation_cache="):
                ChatPrecedent(model="m", cache=wrong)
    assert ChatPrecedent(model="m", cache=False).cache is False
    with pytest.raises(ConfigError, match="cache=3 must be an instance of BaseCache"):
        ChatPrecedent(model="m", cache=3)


def test_a_drafter_that_there_is_not_is_refused_in_the_constructor() -> None:
    for fields in ({"drafters": ["recal"]}, {"speculation": {"drafters": ["recal"]}}):
        for make in (lambda fields: ChatPrecedent(model="m", **fields), lambda fields: scripted(**fields)):
            with pytest.raises(ConfigError, match="no drafter is called 'recal'"):
                make(fields)
    engine: Any = ScriptedEngine(chatml_tokenizer(), ["x"])
    engine.drafters = ("mine",)
    assert ChatPrecedent.from_engine(engine, drafters=["mine", "recall"]).drafters == ("mine", "recall")
