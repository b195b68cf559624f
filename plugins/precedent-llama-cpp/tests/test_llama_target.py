"""`LlamaTarget` on a context that keeps its cells as llama.cpp does; on llama.cpp: `test_llama_backend.py`."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.llama_context import VOCAB, FakeContext
from helpers.stepping import AllCandidates, run, start
from transformers import PreTrainedConfig

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.errors import CapacityError
from precedent.target import Slot
from precedent.tree import ROOT, CandidateTree, TreeBuilder, chain
from precedent_llama_cpp.context import MOST_SEQUENCES
from precedent_llama_cpp.target import MOST_LEAVES, LlamaTarget
from precedent_testing.target_contract import TargetContract


def target_on(context: FakeContext) -> LlamaTarget:
    return LlamaTarget(context, PreTrainedConfig())


def fan(leaves: int) -> CandidateTree:
    """A tree of so many leaves below one node."""
    builder = TreeBuilder()
    stem = builder.add_fixed(ROOT, 1, "test")
    for leaf in range(leaves):
        builder.add_fixed(stem, 2 + leaf, "test")
    return builder.build()


def prompted(target: LlamaTarget, length: int = 12, seed: int = 0) -> Slot:
    slot = target.new_slot()
    target.prefill(slot, [(seed + place) % VOCAB for place in range(length)])
    return slot


class TestContract(TargetContract):
    """On a context without sliding windows."""

    tolerance = 0.0

    @pytest.fixture
    def target(self) -> LlamaTarget:
        return target_on(FakeContext())


class TestContractUnderAWindow(TargetContract):
    """Whatever one sequence alone stores outside its window is overwritten at once."""

    tolerance = 0.0

    @pytest.fixture
    def target(self) -> LlamaTarget:
        return target_on(FakeContext(window=8))


class TestContractWithFurtherRows(TargetContract):
    """Rows that are computed only because more of them take less time."""

    tolerance = 0.0

    @pytest.fixture
    def target(self) -> LlamaTarget:
        return LlamaTarget(FakeContext(), PreTrainedConfig(), repacked=True)


@pytest.mark.parametrize(("rows", "computed"), [(1, 1), (2, 2), (3, 4), (5, 5), (13, 16), (15, 16), (16, 16), (33, 33)])
def test_repacked_weights_compute_rows_in_fours_and_sixteens(rows: int, computed: int) -> None:
    context = FakeContext()
    target = LlamaTarget(context, PreTrainedConfig(), repacked=True)
    slot = prompted(target, 1)
    context.most_rows = 0
    (logits,) = target.score([(slot, chain([1] * (rows - 1)))])
    assert (len(logits), context.most_rows) == (rows, computed)
    target.commit(slot, chain([1] * (rows - 1)), range(rows - 1), 2)
    assert len(context.cells) == rows


def test_a_context_that_computes_trees_wrongly_gets_chains(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="precedent_llama_cpp"):
        target = target_on(FakeContext(blind=True))
    assert target.capabilities.most_leaves == 1
    assert "single paths" in caplog.text
    assert prompted(target).one_path
    assert target_on(FakeContext()).capabilities.most_leaves == MOST_LEAVES


@pytest.mark.parametrize("window", [0, 8])
def test_tokens_are_stored_once_for_all_that_have_them_and_go_with_the_last(window: int) -> None:
    context = FakeContext(window=window)
    target = target_on(context)
    gc.collect()
    slot = prompted(target, 41)
    fork = target.fork(slot, 30)
    target.score([(slot, fan(5))])
    target.commit(slot, fan(5), [0, 3], 9)
    assert len(context.cells) == 43
    del slot
    target.new_slot()
    assert len(context.cells) == 30
    with ThreadPoolExecutor() as thread:
        thread.submit(lambda made: None, fork)
    del fork
    gc.collect()
    target.new_slot()
    assert not context.cells


def test_a_decode_that_fails_leaves_every_sequence_as_it_was() -> None:
    context = FakeContext()
    target = target_on(context)
    slots = [prompted(target, 9, seed) for seed in (0, 40)]
    before = [target.plain_step(slot).clone() for slot in slots]
    for slot in slots:
        target.discard(slot)
    stored = len(context.cells)
    for act in (
        lambda: target.score([(slot, fan(4)) for slot in slots]),
        lambda: target.prefill(slots[0], [*range(8), *range(60, 90)]),
    ):
        context.fails = 1
        with pytest.raises(RuntimeError, match="-3"):
            act()
        assert len(context.cells) == stored
    target.prefill(slots[0], range(9))
    assert all(torch.equal(target.plain_step(slot), row) for slot, row in zip(slots, before, strict=True))


def test_requests_whose_forward_failed_together_get_their_own_logits_alone() -> None:
    context = FakeContext()
    target = target_on(context)
    prompts, sampling = [(3, 1, 4, 1, 5), (9, 2, 6, 5)], SamplingParams(max_tokens=8, temperature=0.0)
    alone = [run(target, start(target, [], sampling, prompt=prompt)) for prompt in prompts]
    sequences = [start(target, [], sampling, prompt=prompt) for prompt in prompts]
    loop = DecodeLoop(target, AllCandidates())
    while not sequences[0].finished:
        context.fails = 1
        loop.step(sequences)
    assert [tuple(sequence.output_ids) for sequence in sequences] == alone


def test_an_error_that_a_caller_keeps_keeps_no_tokens() -> None:
    context = FakeContext()
    target = target_on(context)
    sequence = start(target, [], SamplingParams(max_tokens=8))
    context.fails = 2
    DecodeLoop(target, AllCandidates()).step([sequence])
    kept = sequence.error
    del sequence.slot  # as an engine does once a request has ended
    target.new_slot()
    assert kept is not None
    assert not context.cells


def test_a_full_context_says_that_memory_ran_out_and_keeps_what_it_has() -> None:
    target = target_on(FakeContext(num_cells=64))
    slot = prompted(target, 40)
    other = target.new_slot()
    with pytest.raises(MemoryError, match="memory"):
        target.prefill(other, [*range(100, 140)])
    assert target.plain_step(slot).shape == (1, VOCAB)


def test_a_kept_prefix_that_finds_no_room_is_not_called_damaged() -> None:
    """It would be removed from the disk for that."""
    target = target_on(FakeContext(num_cells=64))
    slot = prompted(target, 41)
    saved = target.save(slot, 40)
    with pytest.raises(MemoryError, match="40 kept tokens"):
        target.restore(slot.token_ids, saved)
    target.rewind(slot, 10)
    assert target.restore([*range(40)], saved).token_ids == [*range(40)]


def test_many_sequences_share_what_llama_cpp_can_follow() -> None:
    """Few requests branch, and many follow single paths."""
    target = target_on(FakeContext(num_cells=1 << 14))
    few = [prompted(target, 4, seed) for seed in range(4)]
    for slot in few:
        target.score([(slot, chain([1]))])
    target.commit_all([(slot, chain([1]), (0,), 2) for slot in few])
    assert not any(slot.one_path for slot in few)
    target.score([(slot, fan(MOST_LEAVES)) for slot in few])
    target.commit_all([(slot, fan(MOST_LEAVES), (0, 5), 2) for slot in few])
    many = [*few, *(prompted(target, 4, seed) for seed in range(4, 100))]
    assert all(slot.one_path for slot in many[4:]), "until their first step"
    target.score([(slot, chain([1])) for slot in many])
    target.commit_all([(slot, chain([1]), (0,), 2) for slot in many])
    assert all(slot.one_path for slot in many)
    with pytest.raises(CapacityError, match="max_running"):
        many += [target.new_slot() for _ in range(MOST_SEQUENCES)]


def test_a_slot_that_gets_too_few_sequences_leaves_them_to_others() -> None:
    target = target_on(FakeContext(window=8))
    slot = prompted(target)
    target.score([(slot, fan(3))])
    others = [target.new_slot() for _ in range((MOST_SEQUENCES - 3) // 2)]
    with pytest.raises(CapacityError):
        target.new_slot()
    assert others
    assert target.score([(slot, fan(4))])


@pytest.mark.parametrize(("num_cells", "nodes", "one_path"), [(2048, 38, False), (2048, 255, True), (512, 130, True)])
def test_trees_that_might_find_no_sequence_or_cell_are_single_paths(num_cells: int, nodes: int, one_path: bool) -> None:
    target = target_on(FakeContext(num_cells=num_cells))
    target.request_bytes(10, 10, nodes + 1)
    slots = [prompted(target, 4, seed) for seed in range(4)]
    target.score([(slot, chain([1])) for slot in slots])
    target.commit_all([(slot, chain([1]), (0,), 2) for slot in slots])
    assert [slot.one_path for slot in slots] == [one_path] * 4
    target.score([(slot, chain([1] * nodes) if one_path else fan(nodes - 1)) for slot in slots[: 1 if one_path else 4]])


@pytest.mark.parametrize("window", [0, 8])
def test_there_are_never_more_slots_than_sequences_for_them(window: int) -> None:
    """Each slot counts as a share of the memory, however short its text is."""
    target = target_on(FakeContext(num_cells=1000, window=window))
    slots = target.arena_bytes // target.request_bytes(1, 1, 1)
    assert 50 < slots * (2 if window else 1) <= MOST_SEQUENCES - 2 * MOST_LEAVES
    assert target.slot_bytes(prompted(target, 3)) == target.request_bytes(1, 1, 1)
    assert target.request_bytes(900, 50, 300) == target.arena_bytes, "a request that fits in the context is not refused"


def test_more_rows_than_a_batch_holds_are_computed_in_several() -> None:
    context = FakeContext(num_cells=1 << 14)
    target = target_on(context)
    slots = [prompted(target, 8, seed) for seed in range(20)]
    batch = [(slot, chain([seed % VOCAB for seed in range(150)])) for slot in slots]
    together = target.score(batch)
    assert context.most_rows <= 2048
    target.discard(slots[3])
    (alone,) = target.score([batch[3]])
    assert torch.equal(alone, together[3])
