"""Requests and tokens per minute: what a key may use in any stretch of time, and what it is told beyond that."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from precedent.errors import ConfigError
from precedent_server.errors import ApiError
from precedent_server.keys import Caller, KeyFile, add_key
from precedent_server.rate_limits import KEPT_BUCKETS, RateLimits
from precedent_server.settings import ServerLimits

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "one two three"}]}


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def rates(clock: Clock, requests: int | None = None, tokens: int | None = None) -> RateLimits:
    return RateLimits(ServerLimits(requests_per_minute=requests, tokens_per_minute=tokens), clock)


def caller(name: str = "desk", **limits: int) -> Caller:
    return Caller(name, "shop", "use", **limits)


def taken(limits: RateLimits, who: Caller) -> bool:
    try:
        limits.take_request(who)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("asked", [20_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
def test_a_flood_of_requests_gets_what_a_minute_allows_and_no_more(asked: int) -> None:
    """In bursts and pauses of every length, on a clock that also jumps: at most a full bucket and what has run in."""
    clock, rng = Clock(), random.Random(7)
    limits, desk = rates(clock, requests=600), caller()
    began, number = clock.now, 0
    for step in range(asked):
        number += taken(limits, desk)
        if step % 100 == 0:
            clock.now += rng.choice((0.0, 0.001, 0.5, 3.0))
        if step == asked // 2:
            clock.now += 86_400  # a day of sleep brings one full bucket
            began += 86_400 - 60
    allowed = 600 + 10 * (clock.now - began)
    assert 0.99 * min(allowed, asked) <= number <= allowed


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    clock = Clock()
    limits, desk = rates(clock, requests=2), caller()
    for now, allowed in ((1000, True), (0, True), (0, False), (999, False), (0, False), (1029, False), (1030, True)):
        clock.now = now
        assert taken(limits, desk) is allowed, now


def test_a_refusal_says_when_to_come_back_and_counts_nothing() -> None:
    clock = Clock()
    limits, desk = rates(clock, requests=4), caller()
    assert [taken(limits, desk) for _ in range(4)] == [True] * 4
    for _ in range(50):
        with pytest.raises(ApiError, match=r"this key may use 4 requests per minute: try again in 15\.0 seconds") as no:
            limits.take_request(desk)
    assert (no.value.status, no.value.error.code) == (429, "rate_limit_exceeded")
    assert no.value.headers["Retry-After"] == "15"
    assert limits.headers(desk) == {
        "x-ratelimit-limit-requests": "4",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    clock.now += 15
    assert [taken(limits, desk), taken(limits, desk)] == [True, False]


def test_an_answer_may_leave_a_debt_that_time_repays() -> None:
    clock = Clock()
    limits, desk = rates(clock, tokens=60), caller()
    limits.take_request(desk)
    limits.take_prompt(desk, 50)
    with pytest.raises(ApiError, match=r"60 tokens per minute: try again in 1\.0 seconds"):
        limits.take_prompt(desk, 11)
    limits.take_answer(desk, 100)
    assert limits.headers(desk)["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 90
    assert not taken(limits, desk)
    clock.now += 1
    assert taken(limits, desk)
    with pytest.raises(ApiError, match="the prompt has 61 tokens, and this key may use 60") as never:
        limits.take_prompt(desk, 61)
    assert (never.value.status, never.value.headers) == (400, {})


def test_keys_have_limits_of_their_own_and_share_none() -> None:
    limits = rates(Clock(), requests=2)
    assert [taken(limits, caller("a", requests_per_minute=1)) for _ in range(2)] == [True, False]
    assert [taken(limits, caller("b")) for _ in range(3)] == [True, True, False]
    assert [taken(limits, caller("a", requests_per_minute=9)) for _ in range(2)] == [False, False], (
        "a raise refills slowly"
    )
    assert limits.headers(caller("c", tokens_per_minute=7))["x-ratelimit-limit-tokens"] == "7"
    assert rates(Clock()).headers(caller()) == {}


def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    clock = Clock()
    limits = rates(clock, requests=2)
    for number in range(20 * KEPT_BUCKETS):
        clock.now += 1
        assert taken(limits, caller(f"key-{number}"))
    assert len(limits._buckets) <= 2 * KEPT_BUCKETS  # no public name says how many are kept


async def test_a_client_is_told_its_limits_and_refused_beyond_them(serve: Any, path: Path) -> None:
    add = {"requests_per_minute": 2, "tokens_per_minute": 1000}
    keys = [add_key(path, "few", "shop", **add), add_key(path, "many", "shop")]
    few, many = ({"Authorization": f"Bearer {key}"} for key in keys)
    client = serve(lambda prompt: "x", keys=KeyFile(path), may_stray=True)
    client.serving.rates = rates(Clock())
    usage = (first := await client.post(CHAT, json=ASKED, headers=few)).json()["usage"]
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - usage["total_tokens"])
    async with client.stream("POST", CHAT, json=ASKED | {"stream": True}, headers=few) as streamed:
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await client.post(CHAT, json=ASKED, headers=few)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert (await client.get("/v1/models", headers=few)).status_code == 200, "only models are bounded"
    answer = await client.post(CHAT, json=ASKED, headers=many)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_tokens_are_those_of_the_usage_and_each_prompt_counts_once(serve: Any) -> None:
    client = serve(lambda prompt: "x y z", limits=ServerLimits(tokens_per_minute=500), may_stray=True)
    clock = client.serving.rates = rates(Clock(), tokens=500)
    used = 0
    for route, asked in (
        (CHAT, ASKED | {"n": 3}),
        ("/v1/completions", {"model": "scripted", "prompt": ["one", "two three"], "n": 2}),
        ("/v1/responses", {"model": "scripted", "input": "hello"}),
        ("/v1/embeddings", {"model": "scripted", "input": "some words"}),
    ):
        usage = (await client.post(route, json=asked)).json()["usage"]
        used += usage["total_tokens"]
        left = clock.headers(Caller("local", "default", "admin"))["x-ratelimit-remaining-tokens"]
        assert int(left) == 500 - used, route
    long = ASKED | {"messages": [{"role": "user", "content": "word " * 600}]}
    refused = await client.post(CHAT, json=long)
    assert (refused.status_code, "tokens per minute" in refused.text) == (400, True), refused.text


@pytest.mark.parametrize("limit", [0, -1, 10**13])
def test_a_limit_that_is_none_is_refused(path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match=f"tokens_per_minute={limit} must be between 1 and"):
        add_key(path, "desk", "shop", tokens_per_minute=limit)
    assert not path.exists()
