# ruff: noqa: D102 - a test's name says what it shows
"""The contract that every target keeps, as a pytest class: subclass it and define the fixture `target`.

class TestMyTarget(TargetContract):
    @pytest.fixture
    def target(self):
        return MyTarget()

The tests compare a target with itself: a scored tree with plain steps along every path, a restored prefix with a
computed one. That its logits are right is for its own tests to show.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from precedent.errors import ContextOverflowError, PromptError, UnsupportedError
from precedent.target.contract import NOTHING_PENDING, Slot, Target
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder


class TargetContract:
    """The tests. `tolerance` is the accepted difference of logits, `num_tokens` bounds the token ids used."""

    tolerance: float = 1e-9
    num_tokens: int = 200

    def ids(self, seed: int, count: int) -> list[int]:
        """Tokens of a text."""
        choose = random.Random(seed)
        return [choose.randrange(self.num_tokens) for _ in range(count)]

    def tree(self, target: Target, seed: int, num_nodes: int = 6) -> CandidateTree:
        """A random tree with at most as many leaves and rows as the target takes."""
        choose, builder, able = random.Random(seed), TreeBuilder(), target.capabilities
        nodes, parents = [ROOT], set[int]()
        for token in self.ids(seed, min(num_nodes, (able.most_rows or num_nodes + 1) - 1)):
            leaves = len(nodes) - 1 - len(parents)
            extends = able.most_leaves is not None and leaves >= able.most_leaves
            parent = nodes[-1] if extends else choose.choice(nodes)
            parents |= {parent} - {ROOT}
            nodes.append(builder.add_fixed(parent, token, "contract"))
        return builder.build()

    def prefilled(self, target: Target, prompt: list[int], chunk: int = 512) -> Slot:
        """A slot that holds a prompt."""
        slot = target.new_slot()
        target.prefill(slot, prompt, chunk=chunk)
        return slot

    def next_logits(self, target: Target, slot: Slot) -> Tensor:
        """Logits after the pending token, `[vocab_size]`; nothing is committed."""
        logits = target.plain_step(slot)[0].clone()
        target.discard(slot)
        return logits

    def check_close(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=self.tolerance)

    def follow(self, target: Target, slot: Slot, token_ids: list[int]) -> Tensor:
        """Commit tokens one by one; returns the logits after the last, `[vocab_size]`."""
        for token in token_ids:
            target.plain_step(slot)
            target.commit(slot, EMPTY_TREE, (), token)
        return self.next_logits(target, slot)

    def test_a_prompt_is_committed_but_for_its_last_token(self, target: Target) -> None:
        prompt = self.ids(1, 20)
        slot = self.prefilled(target, prompt)
        assert ([*slot.token_ids, slot.pending])[-len(prompt) :] == prompt or target.encodes_prompt
        assert target.plain_step(slot).shape == (1, self.next_logits(target, slot).shape[0])

    def test_a_prompt_is_computed_in_pieces_of_the_callers_size(self, target: Target) -> None:
        prompt, slot = self.ids(2, 20), target.new_slot()
        target.begin_prefill(slot, prompt)
        with pytest.raises(ValueError, match=r"prefill|pending"):
            target.plain_step(slot)
        while not target.continue_prefill(slot, prompt, 8):
            assert slot.pending == NOTHING_PENDING
        self.check_close(self.next_logits(target, slot), self.next_logits(target, self.prefilled(target, prompt)))

    @pytest.mark.parametrize("rows", [1, 7, 40])
    def test_a_scored_prompt_equals_plain_steps_and_is_prefilled(self, target: Target, rows: int) -> None:
        if target.encodes_prompt:
            pytest.skip("its prompts are not predicted")
        prompt, slot, rows = self.ids(17, 24), target.new_slot(), min(rows, target.capabilities.most_rows or rows)
        target.begin_prefill(slot, prompt)
        scored = list[Tensor]()
        while len(slot.token_ids) < len(prompt) - 1:
            scored += target.score_prompt(slot, prompt, rows).clone()
        plain = self.prefilled(target, prompt[:1])
        expected = self.next_logits(target, plain)
        for logits, token in zip(scored, prompt[1:], strict=True):
            self.check_close(logits, expected)
            expected = self.follow(target, plain, [token])
        assert (slot.token_ids, slot.pending) == (prompt[:-1], prompt[-1])
        self.check_close(self.next_logits(target, slot), expected)

    def test_an_empty_prompt_is_refused(self, target: Target) -> None:
        with pytest.raises(PromptError, match="empty"):
            target.prefill(target.new_slot(), [])

    def test_a_prompt_longer_than_the_context_is_refused(self, target: Target) -> None:
        if target.context_length > 1 << 16:
            pytest.skip("its context is too long to build a longer prompt")
        with pytest.raises(ContextOverflowError, match=str(target.context_length)):
            target.prefill(target.new_slot(), [1] * (target.context_length + 1))

    def test_a_second_prompt_computes_only_what_differs(self, target: Target) -> None:
        first, slot = self.ids(3, 40), target.new_slot()
        target.prefill(slot, first)
        second = [*first[:33], *self.ids(4, 5)]
        nearest = 0 if target.encodes_prompt else target.nearest(slot, 33)
        assert target.prefill(slot, second) in (nearest, 33)  # the texts may have one more token in common
        self.check_close(self.next_logits(target, slot), self.next_logits(target, self.prefilled(target, second)))

    def test_a_scored_tree_equals_plain_steps_along_every_path(self, target: Target) -> None:
        prompt, tree = self.ids(5, 24), self.tree(target, 6)
        (scored,) = target.score([(self.prefilled(target, prompt), tree)])
        assert scored.shape[0] == len(tree) + 1
        for node in range(ROOT, len(tree)):
            plain = self.prefilled(target, prompt)
            self.check_close(scored[node + 1], self.follow(target, plain, list(tree.tokens_to(node))))

    def test_a_batch_equals_its_sequences_alone(self, target: Target) -> None:
        batch = [(self.prefilled(target, self.ids(n, 5 + 9 * n)), self.tree(target, n, 2 * n)) for n in range(1, 4)]
        together = [logits.clone() for logits in target.score(batch)]
        for (slot, tree), logits in zip(batch, together, strict=True):
            target.discard(slot)
            (alone,) = target.score([(slot, tree)])
            self.check_close(alone, logits)

    def test_an_accepted_path_leaves_the_slot_as_plain_steps_would(self, target: Target) -> None:
        slot, plain = self.prefilled(target, self.ids(7, 16)), self.prefilled(target, self.ids(7, 16))
        for step in range(4):
            tree = self.tree(target, 10 + step)
            target.score([(slot, tree)])
            path = tree.path_to(random.Random(step).randrange(len(tree)))
            target.commit(slot, tree, path, next_token=step)
            self.follow(target, plain, [*(tree.token_ids[node] for node in path), step])
        assert (slot.token_ids, slot.pending) == (plain.token_ids, plain.pending)
        self.check_close(self.next_logits(target, slot), self.next_logits(target, plain))

    def test_what_is_discarded_leaves_no_trace(self, target: Target) -> None:
        slot = self.prefilled(target, self.ids(8, 16))
        before, token_ids = self.next_logits(target, slot), list(slot.token_ids)
        target.score([(slot, self.tree(target, 9))])
        target.discard(slot)
        target.discard(slot)
        assert slot.token_ids == token_ids
        self.check_close(self.next_logits(target, slot), before)

    def test_a_commit_that_fails_does_not_disturb_the_others(self, target: Target) -> None:
        slots = [self.prefilled(target, self.ids(n, 12)) for n in (20, 21)]
        trees = [self.tree(target, n) for n in (22, 23)]
        target.score(list(zip(slots, trees, strict=True)))
        errors = target.commit_all([(slots[0], trees[0], (99,), 1), (slots[1], trees[1], trees[1].path_to(0), 2)])
        assert isinstance(errors[0], Exception)
        assert errors[1] is None
        plain = self.prefilled(target, self.ids(21, 12))
        expected = self.follow(target, plain, [*trees[1].tokens_to(0), 2])
        self.check_close(self.next_logits(target, slots[1]), expected)

    def test_a_fork_leaves_its_origin_alone(self, target: Target) -> None:
        if target.encodes_prompt:
            pytest.skip("prompts share nothing where an encoder reads them")
        prompt = self.ids(11, 40)
        origin = self.prefilled(target, prompt)
        before, length = self.next_logits(target, origin), target.nearest(origin, 30)
        branch = target.fork(origin, length, room=60)
        assert branch.token_ids == prompt[:length]
        other = [*prompt[:length], *self.ids(12, 5)]
        target.prefill(branch, other)
        self.check_close(self.next_logits(target, origin), before)
        self.check_close(self.next_logits(target, branch), self.next_logits(target, self.prefilled(target, other)))

    @pytest.mark.parametrize("length", [0, 7, 19])
    def test_a_slot_goes_back_as_far_as_it_says(self, target: Target, length: int) -> None:
        prompt = self.ids(13, 20)
        slot = self.prefilled(target, prompt)
        if target.encodes_prompt:
            pytest.skip("its slots hold answers alone")
        nearest = target.nearest(slot, length)
        assert nearest == length if target.capabilities.rewinds_anywhere else nearest <= length
        assert target.rewind(slot, length) == nearest == len(slot.token_ids)
        target.prefill(slot, prompt)
        self.check_close(self.next_logits(target, slot), self.next_logits(target, self.prefilled(target, prompt)))

    def test_a_saved_prefix_can_be_restored(self, target: Target) -> None:
        prompt = self.ids(14, 30)
        slot = self.prefilled(target, prompt[:21])
        try:
            saved = target.save(slot, 20)
            assert target.identity() == target.identity()
        except UnsupportedError:
            pytest.skip("it saves no prefixes")
        assert sum(part.nbytes for part in saved) == target.saved_bytes(20)
        restored = target.restore(prompt[:20], saved, room=40)
        assert target.prefill(restored, prompt) == 20
        self.check_close(self.next_logits(target, restored), self.next_logits(target, self.prefilled(target, prompt)))
        with pytest.raises(ValueError, match="not of this model"):
            target.restore(prompt[:20], [part[..., :-1] for part in saved])

    def test_a_slot_holds_no_more_than_was_announced(self, target: Target) -> None:
        slot, tree = self.prefilled(target, self.ids(15, 50)), self.tree(target, 16)
        if target.slot_bytes(target.new_slot()):
            pytest.skip("it sets its memory aside at the start")
        target.score([(slot, tree)])
        most = target.request_bytes(50, 10, len(tree) + 1, len(tree) + 1)
        assert 0 < target.slot_bytes(slot) <= most
        target.discard(slot)

    def test_hidden_states_are_kept_or_refused(self, target: Target) -> None:
        if target.capabilities.hidden_states:
            assert target.keeps_hidden_states in (False, True)
        else:
            with pytest.raises(UnsupportedError):
                target.keep_hidden_states()
            assert not target.keeps_hidden_states

    def test_a_forward_has_a_cost(self, target: Target) -> None:
        assert target.measure_costs(1) > 0
