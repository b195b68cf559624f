"""Sessions: what they draft from, alone and in a batch, what they learn, and how they end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.services import END, Scripted, Serve, added, left_in, store

from precedent.cache import SpeculationCache
from precedent.errors import (
    ConfigError,
    EngineClosedError,
)
from precedent.tree import ROOT
from precedent_engines import DraftingSession

ORDER = [40, 41, 42, 43, 44, 45, END]
ASKED: dict[str, Any] = {"tenant": "north", "query": "an order", "end_token_ids": [END]}


def test_a_stored_answer_is_drafted_followed_and_resumed(serve: Serve) -> None:
    """From its first token; after a token of its own, the target is led back into it."""
    service = serve()
    store(service, ORDER)
    session = service.begin("a", [1, 2, 3], **ASKED)
    assert session.chain(16) == ORDER
    assert session.chain(3) == ORDER[:3]
    session.committed([40, 41, 99])
    session.chain(16)
    session.committed([43])
    assert session.chain(16) == [44, 45, END]
    assert session.chain(0) == []


def test_the_prompt_and_a_prediction_are_drafted_from_without_a_store(serve: Serve, tokenizer: Any) -> None:
    service = serve(None)
    session = service.begin("a", [50, 51, 52, 53, 54, 50, 51, 52])
    assert session.chain(2) == [53, 54]
    text = "The order was sent to the new address."
    predicted = service.begin("b", [1], prediction=text).chain(8)
    assert predicted
    assert text.startswith(tokenizer.decode(predicted))
    assert service.begin("c", [1], prediction=[60, 61, 62]).chain(8) == [60, 61, 62]
    template = service.begin("d", [1], templates=["The order was sent to {place} today."]).chain(8)
    assert "The order was sent to ".startswith(tokenizer.decode(template))
    assert template


def test_without_a_tenant_the_store_is_not_drafted_from(serve: Serve) -> None:
    service = serve()
    store(service, ORDER)
    assert service.begin("a", [1, 2], query="an order", end_token_ids=[END]).chain(16) == []
    assert service.begin("b", [40, 41, 42, 40, 41], query="an order").chain(1) == [42], "from its own prompt"
    assert service.metrics().failures_by_drafter == {}, "recall is not asked, rather than refused for want of a tenant"


def test_tenants_never_see_each_others_answers(serve: Serve) -> None:
    """Whatever is stored by whom, in whichever order requests begin and end."""
    service = serve()
    names = ("north", "south", "north ", "North")
    own = {name: [100 + 10 * number + place for place in range(8)] for number, name in enumerate(names)}
    for name in names:
        store(service, own[name], tenant=name)
    sessions = {name: service.begin(name, [1, 2], tenant=name, query="an order") for name in names}
    for _ in range(3):
        for name, session in sessions.items():
            chain = session.chain(8)
            assert set(chain) <= set(own[name])
            assert chain
            session.committed(chain[:2] or own[name][:2])


def test_nothing_is_stored_unless_it_is_written_back(serve: Serve, cache: SpeculationCache) -> None:
    service = serve()
    session = service.begin("a", [1, 2, 3], **ASKED)
    session.committed(ORDER)
    session.end()
    assert left_in(cache) == set()
    written = service.write_back([1, 2, 3], ORDER, tenant="north", query="an order", tools=[{"name": "f"}])
    assert written.result() > 0
    (kept,) = cache.list()
    assert kept.token_ids == tuple(ORDER)
    assert (kept.tenant, kept.query, len(kept.tools), bool(kept.prompt_fingerprint)) == ("north", "an order", 32, True)


def test_an_accepted_draft_is_credited_to_the_completion_and_counted(serve: Serve, cache: SpeculationCache) -> None:
    service = serve()
    store(service, ORDER)
    session = service.begin("a", [1, 2], **ASKED)
    assert session.chain(16) == ORDER
    session.committed([40, 41, 42, 77])
    session.end()
    session.end()
    found = service.metrics()
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (1, 7, 3)
    assert (found.running, found.num_requests) == (0, 1)
    (kept,) = cache.list()
    assert (kept.accepted, kept.rejected) == (3, 1)


def test_a_request_id_that_comes_twice_is_refused_and_the_first_goes_on(serve: Serve) -> None:
    service = serve()
    store(service, ORDER)
    first = service.begin("a", [1, 2], **ASKED)
    first.committed([40, 41])
    with pytest.raises(ConfigError, match="'a' is being drafted for already"):
        service.begin("a", [5, 6], **ASKED)
    assert first.chain(16) == ORDER[2:]
    assert service.metrics().running == 1


def test_a_draft_leaves_room_for_the_token_behind_it(serve: Serve) -> None:
    """The context ends before the answer does: nothing beyond it is drafted."""
    service = serve(context_length=8)
    store(service, ORDER)
    session = service.begin("a", [1, 2], **ASKED)
    assert session.chain(16) == ORDER[:5]
    session.committed(ORDER[:4])
    assert session.chain(16) == ORDER[4:5]
    session.committed(ORDER[4:6])
    assert session.chain(16) == []


def test_a_closed_service_takes_no_requests_and_its_sessions_draft_nothing(serve: Serve) -> None:
    service = serve()
    store(service, ORDER)
    session = service.begin("a", [1, 2], **ASKED)
    service.close()
    service.close()
    assert session.chain(16) == []
    with pytest.raises(EngineClosedError, match="this drafting service is closed"):
        service.begin("b", [1, 2])


def test_a_drafter_that_fails_is_left_out_and_the_request_goes_on(serve: Serve, caplog: Any) -> None:
    good = Scripted("good", (5, ROOT, 0.9, 1), (6, 0, 0.9, 1))
    service = added(serve(), Scripted("bad", (7, ROOT, 0.95, 1), (8, 0, 0.95, 1), fails_at=2), good)
    session, other = service.begin("a", [1], tenant="t"), service.begin("b", [1], tenant="t")
    assert session.chain(2) == [7, 8]
    session.committed([7, 8])
    assert session.chain(2) == [5, 6]
    assert session.chain(2) == [5, 6]
    assert other.chain(2) == [5, 6]
    assert service.metrics().failures_by_drafter == {"bad": 2}
    assert not caplog.text
    for name in "cde":
        third = service.begin(name, [1], tenant="t")
        third.chain(2)
        third.committed([5])
        assert third.chain(2) in ([5, 6], [6])
    assert service.metrics().failures_by_drafter == {"bad": 3}, "switched off, it is asked no more"
    assert caplog.text.count("bad is switched off after 3 faults") == 1


def test_a_batch_names_each_session_once(serve: Serve) -> None:
    service = serve()
    store(service, ORDER)
    first, second, ended = (service.begin(name, [1, 2], **ASKED) for name in "abc")
    ended.end()
    second.committed([40])
    assert service.chains([second, ended, first], 3) == [[41, 42, 43], [], [40, 41, 42]]
    assert service.chains([], 3) == []
    with pytest.raises(ConfigError, match="twice"):
        service.chains([first, first], 3)


TENANTS = ("north", "south", None)


def known(choose: random.Random) -> list[list[int]]:
    """Answers that share passages and differ in between."""
    passages = [[choose.randint(30, 90) for _ in range(6)] for _ in range(4)]
    return [[*choose.choice(passages), choose.randint(30, 90), *choose.choice(passages), END] for _ in range(12)]


def begun(service: Any, choose: random.Random, texts: list[list[int]], name: str) -> list[DraftingSession]:
    """Two sessions alike: with or without tenant, prediction and a template."""
    asked: dict[str, Any] = {"tenant": choose.choice(TENANTS), "end_token_ids": [END]}
    if choose.random() < 0.5:
        asked["prediction"] = choose.choice(texts)
    if choose.random() < 0.3:
        asked["templates"] = ["The order was sent to {place} today."]
    prompt = [choose.randint(30, 90) for _ in range(choose.randint(1, 30))] + choose.choice(texts)
    return [service.begin(f"{name}{twin}", prompt, query="an order", **asked) for twin in "ab"]


@pytest.mark.parametrize("rows", [2, 17])
def test_a_batch_drafts_what_each_request_drafts_alone(serve: Serve, rows: int) -> None:
    choose = random.Random(rows)
    service, texts, drafted = serve(), known(choose), 0
    for tenant in ("north", "south"):
        store(service, *choose.sample(texts, 8), tenant=tenant)
    pairs = [begun(service, choose, texts, str(number)) for number in range(rows)]
    truths = [choose.choice(texts) for _ in pairs]
    for at in range(0, 12, 2):
        for session in (session for pair in pairs for session in pair):
            session.chain(0)  # all have learned what was committed before any of them drafts
        together = service.chains([pair[0] for pair in pairs], 8)
        assert together == [pair[1].chain(8) for pair in pairs]
        drafted += sum(map(len, together))
        for pair, truth in zip(pairs, truths, strict=True):
            for session in pair:
                session.committed(truth[at : at + 2])
    assert drafted >= rows
