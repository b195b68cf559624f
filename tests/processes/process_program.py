"""Processes that end, fork and are forked, each forked from one that has imported everything: imports take longest.

    python tests/processes/process_program.py [SCENARIO...]

Runs scenarios one after another, each in a process of its own that ends as any Python program does, and prints for each
a line of JSON: its name, its exit status (a process that hangs is ended by SIGALRM), what it said, and the seconds from
its last statement to its end. Run by `test_processes.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import precedent
from precedent.cache import NewCompletion, SentenceTransformerEmbedder, SpeculationCache
from precedent.cache.search import embedder, grouped_index
from precedent.config import SamplingParams
from precedent.engine import loading as engine_loading
from precedent.engine import open_caches
from precedent.engine import shared as shared_engines
from precedent.engine.engine import Engine
from precedent.engine.warm_up import compile_inner_loops
from precedent.langchain import ChatPrecedent, PrecedentLLM, PrecedentRecorder, engines
from precedent.planning.costs import CostCurve
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_model_engine, scripted_tokenizer
from precedent.testing.tiny_models import tiny_causal_lm

PATIENCE = int(os.environ.get("PATIENCE", "240"))
"""Seconds after which a process has hung; the longest scenario takes a few on a quiet machine."""

Say = Callable[[Any], None]
Scenario = Callable[[Say], None]
SCENARIOS: dict[str, Scenario] = {}
LAST = "last statement"
NEED_A_SERVER = {"a_server_is_asked_by_one_process"}
LONG = SamplingParams(max_tokens=4000)


def scenario(run: Scenario) -> Scenario:
    """Offer a function by its name."""
    SCENARIOS[run.__name__] = run
    return run


# What the scenarios are made of


def tiny(name: str, **_: Any) -> tuple[Any, Any]:
    """In the place of `load_target`: whatever the name, a tiny model of random weights."""
    tokenizer = scripted_tokenizer()
    return tiny_causal_lm(vocab_size=len(tokenizer), max_position_embeddings=4096), tokenizer


def chat(**fields: Any) -> ChatPrecedent:
    """A chat model that loads by name."""
    return ChatPrecedent(model="tiny", max_tokens=4, **fields)


def endless(*_: Any, **__: Any) -> Any:
    """Work that never comes to its end by itself."""
    while True:
        time.sleep(0.001)


def folder() -> str:
    return tempfile.mkdtemp(prefix="precedent-processes-")


def opened(path: str | None = None, **settings: Any) -> SpeculationCache:
    return SpeculationCache.open(path, **{"embedder": HashEmbedder(), **settings})


def outcome(call: Callable[[], Any]) -> str:
    """What a call returns or raises, in a line."""
    try:
        return f"returned {call()!r}"[:200]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def in_fork(run: Callable[[Say], None]) -> dict[str, Any]:
    """Run in a process forked from this one, which ends as a program does; its status and what it said."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        as_program(run, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = [json.loads(line) for line in pipe]
    return {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "said": said}


def as_program(run: Callable[[Say], None], writing: int) -> None:
    """The rest of this process: `run`, then the interpreter's own end, with all that is registered for it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    pipe, this = os.fdopen(writing, "w"), os.getpid()

    def say(what: Any) -> None:
        pipe.write(json.dumps(what, default=str) + "\n")
        pipe.flush()

    try:
        run(say)
    finally:
        if os.getpid() == this:  # a child of this one comes by here on its way out
            say({LAST: time.time()})
    sys.exit(0)


@contextmanager
def held(*locks: Any) -> Iterator[None]:
    """Another thread holds these locks meanwhile."""
    ready, done = threading.Event(), threading.Event()

    def hold() -> None:
        taken = [lock.__enter__() for lock in locks]
        assert len(taken) == len(locks)
        ready.set()
        done.wait()
        for lock in locks:
            lock.__exit__(None, None, None)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    ready.wait()
    yield
    done.set()
    thread.join()


def compute_in_parallel() -> None:
    """Leave this thread with workers of OpenMP, as whoever computes with torch does."""
    torch.set_num_threads(2)
    for _ in range(3):
        torch.nn.functional.softmax(torch.randn(400, 4000), -1).sum()


# Programs that end


@scenario
def ends_at_once(say: Say) -> None:
    """What the interpreter itself takes to end with all that was imported: the others are compared with it."""


@scenario
def ends_with_a_loaded_engine(say: Say) -> None:
    say(chat().invoke("hi").content is not None)


@scenario
def ends_with_an_open_cache(say: Say) -> None:
    model = chat(speculation_cache=folder(), embedder=HashEmbedder())
    model.invoke("hi")
    say([thread.name for thread in threading.enumerate() if not thread.daemon])


@scenario
def ends_while_the_embedder_is_loaded(say: Say) -> None:
    embedder._load_model = endless
    engine = chat(speculation_cache=opened(embedder=SentenceTransformerEmbedder("endless"))).engine
    for _ in (running := engine.submit([1, 2, 3], SamplingParams(max_tokens=4), query="where is order 7?")):
        break
    say(running.done)
    globals()["kept"] = engine


@scenario
def ends_while_vectors_are_grouped(say: Say) -> None:
    grouped_index.GROUPED_FROM = 8
    cache, begun = opened(folder()), threading.Event()

    def regrouped(*_: Any) -> Any:
        begun.set()
        endless()

    for number in range(20):
        cache.insert(NewCompletion((number, 1), "tok", "m", query=f"order {number}"))
    from precedent.cache.search.partition_vectors import PartitionVectors

    PartitionVectors.regrouped = regrouped  # type: ignore[method-assign]
    cache.recall("order 3", tenant="default", tokenizer="tok")
    say(begun.wait(PATIENCE))


@scenario
def ends_with_an_abandoned_stream(say: Say) -> None:
    kept = chat().stream("hi", max_tokens=4000)
    say(next(kept) is not None)
    globals()["kept"] = kept


@scenario
def ends_with_an_abandoned_async_stream(say: Say) -> None:
    async def main() -> None:
        say(await anext(chat().astream("hi", max_tokens=4000)) is not None)

    asyncio.run(main())


@scenario
def ends_by_an_exception(say: Say) -> None:
    next(chat(speculation_cache=folder(), embedder=HashEmbedder()).stream("hi", max_tokens=4000))
    raise ValueError("in main")


@scenario
def ends_by_sys_exit_in_a_task(say: Say) -> None:
    async def main() -> None:
        model = chat()
        asking = asyncio.create_task(model.ainvoke("hi", max_tokens=4000))
        while not model._loaded_engine():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        say(asking.done())
        sys.exit(3)

    asyncio.run(main())


@scenario
def ends_by_sys_exit_while_a_task_loads(say: Say) -> None:
    begun = threading.Event()

    def loading(*_: Any, **__: Any) -> Any:
        begun.set()
        endless()

    engine_loading.load_target = loading

    async def main() -> None:
        asking = asyncio.create_task(chat().ainvoke("hi"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        say(asking.done())
        sys.exit(3)

    asyncio.run(main())


@scenario
def ends_while_a_daemon_thread_asks(say: Say) -> None:
    model, begun = chat(), threading.Event()

    def ask() -> None:
        for _ in model.stream("hi", max_tokens=4000):
            begun.set()

    threading.Thread(target=ask, daemon=True).start()
    say(begun.wait(PATIENCE))


@scenario
def a_thread_that_counts_goes_on_after_the_main_one(say: Say) -> None:
    cache = opened()
    model = chat(speculation_cache=cache)
    model.invoke("hi")

    def ask() -> None:
        threading.main_thread().join()
        say([bool(model.invoke("where is order 7?", max_tokens=4).usage_metadata) for _ in range(2)])
        say(cache.stats().records)

    threading.Thread(target=ask).start()


@scenario
def ends_after_generate(say: Say) -> None:
    model, tokenizer = tiny("tiny")
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    settings: Any = {"custom_generate": precedent.generate, "speculation_cache": opened(), "max_new_tokens": 4}
    out = model.generate(ids, **settings, speculation_tokenizer=tokenizer, pad_token_id=0)
    say(out.shape[1])


# Processes that are forked


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

    locks = (engine._loading, engine._worker._gate, engine._worker._scheduler.recorder._lock, begun._changed)
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
    new = NewCompletion((1, 2, 3), "tok", "m", query="order 7")
    for cache in (on_disk, in_memory):
        cache.insert(new)
        cache.recall("order 7", tenant="default", tokenizer="tok")

    def child(say: Say) -> None:
        for cache in (on_disk, in_memory):
            calls: dict[str, Callable[[], Any]] = {
                "warm_up": cache.warm_up,
                "recall": lambda cache=cache: cache.recall("order 8", tenant="default", tokenizer="tok"),
                "insert": lambda cache=cache: cache.insert(new),
                "since": lambda cache=cache: cache.since("default", "tok"),
                "partition": lambda cache=cache: cache.partition("default", "tok"),
                "epoch": cache.epoch,
                "gone_since": lambda cache=cache: cache.gone_since(0),
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
    locks = (on_disk._vectors_lock, on_disk._index._lock, database._write_lock, database._read_lock)
    with held(*locks, in_memory._vectors_lock, in_memory._index._lock):
        say(in_fork(child))
    say([cache.stats().records for cache in (on_disk, in_memory)])


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

    of_shared = (shared_engines._LOADING, shared_engines._NOTING, open_caches._OPENING)
    with held(engines._HOLDING, engines._NOTING, *of_shared):
        say(in_fork(child))
    say(other.invoke("hi").content == expected)


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


def _generated(model: Any) -> Any:
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    return model.generate(ids, custom_generate=precedent.generate, max_new_tokens=4, pad_token_id=0).tolist()


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
        cache.insert(NewCompletion((1, 2, len(child.__name__)), "tok", "m", query=child.__name__))
    stream.close()
    model.invoke("third")
    say(cache.stats().records)
    say(cache._store.verify().sound)
    engine.close()
    cache.close()
    with opened(path) as again:
        say(again.stats().records)


@scenario
def a_file_that_is_open_is_not_opened_in_a_fork(say: Say) -> None:
    path, other = folder(), folder()
    cache = opened(path)
    cache.insert(NewCompletion((1,), "tok", "m"))
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
    cache.insert(NewCompletion((1,), "tok", "m"))
    connections = cache._store._server  # type: ignore[attr-defined]

    def child(say: Say) -> None:
        say([outcome(cache.stats), outcome(lambda: connections.of_every_tenant(lambda one: one)), outcome(cache.close)])
        with opened(url) as own:
            say(own.insert(NewCompletion((2,), "tok", "m")) > 0)

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
            say(cache.insert(NewCompletion((1, 2), "tok", "m", query="q")))

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


def begin() -> None:
    """What every process begins with."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    engine_loading.load_target = tiny
    CostCurve.measure = lambda *_: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    compile_inner_loops()


def main() -> None:
    """Run the scenarios that were named, or all."""
    begin()
    for name in sys.argv[1:] or SCENARIOS.keys() - NEED_A_SERVER:
        found = in_fork(SCENARIOS[name])
        last = next((what[LAST] for what in found["said"] if isinstance(what, dict) and LAST in what), None)
        said = [what for what in found["said"] if what != {LAST: last}]
        seconds = None if last is None else round(time.time() - last, 2)
        print(json.dumps({"name": name, **found, "said": said, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
