"""Graphs of forwards of fixed size: which are captured, replayed, kept and dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.hybrids import random_ids, random_tree
from helpers.static_targets import alike, plain_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from precedent.target import TargetModel
from precedent_cuda import StaticSettings, graphs
from precedent_cuda.graphs import GraphStore, Run
from precedent_cuda.static_forward import LEAST_KEYS, StaticShape
from precedent_testing.tiny_models import tiny_causal_lm


class Pretended:
    """Captures by remembering, and replays by running; fails for sizes of an odd number of rows."""

    def __init__(self, nbytes: int = 10) -> None:
        self.nbytes, self.captured, self.replayed, self.forgotten = nbytes, list[int](), list[int](), 0

    def capture(self, run: Run, shape: StaticShape) -> Any:
        if shape.rows % 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.captured.append(shape.rows)

        def replay() -> Tensor:
            self.replayed.append(shape.rows)
            return run(shape)

        replay.nbytes = self.nbytes
        return replay

    def forget(self) -> None:
        self.forgotten += 1


class Tape(TorchDispatchMode):
    """What a graph is, on a CPU: the operations of a run with the very tensors they read and wrote, and no Python."""

    nbytes = 0

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self.logits = torch.empty(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def __call__(self) -> Tensor:
        for func, args, kwargs, written in self._operations:
            for old, new in zip(tree_leaves(written), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self.logits


class Taping:
    """Captures tapes."""

    def __init__(self) -> None:
        self.captured: list[StaticShape] = []

    def capture(self, run: Run, shape: StaticShape) -> Any:
        self.captured.append(shape)
        with Tape() as tape:
            tape.logits = run(shape)
        return tape

    def forget(self) -> None:
        """Nothing is held beside the tapes."""


def store(capturer: Pretended) -> GraphStore:
    return GraphStore(lambda shape: torch.full((shape.rows, 3), float(shape.rows)), capturer)


def size(rows: int) -> StaticShape:
    return StaticShape(rows, 1, rows, LEAST_KEYS)


@pytest.mark.parametrize(("bound", "most"), [("MOST_GRAPHS", 2), ("MOST_BYTES", 19)])
def test_a_size_is_captured_when_it_comes_again_and_all_are_dropped_beyond_a_bound(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, bound, most)
    capturer = Pretended()
    kept = store(capturer)
    for rows in (2, 2, 4, 4, 2, 6, 6, 2, 4):
        assert kept(size(rows)).shape == (rows, 3)
    assert capturer.captured == [2, 4, 6, 2, 4]
    assert capturer.replayed == [2, 4, 2, 6, 2, 4]
    assert (len(kept), capturer.forgotten) == (1, 2)


def test_operations_that_were_captured_serve_every_later_step_of_their_size() -> None:
    """Lengths, places, trees and tokens change under a replay: none of them was baked into its operations."""
    settings = StaticSettings(arena_tokens=8192, capture=False)
    static, taping = TargetModel(tiny_causal_lm(), cuda_graphs=settings), Taping()
    static.runner.backends[0].graphs = GraphStore(static.runner.backends[0].run, taping)
    for prompts in ((40, 3, 17), (5, 61, 33)):  # other sequences, in other regions
        alike(static, plain_target(), prompts=prompts, rounds=5, widths=(9, 0, 5))
    assert taping.captured.count(StaticShape(24, 4, 16, LEAST_KEYS)) == 1
    assert static.runner.backends[0].forwards > 2 * len(taping.captured)


def test_what_cannot_be_captured_runs_without_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    capturer = Pretended()
    kept = store(capturer)
    for _ in range(4):
        assert kept(size(3)).eq(3).all()
    assert (len(kept), capturer.captured, kept.settled) == (0, [], True)
    assert [record.getMessage().count("not permitted") for record in caplog.records] == [1]


def test_a_target_says_whether_a_step_took_as_long_as_later_ones_will() -> None:
    target, settled = TargetModel(tiny_causal_lm(), cuda_graphs=StaticSettings(arena_tokens=1024, capture=False)), []
    target.runner.backends[0].graphs = GraphStore(target.runner.backends[0].run, Taping())
    slot, homeless = target.new_slot(), target.new_slot()
    for each in (slot, homeless):
        target.prefill(each, random_ids(1, 600))
    for each in (slot, slot, slot, homeless):
        target.plain_step(each)
        target.discard(each)
        settled.append(target.runner.settled)
    assert settled == [False, False, True, False]


def on_cuda(dtype: torch.dtype, **settings: object) -> tuple[TargetModel, TargetModel]:
    """The same weights with and without graphs, on the GPU."""
    static, plain = (tiny_causal_lm(dtype=dtype, **settings).cuda() for _ in range(2))
    return TargetModel(static, cuda_graphs=StaticSettings(arena_tokens=8192)), TargetModel(plain)


@pytest.mark.gpu
def test_on_cuda_replayed_graphs_equal_ordinary_forwards_in_float64() -> None:
    """Sizes come again and again, so that most forwards are replays; lengths, trees and regions change under them."""
    static, plain = on_cuda(torch.float64)
    for _ in range(3):
        alike(static, plain, prompts=(40, 3, 17), rounds=4, widths=(9, 0, 5))
    alike(static, plain, prompts=(30,), rounds=5, widths=(0,))
    assert len(static.runner.backends[0].graphs) >= 2


@pytest.mark.gpu
def test_on_cuda_a_replay_is_bit_for_bit_what_runs_without_a_graph() -> None:
    """In bfloat16, by the kernels that a GPU has: the graph is the same operations on the same memory."""
    static, _ = on_cuda(torch.bfloat16, hidden_size=128, head_dim=32)
    slot, tree = static.new_slot(), random_tree(1, 7)
    static.prefill(slot, random_ids(1, 40))
    kept, static.runner.backends[0].graphs = static.runner.backends[0].graphs, None
    without = static.score([(slot, tree)])[0]
    static.runner.backends[0].graphs = kept
    for _ in range(3):
        static.discard(slot)
        assert torch.equal(static.score([(slot, tree)])[0], without)
    assert len(kept) >= 1


@pytest.mark.gpu
def test_on_cuda_a_step_waits_for_the_device_once_it_is_read() -> None:
    static, _ = on_cuda(torch.float32)
    slot, tree = static.new_slot(), random_tree(1, 7)
    static.prefill(slot, random_ids(1, 40))
    for _ in range(3):
        static.score([(slot, tree)])
        static.discard(slot)
    try:
        torch.cuda.set_sync_debug_mode("error")
        logits = static.score([(slot, tree)])[0]
        static.commit(slot, tree, tree.path_to(len(tree) - 1), 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()
