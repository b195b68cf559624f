"""Modes of verification on real logits: accepted tokens, and speed relative to the first mode of the same shape.

    python benchmarks/bench_verify.py [--draft noisy:1] [--prompts 12] [--limit 2] [--json FILE]

Target: the packaged SmolLM2-135M-Instruct. A draft `noisy:S` is the target's own logits with Gaussian noise of standard
deviation S: no real draft model, but one that agrees as well as good ones do; others are loaded as `--draft-model` of
the engine is (`first-layers:28`, a folder). For the rejection modes a tree's accepted tokens are exact (no test is
drawn); only texts and candidates are sampled.
"""

from __future__ import annotations

import hashlib
import statistics
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from measuring import options, run, seconds
from precedent.config import SamplingParams
from precedent.drafters import load_draft
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.target import Slot, TargetModel
from precedent.target.load.loading import DEMO_TARGET, load_target
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import RowWeights, prepare
from precedent.verify.recursion import Residual
from precedent_cuda.noise import coupled_noise

TEXTS = (
    "The river rose in the night, and by morning the bridge to the village was gone. People stood on the bank and",
    "To reset the thermostat, hold the left button for five seconds. When the display blinks,",
    "Dear customer, thank you for your message about order 48213. We are sorry to hear that",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return",
    "The three most common causes of a slow database query are a missing index,",
    "In 1905 Albert Einstein published four papers. The first of them explained",
    "Flight 312 to Lisbon is delayed by two hours. Passengers who miss their connection",
    "Water boils at a lower temperature on a mountain, because",
    'The tool returned {"status": "ok", "seats": [{"row": 12, "price": 89.5}]}. That means',
    "Once upon a time there was a clockmaker who",
    "Our refund policy has three parts. First,",
    "SELECT name, total FROM orders WHERE",
)
SPACING, COPIES = 4, 6
"""Tokens between two places in a text; independent trees of each kind at each place, scored together."""

TEMPERATURES, SHAPES = (0.3, 0.7, 1.0), {"chain": (1, 1, 1, 1, 1, 1), "tree": (3, 2, 1, 1)}
CASES = (
    ("chain", "token verification", "samples", "topdown"),
    ("chain", "block verification", "samples", "traversal"),
    ("chain", "shared noise", "coupled", "coupled"),
    ("tree", "with replacement, recursive rejection", "replaced", "topdown"),
    ("tree", "with replacement, traversal", "replaced", "traversal"),
    ("tree", "without replacement, recursive rejection", "samples", "topdown"),
    ("tree", "without replacement, traversal", "samples", "traversal"),
    ("tree", "top tokens as fixed candidates", "fixed", "traversal"),
    ("tree", "greedy draft: top tokens and one sample", "greedy", "traversal"),
    ("tree", "shared noise", "coupled", "coupled"),
)
"""Shape, name, kind of candidates, and the mode that verifies them."""

Made = tuple[SamplingParams, CandidateTree, Tensor]
Scores = Callable[[CandidateTree], Tensor]


def scores(model: TargetModel, slot: Slot, tree: CandidateTree) -> Tensor:
    logits = model.score([(slot, tree)])[0]
    model.discard(slot)
    return logits


def noisy(model: TargetModel, slot: Slot, context: list[int], deviation: float, tree: CandidateTree) -> Tensor:
    """Add noise that is a fixed function of the text and the path, as a model's logits are."""

    def noise(path: tuple[int, ...], row: Tensor) -> Tensor:
        key = hashlib.blake2b(repr((context, path)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        return torch.randn(row.shape, generator=generator) * deviation

    logits = scores(model, slot, tree).float()
    return torch.stack([row + noise(tree.tokens_to(node - 1), row) for node, row in enumerate(logits)])


class Draft:
    """A tree being built; `shared` maps its nodes to those of the tree in which all copies are scored together."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.params, self.seed = SamplingParams(temperature=temperature, seed=seed), seed
        self.rng, self.builder, self.level, self.shared = CounterRng(seed, 1), TreeBuilder(), [ROOT], {ROOT: ROOT}

    def grow(self, kind: str, width: int, logits: Tensor, scoring: TreeBuilder) -> None:
        """Add candidates below every node of the last level; `logits` are those of the scoring tree."""
        below = {"replaced": self.replaced, "fixed": self.fixed, "coupled": self.coupled, "samples": self.samples}
        parents, self.level = self.level, []
        for node in parents:
            row = logits[self.shared[node] + 1]
            if kind == "greedy":
                self.level += [*self.fixed(node, row, width - 1), *self.samples(node, row, width, width - 1)]
            else:
                self.level += below[kind](node, row, width)
        for node in range(len(self.shared) - 1, len(self.builder)):
            parent, token = self.builder.parents[node], self.builder.token_ids[node]
            self.shared[node] = scoring.add_fixed(self.shared[parent], token, "scoring")

    def scored(self, logits: Tensor) -> Made:
        tree = self.builder.build()
        return self.params, tree, logits[[self.shared[node] + 1 for node in range(ROOT, len(tree))]]

    def samples(self, node: int, logits: Tensor, width: int, first: int = 0) -> list[int]:
        row, excluded, children = probs_of(logits, self.params), list(self.builder.children(node)), list[int]()
        for ordinal in range(first, width):
            distribution = Sampled(row, tuple(excluded))
            probs = distribution.probs()
            if not float(probs.sum()) > 0.5:
                break  # everything that could be sampled is a candidate already
            excluded.append(self.rng.categorical(probs, node, f"sample {ordinal}"))
            children.append(self.builder.add_sampled(node, excluded[-1], distribution, "draft"))
        return children

    def replaced(self, node: int, logits: Tensor, width: int) -> list[int]:
        distribution = Sampled(probs_of(logits, self.params))
        tokens = [self.rng.categorical(distribution.row, node, f"sample {ordinal}") for ordinal in range(width)]
        return list(dict.fromkeys(self.builder.add_sampled(node, token, distribution, "draft") for token in tokens))

    def fixed(self, node: int, logits: Tensor, width: int) -> list[int]:
        return [self.builder.add_fixed(node, token, "draft") for token in logits.topk(width).indices.tolist()]

    def coupled(self, node: int, logits: Tensor, width: int) -> list[int]:
        position = len(self.builder.build().path_to(node))
        noise = coupled_noise(self.seed, position, logits.numel())
        return self.fixed(node, probs_of(logits, self.params).double() / noise, width)


def trees(target: Scores, draft: Scores, number: int, shape: str, kind: str, temperature: float) -> list[Made]:
    """Build independent trees with the target's logits, level by level, one draft forward for all of them."""
    copies, scoring = 1 if kind == "fixed" else COPIES, TreeBuilder()  # top tokens are the same in every copy
    drafts = [Draft(temperature, number * COPIES + copy) for copy in range(copies)]
    for width in SHAPES[shape]:
        logits = draft(scoring.build())
        for one in drafts:
            one.grow(kind, width, logits, scoring)
    logits = target(scoring.build())
    return [one.scored(logits) for one in drafts]


def expected_accepted(weights: RowWeights, rows: TargetRows, node: int = ROOT, depth: int = 0) -> tuple[float, float]:
    """Chance of ending at or below `node` once verification gets there, and expected accepted tokens on that event."""
    total, survival = 0.0, 1.0
    for ordinal, candidate in enumerate(weights.tests(node)):
        acceptance = weights.acceptance(node, ordinal)
        if acceptance > 0.0:
            chance, tokens = expected_accepted(weights, rows, candidate.child, depth + 1)
            if not weights.lazy:
                chance, tokens = acceptance, acceptance * tokens
            total, survival = total + survival * tokens, survival * (1.0 - chance)
    end = 1.0 if node == ROOT or not weights.lazy else weights.remaining(node)
    total += survival * end * (depth + expected_descent(weights, rows, node))
    return 1.0 - survival * (1.0 - end), total


def expected_descent(weights: RowWeights, rows: TargetRows, node: int) -> float:
    """Expected further tokens once the next one is sampled from the residual at `node`."""
    children, tests = weights.fixed_children(node), weights.tests(node)
    if not children:
        return 0.0
    residual = weights.state(node, len(tests)).residual if tests else Residual(rows.probs(node))
    return sum(
        residual.prob(token) * (1.0 + expected_descent(weights, rows, child)) for token, child in children.items()
    )


def accepted(params: SamplingParams, tree: CandidateTree, logits: Tensor, mode: str) -> float:
    """Accepted tokens of one tree: exact for rejection modes, one sample for shared noise."""
    rows = TargetRows(logits, tree, params)
    if mode == "coupled":
        return prepare(tree, rows, mode)(CounterRng(0, 0)).num_accepted
    return expected_accepted(RowWeights(tree, rows.probs, lazy=mode == "traversal"), rows)[1]


def verification(params: SamplingParams, tree: CandidateTree, logits: Tensor, mode: str) -> float:
    """Seconds from logits to verdict, the softmax of the visited rows included."""
    verify = lambda: prepare(tree, TargetRows(logits, tree, params), mode)(CounterRng(7, 0))  # noqa: E731
    return statistics.median(seconds(verify) for _ in range(3))


def places(target: TargetModel, tokenizer: Any, given: Namespace) -> Iterator[tuple[Slot, list[int]]]:
    """Places in sampled texts: the target's slot, prefilled, and the token ids up to there."""
    params = SamplingParams(temperature=0.7)
    for number, text in enumerate(TEXTS[: given.prompts]):
        slot, context = target.new_slot(), tokenizer.encode(text, add_special_tokens=False)
        target.prefill(slot, context)
        for step in range((given.limit - 1) * SPACING + 1):
            if step % SPACING == 0:
                yield slot, list(context)
            row = probs_of(target.plain_step(slot)[0], params)
            context.append(CounterRng(number, step).categorical(row, ROOT, "text"))
            target.commit(slot, EMPTY_TREE, (), context[-1])


@torch.inference_mode()
def measure(given: Namespace) -> dict[str, Any]:
    model, tokenizer = load_target(DEMO_TARGET, device="cpu")
    target, found = TargetModel(model), list[dict[str, Any]]()
    for spec in given.draft or ["noisy:0.5", "noisy:1", "first-layers:28"]:
        own = None if spec.startswith("noisy:") else TargetModel(load_draft(spec, model, tokenizer))
        tokens, taken = defaultdict[Any, list[float]](list), defaultdict[Any, list[float]](list)
        for number, (slot, context) in enumerate(places(target, tokenizer, given)):
            if own is None:
                draft: Scores = partial(noisy, target, slot, context, float(spec.removeprefix("noisy:")))
            else:
                own_slot = own.new_slot()
                own.prefill(own_slot, context)
                draft = partial(scores, own, own_slot)
            both, score = (partial(scores, target, slot), draft), partial(scores, target, slot)
            for temperature in TEMPERATURES:
                kinds = dict.fromkeys((shape, kind) for shape, _, kind, _ in CASES)
                made = {each: trees(*both, number, *each, temperature) for each in kinds}
                for case in CASES:
                    copies = made[case[0], case[2]]
                    tokens[case, temperature].append(statistics.mean(accepted(*copy, case[3]) for copy in copies))
                    taken[case, temperature].append(verification(*copies[0], case[3]))
                for shape in SHAPES:
                    forward = partial(score, made[shape, "samples"][0][1])
                    taken[shape, temperature].append(seconds(forward))
        found += lines(spec, tokens, taken)
    return {"target": DEMO_TARGET, "cases": found}


def lines(draft: str, tokens: Any, taken: Any) -> Iterator[dict[str, Any]]:
    """Accepted tokens of each case by temperature, and tokens per second over those of the shape's first case."""
    speeds: dict[Any, float] = {}
    for case in CASES:
        shape, name, _, mode = case
        found = {}
        for temperature in TEMPERATURES:
            mean = statistics.mean(tokens[case, temperature])
            cost = sum(statistics.median(taken[each, temperature]) for each in (case, shape))
            speed = (1.0 + mean) / cost
            found[f"{temperature:g}"] = (mean, speed / speeds.setdefault((shape, temperature), speed))
        yield {"draft": draft, "name": f"{shape}: {name} (`{mode}`)", "temperatures": found}


if __name__ == "__main__":
    asked = options(__doc__, prompts=len(TEXTS), limit=2)
    asked.add_argument("--draft", action="append", help="repeatable; default: noisy:0.5, noisy:1, first-layers:28")
    run(asked, measure)
