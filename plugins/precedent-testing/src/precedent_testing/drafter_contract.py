"""The contract that every drafter keeps, as a pytest class: subclass it and implement `make_drafter`.

class TestMyDrafter(DrafterContract):
    def make_drafter(self) -> Drafter:
        return MyDrafter()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from precedent.config import SamplingParams
from precedent.drafters.base import NODE, Candidates, Drafter, DrawSession
from precedent.drafters.request import Request
from precedent.sampling.rng import CounterRng
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent_testing.trees import check_tree


class DrafterContract:
    """What the engine relies on. All token ids used here are below `vocab_size`."""

    vocab_size: int = 16
    output: Sequence[int] = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9)

    def make_drafter(self) -> Drafter:
        """Create a drafter; two of them must behave alike."""
        raise AssertionError("a subclass of DrafterContract must implement make_drafter")

    def make_prompt(self) -> tuple[int, ...]:
        """A prompt that gives the drafter something to propose; override it if repetition is not enough."""
        return (1, 5, 6, 7, 8, 9, 10, 2, 5, 6, 7, 11, 12, 5, 6)

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A greedy request of the default tenant that ends with token 2."""
        prompt = self.make_prompt() if prompt_ids is None else tuple(prompt_ids)
        return Request("contract", prompt, SamplingParams(), query="contract", end_token_ids=frozenset({2}))

    @pytest.mark.parametrize("budget", [1, 2, 7, 64])
    def test_candidates_are_a_trie_within_the_budget(self, budget: int) -> None:
        """At every step of an output, parents precede children, siblings differ, and estimates are probabilities."""
        session = self.make_drafter().begin(self.make_request())
        for token in self.output:
            self.check_candidates(session.match(budget), budget)
            session.committed([token])
        session.end()

    def test_fixed_candidates_are_proposed_somewhere(self) -> None:
        """A drafter that does not sample proposes something along the output, or the contract would test nothing."""
        drafter = self.make_drafter()
        if not isinstance(drafter.begin(self.make_request()), DrawSession):
            assert any(len(candidates) for candidates in self.run(drafter, 8))

    def test_budget_zero_gives_nothing(self) -> None:
        """With a budget of 0, nothing is proposed."""
        session = self.make_drafter().begin(self.make_request())
        assert len(session.match(0)) == 0
        session.committed(self.output)
        assert len(session.match(0)) == 0
        session.end()

    def test_equal_input_gives_equal_candidates(self) -> None:
        """Two new drafters propose the same candidates for the same request."""
        assert self.run(self.make_drafter(), 8) == self.run(self.make_drafter(), 8)

    def test_matching_twice_changes_nothing(self) -> None:
        """A discarded step can be matched again with the same result."""
        session = self.make_drafter().begin(self.make_request())
        session.committed(self.output[:3])
        assert session.match(8) == session.match(8)
        session.end()

    def test_commits_of_any_size_lead_to_the_same_place(self) -> None:
        """The next candidates carry the same tokens whether the output was committed one by one or at once."""
        at_once, one_by_one = (self.make_drafter().begin(self.make_request()) for _ in range(2))
        at_once.committed(self.output)
        for token in self.output:
            one_by_one.committed([token])
        assert at_once.match(8).token_ids == one_by_one.match(8).token_ids

    def test_nothing_after_the_end(self) -> None:
        """After `end`, which may be called twice, nothing is proposed and commits are ignored."""
        session = self.make_drafter().begin(self.make_request())
        session.match(8)
        session.end()
        session.end()
        session.committed(self.output)
        assert len(session.match(8)) == 0

    def test_inputs_are_left_alone(self) -> None:
        """Neither the request nor a committed list is changed, and changing that list later has no effect."""
        request, committed = self.make_request(), list(self.output)
        session, other = (self.make_drafter().begin(request) for _ in range(2))
        session.committed(committed)
        assert committed == list(self.output)
        assert request == self.make_request()
        committed.clear()
        other.committed(list(self.output))
        assert session.match(8) == other.match(8)

    def test_changing_returned_candidates_has_no_effect(self) -> None:
        """The planner owns what `match` returns."""
        session, other = (self.make_drafter().begin(self.make_request()) for _ in range(2))
        taken = session.match(8)
        taken.nodes["token_id"] += 1
        taken.nodes["estimate"] = 0.5
        other.match(8)
        for each in (session, other):
            each.committed(self.output[:2])
        assert session.match(8) == other.match(8)

    @pytest.mark.parametrize("prompt", [(), (3,)], ids=["empty", "one token"])
    def test_short_prompts(self, prompt: tuple[int, ...]) -> None:
        """An empty prompt and a prompt of one token work through the whole lifecycle."""
        session = self.make_drafter().begin(self.make_request(prompt))
        for token in self.output:
            self.check_candidates(session.match(8), 8)
            session.committed([token])
        session.end()

    def test_requests_do_not_disturb_each_other(self) -> None:
        """A second request on the same drafter does not change the candidates of the first."""
        alone = self.run(self.make_drafter(), 8)
        drafter = self.make_drafter()
        first, second = drafter.begin(self.make_request()), drafter.begin(self.make_request((3, 4, 3)))
        together = []
        for token in self.output:
            together.append(first.match(8))
            second.match(8)
            second.committed([token, 4])
            first.committed([token])
        assert together == alone

    def test_draws_respect_their_number(self) -> None:
        """A session draws at most as many samples as requested."""
        session, builder = self.drawing(self.make_drafter(), self.make_request()), TreeBuilder()
        session.draw(builder, 3, CounterRng(entropy=7, step=0))
        tree: CandidateTree = builder.build()
        check_tree(tree)
        assert len(tree.candidates) <= 3
        session.end()

    @pytest.mark.parametrize("mode", ["greedy", "traversal"])
    def test_draws_are_among_the_tokenizers_ids(self, mode: str) -> None:
        """If the target cuts its rows before the end of a padded head, a drafter's distributions end there too."""
        drafter, num_tokens = self.make_drafter(), self.vocab_size - 3
        sampling = SamplingParams(temperature=0.0 if mode == "greedy" else 3.0)
        request = replace(self.make_request(), sampling=sampling, mode=mode, num_tokens=num_tokens)
        for step in range(8):
            session, builder = self.drawing(drafter, request), TreeBuilder()
            session.draw(builder, 3, CounterRng(entropy=7, step=step))
            session.end()
            assert all(token < num_tokens for token in builder.token_ids)
            distributions = [draw.distribution for draw in builder.build().candidates]
            assert all(
                distribution.row.shape == (num_tokens,)
                for distribution in distributions
                if isinstance(distribution, Sampled)
            )

    def test_runners_up_respect_their_number(self) -> None:
        """Runners-up are new in the tree, recorded as such, and at most as many as requested."""
        session, builder = self.drawing(self.make_drafter(), self.make_request()), TreeBuilder()
        if not session.names_runners_up:
            pytest.skip("this drafter names no runners-up")
        session.draw(builder, 3, CounterRng(entropy=7, step=0))
        before = builder.build()
        session.draw_runners_up(builder, 2, CounterRng(entropy=7, step=0))
        after = builder.build()
        check_tree(after)
        assert after.token_ids[: len(before)] == before.token_ids
        assert builder.runners_up == set(range(len(before), len(after)))
        assert 0 < len(builder.runners_up) <= 2
        session.end()

    def drawing(self, drafter: Drafter, request: Request) -> DrawSession:
        """Begin a session that samples; skips the test if the drafter does not sample."""
        session = drafter.begin(request)
        if not isinstance(session, DrawSession):
            pytest.skip("this drafter does not sample")
        return session

    def run(self, drafter: Drafter, budget: int) -> list[Candidates]:
        """Collect the candidates of one request that commits `output` token by token."""
        session, found = drafter.begin(self.make_request()), []
        for token in self.output:
            found.append(session.match(budget))
            session.committed([token])
        session.end()
        return found

    def check_candidates(self, candidates: Candidates, budget: int) -> None:
        """Fail unless these are valid candidates of at most `budget` nodes."""
        number = len(candidates)
        assert number <= budget
        assert candidates.nodes.dtype == NODE
        assert all(ROOT <= parent < node for node, parent in enumerate(candidates.parents)), (
            "a parent follows its child"
        )
        pairs = list(zip(candidates.parents, candidates.token_ids, strict=True))
        assert len(set(pairs)) == number, "two siblings carry the same token"
        assert all(0 <= token < self.vocab_size for token in candidates.token_ids)
        assert all(0.0 < estimate <= 1.0 for estimate in candidates.estimates)
        below_end = [node for node, parent in enumerate(candidates.parents)
                     if parent != ROOT and candidates.token_ids[parent] == 2]  # fmt: skip
        assert not below_end, "a candidate hangs below the token that ends the answer"
