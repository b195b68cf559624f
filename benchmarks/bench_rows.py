"""Row products against torch's, steps with and without them, and tree rows against plain decoding.

    python benchmarks/bench_rows.py [--target smollm2-135m-instruct] [--json FILE]
    PRECEDENT_CPU_KERNELS=avx2 python benchmarks/bench_rows.py    # as a processor with AVX2 alone, or avx512

All ways alternate in one process; medians.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.nn.functional import linear

from measuring import medians, options, run
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder, chain
from precedent_cpu.linear import PackedLinear
from precedent_cpu.row_products import row_product

SHAPES = ((1536, 576), (576, 1536), (49152, 576), (5632, 2048), (2048, 5632))
WIDTHS = (1, 2, 4, 8, 16, 32, 48)
STAGES = {
    "copies": (False, False, False),
    "products": (True, False, False),
    "layers": (True, True, False),
    "together": (True, True, True),
}
"""Packed weights only, then also row products, fused layers, and all layers in one call."""

COPIES = 20
"""Weights of one shape that take turns, so that none stays in the processor's cache, as in a model."""


@torch.inference_mode()
def measure(given: Namespace) -> dict[str, Any]:
    model, tokenizer = load_target(given.target)
    target, prompt = TargetModel(model), tokenizer("The order desk of a shop answers. " * 80)["input_ids"]
    return {
        "threads": torch.get_num_threads(),
        "products": [product(*shape, rows) for shape in SHAPES for rows in WIDTHS[:-1]],
        "prompt_tokens": len(prompt),
        "steps": steps(target, prompt),
        "equal_rows": equal_rows(target, prompt),
    }


def product(outs: int, length: int, rows: int) -> dict[str, Any]:
    """Microseconds of a bfloat16 product: torch's, packed in float32, ours."""
    inputs, turn = torch.randn(rows, length).bfloat16(), count()
    weights = [torch.randn(outs, length).bfloat16() for _ in range(COPIES if outs < 10_000 else 1)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight.float(), 8) for weight in weights]
    pointwise = torch.ops.mkldnn._linear_pointwise

    def following() -> int:
        return next(turn) // 3 % len(weights)

    ways: dict[str, Callable[[], object]] = {
        "plain_us": lambda: linear(inputs, weights[following()]),
        "packed_us": lambda: pointwise(inputs.float(), packed[following()], None, "none", [], "").bfloat16(),
        "ours_us": lambda: row_product(inputs, weights[following()], None),
    }
    return {"outs": outs, "length": length, "rows": rows, **medians(ways, 40, 1e6)}


def steps(target: TargetModel, prompt: list[int]) -> dict[int, dict[str, float]]:
    """Milliseconds of a step by number of rows, with more of our code from stage to stage."""
    slot, found = target.new_slot(), {}
    target.prefill(slot, prompt)
    switch = switches(target)

    def step(tree: CandidateTree) -> None:
        target.score([(slot, tree)])
        target.discard(slot)

    for width in WIDTHS:
        tree = chain(list(range(100, 99 + width))) if width > 1 else EMPTY_TREE
        ways: dict[str, Callable[[], object]] = {}
        for name, stage in STAGES.items():
            ways |= {f"switch {name}": partial(switch, *stage), f"first {name}": partial(step, tree)}
            ways[name] = partial(step, tree)
        times = medians(ways, 15)
        found[width] = {name: times[name] for name in STAGES}
    return found


def switches(target: TargetModel) -> Callable[[bool, bool, bool], None]:
    """Return a function that switches row products, fused layers and the single call of all layers on or off."""
    products = [module for module in target.model.modules() if isinstance(module, PackedLinear)]
    few_rows = [module.few_rows for module in products]
    layers = [(module, type(module)) for module in target.model.modules() if hasattr(module, "fused")]
    backends = target.runner.backends

    def switch(by_rows: bool, pieces: bool, together: bool) -> None:
        for module, rows in zip(products, few_rows, strict=True):
            module.few_rows = rows if by_rows else 0
        for layer, fused in layers:
            layer.__class__ = fused if pieces else fused.__mro__[1]
        target.runner.backends = backends if together else []

    return switch


def equal_rows(target: TargetModel, prompt: list[int]) -> list[int]:
    """Count the rows of a tree that equal plain decoding's logits to the last bit."""
    choice, builder, nodes, slot = random.Random(3), TreeBuilder(), [ROOT], target.new_slot()
    for _ in range(15):
        nodes.append(builder.add_fixed(choice.choice(nodes), choice.randrange(9000), "test"))
    tree = builder.build()
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
    return [equal, len(tree)]


if __name__ == "__main__":
    run(options(__doc__, target="smollm2-135m-instruct"), measure)
