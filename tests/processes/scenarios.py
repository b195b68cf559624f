"""Processes that end, fork and are forked, each forked from one that has imported everything: imports take longest.

    python tests/processes/scenarios.py SCENARIO…

Runs scenarios one after another, each in a process of its own that ends as any Python program does, and prints for each
its name and exit status as JSON (a process that hangs is ended by SIGALRM). Scenarios assert; one that fails ends with
a traceback and status 1. Run by `test_processes.py`.
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
from typing import Any

import numpy as np
import torch
from numba.core.registry import CPUDispatcher

import precedent
from precedent.cache import Completion, SentenceTransformerEmbedder, SpeculationCache, embedder
from precedent.config import SamplingParams
from precedent.engine import loading as engine_loading
from precedent.engine import shared as shared_engines
from precedent.engine.engine import Engine
from precedent.engine.warm_up import compile_inner_loops
from precedent.langchain import ChatPrecedent, PrecedentLLM, engines
from precedent.planning.costs import CostCurve, StepCosts
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine, scripted_tokenizer
from precedent_testing.tiny_models import tiny_causal_lm

PATIENCE = int(os.environ.get("PATIENCE", "240"))
"""Seconds after which a process has hung; the longest scenario takes a few on a quiet machine."""

LONG, SHORT = SamplingParams(max_tokens=4000), SamplingParams(max_tokens=4)

FORKED = "was made before the process was forked: load the model in the process"
ENGINE = f"UnsupportedError: this ScriptedModelEngine {FORKED}"
CHAT_ENGINE = f"UnsupportedRequestError: this Engine {FORKED}"
GENERATION = "UnsupportedError: this Generation was made before the process was forked: ask again"
CACHE = (
    "CacheError: this SpeculationCache was made before the process was forked: give its path or URL, and open it only"
)
AMID = "this process was forked while another thread was loading or running a model"
OPEN = "was open when this process was forked, and SQLite cannot open it here too"


# What scenarios are made of


def tiny(name: str, **_: Any) -> tuple[Any, Any]:
    """In the place of `load_target`: whatever the name, a tiny model of random weights."""
    tokenizer = scripted_tokenizer()
    return tiny_causal_lm(vocab_size=len(tokenizer), max_position_embeddings=4096), tokenizer


def chat(model: str = "tiny", **fields: Any) -> ChatPrecedent:
    """A chat model that loads by name."""
    return ChatPrecedent(model=model, max_tokens=4, **fields)


def scripted(**fields: Any) -> Engine:
    return scripted_model_engine(lambda prompt: "hello", **fields)


def endless(*_: Any, **__: Any) -> Any:
    """Work that never comes to its end by itself."""
    while True:
        time.sleep(0.001)


def folder() -> str:
    return tempfile.mkdtemp(prefix="precedent-processes-")


def opened(path: str | None = None, **settings: Any) -> SpeculationCache:
    return SpeculationCache.open(path, **{"embedder": HashEmbedder(), **settings})


def keep(what: Any) -> None:
    """The program itself holds it until its interpreter ends."""
    sys.modules["__main__"].kept = what  # type: ignore[attr-defined]


def outcome(call: Callable[[], Any]) -> str:
    """What a call returns or raises, in a line."""
    try:
        return f"returned {call()!r}"[:200]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def check_refusals(says: str, **calls: Callable[[], Any]) -> None:
    outcomes = {name: outcome(call) for name, call in calls.items()}
    assert {name: said for name, said in outcomes.items() if not said.startswith(says)} == {}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def in_fork(run: Callable[[], object]) -> int:
    """Run in a process forked from this one, which then ends as a program does; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        run()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


def generated(**settings: Any) -> Any:
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    model, tokenizer = tiny("tiny")
    settings = {"speculation_tokenizer": tokenizer, **settings} if settings else {}
    return model.generate(
        ids, custom_generate=precedent.generate, max_new_tokens=4, pad_token_id=0, **settings
    ).tolist()


async def drained(pieces: Any) -> None:
    async for _ in pieces:
        pass


# Programs that end, whatever is loaded, open or still running


def ends_while_the_embedder_is_loaded() -> None:
    embedder._load_model = endless
    engine = chat(speculation_cache=opened(embedder=SentenceTransformerEmbedder("endless"))).engine
    running = engine.submit([1, 2, 3], SHORT, query="where is order 7?")
    next(iter(running))
    assert not running.done
    keep(engine)


def ends_with_an_abandoned_stream() -> None:
    kept = chat().stream("hi", max_tokens=4000)
    assert next(kept) is not None
    keep(kept)


def ends_by_an_exception() -> None:
    next(chat(speculation_cache=folder(), embedder=HashEmbedder()).stream("hi", max_tokens=4000))
    raise ValueError("in main")


def ends_by_sys_exit_while_a_task_loads() -> None:
    begun = threading.Event()

    def loading(*_: Any, **__: Any) -> Any:
        begun.set()
        endless()

    engine_loading.load_target = loading

    async def main() -> None:
        asking = asyncio.create_task(chat().ainvoke("hi"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert not asking.done()
        sys.exit(3)

    asyncio.run(main())


# Forked processes that refuse what was made before the fork, at once and by name


def an_engine_refuses_in_a_fork() -> None:
    """Also where another thread of the parent's held every lock of it."""
    engine = scripted(cache=opened())
    engine.submit([1, 2, 3], SHORT).result()
    begun = engine.submit([1, 2, 3], LONG)

    def child() -> None:
        of_engine: dict[str, Callable[[], Any]] = {
            "submit": lambda: engine.submit([1, 2], SamplingParams()),
            "metrics": engine.metrics,
            "watch_steps": lambda: engine.watch_steps(None),
            "health": engine.health,
            "longest_wait": engine.longest_wait,
            "grammars": lambda: engine.grammars,
            "add_drafter": lambda: engine.add_drafter(object()),  # type: ignore[arg-type]
        }
        check_refusals(ENGINE, **of_engine)
        asynchronous = lambda: asyncio.run(drained(begun))  # noqa: E731
        check_refusals(GENERATION, result=begun.result, iterate=lambda: list(begun), iterate_async=asynchronous)
        assert engine.close() is begun.cancel() is None
        assert public(Engine) - of_engine.keys() == {
            *("check_process", "close", "closed", "context_length", "drafters", "instead", "is_here"),
            *("load", "recall", "refused_as", "sampling_defaults"),
        }

    locks = (engine._loading, engine._worker._gate, engine._worker.scheduler.recorder._lock, begun._changed)
    with held(*locks):
        assert in_fork(child) == 0
    begun.cancel()
    assert engine.submit([1, 2, 3], SHORT).result().text == "hello", "the parent's goes on"


def a_chat_model_refuses_in_a_fork() -> None:
    model = chat(speculation_cache=opened(folder()))
    text = PrecedentLLM(model="tiny", max_tokens=4, speculation_cache=model.speculation_cache)
    model.invoke("hi")
    text.invoke("hi")
    begun = model.stream("hi", max_tokens=4000)
    next(begun)
    schema = {"title": "N", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    def child() -> None:
        check_refusals(
            CHAT_ENGINE,
            invoke=lambda: model.invoke("hi"),
            stream=lambda: list(model.stream("hi")),
            batch=lambda: model.batch(["hi", "ho"]),
            ainvoke=lambda: asyncio.run(model.ainvoke("hi")),
            astream=lambda: asyncio.run(drained(model.astream("hi"))),
            structured=lambda: model.with_structured_output(schema).invoke("hi"),
            structured_async=lambda: asyncio.run(model.with_structured_output(schema).ainvoke("hi")),
            text=lambda: text.invoke("hi"),
            a_copy=lambda: model.model_copy().invoke("hi"),
        )
        check_refusals(CACHE, warm=lambda: model.warm([[("user", "a"), ("assistant", "b")]]))
        check_refusals(GENERATION, the_stream_that_was_begun=lambda: next(begun))
        begun.close()

    assert in_fork(child) == 0
    begun.close()
    assert model.invoke("hi").content is not None


def a_cache_refuses_in_a_fork() -> None:
    on_disk, in_memory = opened(folder()), opened()
    new = Completion((1, 2, 3), "tok", "m", query="order 7")
    for cache in (on_disk, in_memory):
        cache.insert(new)
        cache.recall("order 7", tenant="default", tokenizer="tok")

    def refuses(cache: SpeculationCache) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "warm_up": cache.warm_up,
            "erase_gone": cache.erase_gone,
            "recall": lambda: cache.recall("order 8", tenant="default", tokenizer="tok"),
            "insert": lambda: cache.insert(new),
            "since": lambda: cache.since("default", "tok"),
            "tokenizers": cache.tokenizers,
            "prefixes": lambda: cache.prefixes,
            "lets_pass": lambda: cache.lets_pass(new),
            "epoch": cache.epoch,
            "forgets": cache.forgets,
            "ids": lambda: cache.ids("default", "tok"),
            "credit": lambda: cache.credit({1: (1, 0)}),
            "stats": cache.stats,
            "list": cache.list,
            "search": lambda: cache.search("order"),
            "among": lambda: cache.among([1], tenant="default"),
            "forget": lambda: cache.forget(tenant="default"),
        }
        entered, new_model = cache.__enter__, chat(speculation_cache=cache)
        check_refusals(CACHE, **calls, entered=lambda: entered().stats(), a_new_models=lambda: new_model.invoke("hi"))
        assert cache.close() is None
        others = {"check_process", "close", "embedder", "instead", "is_here", "on_gone", "open"}
        assert public(SpeculationCache) - calls.keys() == others | {"refused_as"}

    database = on_disk._store._database  # type: ignore[attr-defined]
    locks = (on_disk._index._lock, database._write_lock, database._read_lock, in_memory._index._lock)
    with held(*locks):
        assert in_fork(lambda: [refuses(cache) for cache in (on_disk, in_memory)]) == 0
    assert [cache.stats().records for cache in (on_disk, in_memory)] == [1, 1]


def a_fork_amid_computing_refuses_to_compute() -> None:
    """Rather than hang."""
    engine, answering, goes_on = scripted(), threading.Event(), threading.Event()
    score = engine.target.score

    def scored(*arguments: Any) -> Any:
        answering.set()
        goes_on.wait()
        return score(*arguments)

    engine.target.score = scored  # type: ignore[method-assign]
    running = engine.submit([1, 2, 3], SHORT)
    answering.wait()

    def child() -> None:
        check_refusals(f"UnsupportedRequestError: {AMID}", chat=lambda: chat().invoke("hi"))
        check_refusals(
            f"UnsupportedError: {AMID}",
            cache=opened,
            embedder=lambda: SentenceTransformerEmbedder().embed(["a"]),
            generate=generated,
            engine=lambda: Engine(*tiny("tiny"), name="tiny", cost=CostCurve()),
        )

    assert in_fork(child) == 0
    goes_on.set()
    assert len(running.result().token_ids) == 4


def a_file_that_is_open_is_not_opened_in_a_fork() -> None:
    path, other = folder(), folder()
    cache = opened(path)
    cache.insert(Completion((1,), "tok", "m"))
    opened(other).close()

    def records(place: str) -> int:
        with opened(place) as again:
            return again.stats().records

    def child() -> None:
        assert OPEN in outcome(lambda: records(path))
        assert records(other) == 0

    def of_model() -> None:
        assert OPEN in outcome(lambda: chat(speculation_cache=path, embedder=HashEmbedder()).invoke("hi"))
        assert in_fork(child) == 0, "a grandchild"

    assert in_fork(child) == in_fork(of_model) == 0
    cache.close()

    def later() -> None:
        assert records(path) == 1, "closed before the fork, it may be opened"

    assert in_fork(later) == 0


# Forked and spawned processes that work, beside parents that stay whole


def answers(model: Any) -> None:
    assert model.invoke("hi").content is not None


def a_model_that_was_not_loaded_works_in_a_fork() -> None:
    """Beside an engine that rests, and with every lock of a registry held by another thread of the parent's."""
    compute_in_parallel()
    other, unused = chat(), chat("not yet", speculation_cache=folder())
    other.invoke("hi")
    compute_in_parallel()
    expected = chat(seed=1).invoke("hi").content

    def child() -> None:
        compute_in_parallel()
        assert unused.invoke("hi").content == expected
        assert asyncio.run(chat(speculation_cache=folder()).ainvoke("hi")).content == expected
        unknown = outcome(lambda: unused.invoke("hi", model="nobody"))
        assert "(loaded: not yet)" in unknown, "the parent's engines are not among those of the child"

    of_shared = (shared_engines._LOADING, shared_engines._NOTING, shared_engines._OPENING)
    with held(engines._HOLDING, engines._NOTING, *of_shared):
        assert in_fork(child) == 0
    assert other.invoke("hi").content == expected


def a_fork_beside_a_busy_engine_works() -> None:
    """It waits for a step of the engine."""
    engine, stop, answered = chat().engine, threading.Event(), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            engine.submit([1, 2, 3] * 20, SamplingParams(max_tokens=64)).result()
            answered.set()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    answered.wait()
    assert [in_fork(lambda: answers(chat("another"))) for _ in range(5)] == [0] * 5
    stop.set()
    busy.join()
    assert engine.submit([1, 2, 3], SHORT).result().token_ids


def children_that_end_leave_their_parent_whole() -> None:
    """Whatever they do with what they inherit: close it, drop it, or leave it to the interpreter's end."""
    path = folder()
    cache = opened(path)
    engine = scripted(cache=cache)
    model: Any = ChatPrecedent.from_engine(engine)
    model.invoke("first")
    database = cache._store._database  # type: ignore[attr-defined]
    stream = model.stream("second", max_tokens=4000)
    next(stream)

    def closing() -> None:
        engine.close()
        cache.close()
        database.close()

    def dropping() -> None:
        nonlocal cache, engine, model, database, stream
        cache = engine = model = database = stream = None
        gc.collect()

    def ending() -> None:
        raise ValueError("on purpose")

    for number, (child, status) in enumerate([(closing, 0), (dropping, 0), (ending, 1), (lambda: None, 0)]):
        assert in_fork(child) == status
        cache.insert(Completion((1, 2, number), "tok", "m", query=f"{number}"))
    stream.close()
    model.invoke("third")
    assert cache.stats().records == 7
    assert cache._store.verify().sound
    engine.close()
    cache.close()
    with opened(path) as again:
        assert again.stats().records == 7


def an_embedder_goes_on_in_a_fork() -> None:
    class Model:
        max_seq_length = 1

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"weight": torch.ones(2)}

        def encode(self, texts: list[str], **_: Any) -> Any:
            return np.ones((len(texts), 2), dtype=np.float32)

    embedder._load_model = lambda *_: Model()
    shared = SentenceTransformerEmbedder("fake")
    shared.embed(["a"])

    def child() -> None:
        with opened(embedder=shared) as cache:
            assert cache.insert(Completion((1, 2), "tok", "m", query="q")) == 1

    with held(shared._lock):
        assert in_fork(child) == 0


def answered(model: Any, results: Any) -> None:
    """In a spawned process."""
    begin()
    results.put([dict(model.engines._engines), model.temperature, model.invoke("hi").content])


def a_spawned_process_loads_its_own() -> None:
    """The model comes without weights, and answers as the first."""
    spawning = multiprocessing.get_context("spawn")
    results: Any = spawning.SimpleQueue()
    model = chat(temperature=0.5, seed=3)
    expected = [{}, 0.5, model.invoke("hi").content]
    process = spawning.Process(target=answered, args=(model, results))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert results.get() == expected


def kernels() -> dict[str, int]:
    """For how many kinds of arguments each of our functions was compiled."""
    modules = [module for name, module in sys.modules.items() if name.startswith("precedent")]
    found = [part for module in modules for part in vars(module).values() if isinstance(part, CPUDispatcher)]
    return {f"{part.__module__}.{part.__name__}": len(part.signatures) for part in found if part.signatures}


def no_request_waits_for_a_compiler() -> None:
    """Whatever a request brings and whichever drafters propose, what runs was compiled before the first."""
    answer, before = "the order of ten red shoes goes to Lisbon", kernels()
    engine = scripted_model_engine(lambda prompt: answer, cache=opened(), draft_model=True)
    for temperature in (0.0, 0.7):
        for _ in range(3):
            for brought in ({}, {"prediction": answer}, {"templates": [answer, "the order is lost"]}):
                prompt = engine.tokenizer.encode(f"{answer}. {answer}. Where does the order go?")
                sampling = SamplingParams(max_tokens=40, temperature=temperature)
                engine.submit(prompt, sampling, query=answer, **brought).result()
    assert {name: number for name, number in kernels().items() if number != before.get(name)} == {}


def begin() -> None:
    """What every process begins with."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    engine_loading.load_target = tiny
    StepCosts.measure = lambda *_: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    compile_inner_loops()
    gc.freeze()  # a program that ends does not look through all that was imported


if __name__ == "__main__":
    begin()
    for each in sys.argv[1:]:
        print(json.dumps([each, in_fork(globals()[each])]), flush=True)
