"""The service drafts what the engine drafts: the same candidates and the same trees, step by step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.services import END, FREE, Serve, store

from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.decoding.aids import Aids
from precedent.decoding.proposal import plan
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters import DrafterParts, load_drafters
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.runtime.background import AtOnce
from precedent.sampling.rng import entropy_rng
from precedent.text.codec import TokenizerCodec
from precedent_engines import DRAFTERS, DraftingSession

CURVES = (FREE, {1: 10.0, 2: 11.0, 4: 12.0, 8: 16.0, 32: 60.0})
NODES = 12


def answers(choose: random.Random) -> list[list[int]]:
    """Answers that share passages and differ in between."""
    passages = [[choose.randint(30, 90) for _ in range(6)] for _ in range(4)]
    return [[*choose.choice(passages), choose.randint(30, 90), *choose.choice(passages), END] for _ in range(12)]


class EnginesOwn:
    """The engine's half of drafting: a sequence in its decode loop, without a target to score what it plans."""

    def __init__(self, cache: SpeculationCache, tokenizer: Any, costs: dict[int, float]) -> None:
        codec = TokenizerCodec(tokenizer)
        parts = DrafterParts(codec.fingerprint, AtOnce(), cache, codec=codec)
        self._drafters, self._planner = load_drafters(DRAFTERS, parts), Planner(CostCurve.through(costs))

    def begin(self, session: DraftingSession, max_tokens: int) -> None:
        request, slot = session._request, SimpleNamespace(token_ids=[], one_path=False)
        settings = SpeculationConfig(max_nodes=NODES, drafters=DRAFTERS)
        self.sequence = DecodingSequence(request, slot, max_tokens, entropy_rng(1), settings)  # type: ignore[arg-type]
        self.sequence.sessions = {drafter.name: drafter.begin(request) for drafter in self._drafters}  # type: ignore[misc]

    def step(self, truth: list[int]) -> tuple[Any, list[int]]:
        """Plan a step, accept what agrees with the truth and one token more, as the decode loop does."""
        (proposal,) = plan([self.sequence], Aids(self._planner))
        tree = proposal.plan.builder.build()
        edges = list(zip(tree.parents, tree.token_ids, strict=True))
        path: list[int] = []
        for token in truth:
            if ((path or [-1])[-1], token) not in edges:
                break
            path.append(edges.index(((path or [-1])[-1], token)))
        self._planner.observe(proposal.plan, tree, path)
        committed = truth[: len(path) + 1]
        self.sequence.append(committed)
        for session in self.sequence.sessions.values():
            session.committed(committed)
        return tree, committed


@pytest.mark.parametrize("costs", CURVES)
@pytest.mark.parametrize("seed", range(6))
def test_the_trees_are_the_engines_own(
    serve: Serve, cache: SpeculationCache, tokenizer: Any, seed: int, costs: dict[int, float]
) -> None:
    """Several requests in turn, so that what one teaches shows in the next; every source, with and without cost."""
    choose = random.Random(seed)
    service, seen = serve(cost=costs, context_length=4096), 0
    known = answers(choose)
    store(service, *known[:8])
    engine = EnginesOwn(cache, tokenizer, costs)
    for number, truth in enumerate(known[4:]):
        prompt = [choose.randint(30, 90) for _ in range(20)] + known[number]
        session = service.begin(
            str(number), prompt, tenant="north", query="an order", end_token_ids=[END], prediction=choose.choice(known),
            templates=["The order was sent to {place} today."],
        )  # fmt: skip
        engine.begin(session, 4096 - len(prompt))
        at = 0
        while at < len(truth):
            tree, committed = engine.step(truth[at:])
            assert session.tree(NODES) == tree
            session.committed(committed)
            at, seen = at + len(committed), seen + len(tree)
        session.end()
    assert seen > 100, "there was something to compare"


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_is_a_path_of_the_candidates(serve: Serve, seed: int) -> None:
    """Where width is free a tree holds every candidate."""
    choose = random.Random(seed)
    service, known, drafted = serve(), answers(choose), 0
    store(service, *known)
    asked: dict[str, Any] = {"tenant": "north", "query": "an order", "end_token_ids": [END]}
    for number in range(4):
        session, beside = (service.begin(f"{name}{number}", [31, 32, 33, 31], **asked) for name in "ab")
        for token in known[number][:-1]:
            tree, chain = beside.tree(1024), session.chain(16)
            assert not chain or chain in [list(tree.tokens_to(node)) for node in range(len(tree))]
            drafted += len(chain)
            for each in (session, beside):
                each.committed([token])
    assert drafted > 50
