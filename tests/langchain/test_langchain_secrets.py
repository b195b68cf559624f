"""The password of a cache's URL stands nowhere that LangChain, a log, a trace or a file could show it."""

from __future__ import annotations

import copy
import io
import json
import pickle
import pprint
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, dumps, load
from langchain_core.runnables import ConfigurableField
from rich.console import Console

from precedent.cache import StoreURL
from precedent.engine.options import EngineOptions
from precedent.errors import PrecedentError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.langchain.engines import EngineHolder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

CANARY = "Zyzzogeton"
URL = f"postgresql://me:p@{CANARY}@db.internal/precedent?sslpassword={CANARY}"
SHOWN = "postgresql://me@db.internal/precedent?sslpassword=***"

BY_KIND = pytest.mark.parametrize("kind", [ChatPrecedent, PrecedentLLM])


def configured(kind: Any) -> Any:
    configurable = kind(model="m").configurable_fields(speculation_cache=ConfigurableField(id="cache"))
    return configurable._prepare({"configurable": {"cache": URL}})[0]


def assigned(kind: Any) -> Any:
    model = kind(model="m")
    model.speculation_cache = URL
    return model


WAYS_IN: dict[str, Callable[[Any], Any]] = {
    "constructor": lambda kind: kind(model="m", speculation_cache=URL),
    "URL": lambda kind: kind(model="m", speculation_cache=StoreURL(URL)),
    "assignment": assigned,
    "configurable": configured,
    "update": lambda kind: kind(model="m").model_copy(update={"speculation_cache": URL}),
    "validated": lambda kind: kind.model_validate({"model": "m", "speculation_cache": URL}),
    "deep copy": lambda kind: copy.deepcopy(kind(model="m", speculation_cache=URL)),
    "dump": lambda kind: kind(**kind(model="m", speculation_cache=URL).model_dump()),
    "environment": lambda kind: kind(model="m"),
}


def on_a_console(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=500)
    console.print({"model": shown}, soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined]


WAYS_OUT: dict[str, Callable[[Any], Any]] = {
    "repr": lambda model: f"{model!r} {model} {vars(model)} {dict(model)} {pprint.pformat(model)}",
    "rich": on_a_console,
    "model_dump": lambda model: repr(model.model_dump()),
    "model_dump of all": lambda model: repr(model.model_dump(round_trip=True, serialize_as_any=True)),
    "model_dump_json": lambda model: model.model_dump_json(indent=1),
    "dumps": lambda model: dumps(model, pretty=True),
    "identifying": lambda model: repr((model._identifying_params, model._get_ls_params())),
    "key of answers": lambda model: model._get_llm_string() if isinstance(model, ChatPrecedent) else "",
    "engine": lambda model: repr((model._engine_options(), model._engine_options().key(), model.engines)),
    **{f"pickle {n}": lambda model, n=n: repr(pickle.dumps(model, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "cloudpickle": lambda model: repr((cloudpickle.dumps(model), model.__reduce_ex__(4))),
    "bound": lambda model: repr(model.bind(stop=["x"]).with_config(tags=["a"])),
}


@BY_KIND
@pytest.mark.parametrize("way_in", WAYS_IN)
def test_a_password_goes_in_and_never_out(way_in: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if way_in == "environment":
        monkeypatch.setenv("PRECEDENT_SPECULATION_CACHE", URL)
    model = WAYS_IN[way_in](kind)
    assert model._engine_options().cache.reveal() == StoreURL(URL).reveal(), "it can still connect"
    said = {name: show(model) for name, show in WAYS_OUT.items()}
    assert [name for name, text in said.items() if CANARY in text] == []
    assert all(SHOWN in said[name] for name in ("repr", "model_dump", "model_dump_json", "dumps", "pickle 4"))


@BY_KIND
def test_a_trace_holds_no_password(kind: Any) -> None:
    told: list[Any] = []

    class Traced(BaseCallbackHandler):
        def on_chat_model_start(self, *said: Any, **more: Any) -> None:
            told.extend([said, more])

        on_llm_start = on_chat_model_start

    engine: Any = ScriptedEngine(chatml_tokenizer(), ["a", "b"])
    model = kind(model="m", speculation_cache=URL, engines=EngineHolder(engine=engine))
    model.invoke("hi", {"callbacks": [Traced()]})
    list(model.stream("hi", {"callbacks": [Traced()]}))
    assert len(told) == 4
    assert CANARY not in repr(told)
    assert "sslpassword=***" in repr(told)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": 5},
        {"model": "m", "drafters": "recall"},
        {"model": "m", "speculation_cache": URL + "/@"},
        {"model": "m", "speculation_cache": URL.encode()},
        {"model": "m", "speculation_cache": {"url": URL}},
        {"model": "m", "speculation_cache": f"host=a password={CANARY}"},
    ],
)
def test_what_goes_wrong_is_said_without_it(fields: dict[str, Any]) -> None:
    with pytest.raises(PrecedentError) as failed:
        ChatPrecedent(**{"speculation_cache": URL, **fields})
    text = "".join(traceback.format_exception(failed.value))
    assert CANARY not in text + repr(failed.value) + repr(failed.value.__context__)


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
def test_what_was_written_down_is_read_back_without_it_and_answers_are_the_same_by_every_password() -> None:
    one, same, other = (
        ChatPrecedent(model="m", speculation_cache=f"postgresql://me:{password}@host/db") for password in "aab"
    )
    written = load(dumpd(one), allowed_objects=[ChatPrecedent], valid_namespaces=["precedent"])
    for again in (written, pickle.loads(pickle.dumps(one)), ChatPrecedent(**one.model_dump(mode="json"))):
        assert again.speculation_cache == StoreURL("postgresql://me@host/db")
    assert one._engine_options().key() == same._engine_options().key()
    assert one._engine_options().key() != other._engine_options().key()
    assert hash(one._engine_options().key()) == hash(other._engine_options().key()), "a hash could be tried out"
    assert one._get_llm_string() == other._get_llm_string()


def test_an_engines_options_and_a_hub_token_are_not_shown_either() -> None:
    assert CANARY not in repr(EngineOptions(cache=URL, model_kwargs={"token": CANARY}))
    model = ChatPrecedent(model="m", model_kwargs={"token": CANARY, "revision": "main"})
    assert CANARY not in repr(model) + str(model) + json.dumps(dumpd(model))
    assert model.model_kwargs == {"token": CANARY, "revision": "main"}
