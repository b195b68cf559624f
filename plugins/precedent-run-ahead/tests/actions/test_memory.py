"""What an agent did is found again by meaning, and its arguments in the live messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precedent.cache import SpeculationCache
from precedent.errors import ConfigError
from precedent_run_ahead.actions.calls import Call
from precedent_run_ahead.actions.decisions import ACTIONS, decided, query_of, read_decision, stored
from precedent_run_ahead.actions.live import Live
from precedent_run_ahead.actions.memory import Found, predict, recalled
from precedent_run_ahead.actions.price import TrackRecord, Worth
from precedent_run_ahead.actions.slots import of_shape, shape_of
from precedent_testing.embedders import HashEmbedder

SCHEMAS = {"cancel": {"properties": {"order": {"type": "string"}, "reason": {"enum": ["late", "lost"]}}}}


def asked(said: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "You serve."}, {"role": "user", "content": said}]


def answered(name: str, arguments: dict[str, Any], result: Any) -> list[dict[str, Any]]:
    """A call and its tool's answer."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    shown = result if isinstance(result, str) else json.dumps(result)
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": function}]},
        {"role": "tool", "content": shown, "tool_call_id": name},
    ]


def filled(before: list[dict[str, Any]], call: Call, now: list[dict[str, Any]]) -> Call | None:
    """What a decision made after some messages says after others."""
    decision = decided(before, [call], SCHEMAS, [0.4])
    restored = read_decision(stored(decision, query_of(before), "a").text)
    assert restored == decision
    return restored.steps[0].filled(Live(now))


def orders(**items: str) -> list[dict[str, Any]]:
    """A list of orders, as the answer of a tool."""
    return answered("list", {}, {"orders": [{"order": order, "items": text} for order, text in items.items()]})


def found_in(customer: str) -> list[dict[str, Any]]:
    return asked("hi") + answered("find", {"who": "x"}, {"customer": customer})


def got(order: str) -> list[dict[str, Any]]:
    return asked("y") + answered("get", {"order": order}, "open")


@pytest.mark.parametrize(
    ("before", "made", "now", "expected"),
    [
        (asked("where is W7?"), {"order": "W7"}, asked("W1042 is late, where is it?"), {"order": "W1042"}),
        (asked("I am ann@a.example"), {"order": "ann@a.example"}, asked("bo@b.example."), {"order": "bo@b.example"}),
        (asked("order #12-34 please"), {"order": "#12-34"}, asked("mine is #56-78"), {"order": "#56-78"}),
        (asked("where is W7?"), {"order": "W7"}, asked("where is my order?"), None),
        (found_in("C7"), {"order": "C7"}, found_in("C9"), {"order": "C9"}),
        (
            asked("my lamp") + orders(W1="mug", W2="desk lamp"), {"order": "W2"},
            asked("my chair") + orders(W5="chair", W6="desk", W8="mug"), {"order": "W5"},
        ),
        (
            asked("an order") + orders(W1="mug", W2="lamp"), {"order": "W2"},
            asked("an order") + orders(W5="chair", W6="desk"), None,
        ),
        (got("W7"), {"order": "W7"}, got("W9"), {"order": "W9"}),
        (
            asked("hi") + answered("id", {}, "C7"), {"order": "C7"},
            asked("hi") + answered("id", {}, "C8"), {"order": "C8"},
        ),
        (asked("W7 is lost"), {"order": "W7", "reason": "lost"}, asked("W8"), {"order": "W8", "reason": "lost"}),
        (asked("W7"), {"order": "W7", "reason": "something else"}, asked("W8"), None),
    ],
)  # fmt: skip
def test_an_argument_is_found_where_it_came_from(before: Any, made: Any, now: Any, expected: Any) -> None:
    found = filled(before, Call("cancel", made), now)
    assert (None if found is None else dict(found.arguments)) == expected


def test_what_was_asked_before_is_not_asked_again() -> None:
    before = asked("all") + answered("list", {}, ["W1", "W2"])
    now = asked("all") + answered("list", {}, ["W5", "W6"]) + answered("get", {"order": "W5"}, "open")
    assert filled(before, Call("get", {"order": "W1"}), now) == Call("get", {"order": "W6"})


def test_a_stored_decision_holds_no_value_of_its_conversation() -> None:
    before = asked("order W77123 of ann@secret.example") + answered("find", {}, {"name": "Ann Secret", "K4711": "x9"})
    calls = [Call("get", {"order": "W77123", "who": "ann@secret.example", "name": "Ann Secret", "key": "x9"})]
    text = stored(decided(before, calls, {}, [0.0]), "q", "a").text
    assert not [secret for secret in ("77123", "secret", "Secret", "K4711", "x9") if secret in text]


@given(st.text(max_size=30), st.text(max_size=60))
def test_a_shape_finds_its_own_value_and_never_fails(value: str, text: str) -> None:
    shape = shape_of(value)
    of_shape(text, value)  # a text that is no shape, as in a file that somebody made
    if shape is not None:
        assert value.rstrip(".") in of_shape(shape, f" {value} ")


@pytest.mark.parametrize("shape", ["99", "(a+)+", "A" * 50, "", "A9\n"])
def test_a_shape_of_a_hostile_file_matches_nothing(shape: str) -> None:
    assert of_shape(shape, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAA!") == []


def test_the_likeliest_call_is_that_of_the_nearest_and_best_aligned_decisions() -> None:
    before = asked("where is W7?")
    tracking, text = decided(before, [Call("track", {"order": "W7"})], {}, [0.4]), decided(before, [], {}, [])
    later = decided(before + answered("track", {"order": "W7"}, "x"), [Call("get", {"order": "W7"})], {}, [0.4])
    found = [Found(tracking, 0.9), Found(tracking, 0.88), Found(text, 0.7), Found(later, 0.95)]
    (first, *_) = predict(found, Live(asked("where is W9?")))
    assert first.call == Call("track", {"order": "W9"})
    assert 0.5 < first.probability < 1.0
    assert predict([], Live(before)) == []


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_decisions_are_found_in_their_tenant_alone_and_erased_with_it(where: str, tmp_path: Path) -> None:
    cache = SpeculationCache.open(None if where == "memory" else tmp_path / "cache", embedder=HashEmbedder())
    before = asked("where is W7?")
    decision = decided(before, [Call("track", {"order": "W7"})], {}, [0.4])
    cache.insert(stored(decision, query_of(before), "a"))
    cache.insert(stored(decision, query_of(before), "a"))
    (found,) = recalled(cache, asked("where is W8?"), "a")
    assert (found.decision, found.count) == (decision, 2)
    assert recalled(cache, before, "b") == []
    assert cache.tokenizers() == frozenset()
    assert cache.forget(containing="track") == 1
    assert recalled(cache, before, "a") == []
    cache.close()


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '{"events": 1, "calls": []}', '{"events": [], "calls": [{}]}', "x" * 9]
)
def test_a_record_that_is_no_decision_is_left_out(text: str) -> None:
    assert read_decision(text) is None


def test_redacted_records_predict_nothing() -> None:
    before = asked("where is W7?")
    with SpeculationCache.open(embedder=HashEmbedder(), redact=lambda one: replace(one, text="*")) as cache:
        cache.insert(stored(decided(before, [Call("track", {"order": "W7"})], {}, [0.4]), query_of(before), "a"))
        assert len(cache.since("a", ACTIONS)) == 1
        assert recalled(cache, before, "a") == []


@pytest.mark.parametrize(
    ("price", "probability", "tool", "model", "pays"),
    [
        (None, 0.51, 0.4, 1.0, True),
        (None, 0.49, 0.4, 1.0, False),
        (0.1, 0.26, 0.4, 1.0, True),
        (0.1, 0.24, 0.4, 1.0, False),
        (0.1, 0.9, 0.4, 0.1, False),
        ({"get": 9.0}, 0.9, 0.4, 1.0, False),
        ({"other": 9.0}, 0.9, 0.4, 1.0, True),
        (0.0, 0.01, 0.4, 1.0, True),
    ],
)
def test_a_call_pays_when_probability_times_time_saved_exceeds_its_price(
    price: Any, probability: float, tool: float, model: float, pays: bool
) -> None:
    worth = Worth(price)
    worth.took("get", tool)
    worth.model_took(model)
    assert worth.pays("get", probability) is pays


@pytest.mark.parametrize("price", [-1.0, float("nan"), True, {"get": "dear"}])
def test_a_wrong_price_is_refused(price: Any) -> None:
    with pytest.raises(ConfigError, match="price="):
        Worth(price)


def test_estimates_that_do_not_come_true_are_corrected() -> None:
    record = TrackRecord()
    assert record.probability("memory", 0.9) == pytest.approx(0.9)
    for _ in range(40):
        record.observe("memory", 0.9, right=False)
    assert record.probability("memory", 0.9) < 0.15
    assert record.probability("own", 0.9) == pytest.approx(0.9)
