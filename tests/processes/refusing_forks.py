"""Forked processes that refuse what was made before the fork, at once and by name."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from scenarios import LONG, Say, chat, folder, held, in_fork, opened, outcome, scenario, tiny

import precedent
from precedent.cache import Completion, SentenceTransformerEmbedder, SpeculationCache
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.langchain import PrecedentLLM
from precedent.planning.costs import CostCurve
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine


@scenario
def an_engine_refuses_in_a_fork(say: Say) -> None:
    engine = scripted_model_engine(lambda prompt: "hello", cache=opened())
    running = engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    running.result()
    names = [name for name in dir(Engine) if not name.startswith("_")]
    begun = engine.submit([1, 2, 3], LONG)

    def child(say: Say) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "submit": lambda: engine.submit([1, 2], SamplingParams()),
            "metrics": engine.metrics,
            "watch_steps": lambda: engine.watch_steps(None),
            "health": engine.health,
            "longest_wait": engine.longest_wait,
            "grammars": lambda: engine.grammars,
            "add_drafter": lambda: engine.add_drafter(object()),  # type: ignore[arg-type]
            "close": engine.close,
            "result": begun.result,
            "iterate": lambda: list(begun),
            "iterate async": lambda: asyncio.run(_drained(begun)),
            "cancel": begun.cancel,
        }
        say({name: outcome(call) for name, call in calls.items()})
        say(sorted(set(names) - calls.keys()))

    locks = (engine._loading, engine._worker._gate, engine._worker.scheduler.recorder._lock, begun._changed)
    with held(*locks):
        say(in_fork(child))
    begun.cancel()
    say(engine.submit([1, 2, 3], SamplingParams(max_tokens=4)).result().text)


async def _drained(generation: Any) -> None:
    async for _ in generation:
        pass


@scenario
def a_chat_model_refuses_in_a_fork(say: Say) -> None:
    model = chat(speculation_cache=opened(folder()))
    text = PrecedentLLM(model="tiny", max_tokens=4, speculation_cache=model.speculation_cache)
    model.invoke("hi")
    text.invoke("hi")
    begun = model.stream("hi", max_tokens=4000)
    next(begun)
    schema = {"title": "N", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    async def drained() -> None:
        async for _ in model.astream("hi"):
            pass

    def child(say: Say) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "invoke": lambda: model.invoke("hi"),
            "stream": lambda: list(model.stream("hi")),
            "batch": lambda: model.batch(["hi", "ho"]),
            "ainvoke": lambda: asyncio.run(model.ainvoke("hi")),
            "astream": lambda: asyncio.run(drained()),
            "structured": lambda: model.with_structured_output(schema).invoke("hi"),
            "structured async": lambda: asyncio.run(model.with_structured_output(schema).ainvoke("hi")),
            "warm": lambda: model.warm([[("user", "a"), ("assistant", "b")]]),
            "text": lambda: text.invoke("hi"),
            "a copy": lambda: model.model_copy().invoke("hi"),
            "the stream that was begun": lambda: next(begun),
        }
        say({name: outcome(call) for name, call in calls.items()})
        say(outcome(begun.close))

    say(in_fork(child))
    begun.close()
    say(model.invoke("hi").content is not None)


@scenario
def a_cache_refuses_in_a_fork(say: Say) -> None:
    on_disk, in_memory = opened(folder()), opened()
    new = Completion((1, 2, 3), "tok", "m", query="order 7")
    for cache in (on_disk, in_memory):
        cache.insert(new)
        cache.recall("order 7", tenant="default", tokenizer="tok")

    def child(say: Say) -> None:
        for cache in (on_disk, in_memory):
            calls: dict[str, Callable[[], Any]] = {
                "warm_up": cache.warm_up,
                "erase_gone": cache.erase_gone,
                "recall": lambda cache=cache: cache.recall("order 8", tenant="default", tokenizer="tok"),
                "insert": lambda cache=cache: cache.insert(new),
                "since": lambda cache=cache: cache.since("default", "tok"),
                "tokenizers": cache.tokenizers,
                "prefixes": lambda cache=cache: cache.prefixes,
                "lets_pass": lambda cache=cache: cache.lets_pass(new),
                "epoch": cache.epoch,
                "forgets": cache.forgets,
                "ids": lambda cache=cache: cache.ids("default", "tok"),
                "credit": lambda cache=cache: cache.credit({1: (1, 0)}),
                "stats": cache.stats,
                "list": cache.list,
                "search": lambda cache=cache: cache.search("order"),
                "among": lambda cache=cache: cache.among([1], tenant="default"),
                "forget": lambda cache=cache: cache.forget(tenant="default"),
                "with": lambda cache=cache: cache.__enter__().stats(),
                "a new model's": lambda cache=cache: chat(speculation_cache=cache).invoke("hi"),
                "close": cache.close,
            }
            say({name: outcome(call) for name, call in calls.items()})
        left = {name for name in dir(SpeculationCache) if not name.startswith("_")} - calls.keys()
        say(sorted(left))

    database = on_disk._store._database  # type: ignore[attr-defined]
    locks = (on_disk._index._lock, database._write_lock, database._read_lock)
    with held(*locks, in_memory._index._lock):
        say(in_fork(child))
    say([cache.stats().records for cache in (on_disk, in_memory)])


@scenario
def a_fork_amid_computing_refuses_to_compute(say: Say) -> None:
    engine, answering = scripted_model_engine(lambda prompt: "hello"), threading.Event()
    score = engine.target.score

    def scored(*arguments: Any) -> Any:
        answering.set()
        goes_on.wait()
        return score(*arguments)

    goes_on, engine.target.score = threading.Event(), scored  # type: ignore[method-assign]
    running = engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    answering.wait()

    def child(say: Say) -> None:
        say(
            {
                "chat": outcome(lambda: chat().invoke("hi")),
                "cache": outcome(opened),
                "embedder": outcome(lambda: SentenceTransformerEmbedder().embed(["a"])),
                "generate": outcome(lambda: _generated(tiny("tiny")[0])),
                "engine": outcome(lambda: Engine(*tiny("tiny"), name="tiny", cost=CostCurve())),
            }
        )

    say(in_fork(child))
    goes_on.set()
    say(len(running.result().token_ids))


def _generated(model: Any) -> Any:
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    return model.generate(ids, custom_generate=precedent.generate, max_new_tokens=4, pad_token_id=0).tolist()


@scenario
def a_file_that_is_open_is_not_opened_in_a_fork(say: Say) -> None:
    path, other = folder(), folder()
    cache = opened(path)
    cache.insert(Completion((1,), "tok", "m"))
    opened(other).close()

    def records(place: str) -> int:
        with opened(place) as again:
            return again.stats().records

    def grandchild(say: Say) -> None:
        say([outcome(lambda: records(path)), outcome(lambda: records(other))])

    def child(say: Say) -> None:
        grandchild(say)
        say(in_fork(grandchild))
        say(outcome(lambda: chat(speculation_cache=path, embedder=HashEmbedder()).invoke("hi")))

    say(in_fork(child))
    cache.close()
    say(in_fork(grandchild))


@scenario
def a_server_is_asked_by_one_process(say: Say) -> None:
    """What a child inherits of a connection to a database server is neither used nor closed there."""
    url = os.environ["SERVER"]
    cache = opened(url)
    cache.insert(Completion((1,), "tok", "m"))
    connections = cache._store._server  # type: ignore[attr-defined]

    def child(say: Say) -> None:
        say([outcome(cache.stats), outcome(lambda: connections.of_every_tenant(lambda one: one)), outcome(cache.close)])
        with opened(url) as own:
            say(own.insert(Completion((2,), "tok", "m")) > 0)

    def dropping(say: Say) -> None:
        nonlocal cache, connections
        cache = connections = None
        gc.collect()

    say(in_fork(child))
    say(in_fork(dropping)["status"])
    with held(connections._preparing):
        say(in_fork(lambda say: say(outcome(cache.list)[:10]))["status"])
    say(cache.stats().records)
    cache.close()
