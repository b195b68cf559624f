"""The drafter that recalls stored completions: which it chooses, where it resumes, and what it never proposes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from helpers.listed_completions import (
    END,
    TOKENIZER,
    ListedCompletions,
    first_path,
    paths,
    paths_in_order,
    recall_from,
    request,
)

from precedent.cache import Completion, Hit, SpeculationCache
from precedent.drafters.base import Drafter
from precedent.drafters.recall.drafter import RecallDrafter
from precedent.runtime.background import AtOnce
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.embedders import HashEmbedder


class Later(Executor):
    """Keeps work until it is told to run it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keep it."""
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        """Run all that waits and was not cancelled."""
        waiting, self.waiting = self.waiting, []
        for future, work in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(work())


class TestRecallContract(DrafterContract):
    """Recall keeps the drafter contract."""

    def make_drafter(self) -> Drafter:
        """Three completions, one of which is near."""
        cache = ListedCompletions()
        for tokens in ([5, 6, 7, 8, 9, 10, 2], [5, 6, 7, 8, 9, 5, 11, 12, 2], [3, 4, 5, 6, 13, 14, 2]):
            cache.add(tokens)
        cache.near["contract"] = {1: 0.9, 2: 0.4}
        return recall_from(cache)


def test_step_zero_is_decided_by_similarity() -> None:
    """With no token to match yet, the completion of the nearest request comes first, and the others still take part."""
    cache = ListedCompletions()
    cache.add([10, 11, 12, END])
    cache.add([20, 21, 22, END])
    cache.near = {"ten": {1: 0.84, 2: 0.72}, "twenty": {1: 0.72, 2: 0.84}}  # one bin, two weights
    for query, nearest, other in (("ten", 10, 20), ("twenty", 20, 10)):
        found = recall_from(cache).begin(request(query=query)).match(8)
        assert first_path(found)[0] == nearest
        estimates = dict(zip(paths_in_order(found), found.estimates, strict=True))
        assert estimates[nearest,] > 2 * estimates[other,] > 0


def test_an_exactly_equal_prompt_beats_every_similarity() -> None:
    """The completion that answered this very prompt comes first, even before the search is done."""
    cache = ListedCompletions()
    cache.add([20, 21, END])
    cache.add([10, 11, END], prompt=(7, 7, 7))
    cache.add([20, 21, END])
    cache.near["q"] = {1: 0.99, 2: 0.2, 3: 0.99}
    assert first_path(recall_from(cache).begin(request((7, 7, 7))).match(8)) == [10, 11, END]
    assert first_path(recall_from(cache).begin(request((7, 7))).match(8))[0] == 20


def test_an_exact_repeat_is_one_long_chain() -> None:
    """A stored answer to the same prompt is drafted in chunks of 64 tokens, straight on after each commit."""
    answer = [100 + number for number in range(150)] + [END]
    cache = ListedCompletions()
    cache.add(answer, prompt=(1, 2, 3))
    cache.add([900, 901, END])
    session = recall_from(cache).begin(request())
    assert min(session.match(64).estimates[1:50]) > 0.95
    at = 0
    for _ in range(2):
        chunk = first_path(session.match(64))
        assert len(chunk) >= 62
        assert chunk == answer[at : at + len(chunk)]
        session.committed(answer[at : at + 65])
        at += 65
    assert first_path(session.match(64)) == answer[at:]


ORDER = list(range(600, 616))
REST = [70, 71, 72, 73, 74, END]


def with_common_marks(cache: ListedCompletions, mark: int) -> None:
    """Forty other completions in which `mark` is followed by something else."""
    for number in range(40):
        cache.add([200 + number, mark, 300, 301, 302, END])


@pytest.mark.parametrize(
    "slot", [[500], [500, 501, 502], [500, 501, 502, 503, 504]], ids=["shorter", "equal", "longer"]
)
def test_drafting_resumes_behind_a_slot_that_differs(slot: list[int]) -> None:
    """The live output names another order id; one token behind it, drafting goes on in the completion it followed."""
    mark = 69
    cache = ListedCompletions()
    cache.add([*ORDER, 400, 401, 402, mark, *REST])
    with_common_marks(cache, mark)
    session = recall_from(cache).begin(request())
    session.match(16)
    session.committed(ORDER)
    assert first_path(session.match(16))[0] == 400
    session.committed([*slot, mark])
    assert first_path(session.match(16)) == REST


def test_without_a_trail_the_majority_wins_behind_the_slot() -> None:
    """Control of the test above: an output that never followed the completion is not drawn into it."""
    mark = 69
    cache = ListedCompletions()
    cache.add([*ORDER, 400, mark, *REST])
    with_common_marks(cache, mark)
    session = recall_from(cache).begin(request())
    session.committed([800, 801, 802, 500, mark])
    assert first_path(session.match(16))[0] == 300


def test_drafting_resumes_over_several_slots() -> None:
    """What a completion earned before the first gap carries it over the next ones too."""
    mark = 69
    cache = ListedCompletions()
    cache.add([*ORDER, 400, mark, 80, 81, 401, mark, *REST])
    with_common_marks(cache, mark)
    session = recall_from(cache).begin(request())
    for tokens in (ORDER, [500, 501, mark], [80, 81], [502, 503, mark]):
        session.match(16)
        session.committed(tokens)
    assert first_path(session.match(16)) == REST


def test_tenants_never_meet() -> None:
    """A tenant is offered nothing of another's, neither at step 0 nor by a matching suffix."""
    cache = ListedCompletions()
    cache.add([10, 11, 12, 13, END], tenant="other")
    cache.near["q"] = {1: 1.0}
    drafter = recall_from(cache)
    assert first_path(drafter.begin(request(tenant="other")).match(8)) == [10, 11, 12, 13, END]
    session = drafter.begin(request(tenant="own"))
    assert len(session.match(8)) == 0
    session.committed([10, 11])
    assert len(session.match(8)) == 0


def test_new_completions_are_seen_by_the_next_request() -> None:
    """The index grows by what was written back meanwhile, each completion once."""
    cache = ListedCompletions()
    drafter = recall_from(cache)
    assert len(drafter.begin(request()).match(8)) == 0
    cache.add([10, 11, END])
    assert first_path(drafter.begin(request()).match(8)) == [10, 11, END]
    drafter.begin(request())
    assert drafter._memories.of("default").index.num_tokens == 3


def test_a_forgotten_completion_is_never_proposed_again() -> None:
    """What the cache forgot is erased before the next request, also for a request that is running."""
    cache = ListedCompletions()
    gone = cache.add([10, 11, 12, 13, 14, END])
    cache.add([20, 21, END])
    drafter = recall_from(cache)
    running = drafter.begin(request())
    running.match(8)
    running.committed([10, 11])
    assert first_path(running.match(8)) == [12, 13, 14, END]
    cache.forget(gone)
    later = cache.add([30, 31, END])
    assert paths(drafter.begin(request()).match(8)) == {(20,), (20, 21), (20, 21, END), (30,), (30, 31), (30, 31, END)}
    assert len(running.match(8)) == 0
    assert gone not in drafter._memories.of("default").index
    assert later in drafter._memories.of("default").index


def test_recall_works_on_the_speculation_cache() -> None:
    """Write-back, search, exact prompt, credit and forgetting through the library's own cache in memory."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        cancel = Completion((20, 21, END), TOKENIZER, "model", query="cancel the order of yesterday")
        refund = Completion((10, 11, 12, END), TOKENIZER, "model", query="where is my refund")
        ids = [cache.insert(completion) for completion in (cancel, refund)]
        drafter = RecallDrafter(cache, TOKENIZER, AtOnce())
        session = drafter.begin(request(query="where is the refund of mine"))
        assert first_path(session.match(8)) == [10, 11, 12, END]
        session.committed([10, 11, 12, END])
        session.end()
        drafter.close()
        assert {c.id: (c.accepted, c.rejected) for c in cache.list()} == {ids[0]: (0, 1), ids[1]: (4, 0)}
        cache.forget(ids=[ids[1]])
        assert first_path(drafter.begin(request(query="where is my refund")).match(8)) == [20, 21, END]


def test_matching_does_not_wait_for_the_search() -> None:
    """Before the hits arrive drafting works unweighted; afterwards they weigh."""
    cache, executor = ListedCompletions(), Later()
    cache.add([10, 11, END])
    cache.add([20, 21, END])
    cache.near["q"] = {1: 0.95, 2: 0.2}
    drafter = RecallDrafter(cache, TOKENIZER, executor)
    drafter.begin(request(query=""))
    executor.run()
    session = drafter.begin(request())
    before = session.match(8)
    executor.run()
    after = session.match(8)
    estimates = [dict(zip(paths_in_order(c), c.estimates, strict=True)) for c in (before, after)]
    assert estimates[0][10,] == pytest.approx(estimates[0][20,], rel=1e-3)  # the newer one weighs a trace more
    assert estimates[1][10,] > estimates[0][10,]


def test_credit_goes_once_to_the_completions_that_were_right_or_wrong() -> None:
    """Accepted tokens along the committed path, rejected ones beside it, one call at the end."""
    cache = ListedCompletions()
    right, wrong = cache.add([10, 11, 12, END]), cache.add([20, 21, 22, END])
    session = recall_from(cache).begin(request())
    session.match(16)
    session.committed([10, 11, 12, 77])
    assert cache.credited == []
    session.end()
    session.end()
    assert cache.credited == [{right: (3, 1), wrong: (0, 1)}]


def test_a_failing_search_is_said_and_drafting_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """An embedder that breaks costs the similarity, not the request."""

    class Broken(ListedCompletions):
        def recall(self, query: str, *, tenant: str, tokenizer: str, k: int = 64) -> list[Hit]:
            raise RuntimeError("the embedder is gone")

    cache = Broken()
    cache.add([10, 11, END])
    drafter = recall_from(cache)
    for _ in range(5):
        assert first_path(drafter.begin(request()).match(8)) == [10, 11, END]
    assert caplog.text.count("the speculation cache is switched off") == 1
    assert "the embedder is gone" in caplog.text


def test_what_was_read_ahead_is_drafted_before_the_first_search() -> None:
    """A new process is warm at its first request, for the tenants that it read ahead and for no others."""
    cache, executor = ListedCompletions(), Later()
    cache.add([10, 11, END], tenant="shop")
    cache.add([20, 21, END], tenant="bank")
    drafter = RecallDrafter(cache, TOKENIZER, executor)
    drafter.read_ahead("shop")
    assert first_path(drafter.begin(request(tenant="shop")).match(8)) == [10, 11, END]
    assert len(drafter.begin(request(tenant="bank")).match(8)) == 0
