"""The hook in the hands of SGLang's n-gram worker: what it is given, what it may return, and whose drafts they are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.services import END
from helpers.sglang_fakes import Scheduler, leaf_paths, parents_of, worker_of
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.tree import TreeBuilder
from precedent_engines import DraftingService
from precedent_sglang.hook import Hook
from precedent_sglang.nodes import merged
from precedent_sglang.settings import Settings

ORDER = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, END]

Schedule = Callable[..., Scheduler]


def run(scheduler: Scheduler, grammar: bool = False) -> int:
    """Steps until everything has ended."""
    steps = 0
    while scheduler.running:
        scheduler.step(grammar)
        steps += 1
    return steps


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stored_answer_is_proposed_and_accepted(schedule: Schedule, overlap: bool) -> None:
    scheduler = schedule(overlap=overlap)
    scheduler.add("a", [1, 2, 3], ORDER)
    assert scheduler.step() == {"a": 7}
    assert scheduler.proposed["a"] == [ORDER[1:8]]
    assert scheduler.step() == {"a": 1}


def test_sglangs_own_candidates_fill_what_is_left(schedule: Schedule) -> None:
    """Ours stand first; one that both have is there once."""
    scheduler = schedule()
    scheduler.worker.ngram_corpus.follows[47] = [[48, 99], [77, 78]]
    scheduler.add("a", [1, 2, 3], [47, 77, 78, 5])
    scheduler.step()
    assert sorted(scheduler.proposed["a"]) == [[48, 49, END, 0], [48, 99], [77, 78]]


def test_without_a_tenants_completion_sglangs_arrays_pass_as_they_are(hook: Hook, schedule: Schedule) -> None:
    scheduler = schedule()
    scheduler.worker.ngram_corpus.follows[90] = [[91, 92], [93]]
    scheduler.add("a", [1, 2, 3], [90, 91, 94])
    scheduler.step()
    assert sorted(scheduler.proposed["a"]) == [[0], [0], [0], [0], [91, 92], [93]]


def test_each_tenant_has_its_own_server(service: DraftingService) -> None:
    """Another tenant's answer is never proposed, nor any without a tenant."""
    for tenant, accepted in (("north", 0), ("south", 3), (None, 0)):
        hook = Hook(Settings(tenant=tenant), service, lambda ids: "an order")
        scheduler = Scheduler(worker_of(hook))
        scheduler.add(f"of {tenant}", [1, 2, 3], [50, 51, 52, 53, 9])
        assert scheduler.step() == {f"of {tenant}": accepted}


def test_a_request_that_is_gone_gives_its_id_free(schedule: Schedule, service: DraftingService) -> None:
    scheduler = schedule()
    scheduler.add("a", [1, 2, 3], ORDER)
    run(scheduler)
    for number in (2, 3):
        scheduler.add("a", [7, 8], ORDER)
        assert scheduler.step() == {"a": 7}
        assert (service.metrics().running, service.metrics().num_requests) == (1, number)
        scheduler.running.clear()  # the client goes away after one step


def test_nothing_follows_the_end_unless_it_is_ignored(schedule: Schedule) -> None:
    scheduler = schedule(width=4)
    scheduler.add("a", [60, END, 61, 62, 60], [END, 5, 5])
    scheduler.add("b", [60, END, 61, 62, 60], [END, 61, 62, 60, 5]).sampling_params.ignore_eos = True
    assert scheduler.step() == {"a": 0, "b": 3}


def test_a_prompt_beyond_the_context_is_sglangs_alone(schedule: Schedule, hook: Hook) -> None:
    scheduler = schedule()
    scheduler.add("a", [1] * 300, ORDER)
    assert scheduler.step() == {"a": 0}
    assert hook.counts()["refused_requests"] == 1
    assert hook.counts()["failed_steps"] == 0


BROKEN: dict[str, Callable[[Any], None]] = {
    "tokens are missing": lambda batch: batch.seq_lens_cpu.add_(1),
    "the answer shrank": lambda batch: batch.seq_lens_cpu.sub_(2),
    "no lengths": lambda batch: vars(batch).pop("seq_lens_cpu", None),
    "a request of another kind": lambda batch: vars(batch.reqs[0]).pop("sampling_params", None),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_batch_of_another_kind_costs_drafts_only(
    hook: Hook, broken: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's own arrays are handed on, untouched; one message, and every step counts."""
    worker = worker_of(hook)
    scheduler = Scheduler(worker)
    scheduler.add("a", [1, 2, 3], ORDER)
    for steps in (1, 2):
        batch = scheduler._batch(list(scheduler.running.values()), False)
        plain = super(type(worker), worker)._prepare_draft_tokens(batch)
        broken(batch)
        tokens, mask = worker._prepare_draft_tokens(batch)
        assert np.array_equal(tokens, plain[0])
        assert np.array_equal(mask, plain[1])
        assert hook.counts()["failed_steps"] == steps
    assert caplog.text.count("drafting failed") == 1


TREES = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), max_size=11)
"""Nodes as (which earlier node is the parent, token), with few tokens so that siblings meet."""


def tree_of(nodes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Parents and tokens without two equal siblings."""
    parents, tokens, seen = list[int](), list[int](), set[tuple[int, int]]()
    for choice, token in nodes:
        parent = choice % (len(tokens) + 1) - 1
        if (parent, token) not in seen:
            seen.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return parents, tokens


@settings(deadline=None)
@given(ours=TREES, theirs=TREES, width=st.integers(12, 16))
def test_any_two_trees_make_one(ours: Any, theirs: Any, width: int) -> None:
    """Of the right size, with all of ours, no token twice below a parent, and nothing that nobody proposed."""
    parents, tokens = tree_of(ours)
    builder = TreeBuilder()
    builder.add_fixed_tree(tokens, parents, [("recall",)] * len(tokens))
    their_parents, their_tokens = tree_of(theirs)
    padded = [7, *their_tokens, *[0] * (width - 1 - len(their_tokens))]
    above = [-1, *(parent + 1 for parent in their_parents), *[0] * (width - 1 - len(their_tokens))]
    mask = np.eye(width, dtype=np.int64)
    for node in range(1, width):
        mask[node, : above[node] + 1] = mask[above[node], : above[node] + 1]
    found, found_mask = merged(builder.build(), np.array(padded, dtype=np.int64), mask)
    assert (found.shape, found_mask.shape, found.dtype, found_mask.dtype) == (
        (width,),
        (width, width),
        np.int64,
        np.int64,
    )
    got = parents_of(found_mask)
    assert found[0] == 7
    assert len(set(zip(got[1:], found[1:].tolist(), strict=True))) == width - 1
    depths = [0]
    for parent in got[1:]:
        depths.append(depths[parent] + 1)
    assert depths == sorted(depths)
    prefixes = _prefixes(found, got)
    mine, own = _prefixes([7, *tokens], [-1, *(parent + 1 for parent in parents)]), _prefixes(padded, above)
    assert mine <= prefixes
    assert all(_unpadded(path) in mine | own | {()} for path in prefixes)


def _prefixes(tokens: Any, parents: Any) -> set[tuple[int, ...]]:
    return {tuple(path[:end]) for path in leaf_paths(tokens, parents) for end in range(1, len(path) + 1)}


def _unpadded(path: tuple[int, ...]) -> tuple[int, ...]:
    while path and path[-1] == 0:
        path = path[:-1]
    return path


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.lists(st.integers(40, 52), min_size=1, max_size=14), min_size=1, max_size=4),
    overlap=st.booleans(),
    width=st.integers(2, 9),
    settles=st.lists(st.booleans(), max_size=30),
)
def test_answers_are_what_the_target_says(
    requests: list[list[int]], overlap: bool, width: int, settles: list[bool]
) -> None:
    """Whatever is accepted, and whenever results are processed: no step fails, and the sessions know every token."""
    service, answers = _Recording(), {str(row): answer for row, answer in enumerate(requests)}
    hook = Hook(Settings(tenant="north"), service, lambda ids: "")  # type: ignore[arg-type]
    scheduler = Scheduler(worker_of(hook, overlap=overlap, width=width))
    for rid, answer in answers.items():
        scheduler.add(rid, [1, 2], answer)
    told = {rid: scheduler.running[rid].req for rid in answers}
    for settle in [*settles, *[False] * 60]:
        if settle:
            scheduler.settle()
        if scheduler.running:
            scheduler.step()
    scheduler.settle()
    assert hook._requests is not None
    assert hook._requests.num_failures == 0
    assert {rid: list(req.output_ids)[: len(answers[rid])] for rid, req in told.items()} == {
        rid: answer[: len(told[rid].output_ids)] for rid, answer in answers.items()
    }
    for rid, known in service.known.items():
        assert known == answers[rid][: len(known)]


class _Recording:
    """A service whose sessions note what was committed, and propose each token's successor."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}

    def begin(self, rid: str, prompt: Any, **_: Any) -> Any:
        known = self.known[rid] = []

        def tree(most: int) -> Any:
            builder = TreeBuilder()
            builder.add_fixed_tree(
                list(range(known[-1] + 1, known[-1] + 1 + most)), list(range(-1, most - 1)), [("",)] * most
            )
            return builder.build()

        return SimpleNamespace(committed=known.extend, tree=tree, end=lambda: None)
