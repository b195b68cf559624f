"""What each way of verifying is worth: accepted tokens and microseconds on real logits, and at a large vocabulary.

    python tests/benchmarks/bench_verify.py [--draft noisy:1 --draft first-layers:28] [--prompts 12] [--limit 2]
                                            [--temperature 0.7] [--json FILE] [--no-cost] [--threads N]

Target: the packaged SmolLM2-135M-Instruct. Drafts:
  first-layers:N  the target's own first N layers: a real draft model, and one that agrees poorly;
  noisy:S         the target's own logits with Gaussian noise of standard deviation S: no real draft model, but one that
                  agrees as well as good draft models do, so that the ways of verifying can be told apart;
  an id, a folder any causal LM with the same tokenizer.

For the rejection modes the accepted tokens of a tree are exact (its weights are known, no test is made); only texts
and candidates are sampled. Differences are taken place by place against the first line of the same shape, and their
intervals (95 %, Student's t) over texts, since places in one text are not independent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from measurement import Measurement, json_option
from scipy.stats import t as student
from torch import Tensor
from verify_cost import LARGE_VOCABULARY, measure_cost
from verify_trees import TEXTS, DraftModel, Made, NoisyTarget, Place, SmallModel, places

from precedent.config import SamplingParams
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.target import TargetModel
from precedent.target.load.loading import DEMO_TARGET, load_draft, load_target
from precedent.tree import ROOT, CandidateTree
from precedent.verify import RowWeights, prepare
from precedent.verify.recursion import Residual

TEMPERATURES = (0.3, 0.7, 1.0)
NOISY = "noisy:"
DRAFTS = ("noisy:0.5", "noisy:1", "first-layers:28")
SHAPES = {"chain": (1, 1, 1, 1, 1, 1), "tree": (3, 2, 1, 1)}


@dataclass(frozen=True)
class Case:
    """One line of the table: a shape, a kind of candidates, and the mode that verifies them."""

    shape: str
    name: str
    candidates: str
    mode: str


CASES = (
    Case("chain", "token verification", "samples", "topdown"),
    Case("chain", "block verification", "samples", "traversal"),
    Case("chain", "shared noise", "coupled", "coupled"),
    Case("tree", "with replacement, recursive rejection", "replaced", "topdown"),
    Case("tree", "with replacement, traversal", "replaced", "traversal"),
    Case("tree", "without replacement, recursive rejection", "samples", "topdown"),
    Case("tree", "without replacement, traversal", "samples", "traversal"),
    Case("tree", "top tokens as fixed candidates", "fixed", "traversal"),
    Case("tree", "greedy draft: top tokens and one sample", "greedy", "traversal"),
    Case("tree", "shared noise", "coupled", "coupled"),
)
FIRST = {case.shape: case for case in reversed(CASES)}


@dataclass
class Figures:
    """What was measured with one draft at one temperature: by case and text, one number for each place."""

    tokens: dict[Case, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    microseconds: dict[Case, list[float]] = field(default_factory=lambda: defaultdict(list))
    forward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    agreement: list[float] = field(default_factory=list)


def expected_accepted(weights: RowWeights, rows: TargetRows, node: int = ROOT, depth: int = 0) -> tuple[float, float]:
    """Chance of ending at or below `node` once verification gets there, and expected accepted tokens on that event."""
    total, survival = 0.0, 1.0
    tests = weights.tests(node)
    for ordinal, candidate in enumerate(tests):
        acceptance = weights.acceptance(node, ordinal)
        if acceptance > 0.0:
            chance, tokens = expected_accepted(weights, rows, candidate.child, depth + 1)
            if not weights.is_lazy(candidate.child):
                chance, tokens = acceptance, acceptance * tokens
            total, survival = total + survival * tokens, survival * (1.0 - chance)
    end = 1.0 if node == ROOT or not weights.is_lazy(node) else weights.remaining(node)
    total += survival * end * (depth + _expected_descent(weights, rows, node))
    return 1.0 - survival * (1.0 - end), total


def _expected_descent(weights: RowWeights, rows: TargetRows, node: int) -> float:
    """Expected further tokens once the next one is sampled from the residual at `node`."""
    children, tests = weights.fixed_children(node), weights.tests(node)
    if not children:
        return 0.0
    residual = weights.state(node, len(tests)).residual if tests else Residual(rows.probs(node))
    return sum(
        residual.prob(token) * (1.0 + _expected_descent(weights, rows, child)) for token, child in children.items()
    )


def accepted_tokens(params: SamplingParams, tree: CandidateTree, logits: Tensor, mode: str) -> float:
    """Accepted tokens of one tree: exact for rejection modes, one sample for shared noise."""
    rows = TargetRows(logits, tree, params)
    if mode == "coupled":
        return prepare(tree, rows, mode)(CounterRng(0, 0)).num_accepted
    return expected_accepted(RowWeights(tree, rows.probs, lazy=mode == "traversal"), rows)[1]


def microseconds(params: SamplingParams, tree: CandidateTree, logits: Tensor, mode: str) -> float:
    """One verification from logits to verdict, the softmax of the visited rows included; the median of three."""

    def once(number: int) -> float:
        started = perf_counter()
        prepare(tree, TargetRows(logits, tree, params), mode)(CounterRng(7, number))
        return (perf_counter() - started) * 1e6

    return statistics.median(once(number) for number in range(3))


def measure_place(place: Place, text: int, temperature: float, found: Figures) -> None:
    """Every case at one place."""
    found.agreement.append(place.agreement(temperature))
    made: dict[tuple[str, str], Made] = {}
    for case in CASES:
        key = (case.shape, case.candidates)
        if key not in made:
            made[key] = place.trees(SHAPES[case.shape], case.candidates, temperature)
        copies = made[key]
        found.tokens[case][text].append(statistics.mean(accepted_tokens(*copy, case.mode) for copy in copies))
        found.microseconds[case].append(microseconds(*copies[0], case.mode))
    for shape in SHAPES:
        started = perf_counter()
        place.score(made[shape, "samples"][0][1])
        found.forward[shape].append((perf_counter() - started) * 1e6)


def interval(by_text: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean over texts, and half the width of its 95 % interval (infinite for a single text)."""
    means = [statistics.mean(values) for values in by_text]
    if len(means) < 2:
        return means[0], float("inf")
    error = statistics.stdev(means) / len(means) ** 0.5
    return statistics.mean(means), float(student.ppf(0.975, len(means) - 1)) * error


def lines_of(found: Figures, draft: str, temperature: float) -> list[dict[str, object]]:
    """One record per case; `speed` is tokens per second of target forward and verification, over the first line's."""
    lines: list[dict[str, object]] = []
    speeds: dict[str, float] = {}
    for case in CASES:
        tokens, first = found.tokens[case], found.tokens[FIRST[case.shape]]
        mean, half = interval(list(tokens.values()))
        gains = [[a - b for a, b in zip(tokens[text], first[text], strict=True)] for text in tokens]
        gain, gain_half = interval(gains)
        cost, forward = statistics.median(found.microseconds[case]), statistics.median(found.forward[case.shape])
        speed = (1.0 + mean) / (forward + cost)
        lines.append(
            {
                "draft": draft,
                "temperature": temperature,
                "agreement": statistics.mean(found.agreement),
                "shape": case.shape,
                "name": case.name,
                "mode": case.mode,
                "candidates": case.candidates,
                "accepted_tokens": mean,
                "accepted_tokens_half_width": half,
                "gain": gain,
                "gain_half_width": gain_half,
                "gain_is_real": case != FIRST[case.shape] and abs(gain) > gain_half,
                "microseconds": cost,
                "forward_microseconds": forward,
                "speed": speed / speeds.setdefault(case.shape, speed),
                "places": sum(map(len, tokens.values())),
                "texts": len(tokens),
            }
        )
    return lines


def show(lines: list[dict[str, object]]) -> None:
    """Print the table of one draft at one temperature."""
    first = lines[0]
    print(
        f"\ndraft {first['draft']} ({_nature(str(first['draft']))}), temperature {first['temperature']}: "
        f"a single sample is accepted with {first['agreement']:.2f}; {first['places']} places in {first['texts']} texts"
    )
    print(f"{'':53s}{'accepted tokens':>18s}{'against first line':>21s}{'':6s}{'us':>7s}{'speed':>8s}")
    for line in lines:
        name = f"{line['shape']}: {line['name']}"
        tokens = f"{line['accepted_tokens']:.3f} +- {line['accepted_tokens_half_width']:.3f}"
        is_first = line["name"] == FIRST[str(line["shape"])].name
        gain = "" if is_first else f"{line['gain']:+.3f} +- {line['gain_half_width']:.3f}"
        mark = "real" if line["gain_is_real"] else ""
        print(f"{name:53s}{tokens:>18s}{gain:>21s}{mark:>6s}{line['microseconds']:7.0f}{line['speed']:8.3f}")


def by_case(lines: Sequence[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Each draft, shape and mode with what it accepts, and how fast, at each temperature."""
    cases = dict.fromkeys((line["draft"], line["shape"], line["name"], line["mode"]) for line in lines)
    for case in cases:
        same = [line for line in lines if (line["draft"], line["shape"], line["name"], line["mode"]) == case]
        found = {f"{line['temperature']:g}": (line["accepted_tokens"], line["speed"]) for line in same}
        yield {"draft": case[0], "name": f"{case[1]}: {case[2]} (`{case[3]}`)", "temperatures": found}


def _nature(draft: str) -> str:
    if draft.startswith(NOISY):
        return "no real model: the target's logits with noise"
    return "the target's own first layers" if draft.startswith("first-layers") else "a model of its own"


def show_cost(costs: list[dict[str, object]]) -> None:
    """Print what verification costs at a large vocabulary."""
    print(f"\nmilliseconds from logits to verdict, 64 nodes, vocabulary {LARGE_VOCABULARY}")
    for cost in costs:
        place = f"{cost['device']}, {cost['samples']:2d} samples, {64 - int(str(cost['samples'])):2d} fixed"
        print(f"{place:30s}{cost['way']!s:12s}{cost['mode']!s:12s}{cost['milliseconds']:8.2f}")


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """All tables on real logits, each printed when it is complete."""
    model, tokenizer = load_target(DEMO_TARGET, device="cpu")
    target = TargetModel(model)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    lines: list[dict[str, object]] = []
    for spec in arguments.draft or DRAFTS:
        draft: DraftModel
        if spec.startswith(NOISY):
            draft = NoisyTarget(target, float(spec.removeprefix(NOISY)))
        else:
            draft = SmallModel(TargetModel(load_draft(spec, model, tokenizer)))
        found = {temperature: Figures() for temperature in arguments.temperature or TEMPERATURES}
        started, total = perf_counter(), arguments.prompts * arguments.limit
        for number, (text, slot, context) in enumerate(places(target, encode, arguments.prompts, arguments.limit)):
            place = Place(target, slot, draft, context, number)
            for temperature, figures in found.items():
                measure_place(place, text, temperature, figures)
            left = (perf_counter() - started) / (number + 1) * (total - number - 1)
            print(f"\r{spec}: place {number + 1} of {total}, {left:4.0f} s left ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        for temperature, figures in found.items():
            table = lines_of(figures, spec, temperature)
            show(table)
            lines += table
    return lines


def main() -> None:
    """Measure, print, and write the JSON file if one was named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="append", help=f"repeatable; default: {', '.join(DRAFTS)}")
    parser.add_argument("--prompts", type=int, default=len(TEXTS), help=f"texts, at most {len(TEXTS)}")
    parser.add_argument("--limit", type=int, default=2, help="places in each text")
    parser.add_argument("--temperature", type=float, action="append", help="repeatable; default: 0.3, 0.7, 1.0")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--no-cost", action="store_true", help="leave out the cost at a large vocabulary")
    json_option(parser)
    arguments = parser.parse_args()
    if not 1 <= arguments.prompts <= len(TEXTS) or arguments.limit < 1:
        parser.error(f"--prompts must lie between 1 and {len(TEXTS)}, --limit must be 1 or more")
    if any(temperature <= 0.0 for temperature in arguments.temperature or ()):
        parser.error("--temperature must be above 0: at 0 every mode is an exact match")
    torch.set_num_threads(arguments.threads)
    measurement = Measurement()
    with torch.inference_mode():
        lines = measure(arguments)
        costs = [] if arguments.no_cost else measure_cost()
    if costs:
        show_cost(costs)
    found = {"target": DEMO_TARGET, "modes": lines, "cases": list(by_case(lines)), "cost": costs}
    measurement.write(arguments.json, found)


if __name__ == "__main__":
    main()
