"""What each way of verifying is worth: accepted tokens and microseconds on real logits, and at a large vocabulary.

    python tests/benchmarks/bench_verify.py [--json FILE] [--draft-model first-layers:28] [--quick]

Target: the packaged SmolLM2-135M-Instruct. Draft model: its own first layers, which is a poor one and a slow one; what
is compared is verification, on the same trees and the same logits. For the rejection modes the accepted tokens of a
tree are exact (its weights are known, no coin is thrown); only texts and draws are sampled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from verify_cost import LARGE_VOCABULARY, measure_cost

from precedent.config import SamplingParams
from precedent.sampling import CounterCoins, TargetRows, coupled_noise, probs_of
from precedent.target import Slot, TargetModel
from precedent.target.loading import DEMO_TARGET, load_draft, load_target
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Drawn, TreeBuilder
from precedent.verify import Weights, prepare

PROMPTS = (
    "The river rose in the night, and by morning the bridge to the village was gone. People stood on the bank and",
    "To reset the thermostat, hold the left button for five seconds. When the display blinks,",
    "Dear customer, thank you for your message about order 48213. We are sorry to hear that",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return",
    "The three most common causes of a slow database query are a missing index,",
    "In 1905 Albert Einstein published four papers. The first of them explained",
)
TEMPERATURES = (0.3, 0.7, 1.0)
CHAIN = (1, 1, 1, 1, 1, 1)
TREE = (3, 2, 1, 1)
SPACING = 4

COPIES = 6
"""Independent trees of each kind at each place, scored together."""

Level = Callable[[int, Tensor, int], list[int]]
"""`(node, draft logits, width) -> children`: how candidates below a node come about."""

Figures = dict[tuple["Case", float], tuple[list[float], list[float]]]
"""Accepted tokens (one mean per place) and microseconds of every case and temperature."""


@dataclass(frozen=True)
class Case:
    """One line of the table: a kind of candidates, a shape, and the mode that verifies them."""

    name: str
    shape: tuple[int, ...]
    candidates: str
    mode: str


CASES = (
    Case("chain, token verification", CHAIN, "draws", "topdown"),
    Case("chain, block verification", CHAIN, "draws", "traversal"),
    Case("chain, shared noise", CHAIN, "coupled", "coupled"),
    Case("tree, draws with replacement, recursive rejection", TREE, "replaced", "topdown"),
    Case("tree, draws without replacement, recursive rejection", TREE, "draws", "topdown"),
    Case("tree, draws without replacement, traversal", TREE, "draws", "traversal"),
    Case("tree, top tokens as points", TREE, "points", "traversal"),
    Case("tree, top tokens and one draw beside them", TREE, "mixed", "traversal"),
    Case("tree, shared noise", TREE, "coupled", "coupled"),
)


class Draft:
    """One tree in the making; `shared` maps its nodes to those of the tree in which all copies are scored together."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params, self.seed, self.coins = params, seed, CounterCoins(seed, 1)
        self.builder, self.level, self.shared = TreeBuilder(), [ROOT], {ROOT: ROOT}

    def grow(self, kind: str, width: int, logits: Tensor, scoring: TreeBuilder) -> None:
        """Candidates below every node of the last level; `logits` are those of the scoring tree."""
        below: Level = getattr(self, f"_{kind}")
        parents, self.level = self.level, []
        for node in parents:
            self.level += below(node, logits[self.shared[node] + 1], width)
        for node in range(len(self.shared) - 1, len(self.builder)):
            parent, token = self.builder.parents[node], self.builder.token_ids[node]
            self.shared[node] = scoring.add_point(self.shared[parent], token, "scoring")

    def scored(self, logits: Tensor) -> tuple[CandidateTree, Tensor]:
        """The finished tree and its own rows of the scoring tree's logits."""
        tree = self.builder.build()
        return tree, logits[[self.shared[node] + 1 for node in range(ROOT, len(tree))]]

    def _draws(self, node: int, logits: Tensor, width: int, first: int = 0) -> list[int]:
        row, excluded, children = probs_of(logits, self.params), list(self.builder.children(node)), list[int]()
        for ordinal in range(first, width):
            law = Drawn(row, tuple(excluded))
            if not float(law.probs().sum()) > 0.5:
                break  # everything that could be drawn is there already
            token = self.coins.categorical(law.probs(), node, f"draw {ordinal}")
            children.append(self.builder.add_draw(node, token, law, "draft"))
            excluded.append(token)
        return children

    def _replaced(self, node: int, logits: Tensor, width: int) -> list[int]:
        law = Drawn(probs_of(logits, self.params))
        tokens = [self.coins.categorical(law.row, node, f"draw {ordinal}") for ordinal in range(width)]
        return list(dict.fromkeys(self.builder.add_draw(node, token, law, "draft") for token in tokens))

    def _points(self, node: int, logits: Tensor, width: int) -> list[int]:
        return [self.builder.add_point(node, token, "draft") for token in logits.topk(width).indices.tolist()]

    def _mixed(self, node: int, logits: Tensor, width: int) -> list[int]:
        points = self._points(node, logits, width - 1)
        return points + self._draws(node, logits, width, width - 1)

    def _coupled(self, node: int, logits: Tensor, width: int) -> list[int]:
        position = len(self.builder.build().path_to(node))
        scores = probs_of(logits, self.params).double() / coupled_noise(self.seed, position, logits.numel())
        return [self.builder.add_point(node, token, "draft") for token in scores.topk(width).indices.tolist()]


class Place:
    """One place in a text, before which both models have read everything."""

    def __init__(self, target: TargetModel, slot: Slot, draft: TargetModel, context: list[int], number: int) -> None:
        self._target, self._slot, self._draft, self._number = target, slot, draft, number
        self._draft_slot = draft.new_slot()
        draft.prefill(self._draft_slot, context)

    def trees(self, shape: tuple[int, ...], kind: str, temperature: float) -> list[tuple[Draft, CandidateTree, Tensor]]:
        """`COPIES` independent trees with the target's logits; level by level, one draft forward for all of them."""
        copies = 1 if kind == "points" else COPIES  # the top tokens are the same in every copy
        seeds = range(self._number * COPIES, self._number * COPIES + copies)
        drafts = [Draft(SamplingParams(temperature=temperature, seed=seed), seed) for seed in seeds]
        scoring = TreeBuilder()
        for width in shape:
            logits = self._draft.score([(self._draft_slot, scoring.build())])[0]
            self._draft.discard(self._draft_slot)
            for draft in drafts:
                draft.grow(kind, width, logits, scoring)
        logits = self._target.score([(self._slot, scoring.build())])[0]
        self._target.discard(self._slot)
        return [(draft, *draft.scored(logits)) for draft in drafts]


def expected_accepted(weights: Weights, node: int = ROOT, depth: int = 0) -> tuple[float, float]:
    """Chance of ending at or below `node` once verification gets there, and expected accepted tokens on that event."""
    total, survival = 0.0, 1.0
    for ordinal, draw in enumerate(weights.trials(node)):
        worth = weights.worth(node, ordinal)
        if worth > 0.0:
            chance, tokens = expected_accepted(weights, draw.child, depth + 1)
            if not weights.defers(draw.child):
                chance, tokens = worth, worth * tokens
            total, survival = total + survival * tokens, survival * (1.0 - chance)
    end = 1.0 if node == ROOT or not weights.defers(node) else weights.accept(node)
    total += survival * end * (depth + _expected_descent(weights, node, weights.leftover(node)))
    return 1.0 - survival * (1.0 - end), total


def _expected_descent(weights: Weights, node: int, law: Tensor) -> float:
    """Expected further points once the next token is drawn from `law` at `node`."""
    mass, expected = float(law.sum()), 0.0
    for token, child in weights.point_children(node).items():
        expected += float(law[token]) / mass * (1.0 + _expected_descent(weights, child, weights.row(child)))
    return expected


def accepted_tokens(tree: CandidateTree, logits: Tensor, params: SamplingParams, case: Case) -> float:
    """Accepted tokens of one tree: exact for rejection modes, one sample for shared noise."""
    rows = TargetRows(logits, tree, params)
    if case.mode == "coupled":
        return prepare(tree, rows, "coupled")(CounterCoins(0, 0)).num_accepted
    return expected_accepted(Weights(tree, rows, lazy=case.mode == "traversal"))[1]


def microseconds(tree: CandidateTree, logits: Tensor, params: SamplingParams, case: Case) -> float:
    """One verification from logits to verdict, the softmax of the visited rows included; the median of three."""

    def once(number: int) -> float:
        started = perf_counter()
        prepare(tree, TargetRows(logits, tree, params), case.mode)(CounterCoins(7, number))
        return (perf_counter() - started) * 1e6

    return statistics.median(once(number) for number in range(3))


def places(
    target: TargetModel, encode: Callable[[str], list[int]], per_prompt: int
) -> Iterator[tuple[Slot, list[int]]]:
    """Places in sampled texts: the target's slot, prefilled, and the token ids up to there."""
    params = SamplingParams(temperature=0.7)
    for number, prompt in enumerate(PROMPTS):
        slot, context = target.new_slot(), encode(prompt)
        target.prefill(slot, context)
        for step in range(per_prompt * SPACING):
            if step % SPACING == 0:
                yield slot, list(context)
            row = probs_of(target.plain_step(slot)[0], params)
            context.append(CounterCoins(number, step).categorical(row, ROOT, "text"))
            target.commit(slot, EMPTY_TREE, (), context[-1])


def measure(draft_spec: str, per_prompt: int) -> list[dict[str, object]]:
    """The table on real logits: every case at every temperature, over all places."""
    model, tokenizer = load_target(DEMO_TARGET, device="cpu")
    target, draft = TargetModel(model), TargetModel(load_draft(draft_spec, model, tokenizer))
    found: Figures = {}
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for number, (slot, context) in enumerate(places(target, encode, per_prompt)):
        print(f"\rplace {number + 1} of {len(PROMPTS) * per_prompt}", end="", file=sys.stderr, flush=True)
        place = Place(target, slot, draft, context, number)
        for temperature in TEMPERATURES:
            _measure_place(place, temperature, found)
    print(file=sys.stderr)
    return [_line(case, temperature, *values) for (case, temperature), values in found.items()]


def _measure_place(place: Place, temperature: float, found: Figures) -> None:
    made: dict[tuple[tuple[int, ...], str], list[tuple[Draft, CandidateTree, Tensor]]] = {}
    for case in CASES:
        key = (case.shape, case.candidates)
        if key not in made:
            made[key] = place.trees(*key, temperature)
        tokens, times = found.setdefault((case, temperature), ([], []))
        tokens.append(statistics.mean(accepted_tokens(t, rows, draft.params, case) for draft, t, rows in made[key]))
        draft, tree, rows = made[key][0]
        times.append(microseconds(tree, rows, draft.params, case))


def _line(case: Case, temperature: float, tokens: list[float], times: list[float]) -> dict[str, object]:
    return {
        "name": case.name,
        "mode": case.mode,
        "candidates": case.candidates,
        "shape": list(case.shape),
        "temperature": temperature,
        "accepted_tokens": statistics.mean(tokens),
        "standard_error": statistics.stdev(tokens) / len(tokens) ** 0.5 if len(tokens) > 1 else 0.0,
        "microseconds": statistics.median(times),
        "places": len(tokens),
    }


def show(lines: list[dict[str, object]], costs: list[dict[str, object]], draft_spec: str) -> None:
    """Print both tables."""
    print(f"accepted tokens per step (standard error), microseconds; target {DEMO_TARGET}, draft model {draft_spec}")
    print(f"{'':54s}" + "".join(f"{'temperature ' + str(t):>26s}" for t in TEMPERATURES))
    for case in CASES:
        cells = [line for line in lines if line["name"] == case.name]
        texts = (
            f"{cell['accepted_tokens']:.3f} ({cell['standard_error']:.3f}) {cell['microseconds']:6.0f} us"
            for cell in cells
        )
        print(f"{case.name:54s}" + "".join(f"{text:>26s}" for text in texts))
    print(f"\nmilliseconds from target probabilities to verdict, 64 nodes, vocabulary {LARGE_VOCABULARY}")
    for cost in costs:
        place = f"{cost['device']}, {cost['draws']:2d} draws, {64 - int(str(cost['draws'])):2d} points"
        print(f"{place:30s}{cost['backend']!s:12s}{cost['mode']!s:12s}{cost['milliseconds']:8.2f}")


def main() -> None:
    """Measure, print, and write the JSON file if one was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--draft-model", default="first-layers:28", help="an id, a folder, or first-layers:N")
    parser.add_argument("--places", type=int, default=3, help="places in each of the texts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--quick", action="store_true", help="one place per text: seconds, wide errors")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        costs = measure_cost()
        lines = measure(arguments.draft_model, 1 if arguments.quick else arguments.places)
    show(lines, costs, arguments.draft_model)
    if arguments.json is not None:
        result = {"draft_model": arguments.draft_model, "modes": lines, "cost": costs}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
