"""Lossy modes on the order desk: what they gain and lose in conversations, and how far each is from the best rule.

    python benchmarks/bench_lossy.py --requests 40 --sampled 20 --rows 8 [--json FILE]

Serves held-out requests (set B) with the desk's target and draft model: greedily in every mode that accepts more there,
and at temperature 1 in some; then visits the rows of some conversations and compares each mode's rejections and total
variation with the Pareto front. A step is said to take long whatever its width, so that each engine proposes as much
as it may and no clock decides how many steps an answer takes.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

from measuring import options, run
from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.drafters import load_draft
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.target.load.loading import load_target
from precedent.tree import ROOT, Sampled
from precedent.verify import verifier_of
from precedent_demo import (
    MAX_TOKENS_PER_TURN,
    adapted_target,
    draft_folder,
    make_database,
    make_requests,
    run_request,
)
from precedent_demo.evaluation import wilson
from precedent_research.judge import load_judge
from precedent_research.lossy import RULES, offer_at
from precedent_research.pareto import Point, least_rejections, point_of, point_of_judge

JUDGE, DIVERGENCE = "lossy_judge:name=order-desk", "lossy_judge:name=order-desk-divergence"
GREEDY = ("auto", "lossy_top_beta:beta=2,tau=1", DIVERGENCE, f"{JUDGE},threshold=0.12", JUDGE, f"{JUDGE},threshold=1")
"""At temperature 0 the target's row is certain, so the mentored and the typical rule change nothing there. The judge's
thresholds: one that left 99 % of the mismatches that matter rejected, its own (90 %), and the draft model unchecked."""

MENTORED = ("lossy_mentored:kl=0.05", "lossy_mentored:kl=0.5")
SAMPLED = ("auto", *MENTORED, JUDGE)
TYPICAL = ("lossy_typical", "lossy_typical:epsilon=0.3,delta=0.6")
ROWS = (*MENTORED, *TYPICAL, "lossy_top_beta:beta=2,tau=1", "lossy_top_beta:beta=3,tau=3", DIVERGENCE, JUDGE)
NEVER = f"{JUDGE},threshold=0"
"""Lossless, but drafters keep the draft's logits and the target its hidden states."""

DRAFT, WITH_CACHE, WARMING = ("draft-model",), ("recall", "prompt", "template", "draft-model"), 15
SIDES = {"draft": DRAFT, "draft and cache": WITH_CACHE}


class Desk:
    """Both models, and a cache of the target's answers to set A."""

    def __init__(self) -> None:
        self.model, self.tokenizer = load_target(str(adapted_target()))
        self.draft, self.cache = (
            load_draft(str(draft_folder()), self.model, self.tokenizer),
            SpeculationCache.open(None),
        )
        with self.engine("auto", WITH_CACHE, write_back=True) as (engine, _):
            self.serve(engine, 0.0, make_requests("A")[:WARMING])

    @contextmanager
    def engine(self, mode: str, drafters: Sequence[str], *, write_back: bool = False) -> Iterator[tuple[Engine, list]]:
        """Make an engine for one mode; its results are listed as requests end."""
        speculation = SpeculationConfig(drafters=tuple(drafters), mode=mode, write_back=write_back)
        cache = self.cache if "recall" in drafters else None
        chosen = EngineOptions(draft_model=self.draft, cache=cache, speculation=speculation)
        settings = {"name": "order-desk", "cost": CostCurve.through({1: 1e5})}
        ended: list[Any] = []
        keep = lambda prompt_ids, result: ended.append(result)  # noqa: E731
        with closing(Engine(self.model, self.tokenizer, chosen, on_result=keep, **settings)) as engine:
            yield engine, ended

    def serve(self, engine: Engine, temperature: float, requests: Sequence[Any]) -> list[bool]:
        chat_model = ChatPrecedent.from_engine(engine, temperature=temperature, max_tokens=MAX_TOKENS_PER_TURN)
        desk = make_database(0)
        return [run_request(chat_model, request, desk).solved_by_model for request in requests]


def conversations(desk: Desk, modes: Sequence[str], temperature: float, number: int) -> Iterator[dict[str, Any]]:
    """Serve the same held-out requests in every mode; lost and won are relative to the first, which is lossless."""
    lossless: list[bool] = []
    for mode in modes:
        with desk.engine(mode, DRAFT) as (engine, ended):
            solved = desk.serve(engine, temperature, make_requests("B", full=True)[:number])
        lossless, stats = lossless or solved, [result.stats for result in ended]
        tokens, pairs = sum(each.num_output_tokens for each in stats), list(zip(lossless, solved, strict=True))
        yield {
            "mode": mode,
            "said": said(mode),
            "temperature": temperature,
            "requests": number,
            "solved": sum(solved),
            "interval": list(wilson(sum(solved), number)),
            "lost": sum(a and not b for a, b in pairs),
            "won": sum(b and not a for a, b in pairs),
            "tokens_per_step": tokens / sum(each.num_steps for each in stats),
            "spent_per_token": sum(each.spent_tv for each in stats) / tokens,
        }


def said(mode: str) -> str:
    return "lossless" if mode == "auto" else f"`{mode}`"


def visited(desk: Desk, drafters: Sequence[str], number: int) -> dict[str, dict[str, float]]:
    """Mean rejections and total variation of each mode at the nodes that verification visits at temperature 1."""
    judges = {mode: load_judge(mode.rpartition("=")[2]) for mode in (JUDGE, DIVERGENCE)}
    rules = {mode: judges.get(mode) or rule_of(mode) for mode in ROWS}
    sums: dict[str, list[Point]] = defaultdict(list)

    def see(tree: Any, rows: Any, verdict: Any) -> None:
        for node in (ROOT, *verdict.path):
            offer = offer_at(tree, rows, node)
            samples = [each for each in tree.candidates_at.get(node, ()) if isinstance(each.distribution, Sampled)]
            if offer is None or len(samples) > 1:
                continue
            least = Point(least_rejections(offer), 0.0)
            sums["auto"].append(least)
            for mode, rule in rules.items():
                if isinstance(rule, tuple(RULES.values())):
                    sums[mode].append(point_of(rule, offer))
                elif samples:
                    child = samples[0].child
                    sums[mode].append(point_of_judge(offer, tree.token_ids[child], rule(tree, rows, child)))
                else:
                    sums[mode].append(least)

    with desk.engine(NEVER, drafters) as (engine, _), patch("precedent.decoding.verification.verifier_of", seeing(see)):
        desk.serve(engine, 1.0, make_requests("B", full=True)[:number])
    return {
        mode: {
            name: sum(getattr(point, name) for point in points) / len(points)
            for name in ("rejections", "total_variation")
        }
        for mode, points in sums.items()
    }


def rule_of(mode: str) -> Any:
    name, _, text = mode.partition(":")
    settings = (each.partition("=") for each in text.split(",") if each)
    return RULES[name](**{key: float(value) for key, _, value in settings})


def seeing(see: Callable[[Any, Any, Any], None]) -> Callable[[str], Any]:
    """Wrap verifiers so that `see` gets every tree with its rows and its verdict before anything is committed."""

    def watched(mode: str) -> Any:
        def prepare(tree: Any, rows: Any) -> Any:
            decide = verifier_of(mode)(tree, rows)

            def decided(rng: Any) -> Any:
                verdict = decide(rng)
                see(tree, rows, verdict)
                return verdict

            return decided

        return prepare

    return watched


def measure(given: Namespace) -> dict[str, Any]:
    desk = Desk()
    served = [*conversations(desk, GREEDY, 0.0, given.requests), *conversations(desk, SAMPLED, 1.0, given.sampled)]
    points = {side: visited(desk, drafters, given.rows) for side, drafters in SIDES.items()}
    rows = [{"said": said(mode)} | {side: points[side][mode] for side in SIDES} for mode in ("auto", *ROWS)]
    return {"conversations": served, "rows": rows}


if __name__ == "__main__":
    run(options(__doc__, requests=40, sampled=20, rows=8), measure)
