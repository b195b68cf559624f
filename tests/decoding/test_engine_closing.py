"""Engines that are shared, closed, dropped or broken, and interpreters that end: nobody is left waiting."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from helpers.forked import run
from helpers.small_engines import PLAIN, PROMPT, make_engine

from precedent.config import EngineLimits, SamplingParams
from precedent.engine.engine import Engine
from precedent.engine.shared import shared_engine
from precedent.errors import EngineClosedError, GenerationError, RequestCancelled
from precedent.planning.costs import CostCurve
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


def test_equal_settings_share_one_engine_which_ends_with_its_last_user() -> None:
    """The registry loads weights once and holds nobody alive."""
    model, tokenizer = tiny_causal_lm("llama"), byte_tokenizer()
    first = shared_engine(model, tokenizer=tokenizer)
    assert shared_engine(model, tokenizer=tokenizer) is first
    assert shared_engine(model, tokenizer=tokenizer, draft_model="first-layers:1") is not first
    worker, gone = first._worker, weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    worker._thread.join(timeout=10)
    assert not worker._thread.is_alive()


def test_closing_the_engine_cancels_what_is_running() -> None:
    """Nobody waits for ever on a closed engine, also not behind those that run; closing it again is harmless."""
    running = make_engine(limits=EngineLimits(max_running=2))
    generations = [running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN) for _ in range(6)]
    next(iter(generations[0]))
    for _ in range(2):
        running.close()
    for generation in generations[1:]:
        assert generation.done
        with pytest.raises(RequestCancelled, match="engine was closed"):
            generation.result()
    with pytest.raises(EngineClosedError, match="closed"):
        running.submit(PROMPT, SamplingParams())
    assert running.metrics().num_requests_running == 0


def test_many_threads_may_submit_while_the_engine_is_closed() -> None:
    """Each request is refused or failed; none is forgotten in between."""
    running, ends = make_engine(), list[str]()

    def ask() -> None:
        try:
            while True:
                running.submit(PROMPT, SamplingParams(max_tokens=3), speculation=PLAIN).result()
        except (RequestCancelled, EngineClosedError) as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    running.submit(PROMPT, SamplingParams(max_tokens=30), speculation=PLAIN).result()
    running.close()
    for thread in threads:
        thread.join(timeout=60)
    assert len(ends) == len(threads), "somebody still waits on a closed engine"


def test_an_engine_may_be_closed_by_its_own_threads() -> None:
    """In `on_result`, which runs on a thread of the engine's, `close` cannot wait for that very thread."""
    holder: list[Engine] = []
    running = Engine(
        tiny_causal_lm("llama"),
        byte_tokenizer(),
        name="closes itself",
        cost=CostCurve(),
        on_result=lambda prompt, result: holder[0].close(),
    )
    holder.append(running)
    assert running.submit(PROMPT, SamplingParams(max_tokens=3)).result().finish_reason == "length"
    running._worker._thread.join(timeout=60)
    assert not running._worker._thread.is_alive()
    running.close()


def test_an_engine_may_be_dropped_on_its_own_thread() -> None:
    """The garbage collector runs anywhere, also inside a step: the worker ends and does not wait for itself."""
    running = make_engine()
    worker, holder = running._worker, [running]
    streaming = running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN)
    del running

    def drop(*args: object) -> None:
        holder.clear()
        gc.collect()

    worker._scheduler.loop.aids.planner.observe_forward = drop  # type: ignore[method-assign]
    with pytest.raises(RequestCancelled):
        streaming.result()
    worker._thread.join(timeout=60)
    assert not worker._thread.is_alive()


def test_a_worker_that_breaks_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """An error that no request can be blamed for: all of them are told, and the engine is closed."""
    running = make_engine(limits=EngineLimits(max_running=1))
    generations = [running.submit(PROMPT, SamplingParams(max_tokens=900), speculation=PLAIN) for _ in range(3)]
    running._worker._scheduler.admission.admits = None  # type: ignore[assignment, method-assign]
    for generation in generations[1:]:
        with pytest.raises(GenerationError, match="closed now"):
            generation.result()
    with pytest.raises(EngineClosedError):
        running.submit(PROMPT, SamplingParams())
    running.close()
    assert "the worker of an engine failed" in caplog.text


def test_the_interpreter_ends_with_requests_running() -> None:
    """Nobody closed the engine, one stream is read by a thread that nobody joins, another by no one."""
    script = """
import threading
from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import RequestCancelled
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm
engine = Engine.load(tiny_causal_lm("llama"), tokenizer=byte_tokenizer())
unread = engine.submit([65] * 20, SamplingParams(max_tokens=1000))
streams = [engine.submit([65] * 20, SamplingParams(max_tokens=1000)) for _ in range(2)]
def read():
    try:
        list(streams[0])
    except RequestCancelled:
        pass
def ask():
    print(len(engine.submit([66], SamplingParams(max_tokens=9)).result().token_ids))
threading.Thread(target=read, daemon=True).start()
threading.Thread(target=ask).start()
print(next(iter(streams[1])).token_ids[0] >= 0)
"""
    done = run(["-c", script], timeout=120)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["9", "True"]), done.stderr
    assert "Traceback" not in done.stderr
