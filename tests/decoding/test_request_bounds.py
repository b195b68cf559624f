"""What a request brings is bounded, and prepared on its caller's thread: other requests' steps wait for none of it."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from precedent.config import EngineLimits, SamplingParams
from precedent.drafters import Drafter, Request
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

CONTEXT = 16_384
"""Tokens of the scripted model's context."""


class Watched:
    """A tokenizer's backend that notes who encodes how much, and may be told to wait."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.encoded = list[tuple[str, int]]()
        self.before: Callable[[str], object] = lambda text: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **how: Any) -> Any:
        self._note(text)
        return self._backend.encode(text, **how)

    def encode_batch_fast(self, texts: list[str], **how: Any) -> Any:
        for text in texts:
            self._note(text)
        return self._backend.encode_batch_fast(texts, **how)

    def _note(self, text: str) -> None:
        self.encoded.append((threading.current_thread().name, len(text)))
        self.before(text)


class WatchedTokenizer:
    """The scripted model's tokenizer with a watched backend."""

    def __init__(self) -> None:
        self._tokenizer = scripted_tokenizer()
        self.backend_tokenizer = Watched(self._tokenizer.backend_tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)


class CountedCalls:
    """Counts the functions that an engine's thread calls, Python's and C's; put around the engine's making."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> CountedCalls:
        threading.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]  # its documented way off

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if threading.current_thread().name != WORKER:
            sys.setprofile(None)
        elif event in ("call", "c_call"):
            self.number += 1


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = scripted_model_engine(lambda prompt: "It was sent on Monday, and it arrives tomorrow.")
    yield running
    running.close()


BOUNDS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ContextOverflowError, r"prediction has 10,000,000 characters, at most 131,072", {"prediction": TOO_LONG}),
    (ConfigError, r"templates holds 250,000 templates, at most 1,024", {"templates": ["Order {a}."] * 250_000}),
    (ConfigError, r"templates holds 10,000,000 characters, at most 262,144", {"templates": [TOO_LONG]}),
    (ConfigError, r"templates holds 20,000 holes, at most 512", {"templates": ["{a} x " * 10_000, "{a}: " * 10_000]}),
    (ConfigError, r"workflow_step has 10,000,000 characters, at most 1,000", {"workflow_step": TOO_LONG}),
    (ConfigError, r"tools has 10,000,000 characters, at most 1,000", {"tools": TOO_LONG}),
]


@pytest.mark.parametrize(("kind", "message", "given"), BOUNDS)
def test_what_is_too_long_is_refused_with_its_size_and_the_bound(
    engine: Engine, kind: type[Exception], message: str, given: dict[str, Any]
) -> None:
    assert issubclass(kind, ValueError)
    with pytest.raises(kind, match=message):
        engine.submit(PROMPT, SHORT, **given)


@pytest.mark.parametrize("value", [3, b"ok"], ids=repr)
def test_an_argument_of_another_kind_is_refused_by_name(engine: Engine, value: Any) -> None:
    """Every argument: with what was given, before anything is computed."""
    for name in inspect.signature(Engine.submit).parameters.keys() - {"self", "templates"}:
        given: dict[str, Any] = {"prompt_ids": PROMPT, "sampling": SHORT, name: value}
        with pytest.raises((ConfigError, PromptError), match=rf"^{name}={value!r} "):
            engine.submit(**given)
    with pytest.raises(ConfigError, match=r"^template"):
        engine.submit(PROMPT, SHORT, templates=value)


@pytest.mark.parametrize("ids", [[1.5], ["ok"], {1: 1}, [None]], ids=repr)
def test_token_ids_are_whole_numbers(engine: Engine, ids: Any) -> None:
    with pytest.raises(PromptError, match=rf"^prompt_ids={re.escape(repr(ids))} must be a list of token ids"):
        engine.submit(ids, SHORT)
    with pytest.raises(ConfigError, match=rf"^prediction={re.escape(repr(ids))} must be a text or a list of token ids"):
        engine.submit(PROMPT, SHORT, prediction=ids)


@pytest.mark.parametrize("ids", [np.array([111, 107]), torch.tensor([111, 107]), (111, 107)], ids=repr)
def test_token_ids_may_be_in_an_array_or_a_tensor(engine: Engine, ids: Any) -> None:
    assert engine.submit(ids, SHORT, prediction=ids).result().prompt_tokens == 2


def test_a_prompt_beyond_the_context_is_refused_before_it_is_read(engine: Engine) -> None:
    class Long(list[int]):
        def __len__(self) -> int:
            return 10_000_000

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("nobody may read it")

    with pytest.raises(ContextOverflowError, match=f"10000000 tokens, the model's context holds {CONTEXT}"):
        engine.submit(Long(), SHORT)
    with pytest.raises(PromptError, match="empty"):
        engine.submit([], SHORT)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (r"stop has 100,000 texts: at most 64", {"stop": [f"stop {number}" for number in range(100_000)]}),
        (r"stop has a text of 10,000,000 characters: at most 1,000", {"stop": TOO_LONG}),
        (r"stop_token_ids has 100,000 tokens: at most 1,024", {"stop_token_ids": list(range(100_000))}),
    ],
)
def test_what_every_step_looks_at_is_bounded(message: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**given)


def test_a_query_is_cut(engine: Engine) -> None:
    """It only finds what may be proposed, so that a long one fails nothing."""
    assert engine.submit(PROMPT, SHORT, query=TOO_LONG).result().finish_reason == "length"


def test_a_prediction_of_more_tokens_than_the_context_holds_is_cut() -> None:
    codec = TokenizerCodec(scripted_tokenizer())
    whole = codec.answer_ids("0123456789" * 20)
    assert codec.prediction_ids("0123456789" * 20, 100) == whole[:100]
    assert codec.prediction_ids(list(whole), 100) == whole[:100]
    assert codec.prediction_ids("0123456789", 100) == codec.answer_ids("0123456789")
    assert codec.prediction_ids(None, 100) == codec.prediction_ids("", 100) == ()


MUCH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prediction": ({"prediction": "It was "}, {"prediction": "It was sent to the new address. " * 4000}),
    "templates": (
        {"templates": ["Order {number} was sent."]},
        {"templates": [f"Order {{number}} was sent to place {place}, {{name}}." for place in range(256)]},
    ),
    "query": ({"query": "order"}, {"query": TOO_LONG}),
}
"""Little and much of what a request may bring."""


@pytest.mark.parametrize("name", MUCH)
def test_the_engines_thread_does_no_more_for_a_request_that_brings_much(name: str) -> None:
    little, much = MUCH[name]
    tokenizer: Any = WatchedTokenizer()
    with CountedCalls() as calls:
        running = scripted_model_engine(lambda prompt: "It was sent.", tokenizer=tokenizer)
    numbers = []
    for given in (little, little, much, little, much):  # the first requests compile what is compiled once
        before = calls.number
        running.submit(PROMPT, SamplingParams(max_tokens=1), **given).result()
        numbers.append(calls.number - before)
    running.close()
    assert numbers[3] > 100
    assert numbers[4] < numbers[3] + 1000, numbers
    assert WORKER not in Counter(thread for thread, _ in tokenizer.backend_tokenizer.encoded)


class Recorded:
    """A drafter that notes on which threads its requests began."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.name, self.threads = drafter, drafter.name, list[str]()
        self.begins_early = getattr(drafter, "begins_early", False)

    def begin(self, request: Request) -> Any:
        self.threads.append(threading.current_thread().name)
        return self._drafter.begin(request)

    def close(self) -> None:
        self._drafter.close()


@pytest.mark.parametrize(
    "drafter",
    [PromptDrafter(), PredictionDrafter(), TemplateDrafter(TokenizerCodec(scripted_tokenizer()))],
    ids=lambda drafter: drafter.name,
)
def test_texts_are_indexed_before_the_request_is_queued(engine: Engine, drafter: Drafter) -> None:
    recorded = Recorded(drafter)
    engine.add_drafter(recorded)
    engine.submit(PROMPT, SHORT, prediction="It was sent", templates=["Order {number} was sent."]).result()
    assert recorded.threads == [threading.current_thread().name]


def test_a_stream_goes_on_while_another_request_is_prepared() -> None:
    """The other request's prediction is not encoded to its end before the stream has gone three steps further."""
    tokenizer: Any = WatchedTokenizer()
    answer = " ".join(f"word{number}" for number in range(400))
    running = scripted_model_engine(lambda prompt: answer, tokenizer=tokenizer, may_stray=True)
    streaming = running.submit(PROMPT, SamplingParams(max_tokens=4000))
    stream, further = iter(streaming), threading.Event()
    next(stream)

    def read_three_more(text: str) -> None:
        if len(text) > 100_000 and not further.is_set():
            for _ in range(3):
                next(stream)
            further.set()

    tokenizer.backend_tokenizer.before = read_three_more
    running.submit(PROMPT, SHORT, prediction="It was sent to the new address. " * 4000).result()
    assert further.is_set()
    stream.close()
    running.close()


def test_requests_that_wait_are_prepared_already() -> None:
    """A request that is admitted later finds its sessions; one that is cancelled while it waits leaves nothing."""
    running = scripted_model_engine(lambda prompt: "It was sent.", limits=EngineLimits(max_running=1))
    all_of_them = [running.submit(PROMPT, SHORT, prediction="It was sent.") for _ in range(4)]
    all_of_them[2].cancel()
    texts = [one.result().text for number, one in enumerate(all_of_them) if number != 2]
    assert len(set(texts)) == 1
    running.close()
