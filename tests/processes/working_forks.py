"""Forked and spawned processes that work, beside parents that stay whole."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scenarios import Say, begin, chat, compute_in_parallel, folder, held, in_fork, opened, outcome, scenario, tiny

import precedent
from precedent import PrecedentRecorder
from precedent.cache import Completion, SentenceTransformerEmbedder, embedder
from precedent.config import SamplingParams
from precedent.engine import shared as shared_engines
from precedent.langchain import ChatPrecedent, engines
from precedent_testing.scripted_model import scripted_model_engine


@scenario
def a_model_that_was_not_loaded_works_in_a_fork(say: Say) -> None:
    """Beside an engine that rests, and with every lock of a registry held by another thread of the parent's."""
    compute_in_parallel()
    other, unused = chat(), ChatPrecedent(model="not yet", max_tokens=4, speculation_cache=folder())
    other.invoke("hi")
    compute_in_parallel()
    expected = chat(seed=1).invoke("hi").content

    def child(say: Say) -> None:
        compute_in_parallel()
        say(unused.invoke("hi").content == expected)
        say(asyncio.run(chat(speculation_cache=folder()).ainvoke("hi")).content == expected)
        say(outcome(lambda: unused.invoke("hi", model="nobody")))

    of_shared = (shared_engines._LOADING, shared_engines._NOTING, shared_engines._OPENING)
    with held(engines._HOLDING, engines._NOTING, *of_shared):
        say(in_fork(child))
    say(other.invoke("hi").content == expected)


@scenario
def a_fork_beside_a_busy_engine_works(say: Say) -> None:
    engine, stop, answered = chat().engine, threading.Event(), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            engine.submit([1, 2, 3] * 20, SamplingParams(max_tokens=64)).result()
            answered.set()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    answered.wait()
    for _ in range(5):
        say(in_fork(lambda say: say(ChatPrecedent(model="another", max_tokens=4).invoke("hi").content is not None)))
    stop.set()
    busy.join()
    say(len(engine.submit([1, 2, 3], SamplingParams(max_tokens=4)).result().token_ids))


@scenario
def children_that_end_leave_their_parent_whole(say: Say) -> None:
    """Whatever they do with what they inherited: close it, drop it, or leave it to the interpreter's end."""
    path = folder()
    cache = opened(path)
    engine = scripted_model_engine(lambda prompt: "hello", cache=cache)
    model: Any = ChatPrecedent.from_engine(engine)
    model.invoke("first")
    database = cache._store._database  # type: ignore[attr-defined]
    stream = model.stream("second", max_tokens=4000)
    next(stream)

    def closing(say: Say) -> None:
        engine.close()
        cache.close()
        database.close()

    def dropping(say: Say) -> None:
        nonlocal cache, engine, model, database, stream
        cache = engine = model = database = stream = None
        gc.collect()

    def ending(say: Say) -> None:
        raise ValueError("on purpose")

    for child in (closing, dropping, ending, lambda say: None):
        say(in_fork(child)["status"])
        cache.insert(Completion((1, 2, len(child.__name__)), "tok", "m", query=child.__name__))
    stream.close()
    model.invoke("third")
    say(cache.stats().records)
    say(cache._store.verify().sound)
    engine.close()
    cache.close()
    with opened(path) as again:
        say(again.stats().records)


@scenario
def a_recorder_goes_on_in_a_fork(say: Say) -> None:
    log = Path(folder()) / "log.jsonl"
    recorder = PrecedentRecorder(log)
    with held(recorder._lock):
        say(in_fork(lambda say: say(chat().invoke("hi", {"callbacks": [recorder]}).content is not None)))
    chat().invoke("ho", {"callbacks": [recorder]})
    say(len(log.read_text().splitlines()))


@scenario
def an_embedder_goes_on_in_a_fork(say: Say) -> None:
    class Model:
        max_seq_length = 1

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"weight": torch.ones(2)}

        def encode(self, texts: list[str], **_: Any) -> Any:
            return np.ones((len(texts), 2), dtype=np.float32)

    embedder._load_model = lambda *_: Model()
    shared = SentenceTransformerEmbedder("fake")
    shared.embed(["a"])

    def child(say: Say) -> None:
        with opened(embedder=shared) as cache:
            say(cache.insert(Completion((1, 2), "tok", "m", query="q")))

    with held(shared._lock):
        say(in_fork(child))


@scenario
def generate_goes_on_in_a_fork(say: Say) -> None:
    model, tokenizer = tiny("tiny")
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])

    def generated() -> Any:
        settings: Any = {"speculation_cache": opened(), "speculation_tokenizer": tokenizer, "max_new_tokens": 4}
        return model.generate(ids, custom_generate=precedent.generate, pad_token_id=0, **settings).tolist()

    expected = generated()
    say(in_fork(lambda say: say(generated() == expected)))


@scenario
def multiprocessing_forks_as_well(say: Say) -> None:
    context = multiprocessing.get_context("fork")
    used, unused = chat(), ChatPrecedent(model="not yet", max_tokens=4)
    used.invoke("hi")
    results: Any = context.SimpleQueue()

    def work() -> None:
        results.put([outcome(lambda: used.invoke("hi")), unused.invoke("hi").content is not None])

    process = context.Process(target=work)
    process.start()
    process.join()
    say([process.exitcode, results.get()])


def _asked(model: Any, results: Any) -> None:
    """In a spawned process: the model came without weights, and loads its own."""
    begin()
    results.put([dict(model.engines._engines), model.temperature, model.invoke("hi").content])


@scenario
def a_spawned_process_loads_its_own(say: Say) -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    model = chat(temperature=0.5, seed=3)
    said = model.invoke("hi").content
    process = context.Process(target=_asked, args=(model, results))
    process.start()
    process.join()
    found = results.get()
    say([process.exitcode, found[:2], found[2] == said])
