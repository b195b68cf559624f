"""What the scenarios of `process_program.py` are made of: tiny models, forks, locks that are held."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams
from precedent.engine import loading as engine_loading
from precedent.engine.warm_up import compile_inner_loops
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import StepCosts
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer
from precedent_testing.tiny_models import tiny_causal_lm

PATIENCE = int(os.environ.get("PATIENCE", "240"))
"""Seconds after which a process has hung; the longest scenario takes a few on a quiet machine."""

Say = Callable[[Any], None]
Scenario = Callable[[Say], None]
SCENARIOS: dict[str, Scenario] = {}
NEED_A_SERVER = {"a_server_is_asked_by_one_process"}
LONG = SamplingParams(max_tokens=4000)


def scenario(run: Scenario) -> Scenario:
    """Offer a function by its name."""
    SCENARIOS[run.__name__] = run
    return run


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


def keep(what: Any) -> None:
    """The program itself holds it until its interpreter ends."""
    sys.modules["__main__"].kept = what  # type: ignore[attr-defined]


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
    pipe = os.fdopen(writing, "w")

    def say(what: Any) -> None:
        pipe.write(json.dumps(what, default=str) + "\n")
        pipe.flush()

    run(say)
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


def begin() -> None:
    """What every process begins with."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    engine_loading.load_target = tiny
    StepCosts.measure = lambda *_: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    compile_inner_loops()
    gc.freeze()  # a program that ends does not look through all that was imported
