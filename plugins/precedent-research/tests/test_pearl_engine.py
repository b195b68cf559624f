"""PEARL in an engine: who draws ahead, on which device, and that it ends with the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.pearl import CHOSEN_TEXTS
from transformers import PreTrainedModel

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, RequestCancelled, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.runtime.background import AtOnce, Background
from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers, layers_of
from precedent.target.load.loading import load_draft
from precedent.tree import Sampled
from precedent_research import pearl as pearl_module
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

# The engine


PROMPT_OF_ENGINE = tuple(range(40, 70))


@contextmanager
def engine_on(model: PreTrainedModel, draft: PreTrainedModel | None, **settings: object) -> Iterator[Engine]:
    engine = Engine(
        model, byte_tokenizer(), name="tiny", draft_model=draft, cost=CostCurve(),
        speculation=SpeculationConfig(drafters=("draft-model",)), **settings,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("sampling", CHOSEN_TEXTS.values(), ids=CHOSEN_TEXTS)
def test_an_engine_answers_as_without(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests at once, on the thread and in place; the draft model takes part, its steps are counted."""
    model, draft = (tiny_causal_lm(scale=2.0, num_hidden_layers=layers) for layers in (3, 3))
    with engine_on(model, None) as engine:
        plain = engine.submit(PROMPT_OF_ENGINE, sampling).result().token_ids
    for executor in (Background, lambda *_: AtOnce()):
        monkeypatch.setattr(pearl_module, "Background", executor)
        with engine_on(model, draft, loop="pearl") as engine:
            asked = [engine.submit(PROMPT_OF_ENGINE, sampling) for _ in range(3)]
            results = [generation.result() for generation in asked]
        assert [result.token_ids for result in results] == [plain] * 3
    assert all(result.stats.extra["num_lookaheads_used"] > 0 for result in results)  # in place: whatever the clock says
    assert all(result.stats.accepted_by_source["draft-model"] > 0 for result in results)


def test_a_cancelled_request_leaves_an_engine_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the middle of an answer, while the draft model is ahead; the next one is the plain one."""
    model, draft = tiny_causal_lm(scale=2.0), tiny_causal_lm(scale=2.0)
    long, short = SamplingParams(max_tokens=400), SamplingParams(max_tokens=24)
    with engine_on(model, None) as engine:
        plain = engine.submit(PROMPT_OF_ENGINE, short).result().token_ids
    with engine_on(model, draft, loop="pearl") as engine:
        generation = engine.submit(PROMPT_OF_ENGINE, long)
        for _ in generation:
            break
        with pytest.raises(RequestCancelled):
            generation.result()
        while engine.metrics().num_requests_running:
            time.sleep(0.001)  # its caller knows before its place is free
        assert engine.submit(PROMPT_OF_ENGINE, short).result().token_ids == plain
        kept = engine._drafters["draft-model"].pool  # type: ignore[attr-defined]
        assert len(kept._idle) == 1  # the second request went on where the first one was left


def test_the_thread_ends_with_the_engine() -> None:
    """And memory is set aside for what is drawn ahead."""
    model, draft = tiny_causal_lm(), tiny_causal_lm(num_hidden_layers=1)
    reserved = []
    for loop in (None, "pearl"):
        with engine_on(model, draft, loop=loop) as engine:
            engine.submit(PROMPT_OF_ENGINE, SamplingParams(max_tokens=4)).result()
            drafters = engine._drafters_named(("draft-model",))
            reserved.append(engine._kv_bytes(200, 16, engine.speculation, drafters))
            named = [thread for thread in threading.enumerate() if thread.name.startswith("precedent-draft")]
            assert bool(named) == (loop is not None)
        assert not any(thread.is_alive() for thread in named)
    assert reserved[1] >= reserved[0]


# Who draws ahead, and where


def test_what_cannot_draw_ahead_is_refused_by_name() -> None:
    """No draft model, one that shares the target's keys and values, a device for nothing, an object, a toaster."""
    model, tokenizer = tiny_causal_lm(), byte_tokenizer()
    with pytest.raises(ConfigError, match="give such a draft_model="):
        Engine(model, tokenizer, name="tiny", loop="pearl", cost=CostCurve())
    with pytest.raises(UnsupportedError, match="first-layers"):
        Engine(model, tokenizer, name="tiny", draft_model=first_layers(model, 1), loop="pearl", cost=CostCurve())
    with pytest.raises(ConfigError, match="draft_device='cpu' is for a draft model"):
        Engine.load(model, tokenizer=tokenizer, draft_device="cpu")
    with pytest.raises(ConfigError, match="move the model there"):
        Engine.load(model, tokenizer=tokenizer, draft_model=tiny_causal_lm(), draft_device="cpu")
    with pytest.raises(ConfigError, match="draft_device='toaster'"):
        load_draft("first-layers:1", model, tokenizer, device="toaster")


def test_what_a_draft_shares_with_its_target_is_copied_to_another_device() -> None:
    """The target stays where it is."""
    model = tiny_causal_lm()
    beside = load_draft("first-layers:2", model, byte_tokenizer(), device="cpu")
    elsewhere = load_draft("first-layers:2", model, byte_tokenizer(), device="meta")
    assert layers_of(beside)[0] is layers_of(model)[0]
    assert {parameter.device.type for parameter in elsewhere.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_distributions_are_handed_on_to_where_the_target_verifies() -> None:
    """The row moves, what was excluded stays."""
    drafter = DraftModelDrafter(TargetModel(tiny_causal_lm()), hand_to=torch.device("meta"))
    distribution = drafter.handed_on(Sampled(torch.tensor([0.5, 0.5]), (1,)))
    assert (distribution.row.device.type, distribution.excluded) == ("meta", (1,))


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["the same GPU", "a CPU"])
def test_two_streams_on_a_gpu_answer_as_one(place: str) -> None:
    """Draft and target on one GPU by turns and at once, or apart: in float64 the texts are those of plain decoding."""
    texts, seeded = [], SamplingParams(temperature=0.9, seed=4, max_tokens=64)
    for loop in (None, "pearl"):
        model = tiny_causal_lm(scale=2.0).to("cuda")
        draft = tiny_causal_lm(scale=2.0).to("cpu" if place == "a CPU" else "cuda")
        with engine_on(model, draft, loop=loop) as engine:
            for sampling in (SamplingParams(max_tokens=64), seeded):
                asked = [engine.submit((*PROMPT_OF_ENGINE, last), sampling) for last in range(4)]
                texts.append([generation.result().token_ids for generation in asked])
            if loop:
                sampled = SamplingParams(temperature=0.9, max_tokens=64)
                results = [engine.submit(PROMPT_OF_ENGINE, sampled).result() for _ in range(4)]
                assert all(len(result.token_ids) == 64 for result in results)  # whether drawing pays is the machine's
    assert texts[:2] == texts[2:]
