"""The draft model under llama-cpp-python's contract: token ids alone say which request it is, and where one begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.llama_model import FakeLlama, greedy
from helpers.services import left_in
from hypothesis import given
from hypothesis import strategies as st

from precedent.cache import SpeculationCache
from precedent.errors import CacheError, CacheMismatchError, ConfigError, UnsupportedError
from precedent_llama_cpp import PrecedentDraft
from precedent_llama_cpp.draft import Following

Draft = Callable[..., PrecedentDraft]
Model = Callable[..., FakeLlama]

PROMPT = [5, 6, 7]


def answered(model: Any, prompt: list[int] = PROMPT, **how: Any) -> str:
    text: str = model.create_completion(prompt, **how)["choices"][0]["text"]
    return text


def test_answers_are_those_without_drafts_and_the_second_time_drafts_are_accepted(attached: Model) -> None:
    model = attached()
    plain = answered(FakeLlama())
    assert answered(model) == plain
    cold, model.num_steps = model.num_steps, 0
    assert answered(model) == plain
    assert model.num_steps < cold / 2
    counts = model.draft_model.counts()
    assert counts["drafted_requests"] == 2
    assert counts["accepted_tokens"] >= cold / 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [4, 40])
def test_finished_answers_are_stored_under_the_tenant(
    attached: Model, cache: SpeculationCache, stream: bool, max_tokens: int
) -> None:
    """Whole or streamed, ended by the model or by its length; with the end token if there was one."""
    model, wanted = attached(), list[int]()
    while len(wanted) < max_tokens and (not wanted or wanted[-1] != 2):
        wanted.append(greedy([*PROMPT, *wanted]))
    made = model.create_completion(PROMPT, max_tokens=max_tokens, stream=stream)
    if stream:
        list(made)
    assert left_in(cache) == {("north", tuple(wanted))}


def test_an_answer_that_nobody_reads_to_its_end_is_not_stored(attached: Model, cache: SpeculationCache) -> None:
    model = attached()
    stream = model.create_completion(PROMPT, stream=True)
    next(stream)
    stream.close()
    assert left_in(cache) == set()
    answered(model, [9, 9])
    assert len(left_in(cache)) == 1


def test_the_next_turn_of_a_conversation_is_another_request(attached: Model) -> None:
    """Its ids begin with all of the last one's."""
    model = attached()
    said = [int(token) for token in answered(model).split()]
    answered(model, [*PROMPT, *said, 2, 8, 9])
    assert model.draft_model.counts()["drafted_requests"] == 2


@pytest.mark.parametrize("tenants", [("south", "north"), ("north", "south")])
def test_tenants_are_kept_apart(attached: Model, tenants: tuple[str, str]) -> None:
    first, second = (attached(tenant=tenant, drafters=("recall",)) for tenant in tenants)
    answered(first)
    answered(second)
    assert second.draft_model.counts()["draft_tokens"] == 0
    answered(second)
    assert second.draft_model.counts()["draft_tokens"] > 0


def test_without_a_store_the_prompt_is_drafted_from_and_nothing_stored(attached: Model) -> None:
    model = attached(lambda ids: 3 + len(ids) % 4, store=None, tenant=None)
    answered(model, [3 + place % 4 for place in range(1, 21)], max_tokens=12)
    assert model.draft_model.counts()["accepted_tokens"] > 4


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(3, 5), min_size=1, max_size=4), st.integers(1, 9), st.booleans()),
        min_size=1, max_size=5,
    ),
    drafts=st.integers(0, 4),
)  # fmt: skip
def test_every_request_is_told_from_the_last_one(requests: Any, drafts: int) -> None:
    """For prompts of few tokens that go on from the last answer, if the third says so, and steps cut off anywhere.

    Whenever drafts are asked for, the latest session knows all ids, and it began with some request's prompt.
    """
    told, asked = list[tuple[list[int], list[int]]](), list[list[int]]()

    def drafted(ids: Any) -> Any:
        found = np.array(following.draft(ids), dtype=np.intc)
        prompt, answer = told[-1]
        assert [*prompt, *answer] == ids.tolist()
        assert prompt in asked
        return found

    following = Following(lambda prompt: _Session(prompt, told), drafts)  # type: ignore[arg-type, return-value]
    model, whole = FakeLlama(drafted, next_token=lambda ids: greedy(ids, 6)), list[int]()
    for prompt, count, goes_on in requests:
        asked.append([*whole, *prompt] if goes_on and len(whole) < 60 else prompt)
        generated = model.generate(asked[-1])
        whole = [*asked[-1], *(next(generated) for _ in range(count))]
        generated.close()


def test_the_same_ids_again_are_another_request() -> None:
    """As when an answer of one token is asked for twice."""
    told = list[tuple[list[int], list[int]]]()
    following = Following(lambda prompt: _Session(prompt, told), 1)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        following.draft(np.array([7, 8], dtype=np.intc))
    assert told == [([7], [8])] * 2


class _Session:
    """Notes what was committed, and proposes small tokens, of which some are right."""

    def __init__(self, prompt: Any, told: list[Any]) -> None:
        self.known: list[int] = []
        told.append((list(prompt), self.known))

    def committed(self, ids: Any) -> None:
        self.known += ids

    def chain(self, most: int) -> list[int]:
        return [3 + (self.known[-1] + place) % 3 for place in range(most)]

    def end(self) -> None:
        pass


def test_a_model_without_flash_attention_is_refused_by_name(draft: Draft, tokenizer: Any) -> None:
    one = draft()
    with pytest.raises(UnsupportedError, match="without flash_attn=True"):
        one.attach(FakeLlama(one, flash_attn=False, vocabulary=tokenizer.get_vocab()))


def test_a_draft_model_that_knows_no_model_refuses_to_draft(draft: Draft) -> None:
    """Nobody would have looked at flash_attn."""
    with pytest.raises(UnsupportedError, match=r"draft\.attach\(model\) first"):
        answered(FakeLlama(draft()))


def test_a_model_of_other_tokens_is_refused(draft: Draft, tokenizer: Any) -> None:
    one, vocabulary = draft(), tokenizer.get_vocab()
    first, second = list(vocabulary)[:2]
    for other in ({**vocabulary, first: vocabulary[second], second: vocabulary[first]}, {first: 0}):
        with pytest.raises(CacheMismatchError, match="not this model's"):
            one.attach(FakeLlama(one, vocabulary=other))


@pytest.mark.parametrize("version", ["0.3.35", "0.3.37", "0.4.0", ""])
def test_an_unknown_version_is_refused_by_name(draft: Draft, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = draft()
    monkeypatch.setattr("llama_cpp.__version__", version)
    with pytest.raises(UnsupportedError, match=r"knows llama-cpp-python 0\.3\.36, and this is"):
        one.attach(FakeLlama(one))


def test_one_draft_model_for_each_model(attached: Model, draft: Draft) -> None:
    one = attached().draft_model
    with pytest.raises(UnsupportedError, match="attached already"):
        one.attach(FakeLlama(one))
    with pytest.raises(UnsupportedError, match="another draft model"):
        draft().attach(FakeLlama(one))


def test_a_store_without_a_tenant_is_refused(draft: Draft) -> None:
    with pytest.raises(ConfigError, match="needs a tenant"):
        draft(tenant=None)


def test_a_store_that_is_away_changes_no_answer(
    attached: Model, cache: SpeculationCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, a count, and drafts from it once it answers again."""

    def away(*_: Any, **__: Any) -> Any:
        raise CacheError("the database does not answer")

    model, plain = attached(), answered(FakeLlama())
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        for name in ("since", "recall", "insert"):
            patch.setattr(cache, name, away)
        assert [answered(model) for _ in range(3)] == [plain] * 3
    assert caplog.text.count("the store failed") == 1
    assert model.draft_model.counts()["store_failures"] >= 3
    assert [answered(model) for _ in range(2)] == [plain] * 2
    assert model.draft_model.counts()["accepted_tokens"] > 0


def test_a_failure_of_drafting_costs_drafts_only(
    attached: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = attached()

    def broken(_: Any) -> Any:
        raise RuntimeError("the drafter broke")

    monkeypatch.setattr(model.draft_model._following, "draft", broken)
    assert answered(model) == answered(FakeLlama())
    assert model.draft_model.counts()["failed_steps"] > 1
    assert caplog.text.count("drafting failed") == 1
