"""The drafter under vLLM's contract of `custom_class`, on plain arrays; which worker and which vLLM it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.services import END
from helpers.vllm_fakes import CONTEXT, NORTH, SECRET, SOUTH, FakeRunner, FakeVllm, config
from hypothesis import given
from hypothesis import strategies as st

from precedent.errors import CacheError, UnsupportedError
from precedent_engines import DraftingService
from precedent_vllm import Drafter
from precedent_vllm.note import MAX_CHARACTERS, Note, seal
from precedent_vllm.settings import Settings


@pytest.mark.parametrize("kind", [list, lambda ids: np.array(ids, dtype=np.int32)])
def test_what_was_sampled_may_come_in_any_array(drafter: Drafter, runner: FakeRunner, kind: Any) -> None:
    runner.add("a", [1, 2, 3], NORTH)
    assert runner.step(drafter, {"a": [40]}, kind=kind) == {"a": [41, 42, 43, 44, 45, END]}
    assert runner.step(drafter, {"a": [41, 42, 43]}, kind=kind) == {"a": [44, 45, END]}


def test_the_search_begins_before_the_prompt_is_computed(
    drafter: Drafter, runner: FakeRunner, service: DraftingService
) -> None:
    """And goes on with the session that was begun then; one that leaves before its first token ends."""
    runner.add("a", [1, 2, 3], NORTH)
    runner.add("b", [1, 2], SOUTH)
    drafter.arrived(runner.requests)
    drafter.arrived(runner.requests)
    assert service.metrics().num_requests == 2
    runner.finish("b")
    drafter.arrived(runner.requests)
    service.begin("b", [1, 2]).end()  # refused while a session of that name runs
    assert runner.step(drafter, {"a": [40]}) == {"a": [41, 42, 43, 44, 45, END]}
    assert service.metrics().num_requests == 3


def test_a_request_that_is_gone_gives_its_id_free(
    drafter: Drafter, runner: FakeRunner, service: DraftingService
) -> None:
    """Same id, another tenant: nothing of the first is drafted for the second."""
    runner.add("a", [1, 2, 3], NORTH)
    runner.step(drafter, {"a": [40]})
    runner.finish("a")
    runner.add("a", [1, 2, 3], SOUTH)
    assert runner.step(drafter, {"a": [50]}) == {"a": [51, 52, 53, 54, END]}
    assert runner.step(drafter, {"a": [40]}) == {"a": []}
    runner.finish("a")
    runner.step(drafter, {})
    assert service.metrics().running == 0
    assert service.metrics().num_requests == 2


def test_a_draft_keeps_to_every_bound(make: Callable[..., Drafter], runner: FakeRunner) -> None:
    """The number of tokens that vLLM allows, the rest of the answer without the target's own token, and the context."""
    narrow = make(tokens=2)
    runner.add("short", [1, 2, 3], NORTH, max_tokens=4)
    runner.add("full", [3] * (CONTEXT - 4), NORTH)
    runner.add("long", [1, 2, 3], NORTH)
    first = {"short": [40], "full": [40], "long": [40]}
    assert runner.step(narrow, first) == {"short": [41, 42], "full": [41, 42], "long": [41, 42]}
    assert runner.step(narrow, {"short": [41], "full": [41], "long": [41]}) == {
        "short": [42], "full": [42], "long": [42, 43],
    }  # fmt: skip
    assert runner.step(narrow, {"short": [42], "full": [42], "long": [42]}) == {
        "short": [], "full": [], "long": [43, 44],
    }  # fmt: skip


def test_an_answer_that_ignores_its_end_is_drafted_beyond_it(drafter: Drafter, runner: FakeRunner) -> None:
    runner.add("a", [60, 61, END, 62, 63, 60, 61], NORTH, ignore_eos=True)
    runner.add("b", [60, 61, END, 62, 63, 60, 61], NORTH)
    assert runner.step(drafter, {"a": [END], "b": [END]}) == {"a": [62, 63, 60, 61, END], "b": []}


def test_a_prompt_of_embeddings_gets_no_draft(drafter: Drafter, runner: FakeRunner) -> None:
    runner.add("a", None, NORTH)
    assert runner.step(drafter, {"a": [40]}) == {"a": []}


def test_a_prompt_longer_than_the_context_is_decoded_without_drafts(drafter: Drafter, runner: FakeRunner) -> None:
    runner.input_batch.token_ids_cpu = np.zeros((8, 200), dtype=np.int32)
    runner.add("a", [1] * (CONTEXT + 9), NORTH)
    assert runner.step(drafter, {"a": [40]}) == {"a": []}
    assert drafter.counts()["precedent:refused_requests"] == {"": 1}


def test_a_prediction_longer_than_the_context_is_left_out(
    drafter: Drafter, runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    runner.add("a", [1, 2, 3], seal(Note(tenant="north", query="an order", prediction="word " * 400), SECRET))
    assert runner.step(drafter, {"a": [40]})["a"][:2] == [41, 42]
    assert "shorten it" in caplog.text


def test_a_prediction_is_drafted_without_a_tenant(drafter: Drafter, runner: FakeRunner, tokenizer: Any) -> None:
    ids = tokenizer("the order was sent today")["input_ids"]
    runner.add("a", [1, 2, 3], seal(Note(prediction="the order was sent today"), SECRET))
    assert runner.step(drafter, {"a": ids[:2]})["a"][:2] == ids[2:4]


FORGED = [
    '{"tenant": "north"}',
    "0" * 64 + ":" + '{"on":true,"tenant":"north","workflow_step":"","query":"","tools":"","prediction":null}',
    seal(Note(tenant="north", query="an order"), b"another server's"),
    NORTH[:-2] + " }",
    NORTH.partition(":")[2],
    "é" * 70 + ":{}",
    "\ud800:{}",
    "north",
    ["north"],
    7,
    1.5,
    "x" * (MAX_CHARACTERS + 1),
]


@pytest.mark.parametrize("note", FORGED, ids=range(len(FORGED)))
def test_a_note_without_this_servers_seal_names_no_tenant(drafter: Drafter, runner: FakeRunner, note: Any) -> None:
    runner.add("a", [1, 2, 3], note)
    assert runner.step(drafter, {"a": [40]}) == {"a": []}


def test_a_server_without_keys_may_have_one_tenant(make: Callable[..., Drafter], runner: FakeRunner) -> None:
    drafter = make(settings=Settings(tenant="north", secret=SECRET))
    runner.add("a", [1, 2, 3], None)
    assert runner.step(drafter, {"a": [40]})["a"][:2] == [41, 42]


@pytest.mark.parametrize("note", ["off", seal(Note(on=False, tenant="north"), SECRET)])
def test_a_request_can_switch_speculation_off(drafter: Drafter, runner: FakeRunner, note: str) -> None:
    runner.add("a", [1, 2, 3], note)
    runner.add("b", [1, 2, 3], NORTH)
    assert runner.step(drafter, {"a": [40], "b": [40]}) == {"a": [], "b": [41, 42, 43, 44, 45, END]}


STEPS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 90), max_size=5)), max_size=25)


@given(STEPS, st.randoms(use_true_random=False))
def test_sessions_know_exactly_what_vllm_committed(steps: list[Any], chance: Any) -> None:
    """Any order of arrivals, ends, swaps, waits and pieces: each session's tokens are those of its request."""
    runner, told = FakeRunner(), dict[str, list[int]]()

    class Session:
        def __init__(self, request_id: str) -> None:
            self.request_id = request_id
            told[request_id] = []

        def committed(self, ids: Any) -> None:
            told[self.request_id] += [int(token) for token in ids]

        def end(self) -> None:
            del told[self.request_id]

    class Service:
        def begin(self, request_id: str, prompt: Any, **_: Any) -> Session:
            assert request_id not in told, "vLLM's ids come again only after their session ended"
            return Session(request_id)

        def chains(self, sessions: list[Session], most: int) -> list[list[int]]:
            return [[9] * most for _ in sessions]

    drafter = Drafter(config(tokens=3), FakeVllm(), Settings(), Service())  # type: ignore[arg-type]
    for number, new in steps:
        name = "abcdef"[number]
        if name not in runner.requests:
            runner.add(name, [1, 2][: chance.randint(1, 2)])
        elif name not in runner.input_batch.req_ids:
            runner.input_batch.req_ids.append(name)
        elif chance.random() < 0.3:
            (runner.finish if chance.random() < 0.5 else runner.preempt)(name)
            continue
        if len(runner.input_batch.req_ids) > 1 and chance.random() < 0.3:
            runner.swap(0, len(runner.input_batch.req_ids) - 1)
        if len(runner.requests[name].output_token_ids) + len(new) > 50:
            continue
        runner.step(drafter, {name: new})
        for req_id in runner.input_batch.req_ids:
            assert told[req_id] == runner.requests[req_id].output_token_ids
        assert told.keys() <= runner.requests.keys()


def test_the_kill_switch_opens_no_store(runner: FakeRunner) -> None:
    drafter = Drafter(config(), FakeVllm(), Settings(on=False, store="/nowhere/at/all", secret=SECRET))
    runner.add("a", [1, 2, 3], NORTH)
    assert runner.step(drafter, {"a": [40]}) == {"a": []}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2), (1, 3)])
def test_one_worker_of_the_last_stage_counts(
    make: Callable[..., Drafter], runner: FakeRunner, tp: int, pp: int
) -> None:
    """Of it vLLM takes the drafts: the first tensor-parallel rank there (`_get_output_rank`)."""
    drafts = []
    for rank in range(tp * (pp - 1), tp * pp):
        runner = FakeRunner()
        runner.add("a", [1, 2, 3], NORTH)
        drafts.append(runner.step(make(rank=rank, tp=tp, pp=pp), {"a": [40]})["a"][:2])
    assert drafts == [[41, 42], *[[]] * (tp - 1)]


def test_drafting_that_fails_costs_drafts_only(
    drafter: Drafter, runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever vLLM hands over that nobody foresaw: its step goes on, the first failure is logged, all are counted."""
    runner.add("a", [1, 2, 3], NORTH)
    runner.step(drafter, {"a": [40]})
    del runner.requests["a"]
    assert drafter.propose([[41]], [5], [[0] * 5]) == [[]]
    assert drafter.propose([[41]], [5], [[0] * 5]) == [[]]
    assert caplog.text.count("drafting failed") == 1
    assert drafter.counts()["precedent:failed_steps"] == {"": 2}


def test_a_store_that_is_away_leaves_the_prompt(
    drafter: Drafter,
    runner: FakeRunner,
    service: DraftingService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is drafted from again once it answers; one warning for any number of requests."""

    def away(*_: Any, **__: Any) -> Any:
        raise CacheError("the database does not answer")

    assert service.cache is not None
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(service.cache, "since", away)
        patch.setattr(service.cache, "recall", away)
        for name in "abc":
            runner.add(name, [60, 61, 62, 63, 60, 61], NORTH)
            assert runner.step(drafter, {name: [62]})[name][:1] == [63]
    assert caplog.text.count("the store failed") == 1
    assert drafter.counts()["precedent:store_failures"][""] >= 3
    runner.add("d", [1, 2, 3], NORTH)
    assert runner.step(drafter, {"d": [40]})["d"][:2] == [41, 42]


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.32.1+cpu", "0.33.0", "0.33.1rc1"])
def test_known_versions_are_served(make: Callable[..., Drafter], version: str) -> None:
    vllm = FakeVllm(version)
    drafter = make(vllm)
    drafter.load_model(object())
    assert vllm.handed_to == [drafter]
    assert vllm.checked == 1


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.3.2", "1.0.0", "0.329.0", "", "dev"])
def test_an_unknown_version_is_refused_by_name(make: Callable[..., Drafter], version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"knows vLLM 0\.29, 0\.32, 0\.33") as refusal:
        make(FakeVllm(version))
    assert version in str(refusal.value)
