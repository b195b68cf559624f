"""The tables of what users of other chat models write: every entry works, or says exactly what to write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams
from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain.arguments import FOR_CHAT, OF_THE_CALL
from precedent.langchain.settings import OF_THE_ENGINE
from precedent.langchain.synonyms import HARMLESS, HINTS, IDLE, OF_LOADING, SAME
from precedent.text.prompt import hermes_template
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, ScriptedRequest, chatml_tokenizer

QWEN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)
FIELDS = set(ChatPrecedent.model_fields)
SAMPLES: dict[str, Any] = {
    "model": "folder/name",
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


def asked(model: Any, **call: Any) -> ScriptedRequest:
    """What the engine was asked by one call."""
    model.invoke("hi", **call)
    return model.engine.requests[-1]


# Names that mean the same


@pytest.mark.parametrize("name", SAME)
def test_a_synonym_in_the_constructor_is_our_field(name: str) -> None:
    ours = SAME[name]
    given = {"model": "m", name: SAMPLES[ours]} if ours != "model" else {name: SAMPLES[ours]}
    if ours not in FIELDS:
        with pytest.raises(ConfigError, match=rf"takes no '{name}': it belongs in a call: write bind\({name}=…\)"):
            ChatPrecedent(**given)
        return
    assert getattr(ChatPrecedent(**given), ours) == SAMPLES[ours]
    assert ChatPrecedent(**{"model": "m", **given, name: None}).model == "m" if ours != "model" else True
    with pytest.raises(ConfigError, match=f"{ours}= and {name}= mean the same: give one of the two"):
        ChatPrecedent(**{"model": "m", ours: SAMPLES[ours], name: SAMPLES[ours]})


EFFECTS = {
    "max_tokens": lambda request: request.sampling.max_tokens == 7,
    "stop": lambda request: request.sampling.stop == ("STOP",),
    "reasoning": lambda request: request.prompt.endswith("<think></think>"),
    "response_format": lambda request: request.grammar is not None,
    "model": lambda request: True,  # another model answers: the request is found at its engine
}


@pytest.mark.parametrize("name", SAME)
def test_a_synonym_in_a_call_does_what_ours_does_or_belongs_to_the_constructor(name: str) -> None:
    ours, model = SAME[name], scripted(QWEN)
    if ours in OF_THE_ENGINE:
        with pytest.raises(ConfigError, match=rf"takes no '{name}': it belongs in the constructor: .*{name}=…"):
            model.invoke("hi", **{name: SAMPLES[ours]})
        return
    value = "scripted" if ours == "model" else SAMPLES[ours]
    value = "json" if name == "format" else value
    for request in (asked(model, **{name: value}), asked(model.bind(**{name: value}))):
        assert EFFECTS[ours](request)
    assert EFFECTS[ours](asked(model)) is (ours == "model"), "and without it not"


def test_values_are_taken_in_the_forms_of_other_chat_models() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert "integer" in str(asked(scripted(), format=schema).grammar)
    assert asked(scripted(), format="").grammar is None
    assert ChatPrecedent(model="m", reasoning={"effort": "low"}).reasoning == "low"
    model = ChatPrecedent(model=Path("folder"), device=torch.device("cuda", 1), torch_dtype=torch.bfloat16)
    assert (model.model, model.device, model.dtype) == ("folder", "cuda:1", "bfloat16")
    assert [ChatPrecedent(model="m", device=number).device for number in (0, -1)] == ["cuda:0", "cpu"]


NUMBERS: list[tuple[str, Any, str, Any]] = [
    ("temperature", "0.7", "temperature", 0.7),
    ("temperature", " 1e-1 ", "temperature", 0.1),
    ("top_p", "0.9", "top_p", 0.9),
    ("min_p", "0", "min_p", 0.0),
    ("repetition_penalty", "1.1", "repetition_penalty", 1.1),
    ("frequency_penalty", "-1", "frequency_penalty", -1.0),
    ("presence_penalty", "1", "presence_penalty", 1.0),
    ("top_k", "40", "top_k", 40),
    ("top_k", 40.0, "top_k", 40),
    ("top_k", -1, "top_k", 0),
    ("top_k", "-1", "top_k", 0),
    ("seed", "12345678901234567890", "seed", 12345678901234567890),
    ("seed", -1, "seed", None),
    ("seed", "-1", "seed", None),
    ("max_tokens", "7", "max_tokens", 7),
    ("num_predict", "7", "max_tokens", 7),
    ("max_new_tokens", 7.0, "max_tokens", 7),
]


@pytest.mark.parametrize(("name", "given", "ours", "meant"), NUMBERS, ids=str)
def test_numbers_mean_what_they_mean_elsewhere(name: str, given: Any, ours: str, meant: Any) -> None:
    for request in (asked(scripted(**{name: given})), asked(scripted(), **{name: given})):
        assert getattr(request.sampling, ours) == meant


def test_a_seed_of_minus_one_takes_the_models_own_away() -> None:
    assert asked(scripted(seed=3), seed=-1).sampling.seed is None
    assert asked(scripted(seed=3)).sampling.seed == 3


@pytest.mark.parametrize("name", [*(name for name, ours in SAME.items() if ours == "max_tokens"), "max_tokens"])
@pytest.mark.parametrize("value", [-1, -2, "-1"])
def test_an_answer_without_a_limit_is_told_what_to_write(name: str, value: Any) -> None:
    for ask in (lambda: scripted(**{name: value}), lambda: scripted().invoke("hi", **{name: value})):
        with pytest.raises(ConfigError, match="without a limit: write max_tokens="):
            ask()


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "seed", "max_tokens", "num_predict"])
@pytest.mark.parametrize("value", ["warm", "", "nan", "0.5.1", "inf", [1], True])
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{SAME.get(name, name)}="):
        scripted(**{name: value})


def test_dtypes_have_their_names_elsewhere() -> None:
    assert [ChatPrecedent(model="m", dtype=name).dtype for name in ("half", "float")] == ["float16", "float32"]


INSTEAD = {
    "n_batch": "batch()",
    "use_mmap": "leave it out",
    "lora_path": "write model=",
    "grammar": "write response_format=",
    "system": "first message",
    "headers": "ChatPrecedentServer(base_url=…)",
}


@pytest.mark.parametrize("name", INSTEAD)
def test_the_error_says_what_replaces_a_setting(name: str) -> None:
    for ask in (lambda: ChatPrecedent(model="m", **{name: "x"}), lambda: scripted().invoke("hi", **{name: "x"})):
        with pytest.raises(ConfigError, match=f"takes no '{name}': .*{re.escape(INSTEAD[name])}"):
            ask()


@pytest.mark.parametrize("template", [QWEN, None], ids=["with a switch", "without"])
@pytest.mark.parametrize("name", ["reasoning", "think", "enable_thinking"])
def test_thinking_is_switched_off_where_the_template_can_and_refused_where_not(name: str, template: str | None) -> None:
    for model, call in ((scripted(template, **{name: False}), {}), (scripted(template), {name: False})):
        if template is None:
            with pytest.raises(UnsupportedError, match="reasoning=False: this model's chat template has no switch"):
                model.invoke("hi", **call)
        else:
            assert asked(model, **call).prompt.endswith("<think></think>")


# What goes to the loading of weights


@pytest.mark.parametrize("name", OF_LOADING)
def test_arguments_of_from_pretrained_go_into_model_kwargs(name: str) -> None:
    assert ChatPrecedent(model="m", **{name: "x"}).model_kwargs == {name: "x"}
    assert PrecedentLLM(model="m", model_kwargs={"a": 1}, **{name: "x"}).model_kwargs == {"a": 1, name: "x"}
    assert ChatPrecedent(model="m", **{name: None}).model_kwargs is None
    with pytest.raises(ConfigError, match=f"{name}= is also in model_kwargs=: give it once"):
        ChatPrecedent(model="m", model_kwargs={name: 1}, **{name: "x"})
    with pytest.raises(ConfigError, match=rf"a call takes no '{name}': it belongs in the constructor"):
        scripted().invoke("hi", **{name: "x"})
    with pytest.raises(ConfigError, match="model_kwargs cannot be set for a model object"):
        ChatPrecedent.from_model(object(), object(), **{name: "x"})


@pytest.mark.parametrize("name", ["temperature", "top_p", "stop", "tools"])
def test_arguments_of_a_call_do_not_go_to_the_loading_of_weights(name: str) -> None:
    with pytest.raises(ConfigError, match=f"model_kwargs says how weights are loaded: write {name}="):
        ChatPrecedent(model="m", model_kwargs={name: 1})


@pytest.mark.parametrize("name", [*OF_THE_ENGINE, "streaming"])
def test_what_belongs_to_the_engine_is_refused_in_a_call(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"a call takes no '{name}': it belongs in the constructor"):
        scripted().invoke("hi", **{name: "x"})


@pytest.mark.parametrize("name", sorted(set(OF_THE_CALL) - FIELDS))
def test_what_belongs_to_a_call_is_refused_in_the_constructor(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"ChatPrecedent takes no '{name}': (it belongs in a call|write bind_tools)"):
        ChatPrecedent(model="m", **{name: "x"})


@pytest.mark.parametrize("name", FOR_CHAT)
def test_a_text_completion_says_that_chats_are_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match=f"PrecedentLLM takes no '{name}': .* use ChatPrecedent"):
        PrecedentLLM(model="m", **{name: True})
    if name in OF_THE_CALL:
        engine: Any = ScriptedEngine(chatml_tokenizer(), ["x"])
        with pytest.raises(UnsupportedError, match=f"{name} cannot be given to a text completion"):
            PrecedentLLM.from_engine(engine).invoke("hi", **{name: True})


# What asks for nothing, and hints


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_nothing_is_taken_and_everything_else_of_it_refused(name: str) -> None:
    for value in (None, *HARMLESS[name]):
        ChatPrecedent(model="m", **{name: value})
        assert asked(scripted(), **{name: value}).sampling == SamplingParams()
    for ask in (lambda: ChatPrecedent(model="m", **{name: 7}), lambda: scripted().invoke("hi", **{name: 7})):
        with pytest.raises(UnsupportedError, match=re.escape(f"{name}=7 is not supported: {HINTS[name]}")):
            ask()


@pytest.mark.parametrize("name", [name for name in HINTS if name not in HARMLESS])
def test_a_hint_says_what_to_write(name: str) -> None:
    for ask in (lambda: ChatPrecedent(model="m", **{name: "x"}), lambda: scripted().invoke("hi", **{name: "x"})):
        if name in FIELDS and not isinstance(getattr(ChatPrecedent(model="m"), name), property):
            continue  # a field of LangChain's in the constructor; in a call it belongs to the run
        with pytest.raises(ConfigError, match=re.escape(f"takes no {name!r}: {HINTS[name]}")):
            ask()
    with pytest.raises(ConfigError, match=re.escape(f"a call takes no {name!r}: {HINTS[name]}")):
        scripted().invoke("hi", **{name: "x"})


OTHERS = {"base_url", "temperature", "config", "device_map", "token"}


@pytest.mark.parametrize("name", HINTS)
def test_hints_name_only_what_there_is(name: str) -> None:
    hint = HINTS[name]
    for argument in re.findall(r"(\w+)=", hint):
        assert argument in {*FIELDS, *OF_THE_CALL, *OF_LOADING, *OTHERS}, argument
    for method in re.findall(r"(\w+)\(", hint):
        assert hasattr(ChatPrecedent, method) or method in {"BitsAndBytesConfig", "ChatPrecedentServer"}, method
    assert "\n" not in hint


def test_every_name_has_one_meaning() -> None:
    ours = FIELDS | set(OF_THE_CALL)
    assert not (SAME.keys() & ours) - {"model_name"}
    assert set(SAME.values()) <= ours
    assert not SAME.keys() & HINTS.keys()
    assert not set(OF_LOADING) & (ours | SAME.keys() | HINTS.keys())
    assert set(HARMLESS) <= HINTS.keys()
    assert not set(IDLE) & (ours | SAME.keys() | HINTS.keys())


PROMISED = (
    *("chat_template_kwargs", "reasoning", "think", "num_predict", "max_new_tokens", "format", "stop_sequences"),
    *("num_ctx", "keep_alive", "base_url", "device_map", "quantization_config", "trust_remote_code", "revision"),
    *("torch_dtype", "logit_bias", "frequency_penalty", "presence_penalty", "stop_token_ids"),
)


def test_what_users_of_other_chat_models_type_is_known() -> None:
    known = {*FIELDS, *OF_THE_CALL, *SAME, *OF_LOADING, *HINTS}
    assert set(PROMISED) <= known


@pytest.mark.parametrize("name", ["temprature", "wonderful"])
def test_an_unknown_name_is_refused_with_all_known_ones(name: str) -> None:
    for ask in (lambda: ChatPrecedent(model="m", **{name: 1}), lambda: scripted().invoke("hi", **{name: 1})):
        with pytest.raises(ConfigError, match=rf"takes no {name!r}; known: .*\btemperature\b"):
            ask()


@given(st.text(min_size=1))
def test_any_other_name_is_an_error_in_one_line(name: str) -> None:
    if name in {*FIELDS, *SAME, *OF_LOADING, *HARMLESS, *HINTS, *IDLE}:
        return
    with pytest.raises((ConfigError, UnsupportedError)) as refused:
        ChatPrecedent(model="m", **{name: 1})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", IDLE)
def test_what_langchain_gives_every_chat_model_is_taken_where_it_gives_it(name: str) -> None:
    ChatPrecedent(model="m", **{name: "x"})
    with pytest.raises(ConfigError, match=f"a call takes no '{name}': it means nothing .* leave it out"):
        scripted().invoke("hi", **{name: "x"})


def test_an_answer_cache_is_not_a_cache_to_draft_from(tmp_path: Path) -> None:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        for wrong in ("orders.db", tmp_path / "orders.db", cache):
            with pytest.raises(ConfigError, match="for a cache to draft from write speculation_cache="):
                ChatPrecedent(model="m", cache=wrong)
    assert ChatPrecedent(model="m", cache=False).cache is False
    with pytest.raises(ConfigError, match="cache=3 must be a BaseCache"):
        ChatPrecedent(model="m", cache=3)


def test_a_drafter_that_there_is_not_is_refused_in_the_constructor() -> None:
    for fields in ({"drafters": ["recal"]}, {"speculation": {"drafters": ["recal"]}}):
        for make in (lambda fields: ChatPrecedent(model="m", **fields), lambda fields: scripted(**fields)):
            with pytest.raises(ConfigError, match="no drafter is called 'recal'"):
                make(fields)
    engine: Any = ScriptedEngine(chatml_tokenizer(), ["x"])
    engine.drafters = ("mine",)
    assert ChatPrecedent.from_engine(engine, drafters=["mine", "recall"]).drafters == ("mine", "recall")
