"""`bitwise=True` in forwards of one size: which models have it, and who finds no place in them."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from helpers.bitwise_models import PLAIN, go_without_kernels, model, one_size, tokens
from helpers.static_targets import reversed_lineage

from precedent.config import SamplingParams
from precedent.engine.engine import Engine
from precedent.errors import UnsupportedError
from precedent.runtime.failures import OutOfMemory
from precedent.target import TargetModel
from precedent_cuda import StaticSettings
from precedent_cuda.attention import StaticRows
from precedent_testing.tiny_models import byte_tokenizer


def test_what_forwards_of_one_size_would_round_otherwise_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of the proof: the keys of a tree are summed in another order than committed ones."""
    go_without_kernels(monkeypatch)
    monkeypatch.setattr(StaticRows, "lineage", property(reversed_lineage))
    with pytest.raises(UnsupportedError, match="round differently on this machine"):
        TargetModel(model(), bitwise=True, cuda_graphs=one_size())


def test_models_that_cannot_run_in_one_size_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"bitwise=True is not available for this mistral: .*sliding_attention"):
        TargetModel(model(family="mistral", sliding_window=8), bitwise=True, cuda_graphs=one_size())
    with pytest.raises(UnsupportedError, match=r"bitwise=True is not available for this llama: .*need CUDA devices"):
        TargetModel(model(), bitwise=True, cuda_graphs=StaticSettings())


@pytest.mark.exhaustive
def test_who_finds_no_place_in_forwards_of_one_size_is_refused_and_the_next_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Computed otherwise it would round otherwise. An engine lets requests wait for a place instead."""
    go_without_kernels(monkeypatch)
    wide = model(max_position_embeddings=1024)
    with pytest.raises(UnsupportedError, match="its arena has no room to test three texts of 257 tokens"):
        TargetModel(wide, bitwise=True, cuda_graphs=StaticSettings(arena_tokens=1024, capture=False))
    target = TargetModel(wide, bitwise=True, cuda_graphs=StaticSettings(arena_tokens=2048, capture=False))
    slots, prompt = [target.new_slot() for _ in range(3)], tokens(520, seed=1)
    for slot in slots[:2]:
        target.prefill(slot, prompt)
    with pytest.raises(OutOfMemory, match="has no place for"):
        target.prefill(slots[2], prompt)
    first = target.plain_step(slots[0])
    del slots[1:], slot
    slots.append(target.new_slot())
    target.prefill(slots[1], prompt)
    assert torch.equal(target.plain_step(slots[1]), first)
    engine = Engine(target, byte_tokenizer(), name="m", bitwise=True)
    prompts = [tokens(200, seed=seed) for seed in range(6)]
    del slots
    with closing(engine):
        assert engine.metrics().kv_cache_max_bytes == target.arena_bytes
        running = [engine.submit(prompt, SamplingParams(max_tokens=4, temperature=0.0)) for prompt in prompts]
        assert [len(one.result().token_ids) for one in running] == [4] * 6


@pytest.mark.exhaustive
def test_an_answer_that_grows_beyond_its_prompts_place_has_one_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests that fill the arena together, and a third that waits: nobody moves, nobody fails."""
    go_without_kernels(monkeypatch)
    static = StaticSettings(arena_tokens=2048, capture=False)
    target = TargetModel(model(max_position_embeddings=1024), bitwise=True, cuda_graphs=static)
    engine, growing = Engine(target, byte_tokenizer(), name="m", bitwise=True), SamplingParams(max_tokens=8)
    with closing(engine):
        running = [engine.submit(tokens(765, seed=seed), growing, speculation=PLAIN) for seed in (1, 2, 1)]
        first, _, again = [one.result() for one in running]
    assert len(first.token_ids) == 8
    assert first.token_ids == again.token_ids
