"""A batch drafts what its requests draft alone: any number of them, whatever they bring."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.services import END, Serve, store

from precedent_engines import DraftingSession

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
