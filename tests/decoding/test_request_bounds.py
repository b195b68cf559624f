"""What a request brings is bounded, and prepared on its caller's thread: other requests' steps wait for none of it."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from precedent.config import SamplingParams
from precedent.drafters import Request
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.templates import TemplateDrafter
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, ContextOverflowError, PromptError
from precedent.text.codec import TokenizerCodec
from precedent_testing.scripted_model import scripted_model_engine, scripted_tokenizer

WORKER = "precedent-worker"
PROMPT = list(b"Where is order 1042?")
SHORT = SamplingParams(max_tokens=4)
TOO_LONG = "word " * 2_000_000
"""Ten megabytes."""


class WatchedTokenizer:
    """The scripted model's tokenizer, itself its backend, which notes who encodes, and may be told to wait."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.threads = tokenizer, set[str]()
        self.before: Callable[[str], object] = lambda text: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tokenizer, name)
        if name == "backend_tokenizer":
            self.backend_tokenizer = found = WatchedTokenizer(found)
        return found

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, **how: Any) -> Any:
        self._note(text)
        return self._tokenizer.encode(text, **how)

    def encode_batch_fast(self, texts: list[str], **how: Any) -> Any:
        for text in texts:
            self._note(text)
        return self._tokenizer.encode_batch_fast(texts, **how)

    def _note(self, text: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.before(text)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with closing(scripted_model_engine(lambda prompt: "It was sent on Monday, and it arrives tomorrow.")) as running:
        yield running


BOUNDS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ContextOverflowError, r"prediction has 10,000,000 characters, at most 131,072", {"prediction": TOO_LONG}),
    (ConfigError, r"templates holds 250,000 templates, at most 1,024", {"templates": ["Order {a}."] * 250_000}),
    (ConfigError, r"templates holds 10,000,000 characters, at most 262,144", {"templates": [TOO_LONG]}),
    (ConfigError, r"templates holds 20,000 holes, at most 512", {"templates": ["{a} x " * 10_000, "{a}: " * 10_000]}),
    (ConfigError, r"workflow_step has 10,000,000 characters, at most 1,000", {"workflow_step": TOO_LONG}),
    (ConfigError, r"tools has 10,000,000 characters, at most 1,000", {"tools": TOO_LONG}),
    (ConfigError, r"stop has 100,000 texts: at most 64", {"stop": [f"stop {n}" for n in range(100_000)]}),
    (ConfigError, r"stop has a text of 10,000,000 characters: at most 1,000", {"stop": TOO_LONG}),
    (ConfigError, r"stop_token_ids has 100,000 tokens: at most 1,024", {"stop_token_ids": list(range(100_000))}),
]


@pytest.mark.parametrize(("kind", "message", "given"), BOUNDS, ids=[message for _, message, _ in BOUNDS])
def test_what_is_too_long_is_refused_with_its_size_and_the_bound(
    engine: Engine, kind: type[Exception], message: str, given: dict[str, Any]
) -> None:
    assert issubclass(kind, ValueError)
    ask = SamplingParams if given.keys() & set(SamplingParams.__slots__) else partial(engine.submit, PROMPT, SHORT)
    with pytest.raises(kind, match=message):
        ask(**given)


@pytest.mark.parametrize("value", [3, b"ok"], ids=repr)
def test_an_argument_of_another_kind_is_refused_by_name(engine: Engine, value: Any) -> None:
    """Every argument: with what was given, before anything is computed."""
    for name in inspect.signature(Engine.submit).parameters.keys() - {"self", "templates"}:
        given: dict[str, Any] = {"prompt_ids": PROMPT, "sampling": SHORT, name: value}
        with pytest.raises((ConfigError, PromptError), match=rf"^{name}={value!r} "):
            engine.submit(**given)
    with pytest.raises(ConfigError, match=r"^template"):
        engine.submit(PROMPT, SHORT, templates=value)


def test_an_answer_longer_than_any_context_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="max_tokens=1000000 is more than the model's context can hold: give at most"):
        engine.submit(PROMPT, SamplingParams(max_tokens=10**6))


def test_the_switch_of_speculation_is_on_or_off(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECEDENT_SPECULATION", "of")
    with pytest.raises(ConfigError, match="PRECEDENT_SPECULATION='of' is neither 'on' nor 'off'"):
        engine.submit(PROMPT, SHORT)


@pytest.mark.parametrize("ids", [[1.5], ["ok"], {1: 1}, [None]], ids=repr)
def test_token_ids_are_whole_numbers(engine: Engine, ids: Any) -> None:
    with pytest.raises(PromptError, match=rf"^prompt_ids={re.escape(repr(ids))} must be a list of token ids"):
        engine.submit(ids, SHORT)
    with pytest.raises(ConfigError, match=rf"^prediction={re.escape(repr(ids))} must be a text or a list of token ids"):
        engine.submit(PROMPT, SHORT, prediction=ids)


def test_a_prompt_beyond_the_context_is_refused_before_it_is_read(engine: Engine) -> None:
    class Long(list[int]):
        def __len__(self) -> int:
            return 10_000_000

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("nobody may read it")

    with pytest.raises(ContextOverflowError, match="10000000 tokens, the model's context holds 16384"):
        engine.submit(Long(), SHORT)


def test_a_query_and_a_prediction_of_too_many_tokens_are_cut(engine: Engine) -> None:
    """They only find what may be proposed, so that long ones fail nothing."""
    assert engine.submit(PROMPT, SHORT, query=TOO_LONG).result().finish_reason == "length"
    codec = TokenizerCodec(scripted_tokenizer())
    whole = codec.answer_ids("0123456789" * 20)
    assert codec.prediction_ids("0123456789" * 20, 100) == whole[:100]
    assert codec.prediction_ids(list(whole), 100) == whole[:100]
    assert codec.prediction_ids("0123456789", 100) == codec.answer_ids("0123456789")
    assert codec.prediction_ids(None, 100) == codec.prediction_ids("", 100) == ()


def test_texts_are_indexed_before_the_request_is_queued(engine: Engine) -> None:
    threads = []
    for drafter in (PromptDrafter(), PredictionDrafter(), TemplateDrafter(TokenizerCodec(scripted_tokenizer()))):

        def begin(request: Request, begin: Any = drafter.begin) -> Any:
            threads.append(threading.current_thread().name)
            return begin(request)

        drafter.begin = begin  # type: ignore[method-assign]
        engine.add_drafter(drafter)
    engine.submit(PROMPT, SHORT, prediction="It was sent", templates=["Order {number} was sent."]).result()
    assert threads == [threading.current_thread().name] * 3


def test_a_stream_goes_on_while_another_request_is_prepared() -> None:
    """The other request's prediction is not encoded to its end before the stream has gone three steps further."""
    tokenizer: Any = WatchedTokenizer(scripted_tokenizer())
    answer = " ".join(f"word{number}" for number in range(400))
    with closing(scripted_model_engine(lambda prompt: answer, tokenizer=tokenizer, may_stray=True)) as running:
        stream, further = iter(running.submit(PROMPT, SamplingParams(max_tokens=4000))), threading.Event()
        next(stream)

        def read_three_more(text: str) -> None:
            if len(text) > 100_000 and not further.is_set():
                for _ in range(3):
                    next(stream)
                further.set()

        tokenizer.backend_tokenizer.before = read_three_more
        running.submit(PROMPT, SHORT, prediction="It was sent to the new address. " * 4000).result()
        assert further.is_set()
        assert WORKER not in tokenizer.backend_tokenizer.threads
        stream.close()
