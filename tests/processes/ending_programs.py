"""Programs that end, whatever is loaded, open or still running."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import torch
from scenarios import PATIENCE, Say, chat, endless, folder, keep, opened, scenario, tiny

import precedent
from precedent.cache import SentenceTransformerEmbedder, embedder
from precedent.config import SamplingParams
from precedent.engine import loading as engine_loading
from precedent_testing.embedders import HashEmbedder


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
    keep(engine)


@scenario
def ends_with_an_abandoned_stream(say: Say) -> None:
    kept = chat().stream("hi", max_tokens=4000)
    say(next(kept) is not None)
    keep(kept)


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
