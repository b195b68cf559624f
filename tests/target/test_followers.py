"""What the first process tells the others: they hold the same keys and values after any course of things."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from precedent.config import EngineLimits
from precedent.engine.admission import Admission
from precedent.errors import GenerationError
from precedent.target import KVCache, Slot, TargetModel
from precedent.target.parallel.mirroring import Follower, LeadingRunner, MirroredKV
from precedent.target.parallel.processes import Processes
from precedent.target.runner import Runner
from precedent.testing.tiny_models import tiny_causal_lm
from precedent.tree import ROOT, CandidateTree, TreeBuilder

pytestmark = pytest.mark.skipif(not (dist.is_available() and hasattr(os, "fork")), reason="needs processes that fork")


class Told(Processes):
    """Followers in this very process; messages go the way of JSON."""

    def __init__(self, follower: Follower) -> None:
        super().__init__(rank=0, count=2, here=2, patient=None, control=None, owned=False)
        self.follower = follower

    def say(self, message: dict[str, Any]) -> None:
        self.follower.do(json.loads(json.dumps(message)))


class ToldTarget(TargetModel):
    """A whole model whose every forward a follower repeats."""

    def __init__(self) -> None:
        super().__init__(tiny_causal_lm("llama", num_hidden_layers=2))
        self.told = Told(Follower(self.runner, self.kv_shape))
        self.runner: Runner = LeadingRunner(self.runner, self.told)

    def _empty_cache(self) -> MirroredKV:
        return MirroredKV.new(self.kv_shape, self.runner.journal)

    @torch.inference_mode()
    def theirs(self) -> dict[int, KVCache]:
        """The follower's caches, once it was told what the next forward would tell it."""
        for entry in self.runner.journal.taken():
            self.told.follower._change(*entry)
        return self.told.follower._caches

    def check(self, slots: list[Slot]) -> None:
        """The follower holds the same keys and values, of the same caches."""
        theirs = self.theirs()
        for slot in slots:
            kv, other = slot.kv, theirs[slot.kv.number]
            assert other.length == kv.length
            for index in range(2):
                for ours, copied in zip(
                    kv.layer(index).rows(0, kv.length), other.layer(index).rows(0, kv.length), strict=True
                ):
                    assert torch.equal(ours, copied)
        assert theirs.keys() == {slot.kv.number for slot in slots}


def random_tree(randomness: random.Random) -> CandidateTree:
    builder, nodes = TreeBuilder(), [ROOT]
    for token in randomness.sample(range(200), randomness.randrange(1, 9)):
        nodes.append(builder.add_fixed(randomness.choice(nodes), token, "test"))
    return builder.build()


@pytest.mark.parametrize("seed", range(6))
def test_a_follower_holds_the_same_keys_and_values_after_any_course_of_things(seed: int) -> None:
    randomness, target = random.Random(seed), ToldTarget()
    slots: list[Slot] = []
    for _ in range(40):
        advance(target, slots, randomness)
        target.check(slots)


def advance(target: ToldTarget, slots: list[Slot], randomness: random.Random) -> None:
    """One thing that a scheduler might do."""
    chosen = randomness.choice(slots) if slots else None
    match randomness.choice(["new", "step", "step", "step", "fork", "rewind", "drop"]):
        case "fork" if chosen:
            length = randomness.randrange(len(chosen.token_ids) + 1)
            slots.append(target.fork(chosen, length, room=randomness.choice([0, 700])))
            target.prefill(slots[-1], [*chosen.token_ids[:length], randomness.randrange(200)])
        case "rewind" if chosen:
            target.prefill(chosen, [*chosen.token_ids[: randomness.randrange(len(chosen.token_ids) + 1)], 5, 6])
        case "drop" if chosen:
            slots.remove(chosen)
        case "step" if chosen:
            step(target, randomness.sample(slots, randomness.randrange(1, len(slots) + 1)), randomness)
        case _:
            slots.append(target.new_slot())
            target.prefill(slots[-1], [randomness.randrange(200) for _ in range(randomness.choice([1, 5, 300]))])


def step(target: ToldTarget, batch: list[Slot], randomness: random.Random) -> None:
    """Score a tree for each, and commit some path of it."""
    trees = [random_tree(randomness) for _ in batch]
    target.score(list(zip(batch, trees, strict=True)))
    for slot, tree in zip(batch, trees, strict=True):
        node, path = randomness.randrange(-1, len(tree)), []
        while node != ROOT:
            path.insert(0, node)
            node = tree.parents[node]
        if randomness.random() < 0.9:
            target.commit(slot, tree, path, randomness.randrange(200))
        target.discard(slot)


def test_a_follower_that_is_out_of_step_says_so() -> None:
    target = ToldTarget()
    slot = target.new_slot()
    target.prefill(slot, [1, 2, 3])
    target.theirs()[slot.kv.number].rewind(1)
    with pytest.raises(GenerationError, match="1 tokens here and 2 in the first process"):
        target.plain_step(slot)
    with pytest.raises(GenerationError, match="lost each other earlier"):
        target.plain_step(slot)


def test_running_out_of_memory_before_a_forward_leaves_the_processes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToldTarget()
    slot = target.new_slot()
    target.prefill(slot, [1, 2, 3])
    expected = target.plain_step(slot)
    with monkeypatch.context() as patched:
        patched.setattr(MirroredKV, "reserve", lambda cache, rows: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            target.plain_step(slot)
    assert torch.equal(target.plain_step(slot), expected)


class TwoProcesses(ToldTarget):
    """A target whose keys and values are stored by two processes of this machine."""

    processes_here = 2


def test_processes_of_one_machine_share_its_memory() -> None:
    for target, share in ((ToldTarget(), 500), (TwoProcesses(), 250)):
        assert Admission(target, EngineLimits(), free=lambda device: 1000).max_kv_bytes == share
