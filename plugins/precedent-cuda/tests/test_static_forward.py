"""Forwards of fixed size over an arena equal ordinary ones: rows, KV rows, several requests, prompts in pieces, trees.

Everything but the capture of a graph and its replay is the same code on a CPU; those two are marked `gpu`.
"""

from __future__ import annotations

import gc
import importlib.util
from contextlib import closing
from typing import Any

import pytest
import torch
from helpers.hybrids import random_ids, random_tree
from helpers.static_targets import WITHOUT_GRAPHS, alike, plain_target, static_target

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.target import Target, TargetModel
from precedent.target.attention import attention
from precedent.target.load.first_layers import first_layers
from precedent.target.model import target_of
from precedent.tree import EMPTY_TREE
from precedent_cuda import StaticSettings
from precedent_cuda import attention as static_attention
from precedent_cuda.arena import KEPT_FREE, KVArena
from precedent_cuda.host_waits import HostWaits
from precedent_cuda.static_forward import LEAST_KEYS, MOST_WIDTH, StaticForward
from precedent_drafts.heads import HEAD_TOKENS
from precedent_drafts.trained import draft_beside, initial_weights
from precedent_testing.target_contract import TargetContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


class TestForwardsOfFixedSize(TargetContract):
    """Rewinds, forks, saved prefixes, prompts in pieces and commits are those of any target."""

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls) -> Target:
        return static_target()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "phi3"])
@pytest.mark.sampled(2)
def test_several_requests_and_trees_equal_ordinary_forwards(model_type: str) -> None:
    """Three requests in places for four; all logits, keys and values, over commits of scattered paths."""
    static = static_target(model_type)
    before = static.runner.backends[0].forwards
    alike(static, plain_target(model_type), prompts=(40, 3, 17), rounds=4, widths=(9, 0, 5))
    alike(static, plain_target(model_type), prompts=(MOST_WIDTH + 60,), rounds=2, widths=(63,))
    assert static.runner.backends[0].forwards >= before + 4 + 3, "rounds and prompts ran in forwards of fixed size"


def test_lengths_of_several_buckets_and_buffers_that_grow_into_other_regions() -> None:
    """One request crosses from one bucket of keys into the next while another is in its first rows."""
    settings = {"max_position_embeddings": 4096, "num_hidden_layers": 2}
    alike(static_target(**settings), plain_target(**settings), prompts=(LEAST_KEYS - 8, 5), rounds=4, widths=(6, 3))


def test_logits_stay_when_the_next_forward_runs() -> None:
    target = static_target()
    slot = target.new_slot()
    target.prefill(slot, random_ids(1, 9))
    first = target.plain_step(slot)
    kept = first.clone()
    target.score([(slot, random_tree(1, 3))])
    assert torch.equal(first, kept)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow
def test_the_kernels_serve_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, in float32; on a GPU by themselves in the tests marked so."""
    from precedent_cuda.triton_kernels import attend_in_order

    monkeypatch.setattr(static_attention, "attend", attend_in_order)
    settings = {"dtype": torch.float32, "num_hidden_layers": 1}
    static = TargetModel(tiny_causal_lm(**settings), cuda_graphs=StaticSettings(arena_tokens=1024, capture=False))
    alike(static, plain_target(**settings), prompts=(21, 8), rounds=2, widths=(7, 2), tolerance=1e-3)


def test_who_finds_no_room_in_the_arena_is_computed_otherwise_and_alike() -> None:
    """A full arena costs speed, never an answer; what was lent comes back."""
    model = tiny_causal_lm(max_position_embeddings=4096)
    static = TargetModel(model, cuda_graphs=StaticSettings(arena_tokens=1024, capture=False))
    slots = [static.new_slot() for _ in range(3)]
    for number, slot in enumerate(slots):
        static.prefill(slot, random_ids(number, 300))
    before = static.runner.backends[0].forwards
    logits = static.score([(slot, EMPTY_TREE) for slot in slots])
    assert static.runner.backends[0].forwards == before
    expected = plain_target(max_position_embeddings=4096)
    for number, row in enumerate(logits):
        twin = expected.new_slot()
        expected.prefill(twin, random_ids(number, 300))
        torch.testing.assert_close(row, expected.plain_step(twin), rtol=0, atol=1e-9)
    del slots[:2], slot
    gc.collect()
    late = static.new_slot()
    static.prefill(late, random_ids(7, 300))
    assert static.arena.starts(late.kv) is not None


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gemma3_text", {"head_dim": 12, "sliding_window": 32}, "sliding_attention layers do not see the whole prefix"),
        ("llama", {"attn_implementation": "eager"}, "does not go through transformers' attention interface"),
        ("gemma2", {"head_dim": 12, "layer_types": ["full_attention"] * 3}, "a window or a mask of its own"),
        ("mixtral", {"num_local_experts": 4, "sliding_window": None}, "makes the host wait"),
    ],
)
def test_models_that_cannot_are_refused_by_name(model_type: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{model_type} cannot run as CUDA graphs: .*{reason}"):
        static_target(model_type, **settings)


def test_capped_scores_and_sinks_are_refused_in_forwards_of_fixed_size() -> None:
    forward, rows = object.__new__(StaticForward), torch.zeros(1, 1, 1, 8)
    for term in ({"softcap": 30.0}, {"s_aux": torch.zeros(1)}):
        with pytest.raises(UnsupportedError, match="Linear caps its scores or has sinks"):
            attention(torch.nn.Linear(1, 1), rows, rows, rows, forward, **term)


def test_graphs_are_refused_where_there_is_no_cuda() -> None:
    with pytest.raises(UnsupportedError, match="CUDA graphs need CUDA devices, and it is on cpu"):
        TargetModel(tiny_causal_lm(), cuda_graphs=StaticSettings(arena_tokens=2048))
    with pytest.raises(ConfigError, match="made without cuda_graphs"):
        target_of(plain_target(), cuda_graphs=True)


def test_a_forward_of_fixed_size_never_waits_for_the_device() -> None:
    """Nor does sending its numbers; reading a number back, which is the control, would be seen."""
    static = static_target()
    slots = [static.new_slot() for _ in range(2)]
    for number, slot in enumerate(slots):
        static.prefill(slot, random_ids(number, 20 + number))
    batch = [(slot, random_tree(number, 5)) for number, slot in enumerate(slots)]
    with HostWaits() as waits:
        logits = static.score(batch)
    assert waits.names == []
    with HostWaits() as waits, torch.inference_mode():
        logits[0].argmax(-1).tolist(), bool(logits[0][0, 0] > 0), logits[0][logits[0] > 0]
    assert set(waits.names) == {"resolve_neg", "is_nonzero", "index"}


def test_regions_of_an_arena_are_lent_once_and_joined_again() -> None:
    arena = KVArena(TargetModel(tiny_causal_lm(num_hidden_layers=1)).kv_shape, 1024).lent[0]
    first, second, third = (arena.take(256) for _ in range(3))
    starts = [region.start for region in (first, second, third)]
    assert starts == [KEPT_FREE, KEPT_FREE + 256, KEPT_FREE + 512]
    assert arena.take(512) is None
    del first, third
    last = arena.take(512)
    assert last.start == KEPT_FREE + 512, "what was behind the third was free as well"
    assert arena.take(300) is None, "the first region is too small by itself"
    del second
    assert arena.take(512).start == KEPT_FREE, "the first two together"


def drafted(target: TargetModel, draft: Any, sampling: SamplingParams) -> tuple[TargetModel, tuple[int, ...]]:
    """The draft model of an engine, and what the engine answered."""
    with closing(Engine(target, byte_tokenizer(), name="tiny", draft_model=draft)) as engine:
        engine.planner.cost = CostCurve()
        asked = SpeculationConfig(drafters=("draft-model",))
        return engine._parts.draft_model, engine.submit(
            random_ids(4, 60), sampling, speculation=asked
        ).result().token_ids


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0)])
def test_a_draft_model_runs_in_fixed_sizes_as_its_target_does(sampling: SamplingParams) -> None:
    """A trained one, with a head of few tokens and an arena for as many as its target's; greedy texts are the same."""
    static, plain = static_target(), plain_target()
    drafts = [
        draft_beside(one.model, (0, 1), {**initial_weights(one.model, (0, 1)), HEAD_TOKENS: torch.arange(0, 250, 2)})
        for one in (static, plain)
    ]
    draft, text = drafted(static, drafts[0], sampling)
    assert draft.arena.shape == draft.kv_shape != static.kv_shape
    assert draft.arena_bytes // draft.kv_shape.row_bytes == static.arena_bytes // static.kv_shape.row_bytes
    assert draft.runner.backends[0].forwards > 4
    other, expected = drafted(plain, drafts[1], sampling)
    assert other.arena is None
    assert not sampling.greedy or text == expected


def test_a_draft_model_that_cannot_run_in_fixed_sizes_goes_without_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draft, text = drafted(static_target(), tiny_causal_lm("mistral", sliding_window=16), SamplingParams(max_tokens=9))
    assert draft.arena is None
    assert "the draft model runs without graphs: mistral" in caplog.text
    model = tiny_causal_lm()
    target = TargetModel(model, cuda_graphs=WITHOUT_GRAPHS)
    early, again = drafted(target, first_layers(model, 1), SamplingParams(max_tokens=9))
    assert early.arena is None, "an early exit reads its target's arena"
    assert text == again
