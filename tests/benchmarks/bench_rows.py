"""Products of a few rows against torch's, a step with and without them, and rows of a tree against plain decoding.

    python tests/benchmarks/bench_rows.py [--target smollm2-135m-instruct] [--json FILE]
    PRECEDENT_CPU_KERNELS=avx2 python tests/benchmarks/bench_rows.py    # as a processor with AVX2 alone, or avx512

Both sides alternate in one process; medians. For our products also the share of what the processor could multiply if
all numbers were in registers (`processor_peak`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from measurement import Measurement, json_option
from processor_peak import peak
from torch import Tensor
from torch.nn.functional import linear

from precedent.target import TargetModel
from precedent.target.cpu.linear import PackedLinear
from precedent.target.cpu.row_products import row_product
from precedent.target.load.loading import load_target
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder, chain

SHAPES = ((1536, 576), (576, 1536), (49152, 576), (5632, 2048), (2048, 5632))
WIDTHS = (1, 2, 4, 8, 16, 32)
STEP_WIDTHS = (*WIDTHS, 48)
STAGES = ("copies", "products", "layers", "together")
COPIES = 20
"""Weights of one shape that take turns, so that none stays in the processor's cache, as in a model."""


def main() -> None:
    """Print all three, and write the figures as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", default="smollm2-135m-instruct")
    json_option(options)
    given = options.parse_args()
    measurement = Measurement()
    print(f"{torch.get_num_threads()} threads")
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "products": products()}
    model, tokenizer = load_target(given.target)
    target = TargetModel(model)
    prompt = tokenizer("The order desk of a shop answers. " * 80)["input_ids"]
    found |= {"prompt_tokens": len(prompt), "steps": steps(target, prompt)}
    found["equal_rows"] = equal_rows(target, prompt)
    measurement.write(given.json, found)


def products() -> list[dict[str, Any]]:
    """Microseconds of bfloat16 products: plain, packed in float32, ours."""
    found: list[dict[str, Any]] = []
    most = peak() * torch.get_num_threads()
    print(f"at most {most / 1e9:.0f} billion multiplications a second")
    print("out x in        rows     plain    packed      ours   of the peak")
    for outs, length in SHAPES:
        weights = [torch.randn(outs, length).bfloat16() for _ in range(COPIES if outs < 10_000 else 1)]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight.float(), 8) for weight in weights]
        for rows in WIDTHS:
            ways = ways_to_multiply(torch.randn(rows, length).bfloat16(), weights, packed)
            times = [[seconds(partial(way, turn % len(weights))) for way in ways] for turn in range(40)]
            middle = [median(column) * 1e6 for column in zip(*times, strict=True)]
            share = rows * outs * length / (middle[-1] / 1e6 * most)
            print(f"{outs:5} x {length:4} {rows:8} " + "".join(f"{each:10.0f}" for each in middle) + f"{share:13.0%}")
            times_by_way = dict(zip(("plain_us", "packed_us", "ours_us"), middle, strict=True))
            found.append({"outs": outs, "length": length, "rows": rows, **times_by_way, "share_of_peak": share})
    return found


def ways_to_multiply(inputs: Tensor, weights: list[Tensor], packed: list[Tensor]) -> list[Callable[[int], Tensor]]:
    """The product of the inputs with weight number i, three times."""
    return [
        lambda i: linear(inputs, weights[i]),
        lambda i: torch.ops.mkldnn._linear_pointwise(inputs.float(), packed[i], None, "none", [], "").bfloat16(),
        lambda i: row_product(inputs, weights[i], None),
    ]


def steps(target: TargetModel, prompt: list[int]) -> dict[int, dict[str, float]]:
    """Milliseconds of a step by width: packed copies alone, products of few rows, layers in one piece, all together."""
    slot, ways, found = target.new_slot(), ways_to_step(target), {}
    target.prefill(slot, prompt)
    print("rows   copies alone   products   layers   together   and by together: copies   products   layers")
    for width in STEP_WIDTHS:
        tree, rounds = chain(list(range(100, 99 + width))) if width > 1 else EMPTY_TREE, []
        for _ in range(7):
            times = []
            for way in ways:
                way()
                times.append(min(seconds(partial(target.score, [(slot, tree)])) for _ in range(3)))
                target.discard(slot)
            rounds.append(times)
        middle = [median(column) * 1e3 for column in zip(*rounds, strict=True)]
        ratios = [median(times[way] / times[-1] for times in rounds) for way in range(3)]
        print(
            f"{width:4} {middle[0]:14.1f} {middle[1]:10.1f} {middle[2]:8.1f} {middle[3]:10.1f} "
            f"{ratios[0]:24.2f} {ratios[1]:10.2f} {ratios[2]:8.2f}"
        )
        found[width] = dict(zip(STAGES, middle, strict=True))
    return found


def ways_to_step(target: TargetModel) -> list[Callable[[], None]]:
    """What switches the model to each of the four."""
    products = [module for module in target.model.modules() if isinstance(module, PackedLinear)]
    few_rows = [linear.few_rows for linear in products]
    layers = [(module, type(module)) for module in target.model.modules() if hasattr(module, "fused")]
    runner = target.runner
    all_layers = runner.all_layers

    def switch(by_rows: bool, pieces: bool, together: bool) -> None:
        for product, rows in zip(products, few_rows, strict=True):
            product.few_rows = rows if by_rows else 0
        for layer, fused in layers:
            layer.__class__ = fused if pieces else fused.__mro__[1]
        runner.all_layers = all_layers if together else None

    stages = ((False, False, False), (True, False, False), (True, True, False), (True, True, True))
    return [partial(switch, *stage) for stage in stages]


def equal_rows(target: TargetModel, prompt: list[int]) -> list[int]:
    """How many rows of a tree equal the logits of plain decoding along their path, to the last bit."""
    tree, slot = random_tree(15), target.new_slot()
    target.prefill(slot, prompt)
    rows = target.score([(slot, tree)])[0].clone()
    target.discard(slot)
    length, pending, equal = len(slot.token_ids), slot.pending, 0
    for node in range(len(tree)):
        for token in tree.tokens_to(node):
            target.plain_step(slot)
            target.commit(slot, EMPTY_TREE, (), token)
        equal += torch.equal(target.plain_step(slot)[0], rows[node + 1])
        target.discard(slot)
        target.rewind(slot, length)
        slot.pending = pending
    print(f"{equal} of {len(tree)} rows equal plain decoding to the last bit")
    return [equal, len(tree)]


def random_tree(num_nodes: int) -> CandidateTree:
    """A tree of points."""
    choice, builder, nodes = random.Random(3), TreeBuilder(), [ROOT]
    for _ in range(num_nodes):
        nodes.append(builder.add_fixed(choice.choice(nodes), choice.randrange(9000), "test"))
    return builder.build()


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    started = perf_counter()
    action()
    return perf_counter() - started


if __name__ == "__main__":
    with torch.inference_mode():
        main()
