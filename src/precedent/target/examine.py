"""Examines a model at load: what its layers store, and whether a scored tree equals plain forwards.

An architecture may keep state between tokens, ignore masks or positions, or mix rows, and no config says so. So every
model scores one small tree when it is loaded, and a model that gets it wrong is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.target.kv.cache import KVCache
from precedent.target.kv.layer_kinds import MISFITS
from precedent.target.kv.rows import chain_rows, tree_rows
from precedent.target.kv.shape import KVShape, ShapeObserver
from precedent.target.runner import Runner, use_tree_attention
from precedent.tree import ROOT, TreeBuilder

TEXT = (0, 1, 1, 0, 1)
"""Token ids of the examination, valid in any vocabulary: two prompt tokens, the pending one, two of a path."""

SIBLING = 1
"""A node between the pending token and the path, which the path must not see."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Accepted relative difference between a scored tree and plain forwards; wrong masks or positions give about 1."""

LOW_PRECISION = 0.25
"""The same for bfloat16, float16 and quantised weights. A larger difference is logged: it may still be rounding."""

SURELY_WRONG = 0.5
"""A larger difference is not rounding in any precision, not even for a token that was routed to another expert."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Examined(NamedTuple):
    """What the rest of the library needs to know of a model."""

    runner: Runner
    kv_shape: KVShape
    vocab_size: int


@torch.inference_mode()
def examine(model: PreTrainedModel) -> Examined:
    """Observe a model and choose how to run it. Raises UnsupportedError, naming it, when a tree cannot be scored."""
    runners = [Runner(model, packed=packed) for packed in ((True, False) if use_tree_attention(model) else (False,))]
    shape, expected = attempt(model, lambda: observe(runners[-1]))
    for runner in runners[:-1]:
        try:
            error = tree_error(runner, lambda: KVCache(shape), expected)
            if error <= tolerance(model):
                return Examined(runner, shape, expected.shape[-1])
            log.warning("%s scores one sequence at a time: a batch is %.2g off", type(model).__name__, error)
        except torch.OutOfMemoryError:
            raise
        except MISFITS as misfit:
            log.debug("%s scores one sequence at a time: %r", type(model).__name__, misfit)
    check_error(model, attempt(model, lambda: tree_error(runners[-1], lambda: KVCache(shape), expected)))
    return Examined(runners[-1], shape, expected.shape[-1])


def check_error(model: PreTrainedModel, error: float) -> None:
    """Raise UnsupportedError if a scored tree is further off plain forwards than rounding; log what may be rounding."""
    accepted = tolerance(model)
    if error > (SURELY_WRONG if accepted == LOW_PRECISION else accepted):
        raise _unfit(model, f"a scored tree is {error:.2g} off")
    if error > accepted:
        log.warning("%s: a scored tree is %.2g off plain forwards; try it in float32", type(model).__name__, error)


def attempt(model: PreTrainedModel, action: Callable[[], Result]) -> Result:
    """Run an action; any error other than out of memory means that this model is not supported."""
    try:
        return action()
    except torch.OutOfMemoryError:
        raise
    except MISFITS as misfit:
        raise _unfit(model, f"{type(misfit).__name__}: {misfit}".splitlines()[0]) from misfit


def _unfit(model: PreTrainedModel, reason: str) -> UnsupportedError:
    name = model.config.get_text_config().model_type
    return UnsupportedError(f"{name} cannot be the target: its forward pass cannot score candidate trees ({reason})")


def observe(runner: Runner) -> tuple[KVShape, Tensor]:
    """What a forward stores in each layer, and the logits of `TEXT`, `[tokens, vocab_size]`."""
    observer = ShapeObserver(int(runner.model.config.get_text_config().num_hidden_layers))
    token_ids = torch.tensor([TEXT], device=runner.device)
    logits: Tensor = runner.model(input_ids=token_ids, past_key_values=observer, use_cache=True).logits
    if not any(observer.shape.layers):
        raise ValueError("no layer uses the KV cache")
    return observer.shape, logits[0]


def tree_error(runner: Runner, new_kv: Callable[[], KVCache], expected: Tensor) -> float:
    """Score `TEXT` beside another sequence and with a sibling in its way; returns the largest relative difference."""
    long, short = new_kv(), new_kv()
    runner.logits([chain_rows(long, TEXT[:2]), chain_rows(short, TEXT[:1])])
    long.keep(range(2))
    short.keep(range(1))
    builder = TreeBuilder()
    builder.add_fixed(ROOT, SIBLING, "examination")
    node = builder.add_fixed(ROOT, TEXT[3], "examination")
    builder.add_fixed(node, TEXT[4], "examination")
    rows = tree_rows(long, TEXT[2], builder.build()), chain_rows(short, TEXT[1:3])
    scored, beside = runner.logits(rows)
    pairs = [*zip(scored[[0, 2, 3]], expected[2:], strict=True), *zip(beside, expected[1:3], strict=True)]
    return max(relative(*(row.float() for row in pair)) for pair in pairs)


def relative(found: Tensor, expected: Tensor) -> float:
    """Distance between two rows of logits relative to their spread; infinite where only one of them is finite."""
    found, finite = found.to(expected.device), expected.isfinite()  # ids that a draft model lacks have -inf
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    found, expected = found[finite], expected[finite]
    spread = (expected - expected.mean()).norm().clamp(min=torch.finfo(expected.dtype).tiny)
    return float((found - expected).norm() / spread)


def tolerance(model: PreTrainedModel) -> float:
    """The relative difference that rounding may cause in a correct forward of this model."""
    quantised = getattr(model.config, "quantization_config", None) is not None
    return LOW_PRECISION if quantised else TOLERANCE.get(model.dtype, LOW_PRECISION)
